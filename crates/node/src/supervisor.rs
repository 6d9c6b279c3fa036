//! The task that supervises a sandbox, and the handle through which others use it.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use model::id::{BuildId, DiskId, SandboxId, TemplateId};
use model::log::Level;
use model::network::EgressPolicy;
use model::resources::Resources;
use model::secret::Secret;
use parking_lot::Mutex;
use protocol::agent::Init;
use protocol::node::{Failure, Image, NodeError, NodeEvent, Stage, StartedSandbox};
use proxy::egress::{Attachment, authority_certificate};
use runtime::driver::{Sandbox, StartDisk, StartError, StartRequest};
use runtime::rootfs::Rootfs;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::control::{AGENT_TIMEOUT, Control};
use crate::kept_disks::remove_disk;
use crate::log_writer::LogWriter;
use crate::restores::Turn;
use crate::work::{blocking, failed};
use crate::{Shared, egress, events, images};

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
/// How long a failed create request waits for cleanup before it is answered.
const FAILED_START_TIMEOUT: Duration = Duration::from_secs(2);
/// The same where the sandbox is started from its files next, with the same id.
const FAILED_RESTORE_TIMEOUT: Duration = Duration::from_secs(10);

/// Handle of a running sandbox.
#[derive(Debug)]
pub(crate) struct SandboxHandle {
    id: SandboxId,
    disk: DiskId,
    sandbox: Arc<dyn Sandbox>,
    /// Becomes true when the sandbox begins to end.
    ending: watch::Sender<bool>,
    /// Becomes true when no process of it is left.
    ended: watch::Sender<bool>,
    /// Becomes true when nothing of it is left on the host but a disk that is kept. Outlives the handle.
    cleaned: Arc<watch::Sender<bool>>,
    log: LogWriter,
    /// Processes that the kernel had killed for lack of memory at the last check; `None` before the first check of an
    /// adopted sandbox.
    memory_kills: Mutex<Option<u64>>,
    /// Its connection to the gateway; none where it has no network, and once it begins to end.
    egress: Mutex<Option<Attachment>>,
    /// Whether it was started by an earlier platform.
    is_adopted: bool,
    /// Whether its disk is kept after its end, for a commit or a pause.
    keeps_disk: AtomicBool,
    /// Whether the events of its agent are followed.
    following: watch::Sender<bool>,
    /// Whether it is frozen, so that its agent does not respond.
    frozen: watch::Sender<bool>,
    /// Whether it stands still only until it is copied: streams into it wait.
    copied: AtomicBool,
    /// Whether its processor time is limited for the processes that it creates.
    throttled: Mutex<bool>,
    /// Whether it is frozen, and was brought to rest to be written: it has no spawner, and its agent may wait for the host.
    at_rest: AtomicBool,
    /// Held while it is paused or resumed, or gets a new spawner.
    changing: Arc<tokio::sync::Mutex<()>>,
    /// How often it got a new spawner.
    respawns: AtomicU64,
    /// The seed of the authority whose certificate its agent got at the start.
    authority: Option<Secret>,
}

impl SandboxHandle {
    /// A sandbox that was just started.
    pub(crate) fn fresh(
        id: SandboxId,
        disk: DiskId,
        sandbox: Arc<dyn Sandbox>,
        (egress, authority): (Option<Attachment>, Option<Secret>),
        log: LogWriter,
    ) -> Self {
        Self {
            memory_kills: Mutex::new(Some(0)),
            authority,
            ..Self::new(id, disk, sandbox, egress, log)
        }
    }

    /// A sandbox of an earlier platform.
    pub(crate) fn adopted(
        id: SandboxId,
        disk: DiskId,
        sandbox: Arc<dyn Sandbox>,
        egress: Option<Attachment>,
        log: LogWriter,
    ) -> Self {
        Self {
            memory_kills: Mutex::new(sandbox.memory_kills().ok()),
            is_adopted: true,
            ..Self::new(id, disk, sandbox, egress, log)
        }
    }

