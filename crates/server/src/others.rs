//! The other servers of a service: several that work on one database, each with nodes of its own.
//!
//! A server says about once a second that it is there and what its nodes have left, and reads the same of the others and what
//! teams use on their nodes. Where a sandbox is, it asks the database once and then remembers ([`routes`]), until the server that
//! has it says otherwise, or does not answer.
//!
//! Nothing here decides who may change what: that is the lease of each node. A server that believes something old is told so by
//! the one that it asks, or changes nothing.

mod routes;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use link::{Address, Authority, ServerLink};
use model::id::{NodeId, OwnerId, SandboxId};
use model::lifecycle::State;
use parking_lot::{Mutex, RwLock};
use sha2::{Digest as _, Sha256};
use store::Store;
use store::error::StoreError;
use store::nodes::{Lease, NodeRows};
use store::servers::{ServedNodeRow, ServerRow};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::routes::{Known, Routes};
use crate::admission::AdmissionControl;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::lease::NodeLease;
use crate::nodes::Nodes;
use crate::nodes::room::{Room, Said};
use crate::peers::{Peer, PeerRates};
use crate::settings::ServersSettings;

/// Pause between two times that a server says that it is there, and looks who else is.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// Questions to the database at the same time about where sandboxes are, and how long a request waits for its turn.
const LOOKUPS: (usize, Duration) = (8, Duration::from_secs(1));
/// Burst and refill interval of the questions of one peer that found no sandbox: an id is not a credential.
const MISSES: (u32, Duration) = (120, Duration::from_millis(200));

/// Share of the time in which the database adds up what teams use on nodes of others, as a divisor, for each server; and the longest
/// pause between two times.
const USE_SHARE: u32 = 50;
const USE_PAUSE_MAX: Duration = Duration::from_secs(30);
/// The shortest pause after a reading that failed.
const USE_RETRY: Duration = Duration::from_secs(5);
/// Difference between the clocks of this host and the database that is logged.
const CLOCK_OFF: Duration = Duration::from_secs(2);

/// Why a server cannot work on its database together with others.
#[derive(Debug, thiserror::Error)]
pub enum OthersError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The database is a file.
    #[error(
        "nodes.address is for several servers, and those need PostgreSQL: set database_url, or leave nodes.address out"
    )]
    NeedsPostgres,
    /// The database is a file, and another server uses it.
    #[error(
        "another server, on {name}, works on this database, which is a file of SQLite: several servers need PostgreSQL \
         (database_url)"
    )]
    NotShared {
        /// The name of its host.
        name: String,
    },
    /// This server cannot be reached by the other one.
    #[error(
        "another server, on {name}, works on this database: set nodes.address to where it reaches the port of --nodes-listen \
         of this one, as https://<host>:<port>"
    )]
    NoAddress {
        /// The name of its host.
        name: String,
    },
    /// The other server cannot be reached by this one.
    #[error(
        "the server on {name}, which works on this database, has no nodes.address: set it there, and restart it first"
    )]
    OtherWithoutAddress {
        /// The name of its host.
        name: String,
    },
}

/// Where a sandbox is that is not in the registry of this server.
#[derive(Debug, Clone)]
pub(crate) enum Location {
    /// There is none, or this server has its node.
    Here,
    /// No server has its node, or that is not known.
    Away,
    /// On a node of this server.
    At(Arc<ServerLink>),
}

/// A server that is there.
#[derive(Debug, Clone)]
struct Other {
    link: Arc<ServerLink>,
    /// What its nodes have left; nothing if it has not said so.
    room: Room,
    /// Whether it has a node, as far as it says so.
    has_nodes: bool,
    /// Whether it says that one of them can start copies of sandboxes of others.
    takes_forks: bool,
}

