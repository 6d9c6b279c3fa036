//! The registry: the sandboxes of this server in memory, with their routes, tokens and states.
//!
//! Requests are served from it without the database. It follows the rows: an entry is added and removed with its row,
//! except that a sandbox gets no more traffic as soon as it begins to stop.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use model::id::{SandboxId, TeamId};
use model::lifecycle::{Kept, State, Transition};
use model::sandbox::LifecycleSpec;
use parking_lot::{Mutex, RwLock};
use proxy::ingress::Access;
use secrecy::SecretString;
use store::sandboxes::SandboxRow;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::backoff::BackOff;
use super::lifecycle::lifecycle_of;
use super::policy::spec_of;
use crate::admission::Admission;
use crate::admission::capacity::CapacityPermit;
use crate::admission::quota::{OverQuota, ResourceUse};

/// A sandbox in the registry.
#[derive(Debug)]
pub(crate) struct SandboxEntry {
    /// Its id.
    pub(crate) id: SandboxId,
    /// The owning team.
    pub(crate) team: TeamId,
    /// What it takes of its team's quota while it runs.
    share: ResourceUse,
    /// Whether its agent requires a token.
    is_secure: bool,
    /// The agent token.
    pub(crate) access_token: SecretString,
    /// What its traffic requires.
    traffic: Mutex<Arc<Access>>,
    /// Whether the node may have another policy than that of the row.
    is_policy_pending: AtomicBool,
    /// Serializes changes of the row.
    pub(crate) change_lock: tokio::sync::Mutex<()>,
    /// Held while a snapshot of it is made.
    pub(crate) snapshot_lock: tokio::sync::Mutex<()>,
    current: Mutex<EntryState>,
    stopped: watch::Sender<Option<StopOutcome>>,
    admission: Mutex<Option<Admission>>,
    /// As what it counts in the quota of its team.
    counted: Mutex<CountedAs>,
    /// The saved injection rules that it refers to.
    saved_rules: Mutex<BTreeSet<String>>,
    /// Whether a resume waits for the pause in progress.
    resume_wanted: watch::Sender<bool>,
    /// How many wait for it to be written to disk no further.
    waiting: watch::Sender<usize>,
    /// Its failed resumes with processes.
    pub(crate) resumes: BackOff,
    /// Its failed forks.
    pub(crate) forks: BackOff,
}

/// Someone waits for a sandbox to be written to disk no further, until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting<'a>(&'a SandboxEntry);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.send_modify(|waiting| *waiting -= 1);
    }
}

#[derive(Debug)]
struct EntryState {
    state: State,
    version: i64,
    end_us: i64,
    max_end_us: i64,
    lifecycle: LifecycleSpec,
    /// Until when it is kept while it is paused, in microseconds since the Unix epoch; none for any time.
    retained_until_us: Option<i64>,
    stop_failed: bool,
}

impl EntryState {
    fn apply(&mut self, transition: Transition) -> Option<State> {
        self.state = self.state.next(transition).ok()?;
        Some(self.state)
    }
}

/// As what a sandbox counts in the quota of its team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountedAs {
    /// As one that runs.
    Running,
    /// As one that is paused.
    Paused {
        /// What is kept of it.
        keep: Kept,
        /// Space that it takes on the disk of the host, in bytes.
        disk_bytes: u64,
    },
}

impl CountedAs {
    /// As what the sandbox of a row counts.
    pub(crate) fn of(row: &SandboxRow) -> Self {
        match row.state {
            State::Paused => Self::Paused {
                keep: row.kept.unwrap_or(Kept::Filesystem),
                disk_bytes: row.kept_bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
            },
            _ => Self::Running,
        }
    }

    /// What a sandbox that needs `share` while it runs takes of the quota of its team.
    pub(crate) fn share(self, share: ResourceUse) -> ResourceUse {
        match self {
            Self::Running => share,
            Self::Paused { keep, disk_bytes } => share.paused(keep, disk_bytes),
        }
    }
}

/// The outcome of ending a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopOutcome {
    /// Nothing of it runs any more.
    Gone,
    /// The node or the database failed; it will be retried.
    Failed,
}

