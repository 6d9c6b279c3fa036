//! What the container driver of one data directory has: the state that all of its parts use.

use std::io;
use std::sync::{Arc, Weak};

use model::id::{DiskId, SandboxId};
use parking_lot::Mutex;

use crate::cgroup::Tree;
use crate::checkpoint::program;
use crate::driver::{Capabilities, StartError};
use crate::growth::LoopDevices;
use crate::launchers::LauncherPool;
use crate::netns::SocketMaker;
use crate::process_counter::ProcessCounter;
use crate::registry::{Held, Registry};
use crate::slot::Name;
use crate::slots::Slots;
use crate::storage::Storage;

/// The container driver of one data directory.
#[derive(Debug)]
pub struct ContainerDriver {
    pub(super) storage: Storage,
    pub(super) tree: Tree,
    pub(super) registry: Registry,
    pub(super) launchers: LauncherPool,
    pub(super) capabilities: Capabilities,
    /// Writes and restores checkpoints.
    pub(super) criu: Option<program::Program>,
    pub(super) page_out: bool,
    pub(super) loops: LoopDevices,
    /// None where the kernel cannot count.
    pub(super) processes: Option<Arc<ProcessCounter>>,
    pub(super) slots: Mutex<Slots>,
    pub(super) sockets: Arc<SocketMaker>,
    pub(super) itself: Weak<Self>,
}

impl ContainerDriver {
    /// Allocates a slot, and claims another block of ids for it if necessary.
    pub(super) fn allocate_slot(&self, id: &SandboxId, disk: &DiskId) -> Result<(Name, Arc<Held>), StartError> {
        let another = |index| self.registry.claim_another(&self.storage.data_dir, index);
        match self.slots.lock().allocate(id, disk, another) {
            Err(StartError::Failed(error)) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!("no other id range is free on this host, so no further sandbox can start: {error}");
                Err(StartError::Full)
            }
            allocated => allocated,
        }
    }

    /// Releases a slot, and the block of ids that is no longer needed then.
    pub(super) fn release_slot(&self, id: &SandboxId) {
        let mut slots = self.slots.lock();
        if let Some(held) = slots.release(id)
            && let Err(error) = self.registry.give_back(held.block)
        {
            tracing::warn!("cannot release an id range, which stays claimed until the next start: {error}");
        }
    }
}
