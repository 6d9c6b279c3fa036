//! Capacity permits: which sandboxes a host may have, as the host itself decides it.
//!
//! A permit is given before any part of a sandbox exists, and a refusal says that nothing was begun. [`Permits`] is the whole
//! decision; who has one puts it under a lock beside the sandboxes that have processes, and that is the only place where they
//! are counted. So whoever asks, and however old what they know is, a host never has more than it may:
//!
//! ```text
//!   take ─▶ judge ─▶ begin ─▶ the sandbox has processes ─▶ settle        counted as a sandbox until it has none
//!    │        │        └───── the start fails ───▶ settle                a permit again, for another attempt
//!    │        └─ below a floor: it is given up
//!    └─ counted as a permit, until it is given back, or PERMIT_US later
//! ```
//!
//! - The number of sandboxes is exact: sandboxes with processes, and permits of others.
//! - Memory and disk are what the host has left ([`HostCapacity`]), read again when the last reading is too old. Limits of
//!   sandboxes are not added up, because almost no sandbox uses all of its memory. Disks that are preallocated are: those of
//!   sandboxes that were admitted after the reading began, or whose start was not over then, are not part of it.
//! - A permit that nobody uses or gives back, because who asked for it is gone, ends by itself.
//!
//! Time is an argument, in microseconds of any clock that does not stand still for long. A clock that is set back makes a
//! reading old, and a permit last longer, by as much.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;

use serde::{Deserialize, Serialize};

use crate::id::SandboxId;

/// How long a reading is valid, in microseconds. A host that starts 100 sandboxes per second starts 25 in that time; the
/// floor must cover the memory that they take.
pub const FRESH_US: i64 = 250_000;
/// How long a permit lasts of which nothing is begun, in microseconds: longer than any request waits between the two.
pub const PERMIT_US: i64 = 300_000_000;
/// Bytes of a MiB.
const MIB: u64 = 1 << 20;

/// Free capacity of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCapacity {
    /// Memory that new sandboxes could use without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Free space on the file system that holds the sandboxes' disks, in bytes.
    pub disk_available_bytes: u64,
}

/// What a host says of itself: what it has left, and how large and how busy it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// What it has left.
    #[serde(flatten)]
    pub left: HostCapacity,
    /// Its size and its load; none from a node of a version that does not say it, or that cannot read it.
    #[serde(default)]
    pub load: Option<HostLoad>,
}

/// How large and how busy a host is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostLoad {
    /// Memory of the host, in bytes.
    pub memory_bytes: u64,
    /// Cores of the host.
    pub cores: u32,
    /// Sandboxes that have processes.
    pub running: u32,
    /// Permits of others.
    pub starting: u32,
    /// Share of the time in which something waited for processors or memory, in per cent.
    pub pressure: u8,
    /// The host's own bounds.
    pub bounds: Bounds,
}

/// What must remain free on a host, and how many sandboxes it may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Memory that stays free, in MiB.
    #[serde(default)]
    pub memory_floor_mb: u32,
    /// Disk space that stays free, in MiB.
    #[serde(default)]
    pub disk_floor_mb: u32,
    /// Disk space that a new sandbox preallocates, in MiB; 0 where disks grow as they are written.
    #[serde(default)]
    pub disk_per_sandbox_mb: u32,
    /// Maximum number of sandboxes at the same time.
    #[serde(default)]
    pub max_sandboxes: Option<u32>,
}

impl Bounds {
    /// What satisfies both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            memory_floor_mb: self.memory_floor_mb.max(other.memory_floor_mb),
            disk_floor_mb: self.disk_floor_mb.max(other.disk_floor_mb),
            disk_per_sandbox_mb: self.disk_per_sandbox_mb.max(other.disk_per_sandbox_mb),
            max_sandboxes: match (self.max_sandboxes, other.max_sandboxes) {
                (Some(one), Some(another)) => Some(one.min(another)),
                (one, another) => one.or(another),
            },
        }
    }
}

/// What a sandbox is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// A request waits for the sandbox. A host that cannot tell what it has left is tried.
    Wanted,
    /// Nobody waits for the sandbox, which takes this much memory: it is not admitted unless twice the floors are left.
    Spare {
        /// The memory, in bytes.
        memory_bytes: u64,
    },
}

/// A request for a permit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermitRequest {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Distinguishes this permit from others for the same sandbox.
    pub number: u64,
    /// What the sandbox is for.
    pub purpose: Purpose,
    /// What is asked for besides the host's own bounds: what satisfies both counts.
    #[serde(default)]
    pub bounds: Bounds,
    /// Whether what the host has left is read again, because something was ended for this sandbox.
    #[serde(default)]
    pub reads_again: bool,
}

