//! The files of a checkpoint that have lost their names, as CRIU notes them. What becomes of them is in [`super::ghosts`].
//!
//! ```text
//!   8 bytes that name the kind of file │ length, 4 bytes │ a message │ length │ a message ...
//!   in `files.img`          file_entry             { type = 1, id = 2, reg_file_entry reg = 3, unix_sk_entry usk = 16 }
//!                           reg_file_entry         { string name = 6 }
//!                           unix_sk_entry          { bytes name = 11, string name_dir = 14, bool deleted = 15 }
//!   in `remap-fpath.img`    remap_file_path_entry  { uint32 orig_id = 1, remap_id = 2, remap_type remap_type = 3 }
//!   in `ghost-file-ID.img`  ghost_file_entry       { uint32 mode = 3 }, and the content of the file
//! ```

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// The lists of files in a checkpoint.
pub(super) const LISTS: [&str; 2] = ["files.img", "remap-fpath.img"];
/// Maximum size of each of them, in bytes: some hundred thousand files. They are read at once.
pub(super) const FILES_MAX: u64 = 64 << 20;
/// Length of what names the kind of file, and of the length of a message.
const KIND: usize = 8;
const LENGTH: usize = 4;
/// Maximum length of what a checkpoint has of a file without a name, besides its content: the target of a link, and some numbers.
const GHOST_MAX: u64 = 8192;
/// Types of a remap: for a file that CRIU has linked, and for one without a name.
const LINKED: i32 = 0;
const GHOST: i32 = 1;

#[derive(Message)]
pub(super) struct FileEntry {
    #[prost(uint32, tag = "2")]
    pub(super) id: u32,
    #[prost(message, optional, tag = "3")]
    pub(super) reg: Option<RegularFile>,
    #[prost(message, optional, tag = "16")]
    pub(super) socket: Option<UnixSocket>,
}

#[derive(Message)]
pub(super) struct UnixSocket {
    #[prost(bytes = "vec", tag = "11")]
    name: Vec<u8>,
    /// Where a name that is not absolute begins.
    #[prost(string, optional, tag = "14")]
    directory: Option<String>,
    #[prost(bool, optional, tag = "15")]
    is_deleted: Option<bool>,
}

impl UnixSocket {
    /// Where it was, if it is one with a name in a file system that was removed.
    fn lost(&self) -> Option<Lost> {
        let name = self
            .name
            .split(|byte| *byte == 0)
            .next()
            .filter(|name| !name.is_empty())?;
        self.is_deleted.filter(|is_deleted| *is_deleted)?;
        let name = Path::new(OsStr::from_bytes(name));
        let path = Path::new("/")
            .join(self.directory.as_deref().unwrap_or_default())
            .join(name);
        let path = path.strip_prefix("/").ok()?.to_owned();
        Some(Lost { path, how: How::Socket })
    }
}

#[derive(Message)]
pub(super) struct RegularFile {
    #[prost(string, tag = "6")]
    pub(super) name: String,
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

/// The beginning of what a checkpoint has of a file without a name.
#[derive(Message)]
struct Ghost {
    #[prost(uint32, tag = "3")]
    mode: u32,
}

/// A file that has lost its name, with where it was, from the root of the sandbox on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(super) path: PathBuf,
    pub(super) how: How,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum How {
    /// A restore creates it under this name, beside where it was.
    Ghost(OsString),
    /// A restore creates it, a directory, where it was.
    Directory,
    /// CRIU has linked it here.
    Linked(PathBuf),
    /// A restore creates it, a socket, where it was, from the root of the sandbox on.
    Socket,
}

impl Lost {
    /// The name of its own under which a restore leaves it when it is killed.
    pub(super) fn left(&self) -> Option<PathBuf> {
        match &self.how {
            How::Ghost(name) => Some(self.path.with_file_name(name)),
            How::Directory | How::Linked(_) | How::Socket => None,
        }
    }

