//! The strategy *frozen*: the processes of a sandbox are stopped where they are, and stay in memory.
//!
//! The freezer of the kernel is the only record of it on the host, so it survives the platform: the next start finds a
//! sandbox either stopped or running, and takes it over as it is. Nothing is asked of the agent of a paused sandbox, and
//! nothing of it is relayed: its connections to the outside are cut, because their other ends would wait for nothing.

use std::io;
use std::sync::Arc;

use model::id::SandboxId;
use model::lifecycle::Kept;
use protocol::node::{NodeError, PausedSandbox, ResumeSandbox, ResumedSandbox, WantedState};
use runtime::driver::Sandbox;
use tokio::sync::OwnedMutexGuard;
use tokio_util::task::TaskTracker;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::{blocking, failed};

/// Refuses a pause in memory where the host cannot stop processes.
pub(super) fn require_freezer(shared: &Shared) -> Result<(), NodeError> {
    if shared.driver.capabilities().freeze {
        return Ok(());
    }
    let why = "this host cannot stop the processes of a sandbox: it has no cgroup v2 with a freezer";
    Err(NodeError::Unsupported(why.to_owned()))
}

/// Stops the processes of a sandbox, and cuts its connections to the outside. With `is_written_next` so that they can be
/// written to disk. When this fails, they go on.
pub(super) async fn stop(
    handle: &Arc<SandboxHandle>,
    was_frozen: bool,
    is_written_next: bool,
) -> Result<PausedSandbox, NodeError> {
    let frozen = blocking({
        let handle = Arc::clone(handle);
        move || {
            let frozen = match (was_frozen, is_written_next) {
                (true, _) => Ok(()),
                (false, true) => handle.sandbox().freeze_to_write(),
                (false, false) => handle.sandbox().freeze(),
            };
            if let Err(error) = frozen {
                // It may have been stopped in part.
                let _ = handle.sandbox().thaw();
                return Err(error);
            }
            Ok(handle.sandbox().usage().map_or(0, |usage| usage.memory_used_bytes))
        }
    });
    let memory_bytes = frozen.await.and_then(|frozen| frozen).map_err(failed)?;
    if is_written_next {
        handle.hold_egress();
    } else {
        // The kernel keeps the errors of sockets, so the gateway need not keep descriptors for long.
        handle.close_egress();
    }
    Ok(PausedSandbox {
        kept: Kept::Memory,
        memory_bytes,
        disk_bytes: handle.sandbox().disk().map_or(0, |disk| disk.held_bytes),
        network: Some(handle.traffic().read()),
    })
}

/// Moves the memory of a sandbox that is paused in memory to the swap of the host, if there is some, until it is resumed.
pub(super) async fn page_out(shared: Arc<Shared>, handle: Arc<SandboxHandle>) {
    let turn = tokio::select! {
        biased;
        () = shared.stop.cancelled() => return,
        turn = shared.paging.acquire() => turn,
    };
    let goes_on = {
        let (shared, handle) = (Arc::clone(&shared), Arc::clone(&handle));
        move || handle.condition().is_frozen() && !handle.is_ending() && !shared.stop.is_cancelled()
    };
    if !goes_on() {
        return;
    }
    let moved = blocking({
        let handle = Arc::clone(&handle);
        move || handle.sandbox().page_out(&goes_on)
    });
    match moved.await.and_then(|moved| moved) {
        Ok(Some(moved)) => {
            tracing::info!(
                sandbox.id = %handle.id(),
                before_bytes = moved.before_bytes,
                after_bytes = moved.after_bytes,
                took_ms = u64::try_from(moved.took.as_millis()).unwrap_or(u64::MAX),
                "moved the memory of a paused sandbox to swap"
            );
        }
        Ok(None) => {}
        Err(_) if handle.is_ending() => {}
        Err(error) => {
            tracing::warn!(sandbox.id = %handle.id(), "cannot move the memory of a paused sandbox to swap, it stays where it is: {error}")
        }
    }
    drop(turn);
}

