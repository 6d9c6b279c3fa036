//! One sandbox of this server in memory, and who may change it.
//!
//! Commands take turns, in the order in which they come: a [`Turn`] is the one owner of the sandbox until it is dropped. Only
//! with it the version and the state are changed, the row is written, and the node is asked for anything. What becomes of a
//! command is decided by [`model::lifecycle::command`], when it arrives and when it has its turn. Two things happen without
//! a turn, because they must not wait for what is under way: a sandbox begins to end, and the node reports that nothing of
//! it runs any more. A create request needs none, because nothing else knows its sandbox.
//!
//! The version of the row is known here alone. Each outcome of a change of the row goes through [`Turn::changed`], which takes
//! over the version, or notes that the row is in doubt.
//!
//! Readers never wait for a turn. All that changes is one value with one lock, which is also what can be waited for: the
//! outcome of an end, the cancellation of a pause, the interruption of a write.
//!
//! Order of locks: the turn, then the map of the registry, then the value of the sandbox, then the quota of the team.
//! Nothing is awaited under any but the turn.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use model::id::{SandboxId, TeamId};
use model::lifecycle::command::{Arrival, AtTurn, Command, Passage, Refusal, Wakes};
use model::lifecycle::{Kept, State, Transition};
use model::sandbox::LifecycleSpec;
use proxy::ingress::Access;
use secrecy::SecretString;
use store::Change;
use store::error::StoreError;
use store::sandboxes::SandboxRow;
use tokio::sync::{MutexGuard, watch};
use tokio_util::sync::CancellationToken;

use super::backoff::{BackOff, TooEarly};
use super::lifecycle::lifecycle_of;
use super::policy::spec_of;
use crate::admission::Admission;
use crate::admission::capacity::CapacityPermit;
use crate::admission::quota::{OverQuota, ResourceUse};
use crate::nodes::ServedNode;

/// A sandbox in the registry.
#[derive(Debug)]
pub(crate) struct SandboxEntry {
    /// Its id.
    pub(crate) id: SandboxId,
    /// The owning team.
    pub(crate) team: TeamId,
    /// The node that it is on, in the session that it was created or taken over in.
    pub(crate) node: Arc<ServedNode>,
    /// What it takes of its team's quota while it runs.
    pub(super) share: ResourceUse,
    /// Whether its agent requires a token.
    is_secure: bool,
    /// The agent token.
    pub(crate) access_token: SecretString,
    /// Held by the command that has its turn; the others wait in the order in which they came.
    turn: tokio::sync::Mutex<()>,
    /// All of it that changes.
    current: watch::Sender<Current>,
}

/// What changes of a sandbox.
#[derive(Debug)]
struct Current {
    state: State,
    version: i64,
    end_us: i64,
    max_end_us: i64,
    lifecycle: LifecycleSpec,
    /// Until when it is kept while it is paused, in microseconds since the Unix epoch; none for any time.
    retained_until_us: Option<i64>,
    /// What its traffic requires.
    traffic: Arc<Access>,
    /// Whether the node may have another policy than that of the row.
    is_policy_pending: bool,
    /// Whether the row may have been changed although the database failed: the answer to a change was lost.
    is_row_in_doubt: bool,
    /// The saved injection rules that it refers to.
    saved_rules: BTreeSet<String>,
    /// Its share of the limits, until nothing of it is left.
    admission: Option<Admission>,
    /// As what it counts in the quota of its team.
    counted: CountedAs,
    /// Whether the pause that has its turn is to be cancelled.
    is_pause_cancelled: bool,
    /// How many commands keep it from being written to disk while they wait for their turn.
    interruptions: usize,
    /// Whether a snapshot of it is being made.
    is_in_snapshot: bool,
    /// The outcome of the last attempt to end it; none while there is none, or one is under way.
    stopped: Option<StopOutcome>,
    /// Its failed resumes with processes.
    restores: BackOff,
    /// Its failed forks.
    forks: BackOff,
}

/// What may fail, and is not tried again for a while.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Attempt {
    /// To resume a sandbox with its processes from disk.
    Restore,
    /// To fork a sandbox.
    Fork,
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
    /// Nothing of it runs any more, and it has no row.
    Gone,
    /// The node failed; it will be retried.
    Failed,
    /// The node is not connected, or did not answer. It will be retried, at the latest when the node connects again.
    Away,
    /// Nothing of it runs any more, and the database could not record that; it will be retried.
    Unrecorded,
}

