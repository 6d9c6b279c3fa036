//! Copies directory trees as overlayfs wrote them into one tree that overlayfs can have as a lower layer.
//!
//! A tree is read without following links: each name is opened in its open directory. The trees of several layers
//! become one: what is in an upper one replaces what is in a lower one, except that directories are merged, as
//! overlayfs shows them. What overlayfs itself wrote is interpreted here and written anew:
//!
//! - A device 0:0 is a *whiteout*: the name is deleted in what lies below. It stays one while something may lie below.
//! - A directory with the attribute `trusted.overlay.opaque` hides what lies below it.
//! - Attributes about the origin of a file, and the directory's caches, are about the layers that were below, and are
//!   left out. Redirects and files without their data do not occur: sandboxes are mounted without these features.
//!
//! Programs in a sandbox can write neither whiteouts nor `trusted` attributes, so all of them are the kernel's.
//!
//! While it is copied, the tree is hashed: names, types, modes, owners, attributes, targets of links, and content; not
//! times, so that the same step has the same layer. Blocks of zeros are neither hashed nor written, so sparse files stay
//! sparse, and where a file has holes does not matter.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use model::id::LayerId;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::{Budget, Failure};
use crate::rootfs::Part;
use crate::slot::IDS_PER_SLOT;

/// Maximum depth of directories. Each level holds descriptors.
const DEPTH_MAX: usize = 512;
/// Maximum size of all names that are held at a time, in bytes.
const NAMES_MAX: usize = 256 << 20;
/// Size in which files are read, in bytes.
const BUFFER: usize = 1 << 20;
/// Size of the blocks of files, in bytes.
const BLOCK: usize = 4096;
/// What a file takes besides its content, in bytes.
const INODE: u64 = 256;
/// The limits are checked after as much work: bytes, where a file counts as [`FILE_COST`].
const CHECK_AFTER: u64 = 16 << 20;
const FILE_COST: u64 = 32 << 10;
/// Directory for the files with several names, until all of them are known.
const LINKS: &str = "links";

const OPAQUE: &CStr = c"trusted.overlay.opaque";
/// Attributes without which a file is not what it was. Sandboxes are mounted without what writes them.
const UNSUPPORTED: [&CStr; 2] = [c"trusted.overlay.redirect", c"trusted.overlay.metacopy"];

/// A copy of trees into one layer.
pub(super) struct TreeCopy<'a> {
    layer: BorrowedFd<'a>,
    budget: &'a Budget<'a>,
    hash: Sha256,
    buffer: Vec<u8>,
    links_dir: OwnedFd,
    /// Number, among the links, of each file with several names: by device and inode.
    links: HashMap<(u64, u64), u64>,
    bytes: u64,
    names: usize,
    unchecked: u64,
}

/// A directory whose entries are being copied.
struct Directory {
    name: CString,
    /// The directories that are merged, topmost first.
    from: Vec<OwnedFd>,
    to: OwnedFd,
    /// Whether something may lie below it.
    has_below: bool,
    /// Its entries in reverse order.
    left: Vec<CString>,
    names: usize,
    metadata: Metadata,
}

/// What is set once a file is complete.
struct Metadata {
    stat: Stat,
    attributes: Vec<(CString, Vec<u8>)>,
}

impl<'a> TreeCopy<'a> {
    pub(super) fn begin(layer: BorrowedFd<'a>, budget: &'a Budget<'a>) -> Result<Self, Failure> {
        rustix::fs::mkdirat(layer, LINKS, Mode::from_raw_mode(0o700))?;
        Ok(Self {
            layer,
            budget,
            hash: Sha256::new_with_prefix("ringfence layer 1\n"),
            buffer: vec![0; BUFFER],
            links_dir: crate::files::open_dir_at(layer, LINKS)?,
            links: HashMap::new(),
            bytes: 0,
            names: 0,
            unchecked: 0,
        })
    }

