//! The data directory: made private, recognised as ours, and held by one process at a time.
//!
//! Invariant: no directory that is not ours is ever changed. A mistyped `--data-dir /srv` must not turn another's
//! directory private, so an existing one is taken only when it is empty or carries our lock file.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use runtime::files::if_there;
use runtime::identity::ProcessIdentity;
use rustix::fs::FlockOperation;
use secrecy::zeroize::Zeroizing;

/// Name of the file whose lock says that a process works on the directory, and whose content says which.
pub(crate) const LOCK_FILE: &str = "lock";

/// Name of the file of the master key: 64 hexadecimal characters, so that it fits into any secret store.
pub(crate) const MASTER_FILE: &str = "secret.key";

/// Name of the file that replaces the lock file while a backup is restored to the directory.
pub(crate) const RESTORING: &str = "restore.unfinished";

/// How long to wait for a lock whose owner is gone, or has not written yet who it is. A process between clone and exec
/// has every descriptor of the one that made it, and keeps the lock for the milliseconds until it executes its program.
const OWNERLESS: Duration = Duration::from_secs(5);
/// Pause between two looks at such a lock.
const PAUSE: Duration = Duration::from_millis(2);

/// Another process works on the data directory.
#[derive(Debug, thiserror::Error)]
#[error("the data directory {} is in use by {}", .path.display(), described(.owner.as_ref()))]
pub(crate) struct InUse {
    /// The directory.
    pub(crate) path: PathBuf,
    /// The process that holds it, as it wrote down itself, if it lives.
    pub(crate) owner: Option<Owner>,
}

fn described(owner: Option<&Owner>) -> String {
    match owner {
        Some(owner) => format!("another ringfence (process {})", owner.pid()),
        None => {
            format!("a process that an earlier ringfence left behind; `fuser {LOCK_FILE}` in that directory shows it")
        }
    }
}

/// The process that has written itself into the lock file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This very process.
    Process(ProcessIdentity),
    /// Whichever process has this number: earlier versions wrote no more.
    Number(i32),
}

impl Owner {
    fn parse(text: &str) -> Option<Self> {
        ProcessIdentity::parse(text)
            .map(Self::Process)
            .or_else(|| text.trim().parse().ok().map(Self::Number))
    }

    /// Pid of the process.
    pub(crate) fn pid(&self) -> i32 {
        match self {
            Self::Process(identity) => identity.pid(),
            Self::Number(pid) => *pid,
        }
    }

    fn lives(&self) -> bool {
        match self {
            Self::Process(identity) => identity.is_running(),
            Self::Number(pid) => ProcessIdentity::of(*pid).is_ok(),
        }
    }
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
        let existing = if_there(fs::metadata(path));
        match existing.with_context(|| format!("open the data directory {}", path.display()))? {
            None => {
                if let Some(parent) = path.parent() {
                    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
                }
                DirBuilder::new()
                    .mode(0o700)
                    .create(path)
                    .with_context(|| format!("create the data directory {}", path.display()))?;
            }
            Some(metadata) => {
                check_owner(path, &metadata)?;
                if path.join(RESTORING).exists() {
                    bail!(
                        "{} has a restore that was interrupted: remove it, and restore again",
                        path.display()
                    );
                }
                if !is_ours(path).with_context(|| format!("read the data directory {}", path.display()))? {
                    bail!(
                        "{} is not empty and no data directory of ringfence; name another with --data-dir",
                        path.display()
                    );
                }
                make_private(path, &metadata)?;
            }
        }
        let dir = Self { path: path.to_owned() };
        // The lock file marks the directory as ours from the first moment on.
        dir.open_lock_file()?;
        Ok(dir)
    }

    /// Makes an empty directory private, which is to become a data directory.
    ///
    /// # Errors
    /// When it belongs to another user, or the system refuses.
    pub(crate) fn check_empty(path: &Path) -> Result<()> {
        let metadata = fs::metadata(path).with_context(|| format!("open the data directory {}", path.display()))?;
        check_owner(path, &metadata)?;
        make_private(path, &metadata)
    }

    /// Whether this directory is there and no platform has ever used it.
    pub(crate) fn is_unused(path: &Path) -> bool {
        !path.join(LOCK_FILE).exists() && is_ours(path).unwrap_or(false)
    }

    /// The directory of an earlier start.
    ///
    /// # Errors
    /// When there is none, or it is not ours.
    pub(crate) fn existing(path: &Path) -> Result<Self> {
        let lock = if_there(fs::metadata(path.join(LOCK_FILE)));
        match lock.with_context(|| format!("open the data directory {}", path.display()))? {
            Some(_) => Ok(Self { path: path.to_owned() }),
            None => bail!("there is no data directory of ringfence at {}", path.display()),
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
        let deadline = Instant::now() + OWNERLESS;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error).context("lock the data directory"),
            }
            let owner = read_owner(&file).filter(Owner::lives);
            if owner.is_some() || Instant::now() > deadline {
                return Err(InUse {
                    path: self.path.clone(),
                    owner,
                }
                .into());
            }
            std::thread::sleep(PAUSE);
        }
        let written = ProcessIdentity::own().and_then(|own| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{own}")
        });
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

    /// Creates a directory below the data directory, unless it exists.
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

    /// Removes a file of the data directory, if it exists.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        if_there(fs::remove_file(&path)).with_context(|| format!("remove {}", path.display()))?;
        Ok(())
    }

    /// Reads a file of the data directory, which may be a secret; none if there is no such file.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub(crate) fn read(&self, name: impl AsRef<Path>) -> Result<Option<Zeroizing<Vec<u8>>>> {
        let path = self.path.join(name);
        let content = if_there(fs::read(&path)).with_context(|| format!("read {}", path.display()))?;
        Ok(content.map(Zeroizing::new))
    }

    /// As [`Self::read`], of a text.
    ///
    /// # Errors
    /// When the file is there and cannot be read, or is no text.
    pub(crate) fn read_text(&self, name: &str) -> Result<Option<Zeroizing<String>>> {
        let path = self.path.join(name);
        let text = if_there(fs::read_to_string(&path)).with_context(|| format!("read {}", path.display()))?;
        Ok(text.map(Zeroizing::new))
    }
}

