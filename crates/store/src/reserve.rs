//! Disk space that a SQLite database holds for itself.
//!
//! A disk that something else has filled must not keep keys from being revoked and sandboxes from ending. So the blocks
//! that the next writes need are taken ahead: beyond the end of the file, of its write-ahead log and of the index of
//! that log, where `fallocate` puts them without changing a length. The log is written from its beginning again after
//! each checkpoint and keeps its blocks; the file uses them up as it grows, and is given new ones while there are any.
//! What grows it are the logs of sandboxes, so those stop before it has none left.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;

/// What is held beyond the end of the file, in bytes: some ten thousand keys.
const FILE: u64 = 16 << 20;
/// What is held for the log, in bytes: four times what it has when SQLite moves it into the file.
const LOG: u64 = 16 << 20;
/// What is held for the index of the log, in bytes: 32 KiB for each 16 MiB of the log, and twice that once more.
const INDEX: u64 = 128 << 10;

/// The files of a database whose space is held.
#[derive(Debug)]
pub(crate) struct Reserve {
    /// Never closed: closing any descriptor of a file drops all locks that this process has on it, SQLite's included.
    file: ManuallyDrop<File>,
    index: ManuallyDrop<File>,
    log: PathBuf,
    /// The last attempt to hold all of it found the disk full.
    is_short: AtomicBool,
}

impl Reserve {
    /// Prepares to hold space for the database in that file, which is open.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let open = |path: PathBuf| OpenOptions::new().write(true).open(path).map(ManuallyDrop::new);
        Ok(Self {
            file: open(path.to_owned())?,
            index: open(beside(path, "-shm"))?,
            log: beside(path, "-wal"),
            is_short: AtomicBool::new(false),
        })
    }

    /// Takes what is missing.
    pub(crate) fn hold(&self) -> io::Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let hold = || -> io::Result<()> {
            let log = OpenOptions::new().write(true).open(&self.log)?;
            rustix::fs::fallocate(log, keep, 0, LOG)?;
            rustix::fs::fallocate(&*self.index, keep, 0, INDEX)?;
            rustix::fs::fallocate(&*self.file, keep, self.file.metadata()?.len(), FILE)?;
            Ok(())
        };
        let held = hold();
        self.is_short.store(held.is_err(), Ordering::Relaxed);
        held
    }

    /// Whether so little is left that only what must be written may be.
    pub(crate) fn is_low(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
            && self
                .file
                .metadata()
                .is_ok_and(|file| file.blocks().saturating_mul(512) < file.len() + FILE / 2)
    }
}

/// The path of one of the files that SQLite keeps beside a database.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}
