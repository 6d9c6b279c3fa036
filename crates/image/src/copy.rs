//! COPY and ADD: the files of an uploaded archive, or of another file system, get to their destination.
//!
//! An archive is unpacked into a directory of its own, and its files are moved from there. So it is known whether the
//! source is a file or a directory before anything is changed, and a broken archive changes nothing. Those of another
//! file system are duplicated (`copy/duplicate.rs`).

mod duplicate;
mod find;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use protocol::image::{CopyJob, CopyReport, UnpackLimits};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use crate::layers::WorkDir;
use crate::message::show;
use crate::tar::Reader;
use crate::tree::{Policy, Tree};
use crate::users::Users;
use crate::{decompress, files};

/// Names of a directory that are kept in memory at a time.
const BATCH: usize = 1024;
/// Nothing on the way is followed: the archive may have any links.
const STRICT: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);
/// Links of the image are followed, as its own programs would.
const INSIDE: ResolveFlags = ResolveFlags::IN_ROOT;

/// Runs a job of `image-copy`.
pub(crate) fn run(job: &CopyJob) -> Result<CopyReport> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, &job.root, flags, Mode::empty())
        .with_context(|| format!("open directory {}", job.root.display()))?;
    let users = Users::read(&root)?;
    let owner = job.owner.as_deref().filter(|owner| !owner.is_empty());
    let owner = match (owner, &job.from) {
        (None, Some(_)) => None,
        (owner, _) => Some(users.owner(owner.unwrap_or(&job.user))?),
    };
    let owner = owner.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid)));
    let mode = mode(job.mode.as_deref().unwrap_or_default())?;
    let dest = destination(job, &users)?;
    let mut work = None;
    let (from, entries) = match &job.from {
        Some(from) => (from.as_path(), None),
        None => {
            let work = work.insert(WorkDir::make(&job.work, "copy")?);
            let entries = unpack(job, work.path())?;
            (work.path(), Some(entries))
        }
    };
    let from = rustix::fs::openat(CWD, from, flags, Mode::empty())
        .with_context(|| format!("open directory {}", from.display()))?;
    let mut copy = Copy {
        root,
        from,
        owner,
        mode,
        limits: job.limits,
        report: CopyReport::default(),
    };
    if job.patterns.is_empty() && job.from.is_none() {
        let source = copy.source(&job.source, entries.unwrap_or_default())?;
        copy.place(&source, &dest)?;
        return Ok(copy.report);
    }
    let sources = copy.find(&job.patterns, entries)?;
    let is_dir = dest.is_dir || files::open_dir(&copy.root, &dest.path, INSIDE).is_ok();
    ensure!(
        is_dir || sources.len() < 2,
        "several sources need a directory as their destination: write {}/",
        job.dest
    );
    let are_moved = job.from.is_none() && !overlap(&sources);
    for source in &sources {
        if are_moved {
            copy.place(source, &dest)?;
        } else {
            copy.duplicate(source, &dest)?;
        }
    }
    Ok(copy.report)
}

/// Whether a file can be part of two sources, so that copying one must not move it: what a link leads to may be another
/// source, too.
fn overlap(sources: &[Source]) -> bool {
    let paths: HashSet<&[u8]> = sources.iter().map(|source| source.path.as_slice()).collect();
    let is_below = |path: &[u8]| {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let mut above = ends.map(|(end, _)| &path[..end]).chain([&b""[..]]);
        !path.is_empty() && above.any(|above| paths.contains(above))
    };
    paths.len() < sources.len() || sources.iter().any(|source| source.is_link || is_below(&source.path))
}

/// Permission bits in octal digits; none if the text is empty.
fn mode(text: &str) -> Result<Option<Mode>> {
    if text.is_empty() {
        return Ok(None);
    }
    let is_octal = text.len() <= 5 && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let bits = if is_octal {
        u32::from_str_radix(text, 8).ok()
    } else {
        None
    };
    let bits = bits.filter(|bits| *bits <= 0o7777);
    let bits = bits.with_context(|| format!("invalid mode {text:?}: expected octal digits such as 0755"))?;
    Ok(Some(Mode::from_raw_mode(bits)))
}

/// Where the files get to: a path without `.` and `..`, and whether it names a directory.
struct Destination {
    path: Vec<u8>,
    is_dir: bool,
}

fn destination(job: &CopyJob, users: &Users) -> Result<Destination> {
    ensure!(!job.dest.contains('\0'), "the destination contains a NUL");
    let base = match &job.workdir {
        Some(workdir) if !workdir.is_empty() => workdir.clone(),
        _ => users.home(&job.user),
    };
    let full = if job.dest.starts_with('/') {
        job.dest.clone()
    } else {
        format!("{base}/{}", job.dest)
    };
    let mut path: Vec<&str> = Vec::new();
    for component in full.split('/') {
        match component {
            "" | "." => {}
            ".." => drop(path.pop()),
            name => path.push(name),
        }
    }
    let last = job.dest.rsplit('/').next().unwrap_or_default();
    Ok(Destination {
        path: path.join("/").into_bytes(),
        is_dir: matches!(last, "" | "." | ".."),
    })
}