    fn new(id: SandboxId, disk: DiskId, sandbox: Arc<dyn Sandbox>, egress: Option<Attachment>, log: LogWriter) -> Self {
        Self {
            id,
            disk,
            sandbox,
            ending: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            cleaned: Arc::new(watch::Sender::new(false)),
            log,
            memory_kills: Mutex::default(),
            egress: Mutex::new(egress),
            is_adopted: false,
            keeps_disk: AtomicBool::new(false),
            following: watch::Sender::new(false),
            frozen: watch::Sender::new(false),
            copied: AtomicBool::new(false),
            throttled: Mutex::default(),
            at_rest: AtomicBool::new(false),
            changing: Arc::default(),
            respawns: AtomicU64::new(0),
            authority: None,
        }
    }

    /// Writes a log entry if the kernel has killed processes for lack of memory since the last check. Takes about 10
    /// µs.
    pub(crate) fn note_memory_kills(&self) {
        let mut noted = self.memory_kills.lock();
        let Ok(kills) = self.sandbox.memory_kills() else { return };
        let before = noted.replace(kills).unwrap_or(kills);
        if kills > before {
            let message = "the sandbox ran out of memory, and the kernel killed processes in it";
            let fields = [
                ("event_type", "out_of_memory".to_owned()),
                ("killed", (kills - before).to_string()),
            ];
            self.log.host(Level::Warn, message, fields);
        }
    }

    /// Changes what the sandbox may reach.
    pub(crate) fn set_egress(&self, policy: EgressPolicy) {
        if let Some(egress) = &*self.egress.lock() {
            egress.set_policy(policy);
        }
    }

    /// Cuts its connections to the outside while its processes are stopped and written to disk, until the next policy.
    pub(crate) fn hold_egress(&self, policy: EgressPolicy) {
        if let Some(egress) = &*self.egress.lock() {
            egress.hold(policy);
        }
    }

    /// Limits the processor time of its workload, or ends that.
    ///
    /// # Errors
    /// When the sandbox is gone.
    pub(crate) fn limit_cpu(&self, milli_cores: Option<u32>) -> io::Result<()> {
        let mut throttled = self.throttled.lock();
        if milli_cores.is_some() && self.is_ending() {
            return Ok(());
        }
        self.sandbox.limit_cpu(milli_cores)?;
        *throttled = milli_cores.is_some();
        Ok(())
    }

    /// Ends a limit of the processor time, with which its processes would take long to exit.
    fn hurry(&self) {
        let mut throttled = self.throttled.lock();
        if std::mem::take(&mut *throttled)
            && let Err(error) = self.sandbox.limit_cpu(None)
        {
            tracing::debug!(sandbox.id = %self.id, "end the limit of the processor time: {error}");
        }
    }

