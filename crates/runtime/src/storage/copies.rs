//! Copies of sandboxes, from which others are started: a kept disk with a checkpoint beside it, for a sandbox that does not
//! exist yet.
//!
//! Further copies share the files of the checkpoint, which are only read, and have a disk each. Their file systems keep the
//! UUID, which is in the index of the overlays and in the handles of files that are watched.
//!
//! Nothing is written out: a copy is used at once or never. What a crash leaves belongs to no sandbox, and the next start
//! removes it.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use model::id::DiskId;

use super::opened::Storage;
use crate::checkpoint::sums::{self, Compared};
use crate::stored::Fork;
use crate::{disk, usage};

/// What a copy is copied from: nothing changes it.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) disk: &'a DiskId,
    /// Its checkpoint, and what is known of that.
    pub(super) checkpoint: &'a Path,
    pub(super) compared: Compared,
    /// The version of `base` below the files.
    pub(super) base: Option<String>,
    /// Whether the disk comes from another node, and was not made ready for this one.
    pub(super) is_moved: bool,
}

impl Storage {
    /// What is known of the checkpoint of a copy that was not restored yet; none if the disk is not that of one.
    pub(crate) fn copied_checkpoint(&self, disk: &DiskId) -> Option<Compared> {
        self.forks.lock().get(disk).copied()
    }

    /// Gives the checkpoint of a new copy its name: it is complete.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    pub(crate) fn finish_copy(&self, copy: &Fork) -> io::Result<()> {
        let directory = self.kept.checkpoint(&copy.id, &copy.disk);
        fs::rename(self.kept.unfinished_checkpoint(&copy.id, &copy.disk), &directory)?;
        let compared = Compared {
            bytes: sums::space(&directory)?,
            // Written a moment ago, and never read by another platform.
            pages_remain: false,
        };
        self.forks.lock().insert(copy.disk.clone(), compared);
        Ok(())
    }

    /// Copies a disk that nothing changes meanwhile. One that is allocated in full stays so.
    pub(crate) fn copy_disk(&self, from: &Path, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let has_space = |bytes: u64| {
            let free = usage::disk_available(&self.data_dir)?;
            if free >= to.keep_free_bytes.saturating_add(bytes) {
                Ok(())
            } else {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
        };
        let held = disk::held_bytes(from)?;
        has_space(held)?;
        let path = self.disk_path(&to.disk);
        disk::copy(from, &path, &mut || {
            if is_cancelled() {
                Err(io::ErrorKind::Interrupted.into())
            } else {
                has_space(0)
            }
        })?;
        let size = fs::metadata(from)?.size();
        if held >= size {
            disk::reserve(&path, size)
        } else {
            Ok(())
        }
    }

    /// Copies a copy of a sandbox ([`Sandbox::fork`](crate::driver::Sandbox::fork)) from which nothing was started yet, for
    /// another one. The two share the checkpoint. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// With [`io::ErrorKind::StorageFull`] when the host has no space for it. [`Storage::forget`] and
    /// [`Storage::remove_disk`] remove what is left.
    pub fn copy_fork(&self, from: &Fork, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let compared = self.copied_checkpoint(&from.disk);
        let source = Source {
            disk: &from.disk,
            checkpoint: &self.kept.checkpoint(&from.id, &from.disk),
            base: self.kept.base_of(&from.id, &from.disk),
            is_moved: false,
            compared: compared.ok_or(io::ErrorKind::NotFound)?,
        };
        self.copy_from(&source, to, is_cancelled)
    }

    pub(super) fn copy_from(&self, from: &Source<'_>, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let rootfs = self.layers.rootfs_of(from.disk)?;
        self.layers.use_for(&to.disk, &rootfs)?;
        self.kept.note(&to.id, &to.disk, from.base.as_deref())?;
        if from.is_moved {
            self.kept.mark_moved(&to.id, &to.disk)?;
        }
        self.copy_disk(&self.disk_path(from.disk), to, is_cancelled)?;
        let unfinished = self.kept.unfinished_checkpoint(&to.id, &to.disk);
        share(from.checkpoint, &unfinished)?;
        fs::rename(unfinished, self.kept.checkpoint(&to.id, &to.disk))?;
        self.forks.lock().insert(to.disk.clone(), from.compared);
        Ok(())
    }
}

/// Makes a directory with the same files as that of a checkpoint. They are never written again: what differs between
/// sandboxes that are restored from it is mounted above.
fn share(checkpoint: &Path, to: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o711).create(to)?;
    for entry in fs::read_dir(checkpoint)? {
        let entry = entry?;
        let name = entry.file_name();
        let path = Path::new(&name);
        let is_read = path
            .extension()
            .is_some_and(|extension| extension == "img" || extension == "json");
        if is_read && entry.file_type()?.is_file() {
            fs::hard_link(entry.path(), to.join(path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_files_of_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        for name in ["pages-1.img", "about.json", "dump.log", "script"] {
            fs::write(from.join(name), name).unwrap();
        }
        share(&from, &to).unwrap();
        let mut names: Vec<_> = fs::read_dir(&to)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        // Not what belongs to the run that wrote the checkpoint, such as the log of an earlier version.
        assert_eq!(names, ["about.json", "pages-1.img"]);
        let inode = |dir: &Path| fs::metadata(dir.join("pages-1.img")).unwrap().ino();
        assert_eq!(inode(&from), inode(&to));
        // The first one goes, and the other stays.
        fs::remove_dir_all(&from).unwrap();
        assert_eq!(fs::read_to_string(to.join("pages-1.img")).unwrap(), "pages-1.img");
    }
}
