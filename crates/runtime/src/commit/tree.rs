//! Reads directory trees as overlayfs wrote them, hashes them, and gives what they contain to a [`Sink`].
//!
//! A tree is read without following links: each name is opened in its open directory. The trees of several layers
//! become one: what is in an upper one replaces what is in a lower one, except that directories are merged, as
//! overlayfs shows them. What overlayfs itself wrote is interpreted here, and sinks write it anew:
//!
//! - A device 0:0 is a *whiteout*: the name is deleted in what lies below. It stays one while something may lie below.
//! - A directory with the attribute `trusted.overlay.opaque` hides what lies below it.
//! - Attributes about the origin of a file, and the directory's caches, are about the layers that were below, and are
//!   left out. Redirects and files without their data do not occur: sandboxes are mounted without these features.
//!
//! Programs in a sandbox can write neither whiteouts nor `trusted` attributes, so all of them are the kernel's.
//!
//! The hash is over names, types, modes, owners, attributes, targets of links, and content; not times, so that the same
//! step has the same layer. Blocks of zeros are neither hashed nor copied, so sparse files stay sparse, and where a file
//! has holes does not matter. A stored layer that is read again has the same hash.
//!
//! What the agent has written for programs of this sandbox alone ([`SANDBOX_FILE`]) is left out.
//!
//! The process that reads changes its current directory, because attributes of files that cannot be opened are read by
//! path, and its root may have no `/proc`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use model::id::LayerId;
use protocol::agent::{SANDBOX_FILE, UNFINISHED_FILE};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::budget::Budget;
use super::failure::Failure;
use crate::rootfs::Part;
use crate::slot::IDS_PER_SLOT;

/// Maximum depth of directories. Each level holds descriptors.
pub(crate) const DEPTH_MAX: usize = 512;
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

/// Attribute of a directory that hides what lies below it.
pub(crate) const OPAQUE: &CStr = c"trusted.overlay.opaque";
/// Attributes that would make a file depend on others, which layers do not support. Sandboxes are mounted without what
/// writes them.
const UNSUPPORTED: [&CStr; 2] = [c"trusted.overlay.redirect", c"trusted.overlay.metacopy"];

/// What the contents of trees are given to, in the order of the hash: each directory before its entries, which are
/// sorted by name.
pub(crate) trait Sink {
    /// A directory in the one that was entered last.
    fn enter(&mut self, name: &CStr, metadata: &Metadata) -> Result<(), Failure>;
    /// The directory that was entered last is complete.
    fn leave(&mut self, metadata: &Metadata) -> Result<(), Failure>;
    /// A name that is deleted in what lies below.
    fn whiteout(&mut self, name: &CStr) -> Result<(), Failure>;
    /// A file that is not a directory, and what it is if it is not a regular file. A regular one is followed by its
    /// data. `number` counts, from 0, the files with several names.
    fn file(
        &mut self,
        name: &CStr,
        file: &Content<'_>,
        metadata: &Metadata,
        number: Option<u64>,
    ) -> Result<(), Failure>;
    /// Data of the file, without zeros.
    fn data(&mut self, data: &[u8], offset: u64) -> Result<(), Failure>;
    /// The file is complete.
    fn file_end(&mut self, name: &CStr, metadata: &Metadata, number: Option<u64>) -> Result<(), Failure>;
    /// Another name of the file with that number.
    fn link(&mut self, name: &CStr, number: u64) -> Result<(), Failure>;
}

/// Content of a file.
#[derive(Debug)]
pub(crate) enum Content<'a> {
    Regular { file: &'a File, size: u64 },
    Symlink(CString),
    Fifo,
}

/// A sink that drops everything, so that a tree is only hashed.
pub(crate) struct Nothing;

