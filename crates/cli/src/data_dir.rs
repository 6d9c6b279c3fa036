//! The data directory: made private, recognised as ours, and held by one process at a time.
//!
//! Invariant: no directory that is not ours is ever changed. A mistyped `--data-dir /srv` must not turn somebody's
//! directory private, so an existing one is taken only when it is empty or carries our lock file.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::FlockOperation;

/// Name of the file whose lock says that a process works on the directory, and whose content says which.
const LOCK_FILE: &str = "lock";

/// Somebody else works on the data directory.
#[derive(Debug, thiserror::Error)]
#[error("the data directory {} is in use by another ringfence{}", .path.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
pub(crate) struct InUse {
    /// The directory.
    pub(crate) path: PathBuf,
    /// The process that holds it, as it wrote down itself.
    pub(crate) pid: Option<i32>,
}

/// A data directory that exists.
#[derive(Debug, Clone)]
pub(crate) struct DataDir {
    path: PathBuf,
}

impl DataDir {
    /// Makes the directory, or checks that an existing one is ours, and makes it private.
    ///
    /// # Errors
    /// When it holds something else, belongs to another user, or the system refuses.
    pub(crate) fn prepare(path: &Path) -> Result<Self> {
        let existing = match fs::metadata(path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(|| format!("open the data directory {}", path.display())),
        };
        match existing {
            None => {
                if let Some(parent) = path.parent() {
                    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
                }
                DirBuilder::new()
                    .mode(0o700)
                    .create(path)
                    .with_context(|| format!("make the data directory {}", path.display()))?;
            }
            Some(metadata) => {
                if !metadata.is_dir() {
                    bail!("the data directory {} is not a directory", path.display());
                }
                if metadata.uid() != rustix::process::geteuid().as_raw() {
                    bail!("the data directory {} belongs to another user", path.display());
                }
                if !is_ours(path).with_context(|| format!("read the data directory {}", path.display()))? {
                    bail!(
                        "{} is not empty and no data directory of ringfence; name another with --data-dir",
                        path.display()
                    );
                }
                if metadata.mode() & 0o077 != 0 {
                    fs::set_permissions(path, Permissions::from_mode(0o700))
                        .with_context(|| format!("make the data directory {} private", path.display()))?;
                }
            }
        }
        let dir = Self { path: path.to_owned() };
        // The lock file marks the directory as ours from the first moment on.
        dir.open_lock_file()?;
        Ok(dir)
    }

    /// The directory of an earlier start.
    ///
    /// # Errors
    /// When there is none, or it is not ours.
    pub(crate) fn existing(path: &Path) -> Result<Self> {
        match fs::metadata(path.join(LOCK_FILE)) {
            Ok(_) => Ok(Self { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!("there is no data directory of ringfence at {}", path.display())
            }
            Err(error) => Err(error).with_context(|| format!("open the data directory {}", path.display())),
        }
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the directory for this process, until the lock is dropped or the process ends in whatever way.
    ///
    /// # Errors
    /// [`InUse`] when another process has it.
    pub(crate) fn lock(&self) -> Result<Lock> {
        let mut file = self.open_lock_file()?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(InUse {
                    path: self.path.clone(),
                    pid: read_pid(&mut file),
                }
                .into());
            }
            Err(error) => return Err(error).context("lock the data directory"),
        }
        let pid = std::process::id();
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{pid}"));
        written.context("write the lock file")?;
        Ok(Lock { file })
    }

    fn open_lock_file(&self) -> Result<File> {
        let path = self.path.join(LOCK_FILE);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))
    }

    /// Replaces a file of the directory as a whole: after a crash there is the old content or the new, never a part.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn write_private(&self, name: &str, content: &[u8]) -> Result<()> {
        self.write(name, 0o600, content)
    }

    /// As [`Self::write_private`], with a mode, and also below a directory of the directory.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn write(&self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        write_and_rename(&path, mode, content).with_context(|| format!("write {}", path.display()))
    }

    /// Makes a directory below the directory, unless it is there.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn make_directory(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match DirBuilder::new().mode(0o755).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(error).with_context(|| format!("make {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Removes a file of the directory, if it is there.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }
}

fn write_and_rename(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let temporary = parent.join(format!(".{}.new", name.display()));
    // One left over by a crash would keep its own mode.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(content)?;
    // By the file and not when it is opened: what everybody may read must not depend on the umask.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(parent)?.sync_all()
}

/// A data directory held by this process.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A number without a process would only mislead whoever reads the file.
        let _ = self.file.set_len(0);
    }
}

fn is_ours(path: &Path) -> io::Result<bool> {
    let mut empty = true;
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if name == LOCK_FILE {
            return Ok(true);
        }
        // A disk of its own for the data begins with this directory.
        empty &= name == "lost+found";
    }
    Ok(empty)
}

fn read_pid(file: &mut File) -> Option<i32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_directory_is_private_and_locks_once() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a/b");
        let dir = DataDir::prepare(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        let lock = dir.lock().unwrap();
        let refused = DataDir::prepare(&path).unwrap().lock().unwrap_err();
        let in_use = refused.downcast_ref::<InUse>().unwrap();
        assert_eq!(in_use.pid, i32::try_from(std::process::id()).ok());
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        drop(lock);
        dir.lock().unwrap();
    }

    #[test]
    fn a_directory_of_somebody_else_stays_as_it_is() {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("letter"), "dear").unwrap();
        fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
        let refused = DataDir::prepare(temp.path()).unwrap_err();
        assert!(refused.to_string().contains("not empty"), "{refused}");
        assert_eq!(fs::metadata(temp.path()).unwrap().mode() & 0o777, 0o755);
        assert!(DataDir::existing(temp.path()).is_err());
    }

    #[test]
    fn an_empty_directory_becomes_private() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("lost+found")).unwrap();
        fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
        DataDir::prepare(temp.path()).unwrap();
        assert_eq!(fs::metadata(temp.path()).unwrap().mode() & 0o777, 0o700);
        DataDir::existing(temp.path()).unwrap();
    }

    #[test]
    fn files_are_replaced_as_a_whole_and_private() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        fs::write(dir.path().join(".secret.new"), "left by a crash").unwrap();
        dir.write_private("secret", b"one").unwrap();
        dir.write_private("secret", b"two").unwrap();
        let path = dir.path().join("secret");
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(!dir.path().join(".secret.new").exists());
    }
}
