//! Writes what is read of directory trees to a directory that overlayfs can have as a lower layer.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use super::failure::Failure;
use super::tree::{Content, Metadata, Sink, open_directory};

/// Directory for the files with several names, until all of them are known.
const LINKS: &str = "links";

/// A copy of trees into one layer.
pub(crate) struct Copy {
    layer: OwnedFd,
    /// The directories that are being written.
    path: Vec<OwnedFd>,
    links_dir: OwnedFd,
    links: u64,
    /// The regular file that is being written.
    file: Option<File>,
}

impl Copy {
    /// Begins to write to an empty directory.
    pub(crate) fn begin(layer: BorrowedFd<'_>) -> Result<Self, Failure> {
        rustix::fs::mkdirat(layer, LINKS, Mode::from_raw_mode(0o700))?;
        Ok(Self {
            layer: layer.try_clone_to_owned()?,
            path: Vec::new(),
            links_dir: crate::files::open_dir_at(layer, LINKS)?,
            links: 0,
            file: None,
        })
    }

    /// Ends when all is written.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        for number in 0..self.links {
            rustix::fs::unlinkat(&self.links_dir, number.to_string(), AtFlags::empty())?;
        }
        Ok(rustix::fs::unlinkat(&self.layer, LINKS, AtFlags::REMOVEDIR)?)
    }

    /// How many files with several names there are so far.
    pub(crate) fn links(&self) -> u64 {
        self.links
    }

    fn to(&self) -> BorrowedFd<'_> {
        self.path.last().map_or(self.layer.as_fd(), AsFd::as_fd)
    }
}

impl Sink for Copy {
    fn enter(&mut self, name: &CStr, _: &Metadata) -> Result<(), Failure> {
        rustix::fs::mkdirat(self.to(), name, Mode::from_raw_mode(0o700))?;
        let to = open_directory(self.to(), name)?;
        self.path.push(to);
        Ok(())
    }

    /// The attributes of a directory must not be inherited by what is in it, and its time is that of the original.
    fn leave(&mut self, metadata: &Metadata) -> Result<(), Failure> {
        if let Some(directory) = self.path.pop() {
            rustix::process::fchdir(&directory)?;
            set_metadata(c".", metadata)?;
            rustix::fs::futimens(&directory, &times(metadata))?;
        }
        Ok(())
    }

    fn whiteout(&mut self, name: &CStr) -> Result<(), Failure> {
        let nothing = rustix::fs::makedev(0, 0);
        let kind = FileType::CharacterDevice;
        Ok(rustix::fs::mknodat(self.to(), name, kind, Mode::empty(), nothing)?)
    }

    fn file(&mut self, name: &CStr, file: &Content<'_>, _: &Metadata, _: Option<u64>) -> Result<(), Failure> {
        match file {
            Content::Symlink(target) => rustix::fs::symlinkat(&**target, self.to(), name)?,
            Content::Fifo => {
                rustix::fs::mknodat(self.to(), name, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
            }
            Content::Regular { size, .. } => self.regular(name, *size)?,
        }
        Ok(())
    }

    fn data(&mut self, data: &[u8], offset: u64) -> Result<(), Failure> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        file.write_all_at(data, offset)
            .map_err(|error| match error.raw_os_error() {
                Some(code) => Errno::from_raw_os_error(code).into(),
                None => error.into(),
            })
    }

    fn file_end(&mut self, name: &CStr, metadata: &Metadata, number: Option<u64>) -> Result<(), Failure> {
        self.file = None;
        rustix::process::fchdir(self.to())?;
        set_metadata(name, metadata)?;
        rustix::fs::utimensat(self.to(), name, &times(metadata), AtFlags::SYMLINK_NOFOLLOW)?;
        if let Some(number) = number {
            let link = number.to_string();
            rustix::fs::linkat(self.to(), name, &self.links_dir, link, AtFlags::empty())?;
            self.links = number + 1;
        }
        Ok(())
    }

    fn link(&mut self, name: &CStr, number: u64) -> Result<(), Failure> {
        let link = number.to_string();
        Ok(rustix::fs::linkat(
            &self.links_dir,
            link,
            self.to(),
            name,
            AtFlags::empty(),
        )?)
    }
}

impl Copy {
    /// Begins a regular file. Its data follows.
    pub(crate) fn regular(&mut self, name: &CStr, size: u64) -> Result<(), Failure> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = rustix::fs::openat(self.to(), name, flags, Mode::from_raw_mode(0o600))?;
        rustix::fs::ftruncate(&to, size)?;
        self.file = Some(File::from(to));
        Ok(())
    }
}

/// Sets owner, mode and attributes of a file in the current directory, in this order: changing the owner takes bits of
/// the mode and capabilities away.
fn set_metadata(path: &CStr, metadata: &Metadata) -> Result<(), Failure> {
    let (user, group) = (
        rustix::fs::Uid::from_raw(metadata.uid),
        rustix::fs::Gid::from_raw(metadata.gid),
    );
    let cwd = rustix::fs::CWD;
    rustix::fs::chownat(cwd, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    if !metadata.is_link {
        let mode = Mode::from_raw_mode(metadata.mode);
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

fn times(metadata: &Metadata) -> Timestamps {
    let modified = Timespec {
        tv_sec: metadata.modified.0,
        tv_nsec: metadata.modified.1.into(),
    };
    Timestamps {
        last_access: modified,
        last_modification: modified,
    }
}