/// Why a row was not changed.
#[derive(Debug)]
pub(crate) enum NotChanged {
    /// The row is another one than is known, or behind the sandbox, after the database has failed: it is in doubt.
    Stale,
    /// There is no row any more.
    Missing,
    /// The database failed. It may have made the change nevertheless: the row is in doubt.
    Store(StoreError),
}

/// The turn of a command: nothing else changes the sandbox until it is dropped, except that it may begin to end.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    entry: &'a Arc<SandboxEntry>,
    _guard: MutexGuard<'a, ()>,
}

/// The sandbox is written to disk no further until this is dropped.
#[derive(Debug)]
struct Interruption<'a>(&'a SandboxEntry);

/// The only snapshot of a sandbox that is being made, until this is dropped.
#[derive(Debug)]
pub(crate) struct OnlySnapshot<'a>(&'a SandboxEntry);

impl Current {
    fn apply(&mut self, transition: Transition) -> Option<State> {
        self.state = self.state.next(transition).ok()?;
        Some(self.state)
    }

    /// What becomes of traffic to it.
    fn passage(&self) -> Passage {
        self.state.traffic(Wakes {
            on_traffic: self.lifecycle.auto_resume,
            paused_for_files: self.lifecycle.paused_for_files,
        })
    }

    fn is_in_memory(&self) -> bool {
        let is_kept = matches!(self.counted, CountedAs::Paused { keep: Kept::Memory, .. });
        is_kept && self.state == State::Paused
    }

    fn backoff(&mut self, attempt: Attempt) -> &mut BackOff {
        match attempt {
            Attempt::Restore => &mut self.restores,
            Attempt::Fork => &mut self.forks,
        }
    }
}