impl Sink for Nothing {
    fn enter(&mut self, _: &CStr, _: &Metadata) -> Result<(), Failure> {
        Ok(())
    }
    fn leave(&mut self, _: &Metadata) -> Result<(), Failure> {
        Ok(())
    }
    fn whiteout(&mut self, _: &CStr) -> Result<(), Failure> {
        Ok(())
    }
    fn file(&mut self, _: &CStr, _: &Content<'_>, _: &Metadata, _: Option<u64>) -> Result<(), Failure> {
        Ok(())
    }
    fn data(&mut self, _: &[u8], _: u64) -> Result<(), Failure> {
        Ok(())
    }
    fn file_end(&mut self, _: &CStr, _: &Metadata, _: Option<u64>) -> Result<(), Failure> {
        Ok(())
    }
    fn link(&mut self, _: &CStr, _: u64) -> Result<(), Failure> {
        Ok(())
    }
}

/// Reads trees.
pub(crate) struct Walk<'a, S> {
    pub(crate) sink: S,
    budget: &'a Budget<'a>,
    /// Whether the tree is a stored layer, which has nothing that would be left out of the hash.
    is_stored: bool,
    /// Whether names of files that had none are left out.
    has_remaps: bool,
    hash: Sha256,
    buffer: Vec<u8>,
    /// Each file with several names, by device and inode: its number among them, and among all files.
    links: HashMap<(u64, u64), (u64, u64)>,
    files: u64,
    bytes: u64,
    names: usize,
    unchecked: u64,
}

/// A directory whose entries are being read.
struct Directory {
    name: CString,
    /// The directories that are merged, topmost first.
    from: Vec<OwnedFd>,
    /// Whether something may lie below it.
    has_below: bool,
    /// Its entries in reverse order.
    left: Vec<CString>,
    names: usize,
    metadata: Metadata,
}

/// Owner, mode, times and attributes of a file.
#[derive(Debug)]
pub(crate) struct Metadata {
    pub(crate) is_link: bool,
    /// Permissions, with set-user-id, set-group-id and sticky bit.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, u32),
    /// Sorted by name.
    pub(crate) attributes: Vec<(CString, Vec<u8>)>,
}

impl Metadata {
    fn new(stat: &Stat, attributes: Vec<(CString, Vec<u8>)>) -> Self {
        Self {
            is_link: FileType::from_raw_mode(stat.st_mode) == FileType::Symlink,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            modified: (stat.st_mtime, stat.st_mtime_nsec.try_into().unwrap_or(0)),
            attributes,
        }
    }
}

impl<'a, S: Sink> Walk<'a, S> {
    pub(crate) fn begin(sink: S, budget: &'a Budget<'a>, is_stored: bool) -> Self {
        Self {
            sink,
            budget,
            is_stored,
            has_remaps: false,
            hash: Sha256::new_with_prefix("ringfence layer 2\n"),
            buffer: vec![0; BUFFER],
            links: HashMap::new(),
            files: 0,
            bytes: 0,
            names: 0,
            unchecked: 0,
        }
    }

    /// Leaves out the names that CRIU gave to files without one while it wrote processes: whoever restores these removes
    /// them, and nobody else would.
    pub(crate) fn leave_out_remaps(&mut self) {
        self.has_remaps = true;
    }

