//! Pausing sandboxes. Row first, then the node, then the row again.
//!
//! The states between are short, and no client gets stuck in them: whoever asks meanwhile waits for the change in progress
//! and shares its result, or goes on from there. After a crash, the next start adopts the sandbox as its processes are,
//! running or stopped, or keeps its disk. So the row of a sandbox that is being resumed has its new deadline before its
//! processes continue, and that of a sandbox that is being paused keeps its deadline until they have stopped.
//!
//! A pause to disk is answered once the sandbox would survive a loss of power. For that, its row is synced as it is before the
//! node pauses it. The row of afterwards is not: if it is lost, the next start finds on the disk that the sandbox is complete.

use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::command::{Arrival, AtTurn, Command, Refusal};
use model::lifecycle::{Kept, State, Transition};
use model::sandbox::LifecycleSpec;
use protocol::node::{Failure, NoCapacity, NodeError, PauseSandbox, PausedSandbox};
use store::error::StoreError;
use store::sandboxes::SandboxRow;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::backoff::TooEarly;
use super::entry::{CountedAs, NotChanged, SandboxEntry, Turn};
use super::lifecycle::to_json;
use super::unrecorded::Unrecorded;
use crate::admission::quota::{OverQuota, ResourceUse};
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::node::kept_bytes;
use crate::nodes::ServedNode;
use crate::outcome::{EndReason, PauseReason};
use crate::records::LifecycleEvent;
use crate::telemetry::traced;

/// How long a node may take to stop the processes of a sandbox, or to let them continue. It takes a second at most; the
/// bound is for a node that does not answer, because the sandbox cannot be ended meanwhile.
const NODE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long it may take to write out a disk, or to check one and start a sandbox on it.
const DISK_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// How long an agent may take to say that it is well.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a sandbox is paused again that could not be paused at its deadline, in microseconds.
const PAUSE_RETRY_US: i64 = SECOND_US;

/// Why a sandbox was not paused or resumed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PauseError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the sandbox is paused already")]
    Paused,
    #[error("the sandbox runs already")]
    Running,
    /// The row is in doubt, or behind the sandbox: another attempt can work.
    #[error("the row of the sandbox is not as it should be")]
    Stale,
    #[error("the sandbox is being ended")]
    Stopping,
    #[error("the sandbox is gone")]
    Gone,
    /// The sandbox is being resumed, and not in the way that was requested.
    #[error("the sandbox is being started already")]
    Starting,
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error(transparent)]
    NoCapacity(NoCapacity),
    /// Its agent does not respond, and the client requires that.
    #[error("the agent does not respond")]
    Unhealthy,
    /// A resume has come before its processes were on disk.
    #[error("the pause was cancelled by a resume")]
    Cancelled,
    /// A resume has failed recently.
    #[error(transparent)]
    TooEarly(#[from] TooEarly),
    /// The node cannot do it at all.
    #[error("{0}")]
    Unsupported(String),
    /// The node failed; the sandbox is as before.
    #[error("the node failed")]
    Node(#[source] NodeError),
    /// The sandbox runs, and its node was not told the new deadline.
    #[error("the node was not told")]
    NotTold(#[source] NodeError),
    #[error("the task panicked or was cancelled")]
    TaskFailed,
    /// Its node is connected and has nothing of it, and no other one can go on with its copy.
    #[error("its node is connected and has lost the sandbox, and {0}")]
    Lost(NotMoved),
    /// The sandbox has moved to another node: it has another entry.
    #[error("the sandbox has moved to another node")]
    Moved,
}

/// Why a paused sandbox was not moved to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotMoved {
    /// No copies are made, none of this pause is complete, or its key cannot be opened.
    #[error("the blob store has no usable copy")]
    NoCopy,
    #[error("the sandbox was changed meanwhile")]
    Changed,
    #[error("no node is connected that can use the copy")]
    NoNode,
    #[error("every node that can use the copy drains")]
    Draining,
    #[error("no node that can use the copy has room")]
    NoRoom,
}

impl From<NotChanged> for PauseError {
    fn from(why: NotChanged) -> Self {
        match why {
            NotChanged::Stale => Self::Stale,
            NotChanged::Missing => Self::Gone,
            NotChanged::Store(error) => Self::Store(error),
        }
    }
}

impl From<Refusal> for PauseError {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Running => Self::Running,
            Refusal::Paused => Self::Paused,
            Refusal::Resuming => Self::Starting,
            Refusal::Stopping => Self::Stopping,
            Refusal::Pausing | Refusal::InSnapshot | Refusal::Gone => Self::Gone,
        }
    }
}

