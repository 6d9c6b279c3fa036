//! Files without a name in an image, which CRIU calls ghosts.
//!
//! A file that processes have open after its name was removed is part of the image. A restore creates it where it was,
//! under a name with an ending of CRIU's, opens it, and removes that name. A restore that is killed leaves the name on
//! the disk of the sandbox, and the next one refuses to replace it: it would fail again and again. So before each restore these
//! names are removed. Where the directory of such a file is gone, too, CRIU takes the nearest one above it that is there.
//!
//! ```text
//!   8 bytes that name the kind of file │ length, 4 bytes │ a message │ length │ a message ...
//!   in `files.img`        file_entry             { type = 1, id = 2, reg_file_entry reg = 3 }
//!                         reg_file_entry         { string name = 6 }
//!   in `remap-fpath.img`  remap_file_path_entry  { uint32 orig_id = 1, remap_id = 2, remap_type remap_type = 3 }
//! ```

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Length of what names the kind of file.
const KIND: usize = 8;
/// Type of a remap for a file without a name.
const GHOST: i32 = 1;
/// How many names are looked for, at most, in directories above those where the next restore would make them. There they
/// are not in its way; they would only be left.
const ABOVE_MAX: usize = 100_000;
/// Maximum size of a list of files in an image, in bytes: some hundred thousand files.
const FILES_MAX: u64 = 64 << 20;
/// Maximum length of a name and of a path that a restore makes, in bytes: what the kernel allows, and room for the place
/// at which CRIU mounts the file system.
const NAME_MAX: usize = 255;
const PATH_MAX: usize = 3800;

#[derive(Message)]
struct FileEntry {
    #[prost(uint32, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    reg: Option<RegularFile>,
}

#[derive(Message)]
struct RegularFile {
    #[prost(string, tag = "6")]
    name: String,
}

#[derive(Message)]
struct Remap {
    #[prost(uint32, tag = "1")]
    file: u32,
    #[prost(uint32, tag = "2")]
    id: u32,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

/// Why a restore from an image could not make all of its files that have no name, or would have to read too much for it.
///
/// # Errors
/// Those of [`names`].
pub(crate) fn obstacle(image: BorrowedFd<'_>) -> io::Result<Option<String>> {
    for file in ["files.img", "remap-fpath.img"] {
        let bytes = match rustix::fs::statat(image, file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => u64::try_from(stat.st_size).map_err(io::Error::other)?,
            Err(Errno::NOENT) => 0,
            Err(error) => return Err(error.into()),
        };
        if bytes > FILES_MAX {
            let mib = FILES_MAX >> 20;
            return Ok(Some(format!("the list of its open files is longer than {mib} MiB")));
        }
    }
    let is_too_long = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.len() > NAME_MAX || path.as_os_str().len() > PATH_MAX
    };
    let why = "a deleted file that is still open had a name too long to be restored";
    Ok(names(image)?.iter().any(is_too_long).then(|| why.to_owned()))
}

/// Where a restore from an image makes files that have no name, from the root of the sandbox on.
///
/// # Errors
/// When the image cannot be read, or is none.
pub(crate) fn names(image: BorrowedFd<'_>) -> io::Result<Vec<PathBuf>> {
    let ghosts: Vec<Remap> = messages(image, "remap-fpath.img")?
        .into_iter()
        .filter(|remap: &Remap| remap.kind.unwrap_or(GHOST) == GHOST)
        .collect();
    if ghosts.is_empty() {
        return Ok(Vec::new());
    }
    let files: Vec<FileEntry> = messages(image, "files.img")?;
    let files: HashMap<u32, &str> = files
        .iter()
        .filter_map(|file| Some((file.id, file.reg.as_ref()?.name.trim_start_matches('/'))))
        .collect();
    let name = |ghost: &Remap| {
        let name = files.get(&ghost.file)?;
        Some(PathBuf::from(format!("{name}.cr.{:x}.ghost", ghost.id)))
    };
    Ok(ghosts.iter().filter_map(name).collect())
}

