//! Forks: sandboxes that are started from the copy of another one, which goes on.
//!
//! ```text
//!   copy the processes and the disk ─┬─▶ start the first child, once nothing is copied from its copy any more
//!   └─ the parent stands still ────┘ └─▶ copy that for each other child ─▶ start it
//! ```
//!
//! A child is started as a paused sandbox is resumed with its processes (`pause`), but on a disk and from a checkpoint that
//! nothing has used before: an error removes both. A crash of the platform leaves disks that no sandbox has, and children
//! that nothing wants; the next start removes them.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{ForkSandbox, ForkedSandbox, NodeError, StartedSandbox};
use runtime::driver::{StartDisk, WriteError};
use runtime::stored::Fork;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::begun::Begun;
use crate::handle::SandboxHandle;
use crate::noted;
use crate::pause::checkpoint::Space;
use crate::pause::kept::remove_disk;
use crate::restores::TURN_TIMEOUT;
use crate::shared::Shared;
use crate::start::{self, Begin, random_disk};
use crate::supervisor;
use crate::work::{blocking, failed};

/// Sandboxes that are forked at the same time. Each is written by a process and takes a place on the host's disk.
pub(crate) const FORKS: usize = 2;
/// Disks of one fork that are copied at the same time.
const COPIES: usize = 2;
/// How often the processes are written before the fork fails. What the sandbox receives just when CRIU reads a connection
/// makes it give up.
const ATTEMPTS: usize = 3;

/// How much longer each child waits for its turn for each child of the same fork. A restore takes a tenth of a second.
const CHILD_TIMEOUT: Duration = Duration::from_millis(500);

/// Copies a sandbox and starts others from the copy. Returns what became of each.
pub(crate) async fn fork(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
    handle: Arc<SandboxHandle>,
    request: ForkSandbox,
) -> Result<Vec<Result<StartedSandbox, NodeError>>, NodeError> {
    if !shared.driver.capabilities().checkpoints {
        let why = "the host cannot copy the processes of sandboxes: it has no CRIU, or only too old a version of it";
        return Err(NodeError::Unsupported(why.to_owned()));
    }
    let Ok(permit) = shared.forks.try_acquire() else {
        let why = format!("the host forks {FORKS} sandboxes already");
        return Err(NodeError::Capacity(why));
    };
    let keep_free_bytes = shared.keep_free_bytes();
    let copy_for = |child: &ForkedSandbox| -> io::Result<Fork> {
        Ok(Fork {
            id: child.id.clone(),
            disk: random_disk()?,
            keep_free_bytes,
        })
    };
    let copies = request.children.iter().map(copy_for).collect::<io::Result<Vec<_>>>();
    let copies = copies.map_err(failed)?;
    let Some((first, others)) = copies.split_first() else {
        return Ok(Vec::new());
    };
    // For as long as they are written; what was written is not free any more.
    let space = blocking({
        let (shared, handle, count) = (Arc::clone(&shared), Arc::clone(&handle), copies.len() as u64);
        move || Space::of_fork(&shared, &**handle.sandbox(), count)
    });
    let space = space.await.map_err(failed)?.map_err(node_error)?;
    let begun = Instant::now();
    if let Err(error) = copy(&shared, &handle, first).await {
        remove(&shared, first.clone()).await;
        return Err(error);
    }
    let starting = Starting {
        shared: Arc::clone(&shared),
        tasks,
        stop,
        parent: handle.id().clone(),
        count: copies.len(),
        outcomes: Mutex::default(),
    };
    let copied_ms = begun.elapsed().as_millis();
    let copying = Semaphore::new(COPIES);
    // Nothing is ever sent: it ends when all others have their copies of the first one.
    let (use_of_first, mut uses_of_first) = mpsc::channel::<()>(1);
    let mut children = request.children.into_iter();
    let child_of_first = children.next();
    let started = others.iter().zip(children).map(|(copy, child)| {
        let (copying, use_of_first) = (&copying, use_of_first.clone());
        let starting = &starting;
        async move {
            let turn = copying.acquire().await;
            let copied = copy_again(&starting.shared, first.clone(), copy.clone()).await;
            drop((turn, use_of_first));
            starting.start(child, copy, copied).await
        }
    });
    let others_started = join_all(started);
    drop(use_of_first);
    let first_started = async {
        uses_of_first.recv().await;
        // All are copied. Others can be, whatever becomes of these.
        drop((space, permit));
        match child_of_first {
            Some(child) => Some(starting.start(child, first, Ok(())).await),
            None => None,
        }
    };
    // Each waits for its turn.
    let (first_started, others_started) = tokio::join!(first_started, others_started);
    let started: Vec<_> = first_started.into_iter().chain(others_started).collect();
    let count = started.iter().filter(|child| child.is_ok()).count();
    let all_ms = begun.elapsed().as_millis();
    tracing::info!(sandbox.id = %handle.id(), count, copied_ms, all_ms, "forked a sandbox");
    Ok(started)
}