    /// Whether CRIU itself, and not a process of the sandbox, removes what a restore has made for it.
    pub(crate) fn is_removed_by_criu(&self) -> bool {
        self.how != How::Socket
    }

    pub(super) fn is_directory(&self) -> bool {
        self.how == How::Directory
    }

    /// The paths that CRIU follows.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        let link = match &self.how {
            How::Linked(link) => Some(link.as_path()),
            How::Ghost(_) | How::Directory | How::Socket => None,
        };
        [self.path.as_path()].into_iter().chain(link)
    }
}

/// The files of a checkpoint that have lost their names.
///
/// # Errors
/// When the checkpoint cannot be read, is none, or has a list of more than [`FILES_MAX`].
pub(crate) fn lost(checkpoint: BorrowedFd<'_>) -> io::Result<Vec<Lost>> {
    let remaps: Vec<Remap> = messages(checkpoint, LISTS[1])?;
    let remaps: Vec<Remap> = remaps
        .into_iter()
        .filter(|remap| matches!(remap.kind.unwrap_or(GHOST), GHOST | LINKED))
        .collect();
    let files: Vec<FileEntry> = messages(checkpoint, LISTS[0])?;
    let sockets = files.iter().filter_map(|file| file.socket.as_ref()?.lost());
    let mut lost: Vec<Lost> = sockets.collect();
    let files: HashMap<u32, &str> = files
        .iter()
        .filter_map(|file| Some((file.id, file.reg.as_ref()?.name.trim_start_matches('/'))))
        .collect();
    for remap in remaps {
        let Some(path) = files.get(&remap.file).map(PathBuf::from) else {
            continue;
        };
        let how = match remap.kind.unwrap_or(GHOST) {
            LINKED => match files.get(&remap.id) {
                Some(link) => How::Linked(link.into()),
                None => continue,
            },
            _ if is_directory(checkpoint, remap.id)? => How::Directory,
            _ => {
                let mut name = path.file_name().unwrap_or_default().to_owned();
                name.push(format!(".cr.{:x}.ghost", remap.id));
                How::Ghost(name)
            }
        };
        lost.push(Lost { path, how });
    }
    Ok(lost)
}