/// The other servers.
#[derive(Debug)]
pub(crate) struct OtherServers {
    rows: NodeRows,
    owner: OwnerId,
    name: String,
    address: Address,
    authority: Arc<Authority>,
    now: fn() -> SystemTime,
    nodes: Arc<Nodes>,
    admission: Arc<AdmissionControl>,
    clock: Clock,
    /// The tasks of connections to others, and what ends them.
    tasks: (TaskTracker, CancellationToken),
    /// The servers that are there.
    present: RwLock<Vec<Other>>,
    links: Mutex<HashMap<NodeId, Arc<ServerLink>>>,
    routes: Mutex<Routes>,
    lookups: Semaphore,
    misses: PeerRates,
    /// When it is read again what teams use on nodes of others.
    use_due: Mutex<Instant>,
    /// Whether the clock of this host differs from that of the database.
    is_clock_off: AtomicBool,
}

impl OtherServers {
    /// Checks that the server with this lease can work on its database together with those that are there, and says that it is.
    /// None if it works alone, because others could not reach it.
    ///
    /// # Errors
    /// When it cannot.
    pub(crate) async fn register(
        lease: &NodeLease,
        settings: ServersSettings,
        nodes: Arc<Nodes>,
        admission: Arc<AdmissionControl>,
        clock: Clock,
        tasks: (TaskTracker, CancellationToken),
    ) -> Result<Option<Arc<Self>>, OthersError> {
        let rows = lease.rows().clone();
        let store = rows.store();
        if settings.address.is_some() && !settings.can_share {
            return Err(OthersError::NeedsPostgres);
        }
        let text = settings.address.as_ref().map(Address::to_string);
        // Before the others are looked at: of two that start at the same time, at least one sees the other.
        let now_us = store.lease_time_us(clock.now_us()).await?;
        rows.server_beat(&settings.name, text.as_deref(), None, now_us).await?;
        let listed = store.server_list().await?;
        let servers: HashSet<NodeId> = listed.iter().map(|server| server.id.clone()).collect();
        if servers.len() > 1 {
            // Nodes may have what belongs to builds of one that is gone, also if this one works alone now.
            nodes.note_servers(servers);
        }
        for other in listed {
            if other.id == *rows.node() || !is_present(&other, now_us) {
                continue;
            }
            let name = other.name;
            if !settings.can_share {
                return Err(OthersError::NotShared { name });
            }
            if settings.address.is_none() {
                return Err(OthersError::NoAddress { name });
            }
            if other.address.is_none() {
                return Err(OthersError::OtherWithoutAddress { name });
            }
        }
        if settings.address.is_some() {
            nodes.note_can_be_joined();
        }
        Ok(settings.address.map(|address| {
            Arc::new(Self {
                rows,
                owner: lease.owner().clone(),
                name: settings.name,
                address,
                authority: settings.authority,
                now: settings.now,
                nodes,
                admission,
                clock,
                tasks,
                present: RwLock::default(),
                links: Mutex::default(),
                routes: Mutex::default(),
                lookups: Semaphore::new(LOOKUPS.0),
                misses: PeerRates::new(MISSES.0, MISSES.1),
                use_due: Mutex::new(Instant::now()),
                is_clock_off: AtomicBool::new(false),
            })
        }))
    }

    /// The owner of the leases of this server.
    pub(crate) fn owner(&self) -> &OwnerId {
        &self.owner
    }

    /// Whether another server is there.
    pub(crate) fn is_several(&self) -> bool {
        !self.present.read().is_empty()
    }

    /// The servers other than this one, and what they have said that they have left: those with most come first, then those that
    /// have nodes, then the others. All of that is old, so each may have room.
    pub(crate) fn best_first(&self) -> Vec<(Room, Arc<ServerLink>)> {
        let found = self.sorted().into_iter();
        found.map(|other| (other.room, other.link)).collect()
    }

    /// The servers that have said that they have room for copies of sandboxes of others, those with most first.
    pub(crate) fn with_room_for_forks(&self) -> Vec<Arc<ServerLink>> {
        let found = self.sorted().into_iter();
        let have_room = found.filter(|other| other.takes_forks && other.room.nodes > 0);
        have_room.map(|other| other.link).collect()
    }

    fn sorted(&self) -> Vec<Other> {
        let mut found: Vec<Other> = self.present.read().clone();
        let any = || self.nodes.any();
        found.sort_by_cached_key(|other| (other.room.nodes == 0, !other.has_nodes, other.room, any()));
        found
    }

