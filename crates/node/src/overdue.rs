//! What a node does by itself with a sandbox that is overdue while no server is there: it ends it, or pauses it.
//!
//! The host says what is to be done, and what was: a sandbox that stands still or is kept was paused, and one of which there is
//! nothing has ended. So what is interrupted anywhere, also by the end of the process, is done again or found done.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::Kept;
use protocol::node::{Expired, ExpiredSandbox, NodeError, Overdue, PauseSandbox, PausedSandbox, Wanted, WantedState};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::deadlines::{Acted, Deadlines, Due};
use crate::handle::{SandboxHandle, closed};
use crate::shared::Shared;
use crate::work::{blocking, failed};
use crate::{pause, reconcile};

/// Sandboxes that are ended or paused at the same time.
const AT_ONCE: usize = 8;
/// How long the end of a sandbox waits for what changes it: a pause that a client has asked for keeps it.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);

/// What there is of a sandbox.
enum Found {
    Runs(Arc<SandboxHandle>),
    /// None of its processes runs, and something of it is kept.
    Paused,
    Gone,
}

/// Ends and pauses what is overdue while no server is there, until the node lets go of its sandboxes.
pub(crate) async fn enforce(shared: Arc<Shared>, tasks: TaskTracker, deadlines: Arc<Deadlines>) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        // What would have to wait for its turn is left: a server that comes back meanwhile finds it not begun, and acts itself.
        let Some(free) = free_places(&places, &shared).await else {
            return;
        };
        let changed = deadlines.changed();
        let (looking, most) = (Arc::clone(&deadlines), free.len());
        let looked = blocking(move || looking.take_overdue(most)).await;
        if shared.stop.is_cancelled() {
            // What was taken is looked at again by the next node of this process.
            return;
        }
        match looked {
            Ok(Ok(due)) => {
                for (due, place) in due.into_iter().zip(free) {
                    let acting = Acting {
                        shared: Arc::clone(&shared),
                        tasks: tasks.clone(),
                        deadlines: Arc::clone(&deadlines),
                    };
                    tasks.spawn(async move {
                        acting.act(due).await;
                        drop(place);
                    });
                }
            }
            Ok(Err(wait)) => tokio::select! {
                () = shared.stop.cancelled() => return,
                () = changed => {}
                () = until(wait) => {}
            },
            Err(error) => {
                tracing::error!("cannot look at the deadlines of sandboxes: {error}");
                until(Some(Duration::from_secs(1))).await;
            }
        }
    }
}

/// All places that are free, once there is one; none when the node lets go of its sandboxes.
async fn free_places(places: &Arc<Semaphore>, shared: &Shared) -> Option<Vec<OwnedSemaphorePermit>> {
    let first = tokio::select! {
        biased;
        () = shared.stop.cancelled() => return None,
        first = Arc::clone(places).acquire_owned() => first.ok()?,
    };
    let mut free = vec![first];
    while let Ok(place) = Arc::clone(places).try_acquire_owned() {
        free.push(place);
    }
    Some(free)
}

