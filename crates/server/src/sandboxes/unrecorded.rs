//! States that could not be recorded, because the database failed after the node had done its part. They are recorded as
//! soon as the database works again, unless another change comes first, which takes the row from the state that it has.
//!
//! A database that fails may have made the change: a connection can be lost between a commit and its answer. Then the row
//! is one version ahead of what is known here, and every later change of it would be refused as one of another server. So
//! each failed change leaves the row in doubt, until it is read again: before the next change, or as soon as the
//! database works. So does a change that finds another row than is known: one before it was made late.

use std::sync::Arc;
use std::time::Duration;

use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, State};
use store::error::StoreError;
use store::sandboxes::{Pause, SandboxRow};
use store::{Change, Store};

use super::entry::{NotChanged, SandboxEntry, Turn};
use super::tracked::Tracked;
use super::work::Work;

/// Pause before a state is recorded again.
const RETRY: Duration = Duration::from_secs(1);

/// Brings rows in line with what their sandboxes are.
#[derive(Debug)]
pub(crate) struct Recording {
    store: Store,
    tracked: Arc<Tracked>,
    work: Arc<Work>,
}

/// A state that is not recorded yet.
#[derive(Debug, Clone)]
pub(super) enum Unrecorded {
    Paused {
        kept: Kept,
        kept_bytes: i64,
        paused_us: i64,
        resume_error: Option<String>,
    },
    Running {
        started_us: i64,
        end_us: i64,
        agent_version: Option<String>,
    },
}

impl Unrecorded {
    fn state(&self) -> State {
        match self {
            Self::Paused { .. } => State::Paused,
            Self::Running { .. } => State::Running,
        }
    }
}

impl Recording {
    /// Records states in the rows of the sandboxes' nodes.
    pub(crate) fn new(store: Store, tracked: Arc<Tracked>, work: Arc<Work>) -> Self {
        Self { store, tracked, work }
    }

    /// Records that a sandbox is paused or runs, now or as soon as that is possible. Returns the row if it was now.
    pub(super) async fn record(self: &Arc<Self>, turn: &Turn<'_>, state: Unrecorded) -> Option<SandboxRow> {
        match turn.changed(self.write(turn, turn.version(), &state).await) {
            Ok(row) => Some(row),
            Err(NotChanged::Stale | NotChanged::Missing) => None,
            Err(NotChanged::Store(error)) => {
                self.tracked
                    .store_failed(&error, &turn.id, "cannot record the state of a sandbox yet");
                let (recording, entry, version) = (Arc::clone(self), Arc::clone(turn), turn.version());
                self.work
                    .spawn(async move { recording.record_later(&entry, version, state).await });
                None
            }
        }
    }

    async fn record_later(&self, entry: &Arc<SandboxEntry>, version: i64, state: Unrecorded) {
        // The next session of its node finds out by itself.
        while self.work.pause(RETRY).await && !entry.node.over.is_cancelled() {
            let turn = entry.turn().await;
            if let Err(error) = self.settle(&turn).await {
                self.tracked
                    .store_failed(&error, &entry.id, "cannot record the state of a sandbox yet");
                continue;
            }
            if turn.version() != version || turn.state() != state.state() {
                return;
            }
            match turn.changed(self.write(&turn, version, &state).await) {
                Ok(_) | Err(NotChanged::Stale | NotChanged::Missing) => return,
                Err(NotChanged::Store(error)) => {
                    self.tracked
                        .store_failed(&error, &entry.id, "cannot record the state of a sandbox yet");
                }
            }
        }
    }

    /// Has the row of a sandbox be read as soon as the database works, if a change of it failed.
    pub(super) fn doubt(self: &Arc<Self>, turn: &Turn<'_>) {
        if !turn.is_row_in_doubt() {
            return;
        }
        let (recording, entry) = (Arc::clone(self), Arc::clone(turn));
        self.work.spawn(async move {
            while recording.work.pause(RETRY).await && !entry.node.over.is_cancelled() {
                let turn = entry.turn().await;
                let Err(error) = recording.settle(&turn).await else {
                    return;
                };
                let what = "cannot read the row of a sandbox";
                recording.tracked.store_failed(&error, &entry.id, what);
            }
        });
    }

    /// Takes over the row of a sandbox if it is in doubt, and brings it back to the state that the sandbox has if it had
    /// begun to leave that. Whoever has the turn is the only one to change the row, so what it has beyond the version that
    /// is known was made here.
    ///
    /// # Errors
    /// When the database fails; the row stays in doubt.
    pub(super) async fn settle(&self, turn: &Turn<'_>) -> Result<(), StoreError> {
        if !turn.is_row_in_doubt() {
            return Ok(());
        }
        let row = self.store.sandbox_by_id(&turn.id).await?;
        if let Some(row) = row.filter(|row| row.version > turn.version()) {
            let before_us = turn.end_us();
            let state = match turn.state().repair(row.state) {
                Some(RowChange::Running) => Some(Unrecorded::Running {
                    started_us: row.started_us,
                    end_us: row.end_us,
                    agent_version: None,
                }),
                Some(RowChange::Paused) => Some(Unrecorded::Paused {
                    kept: row.kept.unwrap_or(Kept::Filesystem),
                    kept_bytes: row.kept_bytes.unwrap_or(0),
                    paused_us: row.paused_us.unwrap_or(row.end_us),
                    resume_error: row.resume_error.clone(),
                }),
                _ => None,
            };
            match state {
                // Its version is known from then on alone, so that another look brings it back if this fails.
                Some(state) => {
                    let change = self.write(turn, row.version, &state).await;
                    if let Err(NotChanged::Store(error)) = turn.changed(change) {
                        return Err(error);
                    }
                }
                None => turn.read(&row),
            }
            if turn.state() == State::Running && turn.end_us() != before_us {
                self.tracked.deadlines.set(&turn.id, turn.end_us());
            }
        }
        turn.settled();
        Ok(())
    }

    async fn write(&self, turn: &Turn<'_>, version: i64, state: &Unrecorded) -> Result<Change<SandboxRow>, StoreError> {
        let id = &turn.id;
        match state {
            Unrecorded::Paused {
                kept,
                kept_bytes,
                paused_us,
                resume_error,
            } => {
                let pause = Pause {
                    kept: *kept,
                    kept_bytes: *kept_bytes,
                    paused_us: *paused_us,
                    resume_error: resume_error.as_deref(),
                };
                turn.node.rows.sandbox_paused(id, version, pause).await
            }
            Unrecorded::Running {
                started_us,
                end_us,
                agent_version,
            } => {
                let version_of_agent = agent_version.as_deref();
                turn.node
                    .rows
                    .sandbox_resumed(id, version, *started_us, *end_us, version_of_agent)
                    .await
            }
        }
    }
}
