//! Making the host match the desired state after a restart of the platform, or of the host.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use model::id::{DiskId, SandboxId};
use model::lifecycle::Kept;
use model::log::Level;
use protocol::node::{Adopted, AdoptedState, NodeError, Wanted, WantedState};
use runtime::driver::Found;
use runtime::stored::KeptDisk;
use tokio_util::task::TaskTracker;

use crate::handle::{Network, SandboxHandle, closed};
use crate::log_writer::LogWriter;
use crate::shared::Shared;
use crate::work::{blocking, failed};
use crate::{egress, noted, pause, supervisor};

/// How long startup waits for unwanted sandboxes to end. Together they take milliseconds; the rest continues in the
/// background.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(15);

/// What is done with a sandbox of which the driver has found something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    /// The sandbox is adopted, running or stopped.
    Adopt,
    /// Its processes are ended, if it has any, and its disk is kept.
    KeepDisk,
    /// Everything of it is removed.
    Remove,
}

/// What happens to a sandbox once its processes have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterEnd {
    /// Everything that belongs to it is removed.
    Clean,
    /// Its disk is kept.
    KeepDisk,
}

/// What is done with a sandbox, which has processes (`is_alive`), of which there is a complete checkpoint (`has_checkpoint`), or
/// whose disk is complete and unused (`is_saved`).
fn decide(wanted: Option<WantedState>, is_alive: bool, has_checkpoint: bool, is_saved: bool) -> Decision {
    match wanted {
        // The checkpoint is removed before the processes continue, so these have done nothing since it was written, or were
        // just restored from it. Some of what the host has to give them went with the platform.
        Some(WantedState::RunningOrPaused(Kept::Checkpoint)) if is_alive && has_checkpoint => Decision::KeepDisk,
        // The same when it was written after it had been paused in memory, whether or not they were ended then.
        Some(WantedState::Paused(Kept::Memory)) if has_checkpoint => Decision::KeepDisk,
        Some(WantedState::Running | WantedState::RunningOrPaused(_)) if is_alive => Decision::Adopt,
        Some(WantedState::Paused(Kept::Memory)) if is_alive => Decision::Adopt,
        Some(
            WantedState::Paused(Kept::Checkpoint | Kept::Filesystem)
            | WantedState::RunningOrPaused(Kept::Checkpoint | Kept::Filesystem),
        ) => Decision::KeepDisk,
        // A row that was written later was lost with the power of the host.
        Some(WantedState::Running | WantedState::Paused(_) | WantedState::RunningOrPaused(_)) if is_saved => {
            Decision::KeepDisk
        }
        Some(WantedState::Running | WantedState::Paused(_) | WantedState::RunningOrPaused(_)) | None => {
            Decision::Remove
        }
    }
}

