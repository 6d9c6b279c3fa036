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
mod opened;
mod parcels;

use std::fs;
use std::io;
use std::path::PathBuf;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use protocol::node::{LayerInfo, MemoryInfo};

pub use self::opened::Storage;
use crate::checkpoint::About;
use crate::disk;
use crate::files::if_there;
use crate::rootfs::Rootfs;
use crate::stored::KeptDisk;
use crate::usage::{self, Capacity};

/// What is kept, and removed.
impl Storage {
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
}