/// How a sandbox is paused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PauseRequest {
    /// Why.
    pub(crate) reason: PauseReason,
    /// What is kept of it.
    pub(crate) keep: Kept,
    /// Whether limits of its team keep it from being paused.
    pub(crate) is_limited: bool,
}

impl Sandboxes {
    /// Pauses a running sandbox. Callers that ask while it is being paused share the result.
    pub(crate) async fn pause(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: PauseRequest,
    ) -> Result<(), PauseError> {
        let reason = request.reason;
        let (arrived, arrival) = entry.arrive(pausing(reason, true));
        if let Arrival::Refuse(why) = arrival {
            return Err(why.into());
        }
        let (sandboxes, entry_of_task) = (Arc::clone(self), Arc::clone(entry));
        let task = async move {
            let turn = entry_of_task.turn().await;
            let is_due = turn.end_us() <= sandboxes.clock.now_us();
            match turn.decide(pausing(reason, is_due), arrived) {
                AtTurn::Run => {
                    let span = match reason {
                        // Its request has one.
                        PauseReason::Client => None,
                        PauseReason::Timeout | PauseReason::Shutdown | PauseReason::Drain => {
                            let records = &sandboxes.tracked.records;
                            records.begin_change("pause", &turn.team, &turn.id, reason.as_str())
                        }
                    };
                    traced(span, sandboxes.pause_in_turn(&turn, request)).await
                }
                AtTurn::Join => Ok(()),
                AtTurn::Refuse(why) => Err(why.into()),
            }
        };
        self.on_task(entry, task).await
    }

    /// Pauses a sandbox if its agent responds.
    pub(crate) async fn pause_if_healthy(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: PauseRequest,
    ) -> Result<(), PauseError> {
        if entry.state() == State::Running {
            let health = tokio::time::timeout(HEALTH_TIMEOUT, self.agent(&entry.node, &entry.id).health()).await;
            if !matches!(health, Ok(Ok(()))) {
                return Err(PauseError::Unhealthy);
            }
        }
        self.pause(entry, request).await
    }

