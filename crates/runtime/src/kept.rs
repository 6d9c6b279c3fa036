//! Disks that outlive the processes of their sandboxes, and which sandbox each belongs to.
//!
//! ```text
//!   kept/<sandbox>.<disk>/         the disk is kept; what else there is of the sandbox lies in here
//!   kept/<sandbox>.<disk>/saved    it is complete, and nothing has used it since
//!   kept/<sandbox>.<disk>/moved    it comes from another node, and nothing was started on it here yet
//!   kept/<sandbox>.<disk>/base     the version of `base` that its files lie above, if that is known
//!   kept/<sandbox>.<disk>/image    its checkpoint, complete; earlier versions wrote this name
//!   kept/<sandbox>.<disk>/image.new a checkpoint that is being written
//!   kept/removed.…                 was forgotten, and is about to be removed
//! ```
//!
//! While a sandbox has processes, the name of its cgroup says which disk it has; that ends with the processes, or with
//! the host. So a disk is noted here before the processes end. A name says everything that must not be lost, so there is
//! nothing that could be read in half. The note stays after the sandbox was started again, until the disk is removed: what
//! interrupts that start must not lose the disk.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use model::id::{DiskId, SandboxId};

use crate::files::if_there;
use crate::stored::KeptDisk;

const DIRECTORY: &str = "kept";
const SAVED: &str = "saved";
const BASE: &str = "base";
pub(crate) const MOVED: &str = "moved";
const CHECKPOINT: &str = "image";
const UNFINISHED_CHECKPOINT: &str = "image.new";
const REMOVED: &str = "removed.";

/// The kept disks of a data directory.
#[derive(Debug)]
pub(crate) struct KeptDisks {
    dir: PathBuf,
    /// Number of checkpoints that were removed.
    removed: AtomicU64,
}

