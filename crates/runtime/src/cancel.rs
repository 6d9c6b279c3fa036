//! A cancellation that both threads and polls notice.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

/// Cancels something that blocks, at once and for good.
#[derive(Debug)]
pub struct Cancel(OwnedFd);

impl Cancel {
    /// Creates a cancellation that is not requested yet.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Requests the cancellation.
    pub fn request(&self) {
        // Fails only once it has been requested as often as the kernel can count.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Whether the cancellation was requested.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        let mut poll = [PollFd::new(&self.0, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Fails if the cancellation was requested.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`].
    pub(crate) fn check(&self) -> io::Result<()> {
        if self.is_requested() {
            Err(Self::error())
        } else {
            Ok(())
        }
    }

    /// Does `work` on another thread, and returns when it is done, or when this is requested.
    ///
    /// # Errors
    /// When there can be no thread, or the work panics.
    pub fn race<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Raced<T>> {
        let done = Arc::new(Self::new()?);
        let working = std::thread::Builder::new().spawn({
            let done = Arc::clone(&done);
            move || {
                // Also when it panics.
                let _done = Done(done);
                work()
            }
        })?;
        let mut poll = [self, &*done].map(|cancel| PollFd::new(cancel, PollFlags::IN));
        while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut poll, None) {}
        if poll[1].revents().is_empty() {
            return Ok(Raced::Cancelled(working));
        }
        let done = working.join().map_err(|_| io::Error::other("it panicked"))?;
        Ok(Raced::Done(done))
    }

    /// The error of what was cancelled.
    pub(crate) fn error() -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionAborted, "it was cancelled")
    }
}

/// What became of work that a cancellation was waited for with.
#[derive(Debug)]
pub enum Raced<T> {
    /// The work is done.
    Done(T),
    /// The work was cancelled. The work goes on until it notices.
    Cancelled(JoinHandle<T>),
}

/// Requests the cancellation when dropped.
struct Done(Arc<Cancel>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.request();
    }
}

impl AsFd for Cancel {
    /// The descriptor becomes readable once the cancellation was requested.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_is_cancelled_is_not_waited_for() {
        let cancel = Cancel::new().unwrap();
        assert!(matches!(cancel.race(|| 1).unwrap(), Raced::Done(1)));
        cancel.race(|| panic!("as the test wants")).unwrap_err();
        let told = Arc::new(Cancel::new().unwrap());
        cancel.request();
        let work = {
            let told = Arc::clone(&told);
            move || {
                while !told.is_requested() {
                    std::thread::yield_now();
                }
                2
            }
        };
        let Raced::Cancelled(working) = cancel.race(work).unwrap() else {
            panic!("it is not done")
        };
        told.request();
        assert_eq!(working.join().unwrap(), 2);
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
