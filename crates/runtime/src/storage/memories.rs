//! The memory of snapshots: made of copies of sandboxes, and copied for each sandbox that is started from it.
//!
//! A copy of a sandbox (`copies`) is used at once or never; this one may be read by another platform, on another kernel, or
//! after a power cut. So its checkpoint gets checksums, all of it is written out, and every start checks the checkpoint before
//! anything is copied, and many pages of it while they are restored.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use model::id::BuildId;

use super::copies::Source;
use super::opened::Storage;
use crate::cancel::Cancel;
use crate::checkpoint::sums;
use crate::kept;
use crate::memories::Memory;
use crate::stored::{CopyMemoryError, Fork};

impl Storage {
    /// Makes a copy of a sandbox ([`Sandbox::fork`](crate::driver::Sandbox::fork)) from which nothing was started yet the
    /// memory of a snapshot: from then on it belongs to no sandbox, survives a power cut, and stays until
    /// [`Storage::remove_memory`]. Returns the space that it takes, in bytes.
    ///
    /// # Errors
    /// When it cannot be written out. [`Storage::forget`] and [`Storage::remove_disk`] remove what is left.
    pub fn keep_memory(&self, build: &BuildId, copy: &Fork) -> io::Result<u64> {
        sums::write(&self.kept.checkpoint(&copy.id, &copy.disk), &Cancel::new()?)?;
        kept::sync(&self.disk_path(&copy.disk))?;
        self.layers.write_out(&copy.disk)?;
        let from = self.kept.path(&copy.id, &copy.disk);
        kept::sync(&from)?;
        let memory = self.memories.take(&from, build, &copy.disk)?;
        self.forks.lock().remove(&copy.disk);
        self.space_of(&memory)
    }

    pub(super) fn space_of(&self, memory: &Memory) -> io::Result<u64> {
        let disk = fs::metadata(self.disk_path(&memory.disk))?.blocks().saturating_mul(512);
        Ok(sums::space(&memory.checkpoint())?.saturating_add(disk))
    }

    /// Copies the memory of a snapshot for a sandbox, which is started from it as from a copy of another one
    /// ([`Sandbox::fork`](crate::driver::Sandbox::fork)). The files of the checkpoint are shared, and only read. `obstacle` says
    /// why a checkpoint cannot be restored on this host, if it cannot
    /// ([`Driver::obstacle`](crate::driver::Driver::obstacle)).
    ///
    /// # Errors
    /// [`CopyMemoryError`] says whether the memory or the host is the reason; in any case [`Storage::forget`] and
    /// [`Storage::remove_disk`] remove what is left.
    pub fn copy_memory(
        &self,
        build: &BuildId,
        to: &Fork,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), CopyMemoryError> {
        let unusable = |why: &str| CopyMemoryError::Unusable(why.to_owned());
        let Some(memory) = self.memories.find(build)? else {
            return Err(unusable("the host does not have the memory of the snapshot"));
        };
        let checkpoint = memory.checkpoint();
        let compared = match sums::check_but_pages(&checkpoint) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(unusable(&error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(unusable("the checkpoint of its processes is missing"));
            }
            checked => checked?,
        };
        if let Some(why) = obstacle(&checkpoint)? {
            return Err(CopyMemoryError::Unusable(why));
        }
        let source = Source {
            disk: &memory.disk,
            checkpoint: &checkpoint,
            base: memory.base(),
            is_moved: memory.is_moved(),
            compared,
        };
        match self.copy_from(&source, to, is_cancelled) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                Err(unusable("the host's disk has no space for a copy of the sandbox"))
            }
            copied => Ok(copied?),
        }
    }
}
