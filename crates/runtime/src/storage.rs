//! The storage of a node: the layers, disks, kept disks and memories of one data directory, with the versions of `base`
//! below them. It is the same for any isolation: a driver starts its sandboxes on these disks.
//!
//! Layers are made, and archives are read and written, by processes of their own, which see no more than they need
//! ([`Storage::with_helpers`]). Disks that are in use are the business of whoever uses them: the driver.

mod archives;
mod below;
mod copies;
mod disks;
mod memories;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use protocol::node::{LayerInfo, MemoryInfo};

use crate::checkpoint::About;
use crate::checkpoint::agents::Agents;
use crate::checkpoint::sums::Compared;
use crate::files::if_there;
use crate::kept::KeptDisks;
use crate::launchers::Helpers;
use crate::layers::Layers;
use crate::memories::Memories;
use crate::rootfs::Rootfs;
use crate::settings::DriverSettings;
use crate::stored::KeptDisk;
use crate::usage::{self, Capacity};
use crate::{base, disk, skeleton};

/// What is known about the version of `base` below the disk of a sandbox.
#[derive(Debug, Clone)]
enum Below {
    /// The version.
    Version(String),
    /// The name under which [`base::Versions`] knows the sandbox.
    UserNamed(String),
}

/// The storage of one data directory.
#[derive(Debug)]
pub struct Storage {
    pub(crate) data_dir: PathBuf,
    pub(crate) base: base::Versions,
    /// Held while a sandbox is started on a kept disk, and while the version of `base` changes.
    base_changes: RwLock<()>,
    /// The version of `base` below each disk of a sandbox that runs.
    bases: Mutex<HashMap<DiskId, Below>>,
    pub(crate) layers: Layers,
    pub(crate) kept: KeptDisks,
    memories: Memories,
    pub(crate) agents: Arc<Agents>,
    /// The disks of copied sandboxes that were not restored yet, and what is known of their checkpoints.
    forks: Mutex<HashMap<DiskId, Compared>>,
    /// Disk sizes, in MiB, whose template exists.
    disk_sizes: Mutex<BTreeSet<u32>>,
    /// None where the driver starts no processes for it.
    helpers: Option<Arc<Helpers>>,
}

impl Storage {
    /// Opens the storage of a data directory, and creates what it lacks. Without [`Storage::with_helpers`] it can neither
    /// make nor move layers.
    ///
    /// # Errors
    /// When the data directory cannot be used, or `base` cannot be made of the host.
    pub fn open(settings: &DriverSettings) -> io::Result<Self> {
        let data_dir = settings.data_dir.canonicalize()?;
        fs::create_dir_all(data_dir.join("disks"))?;
        let layers = Layers::open(&data_dir)?;
        let kept = KeptDisks::open(&data_dir)?;
        let memories = Memories::open(&data_dir)?;
        let agents = Arc::new(Agents::open(&data_dir)?);
        skeleton::create(&data_dir)?;
        let base = base::Versions::new(Path::new("/"), &data_dir);
        if settings.base {
            match base.update_current() {
                // If this fails, for example on a full disk, existing sandboxes must still be adopted.
                Err(error) if base.has_current() => {
                    tracing::warn!("update `base`, continuing with the current version: {error}")
                }
                made => {
                    made?;
                }
            }
        } else {
            fs::create_dir_all(base.path())?;
            base.remove_incomplete()?;
        }
        for &disk_mb in &settings.disks_mb {
            disk::make_template(&data_dir, disk_mb)?;
        }
        Ok(Self {
            data_dir,
            base,
            base_changes: RwLock::default(),
            bases: Mutex::default(),
            layers,
            kept,
            memories,
            agents,
            forks: Mutex::default(),
            disk_sizes: Mutex::new(settings.disks_mb.iter().copied().collect()),
            helpers: None,
        })
    }

    /// This storage, with `helpers` that start its processes.
    #[must_use]
    pub(crate) fn with_helpers(self, helpers: Arc<Helpers>) -> Self {
        Self {
            helpers: Some(helpers),
            ..self
        }
    }