/// The part that a caller has in ending a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopRole {
    /// The caller ends it.
    Begin,
    /// The caller ends it, as an earlier attempt failed.
    Retry,
    /// Another task is ending it; the caller may wait for that.
    Join,
    /// There is no running sandbox to end.
    Gone,
}

impl SandboxEntry {
    /// An entry for the sandbox of a row.
    pub(crate) fn new(
        row: &SandboxRow,
        admission: Admission,
        access_token: SecretString,
        traffic_token: Option<SecretString>,
    ) -> Arc<Self> {
        let network = spec_of(row).ok().flatten().unwrap_or_default();
        let traffic = Arc::new(Access {
            traffic_token,
            access_token: Some(access_token.clone()),
            mask_host: network.mask_request_host,
            https_ports: network.https_ports.into(),
            ending: CancellationToken::new(),
        });
        Arc::new(Self {
            id: row.id.clone(),
            team: row.team_id.clone(),
            share: ResourceUse::one_sandbox(row.cpu_count, row.memory_mb),
            is_secure: row.secure,
            access_token,
            traffic: Mutex::new(traffic),
            is_policy_pending: AtomicBool::new(false),
            change_lock: tokio::sync::Mutex::new(()),
            snapshot_lock: tokio::sync::Mutex::new(()),
            current: Mutex::new(EntryState {
                state: row.state,
                version: row.version,
                end_us: row.end_us,
                max_end_us: row.max_end_us,
                lifecycle: lifecycle_of(row),
                retained_until_us: None,
                stop_failed: false,
            }),
            stopped: watch::Sender::new(None),
            admission: Mutex::new(Some(admission)),
            counted: Mutex::new(CountedAs::of(row)),
            saved_rules: Mutex::default(),
            resume_wanted: watch::Sender::new(false),
            waiting: watch::Sender::new(0),
            resumes: BackOff::default(),
            forks: BackOff::default(),
        })
    }

    /// What its traffic requires.
    fn traffic(&self) -> Arc<Access> {
        Arc::clone(&self.traffic.lock())
    }

    /// Changes the ports whose servers speak TLS, for new requests.
    pub(crate) fn set_https_ports(&self, ports: Vec<u16>) {
        let mut traffic = self.traffic.lock();
        *traffic = Arc::new(Access {
            https_ports: ports.into(),
            ..Access::clone(&traffic)
        });
    }

    /// Notes whether the node may have another policy than that of the row.
    pub(crate) fn set_policy_pending(&self, is_pending: bool) {
        self.is_policy_pending.store(is_pending, Ordering::Release);
    }

    /// Whether the node may have another policy than that of the row.
    pub(crate) fn is_policy_pending(&self) -> bool {
        self.is_policy_pending.load(Ordering::Acquire)
    }

    /// Notes the saved injection rules that it refers to.
    pub(crate) fn set_saved_rules(&self, rules: BTreeSet<String>) {
        *self.saved_rules.lock() = rules;
    }

    /// Whether it refers to a saved injection rule.
    pub(crate) fn uses_rule(&self, id: &str) -> bool {
        self.saved_rules.lock().contains(id)
    }

    /// Whether it refers to any saved injection rule.
    pub(crate) fn uses_rules(&self) -> bool {
        !self.saved_rules.lock().is_empty()
    }

    /// The state in the lifecycle.
    pub(crate) fn state(&self) -> State {
        self.current.lock().state
    }

    /// The deadline, in microseconds since the Unix epoch.
    pub(crate) fn end_us(&self) -> i64 {
        self.current.lock().end_us
    }

    /// The latest deadline that an extension may set, in microseconds since the Unix epoch.
    pub(crate) fn max_end_us(&self) -> i64 {
        self.current.lock().max_end_us
    }

    /// What happens at its deadline.
    pub(crate) fn lifecycle(&self) -> LifecycleSpec {
        self.current.lock().lifecycle
    }

    /// The version of the row.
    pub(crate) fn version(&self) -> i64 {
        self.current.lock().version
    }

    /// Takes over the version and the deadline of a changed row.
    pub(crate) fn update(&self, version: i64, end_us: i64) {
        let mut current = self.current.lock();
        current.version = version;
        current.end_us = end_us;
    }