    /// Reads trees, topmost first, as one directory of the layer.
    pub(crate) fn tree(&mut self, part: Part, trees: Vec<OwnedFd>, has_below: bool) -> Result<(), Failure> {
        let name = CString::new(part.as_str()).map_err(io::Error::from)?;
        let mut path = Vec::new();
        let Some(top) = trees.first() else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(top)?;
        rustix::process::fchdir(top)?;
        let read = attributes(c".")?;
        if self.is_stored && read.is_opaque {
            return Err(Failure::Refused("its root hides what lies below".to_owned()));
        }
        let metadata = Metadata::new(&stat, read.kept);
        self.enter(&mut path, name, trees, has_below, false, metadata)?;
        if let (Part::Root, Some(root)) = (part, path.last_mut()) {
            // In messages, paths are those of the sandbox.
            root.name = CString::default();
        }
        while let Some(directory) = path.last_mut() {
            match directory.left.pop() {
                Some(entry) => {
                    let read = self.entry(&mut path, &entry);
                    read.map_err(|failure| at(&path, &entry, failure))?;
                }
                None => {
                    if let Some(directory) = path.pop() {
                        self.names -= directory.names;
                        self.note(b'e', &[]);
                        // The name of a root is not in its own directory.
                        let left = self.sink.leave(&directory.metadata);
                        left.map_err(|failure| at(&path, &directory.name, failure))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The layer's id and size.
    pub(crate) fn finish(self) -> (LayerId, u64, S) {
        let hash: [u8; 32] = self.hash.finalize().into();
        (LayerId::from_hash(&hash), self.bytes, self.sink)
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
        let Metadata { mode, uid, gid, .. } = metadata;
        self.note(b'm', &[&mode.to_le_bytes(), &uid.to_le_bytes(), &gid.to_le_bytes()]);
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
    fn enter(
        &mut self,
        path: &mut Vec<Directory>,
        name: CString,
        from: Vec<OwnedFd>,
        has_below: bool,
        hides_below: bool,
        mut metadata: Metadata,
    ) -> Result<(), Failure> {
        if path.len() >= DEPTH_MAX {
            return Err(Failure::Refused(format!("more than {DEPTH_MAX} directories deep")));
        }
        self.note(b'd', &[name.to_bytes()]);
        if has_below && hides_below {
            metadata.attributes.push((OPAQUE.to_owned(), b"y".to_vec()));
        }
        self.note_metadata(&metadata);
        self.sink.enter(&name, &metadata)?;
        self.bytes += BLOCK as u64;
        let before = self.names;
        let left = self.entries(&from)?;
        path.push(Directory {
            name,
            from,
            has_below: has_below && !hides_below,
            left,
            names: self.names - before,
            metadata,
        });
        Ok(())
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
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_kept = matches!(kind, FileType::Directory | FileType::CharacterDevice);
        if self.has_remaps && !is_kept && is_remap(name) {
            return Ok(());
        }
        if !self.is_stored && is_of_sandbox(path, name) {
            return Ok(());
        }
        match kind {
            FileType::CharacterDevice if is_whiteout(&stat) => return self.whiteout(name, directory.has_below),
            // It does not outlive its server.
            FileType::Socket if !self.is_stored => return self.whiteout(name, directory.has_below),
            FileType::Socket => return Err(Failure::Refused("a socket".to_owned())),
            FileType::CharacterDevice | FileType::BlockDevice => {
                return Err(Failure::Refused("a device".to_owned()));
            }
            FileType::Directory | FileType::RegularFile | FileType::Symlink | FileType::Fifo => {}
            FileType::Unknown => return Err(Failure::Refused("a file of an unknown type".to_owned())),
        }
        if stat.st_uid >= IDS_PER_SLOT || stat.st_gid >= IDS_PER_SLOT {
            return Err(Failure::Refused("its owner is not a user of the sandbox".to_owned()));
        }
        rustix::process::fchdir(from)?;
        let read = attributes(name)?;
        let metadata = Metadata::new(&stat, read.kept);
        if kind == FileType::Directory {
            if self.is_stored && read.is_opaque && !directory.has_below {
                return Err(Failure::Refused("nothing is below that it could hide".to_owned()));
            }
            let mut merged = vec![open_directory(from, name)?];
            let mut hides_below = read.is_opaque;
            for lower in &directory.from[index + 1..] {
                if hides_below {
                    break;
                }
                match stat_at(lower.as_fd(), name)? {
                    None => {}
                    Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                        rustix::process::fchdir(lower)?;
                        hides_below = attributes(name)?.is_opaque;
                        merged.push(open_directory(lower.as_fd(), name)?);
                    }
                    // What is not a directory ends what is merged.
                    Some(_) => hides_below = true,
                }
            }
            let has_below = directory.has_below;
            return self.enter(path, name.to_owned(), merged, has_below, hides_below, metadata);
        }
        let mut number = None;
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some((number, file)) = self.links.get(&key).copied() {
                // The other names of a file may be outside of the tree, so the hash counts all files.
                self.note(b'h', &[name.to_bytes(), &file.to_le_bytes()]);
                self.files += 1;
                return self.sink.link(name, number);
            }
            let new = self.links.len() as u64;
            self.links.insert(key, (new, self.files));
            number = Some(new);
        }
        self.files += 1;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.file(kind, size, from, name, &metadata, number)
    }

    /// Says that a name is deleted in what lies below, if anything does.
    fn whiteout(&mut self, name: &CStr, has_below: bool) -> Result<(), Failure> {
        if !has_below {
            return if self.is_stored {
                Err(Failure::Refused("nothing is below that it could delete".to_owned()))
            } else {
                Ok(())
            };
        }
        self.note(b'w', &[name.to_bytes()]);
        self.bytes += INODE;
        self.sink.whiteout(name)
    }

    /// Reads a file that is not a directory.
    fn file(
        &mut self,
        kind: FileType,
        size: u64,
        from: BorrowedFd<'_>,
        name: &CStr,
        metadata: &Metadata,
        number: Option<u64>,
    ) -> Result<(), Failure> {
        self.bytes += INODE;
        match kind {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                self.note(b'l', &[name.to_bytes(), target.to_bytes()]);
                self.sink.file(name, &Content::Symlink(target), metadata, number)?;
            }
            FileType::Fifo => {
                self.note(b'p', &[name.to_bytes()]);
                self.sink.file(name, &Content::Fifo, metadata, number)?;
            }
            _ => {
                self.note(b'f', &[name.to_bytes(), &size.to_le_bytes()]);
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                let file = File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
                let content = Content::Regular { file: &file, size };
                self.sink.file(name, &content, metadata, number)?;
                self.content(&file, size)?;
            }
        }
        self.note_metadata(metadata);
        self.sink.file_end(name, metadata, number)
    }

    /// Reads the blocks of a file that are not zero.
    fn content(&mut self, from: &File, size: u64) -> Result<(), Failure> {
        let mut offset = 0;
        while offset < size {
            offset = match rustix::fs::seek(from, SeekFrom::Data(offset)) {
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
                .and_then(|()| self.blocks(&buffer[..wanted], offset));
            self.buffer = buffer;
            copied?;
            offset += wanted as u64;
        }
        Ok(())
    }

    fn blocks(&mut self, data: &[u8], offset: u64) -> Result<(), Failure> {
        let mut at = offset;
        // Adjacent blocks are given together.
        let (mut start, mut end) = (0, 0);
        for block in data.chunks(BLOCK) {
            let index = usize::try_from(at - offset).unwrap_or(0);
            if block.iter().any(|byte| *byte != 0) {
                self.note(b'b', &[&at.to_le_bytes(), block]);
                if end != index {
                    self.sink.data(&data[start..end], offset + start as u64)?;
                    start = index;
                }
                end = index + block.len();
                self.bytes += BLOCK as u64;
            }
            at += block.len() as u64;
        }
        self.sink.data(&data[start..end], offset + start as u64)?;
        self.spend(data.len() as u64)
    }
}

pub(super) fn open_directory(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Failure> {
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

/// Whether a name is one that CRIU gives to a file that has none.
fn is_remap(name: &CStr) -> bool {
    let number = name.to_bytes().strip_prefix(b"link_remap.");
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// Whether a name is that of the file with what a request gave to this sandbox alone, complete or not.
fn is_of_sandbox(path: &[Directory], name: &CStr) -> bool {
    let Some((directory, file)) = SANDBOX_FILE.rsplit_once('/') else {
        return false;
    };
    // The first is the root; that of another part has a name.
    let names = path.iter().map(|directory| directory.name.to_bytes());
    let is_there = names.eq([""].into_iter().chain(directory.split('/')).map(str::as_bytes));
    is_there
        && [file, UNFINISHED_FILE]
            .iter()
            .any(|own| own.as_bytes() == name.to_bytes())
}

fn is_whiteout(stat: &Stat) -> bool {
    stat.st_rdev == 0
}

/// Extended attributes of a file.
struct Attributes {
    /// Attributes that a layer keeps, sorted.
    kept: Vec<(CString, Vec<u8>)>,
    is_opaque: bool,
}

/// Reads the extended attributes of a file in the current directory, without following a link.
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
pub(crate) fn is_kept(name: &[u8]) -> bool {
    name.starts_with(b"user.")
        || matches!(
            name,
            b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default"
        )
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