/// Unpacks the archive and gives the number of its entries.
fn unpack(job: &CopyJob, target: &Path) -> Result<u64> {
    let (archive, limits) = (job.archive.as_path(), job.limits);
    let name = || "the uploaded archive".to_owned();
    let file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
    if job.consume {
        std::fs::remove_file(archive).with_context(|| format!("remove {}", archive.display()))?;
    }
    let mut reader = Reader::new(decompress::open(file).with_context(name)?);
    let mut tree = Tree::open(target, Policy::Upload, limits)?;
    tree.unpack(&mut reader).with_context(name)?;
    // The checksum of gzip is at the end.
    reader.drain().with_context(name)?;
    Ok(tree.entries)
}

/// The part of a path before its first component with a glob character.
fn literal(source: &str) -> String {
    let is_glob = |component: &&str| component.contains(['*', '?', '[', '{']);
    let parts: Vec<&str> = source.split('/').take_while(|component| !is_glob(component)).collect();
    parts.join("/")
}

struct Copy {
    root: OwnedFd,
    from: OwnedFd,
    /// The owner of everything; none to keep those of the source.
    owner: Option<(Uid, Gid)>,
    mode: Option<Mode>,
    limits: UnpackLimits,
    report: CopyReport,
}

/// What is copied: of an unpacked archive, or of another file system.
struct Source {
    path: Vec<u8>,
    /// The state of what a link leads to, where it is followed.
    stat: Stat,
    /// Whether there is a link at the path, which is followed.
    is_link: bool,
}

impl Source {
    fn new(path: Vec<u8>, stat: Stat) -> Self {
        Self {
            path,
            stat,
            is_link: false,
        }
    }
}