    /// Runs a change on a task, so that a client disconnect leaves nothing half done, and nor does a panic.
    pub(super) async fn on_task<T: Send + 'static>(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        change: impl Future<Output = Result<T, PauseError>> + Send + 'static,
    ) -> Result<T, PauseError> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = self.work.spawn(async move {
            match sandboxes.work.spawn(change).await {
                Ok(changed) => changed,
                Err(_) => {
                    sandboxes.recover(&entry).await;
                    Err(PauseError::TaskFailed)
                }
            }
        });
        task.await.unwrap_or(Err(PauseError::TaskFailed))
    }

    /// Brings a sandbox whose pause or resume panicked at an unknown point into a known state.
    async fn recover(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        let turn = entry.turn().await;
        if !matches!(turn.state(), State::Pausing | State::Resuming) {
            return;
        }
        let row = match self.store().sandbox_by_id(&entry.id).await {
            Ok(row) => row,
            Err(error) => {
                self.tracked
                    .store_failed(&error, &entry.id, "cannot read the row of a sandbox");
                None
            }
        };
        if let Some(row) = row {
            turn.read(&row);
            // Its processes may be ended already, and its disk is what was asked for.
            if row.state == State::Pausing && row.kept == Some(Kept::Filesystem) {
                // On a task, because it may panic again.
                let (sandboxes, node, id) = (Arc::clone(self), Arc::clone(&entry.node), row.id.clone());
                let again = self.work.spawn(async move {
                    sandboxes
                        .pause_on_node(&node, &id, Kept::Filesystem, false, CancellationToken::new())
                        .await
                });
                if let Ok(Ok(paused)) = again.await {
                    self.finish_pause(&turn, paused, self.clock.now_us(), None).await;
                    turn.apply(Transition::Saved);
                    return;
                }
            }
            if let Err(error) = self.let_continue(&turn.node, &row).await {
                tracing::error!(sandbox.id = %entry.id, error = %Chain(&error), "cannot resume a sandbox after a panic");
            }
            let running = Unrecorded::Running {
                started_us: self.clock.now_us(),
                end_us: row.end_us,
                agent_version: None,
            };
            if let Some(row) = self.recording.record(&turn, running).await {
                turn.follow(&row);
            }
        }
        if turn.apply(Transition::Resumed).is_none() {
            return self.keep_running(&turn, PauseReason::Timeout);
        }
        turn.force_count(CountedAs::Running);
        turn.reopen();
        let again_us = self.clock.now_us() + PAUSE_RETRY_US;
        self.tracked.deadlines.set(&entry.id, entry.end_us().max(again_us));
    }

    /// Has the node pause a sandbox.
    pub(super) async fn pause_on_node(
        &self,
        node: &ServedNode,
        id: &SandboxId,
        keep: Kept,
        is_written_next: bool,
        cancel: CancellationToken,
    ) -> Result<PausedSandbox, NodeError> {
        let request = PauseSandbox {
            id: id.clone(),
            keep,
            is_written_next,
        };
        let paused = within_session(bound(keep), node.session_to_end(), node.handle.pause(request, cancel)).await?;
        Ok(PausedSandbox {
            disk_bytes: kept_bytes(paused.disk_bytes),
            ..paused
        })
    }

    /// Has the node pause a sandbox, and cancels that when a resume comes while its processes are written to disk, unless a
    /// limit of its team is against that, when the sandbox is to be ended, and when no time is left before the server ends.
    async fn pause_unless_cancelled(
        &self,
        turn: &Turn<'_>,
        keep: Kept,
        is_written_next: bool,
    ) -> Result<PausedSandbox, NodeError> {
        let cancel = CancellationToken::new();
        let pausing = self.pause_on_node(&turn.node, &turn.id, keep, is_written_next, cancel.clone());
        tokio::pin!(pausing);
        tokio::select! {
            biased;
            paused = &mut pausing => return paused,
            () = turn.pause_cancelled() => {}
            () = self.work.checkpoints_ended(), if keep == Kept::Checkpoint => {
                cancel.cancel();
                return pausing.await;
            }
        }
        // First, so that resumes of many sandboxes cannot exceed the limit. When it is paused nevertheless, it counts as that.
        if turn.state() == State::Stopping || turn.count(CountedAs::Running).is_ok() {
            cancel.cancel();
        }
        pausing.await
    }

    async fn pause_in_turn(self: &Arc<Self>, turn: &Turn<'_>, request: PauseRequest) -> Result<(), PauseError> {
        let PauseRequest {
            reason,
            keep,
            is_limited,
        } = request;
        let is_written_next = keep == Kept::Memory && self.writes_later(&turn.node);
        let keep = match keep {
            Kept::Memory if self.writes_processes(&turn.node) && !is_written_next => Kept::Checkpoint,
            keep => keep,
        };
        let id = &turn.id;
        self.recording.settle(turn).await?;
        // What its disk takes is not known yet.
        let counted = CountedAs::Paused { keep, disk_bytes: 1 };
        if is_limited {
            turn.count(counted)?
        } else {
            turn.force_count(counted)
        }
        if turn.begin_pause().is_none() {
            turn.force_count(CountedAs::Running);
            return Err(PauseError::Stopping);
        }
        // Noted for traffic, before the sandbox can be found paused.
        let lifecycle = LifecycleSpec {
            paused_for_files: keep == Kept::Filesystem && reason == PauseReason::Client,
            ..turn.lifecycle()
        };
        let settings = to_json(lifecycle);
        let row = match self.store_pausing(turn, keep, settings.as_deref(), is_limited).await {
            Ok(row) => row,
            Err(error) => {
                self.keep_running(turn, reason);
                if !matches!(error, PauseError::OverQuota(_)) {
                    self.recording.doubt(turn);
                }
                return Err(error);
            }
        };
        turn.set_lifecycle(lifecycle);
        self.tracked.deadlines.remove(id);
        turn.cut();
        // While the node writes to disk. A pause that is cancelled does not wait for it.
        let rows = turn.node.rows.clone();
        let syncing = (keep != Kept::Memory).then(|| self.work.spawn(async move { rows.sync().await }));
        let paused = match self.pause_unless_cancelled(turn, keep, is_written_next).await {
            Ok(paused) => paused,
            Err(error) => return Err(self.give_up_pause(turn, reason, row, error).await),
        };
        let synced = match syncing {
            Some(syncing) => syncing.await.map_or(Err(PauseError::TaskFailed), |synced| Ok(synced?)),
            None => Ok(()),
        };
        self.finish_pause(turn, paused, self.clock.now_us(), None).await;
        self.tracked.records.stop_sampling(id, paused.network);
        self.tracked.log(id, &LifecycleEvent::Paused(reason, paused.kept));
        self.tracked.metrics.pause(reason);
        let PausedSandbox {
            kept,
            memory_bytes,
            disk_bytes,
            ..
        } = paused;
        let (reason, kept) = (reason.as_str(), kept.as_str());
        tracing::info!(sandbox.id = %id, reason, kept, memory_bytes, disk_bytes, "sandbox paused");
        if turn.apply(Transition::Saved).is_none() {
            // It is being ended, which waits for this task.
            return Err(PauseError::Stopping);
        }
        self.write_later(turn);
        self.pack_later(turn);
        // If that failed, the sandbox is paused, but might not survive a loss of power.
        synced
    }

    /// Stores that a sandbox is about to be paused. If its team must not have more paused sandboxes than its limit and there are several
    /// servers, the database decides: what this one knows of the others is some time old.
    async fn store_pausing(
        &self,
        turn: &Turn<'_>,
        keep: Kept,
        settings: Option<&str>,
        is_limited: bool,
    ) -> Result<SandboxRow, PauseError> {
        let (rows, version) = (&turn.node.rows, turn.version());
        if !is_limited || !self.nodes.have_several_servers() {
            let change = rows.sandbox_pausing(&turn.id, version, keep, settings).await;
            return Ok(turn.changed(change)?);
        }
        let quota = turn.node.admission.quota_of(&turn.team).await?;
        let one = (&turn.id, &turn.team);
        let change = rows.sandbox_pausing_within(one, version, keep, settings, quota.most_paused());
        let change = match change.await {
            Ok(Ok(change)) => Ok(change),
            Ok(Err(used)) => return Err(quota.over_by(used, ResourceUse::ONE_PAUSED).into()),
            Err(error) => Err(error),
        };
        Ok(turn.changed(change)?)
    }

    /// Records what the node has kept of a sandbox, since when it is paused, and why it was not resumed, and counts it.
    pub(super) async fn finish_pause(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        paused: PausedSandbox,
        paused_us: i64,
        resume_error: Option<String>,
    ) {
        let PausedSandbox { kept, disk_bytes, .. } = paused;
        let state = Unrecorded::Paused {
            kept,
            kept_bytes: i64::try_from(disk_bytes).unwrap_or(i64::MAX),
            paused_us,
            resume_error,
        };
        // Its processes have stopped, so it is paused, whether or not that can be recorded now.
        self.recording.record(turn, state).await;
        turn.force_count(CountedAs::Paused { keep: kept, disk_bytes });
        if kept != Kept::Memory {
            turn.leave_host();
        }
        self.retain(turn, paused_us);
    }

    /// Has a paused sandbox end when it has been paused for as long as the operator keeps any.
    pub(super) fn retain(&self, turn: &Turn<'_>, paused_us: i64) {
        if let Some(seconds) = self.defaults.pause.retention_s {
            let until_us = paused_us.saturating_add(i64::from(seconds) * SECOND_US);
            turn.set_retained_until(until_us);
            self.tracked.deadlines.set(&turn.id, until_us);
        }
    }

    /// Undoes the beginning of a pause. The deadline stays as it was, or a client whose pauses fail would move it with each of
    /// them. If it was the deadline that asked for the pause, it asks again a moment later.
    fn keep_running(&self, turn: &Turn<'_>, reason: PauseReason) {
        turn.force_count(CountedAs::Running);
        turn.reopen();
        // Rules and secrets that were changed meanwhile were applied to those that ran.
        turn.set_policy_pending(true);
        if turn.apply(Transition::Failed).is_some() {
            let end_us = match reason {
                PauseReason::Timeout => turn.end_us().max(self.clock.now_us() + PAUSE_RETRY_US),
                PauseReason::Client | PauseReason::Shutdown | PauseReason::Drain => turn.end_us(),
            };
            self.tracked.deadlines.set(&turn.id, end_us);
        }
    }

    /// A failed pause leaves the sandbox running, unless the node was lost during it.
    async fn give_up_pause(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        reason: PauseReason,
        row: SandboxRow,
        error: NodeError,
    ) -> PauseError {
        let id = &turn.id;
        if !matches!(error, NodeError::Unsupported(_) | NodeError::Cancelled) {
            tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot pause a sandbox");
        }
        if is_unknown(&turn.node, &error) {
            // Its row stays as it is, so that the next session keeps what there is of it, paused or not.
            self.keep_running(turn, reason);
            return PauseError::Node(error);
        }
        if matches!(error, NodeError::Unreachable(_)) {
            // Its processes may have stopped.
            if let Err(error) = self.let_continue(&turn.node, &row).await {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot undo the pause of a sandbox");
            }
        }
        let running = Unrecorded::Running {
            started_us: row.started_us,
            end_us: row.end_us,
            agent_version: None,
        };
        self.recording.record(turn, running).await;
        self.keep_running(turn, reason);
        if turn.state() == State::Running {
            let applied = self.set_policy(turn, &row).await;
            self.log_not_applied(id, applied);
        }
        match error {
            // Its end is about to be reported.
            NodeError::NotFound(_) => PauseError::Gone,
            NodeError::Unsupported(why) => PauseError::Unsupported(why),
            NodeError::Cancelled if turn.state() == State::Stopping => PauseError::Stopping,
            NodeError::Cancelled => PauseError::Cancelled,
            error => PauseError::Node(error),
        }
    }

    /// Pauses a sandbox at its deadline. A limit of its team does not end it, because its client was told that it is kept:
    /// no new ones are accepted instead. Where the host cannot keep its processes, its disk is kept. It is ended only
    /// where the operator wants no paused sandboxes at all, or the host can keep nothing.
    pub(super) async fn pause_at_deadline(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        let mut request = PauseRequest {
            reason: PauseReason::Timeout,
            keep: entry.lifecycle().keep(),
            is_limited: true,
        };
        // Each of the two reasons occurs once.
        for _ in 0..3 {
            let why = match self.pause(entry, request).await {
                Ok(()) | Err(PauseError::Paused | PauseError::Running | PauseError::Stopping | PauseError::Gone) => {
                    return;
                }
                Err(PauseError::OverQuota(over)) if request.is_limited && over.is_soft() => {
                    request.is_limited = false;
                    over.key
                }
                Err(PauseError::OverQuota(over)) => return self.end_at_deadline(entry, over.key),
                Err(PauseError::Unsupported(why)) => {
                    tracing::warn!(sandbox.id = %entry.id, "the processes of a sandbox are not kept: {why}");
                    if request.keep == Kept::Filesystem {
                        return self.end_at_deadline(entry, "unsupported");
                    }
                    request.keep = Kept::Filesystem;
                    "processes"
                }
                Err(PauseError::Store(error)) => {
                    self.tracked
                        .store_failed(&error, &entry.id, "cannot pause a sandbox at its deadline");
                    return self.try_deadline_again(entry).await;
                }
                Err(
                    PauseError::Stale
                    | PauseError::Node(_)
                    | PauseError::NotTold(_)
                    | PauseError::NoCapacity(_)
                    | PauseError::Starting
                    | PauseError::TooEarly(_)
                    | PauseError::Cancelled
                    | PauseError::Unhealthy
                    | PauseError::TaskFailed
                    | PauseError::Lost(_)
                    | PauseError::Moved,
                ) => return self.try_deadline_again(entry).await,
            };
            self.tracked.log(&entry.id, &LifecycleEvent::PausedOtherwise(why));
        }
    }

    /// Has the deadline of a sandbox come again that was not paused at it. An attempt that fails before it has begun sets none.
    async fn try_deadline_again(&self, entry: &Arc<SandboxEntry>) {
        // In a turn, or it could replace a later deadline that a client sets at the same moment.
        let turn = entry.turn().await;
        if turn.state() == State::Running {
            let again_us = self.clock.now_us() + PAUSE_RETRY_US;
            self.tracked.deadlines.set(&turn.id, turn.end_us().max(again_us));
        }
    }

    fn end_at_deadline(self: &Arc<Self>, entry: &Arc<SandboxEntry>, why: &'static str) {
        self.tracked.log(&entry.id, &LifecycleEvent::NotPaused(why));
        self.begin_stop(entry, EndReason::Expired);
    }
}

