//! A directory into which the entries of archives are unpacked.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use protocol::image::{Skipped, UnpackLimits};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use crate::files;
use crate::message::show;
use crate::tar::{Entry, Kind, Reader};

/// Prefix of the names by which a layer deletes what is below it.
const WHITEOUT: &[u8] = b".wh.";
/// Name by which a layer hides the whole contents of a directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Extended attributes that overlays read as their own state.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
const BUFFER: usize = 128 << 10;

/// Rules for an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// A file system: links are followed as if it were the root, devices are skipped.
    Image,
    /// Files of a client: what leads out of the directory is refused, and so are devices. Owners are ignored.
    Upload,
}

impl Policy {
    fn resolve(self) -> ResolveFlags {
        match self {
            Self::Image => ResolveFlags::IN_ROOT,
            Self::Upload => ResolveFlags::BENEATH,
        }
    }
}

/// The directory, and what was unpacked into it so far.
pub(crate) struct Tree {
    root: OwnedFd,
    policy: Policy,
    limits: UnpackLimits,
    parent: Option<Parent>,
    buffer: Vec<u8>,
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    pub(crate) skipped: Skipped,
}

/// The directory of the last entry. Entries of one directory usually follow each other.
struct Parent {
    path: Vec<u8>,
    directory: Arc<OwnedFd>,
    /// Times of the directory before entries were made in it.
    times: Timestamps,
}

impl Parent {
    /// Restores the times of the directory. Times are for information only, so errors are ignored.
    fn leave(self) {
        let _ = rustix::fs::futimens(&self.directory, &self.times);
    }
}

