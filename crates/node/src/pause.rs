//! The life of a pause: five steps, and three strategies for what is kept of a sandbox.
//!
//! ```text
//!                begin ─▶ stop ─▶ write ─▶ keep ─▶ end
//!   frozen         ●───────●                               its processes stay in memory, and may move to swap
//!   checkpoint     ●───────●───────●────────●───────●      its processes are written to disk, beside its files
//!   filesystem     ●───────●───────●────────●───────●      its files are written out
//!                  └─ a failure undoes it ┘ └─ it is saved, whatever happens
//! ```
//!
//! - **begin**: from here on nothing is asked of its agent, and nothing else pauses, resumes or copies it.
//! - **stop**: its processes are stopped, and its connections to the outside are cut.
//! - **write**: its disk, and for a checkpoint its processes, are written out. Where those cannot be, it is frozen instead.
//! - **keep**: it is one of the kept sandboxes, and its end begins, after which its disk remains.
//! - **end**: its processes and what they held on the host are gone, and its disk is marked as saved.
//!
//! `resume` has the way back. `docs/dev/pause.md` shows both with what the server does, and after a crash.

pub(crate) mod checkpoint;
mod filesystem;
pub(crate) mod frozen;
pub(crate) mod kept;
pub(crate) mod resume;

use std::sync::Arc;
use std::time::Duration;

use model::id::{DiskId, SandboxId};
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use protocol::node::{Failure, NodeError, PauseSandbox, PausedSandbox};
use runtime::cancel::Cancel;
use runtime::driver::WriteError;
use tokio::sync::OwnedMutexGuard;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::kept::remove_disk;
use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::{blocking, failed};

/// How long what an ended sandbox held on the host may take to be removed before the pause is over nevertheless.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a checkpoint is tried before the processes stay in memory, where the reason may be gone the next time.
const ATTEMPTS: usize = 3;

/// Pauses a sandbox, running or paused. `cancelled` ends a checkpoint that is being written.
pub(crate) async fn pause(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    request: PauseSandbox,
    cancelled: CancellationToken,
) -> Result<PausedSandbox, NodeError> {
    let Some(handle) = shared.find(&request.id) else {
        return pause_again(shared, &request).await;
    };
    let PauseSandbox {
        id,
        keep,
        is_written_next,
    } = request;
    let pausing = Pausing {
        shared: Arc::clone(shared),
        tasks: tasks.clone(),
        handle,
    };
    // A task of its own: a caller that is dropped leaves no sandbox half paused.
    let paused = tasks.spawn(async move {
        match keep {
            Kept::Memory => pausing.freeze(is_written_next).await,
            Kept::Checkpoint => pausing.checkpoint(cancelled).await,
            Kept::Filesystem => pausing.keep_files().await,
        }
    });
    let paused = paused.await.map_err(failed)??;
    if paused.kept == Kept::Memory && !is_written_next {
        // It may have ended since.
        if let Some(handle) = shared.find(&id) {
            tasks.spawn(frozen::page_out(Arc::clone(shared), handle));
        }
    }
    Ok(paused)
}

/// The pause of one sandbox that has processes.
struct Pausing {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    handle: Arc<SandboxHandle>,
}

/// A pause that has begun, with what is put back if it fails.
struct Begun {
    changing: OwnedMutexGuard<()>,
    was_frozen: bool,
    egress: Option<EgressPolicy>,
}

impl Pausing {
    /// Stops the processes, which stay in memory.
    async fn freeze(self, is_written_next: bool) -> Result<PausedSandbox, NodeError> {
        frozen::require_freezer(&self.shared)?;
        let begun = self.begin().await?;
        let stopped = frozen::stop(&self.handle, begun.was_frozen, is_written_next).await;
        if stopped.is_err() {
            self.undo(begun);
        }
        stopped
    }

    /// Writes the processes and the disk, and ends them. Where that is not possible, they are stopped in memory.
    async fn checkpoint(self, cancelled: CancellationToken) -> Result<PausedSandbox, NodeError> {
        if !self.shared.driver.capabilities().checkpoints {
            return self.freeze(false).await;
        }
        let mut attempt = 1;
        loop {
            let cancel = Arc::new(Cancel::new().map_err(failed)?);
            let begun = self.begin().await?;
            let was_frozen = begun.was_frozen;
            let Err(error) = checkpoint::write(&self.shared, &self.handle, &cancelled, &cancel).await else {
                return Ok(self.end(begun, Kept::Checkpoint).await);
            };
            if self.handle.is_ending() {
                return Err(self.not_found());
            }
            self.undo(begun);
            if cancel.is_requested() && (was_frozen || !self.shared.stop.is_cancelled()) {
                return Err(NodeError::Cancelled);
            }
            match error {
                WriteError::Passing(why) if attempt < ATTEMPTS => {
                    let id = self.handle.id();
                    tracing::debug!(sandbox.id = %id, "write the processes of a sandbox again: {why}");
                    attempt += 1;
                }
                error => {
                    checkpoint::note_kept_in_memory(&self.handle, error);
                    return self.freeze(false).await;
                }
            }
        }
    }

