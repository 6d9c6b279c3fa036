//! Pausing and resuming sandboxes. Row first, then the node, then the row again.
//!
//! The states between are short, and no client gets stuck in them: whoever asks meanwhile waits for the change in progress
//! and shares its result, or goes on from there. After a crash, the next start adopts the sandbox as its processes are,
//! running or stopped. So the row of a sandbox that is being resumed has its new deadline before its processes continue,
//! and that of a sandbox that is being paused keeps its deadline until they have stopped.

use std::sync::Arc;
use std::time::Duration;

use model::lifecycle::{Kept, State, Transition};
use model::network::EgressPolicy;
use model::sandbox::LifecycleSpec;
use protocol::node::{Failure, NodeError, PausedSandbox, ResumeSandbox};
use store::Change;
use store::error::StoreError;
use store::sandboxes::{Resumption, SandboxRow};

use super::Sandboxes;
use super::change::ChangeError;
use super::deadline::Deadline;
use super::lifecycle::to_json;
use super::registry::SandboxEntry;
use crate::admission::quota::OverQuota;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::outcome::{EndReason, PauseReason, ResumeReason};
use crate::records::LifecycleEvent;

/// How long a node may take to stop the processes of a sandbox, or to let them continue. It takes a second at most; the
/// bound is for a node that does not answer, because the sandbox cannot be ended meanwhile.
const NODE_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a client that connects starts again because the state has changed meanwhile.
const CONNECT_ATTEMPTS: usize = 3;
/// Pause before a sandbox is paused again that could not be paused at its deadline, in microseconds.
const PAUSE_RETRY_US: i64 = SECOND_US;
/// Shortest time until the deadline of a sandbox that traffic has resumed, in seconds.
const WOKEN_FLOOR_S: u32 = 300;

/// Why a sandbox was not paused or resumed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PauseError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the sandbox is paused already")]
    Paused,
    #[error("the sandbox runs already")]
    Running,
    #[error("the sandbox is being ended")]
    Stopping,
    #[error("the sandbox is gone")]
    Gone,
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    /// The node cannot do it at all.
    #[error("{0}")]
    Unsupported(String),
    /// The node failed; the sandbox is as before.
    #[error("the node failed")]
    Node(#[source] NodeError),
    #[error("the task panicked or was cancelled")]
    TaskFailed,
}

/// How a sandbox is resumed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResumeRequest {
    /// Seconds until its deadline.
    pub(crate) timeout_s: u32,
    /// The longest lifetime that its team may give it, in seconds.
    pub(crate) max_lifetime_s: u32,
    /// Whether it is paused at its deadline from now on; none to leave that.
    pub(crate) auto_pause: Option<bool>,
    /// Why.
    pub(crate) reason: ResumeReason,
}

/// A sandbox to which a client has connected.
#[derive(Debug)]
pub(crate) struct Connected {
    /// Its row.
    pub(crate) row: SandboxRow,
    /// Whether it had to be resumed.
    pub(crate) was_paused: bool,
}

impl Sandboxes {
    /// Pauses a running sandbox. Callers that ask while it is being paused share the result.
    pub(crate) async fn pause(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        reason: PauseReason,
    ) -> Result<(), PauseError> {
        if entry.state() == State::Paused {
            return Err(PauseError::Paused);
        }
        let shares = matches!(entry.state(), State::Running | State::Pausing);
        let (sandboxes, entry_of_task) = (Arc::clone(self), Arc::clone(entry));
        let pausing = async move {
            let entry = entry_of_task;
            let _guard = entry.change_lock.lock().await;
            match entry.state() {
                State::Running if reason == PauseReason::Timeout && entry.end_us() > sandboxes.clock.now_us() => Ok(()),
                State::Running => sandboxes.pause_locked(&entry, reason).await,
                State::Paused if shares => Ok(()),
                State::Paused => Err(PauseError::Paused),
                State::Stopping => Err(PauseError::Stopping),
                State::Creating | State::Pausing | State::Resuming | State::Gone => Err(PauseError::Gone),
            }
        };
        self.on_task(entry, pausing).await
    }

    /// Runs a change on a task, so that a client disconnect leaves nothing half done, and nor does a panic.
    async fn on_task<T: Send + 'static>(
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

