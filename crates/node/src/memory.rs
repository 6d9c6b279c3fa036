//! Snapshots with memory: copies of sandboxes that the node keeps, and sandboxes that are started from them.
//!
//! ```text
//!   snapshot:  copy the processes and the disk ─▶ make a layer of the copy ─▶ checksums, write out, keep it by its build
//!              └─ the sandbox stands still ───┘
//!   start:     check the checkpoint ─▶ copy the disk, share the checkpoint ─▶ restore ─▶ identity, network ─▶ let it continue
//!              └────── a failure removes what there is, and the sandbox is started from its files ────────┘
//! ```
//!
//! What is kept belongs to no sandbox and is never written again. It is removed when the server says so, and only while no
//! start reads it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{BuildId, DiskId, SandboxId};
use model::log::Level;
use protocol::agent::Init;
use protocol::node::{MemoryInfo, NodeError, StartSandbox, StartedSandbox};
use runtime::driver::StartDisk;
use runtime::stored::{CopyMemoryError, Fork};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::handle::SandboxHandle;
use crate::log_writer::LogWriter;
use crate::pause::checkpoint::Space;
use crate::pause::kept::remove_disk;
use crate::restores::TURN_TIMEOUT;
use crate::shared::Shared;
use crate::start::{self, Begin, random_disk};
use crate::work::{blocking, failed};
use crate::{fork, supervisor};

/// How long a disk may take to be copied for a start, which a client waits for.
const COPY_TIMEOUT: Duration = Duration::from_secs(20);

/// Why the processes of a sandbox were not copied.
pub(crate) enum NotCopied {
    /// The sandbox has ended, or is paused.
    Gone(NodeError),
    /// For the client.
    Because(String),
}

/// Copies a sandbox with its processes to this disk, for no sandbox yet. It goes on, whatever happens.
pub(crate) async fn copy(
    shared: &Arc<Shared>,
    handle: &Arc<SandboxHandle>,
    disk: &DiskId,
) -> Result<(Fork, Duration), NotCopied> {
    let because = |why: &str| NotCopied::Because(why.to_owned());
    if !shared.driver.capabilities().checkpoints {
        return Err(because(
            "the host cannot copy processes: it has no CRIU, or only too old a version of it",
        ));
    }
    let internal = |_| because("the host could not copy the processes");
    let to = Fork {
        id: random_id().map_err(internal)?,
        disk: disk.clone(),
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let _permit = shared
        .forks
        .acquire()
        .await
        .map_err(|_| because("the platform is being stopped"))?;
    let space = blocking({
        let (shared, handle) = (Arc::clone(shared), Arc::clone(handle));
        move || Space::of_fork(&shared, &**handle.sandbox(), 1)
    });
    let _space = match space.await.map_err(internal)? {
        Ok(space) => space,
        Err(error) => return Err(NotCopied::Because(for_client(fork::node_error(error)))),
    };
    match fork::copy(shared, handle, &to).await {
        Ok(stopped) => Ok((to, stopped)),
        Err(error) => {
            fork::remove(shared, to).await;
            Err(match error {
                error @ NodeError::NotFound(_) => NotCopied::Gone(error),
                error if handle.condition().is_frozen() || handle.is_ending() => NotCopied::Gone(error),
                error => NotCopied::Because(for_client(error)),
            })
        }
    }
}

/// An id that no sandbox has, nor will have.
pub(crate) fn random_id() -> io::Result<SandboxId> {
    let mut random = [0; 20];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(SandboxId::from_random(&random))
}

/// Without what is for the operator alone, which is in the log of the platform.
fn for_client(error: NodeError) -> String {
    match error {
        NodeError::Refused(why) | NodeError::Capacity(why) | NodeError::Unsupported(why) => why,
        _ => "the host could not copy the processes".to_owned(),
    }
}

/// Keeps a copy as the memory of a build, or removes it. Returns the space that it takes.
pub(crate) async fn keep(shared: &Arc<Shared>, copy: Fork, build: &BuildId) -> Option<u64> {
    let (driver, to, from) = (Arc::clone(&shared.driver), build.clone(), copy.clone());
    let made = blocking(move || driver.storage().keep_memory(&to, &from)).await;
    match made.and_then(|made| made) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            tracing::error!(build.id = %build, "cannot keep the memory of a snapshot, which has files alone: {error}");
            fork::remove(shared, copy).await;
            None
        }
    }
}

/// Why a sandbox does not go on with the processes of its snapshot.
enum NotStarted {
    /// The sandbox cannot be started at all now.
    Node(NodeError),
    /// The sandbox can be started from its files. The reason is for the client.
    Because(String),
    /// The sandbox can be started from its files, and its memory was not tried: others have failed lately.
    TooEarly(String),
}

/// Starts a sandbox with the processes of a snapshot. `None` when it has to be started from its files: nothing is left of the
/// attempt then, and its log says why.
pub(crate) async fn start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
    request: &StartSandbox,
    build: &BuildId,
) -> Result<Option<StartedSandbox>, NodeError> {
    let why = match restore(shared, tasks, stop, request, build).await {
        Ok(started) => {
            shared.memories.forget_failures(build);
            return Ok(Some(started));
        }
        Err(NotStarted::Node(error)) => return Err(error),
        Err(NotStarted::TooEarly(why)) => why,
        Err(NotStarted::Because(why)) => {
            shared.memories.note_failure(build, Instant::now(), &why);
            why
        }
    };
    tracing::warn!(sandbox.id = %request.id, build.id = %build, "a sandbox starts without the memory of its snapshot: {why}");
    let fields = [
        ("event_type", "memory_not_restored".to_owned()),
        ("build_id", build.to_string()),
        ("reason", why),
    ];
    let message = "the memory of the snapshot could not be restored, and the sandbox is started from its files";
    LogWriter::new(request.id.clone(), Arc::clone(&shared.journal)).host(Level::Warn, message, fields);
    Ok(None)
}