    /// What the sandbox may reach; none where it has no network.
    pub(crate) fn egress(&self) -> Option<EgressPolicy> {
        self.egress.lock().as_ref().map(Attachment::policy)
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    pub(crate) fn disk(&self) -> &DiskId {
        &self.disk
    }

    pub(crate) fn cleaned(&self) -> watch::Receiver<bool> {
        self.cleaned.subscribe()
    }

    pub(crate) fn sandbox(&self) -> &Arc<dyn Sandbox> {
        &self.sandbox
    }

    pub(crate) fn log(&self) -> &LogWriter {
        &self.log
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

    /// Ends the sandbox, unless it is ending already, and waits until no process is left. Returns its disk, which the
    /// caller then removes.
    pub(crate) async fn end_and_keep_disk(&self) -> Option<&DiskId> {
        if !self.begin_end_and_keep_disk() {
            return None;
        }
        self.kill().await;
        Some(&self.disk)
    }

    /// Requests the end of the sandbox, but not of its disk; `false` if it is ending already.
    pub(crate) fn begin_end_and_keep_disk(&self) -> bool {
        self.ending.send_if_modified(|ending| {
            let is_first = !*ending;
            if is_first {
                // Before the end is known to any other.
                self.keeps_disk.store(true, Ordering::SeqCst);
                *ending = true;
            }
            is_first
        })
    }

    /// Whether its agent got the certificate of the authority of this policy at the start.
    pub(crate) fn trusts(&self, policy: &EgressPolicy) -> bool {
        authority_of(policy) == self.authority.as_ref()
    }

    /// Whether the events of its agent are followed.
    pub(crate) fn following(&self) -> watch::Receiver<bool> {
        self.following.subscribe()
    }

    /// Notes whether it is frozen. Returns whether it was.
    pub(crate) fn set_frozen(&self, frozen: bool) -> bool {
        self.frozen.send_replace(frozen)
    }

    /// Whether it is frozen: paused, or kept ready.
    pub(crate) fn is_frozen(&self) -> bool {
        *self.frozen.borrow()
    }

    /// Notes whether it is frozen and was brought to rest to be written. Returns whether it was.
    pub(crate) fn set_at_rest(&self, at_rest: bool) -> bool {
        self.at_rest.swap(at_rest, Ordering::SeqCst)
    }

    /// Notes whether it stands still for a copy: it is frozen, and streams into it wait in the kernel's queues.
    pub(crate) fn set_copied(&self, copied: bool) {
        self.copied.store(copied, Ordering::SeqCst);
        self.frozen.send_replace(copied);
    }

    /// Whether streams into it can be opened.
    pub(crate) fn takes_streams(&self) -> bool {
        !self.is_frozen() || self.copied.load(Ordering::SeqCst)
    }

    /// Waits until it is neither paused, resumed, nor given a spawner, and keeps others from doing so.
    pub(crate) async fn change(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.changing).lock_owned().await
    }

    /// Gives it a new spawner in the place of the one that it has or had. Only for who changes it.
    pub(crate) async fn respawn(&self) -> io::Result<()> {
        let sandbox = Arc::clone(&self.sandbox);
        blocking(move || sandbox.respawn()).await??;
        self.respawns.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Requests the end and waits until no process is left. May be called any number of times.
    pub(crate) async fn kill(&self) {
        let mut ended = self.ended.subscribe();
        self.ending.send_replace(true);
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// A sandbox to start.
#[derive(Debug)]
pub(crate) struct Begin<'a> {
    pub(crate) id: &'a SandboxId,
    pub(crate) template: &'a TemplateId,
    pub(crate) disk: StartDisk,
    /// The turn to restore its processes from their image, if they are restored.
    pub(crate) restore: Option<Turn>,
    /// The sandbox of which it is a copy.
    pub(crate) forked_from: Option<&'a SandboxId>,
    /// The snapshot of which it is a copy.
    pub(crate) snapshot: Option<&'a BuildId>,
    pub(crate) resources: Resources,
    pub(crate) init: &'a Init,
    pub(crate) egress: &'a EgressPolicy,
}

/// The new disk of a sandbox with this image.
pub(crate) fn new_disk(image: &Image) -> Result<StartDisk, NodeError> {
    Ok(StartDisk::New {
        disk: random_disk().map_err(failed)?,
        rootfs: rootfs(image)?,
    })
}

/// Starts a sandbox and gives its agent the identity. On an error nothing of it runs, and what is left is removed here
/// or soon after, except a disk that was kept.
pub(crate) async fn start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    begin: Begin<'_>,
) -> Result<(Arc<SandboxHandle>, Control, StartedSandbox), NodeError> {
    let driver = Arc::clone(&shared.driver);
    let (id, disk, resources) = (begin.id.clone(), begin.disk.id().clone(), begin.resources);
    let new_disk = matches!(begin.disk, StartDisk::New { .. }).then(|| disk.clone());
    let clean_timeout = match begin.snapshot {
        Some(_) => FAILED_RESTORE_TIMEOUT,
        None => FAILED_START_TIMEOUT,
    };
    let message = match &begin.disk {
        StartDisk::New { .. } => "sandbox started",
        StartDisk::Kept(_) if begin.forked_from.is_some() => "sandbox started as a fork of another one",
        StartDisk::Kept(_) if begin.snapshot.is_some() => "sandbox started with the processes of its snapshot",
        StartDisk::Kept(_) if begin.restore.is_some() => "sandbox resumed with its processes",
        StartDisk::Kept(_) => "sandbox started anew on its disk",
    };
    let restore = begin.restore.is_some();
    let start_request = StartRequest {
        id: id.clone(),
        disk: begin.disk,
        resources,
        restore,
    };
    // Waits here, where waiting occupies no thread: blocking threads are few and shared. One that is restored has its turn.
    let permit = match restore {
        true => None,
        false => Some(shared.starts.acquire().await.map_err(failed)?),
    };
    let started = blocking(move || driver.start(&start_request)).await;
    drop((permit, begin.restore));
    let started = match started.unwrap_or_else(|panicked| Err(StartError::Failed(panicked))) {
        Ok(started) => started,
        Err(StartError::Full) => return Err(NodeError::Capacity(StartError::Full.to_string())),
        Err(error @ StartError::Exists(_)) => return Err(failed(error)),
        Err(StartError::NoLayer(layer)) => return Err(NodeError::NoLayer(layer)),
        Err(StartError::Unrestorable(why)) => return Err(NodeError::Refused(why)),
        Err(StartError::Failed(error)) => {
            clean_failed_start(shared, tasks, (id, new_disk), clean_timeout).await;
            return Err(failed(error));
        }
    };
    let before_init = Instant::now();
    let init = async {
        let mut control = Control::open(started.boot).await?;
        let identity = init_of(shared, begin.init, begin.egress)?;
        let version = control.init(&identity).await?;
        started.sandbox.settle()?;
        io::Result::Ok((control, version))
    };
    // While the agent is set up, in a thread because of some system calls.
    let attach = {
        let (shared, id, sandbox) = (Arc::clone(shared), id.clone(), Arc::clone(&started.sandbox));
        let policy = begin.egress.clone();
        blocking(move || egress::attach(&shared, &id, &*sandbox, policy))
    };
    let attach = async {
        attach
            .await?
            .map_err(|error| io::Error::new(error.kind(), format!("network: {error}")))
    };
    let begun = async {
        let begun = tokio::try_join!(init, attach)?;
        if restore {
            // The workload continues last, when the network and the agent are as they should be.
            let (driver, id, disk) = (Arc::clone(&shared.driver), id.clone(), disk.clone());
            let sandbox = Arc::clone(&started.sandbox);
            blocking(move || images::let_continue(&*driver, &id, &disk, &*sandbox)).await??;
        }
        io::Result::Ok(begun)
    };
    match begun.await {
        Ok(((control, agent_version), egress)) => {
            let stages = started.stages.into_iter().map(|(name, took)| Stage::new(name, took));
            let init_stage = Stage::new("init", before_init.elapsed());
            let stages = stages.chain([init_stage]).collect();
            let log = LogWriter::new(id.clone(), Arc::clone(&shared.journal));
            let mut fields = vec![
                ("event_type", "sandbox_start".to_owned()),
                ("template_id", begin.template.to_string()),
                ("cpu_count", resources.cpu_count.to_string()),
                ("memory_mb", resources.memory_mb.to_string()),
                ("disk_mb", resources.disk_mb.to_string()),
            ];
            fields.extend(begin.forked_from.map(|parent| ("parent_id", parent.to_string())));
            fields.extend(begin.snapshot.map(|build| ("build_id", build.to_string())));
            log.host(Level::Info, message, fields);
            let network = (egress, authority_of(begin.egress).cloned());
            let handle = Arc::new(SandboxHandle::fresh(id, disk, started.sandbox, network, log));
            let started = StartedSandbox {
                agent_version,
                stages,
                is_restored: false,
            };
            Ok((handle, control, started))
        }
        Err(error) => {
            end(&id, &started.sandbox).await;
            clean_failed_start(shared, tasks, (id, new_disk), clean_timeout).await;
            Err(NodeError::Failed(Failure::during("the agent did not respond", &error)))
        }
    }
}

/// What the agent is told, with the certificate of the sandbox's authority, which programs trust from the start, because
/// rules may come at any time, and with those of the operator. Sandboxes of builds have only the latter.
pub(crate) fn init_of<'a>(shared: &Shared, init: &'a Init, egress: &EgressPolicy) -> io::Result<Cow<'a, Init>> {
    let own = authority_of(egress).map(authority_certificate);
    let own = own.transpose().map_err(io::Error::other)?.unwrap_or_default();
    let bundle = own + &shared.authorities;
    Ok(match bundle.is_empty() {
        true => Cow::Borrowed(init),
        false => Cow::Owned(Init {
            ca_bundle: Some(bundle),
            ..init.clone()
        }),
    })
}