impl Tree {
    /// Opens an existing directory.
    pub(crate) fn open(path: &Path, policy: Policy, limits: UnpackLimits) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, path, flags, Mode::empty())
            .with_context(|| format!("open directory {}", path.display()))?;
        Ok(Self {
            root,
            policy,
            limits,
            parent: None,
            buffer: vec![0; BUFFER],
            bytes: 0,
            entries: 0,
            skipped: Skipped::default(),
        })
    }

    /// Deletes what a layer hides of the layers below it. Its order does not matter then: what the layer itself has is
    /// unpacked afterwards.
    pub(crate) fn whiteouts<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<()> {
        self.leave();
        while let Some(entry) = reader.next_entry()? {
            let path = self.path(&entry)?;
            let (directory, name) = files::split(&path);
            let Some(hidden) = name.strip_prefix(WHITEOUT) else {
                continue;
            };
            // A layer names directories by their real paths. Behind a link there is something else.
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let directory = match files::open_dir(&self.root, directory, resolve) {
                Ok(directory) => directory,
                Err(error)
                    if matches!(
                        Errno::from_io_error(&error),
                        Some(Errno::NOENT | Errno::LOOP | Errno::NOTDIR)
                    ) =>
                {
                    continue;
                }
                Err(error) => return Err(error).with_context(|| format!("whiteout {}", show(&path))),
            };
            let done = match hidden {
                _ if name == OPAQUE => files::clear(&directory),
                b"" | b"." | b".." => bail!("{}: invalid whiteout", show(&path)),
                // Other state of AUFS.
                _ if hidden.starts_with(WHITEOUT) => Ok(()),
                _ => files::remove(&directory, hidden),
            };
            done.with_context(|| format!("whiteout {}", show(&path)))?;
        }
        Ok(())
    }

    /// Unpacks all entries.
    pub(crate) fn unpack<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<()> {
        while let Some(entry) = reader.next_entry()? {
            self.entry(&entry, reader)
                .with_context(|| format!("unpack {}", show(&entry.path)))?;
        }
        self.leave();
        Ok(())
    }

    fn leave(&mut self) {
        if let Some(parent) = self.parent.take() {
            parent.leave();
        }
    }

    /// The path of an entry below the root.
    fn path(&self, entry: &Entry) -> Result<Vec<u8>> {
        let is_absolute = entry.path.starts_with(b"/");
        ensure!(
            self.policy == Policy::Image || !is_absolute,
            "{}: absolute paths are not allowed",
            show(&entry.path)
        );
        files::clean(&entry.path).with_context(|| format!("{}: leads out of the archive", show(&entry.path)))
    }

    fn entry<R: Read>(&mut self, entry: &Entry, data: &mut R) -> Result<()> {
        let path = self.path(entry)?;
        let is_image = self.policy == Policy::Image;
        if is_image && path.split(|byte| *byte == b'/').any(|name| name.starts_with(WHITEOUT)) {
            return Ok(());
        }
        self.entries += 1;
        ensure!(
            self.entries <= self.limits.entries,
            "too large: more than {} files",
            self.limits.entries
        );
        if path.is_empty() {
            ensure!(entry.kind == Kind::Directory, "has no name");
            self.leave();
            if is_image {
                let root = files::open_dir(&self.root, b"", ResolveFlags::BENEATH)?;
                self.metadata(&root, entry)?;
            }
            return Ok(());
        }
        let (directory, name) = files::split(&path);
        let parent = self.enter(directory)?;
        match entry.kind {
            Kind::Directory => self.directory(&parent, name, entry),
            Kind::File => self.file(&parent, name, entry, data),
            Kind::HardLink => self.hard_link(&parent, &path, name, entry),
            Kind::Symlink => self.symlink(&parent, name, entry),
            Kind::Fifo => self.fifo(&parent, name, entry),
            Kind::Device if is_image => {
                self.skipped.devices += 1;
                Ok(())
            }
            Kind::Device => bail!("device nodes are not allowed"),
        }
    }

    /// Opens the directory of an entry, and makes it if it is missing.
    fn enter(&mut self, path: &[u8]) -> Result<Arc<OwnedFd>> {
        if let Some(parent) = &self.parent
            && parent.path == path
        {
            return Ok(Arc::clone(&parent.directory));
        }
        self.leave();
        let directory = match files::open_dir(&self.root, path, self.policy.resolve()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.make(path)?,
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTDIR) => self.make(path)?,
            Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
                bail!("a link in its path leads out of the archive")
            }
            other => other?,
        };
        let directory = Arc::new(directory);
        let stat = rustix::fs::fstat(&directory)?;
        let time = |seconds, nanoseconds: u64| Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds.try_into().unwrap_or_default(),
        };
        self.parent = Some(Parent {
            path: path.to_vec(),
            directory: Arc::clone(&directory),
            times: Timestamps {
                last_access: time(stat.st_atime, stat.st_atime_nsec),
                last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
            },
        });
        Ok(directory)
    }

    /// Makes missing directories of a path. Files and broken links in it are replaced.
    fn make(&mut self, path: &[u8]) -> Result<OwnedFd> {
        let resolve = self.policy.resolve();
        let mut end = 0;
        let mut parent = files::open_dir(&self.root, b"", resolve)?;
        while end < path.len() {
            let begin = if end == 0 { 0 } else { end + 1 };
            let next = path[begin..].iter().position(|byte| *byte == b'/');
            end = next.map_or(path.len(), |length| begin + length);
            let name = &path[begin..end];
            let child = match files::open_dir(&self.root, &path[..end], resolve) {
                Ok(child) => child,
                Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
                    bail!("a link in its path leads out of the archive")
                }
                Err(_) => {
                    files::remove(&parent, name)?;
                    rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
                    let flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
                    let child = files::open_dir(&parent, name, flags)?;
                    rustix::fs::fchmod(&child, Mode::from_raw_mode(0o755))?;
                    child
                }
            };
            parent = child;
        }
        Ok(parent)
    }

    fn directory(&mut self, parent: &OwnedFd, name: &[u8], entry: &Entry) -> Result<()> {
        let existing = files::stat(parent, name)?;
        if !existing.is_some_and(|stat| files::kind(&stat) == FileType::Directory) {
            files::remove(parent, name)?;
            rustix::fs::mkdirat(parent, name, Mode::RWXU)?;
        }
        let flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let made = files::open_dir(parent, name, flags)?;
        self.metadata(&made, entry)
    }

    fn file<R: Read>(&mut self, parent: &OwnedFd, name: &[u8], entry: &Entry, data: &mut R) -> Result<()> {
        let left = self.limits.bytes.saturating_sub(self.bytes);
        ensure!(
            entry.size <= left,
            "too large: more than {} bytes in all",
            self.limits.bytes
        );
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR);
        let file = match open() {
            Err(Errno::EXIST) => {
                files::remove(parent, name)?;
                open()?
            }
            other => other?,
        };
        let mut file = File::from(file);
        let mut written = 0;
        loop {
            let count = match data.read(&mut self.buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            file.write_all(&self.buffer[..count])?;
            written += count as u64;
        }
        ensure!(written == entry.size, "the archive is truncated");
        self.bytes += written;
        self.metadata(&OwnedFd::from(file), entry)
    }

    fn hard_link(&mut self, parent: &OwnedFd, path: &[u8], name: &[u8], entry: &Entry) -> Result<()> {
        let is_absolute = entry.link.starts_with(b"/");
        let target = files::clean(&entry.link).filter(|_| self.policy == Policy::Image || !is_absolute);
        let target = target.with_context(|| format!("hard link to {}, out of the archive", show(&entry.link)))?;
        ensure!(!target.is_empty() && target != path, "hard link to itself");
        let (directory, target_name) = files::split(&target);
        let missing = || format!("hard link to {}, which does not exist", show(&target));
        let directory = files::open_dir(&self.root, directory, self.policy.resolve()).with_context(missing)?;
        let stat = files::stat(&directory, target_name)?.with_context(missing)?;
        ensure!(
            files::kind(&stat) != FileType::Directory,
            "hard link to the directory {}",
            show(&target)
        );
        let link = || rustix::fs::linkat(&directory, target_name, parent, name, AtFlags::empty());
        match link() {
            Err(Errno::EXIST) => {
                let existing = files::stat(parent, name)?;
                if existing.is_some_and(|existing| (existing.st_dev, existing.st_ino) == (stat.st_dev, stat.st_ino)) {
                    return Ok(());
                }
                files::remove(parent, name)?;
                Ok(link().with_context(missing)?)
            }
            other => Ok(other?),
        }
    }

    fn symlink(&mut self, parent: &OwnedFd, name: &[u8], entry: &Entry) -> Result<()> {
        ensure!(!entry.link.is_empty(), "symbolic link without a target");
        let link = || rustix::fs::symlinkat(entry.link.as_slice(), parent, name);
        match link() {
            Err(Errno::EXIST) => {
                files::remove(parent, name)?;
                link()?;
            }
            other => other?,
        }
        self.owner(entry, |uid, gid| {
            rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        })?;
        for (name, _) in &entry.xattrs {
            self.skip_xattr(name);
        }
        let times = files::times(entry.mtime);
        let _ = rustix::fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    fn fifo(&mut self, parent: &OwnedFd, name: &[u8], entry: &Entry) -> Result<()> {
        ensure!(self.policy == Policy::Image, "named pipes are not allowed");
        files::remove(parent, name)?;
        rustix::fs::mknodat(parent, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        self.owner(entry, |uid, gid| {
            rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        })?;
        // It was made a moment ago and nothing else works here, so it is not a link.
        rustix::fs::chmodat(parent, name, Mode::from_raw_mode(entry.mode), AtFlags::empty())?;
        let _ = rustix::fs::utimensat(parent, name, &files::times(entry.mtime), AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    /// Sets owner, mode, attributes and times, in this order: a new owner clears bits of the mode and capabilities.
    fn metadata(&mut self, file: &OwnedFd, entry: &Entry) -> Result<()> {
        self.owner(entry, |uid, gid| rustix::fs::fchown(file, Some(uid), Some(gid)))?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(entry.mode))?;
        for (name, value) in &entry.xattrs {
            let is_overlay = OVERLAY.iter().any(|prefix| name.starts_with(prefix));
            if is_overlay || rustix::fs::fsetxattr(file, name.as_slice(), value, XattrFlags::empty()).is_err() {
                self.skip_xattr(name);
            }
        }
        // No file system has all times that an archive can have.
        let _ = rustix::fs::futimens(file, &files::times(entry.mtime));
        Ok(())
    }

    fn owner(
        &mut self,
        entry: &Entry,
        chown: impl Fn(rustix::fs::Uid, rustix::fs::Gid) -> rustix::io::Result<()>,
    ) -> Result<()> {
        if self.policy == Policy::Upload {
            return Ok(());
        }
        let changed = match files::ids(entry.uid, entry.gid) {
            Some((uid, gid)) => chown(uid, gid),
            None => Err(Errno::INVAL),
        };
        match changed {
            Err(Errno::INVAL | Errno::PERM) => {
                self.skipped.owners += 1;
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn skip_xattr(&mut self, name: &[u8]) {
        // Names are of the archive, so there may be any number of different ones.
        let known = self.skipped.xattrs.len();
        let name = show(name);
        let name = if known < 64 || self.skipped.xattrs.contains_key(&name) {
            name
        } else {
            "others".to_owned()
        };
        *self.skipped.xattrs.entry(name).or_default() += 1;
    }
}