    /// Whether another server was there when this one looked last.
    pub(crate) fn is_there(&self, server: &NodeId) -> bool {
        self.present.read().iter().any(|other| other.link.other() == server)
    }

    /// The server that builds a template, if that is another one: one of those that have nodes, if any has. All servers that know the
    /// same of each other say the same, so uploads, builds and what these have kept meet at one.
    pub(crate) fn home_of(&self, template: &str) -> Option<Arc<ServerLink>> {
        let present = self.present.read();
        let others = present.iter().map(|other| (other.link.other(), other.has_nodes));
        let own = (self.rows.node(), self.nodes.has_any());
        let home = build_home(others.chain([own]), template)?;
        let other = present.iter().find(|other| other.link.other() == home)?;
        Some(Arc::clone(&other.link))
    }

    /// The server that builds a template while this one has no node; none if no other one has any.
    pub(crate) fn home_with_nodes(&self, template: &str) -> Option<NodeId> {
        let present = self.present.read();
        let able = present.iter().filter(|other| other.has_nodes);
        home_among(able.map(|other| other.link.other()), template).cloned()
    }

    /// Where a sandbox is that is not in the registry. The database is asked if nobody has lately, on behalf of a client.
    pub(crate) async fn find(&self, id: &SandboxId, peer: Option<Peer>) -> Location {
        if !id.is_issued() {
            return Location::Here;
        }
        match self.routes.lock().find(id, Instant::now()) {
            Some(Known::Nowhere) => return Location::Here,
            Some(Known::Away) => return Location::Away,
            Some(Known::At(server)) => {
                if let Some(link) = self.links.lock().get(&server) {
                    return Location::At(Arc::clone(link));
                }
            }
            None => {}
        }
        let permit = match peer.map(|peer| self.misses.take(peer)) {
            None => None,
            Some(Ok(permit)) => Some(permit),
            Some(Err(_)) => return Location::Away,
        };
        let Ok(Ok(_turn)) = tokio::time::timeout(LOOKUPS.1, self.lookups.acquire()).await else {
            return Location::Away;
        };
        let found = match self.rows.store().sandbox_route(id).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(sandbox.id = %id, error = %Chain(&error), "cannot find the server of a sandbox");
                return Location::Away;
            }
        };
        let found = found.filter(|route| !matches!(route.state, State::Creating | State::Gone));
        if let Some(permit) = permit
            && found.is_some()
        {
            self.misses.give_back(&permit);
        }
        let now = Instant::now();
        let Some(route) = found else {
            self.routes.lock().put(id, Known::Nowhere, now);
            return Location::Here;
        };
        let (known, found) = match route.server {
            None => (Known::Away, Location::Away),
            Some((server, _)) if server == *self.rows.node() => {
                let is_served = route.node.is_some_and(|node| self.nodes.is_served(&node));
                // Otherwise its node is being taken over, and the sandbox goes on meanwhile.
                return if is_served { Location::Here } else { Location::Away };
            }
            Some((server, address)) => match self.link_to(&server, address.as_deref()) {
                Some(link) => (Known::At(server), Location::At(link)),
                None => (Known::Away, Location::Away),
            },
        };
        self.routes.lock().put(id, known, now);
        found
    }

    /// The sandboxes that run on nodes of other servers; none if that is not known.
    pub(crate) async fn running_elsewhere(&self) -> Option<Vec<SandboxId>> {
        match self.rows.store().running_elsewhere(&self.owner).await {
            Ok(found) => Some(found),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot list the sandboxes of other servers");
                None
            }
        }
    }

    /// Forgets where a sandbox is: the server that had it says that it does not.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.routes.lock().forget(id);
    }

    /// Notes that the server of a sandbox does not answer: what is asked next is refused at once, and soon looked up again.
    pub(crate) fn note_away(&self, id: &SandboxId) {
        self.routes.lock().put(id, Known::Away, Instant::now());
    }

    fn link_to(&self, server: &NodeId, address: Option<&str>) -> Option<Arc<ServerLink>> {
        let address: Address = address?.parse().ok()?;
        let mut links = self.links.lock();
        if let Some(link) = links.get(server)
            && *link.address() == address
        {
            return Some(Arc::clone(link));
        }
        let link = Arc::new(ServerLink::new(
            Arc::clone(&self.authority),
            self.rows.node().clone(),
            server.clone(),
            address,
            self.now,
            self.tasks.clone(),
        ));
        links.insert(server.clone(), Arc::clone(&link));
        Some(link)
    }

    /// The time of the database, by which servers agree about leases. Everything else, such as when a sandbox ends, goes by the
    /// clock of the server, so it is logged if that is far off.
    async fn lease_time_us(&self) -> Result<i64, StoreError> {
        let before_us = self.clock.now_us();
        let time_us = self.rows.store().lease_time_us(before_us).await?;
        let apart_us = apart_us(time_us, (before_us, self.clock.now_us()));
        let is_off = apart_us > CLOCK_OFF.as_micros();
        if self.is_clock_off.swap(is_off, Ordering::Relaxed) != is_off {
            if is_off {
                tracing::warn!(
                    seconds = u64::try_from(apart_us / 1_000_000).unwrap_or(u64::MAX),
                    "the clock of this host differs from that of the database: sandboxes end too early or too late, and tokens \
                     too. Set it, as with NTP"
                );
            } else {
                tracing::info!("the clock of this host is that of the database again");
            }
        }
        Ok(time_us)
    }

    /// Reads what teams use on nodes of other servers, unless that took so long the last time that it is too early. How many
    /// sandboxes there are decides how long it takes. A create goes by the database in any case, so what was read before does
    /// when this fails.
    async fn read_use(&self) {
        let begun = Instant::now();
        if begun < *self.use_due.lock() {
            return;
        }
        let read = self.rows.store().use_elsewhere(&self.owner).await;
        let pause = pause_after(begun.elapsed());
        *self.use_due.lock() = Instant::now() + pause;
        let noted = match read {
            Ok(elsewhere) => self.admission.note_elsewhere(elsewhere).await,
            Err(error) => Err(error),
        };
        if let Err(error) = noted {
            *self.use_due.lock() = Instant::now() + pause.max(USE_RETRY);
            tracing::error!(error = %Chain(&error), "cannot read what teams use on nodes of other servers");
        }
    }

    /// Whether this server is the one of those that are there which has the say about something of all.
    pub(crate) fn is_home_of(&self, text: &str) -> bool {
        let present = self.present.read();
        let others = present.iter().map(|other| other.link.other());
        home_among(others.chain([self.rows.node()]), text) == Some(self.rows.node())
    }

    /// Says that this server is there, looks who else is and what teams use there, and returns who serves which node.
    ///
    /// # Errors
    /// When the database fails, or this server has lost its lease.
    pub(crate) async fn beat(&self) -> Result<Vec<ServedNodeRow>, StoreError> {
        let said = Said {
            room: self.nodes.room(),
            draining: self.nodes.draining(),
            has_nodes: self.nodes.has_any(),
            takes_forks: self.nodes.any_takes_forks(),
        };
        let room = said.to_json();
        let address = self.address.to_string();
        let store: &Store = self.rows.store();
        let now_us = self.lease_time_us().await?;
        self.rows
            .server_beat(&self.name, Some(&address), Some(&room), now_us)
            .await?;
        let listed = store.server_list().await?;
        self.nodes
            .note_servers(listed.iter().map(|server| server.id.clone()).collect());
        let others = listed.into_iter().filter(|server| server.id != *self.rows.node());
        let mut present = Vec::new();
        let mut known = HashSet::new();
        for server in others {
            let Some(link) = self.link_to(&server.id, server.address.as_deref()) else {
                continue;
            };
            known.insert(server.id.clone());
            if is_present(&server, now_us) {
                let said = server.room_json.as_deref().and_then(Said::parse);
                present.push(Other {
                    link,
                    has_nodes: said.as_ref().is_none_or(|said| said.has_nodes),
                    takes_forks: said.as_ref().is_some_and(|said| said.takes_forks),
                    room: said.map(|said| said.room).unwrap_or_default(),
                });
            }
        }
        self.links.lock().retain(|id, _| known.contains(id));
        *self.present.write() = present;
        self.read_use().await;
        store.served_node_list().await
    }
}

