//! Resuming sandboxes, and connecting to them. Row first, then the node, then the row again; see `pause`.

use std::sync::Arc;

use model::lifecycle::command::{Arrival, AtTurn, Command, Resume};
use model::lifecycle::{Kept, Transition};
use model::sandbox::LifecycleSpec;
use protocol::node::{NodeError, ResumeSandbox, Stage};
use store::sandboxes::{Pause, Resumption, SandboxRow};
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::change::ChangeError;
use super::deadline::Deadline;
use super::entry::{Attempt, CountedAs, NotChanged, SandboxEntry, Turn};
use super::lifecycle::to_json;
use super::pause::{PauseError, bound, is_unknown, within_session};
use super::started::known_version;
use super::unrecorded::Unrecorded;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::nodes::ServedNode;
use crate::outcome::ResumeReason;
use crate::records::LifecycleEvent;
use crate::telemetry::traced;

/// How often a client that connects starts again because the state has changed meanwhile.
const CONNECT_ATTEMPTS: usize = 3;
/// Shortest time until the deadline of a sandbox that traffic has resumed, in seconds.
const WOKEN_FLOOR_S: u32 = 300;

/// How a sandbox is resumed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResumeRequest {
    /// Seconds until its deadline.
    pub(crate) timeout_s: u32,
    /// The longest lifetime that its team may give it, in seconds.
    pub(crate) max_lifetime_s: u32,
    /// Whether it is paused at its deadline from now on; none to leave that.
    pub(crate) auto_pause: Option<bool>,
    /// Whether its processes are given up, if they are kept: it is started anew on its disk.
    pub(crate) discards_processes: bool,
    /// Why.
    pub(crate) reason: ResumeReason,
}

/// A sandbox that runs, for a client that asked for it.
#[derive(Debug)]
pub(crate) struct Connected {
    /// Its row.
    pub(crate) row: SandboxRow,
    /// Whether it had to be resumed.
    pub(crate) was_paused: bool,
    /// How long each stage of that took, in order.
    pub(crate) stages: Vec<Stage>,
}

/// What the node has done for a resume.
#[derive(Debug, Default)]
pub(super) struct Continued {
    /// The version of its agent, if that is a new one.
    agent_version: Option<String>,
    stages: Vec<Stage>,
}