/// Copies a sandbox, and returns how long it stood still. It goes on, whatever happens.
pub(crate) async fn copy(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>, to: &Fork) -> Result<Duration, NodeError> {
    let not_found = || NodeError::NotFound(handle.id().clone());
    let _changing = handle.change().await;
    if handle.is_ending() {
        return Err(not_found());
    }
    if handle.condition().is_frozen() {
        return Err(NodeError::failed("the sandbox is paused"));
    }
    handle.condition().copy();
    let copied = blocking({
        let (shared, handle, to) = (Arc::clone(shared), Arc::clone(handle), to.clone());
        move || {
            let sandbox = handle.sandbox();
            let mut attempt = 1;
            loop {
                let copied = sandbox.fork(&to, &|| shared.stop.is_cancelled());
                match &copied {
                    Err(WriteError::Refused(_) | WriteError::Passing(_)) if attempt < ATTEMPTS => {}
                    _ => break copied,
                }
                attempt += 1;
                remove_disk(shared.driver.storage(), &to.id, &to.disk)?;
            }
        }
    });
    let copied = copied.await.unwrap_or_else(|panicked| Err(panicked.into()));
    if handle.is_ending() {
        return Err(not_found());
    }
    if let Err(error) = handle.respawn().await {
        // It is tried again when the events of the agent are followed.
        tracing::warn!(sandbox.id = %handle.id(), "cannot replace the spawner of a sandbox after a fork, it is tried again: {error}");
    }
    handle.condition().go_on();
    match copied {
        Ok(stopped) => {
            let stopped_ms = u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(sandbox.id = %handle.id(), stopped_ms, "copied a sandbox with its processes");
            Ok(stopped)
        }
        Err(error) => {
            tracing::warn!(sandbox.id = %handle.id(), "cannot copy a sandbox with its processes, which goes on: {error}");
            Err(node_error(error))
        }
    }
}

async fn copy_again(shared: &Arc<Shared>, from: Fork, to: Fork) -> Result<(), NodeError> {
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let copied = blocking(move || driver.storage().copy_fork(&from, &to, &|| stop.is_cancelled())).await;
    copied
        .and_then(|copied| copied)
        .map_err(|error| node_error(error.into()))
}

/// Starts children of one sandbox.
struct Starting {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
    parent: SandboxId,
    /// How many there are.
    count: usize,
    outcomes: Mutex<Outcomes>,
}

/// What became of the children so far.
#[derive(Debug, Default)]
struct Outcomes {
    has_started: bool,
    /// Why the first one that failed did.
    failed: Option<NodeError>,
}

impl Starting {
    /// Starts a child from its copy, which is removed if that is not complete or cannot be started from.
    async fn start(
        &self,
        child: ForkedSandbox,
        copy: &Fork,
        copied: Result<(), NodeError>,
    ) -> Result<StartedSandbox, NodeError> {
        let started = match copied {
            Ok(()) => self.start_copied(child, copy).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &started {
            tracing::error!(sandbox.id = %copy.id, parent = %self.parent, "cannot start the fork of a sandbox, whose copy is removed: {error}");
            remove(&self.shared, copy.clone()).await;
        }
        started
    }

    async fn start_copied(&self, child: ForkedSandbox, copy: &Fork) -> Result<StartedSandbox, NodeError> {
        let ForkedSandbox {
            id,
            boot,
            egress,
            deadline,
        } = child;
        let _begun = Begun::start(&self.shared, &id)?;
        // The children have the same owner, and wait for each other.
        let timeout = TURN_TIMEOUT + CHILD_TIMEOUT * u32::try_from(self.count).unwrap_or(u32::MAX);
        let turn = self.shared.restores.turn(boot.owner.as_deref(), timeout).await?;
        if let Some(error) = self.hopeless() {
            return Err(error);
        }
        let begin = Begin {
            id: &id,
            template: &boot.template,
            disk: StartDisk::Kept(copy.disk.clone()),
            restore: Some(turn),
            forked_from: Some(&self.parent),
            snapshot: None,
            resources: boot.resources,
            init: &boot.init,
            egress: &egress,
        };
        let started = start::start(&self.shared, &self.tasks, begin).await;
        match &started {
            Ok(_) => self.outcomes.lock().has_started = true,
            Err(error) => drop(self.outcomes.lock().failed.get_or_insert_with(|| error.clone())),
        }
        let (handle, control, started) = started?;
        let (shared, stop) = (Arc::clone(&self.shared), self.stop.clone());
        shared.sandboxes.lock().insert(id.clone(), Arc::clone(&handle));
        self.tasks
            .spawn(supervisor::supervise(shared, handle, Some(control), stop));
        noted::note(&self.shared, &id, deadline).await;
        Ok(started)
    }

    /// Why the others are not tried: one has failed and none has started, and all have the same checkpoint.
    fn hopeless(&self) -> Option<NodeError> {
        let outcomes = self.outcomes.lock();
        outcomes.failed.clone().filter(|_| !outcomes.has_started)
    }
}

/// Removes a copy from which nothing runs.
pub(crate) async fn remove(shared: &Arc<Shared>, copy: Fork) {
    let driver = Arc::clone(&shared.driver);
    let id = copy.id.clone();
    let removed = blocking(move || remove_disk(driver.storage(), &copy.id, &copy.disk)).await;
    if let Err(error) = removed.and_then(|removed| removed) {
        tracing::warn!(sandbox.id = %id, "cannot remove the copy of a sandbox, the next start of the platform does: {error}");
    }
}

pub(crate) fn node_error(error: WriteError) -> NodeError {
    match error {
        WriteError::Refused(why) | WriteError::Passing(why) => NodeError::Refused(why),
        WriteError::Failed(error) if error.kind() == io::ErrorKind::StorageFull => {
            NodeError::Capacity("the host's disk has no space for the copies of the sandbox".to_owned())
        }
        WriteError::Failed(error) => failed(error),
    }
}