async fn restore(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
    request: &StartSandbox,
    build: &BuildId,
) -> Result<StartedSandbox, NotStarted> {
    let check = || match shared.memories.pause_of(build, Instant::now()) {
        Some(why) => Err(NotStarted::TooEarly(why)),
        None => Ok(()),
    };
    check()?;
    let internal = |error: io::Error| {
        tracing::error!(sandbox.id = %request.id, build.id = %build, "cannot restore the memory of a snapshot, the sandbox starts from files: {error}");
        NotStarted::Because("the host could not restore the processes".to_owned())
    };
    let copy = Fork {
        id: request.id.clone(),
        disk: random_disk().map_err(internal)?,
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let copied = {
        let lock = shared.memories.of(build);
        let _reading = lock.read().await;
        let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
        let (build, to) = (build.clone(), copy.clone());
        blocking(move || {
            let begun = Instant::now();
            let is_cancelled = || stop.is_cancelled() || begun.elapsed() >= COPY_TIMEOUT;
            let obstacle = |checkpoint: &Path| driver.obstacle(checkpoint);
            driver.storage().copy_memory(&build, &to, &obstacle, &is_cancelled)
        })
        .await
    };
    let copied = copied.unwrap_or_else(|panicked| Err(CopyMemoryError::Failed(panicked)));
    if let Err(error) = copied {
        fork::remove(shared, copy).await;
        return Err(match error {
            CopyMemoryError::Unusable(why) => NotStarted::Because(why),
            CopyMemoryError::Failed(error) if error.kind() == io::ErrorKind::Interrupted => {
                NotStarted::Because("the copy of its disk took too long".to_owned())
            }
            CopyMemoryError::Failed(error) => internal(error),
        });
    }
    let turn = shared.restores.turn(request.owner.as_deref(), TURN_TIMEOUT).await;
    // Those of which the turn has come before may have failed meanwhile.
    let turn = turn.map_err(NotStarted::Node).and_then(|turn| check().map(|()| turn));
    let turn = match turn {
        Ok(turn) => turn,
        Err(error) => {
            fork::remove(shared, copy).await;
            return Err(error);
        }
    };
    // Its agent has the identity of the sandbox that was copied, perhaps long ago. It has to take this one, whatever became of
    // the host's clock since.
    let init = Init {
        timestamp: None,
        ..request.init.clone()
    };
    let begin = Begin {
        id: &request.id,
        template: &request.template,
        disk: StartDisk::Kept(copy.disk.clone()),
        restore: Some(turn),
        forked_from: None,
        snapshot: Some(build),
        resources: request.resources,
        init: &init,
        egress: &request.egress,
    };
    match start::start(shared, tasks, begin).await {
        Ok((handle, control, started)) => {
            shared.sandboxes.lock().insert(request.id.clone(), Arc::clone(&handle));
            let stop = stop.clone();
            tasks.spawn(supervisor::supervise(Arc::clone(shared), handle, Some(control), stop));
            Ok(StartedSandbox {
                is_restored: true,
                ..started
            })
        }
        Err(error) => {
            fork::remove(shared, copy).await;
            Err(match error {
                error @ NodeError::Capacity(_) => NotStarted::Node(error),
                NodeError::Refused(why) => NotStarted::Because(why),
                NodeError::NoLayer(layer) => {
                    NotStarted::Because(format!("layer {layer}, above which its files lie, is not on the host"))
                }
                error => internal(io::Error::other(error)),
            })
        }
    }
}

/// The memory of every snapshot.
pub(crate) async fn list(shared: &Shared) -> Result<Vec<MemoryInfo>, NodeError> {
    let driver = Arc::clone(&shared.driver);
    let listed = blocking(move || driver.storage().memories()).await.map_err(failed)?;
    listed.map_err(failed)
}

/// Removes the memory of a snapshot, once no start copies it.
pub(crate) async fn remove(shared: Arc<Shared>, build: BuildId) -> Result<(), NodeError> {
    let lock = shared.memories.of(&build);
    let _alone = lock.write().await;
    let driver = Arc::clone(&shared.driver);
    shared.memories.forget_failures(&build);
    let removed = blocking(move || driver.storage().remove_memory(&build))
        .await
        .map_err(failed)?;
    removed.map_err(failed)
}

/// Removes a copy of which nothing was made.
pub(crate) async fn forget(shared: &Arc<Shared>, disk: DiskId, copy: Option<Fork>) {
    let driver = Arc::clone(&shared.driver);
    let removed = blocking(move || match copy {
        Some(copy) => remove_disk(driver.storage(), &copy.id, &copy.disk),
        None => driver.storage().remove_disk(&disk),
    });
    if let Err(error) = removed.await.and_then(|removed| removed) {
        tracing::warn!("cannot remove the copy of a disk, the next start of the platform does: {error}");
    }
}