/// Adopts, keeps or ends each sandbox that there is, and removes disks of no sandbox.
pub(crate) async fn adopt_all(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    wanted: Vec<Wanted>,
) -> Result<Vec<Adopted>, NodeError> {
    // Of this platform: what they hold must not be taken for something that is left.
    shared.teardowns.settled().await;
    let driver = Arc::clone(&shared.driver);
    let read = blocking(move || std::io::Result::Ok((driver.find()?, driver.storage().kept()?)));
    let (found, noted) = read.await.map_err(failed)?.map_err(failed)?;
    let mut wanted: HashMap<SandboxId, Wanted> = wanted.into_iter().map(|wanted| (wanted.id.clone(), wanted)).collect();
    let mut noted: HashMap<SandboxId, KeptDisk> = noted.into_iter().map(|disk| (disk.id.clone(), disk)).collect();

    // Names of two files, which are looked for.
    let kept_of = |id: &SandboxId, disk: &DiskId| {
        if shared.driver.storage().has_checkpoint(id, disk) {
            Kept::Checkpoint
        } else {
            Kept::Filesystem
        }
    };
    let (mut adopt, mut end, mut remove) = (Vec::new(), Vec::new(), Vec::new());
    let (mut disks, mut keep) = (Vec::new(), Vec::new());
    for found in found {
        let wanted = wanted.remove(&found.id);
        let is_saved = noted.remove(&found.id).is_some_and(|noted| noted.is_saved);
        let state = wanted.as_ref().map(|wanted| wanted.state);
        let has_checkpoint = shared.driver.storage().has_checkpoint(&found.id, &found.disk);
        match decide(state, found.alive.is_some(), has_checkpoint, is_saved) {
            Decision::Adopt => {
                disks.push(found.disk.clone());
                adopt.extend(wanted.map(|wanted| (found, wanted)));
            }
            Decision::KeepDisk => {
                keep.push((found.id.clone(), found.disk.clone(), kept_of(&found.id, &found.disk)));
                end.push(found);
            }
            Decision::Remove => remove.push(found),
        }
    }
    // Those of which nothing but the disk is left.
    for (id, KeptDisk { disk, is_saved, .. }) in noted {
        let state = wanted.get(&id).map(|wanted| wanted.state);
        let kept = kept_of(&id, &disk);
        if decide(state, false, kept == Kept::Checkpoint, is_saved) == Decision::KeepDisk {
            keep.push((id, disk, kept));
        }
    }
    disks.extend(keep.iter().map(|(_, disk, _)| disk.clone()));
    note_disks(shared, &keep).await?;
    end_all(shared, tasks, end, AfterEnd::KeepDisk).await;
    end_all(shared, tasks, remove, AfterEnd::Clean).await;

    let mut adopted = Vec::with_capacity(adopt.len() + keep.len());
    let mut deadlines = HashMap::new();
    for (found, wanted) in adopt {
        let deadline = wanted.deadline;
        let one = adopt_one(shared, tasks, found, wanted).await;
        if let (Some(Adopted { id, state }), Some(deadline)) = (&one, deadline)
            && *state == AdoptedState::Running
        {
            deadlines.insert(id.clone(), deadline);
        }
        adopted.extend(one);
    }
    for (id, disk, kept) in keep {
        let log = LogWriter::new(id.clone(), Arc::clone(&shared.journal));
        let event = ("event_type", "sandbox_adopted".to_owned());
        log.host(
            Level::Info,
            "the platform was restarted; the sandbox stays paused",
            [event],
        );
        shared.kept.insert(id.clone(), disk);
        let state = AdoptedState::Paused(kept);
        adopted.push(Adopted { id, state });
    }
    let driver = Arc::clone(&shared.driver);
    let swept = blocking(move || driver.storage().sweep_disks(&disks)).await;
    swept.map_err(failed)?.map_err(failed)?;
    // Last: from here on a server acts at deadlines.
    let paused = adopted.iter().filter(|one| one.state != AdoptedState::Running);
    let paused = paused.map(|one| one.id.clone()).collect();
    noted::take_over(shared, deadlines, paused).await?;
    Ok(adopted)
}

/// Has the driver keep disks of sandboxes that are about to lose their processes, or have lost them: the record of
/// their disks ends with those.
async fn note_disks(shared: &Shared, keep: &[(SandboxId, DiskId, Kept)]) -> Result<(), NodeError> {
    let driver = Arc::clone(&shared.driver);
    let keep: Vec<_> = keep.iter().map(|(id, disk, _)| (id.clone(), disk.clone())).collect();
    let noted = blocking(move || {
        let known: Vec<DiskId> = driver.storage().kept()?.into_iter().map(|kept| kept.disk).collect();
        let mut new = keep.iter().filter(|(_, disk)| !known.contains(disk));
        new.try_for_each(|(id, disk)| driver.storage().keep(id, disk))
    });
    noted.await.map_err(failed)?.map_err(failed)
}

/// Adopts a sandbox that has processes, in the state that is wanted; none if it has just ended.
pub(crate) async fn adopt_one(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    found: Found,
    wanted: Wanted,
) -> Option<Adopted> {
    let Found { id, disk, alive } = found;
    let sandbox = alive?;
    // One that was written when the platform ended is not what these processes make of the disk.
    let driver = Arc::clone(&shared.driver);
    let of = (id.clone(), disk.clone());
    if let Err(error) = blocking(move || driver.storage().forget_checkpoint(&of.0, &of.1))
        .await
        .and_then(|done| done)
    {
        tracing::error!(sandbox.id = %id, "cannot remove the old checkpoint of a sandbox that runs: {error}");
    }
    let is_paused = pause::frozen::settle(&id, &sandbox, wanted.state).await;
    let log = LogWriter::new(id.clone(), Arc::clone(&shared.journal));
    let event = ("event_type", "sandbox_adopted".to_owned());
    let message = if is_paused {
        "the platform was restarted; the sandbox stays paused"
    } else {
        "the platform was restarted; the sandbox kept running"
    };
    log.host(Level::Info, message, [event]);
    let egress = if is_paused { closed() } else { wanted.egress };
    if let Err(error) = sandbox.settle() {
        tracing::warn!(sandbox.id = %id, "an adopted sandbox may have more processor time than others: {error}");
    }
    if let Err(error) = sandbox.limit_cpu(None)
        && error.kind() != std::io::ErrorKind::Unsupported
    {
        tracing::warn!(sandbox.id = %id, "an adopted sandbox may have less processor time than it should: {error}");
    }
    let mut network = Network::unconnected();
    network.attachment = match egress::attach(shared, &id, &*sandbox, egress, &network.traffic) {
        Ok(attachment) => attachment,
        Err(error) => {
            tracing::error!(sandbox.id = %id, "cannot connect an adopted sandbox to the network, it goes on without: {error}");
            let event = ("event_type", "network_failed".to_owned());
            log.host(
                Level::Error,
                "the sandbox could not be connected to the network again",
                [event],
            );
            None
        }
    };
    let handle = Arc::new(SandboxHandle::adopted(id.clone(), disk, sandbox, network, log));
    if is_paused {
        handle.condition().freeze();
    }
    shared.sandboxes.lock().insert(id.clone(), Arc::clone(&handle));
    let (shared, stop) = (Arc::clone(shared), shared.stop.clone());
    tasks.spawn(supervisor::supervise(shared, handle, None, stop));
    let state = if is_paused {
        AdoptedState::Paused(Kept::Memory)
    } else {
        AdoptedState::Running
    };
    Some(Adopted { id, state })
}

