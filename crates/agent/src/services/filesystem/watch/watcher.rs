//! One watch, and how many of them there may be.

use std::cell::Cell;
use std::rc::Rc;

use protocol::connect::{Code, Error};
use protocol::filesystem::FilesystemEvent;
use tokio_util::sync::DropGuard;

use super::queue::Queue;

/// Watches at a time; the kernel's usual limit for one user is the same.
const WATCHERS: usize = 128;

/// One watch, which ends when this is dropped.
pub(super) struct Watcher {
    pub(super) queue: Rc<Queue>,
    _stop: DropGuard,
    _permit: WatchPermit,
}

impl Watcher {
    /// A watch whose events come to the queue until the guard is dropped.
    pub(super) fn new(queue: Rc<Queue>, stop: DropGuard, permit: WatchPermit) -> Self {
        Self {
            queue,
            _stop: stop,
            _permit: permit,
        }
    }
}

/// One of the [`WATCHERS`], given back when it is dropped.
pub(super) struct WatchPermit(Rc<Cell<usize>>);

impl WatchPermit {
    /// Takes a permit; `count` is how many are taken.
    ///
    /// # Errors
    /// `failed_precondition` when there is none left.
    pub(super) fn take(count: &Rc<Cell<usize>>) -> Result<Self, Error> {
        if count.get() >= WATCHERS {
            let message = format!("too many watchers: {WATCHERS} is the limit");
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        count.set(count.get() + 1);
        Ok(Self(count.clone()))
    }
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The form of an event for clients that fail on its entry.
pub(super) fn without_entry(event: FilesystemEvent) -> FilesystemEvent {
    FilesystemEvent { entry: None, ..event }
}