    /// Writes out the disk, and ends the processes.
    async fn keep_files(self) -> Result<PausedSandbox, NodeError> {
        let begun = self.begin().await?;
        if let Err(error) = filesystem::write(&self.shared, &self.handle, begun.was_frozen).await {
            self.undo(begun);
            return Err(NodeError::Failed(Failure::during("write out the disk", &error)));
        }
        if !self.shared.kept.keep(&self.handle) {
            // Something else ends it, for example because the host has no space left, and removes its disk.
            return Err(self.not_found());
        }
        Ok(self.end(begun, Kept::Filesystem).await)
    }

    /// Waits until nothing else changes the sandbox, and notes that it stands still.
    async fn begin(&self) -> Result<Begun, NodeError> {
        let changing = self.handle.change().await;
        if self.handle.is_ending() {
            return Err(self.not_found());
        }
        Ok(Begun {
            changing,
            // Before its processes stop, so that nothing more is asked of its agent.
            was_frozen: self.handle.condition().freeze(),
            egress: self.handle.egress(),
        })
    }

    /// Notes that the processes go on after a pause that failed. One that was paused before stays so.
    fn undo(&self, begun: Begun) {
        if begun.was_frozen {
            return;
        }
        let was_at_rest = self.handle.condition().is_at_rest();
        if let Some(policy) = begun.egress.filter(|_| was_at_rest) {
            self.handle.set_egress(policy);
        }
        self.handle.condition().go_on();
        if was_at_rest {
            let handle = Arc::clone(&self.handle);
            self.tasks.spawn(frozen::respawn(handle, begun.changing));
        }
    }

    /// Waits until nothing of the sandbox is left on the host but its disk, and that is saved.
    async fn end(self, begun: Begun, kept: Kept) -> PausedSandbox {
        let Self { shared, handle, .. } = self;
        let (id, disk) = (handle.id().clone(), handle.disk().clone());
        let condition = handle.condition().clone();
        let traffic = Arc::clone(handle.traffic());
        drop(begun);
        // Its supervisor has the other one.
        drop(handle);
        if tokio::time::timeout(CLEAN_TIMEOUT, condition.until_cleaned())
            .await
            .is_err()
        {
            tracing::error!(sandbox.id = %id, "processes or mounts of a paused sandbox are still on the host, they are removed as soon as the kernel lets go of them");
        }
        PausedSandbox {
            kept,
            memory_bytes: 0,
            disk_bytes: save(&shared, id, disk).await,
            network: Some(traffic.read()),
        }
    }

    fn not_found(&self) -> NodeError {
        NodeError::NotFound(self.handle.id().clone())
    }
}

/// Waits until the disk of an ended sandbox is complete. What its programs have written was written out before, so a
/// failure only means that it is checked before it is used again.
pub(crate) async fn save(shared: &Arc<Shared>, id: SandboxId, disk: DiskId) -> u64 {
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let to_save = id.clone();
    let saved = blocking(move || driver.storage().save(&to_save, &disk, &|| stop.is_cancelled()));
    match saved.await.and_then(|saved| saved) {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::error!(sandbox.id = %id, "cannot write out the disk of a paused sandbox, it is checked before the sandbox is resumed: {error}");
            0
        }
    }
}

/// Pauses a sandbox that has no processes any more: what it has beside its disk is removed if only that is to be kept.
async fn pause_again(shared: &Arc<Shared>, request: &PauseSandbox) -> Result<PausedSandbox, NodeError> {
    let id = &request.id;
    let kept = shared.kept.get(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
    let _changing = kept.changing.lock().await;
    if shared.kept.get(id).is_none_or(|now| !Arc::ptr_eq(&now, &kept)) {
        return Err(NodeError::NotFound(id.clone()));
    }
    if request.keep == Kept::Filesystem {
        kept.note_change();
        let (driver, of) = (Arc::clone(&shared.driver), (id.clone(), kept.disk.clone()));
        let forgotten = blocking(move || driver.storage().forget_checkpoint(&of.0, &of.1))
            .await
            .and_then(|done| done);
        forgotten.map_err(|error| NodeError::Failed(Failure::during("remove the checkpoint", &error)))?;
    }
    let kept_of = if shared.driver.storage().has_checkpoint(id, &kept.disk) {
        Kept::Checkpoint
    } else {
        Kept::Filesystem
    };
    Ok(PausedSandbox {
        kept: kept_of,
        memory_bytes: 0,
        disk_bytes: save(shared, id.clone(), kept.disk.clone()).await,
        network: None,
    })
}

/// Removes a paused sandbox that has no processes. The space is given back in the background; a crash before that leaves a
/// disk that nothing refers to, which the next start removes.
pub(crate) async fn remove(shared: &Arc<Shared>, tasks: &TaskTracker, id: &SandboxId) -> Result<(), NodeError> {
    let kept = shared.kept.get(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
    let _changing = kept.changing.lock().await;
    if !shared.kept.take(id, &kept) {
        return Err(NodeError::NotFound(id.clone()));
    }
    let (driver, id, disk) = (Arc::clone(&shared.driver), id.clone(), kept.disk.clone());
    tasks.spawn(async move {
        let removed = blocking(move || remove_disk(driver.storage(), &id, &disk));
        if let Err(error) = removed.await.and_then(|removed| removed) {
            tracing::warn!("cannot remove the disk of a paused sandbox, the next start of the platform does: {error}");
        }
    });
    Ok(())
}
