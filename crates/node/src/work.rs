//! Work on the host: it is done outside the event loop, and where it fails, the failure becomes an error of the node.

use std::io;

use protocol::node::{Failure, NodeError};

/// Runs work that blocks for milliseconds on a thread outside the event loop.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

pub(crate) fn failed(error: impl std::error::Error) -> NodeError {
    NodeError::Failed(Failure::of(&error))
}