/// The server of some that has the highest hash with a text: when one comes or goes, no other two exchange anything.
fn home_among<'a>(servers: impl Iterator<Item = &'a NodeId>, text: &str) -> Option<&'a NodeId> {
    servers.max_by_key(|server| {
        let mut hash = Sha256::new();
        hash.update(server.as_str().as_bytes());
        hash.update([0]);
        hash.update(text.as_bytes());
        <[u8; 32]>::from(hash.finalize())
    })
}

/// The server that builds a template, of servers of which some have nodes.
fn build_home<'a>(servers: impl Iterator<Item = (&'a NodeId, bool)>, template: &str) -> Option<&'a NodeId> {
    let (with, without): (Vec<_>, Vec<_>) = servers.partition(|(_, has_nodes)| *has_nodes);
    let able = if with.is_empty() { without } else { with };
    home_among(able.into_iter().map(|(server, _)| server), template)
}

/// The pause after a reading that took so long.
fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(USE_SHARE).min(USE_PAUSE_MAX)
}

/// How far a time is from an interval, in microseconds.
fn apart_us(time_us: i64, (from_us, to_us): (i64, i64)) -> u128 {
    let apart = |a: i64, b: i64| u128::from(a.abs_diff(b));
    if time_us < from_us {
        apart(from_us, time_us)
    } else if time_us > to_us {
        apart(time_us, to_us)
    } else {
        0
    }
}

