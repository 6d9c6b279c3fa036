//! Files of the host, without leaving a folder: every name is one name, below a folder that is held open, and no link is
//! followed but those in the path that the operator has given.
//!
//! A file has another name until it is complete, so a copy that is interrupted leaves no part under the name of the whole,
//! and nothing but a file is ever replaced.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

/// Longest name of a file.
const NAME_MAX: usize = 255;
/// Permission bits: none that make a program run as another user.
const MODE: u32 = 0o777;
/// What the owner of a folder may always do: it is written to.
const OWNER: u32 = 0o700;

/// Numbers of unfinished files of this process.
static UNFINISHED: AtomicU64 = AtomicU64::new(0);

/// Whether a text is the name of one entry of a folder, and nothing else.
pub(super) fn is_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= NAME_MAX && !name.contains(['/', '\0'])
}

/// A folder that is held open.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

/// An entry of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    File,
    Folder,
    Link,
    Special,
    /// Its name is not UTF-8, which the agent requires.
    Unnamed,
}

/// A file to read.
#[derive(Debug)]
pub(super) struct ReadFile {
    pub(super) file: File,
    pub(super) mode: u32,
}

impl Folder {
    /// Opens the folder at a path of the operator, following its links.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty());
        Ok(Self(
            opened.with_context(|| format!("open the folder {}", path.display()))?,
        ))
    }

    /// Opens a folder in it.
    pub(super) fn enter(&self, name: &str) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        Ok(Self(self.below(name, flags, Mode::empty())?))
    }

    /// Opens a folder in it, which is created if it does not exist.
    pub(super) fn make(&self, name: &str, mode: u32) -> Result<Self> {
        check(name)?;
        match rustix::fs::mkdirat(&self.0, name, Mode::from_raw_mode(mode & MODE | OWNER)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => self.enter(name),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a file in it.
    pub(super) fn read(&self, name: &str) -> Result<ReadFile> {
        // A pipe that has taken the place of a file would wait for a writer.
        let opened = self.below(name, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
        ReadFile::of(File::from(opened))
    }

    /// Begins a file in it.
    pub(super) fn create(&self, mode: u32) -> Result<Unfinished<'_>> {
        let number = UNFINISHED.fetch_add(1, Ordering::Relaxed);
        let name = format!(".ringfence-cp-{}-{number}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let opened = self.below(&name, flags, Mode::from_raw_mode(mode & MODE));
        Ok(Unfinished {
            folder: self,
            file: File::from(opened.context("create a file")?),
            name: Some(name),
        })
    }

    /// Its entries.
    pub(super) fn list(&self) -> Result<impl Iterator<Item = Result<(String, Found)>>> {
        let entries = Dir::read_from(&self.0)?.map(|entry| {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let found = match entry.file_type() {
                _ if entry.file_name().to_str().is_err() => Found::Unnamed,
                FileType::RegularFile => Found::File,
                FileType::Directory => Found::Folder,
                FileType::Symlink => Found::Link,
                _ => Found::Special,
            };
            Ok((name, found))
        });
        Ok(entries.filter(|entry| !matches!(entry, Ok((name, _)) if name == "." || name == "..")))
    }

    /// Its permission bits.
    pub(super) fn mode(&self) -> Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_mode & MODE)
    }

    /// Opens an entry, which the kernel keeps below this folder.
    fn below(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        check(name)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.0, name, flags, mode, resolve).map_err(|error| match error {
            rustix::io::Errno::LOOP => anyhow::anyhow!("{name:?} is a link on the host, which is not followed"),
            error => error.into(),
        })
    }
}

impl ReadFile {
    /// Opens the file at a path of the operator, following its links.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let opened = File::open(path).with_context(|| format!("open {}", path.display()))?;
        Self::of(opened)
    }

    fn of(file: File) -> Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            bail!("not a file");
        }
        Ok(Self {
            file,
            mode: stat.st_mode & MODE,
        })
    }
}

/// A file that is not complete. It is removed when this is dropped, unless it was finished.
#[derive(Debug)]
pub(super) struct Unfinished<'a> {
    folder: &'a Folder,
    file: File,
    /// Its name until then; none once it has its own.
    name: Option<String>,
}

impl Unfinished<'_> {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).context("write the file")
    }

    /// Gives it its name. It takes the place of a file, and of nothing else.
    pub(super) fn finish(mut self, name: &str) -> Result<()> {
        check(name)?;
        match rustix::fs::statat(&self.folder.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile => {
                bail!("{name:?} exists on the host and is not a file; - copies to stdout");
            }
            Ok(_) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(unfinished) = &self.name {
            rustix::fs::renameat(&self.folder.0, unfinished, &self.folder.0, name)
                .map_err(io::Error::from)
                .context("rename the file")?;
        }
        self.name = None;
        Ok(())
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            let _ = rustix::fs::unlinkat(&self.folder.0, name, AtFlags::empty());
        }
    }
}

fn check(name: &str) -> Result<()> {
    if !is_name(name) {
        bail!("{name:?} is not a name for a file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["a", "...", "-rf", "a\nb", "\u{1b}[2J", "a b"] {
            assert!(is_name(name), "{name:?}");
        }
        let long = "x".repeat(256);
        for name in ["", ".", "..", "/", "a/b", "../a", "/etc/passwd", "a\0b", &long] {
            assert!(!is_name(name), "{name:?}");
        }
    }

    #[test]
    fn no_link_is_followed_and_only_files_are_replaced() {
        let root = tempfile::tempdir().unwrap();
        let outside = root.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("kept"), "before").unwrap();
        let target = root.path().join("target");
        std::fs::create_dir(&target).unwrap();
        symlink(&outside, target.join("folder")).unwrap();
        symlink(outside.join("kept"), target.join("file")).unwrap();
        let folder = Folder::open(&target).unwrap();
        assert!(folder.make("folder", 0o755).is_err());
        assert!(folder.enter("folder").is_err());
        assert!(folder.read("file").is_err());
        for name in ["file", "folder", "../outside/kept", ".."] {
            let mut file = folder.create(0o644).unwrap();
            file.write(b"after").unwrap();
            assert!(file.finish(name).is_err(), "{name}");
        }
        assert_eq!(std::fs::read(outside.join("kept")).unwrap(), b"before");
        let mut file = folder.create(0o4777).unwrap();
        file.write(b"new").unwrap();
        file.finish("fresh").unwrap();
        assert_eq!(std::fs::read(target.join("fresh")).unwrap(), b"new");
        let names: Vec<_> = std::fs::read_dir(&target)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }
}