async fn until(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

struct Acting {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    deadlines: Arc<Deadlines>,
}

impl Acting {
    async fn act(self, due: Due) {
        let Due { id, then, was_begun } = due;
        let (deadlines, stop) = (Arc::clone(&self.deadlines), self.shared.stop.clone());
        let done = match self.find(&id).await {
            Ok(Found::Runs(handle)) => match then {
                Overdue::End => self.end(&handle).await,
                Overdue::Pause(keep) => self.pause(&handle, keep).await,
            },
            Ok(Found::Paused) if was_begun => Some(Ok(None)),
            Ok(Found::Gone) if was_begun && then == Overdue::End => Some(Ok(None)),
            // It was paused before, or has ended by itself.
            Ok(Found::Paused | Found::Gone) => None,
            Err(error) => Some(Err(error)),
        };
        let noted = blocking(move || match done {
            Some(Ok(disk_bytes)) => deadlines.done(&id, disk_bytes),
            // It is looked at again by whoever goes on.
            Some(Err(_)) if stop.is_cancelled() => {}
            Some(Err(error)) => {
                tracing::error!(sandbox.id = %id, "cannot pause a sandbox at its deadline, it is tried again: {error}");
                deadlines.retry(&id);
            }
            None => deadlines.drop_due(&id),
        });
        if let Err(error) = noted.await {
            tracing::error!("cannot note what was done about an overdue sandbox: {error}");
        }
    }

    /// Finds out what there is of a sandbox. One that no server has taken over since this process has started is adopted, without a
    /// network, to be ended or paused.
    async fn find(&self, id: &SandboxId) -> Result<Found, NodeError> {
        if let Some(handle) = self.shared.find(id) {
            if !handle.is_ending() {
                let runs = handle.condition().runs_or_is_copied();
                return Ok(if runs { Found::Runs(handle) } else { Found::Paused });
            }
            let condition = handle.condition().clone();
            drop(handle);
            tokio::select! {
                () = condition.until_ended() => {}
                () = self.shared.stop.cancelled() => return Err(NodeError::Cancelled),
            }
        }
        if self.shared.kept.get(id).is_some() {
            return Ok(Found::Paused);
        }
        let (driver, of) = (Arc::clone(&self.shared.driver), id.clone());
        let found = blocking(move || {
            let found = driver.find()?.into_iter().find(|found| found.id == of);
            let kept = driver.storage().kept()?;
            let is_saved = kept.iter().any(|kept| kept.id == of && kept.is_saved);
            let alive = found.as_ref().and_then(|found| found.alive.as_ref());
            let is_frozen = alive.map(|sandbox| sandbox.is_frozen()).transpose()?;
            io::Result::Ok((found, is_frozen, is_saved))
        });
        let (found, is_frozen, is_saved) = found.await.map_err(failed)?.map_err(failed)?;
        match (found, is_frozen, is_saved) {
            (_, Some(true), _) | (_, None, true) => return Ok(Found::Paused),
            (Some(found), Some(false), _) => {
                let wanted = Wanted {
                    id: id.clone(),
                    state: WantedState::Running,
                    egress: closed(),
                    deadline: None,
                };
                reconcile::adopt_one(&self.shared, &self.tasks, found, wanted).await;
            }
            _ => {}
        }
        Ok(self.shared.find(id).map_or(Found::Gone, Found::Runs))
    }

    /// Ends a sandbox; none if it was paused before.
    async fn end(&self, handle: &Arc<SandboxHandle>) -> Option<Result<Option<u64>, NodeError>> {
        let turn = tokio::time::timeout(TURN_TIMEOUT, handle.change());
        let turn = tokio::select! {
            () = self.shared.stop.cancelled() => return Some(Err(NodeError::Cancelled)),
            turn = turn => turn,
        };
        if turn.is_ok() && !handle.condition().runs_or_is_copied() {
            return None;
        }
        if handle.is_ending() && handle.condition().keeps_disk() {
            return None;
        }
        tracing::warn!(sandbox.id = %handle.id(), "no server is there: ending a sandbox whose timeout was reached");
        tokio::select! {
            biased;
            () = handle.kill() => Some(Ok(None)),
            () = self.shared.stop.cancelled() => Some(Err(NodeError::Cancelled)),
        }
    }

    /// Pauses a sandbox, as a server does: where the host cannot keep its processes, its disk is kept; it is ended only where the
    /// host can keep nothing.
    async fn pause(&self, handle: &Arc<SandboxHandle>, mut keep: Kept) -> Option<Result<Option<u64>, NodeError>> {
        let id = handle.id();
        tracing::warn!(sandbox.id = %id, "no server is there: pausing a sandbox whose timeout was reached");
        loop {
            let request = PauseSandbox {
                id: id.clone(),
                keep,
                is_written_next: false,
            };
            match pause::pause(&self.shared, &self.tasks, request, CancellationToken::new()).await {
                Ok(PausedSandbox { kept, disk_bytes, .. }) => {
                    tracing::info!(sandbox.id = %id, kept = kept.as_str(), disk_bytes, "sandbox paused");
                    return Some(Ok(Some(disk_bytes)));
                }
                Err(NodeError::Unsupported(why)) => {
                    tracing::warn!(sandbox.id = %id, "the processes of a sandbox are not kept: {why}");
                    if keep == Kept::Filesystem {
                        return self.end(handle).await;
                    }
                    keep = Kept::Filesystem;
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// The sandboxes that this node has ended or paused by itself, as the host has them.
pub(crate) async fn expired(shared: &Shared) -> Result<Vec<ExpiredSandbox>, NodeError> {
    let Some(deadlines) = shared.deadlines.get() else {
        return Ok(Vec::new());
    };
    let acted = deadlines.acted();
    if acted.is_empty() {
        return Ok(Vec::new());
    }
    let (driver, deadlines) = (Arc::clone(&shared.driver), Arc::clone(deadlines));
    let expired = blocking(move || {
        let found: HashMap<_, _> = driver
            .find()?
            .into_iter()
            .map(|found| (found.id.clone(), found))
            .collect();
        let kept = driver.storage().kept()?;
        let outcome_of = |acted: &Acted| -> io::Result<Option<Expired>> {
            let alive = found.get(&acted.id).and_then(|found| found.alive.as_ref());
            if let Some(sandbox) = alive {
                // What goes on was not paused, and its server does that.
                let paused = Expired::Paused {
                    kept: Kept::Memory,
                    disk_bytes: acted.disk_bytes,
                };
                return Ok(sandbox.is_frozen()?.then_some(paused));
            }
            if let Some(disk) = kept.iter().find(|kept| kept.id == acted.id && kept.is_saved) {
                let has_checkpoint = driver.storage().has_checkpoint(&disk.id, &disk.disk);
                let kept = if has_checkpoint {
                    Kept::Checkpoint
                } else {
                    Kept::Filesystem
                };
                return Ok(Some(Expired::Paused {
                    kept,
                    disk_bytes: acted.disk_bytes,
                }));
            }
            // One that was paused and is not there any more is lost.
            Ok((acted.then == Overdue::End).then_some(Expired::Ended))
        };
        let mut expired = Vec::new();
        for acted in acted {
            if let Some(outcome) = outcome_of(&acted)? {
                let Acted { id, ago, .. } = acted;
                expired.push(ExpiredSandbox { id, ago, outcome });
            }
        }
        deadlines.report(expired.iter().map(|one| one.id.clone()));
        io::Result::Ok(expired)
    });
    expired.await.map_err(failed)?.map_err(failed)
}