/// Why there is no capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoCapacity {
    /// There is no host: no node is connected.
    #[error("no node is connected")]
    Away,
    /// The sandbox limit of the host is reached.
    #[error("sandbox limit reached ({0} of {0})")]
    Count(u32),
    /// The host is short of memory.
    #[error("{available_mb} MiB of memory are available, and {floor_mb} MiB are reserved")]
    Memory {
        /// Memory that is available, in MiB.
        available_mb: u64,
        /// Memory that stays free, in MiB.
        floor_mb: u32,
    },
    /// The host is short of disk.
    #[error("{available_mb} MiB of disk are available, and {floor_mb} MiB are reserved")]
    Disk {
        /// Space that is available, in MiB.
        available_mb: u64,
        /// Space that stays free, in MiB.
        floor_mb: u32,
    },
    /// Nobody waits for the sandbox, and the host has not twice its floors, or cannot tell.
    #[error("the host has no capacity to spare")]
    NotSpare,
}

/// The sandboxes of a host that have processes.
pub trait Present {
    /// How many there are.
    fn count(&self) -> usize;
    /// Whether this is one of them.
    fn has(&self, id: &SandboxId) -> bool;
}

impl<V, S: BuildHasher> Present for HashMap<SandboxId, V, S> {
    fn count(&self) -> usize {
        self.len()
    }

    fn has(&self, id: &SandboxId) -> bool {
        self.contains_key(id)
    }
}

impl<S: BuildHasher> Present for HashSet<SandboxId, S> {
    fn count(&self) -> usize {
        self.len()
    }

    fn has(&self, id: &SandboxId) -> bool {
        self.contains(id)
    }
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: i64,
    /// None when the host could not tell.
    capacity: Option<HostCapacity>,
}

#[derive(Debug)]
struct Permit {
    number: u64,
    /// Time at which it ends; none while its sandbox is being started.
    until_us: Option<i64>,
    /// Whether it was judged, so that its disk will be taken.
    is_admitted: bool,
}

/// The permits of a host, for sandboxes that have no processes yet.
#[derive(Debug, Default)]
pub struct Permits {
    permits: HashMap<SandboxId, Permit>,
    reading: Option<Reading>,
    /// Sandboxes admitted since the last reading began, or being started then: their disks are not part of it.
    admitted: u64,
}

impl Permits {
    /// Takes a permit for a sandbox, if the host may have one more. It is counted from here on; [`Self::judge`] decides
    /// whether the host has something left for it. Another one for the same sandbox is replaced.
    ///
    /// # Errors
    /// When the limit is reached.
    pub fn take(
        &mut self,
        request: &PermitRequest,
        own: Bounds,
        now_us: i64,
        present: &impl Present,
    ) -> Result<(), NoCapacity> {
        let max = own.and(request.bounds).max_sandboxes;
        self.check_count(&request.id, max, now_us, present)?;
        let before = self.permits.get(&request.id);
        let is_begun = before.is_some_and(|permit| permit.until_us.is_none());
        let permit = Permit {
            number: request.number,
            until_us: (!is_begun).then(|| now_us.saturating_add(PERMIT_US)),
            is_admitted: before.is_some_and(|permit| permit.is_admitted),
        };
        self.permits.insert(request.id.clone(), permit);
        Ok(())
    }

    /// Decides whether the host has something left for a sandbox that has a permit, which is given up otherwise.
    ///
    /// # Errors
    /// When less than the floors is left.
    pub fn judge(&mut self, request: &PermitRequest, own: Bounds) -> Result<(), NoCapacity> {
        let judged = self.check_floors(request.purpose, own.and(request.bounds));
        match &judged {
            Ok(()) => {
                self.admitted = self.admitted.saturating_add(1);
                if let Some(permit) = self.own(&request.id, request.number) {
                    permit.is_admitted = true;
                }
            }
            Err(_) => self.give_back(&request.id, request.number),
        }
        judged
    }

    /// Gives back a permit of which nothing was begun. Any other one of the same sandbox stays.
    pub fn give_back(&mut self, id: &SandboxId, number: u64) {
        if self.own(id, number).is_some_and(|permit| permit.until_us.is_some()) {
            self.permits.remove(id);
        }
    }

    /// Notes that a sandbox is being started. Without a permit it takes one, if the host may have one more: who asked for
    /// it may have done so before the host was restarted.
    ///
    /// # Errors
    /// When there is no permit and the limit is reached.
    pub fn begin(
        &mut self,
        id: &SandboxId,
        own: Bounds,
        now_us: i64,
        present: &impl Present,
    ) -> Result<(), NoCapacity> {
        self.prune(now_us);
        if let Some(permit) = self.permits.get_mut(id) {
            permit.until_us = None;
            return Ok(());
        }
        self.check_count(id, own.max_sandboxes, now_us, present)?;
        let permit = Permit {
            number: 0,
            until_us: None,
            is_admitted: true,
        };
        self.permits.insert(id.clone(), permit);
        self.admitted = self.admitted.saturating_add(1);
        Ok(())
    }

