//! How many byte streams lead into sandboxes, and the tasks that relay them.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;

/// Maximum number of concurrent streams; more are refused.
pub(super) const STREAMS: usize = 256;

/// The relays of all streams.
#[derive(Debug, Clone)]
pub(crate) struct Streams {
    permits: Arc<Semaphore>,
    tasks: TaskTracker,
}

impl Streams {
    /// Relays run on `tasks`.
    pub(crate) fn new(tasks: TaskTracker) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(STREAMS)),
            tasks,
        }
    }

    /// A permit for one stream; none if too many are open.
    pub(super) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// Runs a relay.
    pub(super) fn spawn(&self, relay: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(relay);
    }
}
