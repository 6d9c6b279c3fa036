//! Makes layers of sandboxes.

use std::sync::Arc;

use protocol::node::{Committed, NodeError};
use runtime::driver::{CommitError, CommitRequest};

use crate::supervisor::SandboxHandle;
use crate::{Shared, blocking, failed};

/// Layers that are stored at the same time. Each is a process that reads and writes at the speed of the disk.
pub(crate) const COMMITS: usize = 2;

/// Ends a sandbox, stores what it wrote, and removes its disk. If the platform ends meanwhile, the next one finds a disk
/// without a sandbox and a layer that is not complete, and removes both.
pub(crate) async fn commit(
    shared: Arc<Shared>,
    handle: Arc<SandboxHandle>,
    merge: bool,
) -> Result<Committed, NodeError> {
    let Some(disk) = handle.end_and_keep_disk().await.cloned() else {
        return Err(NodeError::NotFound(handle.id().clone()));
    };
    let permit = shared.commits.acquire().await.map_err(failed)?;
    let request = CommitRequest {
        disk: disk.clone(),
        merge,
        // Space that is promised to sandboxes is not free, even if it is not written yet.
        keep_free_bytes: shared.disk_floor_bytes.saturating_add(shared.disk.owed()),
    };
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let committed = blocking(move || {
        let committed = driver.commit(&request, &|| stop.is_cancelled());
        if let Err(error) = driver.remove_disk(&disk) {
            tracing::warn!("remove the disk of a sandbox that became a layer: {error}");
        }
        committed
    });
    let committed = committed.await;
    drop(permit);
    match committed.map_err(failed)? {
        Ok(committed) => Ok(committed),
        Err(CommitError::Refused(why)) => Err(NodeError::Refused(why)),
        Err(CommitError::Full(why)) => Err(NodeError::Capacity(why)),
        Err(CommitError::Failed(error)) => Err(failed(error)),
    }
}
