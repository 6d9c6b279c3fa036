//! Capacity of the host for another sandbox.
//!
//! The memory limits of sandboxes are not added up, because almost no sandbox uses all of its memory: what counts is
//! what the host has left. It is read from the node when a create request arrives and the last reading is too old, so
//! an idle platform reads nothing and a busy one reads a few times per second. The number of sandboxes is counted
//! exactly, from before any part of one is created until nothing of it is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use protocol::node::{HostCapacity, NodeApi};

use crate::chain::Chain;
use crate::clock::Clock;
use crate::settings::CapacitySettings;

/// How long a reading is valid, in microseconds. A host that starts 100 sandboxes per second starts 25 in that time;
/// the floor must cover the memory that they take.
const FRESH_US: i64 = 250_000;
/// How long a reading tells nodes apart, in microseconds: several rounds of reports.
const REPORTED_US: i64 = 5_000_000;
/// Bytes of a MiB.
const MIB: u64 = 1024 * 1024;

/// Why there is no capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoCapacity {
    /// The sandbox limit of the host is reached.
    #[error("sandbox limit reached ({0} of {0})")]
    Count(u32),
    /// There is no host: no node is connected.
    #[error("no node is connected")]
    Away,
    /// The host is short of memory.
    #[error("{available_mb} MiB of memory are available, and {floor_mb} MiB are reserved")]
    Memory { available_mb: u64, floor_mb: u32 },
    /// The host is short of disk.
    #[error("{available_mb} MiB of disk are available, and {floor_mb} MiB are reserved")]
    Disk { available_mb: u64, floor_mb: u32 },
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: i64,
    /// The capacity; `None` when the node could not read it.
    capacity: Option<HostCapacity>,
}

/// Counts sandboxes and compares what the host has left with the floors.
#[derive(Debug)]
pub(crate) struct Capacity {
    settings: CapacitySettings,
    sandboxes: Arc<Mutex<u32>>,
    reading: Mutex<Option<Reading>>,
    /// Sandboxes admitted since the last reading, whose disks are not part of it.
    admitted: AtomicU32,
    /// Held during a reading, so that a burst reads only once.
    reading_lock: tokio::sync::Mutex<()>,
}

/// The reservation of one sandbox against the sandbox limit of the host, until this is dropped.
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

    /// The capacity of another host, with the same settings.
    pub(super) fn like_this(&self) -> Self {
        Self::new(self.settings)
    }

    /// The last reading, if it is not too old to tell nodes apart, and the number of sandboxes.
    pub(super) fn last(&self, clock: &Clock) -> (Option<HostCapacity>, u32) {
        let now_us = clock.now_us();
        let reading = (*self.reading.lock()).filter(|reading| (0..REPORTED_US).contains(&(now_us - reading.at_us)));
        (reading.and_then(|reading| reading.capacity), *self.sandboxes.lock())
    }

    /// Disk space that is reserved, in bytes.
    pub(super) fn disk_floor_bytes(&self) -> u64 {
        u64::from(self.settings.disk_floor_mb) * MIB
    }

    /// A permit for a new sandbox, if the host has capacity for it. If the capacity cannot be read, the sandbox is
    /// admitted, and the start may fail.
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

    /// A permit for a sandbox that takes this much memory and that nobody waits for. It is not given unless twice the
    /// floors are left.
    pub(crate) async fn admit_spare(
        &self,
        node: &dyn NodeApi,
        clock: &Clock,
        memory_bytes: u64,
    ) -> Option<CapacityPermit> {
        let permit = self.permit().ok()?;
        let capacity = self.host(node, clock).await?;
        let floor_bytes = |floor_mb: u32| u64::from(floor_mb) * 2 * MIB;
        let admitted = u64::from(self.admitted.load(Ordering::Relaxed)) + 1;
        let disk_bytes = u64::from(self.settings.disk_per_sandbox_mb) * MIB * admitted;
        let has_memory =
            capacity.memory_available_bytes >= floor_bytes(self.settings.memory_floor_mb).saturating_add(memory_bytes);
        let has_disk =
            capacity.disk_available_bytes >= floor_bytes(self.settings.disk_floor_mb).saturating_add(disk_bytes);
        if !has_memory || !has_disk {
            return None;
        }
        self.admitted.fetch_add(1, Ordering::Relaxed);
        Some(permit)
    }

    /// Whether less memory is left than one and a half times the floor.
    pub(crate) async fn is_short_of_memory(&self, node: &dyn NodeApi, clock: &Clock) -> bool {
        let floor_bytes = u64::from(self.settings.memory_floor_mb) * 3 * MIB / 2;
        let capacity = self.host(node, clock).await;
        capacity.is_some_and(|capacity| capacity.memory_available_bytes < floor_bytes)
    }

    /// Makes the next request read again what the host has left.
    pub(crate) fn forget_reading(&self) {
        *self.reading.lock() = None;
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

    /// A permit for a sandbox that is running already, regardless of the limit.
    pub(crate) fn occupy(&self) -> CapacityPermit {
        *self.sandboxes.lock() += 1;
        CapacityPermit(Arc::clone(&self.sandboxes))
    }

    /// What the host has left, from a recent reading; `None` if the node could not read it.
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
                tracing::warn!(error = %Chain(&error), "cannot read the capacity of the host");
                None
            }
        };
        // Sandboxes that are still starting are not part of the reading; the floor covers them.
        self.admitted.store(0, Ordering::Relaxed);
        *self.reading.lock() = Some(Reading {
            at_us: clock.now_us(),
            capacity,
        });
        capacity
    }

    fn fresh(&self, clock: &Clock) -> Option<Reading> {
        let now_us = clock.now_us();
        // A clock that was set back must not extend the validity of a reading.
        (*self.reading.lock()).filter(|reading| (0..FRESH_US).contains(&(now_us - reading.at_us)))
    }
}
