//! The task that supervises a sandbox, from its agent's first response until nothing of it is left.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{DiskId, SandboxId};
use model::log::Level;
use protocol::node::NodeEvent;
use runtime::driver::Sandbox;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use crate::control::{AGENT_TIMEOUT, Control};
use crate::events;
use crate::handle::SandboxHandle;
use crate::noted;
use crate::pause::kept::remove_disk;
use crate::shared::Shared;
use crate::teardown::Held;
use crate::work::blocking;

/// Minimum time between two attempts to connect to an agent or to replace a spawner: a sandbox whose root keeps killing
/// its spawner costs the host no more than this.
const RETRY: Duration = Duration::from_millis(500);
/// How often that time doubles when replacing the spawner fails repeatedly: 32 s at most.
const RETRY_DOUBLINGS: u32 = 6;
/// Spawners that are replaced at the same time, in all sandboxes together. Each attempt waits for processes that root
/// of its sandbox can stop, for 3 s at most.
pub(crate) const RESPAWNS: usize = 8;
/// How long a killed sandbox may take to end before it counts as ended: its processes take milliseconds, and one that
/// takes longer is blocked in the kernel, most likely on disk I/O, and will never run again.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest pause between two attempts to clean up after a sandbox.
const CLEAN_PAUSE: Duration = Duration::from_millis(5);
const CLEAN_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long cleaning up may take before it is logged.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(10);

/// Supervises a sandbox until nothing of it is left, or until the platform stops.
pub(crate) async fn supervise(
    shared: Arc<Shared>,
    handle: Arc<SandboxHandle>,
    control: Option<Control>,
    stop: CancellationToken,
) {
    let died = tokio::select! {
        biased;
        () = handle.condition().until_ending() => false,
        () = until_dead(handle.sandbox()) => true,
        () = follow_events(&shared, &handle, control) => true,
        () = stop.cancelled() => return,
    };
    let teardown = shared.teardowns.begin();
    handle.begin_end();
    // Who keeps the disk waits until it is free, and where the agent has died nothing can be held any more.
    let is_held = !died && handle.disk_to_remove().is_some();
    let held = is_held.then(|| shared.teardowns.hold(&**handle.sandbox())).flatten();
    if died {
        shared.journal.end(NodeEvent::Ending(handle.id().clone()));
    }
    end(handle.id(), handle.sandbox()).await;
    shared.sandboxes.lock().remove(handle.id());
    noted::ended(&shared, handle.id()).await;
    handle.condition().set_ended();
    let fields = [("event_type", "sandbox_end".to_owned())];
    if !died {
        handle.log().host(Level::Info, "sandbox ended", fields);
    } else {
        tracing::info!(sandbox.id = %handle.id(), "sandbox ended by itself");
        handle.log().host(
            Level::Error,
            "sandbox ended by itself: its agent process exited",
            fields,
        );
        shared.journal.end(NodeEvent::Exited(handle.id().clone()));
    }
    let id = handle.id().clone();
    let disk = handle.disk_to_remove().cloned();
    let condition = handle.condition().clone();
    drop(handle);
    clean(&shared, &id, disk, held).await;
    condition.set_cleaned();
    drop(teardown);
}

/// Kills a sandbox and waits until none of its processes is left, or until [`KILL_TIMEOUT`] shows that they are blocked
/// in the kernel.
pub(crate) async fn end(id: &SandboxId, sandbox: &Arc<dyn Sandbox>) {
    sandbox.kill();
    if tokio::time::timeout(KILL_TIMEOUT, until_dead(sandbox)).await.is_err() {
        tracing::error!(
            sandbox.id = %id,
            "processes of a sandbox were killed but have not exited, most likely blocked on disk I/O"
        );
    }
}

