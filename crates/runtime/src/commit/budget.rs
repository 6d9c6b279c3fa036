//! What storing a layer leaves on the host, and how long it goes on.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::failure::{Failure, NO_SPACE};

/// Part of the inodes of the host's file system that stays free, as a divisor.
const INODES_KEPT: u64 = 50;

/// What a copy may use.
#[derive(Debug)]
pub(crate) struct Budget<'a> {
    /// The socket of the request. Its other end closes with the platform.
    pub(crate) platform: BorrowedFd<'a>,
    /// The directory of the layers, or another one on its file system.
    pub(crate) layers: BorrowedFd<'a>,
    pub(crate) keep_free_bytes: u64,
}

impl Budget<'_> {
    /// Whether the copy may continue.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let mut platform = [PollFd::from_borrowed_fd(self.platform, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut platform, Some(&now)), Ok(0)) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the platform ended").into());
        }
        let free = rustix::fs::fstatvfs(self.layers)?;
        if free.f_bavail.saturating_mul(free.f_frsize) < self.keep_free_bytes {
            return Err(Failure::Full(NO_SPACE.to_owned()));
        }
        // Some file systems have no fixed number of inodes, and say 0.
        if free.f_files > 0 && free.f_favail < free.f_files / INODES_KEPT {
            return Err(Failure::Full(
                "the host's file system has no inodes for the layer".to_owned(),
            ));
        }
        Ok(())
    }
}
