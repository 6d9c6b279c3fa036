//! Files of a checkpoint that have lost their names.
//!
//! A file that processes have open after its name was removed is part of the checkpoint, and CRIU calls it a ghost. A restore
//! creates it where it was, under a name with an ending of CRIU's, opens it, and removes that name. A directory is created
//! under its own name. A file that has another name is linked under one of CRIU's when the checkpoint is written, and that name is
//! in the way of nothing. Where the directory of such a file is gone, too, CRIU takes the nearest one above it that is there.
//! A socket is bound again where it was, and its name removed.
//!
//! # Links
//!
//! CRIU does all of that by path. What is in the path is the sandbox's: where a directory was, there may be a link by now, and
//! CRIU would follow it. It would reach nothing of the host ([`super::jail`]), but it is not the place of the file either. So
//! every directory of these paths has to be a real one, or to be gone: [`obstacle`] looks when a checkpoint is written, and
//! [`misplaced`] again before each restore, on the disk that the restore is given.
//!
//! # What is left
//!
//! A restore that is killed leaves the name on the disk of the sandbox, and the next one refuses to replace it: it would fail
//! again and again. So before each restore these names are removed.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::lost::{FILES_MAX, How, LISTS, Lost, lost};

/// Maximum length of a path in a reason.
const SHOWN_MAX: usize = 200;
/// How many names are looked for, at most, in directories above those where the next restore would make them. There they
/// are not in its way; they would only be left.
const ABOVE_MAX: usize = 100_000;
/// Maximum length of a name and of a path that a restore makes, in bytes: what the kernel allows, and room for the place
/// at which CRIU mounts the file system.
const NAME_MAX: usize = 255;
const PATH_MAX: usize = 3800;

/// Why a restore from a checkpoint could not make all of its files that have lost their names, or would have to read too much for
/// it. `root` is the root directory of the sandbox, which stands still.
///
/// # Errors
/// Those of [`lost`], and of the kernel.
pub(crate) fn obstacle(checkpoint: BorrowedFd<'_>, root: BorrowedFd<'_>) -> io::Result<Option<String>> {
    for file in LISTS {
        let bytes = match rustix::fs::statat(checkpoint, file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => u64::try_from(stat.st_size).map_err(io::Error::other)?,
            Err(Errno::NOENT) => 0,
            Err(error) => return Err(error.into()),
        };
        if bytes > FILES_MAX {
            let mib = FILES_MAX >> 20;
            return Ok(Some(format!("the list of its open files is longer than {mib} MiB")));
        }
    }
    let lost = lost(checkpoint)?;
    let is_too_long = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.len() > NAME_MAX || path.as_os_str().len() > PATH_MAX
    };
    if lost.iter().filter_map(Lost::left).any(|path| is_too_long(&path)) {
        let why = "a deleted file that is still open had a name too long to be restored";
        return Ok(Some(why.to_owned()));
    }
    if let Some(why) = misplaced(&lost, root, "/", &["/"])? {
        return Ok(Some(why));
    }
    for path in lost.iter().filter(|lost| lost.is_directory()).map(|lost| &lost.path) {
        // A restore would take the new one for it, and remove that.
        if exists(root, path)? {
            let why = format!("a deleted directory that is still open was made again: {}", shown(path));
            return Ok(Some(why));
        }
    }
    Ok(None)
}

/// Why the files that have lost their names cannot be where they were, in a file system that is to be mounted at `target`, of
/// those in `targets`: something that is no directory is in the path of one.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn misplaced(
    lost: &[Lost],
    root: BorrowedFd<'_>,
    target: &str,
    targets: &[&str],
) -> io::Result<Option<String>> {
    let mut seen = HashSet::new();
    for path in lost.iter().flat_map(Lost::paths) {
        let path = Path::new("/").join(path);
        let Some(inside) = inside(&path, target, targets) else {
            continue;
        };
        let directory = inside.parent().unwrap_or(Path::new(""));
        if seen.insert(directory.to_owned()) && !is_real(root, directory)? {
            let why = format!(
                "a file that is open has lost its name in {}, which is no directory now",
                shown(directory)
            );
            return Ok(Some(why));
        }
    }
    for link in lost.iter().filter_map(|lost| match &lost.how {
        How::Linked(link) => Some(Path::new("/").join(link)),
        How::Ghost(_) | How::Directory | How::Socket => None,
    }) {
        let Some(inside) = inside(&link, target, targets) else {
            continue;
        };
        if is_link(root, inside)? {
            return Ok(Some(format!(
                "a link is in the place of a file that is open: {}",
                shown(inside)
            )));
        }
    }
    Ok(None)
}

