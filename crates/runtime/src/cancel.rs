//! A cancellation that both threads and polls notice.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

/// Cancels something that blocks, at once and for good.
#[derive(Debug)]
pub struct Cancel(OwnedFd);

impl Cancel {
    /// One that is not requested yet.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Requests it.
    pub fn request(&self) {
        // Fails only once it has been requested as often as the kernel can count.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Whether it was requested.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        let mut poll = [PollFd::new(&self.0, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Fails if it was requested.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`].
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.is_requested() {
            true => Err(Self::error()),
            false => Ok(()),
        }
    }

    /// Does `work` on another thread. When this is requested meanwhile, `cancelled` is called at once, before the work has
    /// ended.
    ///
    /// # Errors
    /// When there can be no thread, or the work panics.
    pub(crate) fn during<T: Send>(&self, work: impl FnOnce() -> T + Send, cancelled: impl FnOnce()) -> io::Result<T> {
        let done = Self::new()?;
        std::thread::scope(|scope| {
            let working = std::thread::Builder::new().spawn_scoped(scope, || {
                // Also when it panics.
                let _done = Done(&done);
                work()
            })?;
            let mut poll = [self, &done].map(|cancel| PollFd::new(cancel, PollFlags::IN));
            while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut poll, None) {}
            if poll[1].revents().is_empty() {
                cancelled();
            }
            working.join().map_err(|_| io::Error::other("it panicked"))
        })
    }

    /// The error of what was cancelled.
    pub(crate) fn error() -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionAborted, "it was cancelled")
    }
}

/// Requests it when dropped.
struct Done<'a>(&'a Cancel);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.request();
    }
}

impl AsFd for Cancel {
    /// Readable once it was requested.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cancelled_is_told_before_the_work_ends() {
        let (cancel, told) = (Cancel::new().unwrap(), Cancel::new().unwrap());
        assert_eq!(cancel.during(|| 1, || told.request()).unwrap(), 1);
        assert!(!told.is_requested());
        cancel.request();
        let work = || {
            while !told.is_requested() {
                std::thread::yield_now();
            }
            2
        };
        assert_eq!(cancel.during(work, || told.request()).unwrap(), 2);
        assert!(cancel.during(|| panic!("as the test wants"), || ()).is_err());
    }

    #[test]
    fn it_stays_requested() {
        let cancel = Cancel::new().unwrap();
        assert!(!cancel.is_requested());
        for _ in 0..2 {
            cancel.request();
            assert!(cancel.is_requested());
        }
        assert_eq!(cancel.check().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
