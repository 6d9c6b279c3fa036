//! What the container driver of one data directory has: the state that all of its parts use.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use model::id::{DiskId, SandboxId};
use parking_lot::{Mutex, RwLock};

use crate::cgroup::Tree;
use crate::checkpoint::agents::Agents;
use crate::checkpoint::program;
use crate::driver::{Capabilities, StartError};
use crate::growth::LoopDevices;
use crate::kept::KeptDisks;
use crate::launchers::LauncherPool;
use crate::layers::Layers;
use crate::memories::Memories;
use crate::netns::SocketMaker;
use crate::process_counter::ProcessCounter;
use crate::registry::{Held, Registry};
use crate::slot::Name;
use crate::slots::Slots;
use crate::{base, disk};

/// The container driver of one data directory.
#[derive(Debug)]
pub struct ContainerDriver {
    pub(super) data_dir: PathBuf,
    pub(super) tree: Tree,
    pub(super) registry: Registry,
    pub(super) launchers: LauncherPool,
    pub(super) capabilities: Capabilities,
    pub(super) base: base::Versions,
    /// Held while a sandbox is started on a kept disk, and while the version of `base` changes.
    pub(super) base_changes: RwLock<()>,
    /// The version of `base` that each disk of a sandbox which this platform has started lies above.
    pub(super) bases: Mutex<HashMap<DiskId, String>>,
    pub(super) layers: Layers,
    pub(super) kept: KeptDisks,
    pub(super) memories: Memories,
    pub(super) agents: Arc<Agents>,
    /// The disks of copied sandboxes that were not restored yet, and the sizes of their images in bytes.
    pub(super) forks: Mutex<HashMap<DiskId, u64>>,
    /// Writes and restores images of processes.
    pub(super) criu: Option<program::Program>,
    pub(super) page_out: bool,
    pub(super) loops: LoopDevices,
    /// None where the kernel cannot count.
    pub(super) processes: Option<Arc<ProcessCounter>>,
    pub(super) slots: Mutex<Slots>,
    /// Disk sizes, in MiB, whose template exists.
    pub(super) disk_sizes: Mutex<BTreeSet<u32>>,
    pub(super) sockets: Arc<SocketMaker>,
    pub(super) itself: Weak<Self>,
}

impl ContainerDriver {
    /// The image of a disk.
    pub(super) fn image(&self, disk: &DiskId) -> PathBuf {
        self.data_dir.join(disk::image_path(disk))
    }

    /// Allocates a slot, and claims another block of ids for it if necessary.
    pub(super) fn allocate_slot(&self, id: &SandboxId, disk: &DiskId) -> Result<(Name, Arc<Held>), StartError> {
        let another = |index| self.registry.claim_another(&self.data_dir, index);
        match self.slots.lock().allocate(id, disk, another) {
            Err(StartError::Failed(error)) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!("claim another id range for sandboxes: {error}");
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
            tracing::warn!("release an id range: {error}");
        }
    }

    /// The version of `base` below the disk of a sandbox that runs; none if it has none, or that is not known.
    pub(super) fn base_below(&self, id: &SandboxId, disk: &DiskId) -> io::Result<Option<String>> {
        let known = self.bases.lock().get(disk).cloned();
        if known.is_some() || !self.layers.rootfs_of(disk)?.has_base() {
            return Ok(known);
        }
        // It was started by an earlier platform.
        let name = self.slots.lock().name(id).map(ToString::to_string);
        Ok(name.map(|name| self.base.of(&name)).transpose()?.flatten())
    }
}