impl KeptDisks {
    /// Opens the kept disks of a data directory.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let dir = data_dir.join(DIRECTORY);
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync(data_dir)?,
        }
        let removed = AtomicU64::default();
        Ok(Self { dir, removed })
    }

    /// The directory of what is kept of a sandbox beside its disk.
    pub(crate) fn path(&self, id: &SandboxId, disk: &DiskId) -> PathBuf {
        self.dir.join(format!("{id}.{disk}"))
    }

    /// Notes a disk, and the version of `base` below it. Survives a power cut when this returns.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn keep(&self, id: &SandboxId, disk: &DiskId, base: Option<&str>) -> io::Result<()> {
        let path = self.note(id, disk, base)?;
        sync(&path)?;
        sync(&self.dir)
    }

    /// Notes a disk that does not have to survive a power cut, like [`Self::keep`]: a sandbox is started on it
    /// immediately. Returns its directory.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn note(&self, id: &SandboxId, disk: &DiskId, base: Option<&str>) -> io::Result<PathBuf> {
        let path = self.path(id, disk);
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        match base {
            Some(base) => write(&path, BASE, base.as_bytes())?,
            None => remove_file(&path.join(BASE))?,
        }
        Ok(path)
    }

    /// Path of the checkpoint of a sandbox.
    pub(crate) fn checkpoint(&self, id: &SandboxId, disk: &DiskId) -> PathBuf {
        self.path(id, disk).join(CHECKPOINT)
    }

    /// Path of a checkpoint while it is written.
    pub(crate) fn unfinished_checkpoint(&self, id: &SandboxId, disk: &DiskId) -> PathBuf {
        self.path(id, disk).join(UNFINISHED_CHECKPOINT)
    }

    /// Notes that the checkpoint is complete. Survives a power cut when this returns.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn finish_checkpoint(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        fs::rename(self.unfinished_checkpoint(id, disk), self.checkpoint(id, disk))?;
        sync(&self.path(id, disk))
    }

    /// Removes the checkpoints of a sandbox. When this returns, none counts any more, also after a power cut: what runs next
    /// changes the disk, and the checkpoint with it would be neither of the two. Their space is given back in the background.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn forget_checkpoint(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        if let Some(unfinished) = self.take_away(&self.unfinished_checkpoint(id, disk), disk)? {
            remove_later(&unfinished);
        }
        if let Some(checkpoint) = self.take_away(&self.checkpoint(id, disk), disk)? {
            if let Err(error) = sync(&self.path(id, disk)) {
                // Who cannot go on without this still has the checkpoint.
                fs::rename(checkpoint, self.checkpoint(id, disk))?;
                return Err(error);
            }
            remove_later(&checkpoint);
        }
        Ok(())
    }

    /// Forgets a checkpoint like [`Self::forget_checkpoint`], if it does not count after a power cut anyway: nothing but
    /// [`Self::note`] was called for its sandbox.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn forget_copy(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        if let Some(checkpoint) = self.take_away(&self.checkpoint(id, disk), disk)? {
            remove_later(&checkpoint);
        }
        Ok(())
    }

    /// Renames a checkpoint to what is about to be removed, and returns that; none if there is no checkpoint.
    fn take_away(&self, checkpoint: &Path, disk: &DiskId) -> io::Result<Option<PathBuf>> {
        loop {
            let number = self.removed.fetch_add(1, Ordering::Relaxed);
            let removed = self.dir.join(format!("{REMOVED}{disk}.{number}"));
            match fs::rename(checkpoint, &removed) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                // Left by an earlier platform.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                renamed => return renamed.map(|()| Some(removed)),
            }
        }
    }

    /// Notes that a disk is complete. Survives a power cut when this returns.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn mark_saved(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        write(&self.path(id, disk), SAVED, b"")?;
        sync(&self.path(id, disk))
    }

    /// Notes that a disk is in use again.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn mark_used(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        remove_file(&self.path(id, disk).join(SAVED))
    }

    /// Whether a disk is complete, and nothing has used it since.
    pub(crate) fn is_saved(&self, id: &SandboxId, disk: &DiskId) -> bool {
        self.path(id, disk).join(SAVED).exists()
    }

    /// Notes that a disk comes from another node.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn mark_moved(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        write(&self.path(id, disk), MOVED, b"")
    }

    /// Whether a disk comes from another node, and was not made ready for this one.
    pub(crate) fn is_moved(&self, id: &SandboxId, disk: &DiskId) -> bool {
        self.path(id, disk).join(MOVED).exists()
    }

    /// Notes that a disk that comes from another node is ready for this one.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn mark_settled(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        remove_file(&self.path(id, disk).join(MOVED))
    }

    /// The version of `base` that the files of a disk lie above; none if that is not known.
    pub(crate) fn base_of(&self, id: &SandboxId, disk: &DiskId) -> Option<String> {
        fs::read_to_string(self.path(id, disk).join(BASE)).ok()
    }

    /// Notes the version of `base` below a disk.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn set_base(&self, id: &SandboxId, disk: &DiskId, base: &str) -> io::Result<()> {
        write(&self.path(id, disk), BASE, base.as_bytes())
    }

    /// Every kept disk.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(crate) fn list(&self) -> io::Result<Vec<KeptDisk>> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if let Some((id, disk)) = parse(&entry.file_name().to_string_lossy()) {
                let is_saved = entry.path().join(SAVED).try_exists()?;
                kept.push(KeptDisk { id, disk, is_saved });
            }
        }
        Ok(kept)
    }

    /// Forgets a disk, and removes the files that are kept beside it.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn forget(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        let removed = self.dir.join(format!("{REMOVED}{disk}"));
        // Renamed first, so that it counts as forgotten from one moment on.
        if if_there(fs::rename(self.path(id, disk), &removed))?.is_none() {
            return Ok(());
        }
        fs::remove_dir_all(removed)
    }

    /// Forgets all disks but these, and removes what an interrupted removal left.
    ///
    /// # Errors
    /// When the directory cannot be read or written.
    pub(crate) fn forget_all_but(&self, keep: &[DiskId]) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            match parse(&entry.file_name().to_string_lossy()) {
                Some((_, disk)) if keep.contains(&disk) => {}
                Some((id, disk)) => self.forget(&id, &disk)?,
                // It may be removed in the background.
                None => remove_all(&entry.path())?,
            }
        }
        Ok(())
    }
}

fn parse(name: &str) -> Option<(SandboxId, DiskId)> {
    let (id, disk) = name.split_once('.')?;
    if name.starts_with(REMOVED) {
        None
    } else {
        Some((id.parse().ok()?, disk.parse().ok()?))
    }
}

/// Writes a file so that it is either complete or absent after a power cut, once its directory is written out.
fn write(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let unfinished = dir.join(format!("{name}.new"));
    let mut file = File::create(&unfinished)?;
    io::Write::write_all(&mut file, content)?;
    file.sync_all()?;
    fs::rename(unfinished, dir.join(name))
}

