//! Removing whole trees.
//!
//! The tree may be any user's, of any depth, and change meanwhile. Therefore the way down does not recurse, and holds
//! one open directory at a time, and the way up checks that `..` is still where it came from: nothing outside the tree
//! is ever removed. Links are removed, not followed.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::work::Abandoned;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);

/// Removes what is at `path`, and everything below. Nothing there is fine. Stops at the first thing that cannot be
/// removed, and when the caller stops waiting.
///
/// # Errors
/// Those of the system calls; EINVAL for a path that ends in no name; ECANCELED.
pub(super) fn remove(path: &Path, abandoned: &Abandoned) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    match remove_below(parent, name, abandoned) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A directory that is being emptied.
struct Level {
    /// Name of the directory in its parent.
    name: CString,
    /// Device and inode of the parent.
    parent: (u64, u64),
}

fn remove_below(parent: &Path, name: &OsStr, abandoned: &Abandoned) -> rustix::io::Result<()> {
    let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?;
    // The path to the parent may well be a link.
    let mut current = rustix::fs::openat(
        CWD,
        parent,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    if remove_one(&current, &name, None)? {
        return Ok(());
    }
    let mut levels = Vec::new();
    current = descend(current, name, &mut levels)?;
    while !levels.is_empty() {
        match empty(&current, abandoned)? {
            Some(full) => current = descend(current, full, &mut levels)?,
            None => {
                let Some(level) = levels.pop() else { break };
                current = rustix::fs::openat(&current, c"..", DIRECTORY, Mode::empty())?;
                if identity(&current)? != level.parent {
                    // It was moved meanwhile; what `..` is now is not ours to touch.
                    return Err(Errno::BUSY);
                }
                if !remove_one(&current, &level.name, Some(FileType::Directory))? {
                    // A new entry was put in.
                    current = descend(current, level.name, &mut levels)?;
                }
            }
        }
    }
    Ok(())
}

/// Opens a directory to empty it; where the name is no longer a directory, the directory before it is returned, to be
/// read again.
fn descend(from: OwnedFd, name: CString, levels: &mut Vec<Level>) -> rustix::io::Result<OwnedFd> {
    let parent = identity(&from)?;
    match rustix::fs::openat(&from, &name, DIRECTORY, Mode::empty()) {
        Ok(directory) => {
            levels.push(Level { name, parent });
            Ok(directory)
        }
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if !levels.is_empty() => Ok(from),
        Err(error) => Err(error),
    }
}

/// Removes what is in a directory, up to the first directory in it that is not empty, whose name is the result.
fn empty(directory: &OwnedFd, abandoned: &Abandoned) -> rustix::io::Result<Option<CString>> {
    for entry in Dir::read_from(directory)? {
        if abandoned.is_true() {
            return Err(Errno::CANCELED);
        }
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." && !remove_one(directory, name, Some(entry.file_type()))? {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

/// Removes a file or an empty directory. Whether it is gone; else it is a directory with something in it.
fn remove_one(directory: &OwnedFd, name: &std::ffi::CStr, kind: Option<FileType>) -> rustix::io::Result<bool> {
    if kind != Some(FileType::Directory) {
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(true),
            Err(Errno::ISDIR) => {}
            Err(error) => return Err(error),
        }
    }
    match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        // It was a directory a moment ago.
        Err(Errno::NOTDIR) => {
            rustix::fs::unlinkat(directory, name, AtFlags::empty())?;
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

fn identity(directory: &OwnedFd) -> rustix::io::Result<(u64, u64)> {
    let found = rustix::fs::fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn check(path: &Path) {
        remove(path, &Abandoned::default()).unwrap();
        assert!(fs::symlink_metadata(path).is_err());
    }

    #[test]
    fn trees_of_any_shape() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        check(&tree);
        check(&tree.join("below/nothing"));
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        for number in 0..3000 {
            fs::write(tree.join(format!("a/b/{number}")), "").unwrap();
            fs::create_dir_all(tree.join(format!("many/{number}/x"))).unwrap();
        }
        fs::create_dir(root.path().join("kept")).unwrap();
        fs::write(root.path().join("kept/file"), "").unwrap();
        std::os::unix::fs::symlink(root.path().join("kept"), tree.join("a/link")).unwrap();
        check(&tree);
        std::os::unix::fs::symlink(root.path().join("kept"), &tree).unwrap();
        check(&tree);
        assert!(root.path().join("kept/file").exists());
        assert!(remove(Path::new("/"), &Abandoned::default()).is_err());
        assert!(remove(&root.path().join("kept/file/x"), &Abandoned::default()).is_err());
    }

    #[test]
    fn deeper_than_a_stack_or_a_path() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut at = rustix::fs::openat(CWD, &tree, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&at, c"directory", Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, c"directory", DIRECTORY, Mode::empty()).unwrap();
        }
        check(&tree);
    }

    #[test]
    fn an_abandoned_removal_stops() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("tree")).unwrap();
        fs::write(root.path().join("tree/file"), "").unwrap();
        let abandoned = Abandoned::default();
        drop(abandoned.when_dropped());
        assert!(remove(&root.path().join("tree"), &abandoned).is_err());
        assert!(root.path().join("tree/file").exists());
    }
}
