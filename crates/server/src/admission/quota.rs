//! Quotas: what each team may use, and what it uses.
//!
//! All of it is in memory: a check needs no query. What a sandbox needs is reserved before any part of it is created,
//! so a burst cannot exceed a limit, and is released when nothing of it is left, by dropping the [`Reservation`]. After
//! a restart, adopted sandboxes are counted again, even beyond a limit that was lowered meanwhile.
//!
//! Limits are configured by the name of a team; the name of a team is queried once, when the team first appears.

use std::collections::HashMap;
use std::sync::Arc;

use model::id::TeamId;
use model::lifecycle::Kept;
use parking_lot::{Mutex, RwLock};
use store::Store;
use store::error::StoreError;
use store::sandboxes::{PausedMost, PausedUse, TeamMost, TeamShare, TeamUse};
use store::servers::UseElsewhere;

use super::rate::Bucket;
use crate::settings::{Limits, TeamLimits};

/// What paused sandboxes are called in messages.
pub(crate) const PAUSED: &str = "paused sandboxes";
/// Name of the limit on the disks of paused sandboxes, in messages.
pub(crate) const PAUSED_DISK: &str = "MiB of disks of paused sandboxes";
const MIB: u64 = 1 << 20;

/// The limits and the use of one team.
#[derive(Debug)]
pub(crate) struct TeamQuota {
    /// The limits.
    pub(crate) limits: TeamLimits,
    /// Rate limit of requests to the API, if there is one.
    pub(crate) requests: Option<Bucket>,
    /// Rate limit of create requests, if there is one.
    pub(crate) creates: Option<Bucket>,
    used: Mutex<ResourceUse>,
    /// What the team uses on nodes of other servers, as they have stored it. It is locked after `used`, if both are.
    elsewhere: Mutex<ResourceUse>,
}

/// What sandboxes use in total, or what one of them needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ResourceUse {
    /// Number of sandboxes.
    pub(crate) sandboxes: u64,
    /// Cores.
    pub(crate) cpu_count: u64,
    /// Memory, in MiB.
    pub(crate) memory_mb: u64,
    /// Number of paused sandboxes.
    pub(crate) paused: u64,
    /// Space that paused sandboxes take on disks, in MiB.
    pub(crate) paused_disk_mb: u64,
}

impl ResourceUse {
    /// The share of one sandbox of this size.
    pub(crate) fn one_sandbox(cpu_count: u32, memory_mb: u32) -> Self {
        Self {
            sandboxes: 1,
            cpu_count: cpu_count.into(),
            memory_mb: memory_mb.into(),
            paused: 0,
            paused_disk_mb: 0,
        }
    }

    /// What one more paused sandbox takes at least.
    pub(crate) const ONE_PAUSED: Self = Self {
        sandboxes: 0,
        cpu_count: 0,
        memory_mb: 0,
        paused: 1,
        paused_disk_mb: 1,
    };

    /// The share of a sandbox while it is paused with these files. Its processes are not counted, but those that are
    /// kept in memory keep that.
    pub(crate) fn paused(self, kept: Kept, disk_bytes: u64) -> Self {
        Self {
            sandboxes: 0,
            cpu_count: 0,
            memory_mb: match kept {
                Kept::Memory => self.memory_mb,
                Kept::Checkpoint | Kept::Filesystem => 0,
            },
            paused: self.sandboxes,
            paused_disk_mb: disk_bytes.div_ceil(MIB),
        }
    }

    /// The share of one sandbox, as the database compares it.
    pub(crate) fn of_team(self) -> TeamShare {
        let number = |share: u64| u32::try_from(share).unwrap_or(u32::MAX);
        TeamShare {
            cpu_count: number(self.cpu_count),
            memory_mb: number(self.memory_mb),
        }
    }
}

impl From<TeamUse> for ResourceUse {
    fn from(used: TeamUse) -> Self {
        Self {
            sandboxes: used.sandboxes,
            cpu_count: used.cpu_count,
            memory_mb: used.memory_mb,
            ..Self::default()
        }
    }
}

impl From<PausedUse> for ResourceUse {
    fn from(used: PausedUse) -> Self {
        Self {
            paused: used.sandboxes,
            paused_disk_mb: used.disk_mb,
            ..Self::default()
        }
    }
}

