//! The task that owns a sandbox, and what others may ask of it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{DiskId, SandboxId};
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::{Failure, Image, NodeError, NodeEvent, Stage, StartSandbox, StartedSandbox};
use runtime::driver::{Sandbox, StartError, StartRequest};
use runtime::rootfs::Rootfs;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::control::Control;
use crate::journal::Journal;
use crate::{AGENT_TIMEOUT, Shared, blocking, events, failed};

/// Shortest time between two attempts to talk to an agent or to give a sandbox a new spawner: a sandbox whose root
/// keeps killing its spawner costs the host no more than this.
const RETRY: Duration = Duration::from_millis(500);
/// How often that time doubles when attempts at a spawner fail one after the other: 32 s at most.
const RETRY_DOUBLINGS: u32 = 6;
/// Attempts at a spawner that are under way at once, all sandboxes together. Each waits for processes that root of its
/// sandbox can stop, for 3 s at most.
pub(crate) const RESPAWNS: usize = 8;
/// How long a sandbox that was killed may take to end before its end counts as done: its processes take milliseconds,
/// and one that takes longer waits in the kernel, for a disk most likely, and will never run again.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to clean up after a sandbox: the first, and the longest.
const CLEAN_PAUSE: Duration = Duration::from_millis(5);
const CLEAN_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long cleaning up may take before it is reported.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a create that failed may take to clean up behind itself before it is answered.
const FAILED_START_TIMEOUT: Duration = Duration::from_secs(2);

/// A sandbox as the rest of the node sees it.
#[derive(Debug)]
pub(crate) struct Owned {
    id: SandboxId,
    disk: DiskId,
    sandbox: Arc<dyn Sandbox>,
    /// Turns true when the sandbox begins to end.
    ending: watch::Sender<bool>,
    /// Turns true when none of its processes runs any more.
    ended: watch::Sender<bool>,
    journal: Journal,
    /// Processes that the kernel had killed for want of memory when it was looked last; unknown before the first look
    /// at a sandbox that ran already.
    memory_kills: Mutex<Option<u64>>,
    /// It ran already when this platform was started.
    is_adopted: bool,
}

impl Owned {
    /// A sandbox that has just been made.
    pub(crate) fn fresh(id: SandboxId, disk: DiskId, sandbox: Arc<dyn Sandbox>, journal: Journal) -> Self {
        Self::new(id, disk, sandbox, journal, Some(0))
    }

    /// A sandbox of an earlier platform.
    pub(crate) fn adopted(id: SandboxId, disk: DiskId, sandbox: Arc<dyn Sandbox>, journal: Journal) -> Self {
        let kills = sandbox.memory_kills().ok();
        Self {
            is_adopted: true,
            ..Self::new(id, disk, sandbox, journal, kills)
        }
    }

    fn new(
        id: SandboxId,
        disk: DiskId,
        sandbox: Arc<dyn Sandbox>,
        journal: Journal,
        memory_kills: Option<u64>,
    ) -> Self {
        Self {
            id,
            disk,
            sandbox,
            ending: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            journal,
            memory_kills: Mutex::new(memory_kills),
            is_adopted: false,
        }
    }

