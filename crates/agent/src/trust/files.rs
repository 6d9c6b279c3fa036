//! Reading and replacing files of the image, without ever being led elsewhere.
//!
//! Root in the sandbox owns the whole tree, and an image may leave parts of it open to all. So a path
//! is walked name by name and no link in it is followed; what is read is a regular file of bounded length; what is
//! written gets its name once it is complete.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use protocol::agent::UNFINISHED_FILE;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

/// The most that is read of a file. The bundles of distributions have about 250 KiB.
const LIMIT: u64 = 4 * 1024 * 1024;
/// How often a path is looked up that others keep changing.
const ATTEMPTS: usize = 64;
/// Name of a file until it is complete. One is enough, because there is one writer.
const UNFINISHED: &str = UNFINISHED_FILE;

/// Opens the directory of a path below `root`, and returns the last name in it. With `make`, missing directories are
/// made.
pub(crate) fn parent<'a>(root: &OwnedFd, path: &'a str, make: bool) -> io::Result<(OwnedFd, &'a str)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names = path.split('/');
    let last = names.next_back().unwrap_or_default();
    let mut at = root.try_clone()?;
    for name in names {
        at = match rustix::fs::openat(&at, name, flags, Mode::empty()) {
            Err(Errno::NOENT) if make => {
                match rustix::fs::mkdirat(&at, name, Mode::from_bits_retain(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                rustix::fs::openat(&at, name, flags, Mode::empty())?
            }
            other => other?,
        };
    }
    Ok((at, last))
}

/// What else might be under a name must neither be waited for nor become our terminal.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// A file's content and its permission bits.
pub(crate) fn read(root: &OwnedFd, path: &str) -> io::Result<(Vec<u8>, Mode)> {
    let (directory, name) = parent(root, path, false)?;
    read_open(rustix::fs::openat(
        directory,
        name,
        READ | OFlags::NOFOLLOW,
        Mode::empty(),
    )?)
}

/// A file's content, wherever below `root` links lead: for what is looked through, and not passed on as it is.
pub(super) fn read_through(root: &OwnedFd, path: &str) -> io::Result<Vec<u8>> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open = || rustix::fs::openat2(root, path, READ, Mode::empty(), resolve);
    // The kernel asks for another attempt at a `..` where anything was renamed or mounted meanwhile.
    let refused = |opened: &Result<OwnedFd, Errno>| matches!(opened, Err(Errno::AGAIN));
    let file = std::iter::repeat_with(open)
        .take(ATTEMPTS)
        .find(|opened| !refused(opened));
    read_open(file.unwrap_or(Err(Errno::AGAIN))?).map(|(content, _)| content)
}

fn read_open(file: OwnedFd) -> io::Result<(Vec<u8>, Mode)> {
    let file = File::from(file);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > LIMIT {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut content = Vec::new();
    let length = file.take(LIMIT + 1).read_to_end(&mut content)?;
    if length as u64 > LIMIT {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((content, Mode::from_raw_mode(metadata.mode() & 0o777)))
}

/// Replaces the file with this name atomically. Whatever had the name before is replaced, and not written to.
pub(super) fn replace(directory: &OwnedFd, name: &str, content: &[u8], mode: Mode) -> io::Result<()> {
    replace_for(directory, name, content, mode, None)
}

/// As [`replace`], with a file of that user and group if it is to be theirs, from its first byte on.
pub(crate) fn replace_for(
    directory: &OwnedFd,
    name: &str,
    content: &[u8],
    mode: Mode,
    owner: Option<(Uid, Gid)>,
) -> io::Result<()> {
    // What is there was left by one that was interrupted, or put there to be followed.
    match rustix::fs::unlinkat(directory, UNFINISHED, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        directory,
        UNFINISHED,
        flags,
        Mode::RUSR | Mode::WUSR,
    )?);
    let owned = match owner {
        Some((user, group)) => rustix::fs::fchown(&file, Some(user), Some(group)),
        None => Ok(()),
    };
    let written = owned
        .map_err(io::Error::from)
        .and_then(|()| file.write_all(content))
        .and_then(|()| Ok(rustix::fs::fchmod(&file, mode)?))
        .and_then(|()| Ok(rustix::fs::renameat(directory, UNFINISHED, directory, name)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(directory, UNFINISHED, AtFlags::empty());
    }
    written
}