    fn helpers(&self) -> io::Result<&Helpers> {
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "the storage starts no processes");
        self.helpers.as_deref().ok_or_else(missing)
    }

    /// The file of a disk.
    #[must_use]
    pub fn disk_path(&self, disk: &DiskId) -> PathBuf {
        self.data_dir.join(disk::path_of(disk))
    }

    /// Removes a disk, if it exists. A running sandbox keeps its disk until it ends.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn remove_disk(&self, disk: &DiskId) -> io::Result<()> {
        self.bases.lock().remove(disk);
        self.forks.lock().remove(disk);
        if_there(fs::remove_file(self.disk_path(disk)))?;
        self.layers.forget(disk)
    }

    /// Removes every disk that is neither in `keep` nor the memory of a snapshot, with what is kept beside it.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    pub fn sweep_disks(&self, keep: &[DiskId]) -> io::Result<()> {
        self.memories.tidy()?;
        let of_memories = self.memories.list()?.into_iter().map(|memory| memory.disk);
        let keep: Vec<DiskId> = keep.iter().cloned().chain(of_memories).collect();
        let kept: Vec<PathBuf> = keep.iter().map(|disk| self.disk_path(disk)).collect();
        for entry in fs::read_dir(self.data_dir.join("disks"))? {
            let entry = entry?;
            let path = entry.path();
            let is_disk = path.extension().is_some_and(|extension| extension == "img");
            if (is_disk && !kept.contains(&path)) || disk::is_spare(&entry.file_name()) {
                // A launcher may have just used or removed its spare one.
                if_there(fs::remove_file(path))?;
            }
        }
        self.kept.forget_all_but(&keep)?;
        self.sweep_agents()?;
        self.layers.forget_all_but(&keep)
    }

    /// Removes programs of agents that no checkpoint needs any more, if that is known.
    fn sweep_agents(&self) -> io::Result<()> {
        let mut needed = Vec::new();
        let kept = self.kept.list()?.into_iter();
        let kept = kept.map(|kept| self.kept.checkpoint(&kept.id, &kept.disk));
        let of_memories = self.memories.list()?.into_iter().map(|memory| memory.checkpoint());
        for checkpoint in kept.chain(of_memories) {
            match About::of(&checkpoint) {
                Ok(about) => needed.push(about.agent),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // It cannot be restored, and the others are not affected.
                Err(error) => {
                    tracing::warn!(checkpoint = %checkpoint.display(), "cannot read a checkpoint, so programs of agents that no checkpoint needs are kept: {error}");
                    return Ok(());
                }
            }
        }
        self.agents.sweep(&needed)
    }

    /// Notes that the disk of a sandbox is kept when its processes end, in a way that survives a restart of the host, until
    /// [`Storage::forget`]. May be repeated.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn keep(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        self.layers.write_out(disk)?;
        let base = self.base_below(disk)?;
        self.kept.keep(id, disk, base.as_deref())
    }

    /// Every disk that is kept, of sandboxes with and without processes.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    pub fn kept(&self) -> io::Result<Vec<KeptDisk>> {
        let mut kept = self.kept.list()?;
        kept.retain(|kept| self.disk_path(&kept.disk).exists());
        Ok(kept)
    }

    /// Ends what [`Storage::keep`] began. The disk itself remains.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn forget(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        self.kept.forget(id, disk)
    }

    /// Whether there is a complete checkpoint of a sandbox beside its kept disk.
    #[must_use]
    pub fn has_checkpoint(&self, id: &SandboxId, disk: &DiskId) -> bool {
        self.kept.checkpoint(id, disk).exists()
    }

    /// Removes the checkpoint of a sandbox, if there is one. To be called before its processes continue: their disk is
    /// another one then.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn forget_checkpoint(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        // Before a sandbox is paused, nothing of it has to survive a power cut.
        match self.forks.lock().remove(disk) {
            Some(_) => self.kept.forget_copy(id, disk),
            None => self.kept.forget_checkpoint(id, disk),
        }
    }

    /// The file system of a disk.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    pub fn rootfs_of(&self, disk: &DiskId) -> io::Result<Rootfs> {
        self.layers.rootfs_of(disk)
    }

    /// The memory of every snapshot.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    pub fn memories(&self) -> io::Result<Vec<MemoryInfo>> {
        let found = self.memories.list()?.into_iter().map(|memory| MemoryInfo {
            // It may have been removed meanwhile, or have lost its disk, and is removed then.
            bytes: self.space_of(&memory).unwrap_or(0),
            build: memory.build,
        });
        Ok(found.collect())
    }

    /// Removes the memory of a snapshot, if there is one.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn remove_memory(&self, build: &BuildId) -> io::Result<()> {
        match self.memories.find(build)? {
            None => Ok(()),
            Some(memory) => {
                self.memories.remove(&memory)?;
                self.remove_disk(&memory.disk)
            }
        }
    }

    /// The stored layers, in the order of their ids.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    pub fn layers(&self) -> io::Result<Vec<LayerInfo>> {
        self.layers.list()
    }

    /// Removes a layer, if it exists. Sandboxes that were started from it keep it.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub fn remove_layer(&self, layer: &LayerId) -> io::Result<()> {
        self.layers.remove(layer)
    }

    /// Free memory and disk space of the host.
    ///
    /// # Errors
    /// When the host cannot be queried.
    pub fn capacity(&self) -> io::Result<Capacity> {
        usage::capacity(&self.data_dir)
    }

    /// Free space on the file system of the data directory, in bytes. Takes a microsecond.
    ///
    /// # Errors
    /// When the host cannot be queried.
    pub fn disk_available(&self) -> io::Result<u64> {
        usage::disk_available(&self.data_dir)
    }

    /// Keeps the version of `base` as it is for as long as the guard is held.
    pub(crate) fn hold_base(&self) -> RwLockReadGuard<'_, ()> {
        self.base_changes.read()
    }
}
