//! The handle of a sandbox: what the node knows of one that runs or stands still, and through which all parts use it.
//!
//! Its supervisor (`supervisor`) notes here how far its end is; others ask for the end, and wait for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use model::id::{DiskId, SandboxId};
use model::log::Level;
use model::network::{Cidr, EgressPolicy};
use model::secret::Secret;
use parking_lot::Mutex;
use proxy::egress::Attachment;
use runtime::driver::Sandbox;
use tokio::sync::{OwnedMutexGuard, watch};

use crate::log_writer::LogWriter;
use crate::work::blocking;

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
    /// True while it is frozen for a checkpoint: it has no spawner, and its agent may wait for the host.
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
        egress: Option<Attachment>,
        authority: Option<Secret>,
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

    /// Cuts its connections to the outside, until the next policy.
    pub(crate) fn close_egress(&self) {
        self.set_egress(closed());
    }

    /// Cuts its connections to the outside while its processes are stopped and written to disk, until the next policy.
    pub(crate) fn hold_egress(&self) {
        if let Some(egress) = &*self.egress.lock() {
            egress.hold(closed());
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

    /// Whether it is frozen, now and later.
    pub(crate) fn frozen(&self) -> watch::Receiver<bool> {
        self.frozen.subscribe()
    }

    /// Whether it is frozen: paused, or kept ready.
    pub(crate) fn is_frozen(&self) -> bool {
        *self.frozen.borrow()
    }

    /// Notes whether it is at rest: frozen for a checkpoint. Returns whether it was.
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

    /// Notes that it begins to end, ends a limit of its processor time, and cuts its connections to the outside. Only for its
    /// supervisor, like what follows.
    pub(crate) fn begin_end(&self) {
        self.ending.send_replace(true);
        self.hurry();
        drop(self.egress.lock().take());
    }

    /// Notes that no process of it is left.
    pub(crate) fn set_ended(&self) {
        self.ended.send_replace(true);
    }

    /// Its disk, unless that is kept.
    pub(crate) fn disk_to_remove(&self) -> Option<&DiskId> {
        (!self.keeps_disk.load(Ordering::SeqCst)).then_some(&self.disk)
    }

    /// Where it is noted that nothing of it is left on the host but a disk that is kept. Outlives the handle.
    pub(crate) fn cleaning(&self) -> Arc<watch::Sender<bool>> {
        Arc::clone(&self.cleaned)
    }

    /// Notes whether the events of its agent are followed.
    pub(crate) fn set_following(&self, following: bool) {
        self.following.send_replace(following);
    }

    /// How often it got a new spawner.
    pub(crate) fn respawns(&self) -> u64 {
        self.respawns.load(Ordering::SeqCst)
    }
}

/// The policy of a paused sandbox: all connections are cut, and none is made.
pub(crate) fn closed() -> EgressPolicy {
    EgressPolicy {
        deny: vec![Cidr::ALL],
        default_allow: Some(false),
        ..EgressPolicy::default()
    }
}

/// The seed of the authority of a sandbox with this policy.
pub(crate) fn authority_of(policy: &EgressPolicy) -> Option<&Secret> {
    policy.interception.as_ref().map(|interception| &interception.ca_seed)
}
