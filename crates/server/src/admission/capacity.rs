//! Room for another sandbox on the host.
//!
//! Sandboxes are not added up by the memory they may use, because almost none uses it: what counts is what the host has
//! left. It is read from the node when a create comes and the last reading is no longer fresh, so an idle platform
//! reads nothing and a busy one reads a few times a second. The number of sandboxes is counted exactly, from before
//! anything of one is made until nothing of it is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use protocol::node::{HostCapacity, NodeApi};

use crate::chain::Chain;
use crate::clock::Clock;
use crate::settings::CapacitySettings;

/// How long a reading is good for, in microseconds. A host that starts 100 sandboxes per second starts 25 in that time,
/// and the memory that they take until then is what a floor must leave room for.
const FRESH_US: i64 = 250_000;
/// Bytes of a MiB.
const MIB: u64 = 1024 * 1024;

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoCapacity {
    /// As many sandboxes run as may.
    #[error("{0} sandboxes run, which is as many as may at once")]
    Count(u32),
    /// The host is short of memory.
    #[error("{available_mb} MiB of memory are available, and {floor_mb} MiB are to stay free")]
    Memory { available_mb: u64, floor_mb: u32 },
    /// The host is short of disk.
    #[error("{available_mb} MiB of disk are available, and {floor_mb} MiB are to stay free")]
    Disk { available_mb: u64, floor_mb: u32 },
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: i64,
    /// None when the node could not tell.
    capacity: Option<HostCapacity>,
}

/// The room of the host.
#[derive(Debug)]
pub(crate) struct Capacity {
    settings: CapacitySettings,
    sandboxes: Arc<Mutex<u32>>,
    reading: Mutex<Option<Reading>>,
    /// Sandboxes that were admitted since the host was asked last, and whose disks it has not told of.
    admitted: AtomicU32,
    /// Held by whoever reads, so that a burst reads once.
    reading_lock: tokio::sync::Mutex<()>,
}

/// The place of one sandbox among those that may run, until this is dropped.
#[derive(Debug)]
pub(crate) struct CapacityPermit(Arc<Mutex<u32>>);

impl Drop for CapacityPermit {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
    }
}

impl Capacity {
    pub(crate) fn new(settings: CapacitySettings) -> Self {
        Self {
            settings,
            sandboxes: Arc::default(),
            reading: Mutex::default(),
            admitted: AtomicU32::new(0),
            reading_lock: tokio::sync::Mutex::default(),
        }
    }

    /// A seat for a new sandbox, if the host has room for it. A host that cannot tell its room gets the benefit of the
    /// doubt: the start itself will show.
    pub(crate) async fn admit(&self, node: &dyn NodeApi, clock: &Clock) -> Result<CapacityPermit, NoCapacity> {
        let permit = self.permit()?;
        let Some(capacity) = self.host(node, clock).await else {
            return Ok(permit);
        };
        let floor_mb = self.settings.memory_floor_mb;
        let available_mb = capacity.memory_available_bytes / MIB;
        if available_mb < floor_mb.into() {
            return Err(NoCapacity::Memory { available_mb, floor_mb });
        }
        let floor_mb = self.settings.disk_floor_mb;
        let each_mb = u64::from(self.settings.disk_per_sandbox_mb);
        let admitted = u64::from(self.admitted.load(Ordering::Relaxed));
        let available_mb = (capacity.disk_available_bytes / MIB).saturating_sub(each_mb * admitted);
        if available_mb < u64::from(floor_mb) + each_mb {
            return Err(NoCapacity::Disk { available_mb, floor_mb });
        }
        self.admitted.fetch_add(1, Ordering::Relaxed);
        Ok(permit)
    }

    fn permit(&self) -> Result<CapacityPermit, NoCapacity> {
        let mut sandboxes = self.sandboxes.lock();
        match self.settings.max_sandboxes {
            Some(max) if *sandboxes >= max => Err(NoCapacity::Count(max)),
            _ => {
                *sandboxes += 1;
                Ok(CapacityPermit(Arc::clone(&self.sandboxes)))
            }
        }
    }

    /// A seat for a sandbox that runs already, whatever the limit.
    pub(crate) fn occupy(&self) -> CapacityPermit {
        *self.sandboxes.lock() += 1;
        CapacityPermit(Arc::clone(&self.sandboxes))
    }

    /// What the host has left, at most a moment ago; none if it cannot tell.
    pub(crate) async fn host(&self, node: &dyn NodeApi, clock: &Clock) -> Option<HostCapacity> {
        if let Some(reading) = self.fresh(clock) {
            return reading.capacity;
        }
        let _guard = self.reading_lock.lock().await;
        if let Some(reading) = self.fresh(clock) {
            return reading.capacity;
        }
        let capacity = match node.capacity().await {
            Ok(capacity) => Some(capacity),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "read what the host has left");
                None
            }
        };
        // Those that are still being made are missing in it for another moment, which the floor is there for.
        self.admitted.store(0, Ordering::Relaxed);
        *self.reading.lock() = Some(Reading {
            at_us: clock.now_us(),
            capacity,
        });
        capacity
    }

    fn fresh(&self, clock: &Clock) -> Option<Reading> {
        let now_us = clock.now_us();
        // A clock that was set back makes no reading last longer.
        (*self.reading.lock()).filter(|reading| (0..FRESH_US).contains(&(now_us - reading.at_us)))
    }
}