impl SandboxEntry {
    /// An entry for the sandbox of a row, which refers to these saved injection rules.
    pub(crate) fn new(
        row: &SandboxRow,
        node: &Arc<ServedNode>,
        admission: Admission,
        access_token: SecretString,
        traffic_token: Option<SecretString>,
        saved_rules: BTreeSet<String>,
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
            node: Arc::clone(node),
            share: ResourceUse::one_sandbox(row.cpu_count, row.memory_mb),
            is_secure: row.secure,
            access_token,
            turn: tokio::sync::Mutex::new(()),
            current: watch::Sender::new(Current {
                state: row.state,
                version: row.version,
                end_us: row.end_us,
                max_end_us: row.max_end_us,
                lifecycle: lifecycle_of(row),
                retained_until_us: None,
                traffic,
                is_policy_pending: false,
                is_row_in_doubt: false,
                saved_rules,
                admission: Some(admission),
                counted: CountedAs::of(row),
                is_pause_cancelled: false,
                interruptions: 0,
                is_in_snapshot: false,
                stopped: None,
                restores: BackOff::default(),
                forks: BackOff::default(),
            }),
        })
    }

    /// Takes over the row of a new sandbox that was started. Its create request needs no turn: nothing else knows it. Returns
    /// the state after that; none if it has ended meanwhile.
    pub(super) fn start(&self, row: &SandboxRow) -> Option<State> {
        self.change(|current| {
            current.version = row.version;
            current.end_us = row.end_us;
            current.apply(Transition::Started)
        })
    }

    /// Waits for a turn.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn<'_> {
        Turn {
            entry: self,
            _guard: self.turn.lock().await,
        }
    }

    /// Waits for the turn of a command.
    pub(crate) async fn turn_of(self: &Arc<Self>, command: Command) -> Turn<'_> {
        let interruption = command.interrupts_writes().then(|| Interruption::new(self));
        let turn = self.turn().await;
        drop(interruption);
        turn
    }

    /// Decides about a command that arrives, and has a pause that is under way be cancelled if that is the decision. Returns
    /// the state in which it arrived as well.
    pub(crate) fn arrive(&self, command: Command) -> (State, Arrival) {
        self.change(|current| {
            let arrival = current.state.arrival(command);
            current.is_pause_cancelled |= arrival == Arrival::Cancel;
            (current.state, arrival)
        })
    }

    /// Refuses a command that the state does not allow.
    pub(crate) fn check(&self, command: Command) -> Result<(), Refusal> {
        match self.state().arrival(command) {
            Arrival::Refuse(why) => Err(why),
            Arrival::Run | Arrival::Join | Arrival::Wait | Arrival::Cancel => Ok(()),
        }
    }

    /// Waits for the turn of a command, unless it is refused when it arrives or when it has its turn. Both are necessary: an
    /// end has its turn until nothing runs any more, and it may have begun since.
    pub(crate) async fn turn_unless_refused(self: &Arc<Self>, command: Command) -> Result<Turn<'_>, Refusal> {
        self.check(command)?;
        let turn = self.turn_of(command).await;
        turn.check(command)?;
        Ok(turn)
    }

    /// Begins to end it, without a turn: there is no traffic to it from now on. Returns what becomes of the caller:
    /// [`Arrival::Cancel`] if it is the one that ends it, and [`Arrival::Wait`] if it is that because an attempt has failed.
    pub(crate) fn begin_stop(&self) -> Arrival {
        self.change(|current| {
            let is_retry = current.stopped.is_some_and(|outcome| outcome != StopOutcome::Gone);
            let arrival = current.state.arrival(Command::Stop { is_retry });
            if matches!(arrival, Arrival::Cancel | Arrival::Wait) {
                current.apply(Transition::Stop);
                current.is_pause_cancelled = true;
                current.stopped = None;
            }
            arrival
        })
    }

    /// Reports the outcome of an attempt to end it to all that wait for it.
    pub(crate) fn set_stopped(&self, stopped: StopOutcome) {
        self.change(|current| {
            if stopped == StopOutcome::Gone {
                current.apply(Transition::Ended);
            }
            current.stopped = Some(stopped);
        });
    }

    /// Waits for the outcome of the attempt to end it that is under way.
    pub(crate) async fn stopped(&self) -> StopOutcome {
        let mut current = self.current.subscribe();
        match current.wait_for(|current| current.stopped.is_some()).await {
            Ok(current) => current.stopped.unwrap_or(StopOutcome::Failed),
            Err(_) => StopOutcome::Failed,
        }
    }

    /// Notes, without a turn, that the node has nothing of it any more, unless that has to wait for a turn. Returns the state
    /// before as well.
    pub(crate) fn exit(&self) -> (State, Arrival) {
        self.change(|current| {
            let (before, arrival) = (current.state, current.state.arrival(Command::Exit));
            if arrival == Arrival::Run
                && let Some(transition) = before.exit()
            {
                current.apply(transition);
            }
            (before, arrival)
        })
    }

    /// The only snapshot of it, unless that is refused.
    pub(crate) fn begin_snapshot(&self) -> Result<OnlySnapshot<'_>, Refusal> {
        self.change(|current| {
            let is_other_made = current.is_in_snapshot;
            if let Arrival::Refuse(why) = current.state.arrival(Command::Snapshot { is_other_made }) {
                return Err(why);
            }
            current.is_in_snapshot = true;
            Ok(())
        })?;
        Ok(OnlySnapshot(self))
    }

    /// Waits until no snapshot of it is being made.
    pub(crate) async fn snapshot_ended(&self) {
        self.until(|current| !current.is_in_snapshot).await;
    }

    /// The state in the lifecycle.
    pub(crate) fn state(&self) -> State {
        self.current.borrow().state
    }

    /// The deadline, in microseconds since the Unix epoch.
    pub(crate) fn end_us(&self) -> i64 {
        self.current.borrow().end_us
    }

    /// The latest deadline that an extension may set, in microseconds since the Unix epoch.
    pub(crate) fn max_end_us(&self) -> i64 {
        self.current.borrow().max_end_us
    }

    /// What happens at its deadline.
    pub(crate) fn lifecycle(&self) -> LifecycleSpec {
        self.current.borrow().lifecycle
    }

    /// The version of the row.
    pub(crate) fn version(&self) -> i64 {
        self.current.borrow().version
    }

    /// Until when it is kept while it is paused, in microseconds since the Unix epoch; none for any time.
    pub(crate) fn retained_until_us(&self) -> Option<i64> {
        self.current.borrow().retained_until_us
    }

    /// As what it counts in the quota of its team.
    pub(crate) fn counted(&self) -> CountedAs {
        self.current.borrow().counted
    }

    /// Whether it is paused, and kept in memory.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.current.borrow().is_in_memory()
    }

    /// Whether it has a place on the host.
    pub(crate) fn is_on_host(&self) -> bool {
        let current = self.current.borrow();
        current.admission.as_ref().is_none_or(Admission::is_on_host)
    }

    /// Whether the node may have another policy than that of the row.
    pub(crate) fn is_policy_pending(&self) -> bool {
        self.current.borrow().is_policy_pending
    }

    /// Whether its row may have been changed although the database failed.
    pub(crate) fn is_row_in_doubt(&self) -> bool {
        self.current.borrow().is_row_in_doubt
    }

    /// Whether it refers to a saved injection rule.
    pub(crate) fn uses_rule(&self, id: &str) -> bool {
        self.current.borrow().saved_rules.contains(id)
    }

    /// Whether it refers to any saved injection rule.
    pub(crate) fn uses_rules(&self) -> bool {
        !self.current.borrow().saved_rules.is_empty()
    }

    /// What its traffic requires; none unless it runs.
    pub(super) fn access(&self) -> Option<Arc<Access>> {
        let current = self.current.borrow();
        (current.passage() == Passage::Pass).then(|| Arc::clone(&current.traffic))
    }

    /// What traffic requires that resumes it, and whether its agent requires a token.
    pub(crate) fn required(&self) -> (Arc<Access>, bool) {
        (Arc::clone(&self.current.borrow().traffic), self.is_secure)
    }

    /// Whether it is paused, or between that and running, and traffic resumes it.
    pub(super) fn is_asleep(&self) -> bool {
        self.current.borrow().passage() == Passage::Wake
    }

    /// Cuts its streams: they are aborted, not closed properly.
    pub(crate) fn cut(&self) {
        let (traffic, _) = self.required();
        traffic.ending.cancel();
    }

    /// Waits until it is not paused any more.
    pub(super) async fn left_pause(&self) {
        self.until(|current| current.state != State::Paused).await;
    }

    /// Waits until the pause that has its turn is to be cancelled.
    pub(crate) async fn pause_cancelled(&self) {
        self.until(|current| current.is_pause_cancelled).await;
    }

    /// Writing it to disk, as it is now.
    pub(crate) fn writing(&self) -> Command {
        let current = self.current.borrow();
        Command::Write {
            is_in_memory: current.is_in_memory(),
            is_interrupted: current.interruptions > 0,
        }
    }

    /// Waits until a command keeps it from being written to disk.
    pub(crate) async fn interrupted(&self) {
        self.until(|current| current.interruptions > 0).await;
    }

    /// Refuses what has failed lately.
    pub(crate) fn check_attempt(&self, attempt: Attempt, now_us: i64) -> Result<(), TooEarly> {
        let current = self.current.borrow();
        match attempt {
            Attempt::Restore => current.restores.check(now_us),
            Attempt::Fork => current.forks.check(now_us),
        }
    }

    /// Notes that something has failed, for this reason, which is for the client.
    pub(crate) fn note_failure(&self, attempt: Attempt, now_us: i64, why: &str) {
        self.change(|current| current.backoff(attempt).note_failure(now_us, why));
    }

    /// Forgets what has failed: it works.
    pub(crate) fn note_success(&self, attempt: Attempt) {
        self.change(|current| current.backoff(attempt).forget());
    }

    /// Releases its share of the limits: nothing of it is left.
    pub(super) fn release(&self) {
        let released = self.change(|current| current.admission.take());
        drop(released);
    }

    fn change<T>(&self, change: impl FnOnce(&mut Current) -> T) -> T {
        let mut changed = None;
        self.current.send_modify(|current| changed = Some(change(current)));
        changed.expect("the change was made")
    }

    async fn until(&self, is_reached: impl FnMut(&Current) -> bool) {
        // It ends with this entry only.
        let _ = self.current.subscribe().wait_for(is_reached).await;
    }
}