/// A limit that a create request would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the team may use {limit} {resource}, it uses {used}, and this sandbox needs {requested}")]
pub(crate) struct OverQuota {
    /// The setting.
    pub(crate) key: &'static str,
    /// What is limited, with its unit.
    pub(crate) resource: &'static str,
    /// The limit.
    pub(crate) limit: u32,
    /// What the team uses now.
    pub(crate) used: u64,
    /// What the sandbox needs.
    pub(crate) requested: u64,
}

impl OverQuota {
    /// Whether the team may use some of the resource at all.
    pub(crate) fn is_soft(&self) -> bool {
        self.limit > 0
    }
}

/// A lifetime that a sandbox cannot have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidLifetime {
    #[error("timeout must be greater than {}", least_s - 1)]
    TooShort { least_s: u32 },
    #[error("timeout cannot be greater than {} hours", f64::from(*longest_s) / 3600.0)]
    TooLong { longest_s: u32 },
}

/// What one sandbox takes of its team's quota, until this is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    team: Arc<TeamQuota>,
    share: Mutex<ResourceUse>,
}

impl TeamQuota {
    fn new(limits: TeamLimits) -> Self {
        Self {
            requests: limits.requests_per_second.map(|size| Bucket::new(size, 1)),
            creates: limits.creates_per_minute.map(|size| Bucket::new(size, 60)),
            used: Mutex::default(),
            elsewhere: Mutex::default(),
            limits,
        }
    }

    /// The seconds that a sandbox is to live from now on, of which a request must ask for at least `least_s`.
    pub(crate) fn lifetime(&self, seconds: u32, least_s: u32) -> Result<u32, InvalidLifetime> {
        let longest_s = self.limits.max_lifetime_s;
        if seconds < least_s {
            return Err(InvalidLifetime::TooShort { least_s });
        }
        if seconds > longest_s {
            return Err(InvalidLifetime::TooLong { longest_s });
        }
        Ok(seconds)
    }

    /// What the team uses now.
    pub(crate) fn used(&self) -> ResourceUse {
        let mut used = *self.used.lock();
        used.add(*self.elsewhere.lock());
        used
    }

    /// The limits that a sandbox must not exceed together with all that run, if there are any.
    pub(crate) fn most(&self) -> Option<TeamMost> {
        let most = TeamMost {
            sandboxes: self.limits.sandboxes,
            cpu_count: self.limits.cpu_count,
            memory_mb: self.limits.memory_mb,
        };
        (most != TeamMost::default()).then_some(most)
    }

    /// The limits that a paused sandbox must not exceed together with all that are.
    pub(crate) fn most_paused(&self) -> PausedMost {
        PausedMost {
            sandboxes: self.limits.paused_sandboxes,
            disk_mb: self.limits.paused_disk_mb,
        }
    }

    /// The limit that a sandbox exceeds, of which others had room here, and not beside what is stored.
    pub(crate) fn over_by(&self, stored: impl Into<ResourceUse>, share: ResourceUse) -> OverQuota {
        let stored = stored.into();
        match compare(&self.limits, stored, share) {
            Err(over) => over,
            // It fits by now.
            Ok(()) if share.paused > 0 => OverQuota {
                key: "limits.paused_sandboxes",
                resource: PAUSED,
                limit: self.limits.paused_sandboxes,
                used: stored.paused,
                requested: share.paused,
            },
            Ok(()) => OverQuota {
                key: "limits.sandboxes",
                resource: "concurrent sandboxes",
                limit: self.limits.sandboxes.unwrap_or(u32::MAX),
                used: stored.sandboxes,
                requested: share.sandboxes,
            },
        }
    }

    /// Reserves `share` if that exceeds no limit.
    pub(crate) fn reserve(self: &Arc<Self>, share: ResourceUse) -> Result<Reservation, OverQuota> {
        let mut used = self.used.lock();
        self.check(*used, share)?;
        used.add(share);
        drop(used);
        Ok(self.reservation(share))
    }

    /// Whether `share` fits beside what is used here and elsewhere. What is not needed is not compared: a limit may have been
    /// lowered.
    fn check(&self, mut used: ResourceUse, share: ResourceUse) -> Result<(), OverQuota> {
        used.add(*self.elsewhere.lock());
        compare(&self.limits, used, share)
    }

