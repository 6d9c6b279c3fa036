//! The memory of snapshots: copies of sandboxes, which outlive them, and from which others are started.
//!
//! ```text
//!   memories/<build>.<disk>/image   its checkpoint
//!   memories/<build>.<disk>/base    the version of `base` below its files, if it has one
//!   memories/<build>.<disk>/moved   it comes from another node
//!   memories/removed.<disk>         is about to be removed
//!   disks/<disk>.img, .rootfs       the disk, as that of a sandbox
//! ```
//!
//! A copy is complete and written out before it is moved here, and gets its name in one step. What has a name here is never
//! written again, and is only read by starts. Root alone reaches it: it has what programs had in memory.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use model::id::{BuildId, DiskId};

use crate::files::if_there;
use crate::kept::{MOVED, sync};

const DIRECTORY: &str = "memories";
const CHECKPOINT: &str = "image";
const BASE: &str = "base";
const REMOVED: &str = "removed.";

/// The memory of the snapshots of a data directory.
#[derive(Debug)]
pub(crate) struct Memories {
    dir: PathBuf,
}

/// The memory of one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) build: BuildId,
    pub(crate) disk: DiskId,
    path: PathBuf,
}

impl Memory {
    /// Directory of the memory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of its checkpoint.
    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.path.join(CHECKPOINT)
    }

    /// The version of `base` that its files lie above.
    pub(crate) fn base(&self) -> Option<String> {
        fs::read_to_string(self.path.join(BASE)).ok()
    }

    /// Whether its disk comes from another node, so each copy of it has to be made ready for this one.
    pub(crate) fn is_moved(&self) -> bool {
        self.path.join(MOVED).exists()
    }
}

impl Memories {
    /// Opens the memories of a data directory.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let dir = data_dir.join(DIRECTORY);
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync(data_dir)?,
        }
        Ok(Self { dir })
    }

    /// Takes over a directory with a checkpoint, which is written out, and whose disk is. Survives a power cut when this returns.
    ///
    /// # Errors
    /// When there is one for the build already, and when the directories cannot be written.
    pub(crate) fn take(&self, from: &Path, build: &BuildId, disk: &DiskId) -> io::Result<Memory> {
        if self.find(build)?.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let path = self.dir.join(format!("{build}.{disk}"));
        fs::rename(from, &path)?;
        sync(&self.dir)?;
        if let Some(parent) = from.parent() {
            sync(parent)?;
        }
        Ok(Memory {
            build: build.clone(),
            disk: disk.clone(),
            path,
        })
    }

    /// Finds the memory of a build.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(crate) fn find(&self, build: &BuildId) -> io::Result<Option<Memory>> {
        Ok(self.list()?.into_iter().find(|memory| memory.build == *build))
    }

    /// Lists all memories, in the order of their builds.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(crate) fn list(&self) -> io::Result<Vec<Memory>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if let Some((build, disk)) = parse(&entry.file_name().to_string_lossy()) {
                let path = entry.path();
                found.push(Memory { build, disk, path });
            }
        }
        found.sort_by(|a, b| a.build.as_str().cmp(b.build.as_str()));
        Ok(found)
    }

    /// Removes the memory of a build. Its disk is left.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn remove(&self, memory: &Memory) -> io::Result<()> {
        let removed = self.dir.join(format!("{REMOVED}{}", memory.disk));
        // Renamed first, so that it is complete or does not count.
        if if_there(fs::rename(&memory.path, &removed))?.is_none() {
            return Ok(());
        }
        sync(&self.dir)?;
        fs::remove_dir_all(removed)
    }

    /// Removes what interrupted removals left.
    ///
    /// # Errors
    /// When the directory cannot be read or written.
    pub(crate) fn tidy(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if parse(&entry.file_name().to_string_lossy()).is_none() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }
}

fn parse(name: &str) -> Option<(BuildId, DiskId)> {
    let (build, disk) = name.split_once('.')?;
    Some((build.parse().ok()?, disk.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_stays_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let memories = Memories::open(dir.path()).unwrap();
        let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        let disk: DiskId = "d0123456789abcdefghij".parse().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join(CHECKPOINT)).unwrap();
        fs::write(from.join(BASE), "0123").unwrap();
        let taken = memories.take(&from, &build, &disk).unwrap();
        assert!(!from.exists());
        // The next platform finds it.
        let memories = Memories::open(dir.path()).unwrap();
        memories.tidy().unwrap();
        assert_eq!(memories.list().unwrap(), std::slice::from_ref(&taken));
        assert_eq!(memories.find(&build).unwrap(), Some(taken.clone()));
        assert_eq!(taken.base().as_deref(), Some("0123"));
        assert!(taken.checkpoint().is_dir());
        fs::create_dir(&from).unwrap();
        let again = memories.take(&from, &build, &disk).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        memories.remove(&taken).unwrap();
        memories.remove(&taken).unwrap();
        assert_eq!(memories.find(&build).unwrap(), None);
        // A removal was interrupted.
        fs::create_dir(dir.path().join(DIRECTORY).join("removed.d99")).unwrap();
        memories.tidy().unwrap();
        assert_eq!(fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count(), 0);
    }
}