    /// Writes down if the kernel has killed processes for want of memory since the last look. Takes some 10 µs.
    pub(crate) fn note_memory_kills(&self) {
        let mut noted = self.memory_kills.lock();
        let Ok(kills) = self.sandbox.memory_kills() else { return };
        let before = noted.replace(kills).unwrap_or(kills);
        if kills > before {
            let message = "the sandbox had used up its memory, and the kernel killed processes of it";
            let fields = [
                ("event_type", "out_of_memory".to_owned()),
                ("killed", (kills - before).to_string()),
            ];
            self.journal.host(Level::Warn, message, fields);
        }
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    pub(crate) fn sandbox(&self) -> &Arc<dyn Sandbox> {
        &self.sandbox
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    pub(crate) fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    pub(crate) fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Asks for the end and waits until nothing runs any more. Any number of callers may.
    pub(crate) async fn kill(&self) {
        let mut ended = self.ended.subscribe();
        self.ending.send_replace(true);
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// Starts a sandbox and introduces its agent. On an error nothing of it runs, and what is left of it is removed, here or
/// soon after.
pub(crate) async fn start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    request: &StartSandbox,
) -> Result<(Arc<Owned>, Control, StartedSandbox), NodeError> {
    let driver = Arc::clone(&shared.driver);
    let (id, disk, resources) = (request.id.clone(), new_disk().map_err(failed)?, request.resources);
    let to_start = StartRequest {
        id: id.clone(),
        rootfs: rootfs(&request.image),
        disk: disk.clone(),
        resources,
    };
    // Waits for its turn here, where it costs no thread: those are few and everybody's.
    let turn = shared.starts.acquire().await.map_err(failed)?;
    let started = blocking(move || driver.start(&to_start)).await;
    drop(turn);
    let started = match started.unwrap_or_else(|panicked| Err(StartError::Failed(panicked))) {
        Ok(started) => started,
        Err(StartError::Full) => return Err(NodeError::Capacity(StartError::Full.to_string())),
        Err(error @ StartError::Exists(_)) => return Err(failed(error)),
        Err(StartError::Failed(error)) => {
            clean_failed_start(shared, tasks, id, disk).await;
            return Err(failed(error));
        }
    };
    let before_init = Instant::now();
    let introduce = async {
        let mut control = Control::open(started.boot).await?;
        let version = control.init(&request.init).await?;
        io::Result::Ok((control, version))
    };
    match introduce.await {
        Ok((control, agent_version)) => {
            let stages = started.stages.into_iter().map(|(name, took)| Stage::new(name, took));
            let init = Stage::new("init", before_init.elapsed());
            let stages = stages.chain([init]).collect();
            let journal = Journal::new(id.clone(), Arc::clone(&shared.reports));
            let fields = [
                ("event_type", "sandbox_start".to_owned()),
                ("template_id", request.template.to_string()),
                ("cpu_count", resources.cpu_count.to_string()),
                ("memory_mb", resources.memory_mb.to_string()),
                ("disk_mb", resources.disk_mb.to_string()),
            ];
            journal.host(Level::Info, "the sandbox started", fields);
            let owned = Arc::new(Owned::fresh(id, disk, started.sandbox, journal));
            Ok((owned, control, StartedSandbox { agent_version, stages }))
        }
        Err(error) => {
            end(&id, &started.sandbox).await;
            clean_failed_start(shared, tasks, id, disk).await;
            Err(NodeError::Failed(Failure::during("the agent did not answer", &error)))
        }
    }
}

/// The id of a disk that is to be made.
fn new_disk() -> io::Result<DiskId> {
    let mut random = [0; 20];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(DiskId::from_random(&random))
}

/// What the file system of an image consists of on this host.
fn rootfs(image: &Image) -> Rootfs {
    match image {
        Image::Base => Rootfs::base(),
    }
}

/// Owns a sandbox until nothing of it is left, or until the platform stops.
pub(crate) async fn supervise(
    shared: Arc<Shared>,
    owned: Arc<Owned>,
    control: Option<Control>,
    stop: CancellationToken,
) {
    let mut asked = owned.ending();
    let died = tokio::select! {
        biased;
        _ = asked.wait_for(|ending| *ending) => false,
        () = until_dead(&owned.sandbox) => true,
        () = follow_events(&shared, &owned, control) => true,
        () = stop.cancelled() => return,
    };
    owned.ending.send_replace(true);
    if died {
        shared.reports.end(NodeEvent::Ending(owned.id.clone()));
    }
    end(&owned.id, &owned.sandbox).await;
    shared.sandboxes.lock().remove(&owned.id);
    owned.ended.send_replace(true);
    let fields = [("event_type", "sandbox_end".to_owned())];
    if !died {
        owned.journal.host(Level::Info, "the sandbox was ended", fields);
    } else {
        tracing::info!(sandbox.id = %owned.id, "the sandbox ended by itself");
        owned.journal.host(
            Level::Error,
            "the sandbox ended by itself: its first process is gone",
            fields,
        );
        shared.reports.end(NodeEvent::Exited(owned.id.clone()));
    }
    let (id, disk) = (owned.id.clone(), owned.disk.clone());
    drop(owned);
    clean(&shared, &id, &disk).await;
}

/// Kills a sandbox and waits until nothing of it runs any more, or until it is clear that something waits in the kernel.
pub(crate) async fn end(id: &SandboxId, sandbox: &Arc<dyn Sandbox>) {
    sandbox.kill();
    if tokio::time::timeout(KILL_TIMEOUT, until_dead(sandbox)).await.is_err() {
        tracing::error!(
            sandbox.id = %id,
            "processes of a sandbox were killed and do not end; the kernel waits for something, a disk most likely"
        );
    }
}

/// Removes what a failed start left, and waits for that, but not for ever.
async fn clean_failed_start(shared: &Arc<Shared>, tasks: &TaskTracker, id: SandboxId, disk: DiskId) {
    let shared = Arc::clone(shared);
    let cleaning = tasks.spawn(async move { clean(&shared, &id, &disk).await });
    let _ = tokio::time::timeout(FAILED_START_TIMEOUT, cleaning).await;
}

/// Removes what a dead sandbox left, its disk included. The kernel lets go of some of it a moment after the last process;
/// where it does not, this goes on until the platform stops, and nothing of what the sandbox had is used again.
pub(crate) async fn clean(shared: &Arc<Shared>, id: &SandboxId, disk: &DiskId) {
    let mut disk = Some(disk.clone());
    let since = Instant::now();
    let mut reported = false;
    let mut pause = CLEAN_PAUSE;
    loop {
        let (driver, id_to_clean, disk) = (Arc::clone(&shared.driver), id.clone(), disk.take());
        let cleaned = move || {
            if let Some(Err(error)) = disk.map(|disk| driver.remove_disk(&disk)) {
                tracing::warn!(sandbox.id = %id_to_clean, "remove the disk of an ended sandbox: {error}");
            }
            driver.clean(&id_to_clean)
        };
        if blocking(cleaned).await.unwrap_or(false) {
            if reported {
                tracing::info!(sandbox.id = %id, "what was left of an ended sandbox is gone");
            }
            return;
        }
        if since.elapsed() > CLEAN_TIMEOUT {
            if !reported {
                reported = true;
                tracing::error!(
                    sandbox.id = %id,
                    "processes of an ended sandbox do not go away; what it had stays in use until they do"
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
        reason = "its successor is unsafe to call, and an OwnedFd keeps every promise it asks for"
    )]
    let watched = |fd| AsyncFd::with_interest(fd, Interest::READABLE);
    let watched = sandbox.ended().try_clone_to_owned().and_then(watched);
    match watched {
        Ok(fd) => {
            let _ = fd.readable().await;
        }
        Err(error) => {
            tracing::error!("watch a sandbox: {error}");
            std::future::pending().await
        }
    }
}

/// Listens to the agent for the log's sake, and gives the sandbox a new spawner whenever its own has ended. Runs for
/// ever.
async fn follow_events(shared: &Arc<Shared>, owned: &Arc<Owned>, mut control: Option<Control>) {
    let mut budget = events::Budget::new(tokio::time::Instant::now());
    let mut failures = 0u32;
    loop {
        let followed = async {
            let mut control = match control.take() {
                Some(control) => control,
                None => connect_control(owned).await?,
            };
            let body = control.events().await?;
            events::follow(body, &owned.journal, &mut budget, || owned.note_memory_kills()).await
        };
        match followed.await {
            Ok(()) if replace_spawner(shared, owned).await => failures = failures.saturating_sub(1),
            Ok(()) => failures = (failures + 1).min(RETRY_DOUBLINGS),
            Err(error) => tracing::debug!(sandbox.id = %owned.id, "listen to the agent: {error}"),
        }
        tokio::time::sleep(RETRY * (1 << failures)).await;
    }
}

/// Gives a sandbox a new spawner, and whether it has one now.
async fn replace_spawner(shared: &Arc<Shared>, owned: &Arc<Owned>) -> bool {
    tracing::warn!(sandbox.id = %owned.id, "the spawner ended, starting another");
    // First the reason, if it was this one.
    owned.note_memory_kills();
    let message = "the process that starts commands is gone and is replaced";
    let fields = [("event_type", "spawner_replaced".to_owned())];
    owned.journal.host(Level::Warn, message, fields);
    let Ok(_turn) = shared.respawns.acquire().await else {
        return false;
    };
    let sandbox = Arc::clone(&owned.sandbox);
    let replaced = blocking(move || sandbox.respawn()).await;
    if let Ok(Err(error)) | Err(error) = &replaced {
        tracing::warn!(sandbox.id = %owned.id, "start a spawner: {error}");
        let message = "the process that starts commands could not be replaced; the next attempt follows";
        let fields = [("event_type", "spawner_failed".to_owned())];
        owned.journal.host(Level::Error, message, fields);
    }
    matches!(replaced, Ok(Ok(())))
}

/// Opens a control connection to the agent of a sandbox that runs already.
async fn connect_control(owned: &Arc<Owned>) -> io::Result<Control> {
    let socket = owned.sandbox.control()?;
    tokio::time::timeout(AGENT_TIMEOUT, Control::open(socket)).await?
}
