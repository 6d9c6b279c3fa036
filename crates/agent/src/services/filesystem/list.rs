//! Walks for `ListDir`.
//!
//! The tree may be any user's, and change meanwhile: the walk keeps no open files, its memory is what the answer may
//! be long, and it ends when its caller stops waiting.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use protocol::connect::{Code, Error};
use protocol::filesystem::{EntryInfo, file_type};

use super::entry;
use super::work::Abandoned;
use crate::transport::messages::MESSAGE_LIMIT;
use crate::users::Names;

/// Links that may follow each other: a promise to clients; the kernel follows 40.
const LINKS: usize = 255;

/// The entries below `path`, to that depth: every directory before what is in it, names in byte order.
///
/// # Errors
/// See [`follow`]; `invalid_argument` for what is not a directory, `internal` for one that cannot be read, and
/// `failed_precondition` when the answer would be longer than a message may be.
pub(super) fn walk(path: &Path, depth: u32, names: &Names, abandoned: &Abandoned) -> Result<Vec<EntryInfo>, Error> {
    let (root, metadata) = follow(path)?;
    if !metadata.is_dir() {
        let message = format!("path is not a directory: {}", path.display());
        return Err(Error::new(Code::InvalidArgument, message));
    }
    let mut room = Room(MESSAGE_LIMIT - 1024);
    let mut entries = Vec::new();
    // Relative paths of the directories that are being read, and what of them is left.
    let first = read_names(&root, path, &mut room, abandoned)?.unwrap_or_default();
    let mut levels = vec![(PathBuf::new(), first.into_iter())];
    while let Some((directory, left)) = levels.last_mut() {
        let Some(name) = left.next() else {
            levels.pop();
            continue;
        };
        abandoned.check()?;
        let relative = directory.join(name);
        let real = root.join(&relative);
        // What is gone by now was never listed.
        let found = match entry::read(&real, &path.join(&relative), names) {
            Ok(found) => found,
            Err(error) if is_gone(&error) => continue,
            Err(error) => {
                let message = format!("error getting file info: {}: {error}", real.display());
                return Err(Error::new(Code::Internal, message));
            }
        };
        room.take(entry::weight(&found))?;
        // Links count as what they lead to, and are not followed.
        let directory = found.kind == file_type::DIRECTORY && found.symlink_target.is_none();
        let descend = directory && levels.len() < depth.max(1) as usize;
        entries.push(found);
        if descend && let Some(names) = read_names(&real, &path.join(&relative), &mut room, abandoned)? {
            levels.push((relative, names.into_iter()));
        }
    }
    Ok(entries)
}

/// What `path` leads to, under a name that the kernel can follow.
///
/// # Errors
/// `not_found`; `failed_precondition` for links in a circle; `internal`.
fn follow(path: &Path) -> Result<(PathBuf, fs::Metadata), Error> {
    let mut real = path.to_owned();
    for _ in 0..=LINKS {
        let error = match fs::metadata(&real) {
            Ok(metadata) => return Ok((real, metadata)),
            Err(error) => error,
        };
        if error.kind() == ErrorKind::NotFound {
            let message = format!("path not found: {}: {error}", path.display());
            return Err(Error::new(Code::NotFound, message));
        }
        if error.raw_os_error() != Some(libc::ELOOP) {
            let message = format!("error getting file info: {}: {error}", path.display());
            return Err(Error::new(Code::Internal, message));
        }
        // A chain that the kernel gave up on becomes shorter by one link each time.
        let Ok(next) = fs::read_link(&real) else { break };
        real = match real.parent() {
            Some(parent) => parent.join(next),
            None => next,
        };
    }
    let message = format!("cyclic symlink or chain >{LINKS} links at \"{}\"", path.display());
    Err(Error::new(Code::FailedPrecondition, message))
}

/// The sorted names in a directory; none when it is gone.
fn read_names(
    real: &Path,
    shown: &Path,
    room: &mut Room,
    abandoned: &Abandoned,
) -> Result<Option<Vec<OsString>>, Error> {
    let unreadable = |error: io::Error| {
        let message = format!("error reading directory {}: {error}", shown.display());
        Error::new(Code::Internal, message)
    };
    let directory = match fs::read_dir(real) {
        Ok(directory) => directory,
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    let mut names = Vec::new();
    let mut reserved = 0;
    for entry in directory {
        abandoned.check()?;
        let name = entry.map_err(unreadable)?.file_name();
        // What is waiting to be listed must fit too, or names alone could fill the memory.
        reserved += 200 + name.len() * 2;
        if reserved > room.0 {
            return Err(too_long());
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(Some(names))
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Bytes that the answer may still grow by.
struct Room(usize);

impl Room {
    fn take(&mut self, bytes: usize) -> Result<(), Error> {
        self.0 = self.0.checked_sub(bytes).ok_or_else(too_long)?;
        Ok(())
    }
}

fn too_long() -> Error {
    let message = format!("the entries do not fit into an answer of {MESSAGE_LIMIT} bytes: list fewer levels or parts");
    Error::new(Code::FailedPrecondition, message)
}