/// Removes what a restore that was killed has left of `names` in a file system that is to be mounted at `target`, of
/// those in `targets`.
///
/// A sandbox may have as many of them as it has memory for, in directories as deep as it likes. So each directory is opened
/// once, and what this costs is less than what CRIU does for the same files.
///
/// # Errors
/// When the kernel refuses to remove something.
pub(crate) fn remove(names: &[PathBuf], root: BorrowedFd<'_>, target: &str, targets: &[&str]) -> io::Result<()> {
    let is_here = |path: &Path| {
        let holds = |target: &&&str| path.starts_with(target);
        let longest = targets.iter().filter(holds).max_by_key(|target| target.len());
        longest == Some(&target)
    };
    let paths: Vec<PathBuf> = names.iter().map(|name| Path::new("/").join(name)).collect();
    let mut by_directory: BTreeMap<&Path, Vec<&OsStr>> = BTreeMap::new();
    for path in paths.iter().filter(|path| is_here(path)) {
        let inside = path.strip_prefix(target).ok();
        if let Some((directory, name)) = inside.and_then(|path| Some((path.parent()?, path.file_name()?))) {
            by_directory.entry(directory).or_default().push(name);
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
    let directory = match directory.as_os_str().is_empty() {
        true => Path::new("."),
        false => directory,
    };
    rustix::fs::openat2(
        root,
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

fn remove_one(name: &OsStr, directory: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR),
        other => other,
    }
}

/// The messages in a file of an image; none where there is no such file.
fn messages<T: Message + Default>(image: BorrowedFd<'_>, file: &str) -> io::Result<Vec<T>> {
    let file = match rustix::fs::openat(image, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut std::fs::File::from(file), &mut bytes)?;
    read(&bytes)
}

fn read<T: Message + Default>(bytes: &[u8]) -> io::Result<Vec<T>> {
    let mut rest = bytes.get(KIND..).ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut found = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(io::Error::other)?;
        let message = after.get(..length).ok_or(io::ErrorKind::UnexpectedEof)?;
        found.push(T::decode(message)?);
        rest = after.get(length..).unwrap_or_default();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// As CRIU wrote them for `/tmp/file`, `/tmp/none/below/file` and the directory `/tmp/none/below`.
    const REMAPS: [&[u8]; 3] = [
        b"\x08\x20\x10\x01\x18\x01",
        b"\x08\x21\x10\x0a\x18\x01",
        b"\x08\x22\x10\x03\x18\x01",
    ];
    const FILES: [&[u8]; 3] = [
        b"\x08\x01\x10 \x1a(\x08 \x10\x82\x80\x02\x18\x08*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\t/tmp/file8\x80\x03@\x08P\xa4\x83\x02",
        b"\x08\x01\x10!\x1a3\x08!\x10\x82\x80\x02\x18\x08*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\x14/tmp/none/below/file8\x80\x03@\x08P\xa4\x83\x02",
        b"\x08\x01\x10\"\x1a*\x08\"\x10\x00\x18\x00*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\x0f/tmp/none/below8\x80\x03P\xed\x83\x01",
    ];

    fn file(messages: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0; KIND];
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(*message);
        }
        bytes
    }

    #[test]
    fn names_are_those_that_criu_gives() {
        let image = tempfile::tempdir().unwrap();
        let dir = fs::File::open(image.path()).unwrap();
        assert_eq!(names(dir.as_fd()).unwrap(), Vec::<PathBuf>::new());
        fs::write(image.path().join("files.img"), file(&FILES)).unwrap();
        fs::write(image.path().join("remap-fpath.img"), file(&REMAPS)).unwrap();
        let found = names(dir.as_fd()).unwrap();
        let want = [
            "tmp/file.cr.1.ghost",
            "tmp/none/below/file.cr.a.ghost",
            "tmp/none/below.cr.3.ghost",
        ];
        assert_eq!(found, want.map(PathBuf::from));
        // A file by another name of its own, not without one.
        fs::write(
            image.path().join("remap-fpath.img"),
            file(&[b"\x08\x20\x10\x01\x18\x00"]),
        )
        .unwrap();
        assert_eq!(names(dir.as_fd()).unwrap(), Vec::<PathBuf>::new());
        fs::write(image.path().join("remap-fpath.img"), &file(&REMAPS)[..KIND + 5]).unwrap();
        names(dir.as_fd()).unwrap_err();
        obstacle(dir.as_fd()).unwrap_err();
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
        let names = [
            "tmp/file.cr.1.ghost",
            "tmp/none/file.cr.a.ghost",
            "tmp/none/below.cr.3.ghost",
        ]
        .map(PathBuf::from);
        let dir = fs::File::open(root.path()).unwrap();
        remove(&names, dir.as_fd(), "/", &["/", "/usr"]).unwrap();
        let left: Vec<_> = fs::read_dir(at("tmp"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(at("tmp/file.cr.4.ghost").exists() && at("outside/file.cr.a.ghost").exists());
        // What lies in the other file system is not looked for in this one.
        remove(&["usr/tmp/file.cr.4.ghost".into()], dir.as_fd(), "/", &["/", "/usr"]).unwrap();
        assert!(at("tmp/file.cr.4.ghost").exists());
        remove(&["usr/tmp/file.cr.4.ghost".into()], dir.as_fd(), "/usr", &["/", "/usr"]).unwrap();
        assert!(!at("tmp/file.cr.4.ghost").exists());
    }
    #[test]
    fn many_in_deep_directories_are_removed() {
        let root = tempfile::tempdir().unwrap();
        // A directory that is gone, below one that is there, and with names that do not follow the same order.
        let deep = "d/".repeat(300);
        fs::create_dir_all(root.path().join(&deep)).unwrap();
        let names: Vec<PathBuf> = (0..2000)
            .map(|number| format!("{deep}{}file.cr.{number:x}.ghost", ["gone/", ""][number % 2]).into())
            .collect();
        for name in &names {
            fs::write(root.path().join(&deep).join(name.file_name().unwrap()), "").unwrap();
        }
        let dir = fs::File::open(root.path()).unwrap();
        remove(&names, dir.as_fd(), "/", &["/"]).unwrap();
        assert_eq!(fs::read_dir(root.path().join(&deep)).unwrap().count(), 0);
    }
    #[test]
    fn what_could_not_be_restored_is_found_out() {
        let image = tempfile::tempdir().unwrap();
        let dir = fs::File::open(image.path()).unwrap();
        let write = |name: String| {
            let reg = RegularFile { name };
            let entry = FileEntry { id: 7, reg: Some(reg) }.encode_to_vec();
            fs::write(image.path().join("files.img"), file(&[&entry])).unwrap();
        };
        write(format!("/{}", "n".repeat(NAME_MAX)));
        assert_eq!(obstacle(dir.as_fd()).unwrap(), None);
        fs::write(
            image.path().join("remap-fpath.img"),
            file(&[b"\x08\x07\x10\x0a\x18\x01"]),
        )
        .unwrap();
        assert!(obstacle(dir.as_fd()).unwrap().unwrap().contains("too long"));
        let ending = ".cr.a.ghost".len();
        write(format!("/{}", "n".repeat(NAME_MAX - ending)));
        assert_eq!(obstacle(dir.as_fd()).unwrap(), None);
        write(format!("/{}", "n/".repeat((PATH_MAX - ending) / 2)));
        assert_eq!(obstacle(dir.as_fd()).unwrap(), None);
        write(format!("/{}n", "n/".repeat(PATH_MAX / 2)));
        assert!(obstacle(dir.as_fd()).unwrap().unwrap().contains("too long"));
        let files = fs::File::create(image.path().join("files.img")).unwrap();
        files.set_len(FILES_MAX + 1).unwrap();
        assert!(obstacle(dir.as_fd()).unwrap().unwrap().contains("64 MiB"));
    }
}