    /// Notes that the start of a sandbox is over. One with processes is counted as such from here on, and not by its permit;
    /// that of another one is kept, for another attempt.
    pub fn settle(&mut self, id: &SandboxId, now_us: i64, present: &impl Present) {
        let Some(permit) = self.permits.get_mut(id) else {
            return;
        };
        // Without a number nobody knows it, so nobody could give it back.
        if present.has(id) || permit.number == 0 {
            self.permits.remove(id);
        } else {
            permit.until_us = Some(now_us.saturating_add(PERMIT_US));
        }
    }

    /// How many sandboxes count: those with processes, and permits of others.
    pub fn count(&mut self, now_us: i64, present: &impl Present) -> usize {
        self.prune(now_us);
        let others = self.permits.keys().filter(|id| !present.has(id));
        present.count().saturating_add(others.count())
    }

    /// Whether the last reading is recent.
    #[must_use]
    pub fn is_fresh(&self, now_us: i64) -> bool {
        // A clock that was set back must not extend the validity of a reading.
        self.reading.is_some_and(|reading| {
            let age_us = now_us.saturating_sub(reading.at_us);
            (0..FRESH_US).contains(&age_us)
        })
    }

    /// Makes the last reading old.
    pub fn forget_reading(&mut self) {
        self.reading = None;
    }

    /// Notes that what the host has left is about to be read. What is admitted from here on may not be part of it, and
    /// neither may be what is being started.
    pub fn begin_reading(&mut self) {
        let starting = self.permits.values().filter(|permit| permit.is_admitted);
        self.admitted = u64::try_from(starting.count()).unwrap_or(u64::MAX);
    }

    /// Notes what the host has left; none if it could not tell.
    pub fn end_reading(&mut self, now_us: i64, capacity: Option<HostCapacity>) {
        self.reading = Some(Reading {
            at_us: now_us,
            capacity,
        });
    }

    fn own(&mut self, id: &SandboxId, number: u64) -> Option<&mut Permit> {
        self.permits.get_mut(id).filter(|permit| permit.number == number)
    }

    fn prune(&mut self, now_us: i64) {
        self.permits
            .retain(|_, permit| permit.until_us.is_none_or(|until_us| now_us < until_us));
    }

    fn check_count(
        &mut self,
        id: &SandboxId,
        max: Option<u32>,
        now_us: i64,
        present: &impl Present,
    ) -> Result<(), NoCapacity> {
        let Some(max) = max else {
            self.prune(now_us);
            return Ok(());
        };
        let count = self.count(now_us, present);
        let is_counted = present.has(id) || self.permits.contains_key(id);
        if is_counted || count < usize::try_from(max).unwrap_or(usize::MAX) {
            Ok(())
        } else {
            Err(NoCapacity::Count(max))
        }
    }

    fn check_floors(&self, purpose: Purpose, bounds: Bounds) -> Result<(), NoCapacity> {
        let left = self.reading.and_then(|reading| reading.capacity);
        let Bounds {
            memory_floor_mb,
            disk_floor_mb,
            disk_per_sandbox_mb,
            max_sandboxes: _,
        } = bounds;
        let each_mb = u64::from(disk_per_sandbox_mb);
        let admitted_mb = each_mb.saturating_mul(self.admitted);
        match (purpose, left) {
            (Purpose::Wanted, None) => Ok(()),
            (Purpose::Wanted, Some(left)) => {
                let available_mb = left.memory_available_bytes / MIB;
                if available_mb < memory_floor_mb.into() {
                    let floor_mb = memory_floor_mb;
                    return Err(NoCapacity::Memory { available_mb, floor_mb });
                }
                let available_mb = (left.disk_available_bytes / MIB).saturating_sub(admitted_mb);
                if available_mb < u64::from(disk_floor_mb).saturating_add(each_mb) {
                    let floor_mb = disk_floor_mb;
                    return Err(NoCapacity::Disk { available_mb, floor_mb });
                }
                Ok(())
            }
            (Purpose::Spare { .. }, None) => Err(NoCapacity::NotSpare),
            (Purpose::Spare { memory_bytes }, Some(left)) => {
                let twice = |floor_mb: u32| u64::from(floor_mb) * 2 * MIB;
                let disk_bytes = admitted_mb.saturating_add(each_mb).saturating_mul(MIB);
                let has_memory = left.memory_available_bytes >= twice(memory_floor_mb).saturating_add(memory_bytes);
                let has_disk = left.disk_available_bytes >= twice(disk_floor_mb).saturating_add(disk_bytes);
                if has_memory && has_disk {
                    Ok(())
                } else {
                    Err(NoCapacity::NotSpare)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