    /// Lets a sandbox run whose pause or resume panicked at an unknown point.
    async fn recover(&self, entry: &SandboxEntry) {
        let _guard = entry.change_lock.lock().await;
        if !matches!(entry.state(), State::Pausing | State::Resuming) {
            return;
        }
        match self.store.sandbox_by_id(&entry.id).await {
            Ok(Some(row)) => {
                if let Err(error) = self.let_continue(&row).await {
                    tracing::error!(sandbox.id = %entry.id, error = %Chain(&error), "cannot resume a sandbox after a panic");
                }
                let now_us = self.clock.now_us();
                match self
                    .rows
                    .sandbox_resumed(&row.id, row.version, now_us, row.end_us)
                    .await
                {
                    Ok(Change::Applied(row)) => entry.follow(&row),
                    Ok(Change::Stale | Change::Missing) => {}
                    Err(error) => self.log_store_error(&error, &entry.id, "cannot record that a sandbox runs"),
                }
            }
            Ok(None) => {}
            Err(error) => self.log_store_error(&error, &entry.id, "cannot read the row of a sandbox"),
        }
        if !entry.apply(Transition::Started) {
            return self.keep_running(entry);
        }
        entry.force_count(false);
        entry.reopen();
        let again_us = self.clock.now_us() + PAUSE_RETRY_US;
        self.deadlines.set(&entry.id, entry.end_us().max(again_us));
    }

    async fn pause_locked(&self, entry: &SandboxEntry, reason: PauseReason) -> Result<(), PauseError> {
        let id = &entry.id;
        entry.count_as_paused(true)?;
        if !entry.apply(Transition::Pause) {
            entry.force_count(false);
            return Err(PauseError::Stopping);
        }
        let row = match self.rows.sandbox_pausing(id, entry.version(), Kept::Memory).await {
            Ok(Change::Applied(row)) => row,
            Ok(Change::Stale | Change::Missing) => {
                self.keep_running(entry);
                return Err(PauseError::Gone);
            }
            Err(error) => {
                self.keep_running(entry);
                return Err(error.into());
            }
        };
        entry.update(row.version, row.end_us);
        self.deadlines.remove(id);
        entry.cut();
        let paused = match within(self.node.pause(id)).await {
            Ok(paused) => paused,
            Err(error) => return Err(self.give_up_pause(entry, row, error).await),
        };
        let PausedSandbox { kept, memory_bytes } = paused;
        match self
            .rows
            .sandbox_paused(id, row.version, kept, self.clock.now_us())
            .await
        {
            Ok(Change::Applied(row)) => entry.update(row.version, row.end_us),
            // Its processes have stopped, so it is paused. The next start, or a resume, finds that out.
            Ok(Change::Stale | Change::Missing) => {}
            Err(error) => self.log_store_error(&error, id, "cannot record that a sandbox is paused"),
        }
        self.records.stop_sampling(id);
        self.records.log_event(id, &LifecycleEvent::Paused(reason));
        self.metrics.pause(reason);
        tracing::info!(sandbox.id = %id, reason = reason.as_str(), memory_bytes, "sandbox paused");
        match entry.apply(Transition::Saved) {
            true => Ok(()),
            // It is being ended, which waits for this task.
            false => Err(PauseError::Stopping),
        }
    }

    /// Undoes the beginning of a pause.
    fn keep_running(&self, entry: &SandboxEntry) {
        entry.force_count(false);
        entry.reopen();
        if entry.apply(Transition::Failed) {
            let again_us = self.clock.now_us() + PAUSE_RETRY_US;
            self.deadlines.set(&entry.id, entry.end_us().max(again_us));
        }
    }

    /// A failed pause leaves the sandbox running.
    async fn give_up_pause(&self, entry: &SandboxEntry, row: SandboxRow, error: NodeError) -> PauseError {
        let id = &entry.id;
        if !matches!(error, NodeError::Unsupported(_)) {
            tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot pause a sandbox");
        }
        if matches!(error, NodeError::Unreachable(_)) {
            // Its processes may have stopped.
            if let Err(error) = self.let_continue(&row).await {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot undo the pause of a sandbox");
            }
        }
        match self
            .rows
            .sandbox_resumed(id, row.version, row.started_us, row.end_us)
            .await
        {
            Ok(Change::Applied(row)) => entry.update(row.version, row.end_us),
            Ok(Change::Stale | Change::Missing) => {}
            Err(error) => self.log_store_error(&error, id, "cannot record that a sandbox was not paused"),
        }
        self.keep_running(entry);
        match error {
            // Its end is about to be reported.
            NodeError::NotFound(_) => PauseError::Gone,
            NodeError::Unsupported(why) => PauseError::Unsupported(why),
            error => PauseError::Node(error),
        }
    }