/// Removes a directory that nothing refers to any more: to give back the space of a large file takes a while. What is left
/// of it the next start removes.
fn remove_later(path: &Path) {
    let remove = |path: &Path| {
        if let Err(error) = remove_all(path) {
            tracing::warn!(path = %path.display(), "cannot remove a checkpoint, the next start of the platform does: {error}");
        }
    };
    let in_background = std::thread::Builder::new().name("remove-image".to_owned()).spawn({
        let path = path.to_owned();
        move || remove(&path)
    });
    if in_background.is_err() {
        remove(path);
    }
}

fn remove_all(path: &Path) -> io::Result<()> {
    if_there(fs::remove_dir_all(path)).map(drop)
}

fn remove_file(path: &Path) -> io::Result<()> {
    if_there(fs::remove_file(path)).map(drop)
}

/// Writes out a directory, or a file.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_kept_until_they_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptDisks::open(dir.path()).unwrap();
        let kept = {
            let (id, disk): (SandboxId, DiskId) = ("ione".parse().unwrap(), "d0123456789abcdefghij".parse().unwrap());
            kept.keep(&id, &disk, Some("0123")).unwrap();
            // Again, after it was adopted by a platform that does not know the version.
            assert_eq!(kept.base_of(&id, &disk).as_deref(), Some("0123"));
            kept.keep(&id, &disk, None).unwrap();
            assert_eq!(kept.base_of(&id, &disk), None);
            let list = |is_saved| {
                let (id, disk) = (id.clone(), disk.clone());
                vec![KeptDisk { id, disk, is_saved }]
            };
            assert_eq!(kept.list().unwrap(), list(false));
            kept.mark_saved(&id, &disk).unwrap();
            // The next platform finds it.
            let kept = KeptDisks::open(dir.path()).unwrap();
            assert_eq!(kept.list().unwrap(), list(true));
            kept.mark_used(&id, &disk).unwrap();
            kept.mark_used(&id, &disk).unwrap();
            assert_eq!(kept.list().unwrap(), list(false));
            fs::write(kept.path(&id, &disk).join("image"), "of processes").unwrap();
            kept.forget(&id, &disk).unwrap();
            kept.forget(&id, &disk).unwrap();
            kept
        };
        assert_eq!(kept.list().unwrap(), []);
        assert_eq!(fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count(), 0);
    }

    #[test]
    fn checkpoints_do_not_count_once_they_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptDisks::open(dir.path()).unwrap();
        let (id, disk): (SandboxId, DiskId) = ("ione".parse().unwrap(), "17".parse().unwrap());
        kept.keep(&id, &disk, None).unwrap();
        kept.forget_checkpoint(&id, &disk).unwrap();
        // An earlier platform was interrupted when it removed one.
        fs::create_dir_all(dir.path().join(DIRECTORY).join("removed.17.2/left")).unwrap();
        for _ in 0..3 {
            fs::create_dir(kept.unfinished_checkpoint(&id, &disk)).unwrap();
            fs::write(kept.unfinished_checkpoint(&id, &disk).join("pages-1.img"), "memory").unwrap();
            kept.finish_checkpoint(&id, &disk).unwrap();
            fs::create_dir(kept.unfinished_checkpoint(&id, &disk)).unwrap();
            kept.forget_checkpoint(&id, &disk).unwrap();
            assert!(!kept.checkpoint(&id, &disk).exists() && !kept.unfinished_checkpoint(&id, &disk).exists());
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let entries = || fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count();
        // The note, and what the next start removes.
        while entries() > 2 {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        kept.forget_all_but(&[disk]).unwrap();
        assert_eq!(entries(), 1);
    }

    #[test]
    fn what_no_sandbox_has_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptDisks::open(dir.path()).unwrap();
        let disks: [DiskId; 2] = ["d0123456789abcdefghij".parse().unwrap(), "17".parse().unwrap()];
        for (id, disk) in ["ione", "itwo"].into_iter().zip(&disks) {
            kept.keep(&id.parse().unwrap(), disk, None).unwrap();
        }
        // A removal was interrupted.
        fs::create_dir(dir.path().join(DIRECTORY).join("removed.d99")).unwrap();
        kept.forget_all_but(&disks[1..]).unwrap();
        let left: Vec<String> = kept
            .list()
            .unwrap()
            .into_iter()
            .map(|kept| kept.id.to_string())
            .collect();
        assert_eq!(left, ["itwo"]);
        assert_eq!(fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count(), 1);
    }
}