/// Removes what an ended sandbox left: first what is held of it, then its disk if one is given. The kernel releases some of it
/// only some time after the last process exited. Where it does not, this retries until the platform stops, and its slot is not reused.
pub(crate) async fn clean(shared: &Arc<Shared>, id: &SandboxId, mut disk: Option<DiskId>, mut held: Option<Held>) {
    let since = Instant::now();
    let mut reported = false;
    let mut pause = CLEAN_PAUSE;
    loop {
        let (driver, id_to_clean, disk, held) = (Arc::clone(&shared.driver), id.clone(), disk.take(), held.take());
        let clean = move || {
            // Before its disk and its slot are given back.
            drop(held);
            if let Some(Err(error)) = disk.map(|disk| remove_disk(driver.storage(), &id_to_clean, &disk)) {
                tracing::warn!(sandbox.id = %id_to_clean, "cannot remove the disk of an ended sandbox, the next start of the platform does: {error}");
            }
            driver.clean(&id_to_clean)
        };
        let turn = shared.teardowns.turn().await;
        let is_clean = blocking(clean).await.unwrap_or(false);
        drop(turn);
        if is_clean {
            if reported {
                tracing::info!(sandbox.id = %id, "cleaned up after an ended sandbox");
            }
            return;
        }
        if since.elapsed() > CLEAN_TIMEOUT {
            if !reported {
                reported = true;
                tracing::error!(
                    sandbox.id = %id,
                    "processes of an ended sandbox have not exited; its slot stays in use until they do"
                );
            }
            pause = (pause * 2).min(CLEAN_PAUSE_MAX);
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.stop.cancelled() => return,
        }
    }
}

async fn until_dead(sandbox: &Arc<dyn Sandbox>) {
    #[expect(
        deprecated,
        reason = "its successor is unsafe to call, and an OwnedFd meets the requirements"
    )]
    let watched = |fd| AsyncFd::with_interest(fd, Interest::READABLE);
    let watched = sandbox.ended().try_clone_to_owned().and_then(watched);
    match watched {
        Ok(fd) => {
            let _ = fd.readable().await;
        }
        Err(error) => {
            tracing::error!("cannot watch for the end of a sandbox, which is noticed only when it is killed: {error}");
            std::future::pending().await
        }
    }
}

/// Follows the events of the agent for the log, and replaces the spawner whenever it has ended. Never returns.
async fn follow_events(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>, mut control: Option<Control>) {
    let mut budget = events::Budget::new(tokio::time::Instant::now());
    let mut failures = 0u32;
    loop {
        // A frozen agent accepts no connection, and each attempt would stay in its queue.
        handle.condition().until_it_runs().await;
        let followed = async {
            let mut control = match control.take() {
                Some(control) => control,
                None => connect_control(handle).await?,
            };
            let body = control.events().await?;
            handle.condition().set_followed(true);
            events::follow(body, handle.log(), &mut budget, || handle.note_memory_kills()).await
        };
        let followed = followed.await;
        handle.condition().set_followed(false);
        match followed {
            Ok(()) if replace_spawner(shared, handle).await => failures = failures.saturating_sub(1),
            Ok(()) => failures = (failures + 1).min(RETRY_DOUBLINGS),
            Err(error) => tracing::debug!(sandbox.id = %handle.id(), "follow the agent's events: {error}"),
        }
        tokio::time::sleep(RETRY * (1 << failures)).await;
    }
}

/// Gives a sandbox a new spawner. Returns whether that worked.
async fn replace_spawner(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>) -> bool {
    if handle.condition().is_frozen() {
        // It was ended by a pause, or will be reported again once the sandbox continues.
        return false;
    }
    let respawns = handle.condition().respawns();
    let Ok(_permit) = shared.respawns.acquire().await else {
        return false;
    };
    let _changing = handle.change().await;
    if handle.condition().is_frozen() {
        // Reported again once it continues.
        return false;
    }
    if handle.condition().respawns() != respawns {
        // A pause that was undone has replaced it meanwhile.
        return true;
    }
    tracing::warn!(sandbox.id = %handle.id(), "the spawner ended and is replaced");
    // First log the reason, in case it was a lack of memory.
    handle.note_memory_kills();
    let message = "the process that starts commands ended and is replaced";
    let fields = [("event_type", "spawner_replaced".to_owned())];
    handle.log().host(Level::Warn, message, fields);
    let replaced = handle.respawn().await;
    if let Err(error) = &replaced {
        tracing::warn!(sandbox.id = %handle.id(), "cannot replace the spawner: {error}; it is tried again");
        let message = "the process that starts commands could not be replaced; retrying";
        let fields = [("event_type", "spawner_failed".to_owned())];
        handle.log().host(Level::Error, message, fields);
    }
    replaced.is_ok()
}

/// Opens a control connection to the agent of a running sandbox.
pub(crate) async fn connect_control(handle: &Arc<SandboxHandle>) -> io::Result<Control> {
    let socket = handle.sandbox().control()?;
    tokio::time::timeout(AGENT_TIMEOUT, Control::open(socket)).await?
}