impl Copy {
    /// Finds the source. Its directories are not followed where they are links out of the archive.
    fn source(&self, source: &str, entries: u64) -> Result<Source> {
        ensure!(!source.contains('\0'), "the source contains a NUL");
        // A file may really have such a name; only what does not exist is a pattern.
        for text in [source.to_owned(), literal(source)] {
            let path = dockerfile::clean(&text)
                .with_context(|| format!("source {source:?} leads out of the archive"))?
                .into_bytes();
            if path.is_empty() {
                let stat = rustix::fs::fstat(&self.from)?;
                return Ok(Source::new(path, stat));
            }
            let (directory, name) = files::split(&path);
            let directory = match files::open_dir(&self.from, directory, ResolveFlags::BENEATH) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
                    bail!("source {source:?}: a link in its path leads out of the archive")
                }
                Err(_) => continue,
                Ok(directory) => directory,
            };
            if let Some(stat) = files::stat(&directory, name)? {
                return Ok(Source::new(path, stat));
            }
        }
        bail!("source {source:?} is not in the uploaded archive, which has {entries} entries");
    }

    fn place(&mut self, source: &Source, dest: &Destination) -> Result<()> {
        let shown = show(&dest.path);
        if files::kind(&source.stat) == FileType::Directory {
            self.make(&dest.path)
                .with_context(|| format!("make directory /{shown}"))?;
            let path = source.path.clone();
            return self.merge(&path, &dest.path);
        }
        let existing = files::open_dir(&self.root, &dest.path, INSIDE).is_ok();
        let (from, name) = files::split(&source.path);
        let path = if dest.is_dir || existing {
            files::join(&dest.path, name)
        } else {
            dest.path.clone()
        };
        let (to, to_name) = files::split(&path);
        let from = files::open_dir(&self.from, from, ResolveFlags::BENEATH)?;
        let to = self.make(to).with_context(|| format!("make directory /{}", show(to)))?;
        self.file(&from, name, &source.stat, &to, to_name)
            .with_context(|| format!("write /{}", show(&path)))
    }

    /// Opens a directory of the image; makes missing ones with the owner of the step. They are not copied, so they do not
    /// get the mode of the step: that of a file would close them.
    fn make(&mut self, path: &[u8]) -> Result<OwnedFd> {
        match files::open_dir(&self.root, path, INSIDE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return Ok(other?),
        }
        let (above, name) = files::split(path);
        ensure!(!name.is_empty(), "the root directory does not exist");
        let parent = self.make(above)?;
        if files::stat(&parent, name)?.is_some() {
            bail!("/{} is a link to what does not exist", show(path));
        }
        self.directory(&parent, name, Mode::from_raw_mode(0o755), (Uid::ROOT, Gid::ROOT))
    }

    /// Makes a directory. Its owner is that of the step, or else the given one.
    fn directory(&mut self, parent: &OwnedFd, name: &[u8], mode: Mode, owner: (Uid, Gid)) -> Result<OwnedFd> {
        rustix::fs::mkdirat(parent, name, Mode::RWXU)?;
        let made = files::open_dir(parent, name, STRICT)?;
        let (uid, gid) = self.owner.unwrap_or(owner);
        rustix::fs::fchown(&made, Some(uid), Some(gid))?;
        rustix::fs::fchmod(&made, mode)?;
        self.report.entries += 1;
        Ok(made)
    }

    /// Moves the contents of a directory into another one.
    fn merge(&mut self, from_path: &[u8], to_path: &[u8]) -> Result<()> {
        loop {
            let from = files::open_dir(&self.from, from_path, ResolveFlags::BENEATH)?;
            let names = files::names(&from, BATCH)?;
            if names.is_empty() {
                return Ok(());
            }
            let to = files::open_dir(&self.root, to_path, INSIDE)
                .with_context(|| format!("open directory /{}", show(to_path)))?;
            let mut directories = Vec::new();
            for name in names {
                let path = files::join(to_path, &name);
                let stat = files::stat(&from, &name)?.context("the unpacked archive has changed")?;
                let placed = if files::kind(&stat) == FileType::Directory {
                    directories.push(name.clone());
                    self.prepare(&path, &to, &name, &stat)
                } else {
                    self.file(&from, &name, &stat, &to, &name)
                };
                placed.with_context(|| format!("write /{}", show(&path)))?;
            }
            // Descriptors are not kept while deeper directories are merged: there may be thousands of levels.
            drop((from, to));
            for name in directories {
                let child = files::join(from_path, &name);
                self.merge(&child, &files::join(to_path, &name))?;
                let from = files::open_dir(&self.from, from_path, ResolveFlags::BENEATH)?;
                rustix::fs::unlinkat(&from, name.as_slice(), AtFlags::REMOVEDIR)?;
            }
        }
    }

    /// Makes a directory where the destination has none. One that exists keeps its metadata, also behind a link.
    fn prepare(&mut self, path: &[u8], to: &OwnedFd, name: &[u8], stat: &Stat) -> Result<()> {
        if files::open_dir(&self.root, path, INSIDE).is_ok() {
            return Ok(());
        }
        files::remove(to, name)?;
        let mode = self.mode.unwrap_or(Mode::from_raw_mode(stat.st_mode & 0o7777));
        self.directory(to, name, mode, owner_of(stat))?;
        Ok(())
    }

    /// Moves a file or link. A file or link there is replaced.
    fn file(&mut self, from: &OwnedFd, name: &[u8], stat: &Stat, to: &OwnedFd, to_name: &[u8]) -> Result<()> {
        if let Some(existing) = files::stat(to, to_name)? {
            ensure!(
                files::kind(&existing) != FileType::Directory,
                "a directory is in the way of a file"
            );
        }
        let (uid, gid) = self.owner.unwrap_or_else(|| owner_of(stat));
        rustix::fs::chownat(from, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        let is_link = files::kind(stat) == FileType::Symlink;
        let mode = self.mode.unwrap_or(Mode::from_raw_mode(stat.st_mode & 0o7777));
        if !is_link {
            // Also where it stays as it was: a new owner clears bits of it.
            rustix::fs::chmodat(from, name, mode, AtFlags::empty())?;
            self.report.bytes += u64::try_from(stat.st_size).unwrap_or_default();
        }
        self.report.entries += 1;
        match rustix::fs::renameat(from, name, to, to_name) {
            Err(Errno::XDEV) if is_link => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                files::remove(to, to_name)?;
                rustix::fs::symlinkat(target, to, to_name)?;
                rustix::fs::chownat(to, to_name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Err(Errno::XDEV) => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let source = File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
                self.write(source, stat, mode, to, to_name)?;
            }
            other => other?,
        }
        // Still there if it was copied, and also if both names were hard links to the same file.
        match rustix::fs::unlinkat(from, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Copies a file to another file system.
    fn write(&self, mut source: File, stat: &Stat, mode: Mode, to: &OwnedFd, to_name: &[u8]) -> Result<File> {
        files::remove(to, to_name)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut target = File::from(rustix::fs::openat(to, to_name, flags, Mode::RUSR | Mode::WUSR)?);
        io::copy(&mut source, &mut target)?;
        let (uid, gid) = self.owner.unwrap_or_else(|| owner_of(stat));
        rustix::fs::fchown(&target, Some(uid), Some(gid))?;
        rustix::fs::fchmod(&target, mode)?;
        let nanoseconds = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
        let _ = rustix::fs::futimens(&target, &files::times((stat.st_mtime, nanoseconds)));
        Ok(target)
    }
}

fn owner_of(stat: &Stat) -> (Uid, Gid) {
    (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_end_at_their_first_glob() {
        for (source, expect) in [
            ("a/*.txt", "a"),
            ("*.py", ""),
            ("a/**/x", "a"),
            ("f.txt", "f.txt"),
            (".", "."),
            ("a/b?/c", "a"),
            ("a/[x]/c", "a"),
        ] {
            assert_eq!(literal(source), expect, "{source}");
        }
    }

    #[test]
    fn modes_are_octal() {
        for (text, expect) in [
            ("", None),
            ("0755", Some(0o755)),
            ("644", Some(0o644)),
            ("07777", Some(0o7777)),
        ] {
            assert_eq!(mode(text).unwrap(), expect.map(Mode::from_raw_mode), "{text}");
        }
        for text in ["8", "u+x", "10000", "0x1", "-1", "000000", " 7"] {
            assert!(mode(text).is_err(), "{text}");
        }
    }
}
