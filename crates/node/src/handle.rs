//! The handle of a sandbox: what the node knows of one that runs or stands still, and through which all parts use it.
//!
//! Whoever pauses, resumes or copies a sandbox, or gives it a new spawner, has its turn ([`SandboxHandle::change`]): nothing
//! else does any of these meanwhile. Two things need no turn: its end, which anybody requests at any time and its supervisor
//! (`supervisor`) carries out, and what it may reach.
//!
//! Order of locks: the turn, then the limit of its processor time, then its [`Condition`]. The lock of its connection to
//! the gateway and that of its count of killed processes are taken alone. Nothing is awaited under any but the turn.

use std::io;
use std::sync::Arc;

use model::id::{DiskId, SandboxId};
use model::log::Level;
use model::network::{Cidr, EgressPolicy};
use model::secret::Secret;
use parking_lot::Mutex;
use protocol::node::Traffic;
use proxy::egress::Attachment;
use runtime::driver::Sandbox;
use tokio::sync::OwnedMutexGuard;

use crate::condition::Condition;
use crate::log_writer::{LogWriter, now_us};
use crate::work::blocking;

/// How a sandbox is connected.
#[derive(Debug)]
pub(crate) struct Network {
    /// Its connection to the gateway; none where it has no network.
    pub(crate) attachment: Option<Attachment>,
    /// Counts what it receives and sends.
    pub(crate) traffic: Arc<Traffic>,
}

impl Network {
    /// A sandbox that is connected to nothing, for now.
    pub(crate) fn unconnected() -> Self {
        Self {
            attachment: None,
            traffic: Arc::new(Traffic::new(now_us())),
        }
    }
}

/// Handle of a running sandbox.
#[derive(Debug)]
pub(crate) struct SandboxHandle {
    id: SandboxId,
    disk: DiskId,
    sandbox: Arc<dyn Sandbox>,
    condition: Condition,
    log: LogWriter,
    /// Processes that the kernel had killed for lack of memory at the last check; `None` before the first check of an
    /// adopted sandbox.
    memory_kills: Mutex<Option<u64>>,
    /// Its connection to the gateway; none where it has no network, and once it begins to end.
    egress: Mutex<Option<Attachment>>,
    /// Counts what it receives and sends.
    traffic: Arc<Traffic>,
    /// Whether it was started by an earlier platform.
    is_adopted: bool,
    /// Whether its processor time is limited for the processes that it creates.
    throttled: Mutex<bool>,
    /// Held while it is paused, resumed or copied, or gets a new spawner.
    changing: Arc<tokio::sync::Mutex<()>>,
    /// The seed of the authority whose certificate its agent got at the start.
    authority: Option<Secret>,
}

impl SandboxHandle {
    /// A sandbox that was just started.
    pub(crate) fn fresh(
        id: SandboxId,
        disk: DiskId,
        sandbox: Arc<dyn Sandbox>,
        network: Network,
        authority: Option<Secret>,
        log: LogWriter,
    ) -> Self {
        Self {
            memory_kills: Mutex::new(Some(0)),
            authority,
            ..Self::new(id, disk, sandbox, network, log)
        }
    }

    /// A sandbox of an earlier platform.
    pub(crate) fn adopted(
        id: SandboxId,
        disk: DiskId,
        sandbox: Arc<dyn Sandbox>,
        network: Network,
        log: LogWriter,
    ) -> Self {
        Self {
            memory_kills: Mutex::new(sandbox.memory_kills().ok()),
            is_adopted: true,
            ..Self::new(id, disk, sandbox, network, log)
        }
    }

    fn new(id: SandboxId, disk: DiskId, sandbox: Arc<dyn Sandbox>, network: Network, log: LogWriter) -> Self {
        let Network { attachment, traffic } = network;
        Self {
            id,
            disk,
            sandbox,
            condition: Condition::new(),
            log,
            memory_kills: Mutex::default(),
            egress: Mutex::new(attachment),
            traffic,
            is_adopted: false,
            throttled: Mutex::default(),
            changing: Arc::default(),
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
        if milli_cores.is_some() && self.condition.is_ending() {
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

    /// Counts what the sandbox receives and sends.
    pub(crate) const fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    pub(crate) fn disk(&self) -> &DiskId {
        &self.disk
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

    pub(crate) fn condition(&self) -> &Condition {
        &self.condition
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.condition.is_ending()
    }

    /// Ends the sandbox, unless it is ending already, and waits until no process is left. Returns its disk, which the
    /// caller then removes.
    pub(crate) async fn end_and_keep_disk(&self) -> Option<&DiskId> {
        if !self.condition.begin_end(true) {
            return None;
        }
        self.condition.until_ended().await;
        Some(&self.disk)
    }

    /// Whether its agent got the certificate of the authority of this policy at the start.
    pub(crate) fn trusts(&self, policy: &EgressPolicy) -> bool {
        authority_of(policy) == self.authority.as_ref()
    }

    /// Waits for the turn to pause, resume or copy it, or to give it a spawner.
    pub(crate) async fn change(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.changing).lock_owned().await
    }

    /// Gives it a new spawner in the place of the one that it has or had. Only for who changes it.
    pub(crate) async fn respawn(&self) -> io::Result<()> {
        let sandbox = Arc::clone(&self.sandbox);
        blocking(move || sandbox.respawn()).await??;
        self.condition.count_respawn();
        Ok(())
    }

    /// Requests the end and waits until no process is left. May be called any number of times.
    pub(crate) async fn kill(&self) {
        self.condition.begin_end(false);
        self.condition.until_ended().await;
    }

    /// Notes that it begins to end, ends a limit of its processor time, and cuts its connections to the outside. Only for its
    /// supervisor.
    pub(crate) fn begin_end(&self) {
        self.condition.begin_end(false);
        self.hurry();
        drop(self.egress.lock().take());
    }

    /// Its disk, unless that is kept.
    pub(crate) fn disk_to_remove(&self) -> Option<&DiskId> {
        (!self.condition.keeps_disk()).then_some(&self.disk)
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