/// The path from `target` on, if that is the innermost of `targets` that it is in.
fn inside<'a>(path: &'a Path, target: &str, targets: &[&str]) -> Option<&'a Path> {
    let holds = |target: &&&str| path.starts_with(target);
    let innermost = targets.iter().filter(holds).max_by_key(|target| target.len());
    (innermost == Some(&target)).then(|| path.strip_prefix(target).ok())?
}

/// Whether everything in this path is a directory, as far as it is there.
fn is_real(root: BorrowedFd<'_>, directory: &Path) -> io::Result<bool> {
    if directory.components().any(|part| part == Component::ParentDir) {
        return Ok(false);
    }
    for directory in directory.ancestors() {
        match open(directory, root) {
            Ok(_) => return Ok(true),
            Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

fn exists(root: BorrowedFd<'_>, path: &Path) -> io::Result<bool> {
    Ok(kind(root, path)?.is_some())
}

fn is_link(root: BorrowedFd<'_>, path: &Path) -> io::Result<bool> {
    Ok(kind(root, path)?.is_some_and(FileType::is_symlink))
}

/// What is at a path whose directories are real, if something is.
fn kind(root: BorrowedFd<'_>, path: &Path) -> io::Result<Option<FileType>> {
    let directory = match open(path.parent().unwrap_or(Path::new("")), root) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    match rustix::fs::statat(
        &directory,
        path.file_name().unwrap_or_default(),
        AtFlags::SYMLINK_NOFOLLOW,
    ) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A path of the sandbox's in a sentence.
fn shown(path: &Path) -> String {
    let text: String = path.to_string_lossy().chars().take(SHOWN_MAX).collect();
    format!("{:?}", format!("/{}", text.trim_start_matches('/')))
}

/// Removes what a restore that was killed has left of the files that have lost their names, in a file system that is to be
/// mounted at `target`, of those in `targets`.
///
/// A sandbox may have as many of them as it has memory for, in directories as deep as it likes. So each directory is opened
/// once, and what this costs is less than what CRIU does for the same files.
///
/// # Errors
/// When the kernel refuses to remove something.
pub(crate) fn remove(lost: &[Lost], root: BorrowedFd<'_>, target: &str, targets: &[&str]) -> io::Result<()> {
    let paths: Vec<PathBuf> = lost
        .iter()
        .filter_map(|lost| Some(Path::new("/").join(lost.left()?)))
        .collect();
    let mut by_directory: BTreeMap<&Path, Vec<&OsStr>> = BTreeMap::new();
    for path in paths.iter().filter_map(|path| inside(path, target, targets)) {
        if let (Some(directory), Some(name)) = (path.parent(), path.file_name()) {
            by_directory.entry(directory).or_default().push(name);
        }
    }
    for path in lost
        .iter()
        .filter(|lost| lost.is_directory())
        .map(|lost| Path::new("/").join(&lost.path))
    {
        if let Some(path) = inside(&path, target, targets) {
            remove_empty(path, root)?;
        }
    }
    let mut above = ABOVE_MAX;
    for (directory, names) in by_directory {
        let mut is_nearest = true;
        for directory in directory.ancestors() {
            let directory = match open(directory, root) {
                Ok(directory) => directory,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::NAMETOOLONG) => continue,
                Err(error) => return Err(error.into()),
            };
            if !is_nearest {
                let Some(left) = above.checked_sub(names.len()) else {
                    break;
                };
                above = left;
            }
            is_nearest = false;
            for name in &names {
                match remove_one(name, directory.as_fd()) {
                    Ok(()) | Err(Errno::NOENT | Errno::NAMETOOLONG) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
    Ok(())
}

/// Opens a directory, without following any link of the sandbox's.
fn open(directory: &Path, root: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let directory = if directory.as_os_str().is_empty() {
        Path::new(".")
    } else {
        directory
    };
    rustix::fs::openat2(
        root,
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

/// Removes a directory that a restore has left: there was none when the checkpoint was written, and none has anything in it.
fn remove_empty(path: &Path, root: BorrowedFd<'_>) -> io::Result<()> {
    let removed = open(path.parent().unwrap_or(Path::new("")), root)
        .and_then(|above| rustix::fs::unlinkat(above, path.file_name().unwrap_or_default(), AtFlags::REMOVEDIR));
    match removed {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NOTEMPTY | Errno::NAMETOOLONG) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn remove_one(name: &OsStr, directory: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prost::Message as _;

    use super::super::lost::tests::{FILES, REMAPS, directory, file, ghost, linked};
    use super::super::lost::{FileEntry, RegularFile};
    use super::*;

    #[test]
    fn a_path_through_anything_but_directories_is_found_out() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("real/below")).unwrap();
        fs::create_dir_all(at("usr/lib")).unwrap();
        fs::write(at("file"), "").unwrap();
        for (link, to) in [
            ("absolute", "/etc"),
            ("relative", "real"),
            ("real/below/up", ".."),
            ("usr/link", "lib"),
            ("gone", "nowhere"),
        ] {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        let dir = fs::File::open(root.path()).unwrap();
        let check = |lost: Lost, is_misplaced: bool| {
            let why = misplaced(std::slice::from_ref(&lost), dir.as_fd(), "/", &["/"]).unwrap();
            assert_eq!(why.is_some(), is_misplaced, "{lost:?}: {why:?}");
        };
        for directory_of in [
            "absolute",
            "relative",
            "gone",
            "file",
            "real/below/up",
            "real/../real",
            "absolute/deep/er",
        ] {
            check(ghost(&format!("{directory_of}/name"), 1), true);
            check(directory(&format!("{directory_of}/name")), true);
            check(linked(&format!("{directory_of}/name"), "real/link_remap.1"), true);
            check(linked("real/name", &format!("{directory_of}/link_remap.1")), true);
        }
        for directory_of in ["real", "real/below", "real/none/at/all", "none"] {
            check(ghost(&format!("{directory_of}/name"), 1), false);
            check(directory(&format!("{directory_of}/name")), false);
            check(
                linked(&format!("{directory_of}/name"), &format!("{directory_of}/link_remap.1")),
                false,
            );
        }
        check(ghost("name", 1), false);
        // The name that CRIU has linked is a link by now.
        check(linked("real/name", "relative"), true);
        // Each path is looked for in the file system that has it.
        let through_usr = [ghost("usr/link/name", 1)];
        assert_eq!(misplaced(&through_usr, dir.as_fd(), "/", &["/", "/usr"]).unwrap(), None);
        let usr = fs::File::open(at("usr")).unwrap();
        assert!(
            misplaced(&through_usr, usr.as_fd(), "/usr", &["/", "/usr"])
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn what_is_left_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("tmp/below.cr.3.ghost")).unwrap();
        fs::create_dir_all(at("outside")).unwrap();
        for path in [
            "tmp/file.cr.1.ghost",
            "tmp/file.cr.a.ghost",
            "tmp/file.cr.4.ghost",
            "outside/file.cr.a.ghost",
        ] {
            fs::write(at(path), "").unwrap();
        }
        // A link of the sandbox's leads nowhere else.
        std::os::unix::fs::symlink(at("outside"), at("tmp/none")).unwrap();
        // What a restore left of deleted directories, and what belongs to the sandbox.
        for path in ["tmp/left", "full/file", "outside/left", "left"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        let names = [
            ghost("tmp/file", 1),
            ghost("tmp/none/file", 10),
            ghost("tmp/none/below", 3),
            directory("tmp/left"),
            directory("tmp/none/left"),
            directory("full"),
        ];
        let dir = fs::File::open(root.path()).unwrap();
        remove(&names, dir.as_fd(), "/", &["/", "/usr"]).unwrap();
        assert!(!at("tmp/left").exists());
        assert!(at("left").exists() && at("full/file").exists() && at("outside/left").exists());
        let left: Vec<_> = fs::read_dir(at("tmp"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(at("tmp/file.cr.4.ghost").exists() && at("outside/file.cr.a.ghost").exists());
        // What lies in the other file system is not looked for in this one.
        remove(&[ghost("usr/tmp/file", 4)], dir.as_fd(), "/", &["/", "/usr"]).unwrap();
        assert!(at("tmp/file.cr.4.ghost").exists());
        remove(&[ghost("usr/tmp/file", 4)], dir.as_fd(), "/usr", &["/", "/usr"]).unwrap();
        assert!(!at("tmp/file.cr.4.ghost").exists());
    }

    #[test]
    fn many_in_deep_directories_are_removed() {
        let root = tempfile::tempdir().unwrap();
        // A directory that is gone, below one that is there, and with names that do not follow the same order.
        let deep = "d/".repeat(300);
        fs::create_dir_all(root.path().join(&deep)).unwrap();
        let names: Vec<Lost> = (0..2000)
            .map(|number| {
                ghost(
                    &format!("{deep}{}file", if number % 2 == 0 { "gone/" } else { "" }),
                    number,
                )
            })
            .collect();
        for name in names.iter().filter_map(Lost::left) {
            fs::write(root.path().join(&deep).join(name.file_name().unwrap()), "").unwrap();
        }
        let dir = fs::File::open(root.path()).unwrap();
        remove(&names, dir.as_fd(), "/", &["/"]).unwrap();
        assert_eq!(fs::read_dir(root.path().join(&deep)).unwrap().count(), 0);
    }

    #[test]
    fn what_could_not_be_restored_is_found_out() {
        let (checkpoint, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (dir, root) = (
            fs::File::open(checkpoint.path()).unwrap(),
            fs::File::open(root.path()).unwrap(),
        );
        let obstacle = || obstacle(dir.as_fd(), root.as_fd());
        let write = |name: String| {
            let reg = RegularFile { name };
            let entry = FileEntry {
                id: 7,
                reg: Some(reg),
                socket: None,
            };
            let entry = entry.encode_to_vec();
            fs::write(checkpoint.path().join("files.img"), file(&[&entry])).unwrap();
        };
        write(format!("/{}", "n".repeat(NAME_MAX)));
        assert_eq!(obstacle().unwrap(), None);
        fs::write(
            checkpoint.path().join("remap-fpath.img"),
            file(&[b"\x08\x07\x10\x0a\x18\x01"]),
        )
        .unwrap();
        assert!(obstacle().unwrap().unwrap().contains("too long"));
        let ending = ".cr.a.ghost".len();
        write(format!("/{}", "n".repeat(NAME_MAX - ending)));
        assert_eq!(obstacle().unwrap(), None);
        write(format!("/{}", "n/".repeat((PATH_MAX - ending) / 2)));
        assert_eq!(obstacle().unwrap(), None);
        write(format!("/{}n", "n/".repeat(PATH_MAX / 2)));
        assert!(obstacle().unwrap().unwrap().contains("too long"));
        let files = fs::File::create(checkpoint.path().join("files.img")).unwrap();
        files.set_len(FILES_MAX + 1).unwrap();
        assert!(obstacle().unwrap().unwrap().contains("64 MiB"));
        // A checkpoint that was changed since it was checked.
        assert_eq!(lost(dir.as_fd()).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_directory_that_was_made_again_is_found_out() {
        let (checkpoint, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (dir, top) = (
            fs::File::open(checkpoint.path()).unwrap(),
            fs::File::open(root.path()).unwrap(),
        );
        fs::write(checkpoint.path().join("files.img"), file(&FILES[2..])).unwrap();
        fs::write(checkpoint.path().join("remap-fpath.img"), file(&REMAPS[2..])).unwrap();
        fs::write(
            checkpoint.path().join("ghost-file-3.img"),
            file(&[b"\x08\x00\x10\x00\x18\xed\x83\x01"]),
        )
        .unwrap();
        assert_eq!(obstacle(dir.as_fd(), top.as_fd()).unwrap(), None);
        fs::create_dir_all(root.path().join("tmp/none/below")).unwrap();
        let why = obstacle(dir.as_fd(), top.as_fd()).unwrap().unwrap();
        assert!(why.ends_with("made again: \"/tmp/none/below\""), "{why}");
    }
}