    /// Resumes a paused sandbox. Callers that ask while it is being resumed share the result, and each has at least the
    /// time that it asked for.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<SandboxRow, PauseError> {
        if entry.state() == State::Running {
            return Err(PauseError::Running);
        }
        let (sandboxes, entry_of_task) = (Arc::clone(self), Arc::clone(entry));
        let resuming = async move {
            let entry = entry_of_task;
            let guard = entry.change_lock.lock().await;
            match entry.state() {
                State::Paused => {
                    let changes = sandboxes.injections.changes();
                    let resumed = sandboxes.resume_locked(&entry, request).await;
                    drop(guard);
                    if resumed.is_ok() && sandboxes.injections.changes() != changes {
                        // A rule or a secret was changed meanwhile, when it was not among those that run.
                        sandboxes.apply_again(&entry).await;
                    }
                    resumed.map(Some)
                }
                // Another caller has resumed it.
                State::Running => Ok(None),
                State::Stopping => Err(PauseError::Stopping),
                State::Creating | State::Pausing | State::Resuming | State::Gone => Err(PauseError::Gone),
            }
        };
        match self.on_task(entry, resuming).await? {
            Some(row) => Ok(row),
            None => self.extend(entry, request).await,
        }
    }

    async fn resume_locked(&self, entry: &SandboxEntry, request: ResumeRequest) -> Result<SandboxRow, PauseError> {
        let id = &entry.id;
        entry.count_as_paused(false)?;
        if !entry.apply(Transition::Resume) {
            entry.force_count(true);
            return Err(PauseError::Stopping);
        }
        let row = match self.begin_resume(entry, request).await {
            Ok(row) => row,
            Err(error) => {
                self.keep_paused(entry);
                return Err(error);
            }
        };
        if let Err(error) = self.let_continue(&row).await {
            let (kept, paused_us) = (row.kept.unwrap_or(Kept::Memory), row.paused_us);
            let paused_us = paused_us.unwrap_or_else(|| self.clock.now_us());
            match self.rows.sandbox_paused(id, row.version, kept, paused_us).await {
                Ok(Change::Applied(row)) => entry.update(row.version, row.end_us),
                Ok(Change::Stale | Change::Missing) => {}
                Err(error) => self.log_store_error(&error, id, "cannot record that a sandbox was not resumed"),
            }
            self.keep_paused(entry);
            return Err(error);
        }
        // The resume does not count as lifetime, so the times are taken now.
        let now_us = self.clock.now_us();
        let end_us = (now_us + i64::from(request.timeout_s) * SECOND_US).min(row.max_end_us);
        let row = match self.rows.sandbox_resumed(id, row.version, now_us, end_us).await {
            Ok(Change::Applied(row)) => row,
            // It runs. The next start finds that out.
            Ok(Change::Stale | Change::Missing) => SandboxRow { end_us, ..row },
            Err(error) => {
                self.log_store_error(&error, id, "cannot record that a sandbox was resumed");
                SandboxRow { end_us, ..row }
            }
        };
        entry.follow(&row);
        entry.set_policy_pending(false);
        entry.reopen();
        if !entry.apply(Transition::Started) {
            return Err(PauseError::Stopping);
        }
        self.deadlines.set(id, row.end_us);
        self.records.start_sampling(&row);
        self.records
            .log_event(id, &LifecycleEvent::Resumed(request.reason, &row));
        self.metrics.resume(request.reason);
        tracing::info!(sandbox.id = %id, reason = request.reason.as_str(), "sandbox resumed");
        Ok(row)
    }

    async fn begin_resume(&self, entry: &SandboxEntry, request: ResumeRequest) -> Result<SandboxRow, PauseError> {
        let now_us = self.clock.now_us();
        let before = entry.lifecycle();
        let lifecycle = LifecycleSpec {
            auto_pause: request.auto_pause.unwrap_or(before.auto_pause),
            ..before
        };
        let max_end_us = now_us + i64::from(request.max_lifetime_s) * SECOND_US;
        let resumption = Resumption {
            end_us: (now_us + i64::from(request.timeout_s) * SECOND_US).min(max_end_us),
            max_end_us,
            execution_id: uuid::Uuid::new_v4().to_string(),
            lifecycle_json: to_json(lifecycle),
        };
        match self
            .rows
            .sandbox_resuming(&entry.id, entry.version(), &resumption)
            .await?
        {
            Change::Applied(row) => {
                entry.update(row.version, row.end_us);
                Ok(row)
            }
            Change::Stale | Change::Missing => Err(PauseError::Gone),
        }
    }

    /// Undoes the beginning of a resume.
    fn keep_paused(&self, entry: &SandboxEntry) {
        entry.force_count(true);
        entry.apply(Transition::Failed);
    }

    /// Has the node continue a sandbox, with the policy of its row.
    async fn let_continue(&self, row: &SandboxRow) -> Result<(), PauseError> {
        let request = ResumeSandbox {
            id: row.id.clone(),
            // A version that did not know what is kept kept the disk.
            kept: row.kept.unwrap_or(Kept::Filesystem),
            egress: self.policy_of(row).await?,
        };
        within(self.node.resume(request)).await.map_err(|error| match error {
            NodeError::NotFound(_) => PauseError::Gone,
            NodeError::Unsupported(why) => PauseError::Unsupported(why),
            error => {
                tracing::error!(sandbox.id = %row.id, error = %Chain(&error), "cannot resume a sandbox");
                PauseError::Node(error)
            }
        })
    }

    /// What a sandbox with this row may reach now.
    pub(super) async fn policy_of(&self, row: &SandboxRow) -> Result<EgressPolicy, StoreError> {
        let injections = self.injections.of_sandbox(&row.id).await?;
        let context = self.policies.context_of(&row.team_id, injections.as_ref()).await?;
        self.policies.of(row, context).await
    }

    /// Connects to a sandbox: resumes it if it is paused, and otherwise extends its deadline.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        request: ResumeRequest,
    ) -> Result<Connected, PauseError> {
        let mut last = PauseError::Gone;
        for _ in 0..CONNECT_ATTEMPTS {
            let was_paused = match entry.state() {
                State::Running => false,
                State::Pausing | State::Paused | State::Resuming => true,
                State::Stopping => return Err(PauseError::Stopping),
                State::Creating | State::Gone => return Err(PauseError::Gone),
            };
            let connected = match was_paused {
                true => self.resume(entry, request).await,
                false => self.extend(entry, request).await,
            };
            match connected {
                Ok(row) => return Ok(Connected { row, was_paused }),
                // It was paused or resumed in between.
                Err(error @ (PauseError::Paused | PauseError::Running | PauseError::Gone)) => last = error,
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
            ChangeError::Stopping => PauseError::Stopping,
            ChangeError::Changing(_) | ChangeError::Gone => PauseError::Paused,
            ChangeError::NotApplied(error) => PauseError::Node(error),
            ChangeError::NoToken | ChangeError::Seal(_) | ChangeError::TaskFailed => PauseError::TaskFailed,
        })
    }

    /// Resumes a sandbox because of traffic to it, with the time that it was created with.
    pub(crate) async fn wake(self: &Arc<Self>, entry: &Arc<SandboxEntry>) -> Result<(), PauseError> {
        let quota = self.policies.admission.quota_of(&entry.team).await?;
        let max_lifetime_s = quota.limits.max_lifetime_s;
        let request = ResumeRequest {
            timeout_s: entry.lifecycle().timeout_s.max(WOKEN_FLOOR_S).min(max_lifetime_s),
            max_lifetime_s,
            auto_pause: None,
            reason: ResumeReason::Traffic,
        };
        match self.resume(entry, request).await {
            Ok(_) | Err(PauseError::Running) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Pauses a sandbox at its deadline. One that cannot be paused at all is ended, as its client was told that it does not
    /// run any longer than that.
    pub(super) async fn pause_at_deadline(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        let why = match self.pause(entry, PauseReason::Timeout).await {
            Ok(()) | Err(PauseError::Paused | PauseError::Running | PauseError::Stopping | PauseError::Gone) => return,
            Err(PauseError::OverQuota(_)) => "limits.paused_sandboxes",
            Err(PauseError::Unsupported(why)) => {
                tracing::warn!(sandbox.id = %entry.id, "a sandbox is ended at its deadline, and not paused: {why}");
                "unsupported"
            }
            // It has another deadline, at which it is tried again.
            Err(PauseError::Store(error)) => {
                return self.log_store_error(&error, &entry.id, "cannot pause a sandbox at its deadline");
            }
            Err(PauseError::Node(_) | PauseError::TaskFailed) => return,
        };
        self.records.log_event(&entry.id, &LifecycleEvent::NotPaused(why));
        self.begin_stop(entry, EndReason::Expired);
    }
}

/// The answer of a node, or that there was none in time.
async fn within<T>(answer: impl Future<Output = Result<T, NodeError>>) -> Result<T, NodeError> {
    match tokio::time::timeout(NODE_TIMEOUT, answer).await {
        Ok(answer) => answer,
        Err(elapsed) => Err(NodeError::Unreachable(Failure::of(&elapsed))),
    }
}
