//! Copies of files from another file system, which keeps them.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, XattrFlags};

use super::find::open;
use super::{Copy, Destination, INSIDE, STRICT, Source, owner_of};
use crate::files;
use crate::message::show;

/// Maximum size of an extended attribute and of their names, in bytes: what the kernel allows.
const XATTR_MAX: usize = 64 << 10;

impl Copy {
    /// Copies a source.
    pub(super) fn duplicate(&mut self, source: &Source, dest: &Destination) -> Result<()> {
        if files::kind(&source.stat) == FileType::Directory {
            self.make(&dest.path)
                .with_context(|| format!("make directory /{}", show(&dest.path)))?;
            let from = files::open_dir(&self.from, &source.path, ResolveFlags::IN_ROOT)?;
            return self.contents(&from, &dest.path);
        }
        let existing = files::open_dir(&self.root, &dest.path, INSIDE).is_ok();
        let (_, name) = files::split(&source.path);
        let path = if dest.is_dir || existing {
            files::join(&dest.path, name)
        } else {
            dest.path.clone()
        };
        let (to, to_name) = files::split(&path);
        let to = self.make(to).with_context(|| format!("make directory /{}", show(to)))?;
        let from = open(&self.from, &source.path, OFlags::RDONLY, ResolveFlags::IN_ROOT);
        let from = from.with_context(|| format!("read /{}", show(&source.path)))?;
        let stat = rustix::fs::fstat(&from)?;
        ensure!(
            files::kind(&stat) == FileType::RegularFile,
            "/{} is neither a file nor a directory",
            show(&source.path)
        );
        self.regular(File::from(from), &stat, &to, to_name)
            .with_context(|| format!("write /{}", show(&path)))
    }

    /// Copies the contents of a directory into another one. What has no content, such as devices and sockets, is left
    /// out.
    fn contents(&mut self, from: &OwnedFd, to_path: &[u8]) -> Result<()> {
        let mut directories = Vec::new();
        let to = files::open_dir(&self.root, to_path, INSIDE)
            .with_context(|| format!("open directory /{}", show(to_path)))?;
        for name in files::names(from, usize::MAX)? {
            let path = files::join(to_path, &name);
            let copied = self.entry(from, &name, &to, &path);
            if copied.with_context(|| format!("write /{}", show(&path)))? {
                directories.push(name);
            }
        }
        drop(to);
        for name in directories {
            let below = files::open_dir(from, &name, STRICT)?;
            self.contents(&below, &files::join(to_path, &name))?;
        }
        Ok(())
    }

    /// Copies an entry; whether it is a directory, whose contents are still missing.
    fn entry(&mut self, from: &OwnedFd, name: &[u8], to: &OwnedFd, path: &[u8]) -> Result<bool> {
        let stat = files::stat(from, name)?.context("it has changed")?;
        match files::kind(&stat) {
            FileType::Directory => {
                self.count(0)?;
                self.prepare(path, to, name, &stat)?;
                return Ok(true);
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let source = File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
                self.regular(source, &stat, to, name)?;
            }
            FileType::Symlink => {
                self.count(0)?;
                self.clear_way(to, name)?;
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(target, to, name)?;
                let (uid, gid) = self.owner.unwrap_or_else(|| owner_of(&stat));
                rustix::fs::chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
                self.report.entries += 1;
            }
            _ => {}
        }
        Ok(false)
    }

    fn regular(&mut self, source: File, stat: &Stat, to: &OwnedFd, name: &[u8]) -> Result<()> {
        self.count(u64::try_from(stat.st_size).unwrap_or_default())?;
        self.clear_way(to, name)?;
        let mode = self.mode.unwrap_or(Mode::from_raw_mode(stat.st_mode & 0o7777));
        let attributes = source.try_clone()?;
        let target = self.write(source, stat, mode, to, name)?;
        // After the owner, because a new one clears capabilities.
        copy_xattrs(&attributes, &target);
        self.report.entries += 1;
        self.report.bytes += u64::try_from(stat.st_size).unwrap_or_default();
        Ok(())
    }

    /// A directory is never replaced by something else.
    fn clear_way(&self, to: &OwnedFd, name: &[u8]) -> Result<()> {
        match files::stat(to, name)? {
            Some(stat) if files::kind(&stat) == FileType::Directory => bail!("a directory is in the way of a file"),
            Some(_) => Ok(files::remove(to, name)?),
            None => Ok(()),
        }
    }

    fn count(&mut self, bytes: u64) -> Result<()> {
        let is_within =
            self.report.entries < self.limits.entries && self.report.bytes.saturating_add(bytes) <= self.limits.bytes;
        ensure!(is_within, "too large: the limit is reached");
        Ok(())
    }
}

/// Copies extended attributes, such as capabilities. Not every file system takes every one.
fn copy_xattrs(from: &File, to: &File) {
    let mut names = vec![0; XATTR_MAX];
    let Ok(length) = rustix::fs::flistxattr(from, &mut names[..]) else {
        return;
    };
    let mut value = vec![0; if length == 0 { 0 } else { XATTR_MAX }];
    for name in names[..length].split(|byte| *byte == 0) {
        let is_overlay = name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.");
        if name.is_empty() || is_overlay {
            continue;
        }
        if let Ok(length) = rustix::fs::fgetxattr(from, name, &mut value[..]) {
            let _ = rustix::fs::fsetxattr(to, name, &value[..length], XattrFlags::empty());
        }
    }
}
