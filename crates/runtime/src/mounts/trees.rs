//! The trees that mounts of a sandbox are parts of.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::CWD;

use super::kinds::{FIGURES, FIXTURES, Mount, SYSFS, Source};
use crate::mounting;

/// What the mounts of a sandbox are parts of. All of it is attached in the mounts of the calling process: before Linux 6.15,
/// only what is attached can be cloned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trees<'a> {
    /// The root of its fixtures.
    pub(crate) fixtures: BorrowedFd<'a>,
    /// The root of a sysfs.
    pub(crate) sysfs: BorrowedFd<'a>,
    /// The root of the file system with its files of `/proc`.
    pub(crate) figures: Option<BorrowedFd<'a>>,
}

impl Trees<'_> {
    /// A clone of what is at this path, with the attributes of the entry; not attached yet.
    ///
    /// # Errors
    /// Those of the kernel, and when mounts of the entry are parts of nothing.
    pub(crate) fn part(&self, mount: &Mount, path: &str) -> io::Result<OwnedFd> {
        let (from, has) = match mount.source {
            Source::Fixture(_) | Source::Hidden(_) => (self.fixtures, FIXTURES),
            Source::Sysfs(_) | Source::SysfsOfNetwork(_) | Source::Processor => (self.sysfs, SYSFS),
            Source::Figure(_) => (self.figures.ok_or(io::ErrorKind::InvalidInput)?, FIGURES),
            // Mounts of the launcher, by absolute paths.
            Source::Group | Source::Agent => (CWD, 0),
            Source::Root | Source::Overlay | Source::New(..) | Source::SharedMemory | Source::Again => {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        };
        let part = mounting::clone(from, path)?;
        if mount.attributes & !has != 0 {
            mounting::protect(part.as_fd(), mount.attributes)?;
        }
        Ok(part)
    }
}
