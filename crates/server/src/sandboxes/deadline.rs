//! Changing the deadlines of sandboxes, and ending sandboxes at their deadlines.

use std::sync::Arc;

use model::lifecycle::command::{AtDeadline, Deadlines};
use store::sandboxes::SandboxRow;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::{SandboxEntry, Turn};
use crate::outcome::EndReason;
use crate::records::LifecycleEvent;

/// A change of a deadline.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deadline {
    /// Set to exactly this time, even if it is earlier.
    Exactly(i64),
    /// Extended to this time; a later deadline is kept.
    AtLeast(i64),
}

impl Sandboxes {
    /// Changes the deadline of a sandbox, and returns its row.
    pub(crate) async fn set_deadline(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        deadline: Deadline,
    ) -> Result<SandboxRow, ChangeError> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        // On a task, so that a client disconnect cannot leave row and memory different.
        let task = self
            .work
            .spawn(async move { sandboxes.set_deadline_on_task(&entry, deadline).await });
        task.await.unwrap_or(Err(ChangeError::TaskFailed))
    }

    async fn set_deadline_on_task(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        deadline: Deadline,
    ) -> Result<SandboxRow, ChangeError> {
        let turn = self.turn_to_change(entry).await?;
        let before_us = turn.end_us();
        let after_us = match deadline {
            Deadline::Exactly(end_us) => end_us,
            Deadline::AtLeast(end_us) => end_us.max(before_us),
        };
        if after_us != before_us {
            self.tell_deadline(&turn, after_us).await?;
        }
        let change = match deadline {
            Deadline::Exactly(end_us) => turn.node.rows.sandbox_set_end(&entry.id, None, end_us).await,
            Deadline::AtLeast(end_us) => turn.node.rows.sandbox_extend_end(&entry.id, end_us).await,
        };
        let row = match turn.changed(change) {
            Ok(row) => row,
            Err(error) => {
                // The deadline of the row counts.
                if after_us != before_us
                    && let Err(error) = self.tell_deadline(&turn, before_us).await
                {
                    tracing::debug!(sandbox.id = %entry.id, "a deadline that was not stored: {error}");
                }
                return Err(error.into());
            }
        };
        if row.end_us != before_us {
            self.tracked.log(&row.id, &LifecycleEvent::TimeoutChanged(row.end_us));
        }
        match self.at_deadline(&turn) {
            // Not before this task has given up its turn.
            AtDeadline::Nothing | AtDeadline::Pause => self.tracked.deadlines.set(&row.id, row.end_us),
            // Gone for every request after this one, without waiting for the deadline task.
            AtDeadline::Expire => {
                self.begin_stop(entry, EndReason::Expired);
            }
            // It runs, or is ending.
            AtDeadline::EndRetention => {}
        }
        Ok(row)
    }

    /// What is done with a sandbox now because of its deadline.
    fn at_deadline(&self, turn: &Turn<'_>) -> AtDeadline {
        let now_us = self.clock.now_us();
        turn.state().at_deadline(Deadlines {
            is_due: turn.end_us() <= now_us,
            pauses: turn.lifecycle().auto_pause,
            is_retention_over: turn.retained_until_us().is_some_and(|until_us| until_us <= now_us),
        })
    }

    /// Ends sandboxes at their deadlines until `stop` is cancelled.
    pub(crate) async fn enforce_deadlines(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let due = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                due = self.tracked.deadlines.due(&self.clock) => due,
            };
            for id in due {
                let Some(entry) = self.tracked.registry.get(&id) else {
                    continue;
                };
                let sandboxes = Arc::clone(&self);
                self.work.spawn(async move { sandboxes.expire(&entry).await });
            }
        }
    }

    async fn expire(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        // An extension in progress wins: it has its turn, and its client is about to get a success response. So do a
        // pause, after which there is no deadline, and a resume, after which there is another one.
        let turn = entry.turn().await;
        match self.at_deadline(&turn) {
            AtDeadline::Nothing => {}
            AtDeadline::Pause => {
                drop(turn);
                self.pause_at_deadline(entry).await;
            }
            AtDeadline::Expire => {
                self.begin_stop(entry, EndReason::Expired);
            }
            AtDeadline::EndRetention => {
                self.begin_stop(entry, EndReason::Retention);
            }
        }
    }
}
