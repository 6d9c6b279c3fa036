//! Work that waits for a disk.

use anyhow::{Context, Result};

/// Runs what waits for a disk, which may be that of a server that does not answer.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.context("read the files")?
}