/// Whether a server is there, as far as its lease says.
fn is_present(server: &ServerRow, now_us: i64) -> bool {
    server.lease.as_ref().is_some_and(|lease| lease.until_us > now_us)
}

/// Whether a lease is that of another owner, whose right may have run out.
pub(crate) fn is_of_another(lease: Option<&Lease>, owner: &OwnerId) -> bool {
    lease.is_some_and(|lease| lease.owner != *owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_elsewhere_is_read_at_each_beat_unless_that_takes_long() {
        assert!(pause_after(Duration::from_millis(10)) < BEAT);
        assert_eq!(pause_after(Duration::from_millis(60)), Duration::from_secs(3));
        assert_eq!(pause_after(Duration::from_secs(15)), USE_PAUSE_MAX);
    }

    #[test]
    fn clocks_are_apart_by_what_cannot_be_the_time_of_the_answer() {
        for (time_us, expected) in [(10, 0), (15, 0), (20, 0), (7, 3), (24, 4)] {
            assert_eq!(apart_us(time_us, (10, 20)), expected);
        }
    }

    #[test]
    fn templates_stay_where_they_are_when_a_server_comes() {
        let ids: Vec<NodeId> = (1..=4)
            .map(|n| {
                format!("0199d0a6-0000-7000-8000-00000000000{n}")
                    .parse()
                    .expect("an id")
            })
            .collect();
        let home = |count: usize, template: usize| home_among(ids[..count].iter(), &format!("t{template}")).cloned();
        assert_eq!(home(0, 1), None);
        let mut moved = 0;
        for template in 0..200 {
            let (before, after) = (home(3, template), home(4, template));
            if before != after {
                assert_eq!(after.as_ref(), Some(&ids[3]));
                moved += 1;
            }
        }
        assert!((20..=80).contains(&moved), "{moved}");
    }

    #[test]
    fn a_server_without_nodes_builds_nothing_that_another_one_can() {
        let ids: Vec<NodeId> = (1..=3)
            .map(|n| {
                format!("0199d0a6-0000-7000-8000-00000000000{n}")
                    .parse()
                    .expect("an id")
            })
            .collect();
        for template in 0..50 {
            let text = format!("t{template}");
            let home = |has: [bool; 3]| build_home(ids.iter().zip(has), &text);
            let of_all = home([true, true, true]);
            assert_eq!(home([false, false, true]), Some(&ids[2]));
            assert_ne!(home([false, true, true]), Some(&ids[0]));
            // While none has any, one waits for it.
            assert_eq!(home([false, false, false]), of_all);
        }
    }
}
