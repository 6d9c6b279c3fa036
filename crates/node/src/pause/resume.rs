//! Resuming a sandbox: its processes continue in memory, are restored from a checkpoint, or it is started anew on its disk.
//!
//! ```text
//!   frozen       network ─▶ let the processes continue
//!   checkpoint   restore on the disk, the workload stopped ─▶ identity, network ─▶ remove the checkpoint ─▶ let it continue
//!   filesystem   start on the disk ─▶ identity, network
//!                └─ a failure ends what was started; what is kept is as before ─┘
//! ```
//!
//! A checkpoint belongs to the disk as it was when it was written, so it is gone before anything in the sandbox can change
//! that.

use std::sync::Arc;

use model::lifecycle::Kept;
use protocol::node::{NodeError, ResumeSandbox, ResumedSandbox, StartedSandbox};
use runtime::driver::StartDisk;
use tokio_util::task::TaskTracker;

use super::frozen;
use crate::begun::Begun;
use crate::restores::TURN_TIMEOUT;
use crate::shared::Shared;
use crate::start::{self, Begin};
use crate::supervisor;
use crate::work::failed;

/// Resumes a paused sandbox. One that runs already goes on.
pub(crate) async fn resume(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    request: ResumeSandbox,
) -> Result<ResumedSandbox, NodeError> {
    // A task of its own: a caller that is dropped leaves no sandbox half resumed.
    let resuming = match shared.find(&request.id) {
        Some(handle) => tasks.spawn(frozen::thaw(tasks.clone(), handle, request)),
        None => tasks.spawn(start_kept(Arc::clone(shared), tasks.clone(), request)),
    };
    resuming.await.map_err(failed)?
}

/// Starts a sandbox on its kept disk, with the processes of its checkpoint or without any.
async fn start_kept(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    request: ResumeSandbox,
) -> Result<ResumedSandbox, NodeError> {
    let ResumeSandbox {
        id,
        egress,
        boot,
        kept: what,
        deadline: _,
    } = request;
    let not_found = || NodeError::NotFound(id.clone());
    let kept = shared.kept.get(&id).ok_or_else(not_found)?;
    let _changing = kept.changing.lock().await;
    kept.note_change();
    let Some(boot) = boot else {
        return Err(NodeError::failed("the request does not say how to start the sandbox"));
    };
    // It may have been removed or started meanwhile.
    if shared.kept.get(&id).is_none_or(|now| !Arc::ptr_eq(&now, &kept)) {
        return Err(not_found());
    }
    let _begun = Begun::start(&shared, &id)?;
    let restore = match what {
        Kept::Checkpoint => Some(shared.restores.turn(boot.owner.as_deref(), TURN_TIMEOUT).await?),
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
    let stop = shared.stop.clone();
    tasks.spawn(supervisor::supervise(Arc::clone(&shared), handle, Some(control), stop));
    let StartedSandbox {
        agent_version, stages, ..
    } = started;
    Ok(ResumedSandbox {
        agent_version: Some(agent_version),
        stages,
    })
}