    /// Copies trees, topmost first, to one directory of the layer.
    pub(super) fn tree(&mut self, part: Part, trees: Vec<OwnedFd>, has_below: bool) -> Result<(), Failure> {
        let name = CString::new(part.as_str()).map_err(io::Error::from)?;
        let mut path = Vec::new();
        let Some(top) = trees.first() else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(top)?;
        let metadata = Metadata {
            stat,
            attributes: attributes(&of_descriptor(top.as_fd()))?.kept,
        };
        let layer = self.layer;
        self.enter(&mut path, layer, name, trees, has_below, false, metadata)?;
        if let (Part::Root, Some(root)) = (part, path.last_mut()) {
            // In messages, paths are those of the sandbox.
            root.name = CString::default();
        }
        while let Some(directory) = path.last_mut() {
            match directory.left.pop() {
                Some(entry) => {
                    let copied = self.entry(&mut path, &entry);
                    copied.map_err(|failure| at(&path, &entry, failure))?;
                }
                None => {
                    if let Some(directory) = path.pop() {
                        self.leave(&directory)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The layer's id and size.
    pub(super) fn finish(self) -> Result<(LayerId, u64), Failure> {
        for number in 0..self.links.len() {
            rustix::fs::unlinkat(&self.links_dir, number.to_string(), AtFlags::empty())?;
        }
        rustix::fs::unlinkat(self.layer, LINKS, AtFlags::REMOVEDIR)?;
        let hash: [u8; 32] = self.hash.finalize().into();
        Ok((LayerId::from_hash(&hash), self.bytes))
    }

    /// Adds a record to the hash. Every part has its length before it, so no two trees have the same records.
    fn note(&mut self, kind: u8, parts: &[&[u8]]) {
        self.hash.update([kind]);
        for part in parts {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
    }

    fn note_metadata(&mut self, metadata: &Metadata) {
        let stat = &metadata.stat;
        let mode = stat.st_mode & 0o7777;
        self.note(
            b'm',
            &[
                &mode.to_le_bytes(),
                &stat.st_uid.to_le_bytes(),
                &stat.st_gid.to_le_bytes(),
            ],
        );
        for (name, value) in &metadata.attributes {
            self.note(b'x', &[name.to_bytes(), value]);
        }
    }

    /// Accounts for work and checks the limits now and then.
    fn spend(&mut self, bytes: u64) -> Result<(), Failure> {
        self.unchecked += bytes;
        if self.unchecked >= CHECK_AFTER {
            self.unchecked = 0;
            self.budget.check()?;
        }
        Ok(())
    }

    /// Begins a directory.
    #[expect(clippy::too_many_arguments, reason = "one call site for entries, and one for roots")]
    fn enter(
        &mut self,
        path: &mut Vec<Directory>,
        parent: BorrowedFd<'_>,
        name: CString,
        from: Vec<OwnedFd>,
        has_below: bool,
        hides_below: bool,
        mut metadata: Metadata,
    ) -> Result<(), Failure> {
        if path.len() >= DEPTH_MAX {
            return Err(Failure::Refused(format!("more than {DEPTH_MAX} directories deep")));
        }
        rustix::fs::mkdirat(parent, &*name, Mode::from_raw_mode(0o700))?;
        let to = open_directory(parent, &name)?;
        self.note(b'd', &[name.to_bytes()]);
        if has_below && hides_below {
            metadata.attributes.push((OPAQUE.to_owned(), b"y".to_vec()));
        }
        self.note_metadata(&metadata);
        self.bytes += BLOCK as u64;
        let before = self.names;
        let left = self.entries(&from)?;
        path.push(Directory {
            name,
            from,
            to,
            has_below: has_below && !hides_below,
            left,
            names: self.names - before,
            metadata,
        });
        Ok(())
    }

    /// Ends a directory: its attributes must not be inherited by what is in it, and its time is that of the original.
    fn leave(&mut self, directory: &Directory) -> Result<(), Failure> {
        self.names -= directory.names;
        self.note(b'e', &[]);
        // The name of a root is not in its own directory.
        set_metadata(&of_descriptor(directory.to.as_fd()), &directory.metadata)
            .map_err(|failure| at(&[], &directory.name, failure))?;
        Ok(rustix::fs::futimens(&directory.to, &times(&directory.metadata.stat))?)
    }

    /// The names in all of the directories, in reverse order.
    fn entries(&mut self, directories: &[OwnedFd]) -> Result<Vec<CString>, Failure> {
        let mut names = Vec::new();
        for directory in directories {
            for entry in Dir::read_from(directory)? {
                let entry = entry?;
                let name = entry.file_name();
                if name.to_bytes() == b"." || name.to_bytes() == b".." {
                    continue;
                }
                self.names += name.to_bytes().len() + size_of::<CString>();
                if self.names > NAMES_MAX {
                    return Err(Failure::Refused("too many files in one directory".to_owned()));
                }
                names.push(name.to_owned());
            }
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        names.dedup();
        Ok(names)
    }

    /// Copies one entry of the last directory in `path`.
    fn entry(&mut self, path: &mut Vec<Directory>, name: &CStr) -> Result<(), Failure> {
        self.spend(FILE_COST)?;
        let Some(directory) = path.last() else {
            return Ok(());
        };
        let mut found = None;
        for (index, from) in directory.from.iter().enumerate() {
            if let Some(stat) = stat_at(from.as_fd(), name)? {
                found = Some((index, stat));
                break;
            }
        }
        let Some((index, stat)) = found else {
            return Ok(());
        };
        let from = directory.from[index].as_fd();
        let to = directory.to.as_fd();
        let kind = FileType::from_raw_mode(stat.st_mode);
        match kind {
            FileType::CharacterDevice if is_whiteout(&stat) => return self.whiteout(to, name, directory.has_below),
            // It does not outlive its server.
            FileType::Socket => return self.whiteout(to, name, directory.has_below),
            FileType::CharacterDevice | FileType::BlockDevice => {
                return Err(Failure::Refused("a device".to_owned()));
            }
            FileType::Directory | FileType::RegularFile | FileType::Symlink | FileType::Fifo => {}
            FileType::Unknown => return Err(Failure::Refused("a file of an unknown type".to_owned())),
        }
        if stat.st_uid >= IDS_PER_SLOT || stat.st_gid >= IDS_PER_SLOT {
            return Err(Failure::Refused("its owner is not a user of the sandbox".to_owned()));
        }
        let read = attributes(&of_entry(from, name))?;
        let metadata = Metadata {
            stat,
            attributes: read.kept,
        };
        if kind == FileType::Directory {
            let mut merged = vec![open_directory(from, name)?];
            let mut hides_below = read.is_opaque;
            for lower in &directory.from[index + 1..] {
                if hides_below {
                    break;
                }
                match stat_at(lower.as_fd(), name)? {
                    None => {}
                    Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                        hides_below = attributes(&of_entry(lower.as_fd(), name))?.is_opaque;
                        merged.push(open_directory(lower.as_fd(), name)?);
                    }
                    // What is not a directory ends what is merged.
                    Some(_) => hides_below = true,
                }
            }
            let has_below = directory.has_below;
            let to = to.try_clone_to_owned()?;
            return self.enter(
                path,
                to.as_fd(),
                name.to_owned(),
                merged,
                has_below,
                hides_below,
                metadata,
            );
        }
        if metadata.stat.st_nlink > 1 {
            let key = (metadata.stat.st_dev, metadata.stat.st_ino);
            if let Some(number) = self.links.get(&key).copied() {
                self.note(b'h', &[name.to_bytes(), &number.to_le_bytes()]);
                return Ok(rustix::fs::linkat(
                    &self.links_dir,
                    number.to_string(),
                    to,
                    name,
                    AtFlags::empty(),
                )?);
            }
            let number = self.links.len() as u64;
            self.links.insert(key, number);
            self.file(kind, from, to, name, &metadata)?;
            return Ok(rustix::fs::linkat(
                to,
                name,
                &self.links_dir,
                number.to_string(),
                AtFlags::empty(),
            )?);
        }
        self.file(kind, from, to, name, &metadata)
    }

    /// Says that a name is deleted in what lies below, if anything does.
    fn whiteout(&mut self, to: BorrowedFd<'_>, name: &CStr, has_below: bool) -> Result<(), Failure> {
        if !has_below {
            return Ok(());
        }
        self.note(b'w', &[name.to_bytes()]);
        self.bytes += INODE;
        let nothing = rustix::fs::makedev(0, 0);
        Ok(rustix::fs::mknodat(
            to,
            name,
            FileType::CharacterDevice,
            Mode::empty(),
            nothing,
        )?)
    }

    /// Copies a file that is not a directory.
    fn file(
        &mut self,
        kind: FileType,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &CStr,
        metadata: &Metadata,
    ) -> Result<(), Failure> {
        self.bytes += INODE;
        match kind {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                self.note(b'l', &[name.to_bytes(), target.to_bytes()]);
                rustix::fs::symlinkat(&*target, to, name)?;
            }
            FileType::Fifo => {
                self.note(b'p', &[name.to_bytes()]);
                rustix::fs::mknodat(to, name, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
            }
            _ => {
                let size = u64::try_from(metadata.stat.st_size).unwrap_or(0);
                self.note(b'f', &[name.to_bytes(), &size.to_le_bytes()]);
                self.content(from, to, name, size)?;
            }
        }
        self.note_metadata(metadata);
        set_metadata(&of_entry(to, name), metadata)?;
        let times = times(&metadata.stat);
        Ok(rustix::fs::utimensat(to, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Copies the blocks of a file that are not zero.
    fn content(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &CStr, size: u64) -> Result<(), Failure> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let from = std::fs::File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = std::fs::File::from(rustix::fs::openat(to, name, flags, Mode::from_raw_mode(0o600))?);
        rustix::fs::ftruncate(&to, size)?;
        let mut offset = 0;
        while offset < size {
            offset = match rustix::fs::seek(&from, SeekFrom::Data(offset)) {
                // Blocks are those of the file, wherever its data begins.
                Ok(data) => data - data % BLOCK as u64,
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let wanted = usize::try_from(size - offset).unwrap_or(BUFFER).min(BUFFER);
            let mut buffer = std::mem::take(&mut self.buffer);
            let copied = from
                .read_exact_at(&mut buffer[..wanted], offset)
                .map_err(Failure::from)
                .and_then(|()| self.blocks(&to, &buffer[..wanted], offset));
            self.buffer = buffer;
            copied?;
            offset += wanted as u64;
        }
        Ok(())
    }

    fn blocks(&mut self, to: &std::fs::File, data: &[u8], offset: u64) -> Result<(), Failure> {
        let mut at = offset;
        // Adjacent blocks are written together.
        let (mut start, mut end) = (0, 0);
        for block in data.chunks(BLOCK) {
            let index = usize::try_from(at - offset).unwrap_or(0);
            if block.iter().any(|byte| *byte != 0) {
                self.note(b'b', &[&at.to_le_bytes(), block]);
                if end != index {
                    write_at(to, &data[start..end], offset + start as u64)?;
                    start = index;
                }
                end = index + block.len();
                self.bytes += BLOCK as u64;
            }
            at += block.len() as u64;
        }
        write_at(to, &data[start..end], offset + start as u64)?;
        self.spend(data.len() as u64)
    }
}

fn write_at(to: &std::fs::File, data: &[u8], offset: u64) -> Result<(), Failure> {
    to.write_all_at(data, offset)
        .map_err(|error| match error.raw_os_error() {
            Some(code) => Errno::from_raw_os_error(code).into(),
            None => error.into(),
        })
}

fn open_directory(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

fn stat_at(directory: BorrowedFd<'_>, name: &CStr) -> Result<Option<Stat>, Failure> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_whiteout(stat: &Stat) -> bool {
    stat.st_rdev == 0
}

/// A path for calls that take no descriptor, for the file that is open.
fn of_descriptor(file: BorrowedFd<'_>) -> CString {
    path_of(&format!("/proc/self/fd/{}/.", file.as_raw_fd()), c"")
}

/// The same for a name in an open directory. The calls do not follow a link of that name.
fn of_entry(directory: BorrowedFd<'_>, name: &CStr) -> CString {
    path_of(&format!("/proc/self/fd/{}/", directory.as_raw_fd()), name)
}

fn path_of(directory: &str, name: &CStr) -> CString {
    let mut path = directory.as_bytes().to_vec();
    path.extend_from_slice(name.to_bytes());
    CString::new(path).expect("neither a number nor a name has a NUL")
}

/// Extended attributes of a file.
struct Attributes {
    /// Those that a layer has, sorted.
    kept: Vec<(CString, Vec<u8>)>,
    is_opaque: bool,
}

/// Reads the extended attributes of a file.
fn attributes(path: &CStr) -> Result<Attributes, Failure> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let mut attributes = Attributes {
        kept: Vec::new(),
        is_opaque: false,
    };
    for name in names[..length].split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else {
            continue;
        };
        let is_kept = is_kept(name.to_bytes());
        if !is_kept && name != OPAQUE && !UNSUPPORTED.contains(&name) {
            continue;
        }
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, &mut value)?;
        value.truncate(length);
        if is_kept {
            attributes.kept.push((name.to_owned(), value));
        } else if name == OPAQUE && value == b"y" {
            attributes.is_opaque = true;
        } else if name != OPAQUE {
            return Err(Failure::Refused("only a part of it is stored".to_owned()));
        }
    }
    attributes.kept.sort_unstable();
    Ok(attributes)
}

/// Attributes of users, file capabilities and access control lists. Others are the host's: labels of its security
/// modules, and what overlayfs wrote.
fn is_kept(name: &[u8]) -> bool {
    name.starts_with(b"user.")
        || matches!(
            name,
            b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default"
        )
}

/// Sets owner, mode and attributes, in this order: changing the owner takes bits of the mode and capabilities away.
fn set_metadata(path: &CStr, metadata: &Metadata) -> Result<(), Failure> {
    let stat = &metadata.stat;
    let (user, group) = (
        rustix::fs::Uid::from_raw(stat.st_uid),
        rustix::fs::Gid::from_raw(stat.st_gid),
    );
    let cwd = rustix::fs::CWD;
    rustix::fs::chownat(cwd, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
        rustix::fs::chmodat(cwd, path, mode, AtFlags::empty())?;
    }
    for (name, value) in &metadata.attributes {
        let set = rustix::fs::lsetxattr(path, &**name, value, XattrFlags::empty());
        set.map_err(|error| match error {
            Errno::OPNOTSUPP | Errno::RANGE | Errno::TOOBIG => Failure::Refused(format!(
                "the host's file system cannot store the attribute {}",
                name.to_bytes().escape_ascii()
            )),
            error => error.into(),
        })?;
    }
    Ok(())
}

fn times(stat: &Stat) -> Timestamps {
    let modified = Timespec {
        tv_sec: stat.st_mtime,
        tv_nsec: stat.st_mtime_nsec.try_into().unwrap_or(0),
    };
    Timestamps {
        last_access: modified,
        last_modification: modified,
    }
}

/// Adds the path of a file to a failure. Programs in the sandbox chose the names.
fn at(path: &[Directory], name: &CStr, failure: Failure) -> Failure {
    let mut text = String::new();
    let names = path.iter().map(|directory| directory.name.as_c_str()).chain([name]);
    for name in names.filter(|name| !name.is_empty()) {
        let _ = write!(text, "/{}", name.to_bytes().escape_ascii());
    }
    match failure {
        Failure::Refused(why) => Failure::Refused(format!("{text}: {why}")),
        Failure::Failed(error) => Failure::Failed(io::Error::new(error.kind(), format!("{text}: {error}"))),
        full @ Failure::Full(_) => full,
    }
}