/// Ends sandboxes in parallel and waits for that, for [`REMOVAL_TIMEOUT`] at most.
async fn end_all(shared: &Arc<Shared>, tasks: &TaskTracker, sandboxes: Vec<Found>, after: AfterEnd) {
    let removals: Vec<_> = sandboxes
        .into_iter()
        .map(|Found { id, disk, alive }| {
            match after {
                AfterEnd::Clean => tracing::info!(sandbox.id = %id, "removing an unwanted sandbox"),
                AfterEnd::KeepDisk => {
                    tracing::info!(sandbox.id = %id, "ending leftover processes of a paused sandbox")
                }
            }
            let shared = Arc::clone(shared);
            tasks.spawn(async move {
                if let Some(sandbox) = alive {
                    supervisor::end(&id, &sandbox).await;
                }
                let removed = (after == AfterEnd::Clean).then(|| disk.clone());
                supervisor::clean(&shared, &id, removed, None).await;
                if after == AfterEnd::KeepDisk {
                    pause::save(&shared, id, disk).await;
                }
            })
        })
        .collect();
    let all = async {
        for removal in removals {
            if let Err(error) = removal.await {
                tracing::error!(
                    "the task that removes an unwanted sandbox failed, the next start of the platform removes it: {error}"
                );
            }
        }
    };
    if tokio::time::timeout(REMOVAL_TIMEOUT, all).await.is_err() {
        tracing::error!("some unwanted sandboxes have not ended; their removal continues in the background");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_with_what_is_found() {
        use Decision::{Adopt, KeepDisk, Remove};
        use Kept::{Checkpoint, Filesystem, Memory};
        use WantedState::{Paused, Running, RunningOrPaused};
        #[rustfmt::skip]
        let table = [
            //                                  alive     saved     neither
            (None,                              [Remove,   Remove,   Remove]),
            (Some(Running),                     [Adopt,    KeepDisk, Remove]),
            (Some(Paused(Memory)),              [Adopt,    KeepDisk, Remove]),
            (Some(RunningOrPaused(Memory)),     [Adopt,    KeepDisk, Remove]),
            (Some(Paused(Filesystem)),          [KeepDisk, KeepDisk, KeepDisk]),
            (Some(RunningOrPaused(Filesystem)), [Adopt,    KeepDisk, KeepDisk]),
            (Some(Paused(Checkpoint)),          [KeepDisk, KeepDisk, KeepDisk]),
            (Some(RunningOrPaused(Checkpoint)), [Adopt,    KeepDisk, KeepDisk]),
        ];
        for (wanted, [alive, saved, neither]) in table {
            assert_eq!(decide(wanted, true, false, false), alive, "{wanted:?}");
            assert_eq!(decide(wanted, false, false, true), saved, "{wanted:?}");
            assert_eq!(decide(wanted, false, false, false), neither, "{wanted:?}");
            // Only where it was being paused or resumed with its processes, or was to be written after it had been paused in
            // memory, a checkpoint is more than they are.
            let (alive_with_checkpoint, with_checkpoint) = match wanted {
                Some(RunningOrPaused(Checkpoint) | Paused(Memory)) => (KeepDisk, KeepDisk),
                _ => (alive, neither),
            };
            assert_eq!(decide(wanted, true, true, false), alive_with_checkpoint, "{wanted:?}");
            assert_eq!(decide(wanted, false, true, false), with_checkpoint, "{wanted:?}");
        }
    }
}