    /// Takes over its lifecycle settings.
    pub(crate) fn set_lifecycle(&self, lifecycle: LifecycleSpec) {
        self.current.lock().lifecycle = lifecycle;
    }

    /// Takes over a row with which a new run begins.
    pub(crate) fn follow(&self, row: &SandboxRow) {
        let mut current = self.current.lock();
        current.version = row.version;
        current.end_us = row.end_us;
        current.max_end_us = row.max_end_us;
        current.lifecycle = lifecycle_of(row);
    }

    /// Notes whether a resume waits for the pause in progress.
    pub(crate) fn want_resume(&self, is_wanted: bool) {
        self.resume_wanted.send_replace(is_wanted);
    }

    /// Waits until a resume waits for the pause in progress.
    pub(crate) async fn resume_wanted(&self) {
        // It ends with this entry only.
        let _ = self.resume_wanted.subscribe().wait_for(|is_wanted| *is_wanted).await;
    }

    /// Has it be written to disk no further, in the background, until the result is dropped.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        self.waiting.send_modify(|waiting| *waiting += 1);
        Waiting(self)
    }

    /// Whether someone waits for it to be written to disk no further.
    pub(crate) fn is_waited_for(&self) -> bool {
        *self.waiting.borrow() > 0
    }

    /// Waits until someone does.
    pub(crate) async fn until_waited_for(&self) {
        // It ends with this entry only.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }

    /// Cuts its streams: they are aborted, not closed properly.
    pub(crate) fn cut(&self) {
        self.traffic.lock().ending.cancel();
    }

    /// Lets it have streams again, after they were cut.
    pub(crate) fn reopen(&self) {
        let mut traffic = self.traffic.lock();
        *traffic = Arc::new(Access {
            ending: CancellationToken::new(),
            ..Access::clone(&traffic)
        });
    }

    /// What traffic requires that resumes it, and whether its agent requires a token.
    pub(crate) fn required(&self) -> (Arc<Access>, bool) {
        (self.traffic(), self.is_secure)
    }

    /// As what it counts in the quota of its team.
    pub(crate) fn counted(&self) -> CountedAs {
        *self.counted.lock()
    }

    /// Counts it like this in the quota of its team, unless a limit does not allow that.
    pub(crate) fn count(&self, counted: CountedAs) -> Result<(), OverQuota> {
        if let Some(admission) = self.admission.lock().as_ref() {
            admission.exchange(counted.share(self.share))?;
        }
        *self.counted.lock() = counted;
        Ok(())
    }

    /// The same regardless of the limits.
    pub(crate) fn force_count(&self, counted: CountedAs) {
        if let Some(admission) = self.admission.lock().as_ref() {
            admission.force(counted.share(self.share));
        }
        *self.counted.lock() = counted;
    }

    /// Gives back its place on the host.
    pub(crate) fn leave_host(&self) {
        if let Some(admission) = self.admission.lock().as_mut() {
            admission.leave_host();
        }
    }

    /// Whether it has a place on the host.
    pub(crate) fn is_on_host(&self) -> bool {
        self.admission.lock().as_ref().is_none_or(Admission::is_on_host)
    }

    /// Gives it a place on the host again.
    pub(crate) fn enter_host(&self, permit: CapacityPermit) {
        if let Some(admission) = self.admission.lock().as_mut() {
            admission.enter_host(permit);
        }
    }

    /// Until when it is kept while it is paused, in microseconds since the Unix epoch; none for any time.
    pub(crate) fn retained_until_us(&self) -> Option<i64> {
        self.current.lock().retained_until_us
    }

    /// Sets that.
    pub(crate) fn set_retained_until(&self, until_us: i64) {
        self.current.lock().retained_until_us = Some(until_us);
    }

    /// Makes a transition, and returns the state after it; none when the current state does not allow it.
    pub(crate) fn apply(&self, transition: Transition) -> Option<State> {
        self.current.lock().apply(transition)
    }

    /// Stops traffic to the sandbox, and returns the part of the caller in ending it.
    pub(crate) fn stop(&self) -> StopRole {
        let mut current = self.current.lock();
        let is_begun = current.state == State::Stopping;
        match current.apply(Transition::Stop) {
            None => StopRole::Gone,
            Some(_) if !is_begun => StopRole::Begin,
            Some(_) if current.stop_failed => {
                current.stop_failed = false;
                self.stopped.send_replace(None);
                StopRole::Retry
            }
            Some(_) => StopRole::Join,
        }
    }

    /// Reports the outcome to all waiting tasks.
    pub(crate) fn set_stopped(&self, stopped: StopOutcome) {
        let mut current = self.current.lock();
        match stopped {
            StopOutcome::Gone => {
                current.apply(Transition::Ended);
            }
            StopOutcome::Failed => current.stop_failed = true,
        }
        self.stopped.send_replace(Some(stopped));
    }

    /// Waits for the outcome of the termination in progress.
    pub(crate) async fn stopped(&self) -> StopOutcome {
        let mut stopped = self.stopped.subscribe();
        match stopped.wait_for(Option::is_some).await {
            Ok(stopped) => stopped.unwrap_or(StopOutcome::Failed),
            Err(_) => StopOutcome::Failed,
        }
    }
}

