//! The tasks of a server, and what ends them.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The tasks of a server, and what ends them.
#[derive(Debug)]
pub(super) struct Tasks {
    /// Work that requests started and that outlives them.
    pub(super) work: TaskTracker,
    pub(super) connections: TaskTracker,
    pub(super) streams: TaskTracker,
    pub(super) background: TaskTracker,
    pub(super) records: TaskTracker,
    pub(super) stop: CancellationToken,
    /// Stops the tasks of the records, after everything else has stopped.
    pub(super) records_stop: CancellationToken,
    /// Cuts connections and streams.
    pub(super) abort: CancellationToken,
}

impl Tasks {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            work: TaskTracker::new(),
            connections: TaskTracker::new(),
            streams: TaskTracker::new(),
            background: TaskTracker::new(),
            records: TaskTracker::new(),
            stop,
            records_stop: CancellationToken::new(),
            abort: CancellationToken::new(),
        }
    }
}