/// The command that pauses a sandbox for this reason, when its deadline has passed, or not.
fn pausing(reason: PauseReason, is_due: bool) -> Command {
    if reason == PauseReason::Timeout {
        Command::PauseAtDeadline { is_due }
    } else {
        Command::Pause
    }
}

/// Whether only the node knows what became of a pause or a resume that failed with this, and its session is over: the next one
/// begins with asking.
pub(super) fn is_unknown(node: &ServedNode, error: &NodeError) -> bool {
    matches!(error, NodeError::Unreachable(_)) && node.over.is_cancelled()
}

/// How long a node may take to pause or resume a sandbox of which this is kept.
pub(super) fn bound(kept: Kept) -> Duration {
    match kept {
        Kept::Memory => NODE_TIMEOUT,
        Kept::Checkpoint | Kept::Filesystem => DISK_TIMEOUT,
    }
}

/// The answer of a node, or that there was none in time.
pub(super) async fn within<T>(
    bound: Duration,
    answer: impl Future<Output = Result<T, NodeError>>,
) -> Result<T, NodeError> {
    match tokio::time::timeout(bound, answer).await {
        Ok(answer) => answer,
        Err(elapsed) => Err(NodeError::Unreachable(Failure::of(&elapsed))),
    }
}

/// The answer of a node to a pause or a resume, as [`within`]. Without one only the node knows what became of it, so its `session`
/// ends, if it is one that another follows: see [`is_unknown`].
pub(super) async fn within_session<T>(
    bound: Duration,
    session: Option<&CancellationToken>,
    answer: impl Future<Output = Result<T, NodeError>>,
) -> Result<T, NodeError> {
    let mut is_answered = false;
    let answered = within(bound, async {
        let answer = answer.await;
        is_answered = true;
        answer
    });
    let answered = answered.await;
    if let Some(session) = session.filter(|_| !is_answered) {
        tracing::warn!("whether a sandbox was paused or resumed is unknown: no answer within {bound:?}");
        session.cancel();
    }
    answered
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that is asked by its next session is asked; the one that has no other session goes on with this one.
    #[tokio::test(start_paused = true)]
    async fn a_pause_without_an_answer_in_time_ends_the_session_that_another_follows() {
        let session = CancellationToken::new();
        let answered = within_session(NODE_TIMEOUT, Some(&session), async { Ok(7) }).await;
        assert_eq!((answered, session.is_cancelled()), (Ok(7), false));
        let refused = within_session(NODE_TIMEOUT, Some(&session), async { Err::<(), _>(NodeError::Away) }).await;
        assert_eq!((refused, session.is_cancelled()), (Err(NodeError::Away), false));
        let alone = within_session(NODE_TIMEOUT, None, std::future::pending::<Result<(), NodeError>>()).await;
        assert!(matches!(alone, Err(NodeError::Unreachable(_))), "{alone:?}");
        let never = std::future::pending::<Result<(), NodeError>>();
        let late = within_session(NODE_TIMEOUT, Some(&session), never).await;
        assert!(
            matches!(late, Err(NodeError::Unreachable(_))) && session.is_cancelled(),
            "{late:?}"
        );
    }
}