/// All sandboxes of this server.
#[derive(Debug, Default)]
pub(crate) struct Registry(RwLock<HashMap<SandboxId, Arc<SandboxEntry>>>);

impl Registry {
    pub(crate) fn insert(&self, entry: Arc<SandboxEntry>) {
        self.0.write().insert(entry.id.clone(), entry);
    }

    /// Removes a sandbox of which nothing is left, and releases its admission even if the entry is still in use.
    pub(crate) fn remove(&self, id: &SandboxId) {
        let entry = self.0.write().remove(id);
        if let Some(entry) = entry {
            entry.cut();
            entry.admission.lock().take();
        }
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.0.read().get(id).cloned()
    }

    /// Space that paused sandboxes take on the disk of the host, in bytes.
    pub(crate) fn paused_disk_bytes(&self) -> u64 {
        let entries = self.0.read();
        let of = |entry: &Arc<SandboxEntry>| match entry.counted() {
            CountedAs::Running => 0,
            CountedAs::Paused { disk_bytes, .. } => disk_bytes,
        };
        entries.values().map(of).sum()
    }

    /// Number of sandboxes by state.
    pub(crate) fn count_by_state(&self) -> Vec<(&'static str, usize)> {
        let counted = State::ALL.into_iter().filter(|state| *state != State::Gone);
        let mut counts: Vec<_> = counted.map(|state| (state, 0)).collect();
        for entry in self.0.read().values() {
            let state = entry.state();
            if let Some((_, count)) = counts.iter_mut().find(|(counted, _)| *counted == state) {
                *count += 1;
            }
        }
        counts
            .into_iter()
            .map(|(state, count)| (state.as_str(), count))
            .collect()
    }

    /// The credentials that traffic to a sandbox requires; `None` unless it runs.
    pub(crate) fn access(&self, id: &SandboxId) -> Option<Arc<Access>> {
        self.running(id).map(|entry| entry.traffic())
    }

    /// The sandbox with that id, if it runs.
    pub(crate) fn running(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.get(id).filter(|entry| entry.state() == State::Running)
    }

    /// The sandbox with that id, if it is paused, is being paused or resumed, and traffic resumes it.
    pub(crate) fn asleep(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.get(id).filter(|entry| {
            let lifecycle = entry.lifecycle();
            let is_woken = match entry.state() {
                State::Pausing | State::Paused => !lifecycle.paused_for_files,
                State::Resuming => true,
                _ => false,
            };
            is_woken && lifecycle.auto_resume
        })
    }

    /// Every sandbox that runs.
    pub(crate) fn all_running(&self) -> Vec<Arc<SandboxEntry>> {
        self.all_in(|state| state == State::Running)
    }

    /// Every sandbox that the node has, paused ones included, and that is known to clients.
    pub(crate) fn all_present(&self) -> Vec<Arc<SandboxEntry>> {
        self.all_in(State::is_present)
    }

    fn all_in(&self, is_wanted: impl Fn(State) -> bool) -> Vec<Arc<SandboxEntry>> {
        let all: Vec<_> = self.0.read().values().cloned().collect();
        all.into_iter().filter(|entry| is_wanted(entry.state())).collect()
    }
}
