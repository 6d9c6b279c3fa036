//! What all parts of a node share: the driver, the sandboxes and what is kept of them, and how much of what may go on at the
//! same time.
//!
//! Nothing here uses one of the parts, so each of them can use all of it.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use model::id::{DiskId, SandboxId};
use parking_lot::Mutex;
use protocol::node::Traffic;
use proxy::egress::EgressGateway;
use runtime::driver::Driver;
use runtime::stored::Fork;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::counters::{GuardCounters, ThrottleCounters};
use crate::deadlines::Deadlines;
use crate::handle::SandboxHandle;
use crate::journal::Journal;
use crate::memory_locks::MemoryLocks;
use crate::parcel_turns::Parcels;
use crate::pause::kept::KeptSandboxes;
use crate::permits::HostPermits;
use crate::restores::Restores;
use crate::teardown::Teardowns;

/// What the node and the tasks of its sandboxes share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) sandboxes: Mutex<HashMap<SandboxId, Arc<SandboxHandle>>>,
    /// Which others there may be.
    pub(crate) permits: HostPermits,
    /// The kept sandboxes: those without processes, of which there is a disk.
    pub(crate) kept: KeptSandboxes,
    pub(crate) journal: Arc<Journal>,
    /// One permit for each start that the driver can run in parallel.
    pub(crate) starts: Semaphore,
    /// One turn for each restore that the driver can run in parallel, beside those.
    pub(crate) restores: Restores,
    pub(crate) respawns: Semaphore,
    /// What is left of ended sandboxes.
    pub(crate) teardowns: Arc<Teardowns>,
    pub(crate) commits: Semaphore,
    /// Held while the memory of a sandbox is moved to swap.
    pub(crate) paging: Semaphore,
    /// Held while a disk is copied.
    pub(crate) copying: Semaphore,
    /// One permit for each sandbox that can be copied with its processes at the same time.
    pub(crate) forks: Semaphore,
    /// The copies of disks that have not become layers yet, and what else was copied.
    pub(crate) copies: Mutex<HashMap<DiskId, Option<Fork>>>,
    /// The memory of snapshots that is in use.
    pub(crate) memories: MemoryLocks,
    /// What goes on with parcels of paused sandboxes.
    pub(crate) parcels: Parcels,
    /// Each is held while an archive is written or read.
    pub(crate) archives: Arc<Semaphore>,
    /// Space that layers and checkpoints leave free, in bytes.
    pub(crate) disk_floor_bytes: u64,
    /// Space for checkpoints that are being written, in bytes.
    pub(crate) checkpoint_bytes: AtomicU64,
    pub(crate) stop: CancellationToken,
    /// The deadlines that the node keeps itself; unset where its server keeps them alone.
    pub(crate) deadlines: OnceLock<Arc<Deadlines>>,
    pub(crate) disk: GuardCounters,
    pub(crate) throttles: ThrottleCounters,
    /// Counts what all sandboxes receive and send over streams that are opened into them.
    pub(crate) streams: Arc<Traffic>,
    /// None where sandboxes have no network.
    pub(crate) egress: Option<EgressGateway>,
    /// Certificates of the operator's authorities, which all sandboxes trust, in PEM.
    pub(crate) authorities: String,
}

impl Shared {
    /// The handle of a sandbox that has processes.
    pub(crate) fn find(&self, id: &SandboxId) -> Option<Arc<SandboxHandle>> {
        self.sandboxes.lock().get(id).cloned()
    }

    /// Space of the host's disk that has to stay free, in bytes. What is promised to sandboxes is not free, even if it is
    /// not written yet.
    pub(crate) fn keep_free_bytes(&self) -> u64 {
        self.disk_floor_bytes.saturating_add(self.disk.owed())
    }
}
