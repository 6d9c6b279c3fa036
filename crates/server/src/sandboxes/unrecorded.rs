//! States that could not be recorded, because the database failed after the node had done its part. They are recorded as
//! soon as the database works again, unless another change comes first, which takes the row from the state that it has.

use std::sync::Arc;
use std::time::Duration;

use model::lifecycle::{Kept, State};
use store::Change;
use store::error::StoreError;
use store::sandboxes::{Pause, SandboxRow};

use super::Sandboxes;
use super::entry::{SandboxEntry, Turn};

/// Pause before a state is recorded again.
const RETRY: Duration = Duration::from_secs(1);

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

impl Sandboxes {
    /// Records that a sandbox is paused or runs, now or as soon as that is possible. Returns the row if it was now.
    pub(super) async fn record(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        version: i64,
        state: Unrecorded,
    ) -> Option<SandboxRow> {
        match self.write(turn, version, &state).await {
            Ok(Change::Applied(row)) => {
                turn.update(row.version, row.end_us);
                Some(row)
            }
            // Another start has changed the row, or it is gone.
            Ok(Change::Stale | Change::Missing) => None,
            Err(error) => {
                self.log_store_error(&error, &turn.id, "cannot record the state of a sandbox yet");
                let (sandboxes, entry) = (Arc::clone(self), Arc::clone(turn));
                self.work
                    .spawn(async move { sandboxes.record_later(&entry, version, state).await });
                None
            }
        }
    }

    async fn record_later(&self, entry: &Arc<SandboxEntry>, version: i64, state: Unrecorded) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                // The next start finds out by itself.
                () = self.stopping.cancelled() => return,
            }
            let turn = entry.turn().await;
            if turn.version() != version || turn.state() != state.state() {
                return;
            }
            match self.write(&turn, version, &state).await {
                Ok(Change::Applied(row)) => return turn.update(row.version, row.end_us),
                Ok(Change::Stale | Change::Missing) => return,
                Err(error) => self.log_store_error(&error, &entry.id, "cannot record the state of a sandbox yet"),
            }
        }
    }

    async fn write(
        &self,
        entry: &SandboxEntry,
        version: i64,
        state: &Unrecorded,
    ) -> Result<Change<SandboxRow>, StoreError> {
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
                self.rows.sandbox_paused(&entry.id, version, pause).await
            }
            Unrecorded::Running {
                started_us,
                end_us,
                agent_version,
            } => {
                let times = (*started_us, *end_us);
                let version_of_agent = agent_version.as_deref();
                self.rows
                    .sandbox_resumed(&entry.id, version, times, version_of_agent)
                    .await
            }
        }
    }
}