/// Replaces a file as a whole: after a crash there is the old content or the new, never a part.
///
/// # Errors
/// When the system refuses.
pub(crate) fn write_and_rename(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let temporary = parent.join(format!(".{}.new", name.display()));
    // One left over by a crash would keep its own mode.
    if_there(fs::remove_file(&temporary))?;
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
        // A number without a process would only mislead readers of the file.
        let _ = self.file.set_len(0);
    }
}

fn check_owner(path: &Path, metadata: &fs::Metadata) -> Result<()> {
    if !metadata.is_dir() {
        bail!("the data directory {} is not a directory", path.display());
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        bail!("the data directory {} belongs to another user", path.display());
    }
    Ok(())
}

fn make_private(path: &Path, metadata: &fs::Metadata) -> Result<()> {
    if metadata.mode() & 0o077 != 0 {
        fs::set_permissions(path, Permissions::from_mode(0o700))
            .with_context(|| format!("make the data directory {} private", path.display()))?;
    }
    Ok(())
}

fn is_ours(path: &Path) -> io::Result<bool> {
    let mut empty = true;
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if name == LOCK_FILE {
            return Ok(true);
        }
        // A disk of its own for the data begins with the one, and a further server of a service is given the other.
        empty &= name == "lost+found" || name == MASTER_FILE;
    }
    Ok(empty)
}

fn read_owner(file: &File) -> Option<Owner> {
    let mut bytes = [0; 128];
    let length = file.read_at(&mut bytes, 0).ok()?;
    Owner::parse(std::str::from_utf8(&bytes[..length]).ok()?)
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
        assert_eq!(in_use.owner, Some(Owner::Process(ProcessIdentity::own().unwrap())));
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        drop(lock);
        dir.lock().unwrap();
    }

    #[test]
    fn a_lock_whose_owner_is_gone_is_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let path = dir.path().join(LOCK_FILE);
        #[expect(clippy::disallowed_methods, reason = "a process that ends at once")]
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        let pid = gone.id();
        gone.wait().unwrap();
        let own = ProcessIdentity::own().unwrap();
        let [number, began, boot] = own
            .to_string()
            .split(' ')
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .try_into()
            .unwrap();
        let records = [
            // Nothing yet, a number of nobody, this very number earlier and in another life of the machine.
            String::new(),
            pid.to_string(),
            format!("{number} {} {boot}", began.parse::<u64>().unwrap() - 1),
            format!("{number} {began} another"),
        ];
        for record in records {
            // What a child between clone and exec has.
            let kept = fs::OpenOptions::new().write(true).open(&path).unwrap();
            rustix::fs::flock(&kept, FlockOperation::LockExclusive).unwrap();
            fs::write(&path, &record).unwrap();
            let waiting = std::thread::spawn({
                let dir = dir.clone();
                move || dir.lock().map(drop)
            });
            // It does not give up at once.
            std::thread::sleep(PAUSE * 5);
            assert!(!waiting.is_finished(), "{record}");
            drop(kept);
            waiting.join().unwrap().unwrap();
        }
    }

    #[test]
    fn the_owner_that_an_earlier_version_wrote_counts_while_it_lives() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let lock = dir.lock().unwrap();
        fs::write(dir.path().join(LOCK_FILE), format!("{}\n", std::process::id())).unwrap();
        let refused = dir.lock().unwrap_err();
        let owner = refused.downcast_ref::<InUse>().unwrap().owner.clone();
        assert_eq!(owner, Some(Owner::Number(std::process::id().cast_signed())));
        drop(lock);
    }

    #[test]
    fn a_directory_of_another_program_is_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("letter"), "dear").unwrap();
        fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
        let refused = DataDir::prepare(temp.path()).unwrap_err();
        assert!(refused.to_string().contains("not empty"), "{refused}");
        assert_eq!(fs::metadata(temp.path()).unwrap().mode() & 0o777, 0o755);
        assert!(DataDir::existing(temp.path()).is_err());
        for other in [temp.path(), &temp.path().join("absent"), &temp.path().join("letter")] {
            assert!(!DataDir::is_unused(other), "{}", other.display());
        }
    }

    #[test]
    fn an_empty_directory_becomes_private() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("lost+found")).unwrap();
        fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
        assert!(DataDir::is_unused(temp.path()));
        DataDir::prepare(temp.path()).unwrap();
        assert!(!DataDir::is_unused(temp.path()));
        assert_eq!(fs::metadata(temp.path()).unwrap().mode() & 0o777, 0o700);
        DataDir::existing(temp.path()).unwrap();
    }

    #[test]
    fn a_directory_with_a_master_key_alone_becomes_one() {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join(MASTER_FILE), "00".repeat(32)).unwrap();
        assert!(DataDir::is_unused(temp.path()));
        DataDir::prepare(temp.path()).unwrap();
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
