//! What the kernel is asked for and reports: the events of inotify, and why it does not watch something.

use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use protocol::connect::{Code, Error};
use rustix::fs::inotify::{ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// Bytes that are read from the kernel at once: up to a thousand events.
const BATCH: usize = 16 * 1024;
/// Events for which each directory is watched.
pub(super) const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);
/// NFS, SMB (three magics) and FUSE, where changes by other machines cause no events here.
const NETWORK: [u64; 5] = [0x6969, 0xFF53_4D42, 0x517B, 0xFE53_4D42, 0x6573_5546];

/// One event of inotify.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) watch: i32,
    pub(super) flags: ReadFlags,
    pub(super) cookie: u32,
    pub(super) name: Option<OsString>,
}

/// Reads a batch of pending events.
///
/// # Errors
/// `WouldBlock` when there are none.
pub(super) fn read_batch(inotify: &OwnedFd) -> io::Result<Vec<Raw>> {
    let mut buffer = vec![MaybeUninit::<u8>::uninit(); BATCH];
    let mut reader = Reader::new(inotify, &mut buffer);
    let mut batch = Vec::new();
    loop {
        let event = reader.next()?;
        batch.push(Raw {
            watch: event.wd(),
            flags: event.events(),
            cookie: event.cookie(),
            name: event
                .file_name()
                .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
        });
        if reader.is_buffer_empty() {
            return Ok(batch);
        }
    }
}

/// Whether an error says that the path is not a directory, or no longer one.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
}

/// Whether the path is on a network file system, which other machines may change.
///
/// # Errors
/// `internal` when the file system does not say.
pub(super) fn is_network(path: &Path) -> Result<bool, Error> {
    let found = rustix::fs::statfs(path).map_err(|error| {
        let message = format!("error getting file system info: {}: {error}", path.display());
        Error::new(Code::Internal, message)
    })?;
    // Magics are 32 bits, which some architectures extend by their sign.
    let magic = u64::from_ne_bytes(found.f_type.to_ne_bytes()) & 0xFFFF_FFFF;
    Ok(NETWORK.contains(&magic))
}

/// The error of a directory that the kernel does not watch.
pub(super) fn not_added(path: &Path, error: Errno) -> Error {
    let shown = path.display();
    let hint = if error == Errno::NOSPC {
        " (limit of inotify watches)"
    } else {
        ""
    };
    Error::new(
        Code::Internal,
        format!("error adding path {shown} to watcher: {error}{hint}"),
    )
}
