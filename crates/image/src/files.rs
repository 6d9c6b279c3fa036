//! File operations that do not leave a directory, whatever the names in it are.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid};
use rustix::io::Errno;

/// How often a lookup is made again. A busy host renames and mounts some thousand times a second, and a lookup takes a
/// few microseconds: two attempts in a row that both meet something are rare already.
const ATTEMPTS: usize = 64;

/// Opens what is at a path below a directory, as far as `resolve` allows, and no link of `/proc`.
///
/// The kernel cannot tell whether a `..` stayed below the directory while anything was renamed or mounted anywhere on
/// the host, and asks for another attempt then.
pub(crate) fn open(root: impl AsFd, path: &[u8], flags: OFlags, resolve: ResolveFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    let resolve = resolve | ResolveFlags::NO_MAGICLINKS;
    for _ in 1..ATTEMPTS {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve)
}

/// Opens a directory below another one. An empty path is the directory itself.
pub(crate) fn open_dir(root: impl AsFd, path: &[u8], resolve: ResolveFlags) -> io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOCTTY;
    Ok(open(root, path, flags, resolve)?)
}

/// State of what has that name, links not followed; none if nothing has it.
pub(crate) fn stat(directory: impl AsFd, name: &[u8]) -> io::Result<Option<Stat>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Removes an entry of a directory, with everything below it. Nothing is followed.
pub(crate) fn remove(directory: impl AsFd, name: &[u8]) -> io::Result<()> {
    let directory = directory.as_fd();
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(Errno::NOENT) => return Ok(()),
        other => return Ok(other?),
    }
    let child = open_dir(directory, name, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?;
    loop {
        clear(&child)?;
        match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
            // Entries were skipped, because others were removed while the directory was read.
            Err(Errno::NOTEMPTY) if first_name(&child)?.is_some() => {}
            Err(Errno::NOENT) => return Ok(()),
            other => return Ok(other?),
        }
    }
}

/// Removes everything in a directory.
pub(crate) fn clear(directory: impl AsFd) -> io::Result<()> {
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            remove(&directory, name)?;
        }
    }
    Ok(())
}

fn first_name(directory: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    Ok(names(directory, 1)?.into_iter().next())
}

/// At most so many names in a directory.
pub(crate) fn names(directory: impl AsFd, most: usize) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        names.push(name.to_vec());
        if names.len() >= most {
            break;
        }
    }
    Ok(names)
}

/// Ids that the kernel takes: the largest one would mean "unchanged".
pub(crate) fn ids(uid: u64, gid: u64) -> Option<(Uid, Gid)> {
    let id = |id: u64| u32::try_from(id).ok().filter(|id| *id != u32::MAX);
    Some((Uid::from_raw(id(uid)?), Gid::from_raw(id(gid)?)))
}

pub(crate) fn times(mtime: (i64, u32)) -> Timestamps {
    let time = Timespec {
        tv_sec: mtime.0,
        tv_nsec: mtime.1.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Components of a path in an archive, without empty ones and `.`; none if it has `..`.
pub(crate) fn clean(path: &[u8]) -> Option<Vec<u8>> {
    let mut cleaned = Vec::with_capacity(path.len());
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return None,
            name => {
                if !cleaned.is_empty() {
                    cleaned.push(b'/');
                }
                cleaned.extend_from_slice(name);
            }
        }
    }
    Some(cleaned)
}

/// Directory and name of a path without a slash at its end.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// A path below a directory.
pub(crate) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() {
        return name.to_vec();
    }
    [directory, b"/", name].concat()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn links_with_parents_open_while_others_rename() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir_all(home.path().join("root/etc")).unwrap();
        fs::write(home.path().join("root/release"), "").unwrap();
        std::os::unix::fs::symlink("../../../release", home.path().join("root/etc/release")).unwrap();
        fs::write(home.path().join("a"), "").unwrap();
        let root = fs::File::open(home.path().join("root")).unwrap();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    fs::rename(home.path().join("a"), home.path().join("b")).unwrap();
                    fs::rename(home.path().join("b"), home.path().join("a")).unwrap();
                }
            });
            let refused = (0..20_000).find_map(|_| {
                let opened = open(&root, b"etc/release", OFlags::PATH, ResolveFlags::IN_ROOT);
                opened.err()
            });
            ended.store(true, Ordering::Relaxed);
            assert_eq!(refused, None);
        });
    }
}