/// The seed of the authority of a sandbox with this policy.
fn authority_of(policy: &EgressPolicy) -> Option<&Secret> {
    policy.interception.as_ref().map(|interception| &interception.ca_seed)
}

/// A random id for a new disk.
pub(crate) fn random_disk() -> io::Result<DiskId> {
    let mut random = [0; 20];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(DiskId::from_random(&random))
}

/// The rootfs of an image on this host.
fn rootfs(image: &Image) -> Result<Rootfs, NodeError> {
    match image {
        Image::Base => Ok(Rootfs::base()),
        Image::Import => Ok(Rootfs::import()),
        Image::Layers { layers, .. } if layers.len() > Image::LAYERS_MAX => Err(too_deep(layers.len())),
        Image::Copy { to, from } => match to.layers.len().max(from.layers.len()) {
            depth if depth > Image::LAYERS_MAX => Err(too_deep(depth)),
            _ => Ok(Rootfs::copy(to, from)),
        },
        Image::Layers { base: true, layers } => Ok(Rootfs::above_base(layers)),
        Image::Layers { base: false, layers } => Ok(Rootfs::without_base(layers)),
    }
}

fn too_deep(layers: usize) -> NodeError {
    NodeError::failed(format!(
        "an image of {layers} layers: the maximum is {}",
        Image::LAYERS_MAX
    ))
}

