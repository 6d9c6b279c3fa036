//! Makes layers of sandboxes: of those that end with it, and of copies of the disks of those that go on.

use std::sync::Arc;

use model::id::{BuildId, DiskId};
use protocol::node::{Committed, CommittedCopy, CopiedDisk, CopiedMemory, Image, NodeError};
use runtime::stored::{CommitRequest, CopyRequest, Fork};

use crate::handle::SandboxHandle;
use crate::memory::{self, NotCopied};
use crate::shared::Shared;
use crate::start::random_disk;
use crate::work::{blocking, failed, layer_error};

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
        Some(disk) => {
            let committed = store(&shared, &disk, false, merge).await;
            memory::forget(&shared, disk, None).await;
            committed
        }
        None => Err(NodeError::NotFound(handle.id().clone())),
    }
}

/// Stores what is on a disk that no sandbox has any more. The disk is left.
async fn store(shared: &Arc<Shared>, disk: &DiskId, has_processes: bool, merge: bool) -> Result<Committed, NodeError> {
    let permit = shared.commits.acquire().await.map_err(failed)?;
    let request = CommitRequest {
        disk: disk.clone(),
        merge,
        has_processes,
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let committed = blocking(move || driver.storage().commit(&request, &|| stop.is_cancelled())).await;
    drop(permit);
    committed.map_err(failed)?.map_err(layer_error)
}

/// Copies the disk of a sandbox that goes on, with its processes if that is wanted and possible. If the platform ends meanwhile, the next one lets its processes continue, and
/// removes the copy, which no sandbox has.
pub(crate) async fn copy(
    shared: Arc<Shared>,
    handle: Arc<SandboxHandle>,
    with_memory: bool,
) -> Result<CopiedDisk, NodeError> {
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
        copies.insert(disk.clone(), None);
    }
    let copied = copy_to(&shared, &handle, &disk, with_memory).await;
    if copied.is_err() {
        shared.copies.lock().remove(&disk);
    }
    copied
}

async fn copy_to(
    shared: &Arc<Shared>,
    handle: &Arc<SandboxHandle>,
    disk: &DiskId,
    with_memory: bool,
) -> Result<CopiedDisk, NodeError> {
    let not_found = || NodeError::NotFound(handle.id().clone());
    let image = image_of(shared, handle.disk().clone()).await?;
    let _permit = shared.copying.acquire().await.map_err(failed)?;
    let mut why = CopiedMemory::Unwanted;
    if with_memory {
        match memory::copy(shared, handle, disk).await {
            Ok((copy, stopped)) => {
                shared.copies.lock().insert(disk.clone(), Some(copy));
                return Ok(CopiedDisk {
                    disk: disk.clone(),
                    image,
                    stopped,
                    memory: CopiedMemory::Copied,
                });
            }
            Err(NotCopied::Gone(error)) => return Err(error),
            Err(NotCopied::Because(reason)) => why = CopiedMemory::Missing(reason),
        }
    }
    let _changing = handle.change().await;
    if handle.is_ending() {
        return Err(not_found());
    }
    if handle.condition().is_frozen() {
        return Err(NodeError::failed("the sandbox is paused"));
    }
    let request = CopyRequest {
        to: disk.clone(),
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let (sandbox, stop) = (Arc::clone(handle.sandbox()), shared.stop.clone());
    let copied = blocking(move || sandbox.copy_disk(&request, &|| stop.is_cancelled())).await;
    match copied.map_err(failed)? {
        Ok(stopped) => {
            let stopped_ms = u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(sandbox.id = %handle.id(), stopped_ms, "copied the disk of a sandbox");
            Ok(CopiedDisk {
                disk: disk.clone(),
                image,
                stopped,
                memory: why,
            })
        }
        Err(_) if handle.is_ending() => Err(not_found()),
        Err(error) => Err(layer_error(error)),
    }
}

/// The image above which a disk lies.
async fn image_of(shared: &Shared, disk: DiskId) -> Result<Image, NodeError> {
    let driver = Arc::clone(&shared.driver);
    let rootfs = blocking(move || driver.storage().rootfs_of(&disk))
        .await
        .map_err(failed)?;
    let image = rootfs.map_err(failed)?.image();
    image.ok_or_else(|| NodeError::failed("the file system of the sandbox is not one of a template"))
}

/// Stores what a copied disk has as a layer, and keeps the copy as the memory of a build or removes it.
pub(crate) async fn commit_copy(
    shared: Arc<Shared>,
    disk: DiskId,
    build: Option<BuildId>,
    merge: bool,
) -> Result<CommittedCopy, NodeError> {
    let copy = copy_of(&shared, &disk)?;
    let committed = store(&shared, &disk, copy.is_some(), merge).await;
    let build = build.filter(|_| committed.is_ok());
    let memory_bytes = keep(&shared, disk, copy, build).await;
    Ok(CommittedCopy {
        layer: committed?,
        memory_bytes,
    })
}

/// Keeps a copied disk as the memory of a build, or removes it. Returns the space that it takes, none if it was removed.
pub(crate) async fn keep_copy(
    shared: Arc<Shared>,
    disk: DiskId,
    build: Option<BuildId>,
) -> Result<Option<u64>, NodeError> {
    let copy = copy_of(&shared, &disk)?;
    Ok(keep(&shared, disk, copy, build).await)
}

/// What was copied besides a disk: its processes, if they were.
fn copy_of(shared: &Shared, disk: &DiskId) -> Result<Option<Fork>, NodeError> {
    let found = shared.copies.lock().get(disk).cloned();
    found.ok_or_else(|| NodeError::failed(format!("there is no copy {disk} of a disk")))
}

async fn keep(shared: &Arc<Shared>, disk: DiskId, copy: Option<Fork>, build: Option<BuildId>) -> Option<u64> {
    let bytes = match (build, copy) {
        (Some(build), Some(copy)) => memory::keep(shared, copy, &build).await,
        (_, copy) => {
            memory::forget(shared, disk.clone(), copy).await;
            None
        }
    };
    shared.copies.lock().remove(&disk);
    bytes
}