/// Whether a file without a name is a directory.
fn is_directory(checkpoint: BorrowedFd<'_>, id: u32) -> io::Result<bool> {
    let name = format!("ghost-file-{id:x}.img");
    let file = match rustix::fs::openat(checkpoint, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    // The content of the file follows.
    let mut begin = Vec::new();
    file.take(KIND as u64 + LENGTH as u64 + GHOST_MAX)
        .read_to_end(&mut begin)?;
    let message = begin.get(KIND..).unwrap_or_default();
    let (length, message) = message.split_first_chunk().ok_or(io::ErrorKind::UnexpectedEof)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(io::Error::other)?;
    let message = message.get(..length).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(FileType::from_raw_mode(Ghost::decode(message)?.mode).is_dir())
}

/// The messages in a file of a checkpoint; none where there is no such file.
fn messages<T: Message + Default>(checkpoint: BorrowedFd<'_>, file: &str) -> io::Result<Vec<T>> {
    let file = match rustix::fs::openat(checkpoint, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut bytes = Vec::new();
    File::from(file).take(FILES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
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
pub(super) mod tests {
    use std::fs;
    use std::os::fd::AsFd as _;

    use super::*;

    /// As CRIU wrote them for `/tmp/file`, `/tmp/none/below/file` and the directory `/tmp/none/below`.
    pub(crate) const REMAPS: [&[u8]; 3] = [
        b"\x08\x20\x10\x01\x18\x01",
        b"\x08\x21\x10\x0a\x18\x01",
        b"\x08\x22\x10\x03\x18\x01",
    ];
    pub(crate) const FILES: [&[u8]; 3] = [
        b"\x08\x01\x10 \x1a(\x08 \x10\x82\x80\x02\x18\x08*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\t/tmp/file8\x80\x03@\x08P\xa4\x83\x02",
        b"\x08\x01\x10!\x1a3\x08!\x10\x82\x80\x02\x18\x08*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\x14/tmp/none/below/file8\x80\x03@\x08P\xa4\x83\x02",
        b"\x08\x01\x10\"\x1a*\x08\"\x10\x00\x18\x00*\n\x08\x00\x10\x00\x18\x00 \x00(\x002\x0f/tmp/none/below8\x80\x03P\xed\x83\x01",
    ];

    pub(crate) fn file(messages: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0; KIND];
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(*message);
        }
        bytes
    }

    pub(crate) fn ghost(path: &str, id: u32) -> Lost {
        let path = PathBuf::from(path);
        let mut name = path.file_name().unwrap().to_owned();
        name.push(format!(".cr.{id:x}.ghost"));
        Lost {
            path,
            how: How::Ghost(name),
        }
    }

    pub(crate) fn directory(path: &str) -> Lost {
        Lost {
            path: path.into(),
            how: How::Directory,
        }
    }

    pub(crate) fn linked(path: &str, link: &str) -> Lost {
        Lost {
            path: path.into(),
            how: How::Linked(link.into()),
        }
    }

    #[test]
    fn lost_files_are_those_that_criu_notes() {
        let checkpoint = tempfile::tempdir().unwrap();
        let dir = fs::File::open(checkpoint.path()).unwrap();
        assert_eq!(lost(dir.as_fd()).unwrap(), []);
        fs::write(checkpoint.path().join("files.img"), file(&FILES)).unwrap();
        fs::write(checkpoint.path().join("remap-fpath.img"), file(&REMAPS)).unwrap();
        // As CRIU writes it for a directory of root's; the times of others, and content, follow.
        fs::write(
            checkpoint.path().join("ghost-file-3.img"),
            file(&[b"\x08\x00\x10\x00\x18\xed\x83\x01"]),
        )
        .unwrap();
        fs::write(
            checkpoint.path().join("ghost-file-1.img"),
            [&file(&[b"\x08\x00\x10\x00\x18\xa4\x83\x02"]), &b"content"[..]].concat(),
        )
        .unwrap();
        let found = lost(dir.as_fd()).unwrap();
        let want = [
            ghost("tmp/file", 1),
            ghost("tmp/none/below/file", 10),
            directory("tmp/none/below"),
        ];
        assert_eq!(found, want);
        // A file by another name of its own.
        fs::write(
            checkpoint.path().join("remap-fpath.img"),
            file(&[b"\x08\x20\x10\x21\x18\x00"]),
        )
        .unwrap();
        assert_eq!(lost(dir.as_fd()).unwrap(), [linked("tmp/file", "tmp/none/below/file")]);
        // Sockets: with a name that is there, one that is gone, one that is gone in a directory, and an abstract one.
        let socket = |name: &[u8], directory: Option<&str>, is_deleted| {
            let socket = UnixSocket {
                name: name.to_owned(),
                directory: directory.map(str::to_owned),
                is_deleted,
            };
            FileEntry {
                id: 1,
                reg: None,
                socket: Some(socket),
            }
            .encode_to_vec()
        };
        let sockets = [
            socket(b"/run/there", None, None),
            socket(b"/run/gone\0", None, Some(true)),
            socket(b"d/gone", Some("/home/user"), Some(true)),
            socket(b"\0abstract", None, Some(true)),
        ];
        let sockets: Vec<&[u8]> = sockets.iter().map(Vec::as_slice).collect();
        fs::write(checkpoint.path().join("files.img"), file(&sockets)).unwrap();
        fs::remove_file(checkpoint.path().join("remap-fpath.img")).unwrap();
        let of_socket = |path: &str| Lost {
            path: path.into(),
            how: How::Socket,
        };
        assert_eq!(
            lost(dir.as_fd()).unwrap(),
            [of_socket("run/gone"), of_socket("home/user/d/gone")]
        );
        fs::write(checkpoint.path().join("remap-fpath.img"), &file(&REMAPS)[..KIND + 5]).unwrap();
        lost(dir.as_fd()).unwrap_err();
    }
}