/// Supervises a sandbox until nothing of it is left, or until the platform stops.
pub(crate) async fn supervise(
    shared: Arc<Shared>,
    handle: Arc<SandboxHandle>,
    control: Option<Control>,
    stop: CancellationToken,
) {
    let mut requested = handle.ending();
    let died = tokio::select! {
        biased;
        _ = requested.wait_for(|ending| *ending) => false,
        () = until_dead(&handle.sandbox) => true,
        () = follow_events(&shared, &handle, control) => true,
        () = stop.cancelled() => return,
    };
    handle.ending.send_replace(true);
    handle.hurry();
    drop(handle.egress.lock().take());
    if died {
        shared.journal.end(NodeEvent::Ending(handle.id.clone()));
    }
    end(&handle.id, &handle.sandbox).await;
    shared.sandboxes.lock().remove(&handle.id);
    handle.ended.send_replace(true);
    let fields = [("event_type", "sandbox_end".to_owned())];
    if !died {
        handle.log.host(Level::Info, "sandbox ended", fields);
    } else {
        tracing::info!(sandbox.id = %handle.id, "sandbox ended by itself");
        handle.log.host(
            Level::Error,
            "sandbox ended by itself: its agent process exited",
            fields,
        );
        shared.journal.end(NodeEvent::Exited(handle.id.clone()));
    }
    let id = handle.id.clone();
    let disk = (!handle.keeps_disk.load(Ordering::SeqCst)).then(|| handle.disk.clone());
    let cleaned = Arc::clone(&handle.cleaned);
    drop(handle);
    clean(&shared, &id, disk).await;
    cleaned.send_replace(true);
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

/// Removes what a failed start left, and waits for that for some time.
async fn clean_failed_start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    (id, disk): (SandboxId, Option<DiskId>),
    timeout: Duration,
) {
    let shared = Arc::clone(shared);
    let cleaning = tasks.spawn(async move { clean(&shared, &id, disk).await });
    let _ = tokio::time::timeout(timeout, cleaning).await;
}

