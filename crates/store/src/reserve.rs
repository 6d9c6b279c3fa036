//! The disk space reserve of a SQLite database.
//!
//! A disk that something else has filled must not prevent keys from being revoked and sandboxes from ending. So the
//! blocks of the next writes are allocated in advance: beyond the end of the file, of its write-ahead log and of the
//! index of that log, with `fallocate`, which does not change their lengths. The log is rewritten from its beginning
//! after each checkpoint and keeps its blocks; the file uses its blocks up as it grows, and gets new ones while the
//! disk has any. The logs of sandboxes are what makes it grow, so they are refused before the reserve is used up.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;

/// Reserve beyond the end of the file, in bytes: some ten thousand keys.
const FILE_BYTES: u64 = 16 << 20;
/// Reserve of the log, in bytes: four times its size when SQLite moves it into the file.
const LOG_BYTES: u64 = 16 << 20;
/// Reserve of the index of the log, in bytes: four times the 32 KiB that 16 MiB of log need.
const INDEX_BYTES: u64 = 128 << 10;

/// The files of a database, with their reserved space.
#[derive(Debug)]
pub(crate) struct Reserve {
    /// The reserved file, which is never closed: closing any descriptor of a file releases all locks of this process on
    /// it, SQLite's included.
    file: ManuallyDrop<File>,
    index: ManuallyDrop<File>,
    log: PathBuf,
    /// The last attempt to allocate the whole reserve failed.
    is_short: AtomicBool,
}

impl Reserve {
    /// Opens the files of the database at `path`, which must be open in SQLite.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let open = |path: PathBuf| OpenOptions::new().write(true).open(path).map(ManuallyDrop::new);
        Ok(Self {
            file: open(path.to_owned())?,
            index: open(sibling_path(path, "-shm"))?,
            log: sibling_path(path, "-wal"),
            is_short: AtomicBool::new(false),
        })
    }

    /// Allocates the missing part of the reserve.
    pub(crate) fn allocate(&self) -> io::Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let allocate_all = || -> io::Result<()> {
            let log = OpenOptions::new().write(true).open(&self.log)?;
            rustix::fs::fallocate(log, keep, 0, LOG_BYTES)?;
            rustix::fs::fallocate(&*self.index, keep, 0, INDEX_BYTES)?;
            rustix::fs::fallocate(&*self.file, keep, self.file.metadata()?.len(), FILE_BYTES)?;
            Ok(())
        };
        let result = allocate_all();
        self.is_short.store(result.is_err(), Ordering::Relaxed);
        result
    }

    /// Whether half of the file's reserve is used up and could not be renewed.
    pub(crate) fn is_low(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
            && self
                .file
                .metadata()
                .is_ok_and(|file| file.blocks().saturating_mul(512) < file.len() + FILE_BYTES / 2)
    }
}

/// The path of one of the files that SQLite keeps beside a database.
pub(crate) fn sibling_path(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}