impl Deref for Turn<'_> {
    type Target = Arc<SandboxEntry>;

    fn deref(&self) -> &Arc<SandboxEntry> {
        self.entry
    }
}

impl Turn<'_> {
    /// Decides about the command that has its turn, which arrived in the state `arrived`.
    pub(crate) fn decide(&self, command: Command, arrived: State) -> AtTurn {
        self.state().at_turn(command, arrived)
    }

    /// Refuses a command that the state does not allow.
    pub(crate) fn check(&self, command: Command) -> Result<(), Refusal> {
        let state = self.state();
        match state.at_turn(command, state) {
            AtTurn::Refuse(why) => Err(why),
            AtTurn::Run | AtTurn::Join => Ok(()),
        }
    }

    /// Makes a transition, and returns the state after it; none when the state does not allow it: the sandbox is ending.
    pub(crate) fn apply(&self, transition: Transition) -> Option<State> {
        self.entry.change(|current| current.apply(transition))
    }

    /// Begins a pause, which nothing has cancelled yet.
    pub(crate) fn begin_pause(&self) -> Option<State> {
        self.entry.change(|current| {
            let state = current.apply(Transition::Pause)?;
            current.is_pause_cancelled = false;
            Some(state)
        })
    }

    /// Takes over the outcome of a change of the row, and passes it on.
    pub(crate) fn changed(&self, outcome: Result<Change<SandboxRow>, StoreError>) -> Result<SandboxRow, NotChanged> {
        let why = match outcome {
            Ok(Change::Applied(row)) => {
                self.read(&row);
                return Ok(row);
            }
            Ok(Change::Missing) => return Err(NotChanged::Missing),
            Ok(Change::Stale) => NotChanged::Stale,
            Err(error) => NotChanged::Store(error),
        };
        self.entry.change(|current| current.is_row_in_doubt = true);
        Err(why)
    }

    /// Takes over the version and the deadline of the row, which was read.
    pub(crate) fn read(&self, row: &SandboxRow) {
        self.entry.change(|current| {
            current.version = row.version;
            current.end_us = row.end_us;
        });
    }

    /// Notes that the row is as it is known: it is in doubt no more.
    pub(crate) fn settled(&self) {
        self.entry.change(|current| current.is_row_in_doubt = false);
    }

    /// Takes over the times and the lifecycle settings of a row with which a new run begins.
    pub(crate) fn follow(&self, row: &SandboxRow) {
        self.entry.change(|current| {
            current.end_us = row.end_us;
            current.max_end_us = row.max_end_us;
            current.lifecycle = lifecycle_of(row);
        });
    }

    /// Takes over its lifecycle settings.
    pub(crate) fn set_lifecycle(&self, lifecycle: LifecycleSpec) {
        self.entry.change(|current| current.lifecycle = lifecycle);
    }

    /// Changes the ports whose servers speak TLS, for new requests.
    pub(crate) fn set_https_ports(&self, ports: Vec<u16>) {
        self.entry.change(|current| {
            current.traffic = Arc::new(Access {
                https_ports: ports.into(),
                ..Access::clone(&current.traffic)
            });
        });
    }

    /// Allows streams into the sandbox again, after they were cut.
    pub(crate) fn reopen(&self) {
        self.entry.change(|current| {
            current.traffic = Arc::new(Access {
                ending: CancellationToken::new(),
                ..Access::clone(&current.traffic)
            });
        });
    }

    /// Notes whether the node may have another policy than that of the row.
    pub(crate) fn set_policy_pending(&self, is_pending: bool) {
        self.entry.change(|current| current.is_policy_pending = is_pending);
    }

    /// Sets until when it is kept while it is paused, in microseconds since the Unix epoch.
    pub(crate) fn set_retained_until(&self, until_us: i64) {
        self.entry.change(|current| current.retained_until_us = Some(until_us));
    }

    /// Notes the saved injection rules that it refers to.
    pub(crate) fn set_saved_rules(&self, rules: BTreeSet<String>) {
        self.entry.change(|current| current.saved_rules = rules);
    }

    /// Counts it like this in the quota of its team, unless a limit does not allow that.
    pub(crate) fn count(&self, counted: CountedAs) -> Result<(), OverQuota> {
        self.entry.change(|current| {
            if let Some(admission) = &current.admission {
                admission.exchange(counted.share(self.share))?;
            }
            current.counted = counted;
            Ok(())
        })
    }

    /// Counts it like this in the quota of its team, regardless of the limits.
    pub(crate) fn force_count(&self, counted: CountedAs) {
        self.entry.change(|current| {
            if let Some(admission) = &current.admission {
                admission.force(counted.share(self.share));
            }
            current.counted = counted;
        });
    }

    /// Gives back its place on the host.
    pub(crate) fn leave_host(&self) {
        self.entry.change(|current| {
            if let Some(admission) = &mut current.admission {
                admission.leave_host();
            }
        });
    }

    /// Gives it a place on the host again.
    pub(crate) fn enter_host(&self, permit: CapacityPermit) {
        self.entry.change(|current| {
            if let Some(admission) = &mut current.admission {
                admission.enter_host(permit);
            }
        });
    }
}

impl<'a> Interruption<'a> {
    fn new(entry: &'a SandboxEntry) -> Self {
        entry.change(|current| current.interruptions += 1);
        Self(entry)
    }
}

impl Drop for Interruption<'_> {
    fn drop(&mut self) {
        self.0.change(|current| current.interruptions -= 1);
    }
}

impl Drop for OnlySnapshot<'_> {
    fn drop(&mut self) {
        self.0.change(|current| current.is_in_snapshot = false);
    }
}