/// Removes what an ended sandbox left, and its disk if one is given. The kernel releases some of it only some time after the last
/// process exited. Where it does not, this retries until the platform stops, and its slot is not reused.
pub(crate) async fn clean(shared: &Arc<Shared>, id: &SandboxId, mut disk: Option<DiskId>) {
    let since = Instant::now();
    let mut reported = false;
    let mut pause = CLEAN_PAUSE;
    loop {
        let (driver, id_to_clean, disk) = (Arc::clone(&shared.driver), id.clone(), disk.take());
        let clean = move || {
            if let Some(Err(error)) = disk.map(|disk| remove_disk(&*driver, &id_to_clean, &disk)) {
                tracing::warn!(sandbox.id = %id_to_clean, "remove the disk of an ended sandbox: {error}");
            }
            driver.clean(&id_to_clean)
        };
        if blocking(clean).await.unwrap_or(false) {
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
            tracing::error!("watch for the end of a sandbox: {error}");
            std::future::pending().await
        }
    }
}

/// Follows the events of the agent for the log, and replaces the spawner whenever it has ended. Never returns.
async fn follow_events(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>, mut control: Option<Control>) {
    let mut budget = events::Budget::new(tokio::time::Instant::now());
    let mut failures = 0u32;
    let mut frozen = handle.frozen.subscribe();
    loop {
        // A frozen agent accepts no connection, and each attempt would stay in its queue.
        let _ = frozen.wait_for(|frozen| !*frozen).await;
        let followed = async {
            let mut control = match control.take() {
                Some(control) => control,
                None => connect_control(handle).await?,
            };
            let body = control.events().await?;
            handle.following.send_replace(true);
            events::follow(body, &handle.log, &mut budget, || handle.note_memory_kills()).await
        };
        let followed = followed.await;
        handle.following.send_replace(false);
        match followed {
            Ok(()) if replace_spawner(shared, handle).await => failures = failures.saturating_sub(1),
            Ok(()) => failures = (failures + 1).min(RETRY_DOUBLINGS),
            Err(error) => tracing::debug!(sandbox.id = %handle.id, "follow the agent's events: {error}"),
        }
        tokio::time::sleep(RETRY * (1 << failures)).await;
    }
}

/// Gives a sandbox a new spawner. Returns whether that worked.
async fn replace_spawner(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>) -> bool {
    if handle.is_frozen() {
        // It was ended by a pause, or will be reported again once the sandbox continues.
        return false;
    }
    let respawns = handle.respawns.load(Ordering::SeqCst);
    let Ok(_permit) = shared.respawns.acquire().await else {
        return false;
    };
    let _changing = handle.change().await;
    if handle.is_frozen() {
        // Reported again once it continues.
        return false;
    }
    if handle.respawns.load(Ordering::SeqCst) != respawns {
        // A pause that was undone has replaced it meanwhile.
        return true;
    }
    tracing::warn!(sandbox.id = %handle.id, "the spawner ended and is replaced");
    // First log the reason, in case it was a lack of memory.
    handle.note_memory_kills();
    let message = "the process that starts commands ended and is replaced";
    let fields = [("event_type", "spawner_replaced".to_owned())];
    handle.log.host(Level::Warn, message, fields);
    let replaced = handle.respawn().await;
    if let Err(error) = &replaced {
        tracing::warn!(sandbox.id = %handle.id, "replace the spawner: {error}");
        let message = "the process that starts commands could not be replaced; retrying";
        let fields = [("event_type", "spawner_failed".to_owned())];
        handle.log.host(Level::Error, message, fields);
    }
    replaced.is_ok()
}

/// Opens a control connection to the agent of a running sandbox.
pub(crate) async fn connect_control(handle: &Arc<SandboxHandle>) -> io::Result<Control> {
    let socket = handle.sandbox.control()?;
    tokio::time::timeout(AGENT_TIMEOUT, Control::open(socket)).await?
}