    /// Whether a new sandbox may be promised to be paused at its deadline: while a limit is reached, it would be one more
    /// beyond it. Where there are to be no paused sandboxes at all, it ends at its deadline.
    pub(crate) fn check_auto_pause(&self) -> Result<(), OverQuota> {
        let used = *self.used.lock();
        match self.check(used, ResourceUse::ONE_PAUSED) {
            Err(over) if over.is_soft() => Err(over),
            _ => Ok(()),
        }
    }

    /// Whether there may be paused sandboxes at all.
    pub(crate) fn keeps_paused(&self) -> bool {
        compare(&self.limits, ResourceUse::default(), ResourceUse::ONE_PAUSED)
            .err()
            .is_none_or(|over| over.is_soft())
    }

    /// Reserves `share` regardless of the limits: for a sandbox that is running already.
    pub(crate) fn occupy(self: &Arc<Self>, share: ResourceUse) -> Reservation {
        self.used.lock().add(share);
        self.reservation(share)
    }

    fn reservation(self: &Arc<Self>, share: ResourceUse) -> Reservation {
        Reservation {
            team: Arc::clone(self),
            share: Mutex::new(share),
        }
    }
}

/// Whether `share` fits beside what is used.
fn compare(limits: &TeamLimits, used: ResourceUse, share: ResourceUse) -> Result<(), OverQuota> {
    #[rustfmt::skip]
    let table = [
        ("limits.sandboxes", "concurrent sandboxes", limits.sandboxes, used.sandboxes, share.sandboxes),
        ("limits.cpu_count", "cores", limits.cpu_count, used.cpu_count, share.cpu_count),
        ("limits.memory_mb", "MiB of memory", limits.memory_mb, used.memory_mb, share.memory_mb),
        ("limits.paused_sandboxes", PAUSED, Some(limits.paused_sandboxes), used.paused, share.paused),
        ("limits.paused_disk_mb", PAUSED_DISK, limits.paused_disk_mb, used.paused_disk_mb, share.paused_disk_mb),
    ];
    for (key, resource, limit, used, requested) in table {
        if let Some(limit) = limit
            && requested > 0
            && used + requested > u64::from(limit)
        {
            return Err(OverQuota {
                key,
                resource,
                limit,
                used,
                requested,
            });
        }
    }
    Ok(())
}

impl Reservation {
    /// Reserves `share` instead, if what it has more exceeds no limit.
    pub(crate) fn exchange(&self, share: ResourceUse) -> Result<(), OverQuota> {
        let mut own = self.share.lock();
        let mut used = self.team.used.lock();
        let mut others = *used;
        others.subtract(*own);
        self.team.check(*used, share.beyond(*own))?;
        others.add(share);
        *used = others;
        *own = share;
        Ok(())
    }

    /// Changes the reserved share regardless of the limits.
    pub(crate) fn force(&self, share: ResourceUse) {
        let mut own = self.share.lock();
        let mut used = self.team.used.lock();
        used.subtract(*own);
        used.add(share);
        *own = share;
    }
}

impl ResourceUse {
    /// Adds sandboxes that are on nodes of other servers.
    pub(super) fn add_elsewhere(&mut self, part: &UseElsewhere) {
        let mut share = Self {
            sandboxes: part.count,
            cpu_count: part.cpu_count,
            memory_mb: part.memory_mb,
            paused: 0,
            paused_disk_mb: 0,
        };
        if part.is_paused {
            share = share.paused(
                part.kept.unwrap_or(Kept::Filesystem),
                part.paused_disk_mb.saturating_mul(MIB),
            );
        }
        self.add(share);
    }

    fn add(&mut self, share: Self) {
        self.sandboxes += share.sandboxes;
        self.cpu_count += share.cpu_count;
        self.memory_mb += share.memory_mb;
        self.paused += share.paused;
        self.paused_disk_mb += share.paused_disk_mb;
    }

    /// By how much a use exceeds another one.
    pub(crate) fn beyond(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_sub(other.sandboxes),
            cpu_count: self.cpu_count.saturating_sub(other.cpu_count),
            memory_mb: self.memory_mb.saturating_sub(other.memory_mb),
            paused: self.paused.saturating_sub(other.paused),
            paused_disk_mb: self.paused_disk_mb.saturating_sub(other.paused_disk_mb),
        }
    }

    fn subtract(&mut self, share: Self) {
        self.sandboxes -= share.sandboxes;
        self.cpu_count -= share.cpu_count;
        self.memory_mb -= share.memory_mb;
        self.paused -= share.paused;
        self.paused_disk_mb -= share.paused_disk_mb;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.team.used.lock().subtract(*self.share.lock());
    }
}

