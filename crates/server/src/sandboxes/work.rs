//! Work on sandboxes that a request or a deadline has started, and that goes on without it: what bounds it, and what ends it.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::copies::Copies;

/// Sandboxes that are written to disk at the same time.
const WRITES: usize = 4;

/// Work on the sandboxes of one server.
#[derive(Debug)]
pub(crate) struct Work {
    /// The tasks of all this work. The server waits for them when it is stopped.
    pub(super) tasks: TaskTracker,
    /// Places and turns for copies of disks.
    pub(super) copies: Copies,
    /// Held while what is paused in memory is written to disk.
    writes: Semaphore,
    /// Cancelled when the server is stopped: nothing waits for better times from then on.
    stopping: CancellationToken,
    /// Cancelled when the server is stopped and no time is left to write processes to disk.
    checkpoint_deadline: CancellationToken,
}

impl Work {
    /// Work on these tasks. `stopping` is cancelled when the server is stopped.
    pub(crate) fn new(tasks: TaskTracker, stopping: CancellationToken) -> Self {
        Self {
            tasks,
            copies: Copies::new(),
            writes: Semaphore::new(WRITES),
            stopping,
            checkpoint_deadline: CancellationToken::new(),
        }
    }

    /// Runs a task that outlives its request.
    pub(crate) fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.tasks.spawn(task)
    }

    /// Waits until a sandbox may be written to disk in the background.
    pub(super) async fn turn_to_write(&self) -> Option<SemaphorePermit<'_>> {
        self.writes.acquire().await.ok()
    }

    /// The signal that the server is stopped.
    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.stopping
    }

    /// Waits for a moment before another attempt. Returns `false` when the server is stopped: the next start finds out by
    /// itself.
    pub(super) async fn pause(&self, pause: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.stopping.cancelled() => false,
        }
    }

    /// Notes that no time is left to write processes to disk.
    pub(super) fn end_checkpoints(&self) {
        self.checkpoint_deadline.cancel();
    }

    /// Whether there is time to write processes to disk.
    pub(super) fn has_time_for_checkpoints(&self) -> bool {
        !self.checkpoint_deadline.is_cancelled()
    }

    /// Waits until no time is left to write processes to disk.
    pub(super) async fn checkpoints_ended(&self) {
        self.checkpoint_deadline.cancelled().await;
    }
}
