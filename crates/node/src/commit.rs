//! Makes layers of sandboxes: of those that end with it, and of copies of the disks of those that go on.

use std::sync::Arc;

use model::id::DiskId;
use protocol::node::{Committed, CopiedDisk, NodeError};
use runtime::driver::{CommitError, CommitRequest, CopyRequest};

use crate::supervisor::{SandboxHandle, random_disk};
use crate::{Shared, blocking, failed};

/// Layers that are stored at the same time. Each is a process that reads and writes at the speed of the disk.
pub(crate) const COMMITS: usize = 2;
/// Disks that are copied at the same time: a sandbox stands still for as long, so none waits for the copy of another one.
pub(crate) const COPYING: usize = 1;
/// Copies that there are at the same time, those that wait to become a layer included.
const COPIES_MAX: usize = 4;

/// Ends a sandbox, stores what it wrote, and removes its disk. If the platform ends meanwhile, the next one finds a disk
/// without a sandbox and a layer that is not complete, and removes both.
pub(crate) async fn commit(
    shared: Arc<Shared>,
    handle: Arc<SandboxHandle>,
    merge: bool,
) -> Result<Committed, NodeError> {
    match handle.end_and_keep_disk().await.cloned() {
        Some(disk) => store(&shared, disk, merge).await,
        None => Err(NodeError::NotFound(handle.id().clone())),
    }
}

/// Stores what is on a disk that no sandbox has any more, and removes the disk.
async fn store(shared: &Arc<Shared>, disk: DiskId, merge: bool) -> Result<Committed, NodeError> {
    let permit = shared.commits.acquire().await.map_err(failed)?;
    let request = CommitRequest {
        disk: disk.clone(),
        merge,
        keep_free_bytes: keep_free_bytes(shared),
    };
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let committed = blocking(move || {
        let committed = driver.commit(&request, &|| stop.is_cancelled());
        if let Err(error) = driver.remove_disk(&disk) {
            tracing::warn!("remove a disk that became a layer: {error}");
        }
        committed
    });
    let committed = committed.await;
    drop(permit);
    committed.map_err(failed)?.map_err(node_error)
}

/// Space that is promised to sandboxes is not free, even if it is not written yet.
fn keep_free_bytes(shared: &Shared) -> u64 {
    shared.disk_floor_bytes.saturating_add(shared.disk.owed())
}

fn node_error(error: CommitError) -> NodeError {
    match error {
        CommitError::Refused(why) => NodeError::Refused(why),
        CommitError::Full(why) => NodeError::Capacity(why),
        CommitError::Failed(error) => failed(error),
    }
}

/// Copies the disk of a sandbox that goes on. If the platform ends meanwhile, the next one lets its processes continue, and
/// removes the copy, which no sandbox has.
pub(crate) async fn copy(shared: Arc<Shared>, handle: Arc<SandboxHandle>) -> Result<CopiedDisk, NodeError> {
    if !shared.driver.capabilities().freeze {
        let why = "this host cannot stop the processes of a sandbox: it has no cgroup v2 with a freezer";
        return Err(NodeError::Unsupported(why.to_owned()));
    }
    let disk = random_disk().map_err(failed)?;
    {
        let mut copies = shared.copies.lock();
        if copies.len() >= COPIES_MAX {
            return Err(NodeError::Capacity(format!(
                "{COPIES_MAX} copies of disks are becoming layers"
            )));
        }
        copies.insert(disk.clone());
    }
    let copied = copy_to(&shared, &handle, &disk).await;
    if copied.is_err() {
        shared.copies.lock().remove(&disk);
    }
    copied
}

async fn copy_to(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>, disk: &DiskId) -> Result<CopiedDisk, NodeError> {
    let not_found = || NodeError::NotFound(handle.id().clone());
    let _permit = shared.copying.acquire().await.map_err(failed)?;
    let _changing = handle.change().await;
    if handle.is_ending() {
        return Err(not_found());
    }
    if handle.is_frozen() {
        return Err(NodeError::failed("the sandbox is paused"));
    }
    let request = CopyRequest {
        to: disk.clone(),
        keep_free_bytes: keep_free_bytes(shared),
    };
    let (sandbox, stop) = (Arc::clone(handle.sandbox()), shared.stop.clone());
    let copied = blocking(move || sandbox.copy_disk(&request, &|| stop.is_cancelled())).await;
    match copied.map_err(failed)? {
        Ok(stopped) => {
            let stopped_ms = u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(sandbox.id = %handle.id(), stopped_ms, "copied the disk of a sandbox");
            Ok(CopiedDisk {
                disk: disk.clone(),
                stopped,
            })
        }
        Err(_) if handle.is_ending() => Err(not_found()),
        Err(error) => Err(node_error(error)),
    }
}

/// Stores what a copied disk has as a layer, and removes the copy.
pub(crate) async fn commit_copy(shared: Arc<Shared>, disk: DiskId, merge: bool) -> Result<Committed, NodeError> {
    if !shared.copies.lock().contains(&disk) {
        return Err(NodeError::failed(format!("there is no copy {disk} of a disk")));
    }
    let committed = store(&shared, disk.clone(), merge).await;
    shared.copies.lock().remove(&disk);
    committed
}