/// The quotas of every team that has appeared since the start.
#[derive(Debug)]
pub(crate) struct Quotas {
    limits: Limits,
    teams: RwLock<HashMap<TeamId, Arc<TeamQuota>>>,
}

impl Quotas {
    /// Creates the quotas with the operator's limits.
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            teams: RwLock::default(),
        }
    }

    /// The quota of a team.
    ///
    /// # Errors
    /// When the database fails. It is queried only the first time, and only if there are limits of single teams.
    pub(crate) async fn of(&self, store: &Store, id: &TeamId) -> Result<Arc<TeamQuota>, StoreError> {
        if let Some(team) = self.teams.read().get(id) {
            return Ok(Arc::clone(team));
        }
        let mut limits = self.limits.default;
        if !self.limits.teams.is_empty()
            && let Some(row) = store.team_by_id(id).await?
        {
            limits = self.limits.of(&row.name);
        }
        // An existing entry stays: it may have reservations.
        let mut teams = self.teams.write();
        let team = teams
            .entry(id.clone())
            .or_insert_with(|| Arc::new(TeamQuota::new(limits)));
        Ok(Arc::clone(team))
    }

    /// Notes what teams use on nodes of other servers. Those that are not named use nothing there.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn note_elsewhere(
        &self,
        store: &Store,
        mut uses: HashMap<TeamId, ResourceUse>,
    ) -> Result<(), StoreError> {
        for id in uses.keys() {
            self.of(store, id).await?;
        }
        for (id, team) in &*self.teams.read() {
            *team.elsewhere.lock() = uses.remove(id).unwrap_or_default();
        }
        Ok(())
    }

    /// Team names in the limits that no team has, most likely misspelt.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn unknown_names(&self, store: &Store) -> Result<Vec<String>, StoreError> {
        let mut unknown = Vec::new();
        for name in self.limits.teams.keys() {
            if store.team_by_name(name).await?.is_none() {
                unknown.push(name.clone());
            }
        }
        Ok(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn team(limits: TeamLimits) -> Arc<TeamQuota> {
        Arc::new(TeamQuota::new(limits))
    }

    #[test]
    fn limits_are_exact() {
        let none = TeamLimits::default();
        let share = ResourceUse::one_sandbox(2, 1024);
        for (limits, fit, resource) in [
            (
                TeamLimits {
                    sandboxes: Some(3),
                    ..none
                },
                3,
                "concurrent sandboxes",
            ),
            (
                TeamLimits {
                    cpu_count: Some(5),
                    ..none
                },
                2,
                "cores",
            ),
            (
                TeamLimits {
                    memory_mb: Some(4096),
                    ..none
                },
                4,
                "MiB of memory",
            ),
            (
                TeamLimits {
                    memory_mb: Some(4095),
                    ..none
                },
                3,
                "MiB of memory",
            ),
        ] {
            let team = team(limits);
            let mut held: Vec<_> = (0..fit)
                .map(|_| team.reserve(share).expect("within the limit"))
                .collect();
            let over = team.reserve(share).expect_err("over the limit");
            assert_eq!(over.resource, resource);
            held.pop();
            let again = team.reserve(share).expect("a share was released");
            drop((held, again));
            assert_eq!(*team.used.lock(), ResourceUse::default());
        }
    }

    #[test]
    fn use_is_counted_without_limits() {
        let team = team(TeamLimits::default());
        let held: Vec<_> = (0..1000)
            .map(|_| {
                team.reserve(ResourceUse::one_sandbox(u32::MAX, u32::MAX))
                    .expect("no limit")
            })
            .collect();
        assert_eq!(team.used.lock().sandboxes, 1000);
        drop(held);
        assert_eq!(*team.used.lock(), ResourceUse::default());
    }

    #[test]
    fn adopted_sandboxes_may_exceed_the_limit() {
        let team = team(TeamLimits {
            sandboxes: Some(1),
            ..TeamLimits::default()
        });
        let share = ResourceUse::one_sandbox(1, 1);
        let (first, second) = (team.occupy(share), team.occupy(share));
        drop(first);
        team.reserve(share).expect_err("one runs still");
        drop(second);
        team.reserve(share).expect("none does");
    }

    #[test]
    fn what_is_elsewhere_counts_too() {
        let team = team(TeamLimits {
            sandboxes: Some(3),
            ..TeamLimits::default()
        });
        let share = ResourceUse::one_sandbox(1, 1);
        *team.elsewhere.lock() = ResourceUse::one_sandbox(1, 1);
        let (first, _second) = (team.reserve(share).expect("room"), team.reserve(share).expect("room"));
        assert_eq!(team.reserve(share).expect_err("over the limit").used, 3);
        assert_eq!(team.used().sandboxes, 3);
        // One that goes on as it is needs nothing more.
        *team.elsewhere.lock() = ResourceUse::one_sandbox(5, 5);
        first.exchange(share).expect("the same share");
    }

    #[test]
    fn a_paused_sandbox_counts_as_paused_and_keeps_its_memory() {
        let team = team(TeamLimits {
            sandboxes: Some(1),
            memory_mb: Some(1536),
            paused_sandboxes: 1,
            ..TeamLimits::default()
        });
        let share = ResourceUse::one_sandbox(2, 512);
        let first = team.reserve(share).expect("within the limits");
        first
            .exchange(share.paused(Kept::Memory, 0))
            .expect("within the limits");
        let second = team.reserve(share).expect("the other one is paused");
        // Neither can be in the state of the other.
        let over = second
            .exchange(share.paused(Kept::Memory, 0))
            .expect_err("one is paused");
        assert_eq!((over.resource, over.limit, over.used), (PAUSED, 1, 1));
        let over = first.exchange(share).expect_err("one runs");
        assert_eq!((over.resource, over.limit, over.used), ("concurrent sandboxes", 1, 1));
        first.force(share);
        assert_eq!(team.used.lock().sandboxes, 2);
        first.force(share.paused(Kept::Memory, 0));
        drop(second);
        // The memory of the paused one is still taken.
        let over = team.reserve(ResourceUse::one_sandbox(2, 1025)).expect_err("too much");
        assert_eq!((over.resource, over.used), ("MiB of memory", 512));
        let exact = team.reserve(ResourceUse::one_sandbox(2, 1024)).expect("all of it");
        drop(exact);
        first.exchange(share).expect("none runs");
        drop(first);
        assert_eq!(*team.used.lock(), ResourceUse::default());
    }

    #[test]
    fn disks_of_paused_sandboxes_count_until_the_limit_is_reached() {
        let team = team(TeamLimits {
            memory_mb: Some(512),
            paused_disk_mb: Some(3),
            ..TeamLimits::default()
        });
        let share = ResourceUse::one_sandbox(2, 512);
        let first = team.reserve(share).expect("within the limits");
        // Without processes it takes no memory. What it takes of the disk is known only afterwards.
        first
            .exchange(share.paused(Kept::Filesystem, 1))
            .expect("within the limits");
        first.force(share.paused(Kept::Filesystem, (5 << 20) - 1));
        assert_eq!(team.used.lock().paused_disk_mb, 5);
        let over = team.check_auto_pause().expect_err("beyond the limit");
        assert_eq!((over.key, over.limit, over.used), ("limits.paused_disk_mb", 3, 5));
        let second = team.reserve(share).expect("the other one takes no memory");
        let over = second
            .exchange(share.paused(Kept::Filesystem, 1))
            .expect_err("beyond the limit");
        assert!(over.is_soft() && over.resource == PAUSED_DISK, "{over:?}");
        first.exchange(share).expect_err("the second has the memory");
        drop(second);
        first.exchange(share).expect("none runs");
        team.check_auto_pause().expect("none is paused");
        drop(first);
        assert_eq!(*team.used.lock(), ResourceUse::default());
    }

    #[test]
    fn where_none_may_be_paused_new_ones_are_not_refused() {
        let none = TeamLimits {
            paused_sandboxes: 0,
            ..TeamLimits::default()
        };
        team(none).check_auto_pause().expect("it ends at its deadline");
    }

    #[test]
    fn a_burst_does_not_exceed_the_limit() {
        let team = team(TeamLimits {
            sandboxes: Some(10),
            ..TeamLimits::default()
        });
        let held: Vec<Reservation> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        (0..10)
                            .filter_map(|_| team.reserve(ResourceUse::one_sandbox(1, 1)).ok())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        assert_eq!(held.len(), 10);
    }
}