/// Lets the processes of a frozen sandbox continue.
pub(super) async fn thaw(
    tasks: TaskTracker,
    handle: Arc<SandboxHandle>,
    request: ResumeSandbox,
) -> Result<ResumedSandbox, NodeError> {
    let changing = handle.change().await;
    if handle.is_ending() {
        return Err(NodeError::NotFound(request.id));
    }
    // First, so that its processes find the network that they may use.
    handle.set_egress(request.egress);
    // One write to a file of the kernel.
    let thawed = handle.sandbox().thaw();
    if let Err(error) = thawed {
        if handle.condition().is_frozen() {
            handle.close_egress();
        }
        // What is at rest stays at rest: the resume that succeeds replaces the spawner.
        return Err(failed(error));
    }
    let was_at_rest = handle.condition().is_at_rest();
    if handle.is_adopted() || was_at_rest {
        wake(&handle).await;
    }
    handle.condition().go_on();
    if was_at_rest {
        tasks.spawn(respawn(handle, changing));
    }
    Ok(ResumedSandbox::default())
}

/// Replaces the spawner of a sandbox, which ended when its processes were to be written to disk. Nobody has to wait for it:
/// a command that is started meanwhile waits in the agent.
pub(super) async fn respawn(handle: Arc<SandboxHandle>, changing: OwnedMutexGuard<()>) {
    if let Err(error) = handle.respawn().await {
        // It is tried again when the events of the agent are followed.
        tracing::warn!(sandbox.id = %handle.id(), "cannot replace the spawner of a sandbox after a failed pause, it is tried again: {error}");
    }
    drop(changing);
}

/// Has the agent of a sandbox accept connections: a platform, or the process for it, may have ended while it wrote the
/// sandbox's processes to disk.
async fn wake(handle: &Arc<SandboxHandle>) {
    let sandbox = Arc::clone(handle.sandbox());
    if let Err(error) = blocking(move || sandbox.wake()).await.and_then(|woken| woken) {
        // Agents of earlier versions do not know the question.
        tracing::debug!(sandbox.id = %handle.id(), "wake the agent: {error}");
    }
}

/// Brings the processes of a sandbox that is adopted into the wanted state, and returns whether they are stopped.
pub(crate) async fn settle(id: &SandboxId, sandbox: &Arc<dyn Sandbox>, wanted: WantedState) -> bool {
    let sandbox = Arc::clone(sandbox);
    let settled = blocking(move || {
        let is_frozen = sandbox.is_frozen()?;
        match (wanted, is_frozen) {
            // One of which only the disk was to be kept was not to stay stopped in memory.
            (WantedState::Running | WantedState::RunningOrPaused(Kept::Filesystem), true) => {
                sandbox.thaw()?;
                let _ = sandbox.wake();
            }
            // Again, because it may have been interrupted before all of them had stopped.
            (WantedState::Paused(_), _) | (WantedState::RunningOrPaused(_), true) => sandbox.freeze()?,
            // A part of it may be stopped, because a restore was interrupted.
            (WantedState::Running | WantedState::RunningOrPaused(_), false) => {
                sandbox.thaw()?;
                let _ = sandbox.wake();
            }
        }
        io::Result::Ok(is_frozen)
    });
    match settled.await.and_then(|settled| settled) {
        Ok(is_frozen) => match wanted {
            WantedState::Running | WantedState::RunningOrPaused(Kept::Filesystem) => false,
            WantedState::Paused(_) => true,
            WantedState::RunningOrPaused(_) => is_frozen,
        },
        Err(error) => {
            // Most likely it has just ended, which its supervisor notices.
            tracing::error!(sandbox.id = %id, "cannot find out whether a sandbox is paused, what its row says counts: {error}");
            matches!(wanted, WantedState::Paused(_))
        }
    }
}