impl Sandboxes {
    /// Resumes a paused sandbox. Callers that ask while it is being resumed share the result, and each has at least the
    /// time that it asked for.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        match self.resume_entry(entry, request).await {
            Err(PauseError::Moved) => match self.moved(entry) {
                Some(moved) => self.resume_entry(&moved, request).await,
                None => Err(PauseError::Gone),
            },
            resumed => resumed,
        }
    }

    async fn resume_entry(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        let command = Command::Resume(self.resume_of(entry, request));
        let (arrived, arrival) = entry.arrive(command);
        if let Arrival::Refuse(why) = arrival {
            return Err(why.into());
        }
        let (sandboxes, entry_of_task) = (Arc::clone(self), Arc::clone(entry));
        let resuming = async move {
            let entry = entry_of_task;
            let turn = entry.turn_of(command).await;
            if sandboxes.moved(&entry).is_some() {
                return Err(PauseError::Moved);
            }
            // It may have been paused since.
            let command = Command::Resume(sandboxes.resume_of(&turn, request));
            match turn.decide(command, arrived) {
                AtTurn::Run => {
                    let changes = sandboxes.policies.injections.changes();
                    let span = match request.reason {
                        // Its request has one.
                        ResumeReason::Client => None,
                        ResumeReason::Traffic | ResumeReason::Operator => {
                            let (records, reason) = (&sandboxes.tracked.records, request.reason.as_str());
                            records.begin_change("resume", &turn.team, &turn.id, reason)
                        }
                    };
                    let resumed = traced(span, sandboxes.resume_or_start(&turn, request)).await;
                    drop(turn);
                    if resumed.is_err() {
                        sandboxes.write_later(&entry);
                        sandboxes.pack_later(&entry);
                    }
                    if resumed.is_ok() && sandboxes.policies.injections.changes() != changes {
                        // A rule or a secret was changed meanwhile, when it was not among those that run.
                        sandboxes.apply_again(&entry).await;
                    }
                    resumed.map(Some)
                }
                AtTurn::Join => Ok(None),
                AtTurn::Refuse(why) => {
                    drop(turn);
                    // It has interrupted that.
                    sandboxes.write_later(&entry);
                    Err(why.into())
                }
            }
        };
        match self.on_task(entry, resuming).await? {
            Some(resumed) => Ok(resumed),
            None => Ok(Connected {
                row: self.extend(entry, request).await?,
                was_paused: true,
                stages: Vec::new(),
            }),
        }
    }

    /// What decides about a resume. To go on has the same result for the client as to be paused and resumed, unless the client
    /// wants what only a resume does.
    fn resume_of(&self, entry: &SandboxEntry, request: ResumeRequest) -> Resume {
        let end_us = self.clock.now_us() + i64::from(request.timeout_s) * SECOND_US;
        let lifecycle = entry.lifecycle();
        Resume {
            discards_processes: request.discards_processes,
            // It would be paused at the end of its lifetime again, which a resume begins anew.
            may_go_on: end_us <= entry.max_end_us()
                && request
                    .auto_pause
                    .is_none_or(|auto_pause| auto_pause == lifecycle.auto_pause),
            is_unwanted: request.reason == ResumeReason::Traffic && lifecycle.paused_for_files,
        }
    }

    /// Resumes a sandbox in its turn. One that has just come to its node is started from its files if its processes cannot be restored
    /// there.
    async fn resume_or_start(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        let arrived = self
            .parcels
            .as_ref()
            .is_some_and(|parcels| parcels.arrived.lock().contains(&turn.id));
        let resumed = self.resume_in_turn(turn, request).await;
        if !arrived || request.discards_processes {
            return resumed;
        }
        let error = match &resumed {
            Err(error @ PauseError::Node(NodeError::Refused(_) | NodeError::Failed(_))) => error,
            _ => return resumed,
        };
        tracing::warn!(sandbox.id = %turn.id, node.id = %turn.node.id(), error = %Chain(error), "a sandbox that has moved is started from its files");
        self.tracked
            .log(&turn.id, &LifecycleEvent::WithoutProcesses(reason_of(error)));
        let from_files = ResumeRequest {
            discards_processes: true,
            ..request
        };
        self.resume_in_turn(turn, from_files).await
    }

    async fn resume_in_turn(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        let id = &turn.id;
        self.recording.settle(turn).await?;
        if self.move_before_resume(turn).await? {
            return Err(PauseError::Moved);
        }
        let counted = turn.counted();
        let restores = matches!(
            counted,
            CountedAs::Paused {
                keep: Kept::Checkpoint,
                ..
            }
        ) && !request.discards_processes;
        if restores {
            // Also those that have waited for an attempt which has failed since.
            turn.check_attempt(Attempt::Restore, self.clock.now_us())?;
        }
        turn.count(CountedAs::Running)?;
        if let Err(error) = self.enter_host(turn).await {
            turn.force_count(counted);
            if self.move_for_capacity(turn).await {
                return Err(PauseError::Moved);
            }
            return Err(error);
        }
        if turn.apply(Transition::Resume).is_none() {
            self.keep_paused(turn, counted);
            return Err(PauseError::Stopping);
        }
        if request.discards_processes
            && let Err(error) = self.discard_before_resume(turn, counted).await
        {
            self.keep_paused(turn, counted);
            if !matches!(error, PauseError::OverQuota(_)) {
                self.recording.doubt(turn);
            }
            return Err(error);
        }
        let row = match self.begin_resume(turn, request, counted).await {
            Ok(row) => follow_node(row, counted),
            Err(error) => {
                self.keep_paused(turn, counted);
                if !matches!(error, PauseError::OverQuota(_)) {
                    self.recording.doubt(turn);
                }
                return Err(error);
            }
        };
        let starts_anew = row.kept == Some(Kept::Filesystem);
        let continued = match self.outdate_copy(turn).await {
            Ok(()) => self.let_continue(&turn.node, &row).await,
            Err(error) => Err(error),
        };
        let continued = match continued {
            Ok(continued) => continued,
            Err(error) => {
                if restores && has_failed(&error) {
                    turn.note_failure(Attempt::Restore, self.clock.now_us(), reason_of(&error));
                }
                let paused = Unrecorded::Paused {
                    kept: row.kept.unwrap_or(Kept::Filesystem),
                    kept_bytes: row.kept_bytes.unwrap_or(0),
                    paused_us: row.paused_us.unwrap_or_else(|| self.clock.now_us()),
                    resume_error: Some(reason_of(&error).to_owned()),
                };
                // Otherwise its row stays as it is, so that the next session keeps what there is of it, paused or not.
                if !matches!(&error, PauseError::Node(error) if is_unknown(&turn.node, error)) {
                    self.recording.record(turn, paused).await;
                }
                self.tracked.log(id, &LifecycleEvent::NotResumed(reason_of(&error)));
                self.keep_paused(turn, counted);
                return Err(error);
            }
        };
        // The resume does not count as lifetime, so the times are taken now.
        let now_us = self.clock.now_us();
        let end_us = (now_us + i64::from(request.timeout_s) * SECOND_US).min(row.max_end_us);
        let running = Unrecorded::Running {
            started_us: now_us,
            end_us,
            agent_version: continued
                .agent_version
                .as_deref()
                .map(|version| known_version(version).to_owned()),
        };
        let recorded = self.recording.record(turn, running).await;
        // It runs, whether or not that can be recorded now.
        let row = recorded.unwrap_or(SandboxRow {
            started_us: now_us,
            end_us,
            ..row
        });
        turn.follow(&row);
        turn.note_success(Attempt::Restore);
        if let Some(parcels) = &self.parcels {
            parcels.arrived.lock().remove(id);
        }
        turn.set_policy_pending(false);
        turn.reopen();
        // Its start command may have taken long.
        self.tell_start(&turn.node, &row, starts_anew).await;
        if turn.apply(Transition::Resumed).is_none() {
            return Err(PauseError::Stopping);
        }
        self.tracked.runs(&row);
        self.tracked.log(id, &LifecycleEvent::Resumed(request.reason, &row));
        self.tracked.metrics.resume(request.reason);
        tracing::info!(sandbox.id = %id, reason = request.reason.as_str(), "sandbox resumed");
        Ok(Connected {
            row,
            was_paused: true,
            stages: continued.stages,
        })
    }

    /// Has a paused sandbox that took nothing of the host take its share again.
    async fn enter_host(&self, turn: &Turn<'_>) -> Result<(), PauseError> {
        if turn.is_on_host() {
            return Ok(());
        }
        let admission = &turn.node.admission;
        let mut permit = admission.admit_to_host(&turn.id).await;
        if permit.is_err() && turn.node.pool.evict().await {
            // What is pooled may have what this one needs.
            permit = admission.admit_to_host(&turn.id).await;
        }
        turn.enter_host(permit.map_err(PauseError::NoCapacity)?);
        Ok(())
    }

    /// Gives up what is kept of a paused sandbox besides its disk, unless its team may not have it run: nothing of it is lost then.
    async fn discard_before_resume(self: &Arc<Self>, turn: &Turn<'_>, counted: CountedAs) -> Result<(), PauseError> {
        if let Some((quota, most)) = self.limits_of_all(&turn.node, &turn.team).await? {
            let share = turn.share.beyond(counted.share(turn.share));
            let room = turn.node.rows.team_has_room(&turn.team, share.of_team(), most);
            room.await?.map_err(|used| quota.over_by(used, share))?;
        }
        self.discard_processes(turn).await
    }

    /// Gives up what is kept of a paused sandbox besides its disk.
    async fn discard_processes(self: &Arc<Self>, turn: &Turn<'_>) -> Result<(), PauseError> {
        let Some(row) = self.store().sandbox_by_id(&turn.id).await? else {
            return Err(PauseError::Gone);
        };
        if row.kept == Some(Kept::Filesystem) {
            return Ok(());
        }
        let pause = |kept| Pause {
            kept,
            kept_bytes: row.kept_bytes.unwrap_or(0),
            paused_us: row.paused_us.unwrap_or(row.end_us),
            resume_error: None,
        };
        // First, so that after a crash nobody looks for processes that were ended.
        let change = turn
            .node
            .rows
            .sandbox_paused(&row.id, turn.version(), pause(Kept::Filesystem));
        turn.changed(change.await)?;
        let ended = self.pause_on_node(&turn.node, &row.id, Kept::Filesystem, false, CancellationToken::new());
        let Err(error) = ended.await else {
            return Ok(());
        };
        tracing::error!(sandbox.id = %row.id, error = %Chain(&error), "cannot end the processes of a paused sandbox");
        let kept = row.kept.unwrap_or(Kept::Filesystem);
        let change = turn.node.rows.sandbox_paused(&row.id, turn.version(), pause(kept));
        if let Err(NotChanged::Store(error)) = turn.changed(change.await) {
            return Err(error.into());
        }
        Err(match error {
            NodeError::NotFound(_) => PauseError::Gone,
            NodeError::Unsupported(why) => PauseError::Unsupported(why),
            error => PauseError::Node(error),
        })
    }

    async fn begin_resume(
        &self,
        turn: &Turn<'_>,
        request: ResumeRequest,
        counted: CountedAs,
    ) -> Result<SandboxRow, PauseError> {
        let now_us = self.clock.now_us();
        let before = turn.lifecycle();
        let lifecycle = LifecycleSpec {
            auto_pause: request.auto_pause.unwrap_or(before.auto_pause),
            paused_for_files: false,
            ..before
        };
        let max_end_us = now_us + i64::from(request.max_lifetime_s) * SECOND_US;
        let resumption = Resumption {
            end_us: (now_us + i64::from(request.timeout_s) * SECOND_US).min(max_end_us),
            max_end_us,
            execution_id: uuid::Uuid::new_v4().to_string(),
            lifecycle_json: to_json(lifecycle),
        };
        let (rows, version) = (&turn.node.rows, turn.version());
        let Some((quota, most)) = self.limits_of_all(&turn.node, &turn.team).await? else {
            let change = rows.sandbox_resuming(&turn.id, version, &resumption).await;
            return Ok(turn.changed(change)?);
        };
        let one = (&turn.id, &turn.team);
        let share = turn.share.beyond(counted.share(turn.share));
        let change = rows.sandbox_resuming_within(one, version, &resumption, share.of_team(), most);
        let change = match change.await {
            Ok(Ok(change)) => Ok(change),
            Ok(Err(used)) => return Err(quota.over_by(used, share).into()),
            Err(error) => Err(error),
        };
        Ok(turn.changed(change)?)
    }

    /// Has the beginning of a resume survive a loss of power, if another node could go on with a copy otherwise while this one runs.
    async fn outdate_copy(&self, turn: &Turn<'_>) -> Result<(), PauseError> {
        if self.parcels.is_some() && !turn.is_in_memory() {
            turn.node.rows.sync().await?;
        }
        Ok(())
    }

    /// Undoes the beginning of a resume.
    fn keep_paused(&self, turn: &Turn<'_>, counted: CountedAs) {
        turn.force_count(counted);
        if matches!(counted, CountedAs::Paused { keep, .. } if keep != Kept::Memory) {
            turn.leave_host();
        }
        turn.apply(Transition::Failed);
    }

    /// Has the node continue a sandbox, with the policy of its row, or start it anew on its disk.
    pub(super) async fn let_continue(&self, node: &ServedNode, row: &SandboxRow) -> Result<Continued, PauseError> {
        // A version that did not know what is kept kept the disk.
        let kept = row.kept.unwrap_or(Kept::Filesystem);
        let restart = match kept {
            Kept::Memory => None,
            Kept::Checkpoint | Kept::Filesystem => Some(self.restart_of(row).await?),
        };
        let request = ResumeSandbox {
            id: row.id.clone(),
            kept,
            egress: self.policies.of_row(row).await?,
            boot: restart.as_ref().map(|restart| restart.boot.clone()),
            deadline: self.node_deadline(node, row).await?,
        };
        let resumed = within_session(bound(kept), node.session_to_end(), node.handle.resume(request)).await;
        let resumed = resumed.map_err(|error| match error {
            NodeError::NotFound(_) if kept == Kept::Memory => PauseError::Gone,
            NodeError::Unsupported(why) => PauseError::Unsupported(why),
            error @ NodeError::Busy { .. } => PauseError::Node(error),
            error => {
                tracing::error!(sandbox.id = %row.id, error = %Chain(&error), "cannot resume a sandbox");
                PauseError::Node(error)
            }
        })?;
        let mut stages = resumed.stages;
        if kept == Kept::Filesystem
            && let Some(restart) = &restart
        {
            stages.extend(self.run_again(node, &row.id, restart).await);
        }
        Ok(Continued {
            agent_version: resumed.agent_version,
            stages,
        })
    }

    /// Connects to a sandbox: resumes it if it is paused, and otherwise extends its deadline.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        let mut last = PauseError::Gone;
        for _ in 0..CONNECT_ATTEMPTS {
            let was_paused = match entry.state().arrival(Command::Connect) {
                Arrival::Run | Arrival::Join => false,
                Arrival::Wait | Arrival::Cancel => true,
                Arrival::Refuse(why) => return Err(why.into()),
            };
            let connected = if was_paused {
                self.resume(entry, request).await
            } else {
                self.extend(entry, request).await.map(|row| Connected {
                    row,
                    was_paused,
                    stages: Vec::new(),
                })
            };
            match connected {
                Ok(connected) => return Ok(connected),
                // It was paused or resumed in between, or its row is looked at now.
                Err(error @ (PauseError::Paused | PauseError::Running | PauseError::Gone | PauseError::Stale)) => {
                    last = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    /// Never shortens: of two clients that connect, the one with the shorter timeout must not end the other's sandbox.
    async fn extend(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<SandboxRow, PauseError> {
        let wanted_us = self.clock.now_us() + i64::from(request.timeout_s) * SECOND_US;
        let deadline = Deadline::AtLeast(wanted_us.min(entry.max_end_us()));
        self.set_deadline(entry, deadline).await.map_err(|error| match error {
            ChangeError::Store(error) => PauseError::Store(error),
            ChangeError::Stale => PauseError::Stale,
            ChangeError::Stopping => PauseError::Stopping,
            ChangeError::Changing(_) | ChangeError::Gone => PauseError::Paused,
            ChangeError::NotTold(error) => PauseError::NotTold(error),
            ChangeError::NotApplied(error) => PauseError::Node(error),
            ChangeError::NoToken | ChangeError::Seal(_) | ChangeError::TaskFailed => PauseError::TaskFailed,
        })
    }

    /// Resumes a sandbox because of traffic to it, with the time that it was created with.
    pub(crate) async fn wake(self: &Arc<Self>, entry: &Arc<SandboxEntry>) -> Result<(), PauseError> {
        self.resume_because(entry, ResumeReason::Traffic).await
    }

    /// Resumes a sandbox for a command of the operator, with the time that it was created with.
    pub(crate) async fn resume_for_operator(self: &Arc<Self>, entry: &Arc<SandboxEntry>) -> Result<(), PauseError> {
        self.resume_because(entry, ResumeReason::Operator).await
    }

    async fn resume_because(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        reason: ResumeReason,
    ) -> Result<(), PauseError> {
        let quota = self.policies.admission.quota_of(&entry.team).await?;
        let max_lifetime_s = quota.limits.max_lifetime_s;
        let request = ResumeRequest {
            timeout_s: entry.lifecycle().timeout_s.max(WOKEN_FLOOR_S).min(max_lifetime_s),
            max_lifetime_s,
            auto_pause: None,
            discards_processes: false,
            reason,
        };
        match self.resume(entry, request).await {
            Ok(_) | Err(PauseError::Running) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The row of a sandbox whose processes the node has written to disk when that could not be recorded.
fn follow_node(row: SandboxRow, counted: CountedAs) -> SandboxRow {
    match (row.kept, counted) {
        (
            Some(Kept::Memory),
            CountedAs::Paused {
                keep: keep @ Kept::Checkpoint,
                ..
            },
        ) => SandboxRow {
            kept: Some(keep),
            ..row
        },
        _ => row,
    }
}

/// Whether the node has tried to resume it in vain, and would most likely again.
fn has_failed(error: &PauseError) -> bool {
    match error {
        PauseError::Node(error) => match error {
            NodeError::Refused(_) | NodeError::Failed(_) | NodeError::NoLayer(_) | NodeError::Unreachable(_) => true,
            NodeError::NotFound(_)
            | NodeError::Capacity(_)
            | NodeError::Busy { .. }
            | NodeError::Unavailable(_)
            | NodeError::Unsupported(_)
            | NodeError::Cancelled
            | NodeError::Away => false,
        },
        _ => false,
    }
}

/// Why a sandbox could not be resumed, for its client.
fn reason_of(error: &PauseError) -> &str {
    match error {
        PauseError::Unsupported(_) => "this host cannot resume what is kept of it",
        PauseError::Store(_) => "the database failed",
        PauseError::Node(NodeError::Refused(why)) => why,
        PauseError::Node(NodeError::Busy { .. }) => "others were being resumed, and its turn did not come in time",
        PauseError::Node(NodeError::Capacity(_)) => "the host has no capacity for it",
        PauseError::Node(NodeError::NoLayer(_)) => "a layer of its template is not on the host",
        PauseError::Node(NodeError::NotFound(_)) | PauseError::Gone => "the host has not found it",
        PauseError::Node(NodeError::Away) => "its node is not connected",
        PauseError::Node(NodeError::Unreachable(_)) => "the host did not answer in time",
        _ => "the host failed to start it; the log of the platform has the cause",
    }
}
