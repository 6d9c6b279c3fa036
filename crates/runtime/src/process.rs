//! Processes, by the descriptors that stand for them (pidfd).

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Whether a process has ended.
pub(crate) fn has_ended(process: BorrowedFd<'_>) -> io::Result<bool> {
    let mut poll = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(rustix::event::poll(&mut poll, Some(&now))? > 0)
}
