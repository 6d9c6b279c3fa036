//! Sandboxes of which only the disk is kept: paused without processes, and started anew.
//!
//! ```text
//!   pause:   note the disk ─▶ stop the processes ─▶ write out the disk ─▶ end the processes ─▶ wait, mark as saved
//!            └───────── until here, a failure leaves it running ────────┘
//!   resume:  start on the disk ─▶ the agent gets its identity
//!            └─ a failure ends what was started, and the disk is kept ─┘
//! ```
//!
//! The driver has the record of such disks, so they survive the platform and the host. A crash before the processes are
//! ended leaves a running sandbox, and after that one whose disk is complete.

use std::sync::Arc;
use std::time::Duration;

use model::id::{DiskId, SandboxId};
use model::lifecycle::Kept;
use protocol::node::{Failure, NodeError, PauseSandbox, PausedSandbox, ResumeSandbox, ResumedSandbox, StartedSandbox};
use runtime::driver::StartDisk;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::handle::SandboxHandle;
use crate::kept_disks::remove_disk;
use crate::restores::TURN_TIMEOUT;
use crate::shared::Shared;
use crate::start::{self, Begin};
use crate::supervisor;
use crate::work::blocking;

/// How long what an ended sandbox held on the host may take to be removed before the pause is over nevertheless.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(30);

/// Ends the processes of a sandbox, running or stopped, and keeps its disk.
pub(crate) async fn pause(shared: Arc<Shared>, handle: Arc<SandboxHandle>) -> Result<PausedSandbox, NodeError> {
    let changing = handle.change().await;
    if handle.is_ending() {
        return Err(NodeError::NotFound(handle.id().clone()));
    }
    let (id, disk) = (handle.id().clone(), handle.disk().clone());
    // Before, so that nothing more is asked of its agent.
    let was_frozen = handle.set_frozen(true);
    let written = blocking({
        let (shared, handle) = (Arc::clone(&shared), Arc::clone(&handle));
        move || {
            let driver = &shared.driver;
            driver.storage().keep(handle.id(), handle.disk())?;
            // One of an earlier pause does not belong to what is on the disk now.
            driver.storage().forget_image(handle.id(), handle.disk())?;
            // Most of what it has to write, while it still runs.
            handle.sandbox().sync()?;
            if driver.capabilities().freeze && !was_frozen {
                handle.sandbox().freeze()?;
            }
            handle.sandbox().sync()
        }
    });
    if let Err(error) = written.await.and_then(|written| written) {
        if !was_frozen {
            if shared.driver.capabilities().freeze {
                // It may have been stopped in part.
                let _ = handle.sandbox().thaw();
            }
            handle.set_frozen(false);
        }
        return Err(NodeError::Failed(Failure::during("write out the disk", &error)));
    }
    let mut cleaned = handle.cleaned();
    // From here on it is saved, whatever happens. First, so that it is one of the two at any time.
    shared.kept.insert(id.clone(), disk.clone());
    if handle.end_and_keep_disk().await.is_none() {
        // Something else ends it, for example because the host has no space left, and removes its disk.
        if let Some(kept) = shared.kept.get(&id) {
            shared.kept.take(&id, &kept);
        }
        return Err(NodeError::NotFound(id));
    }
    drop(changing);
    drop(handle);
    if tokio::time::timeout(CLEAN_TIMEOUT, cleaned.wait_for(|cleaned| *cleaned))
        .await
        .is_err()
    {
        tracing::error!(sandbox.id = %id, "something of a paused sandbox is still on the host");
    }
    let disk_bytes = save(&shared, id, disk).await;
    Ok(PausedSandbox {
        kept: Kept::Filesystem,
        memory_bytes: 0,
        disk_bytes,
    })
}

/// What there is of a sandbox that is paused already, of which only the disk is kept.
pub(crate) async fn pause_again(shared: &Arc<Shared>, request: &PauseSandbox) -> Result<PausedSandbox, NodeError> {
    let id = &request.id;
    let kept = shared.kept.get(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
    let _changing = kept.changing.lock().await;
    if shared.kept.get(id).is_none_or(|now| !Arc::ptr_eq(&now, &kept)) {
        return Err(NodeError::NotFound(id.clone()));
    }
    if request.keep == Kept::Filesystem {
        let (driver, of) = (Arc::clone(&shared.driver), (id.clone(), kept.disk.clone()));
        let forgotten = blocking(move || driver.storage().forget_image(&of.0, &of.1))
            .await
            .and_then(|done| done);
        forgotten.map_err(|error| NodeError::Failed(Failure::during("remove the image of the processes", &error)))?;
    }
    let kept_of = match shared.driver.storage().has_image(id, &kept.disk) {
        true => Kept::Image,
        false => Kept::Filesystem,
    };
    Ok(PausedSandbox {
        kept: kept_of,
        memory_bytes: 0,
        disk_bytes: save(shared, id.clone(), kept.disk.clone()).await,
    })
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
            tracing::error!(sandbox.id = %id, "write out the disk of a paused sandbox: {error}");
            0
        }
    }
}

/// Starts a sandbox on its kept disk.
pub(crate) async fn resume(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
    request: ResumeSandbox,
) -> Result<ResumedSandbox, NodeError> {
    let ResumeSandbox {
        id,
        egress,
        boot,
        kept: what,
    } = request;
    let not_found = || NodeError::NotFound(id.clone());
    let kept = shared.kept.get(&id).ok_or_else(not_found)?;
    let _changing = kept.changing.lock().await;
    let Some(boot) = boot else {
        return Err(NodeError::failed("the request does not say how to start the sandbox"));
    };
    // It may have been removed or started meanwhile.
    if shared.kept.get(&id).is_none_or(|now| !Arc::ptr_eq(&now, &kept)) {
        return Err(not_found());
    }
    let restore = match what {
        Kept::Image => Some(shared.restores.turn(boot.owner.as_deref(), TURN_TIMEOUT).await?),
        Kept::Filesystem | Kept::Memory => None,
    };
    let begin = Begin {
        id: &id,
        template: &boot.template,
        disk: StartDisk::Kept(kept.disk.clone()),
        restore,
        forked_from: None,
        snapshot: None,
        resources: boot.resources,
        init: &boot.init,
        egress: &egress,
    };
    let (handle, control, started) = start::start(&shared, &tasks, begin).await?;
    shared.sandboxes.lock().insert(id.clone(), Arc::clone(&handle));
    shared.kept.take(&id, &kept);
    tasks.spawn(supervisor::supervise(Arc::clone(&shared), handle, Some(control), stop));
    let StartedSandbox {
        agent_version, stages, ..
    } = started;
    Ok(ResumedSandbox {
        agent_version: Some(agent_version),
        stages,
    })
}

/// Removes a kept disk. The space is given back in the background; a crash before that leaves a disk that nothing refers
/// to, which the next start removes.
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
            tracing::warn!("remove the disk of a paused sandbox: {error}");
        }
    });
    Ok(())
}
