//! Ending a sandbox: once, however many callers ask for it.
//!
//! Traffic to it stops immediately, and it is ended on a task of its own. Callers that ask meanwhile wait for the same
//! task; a failed attempt is retried at a new deadline.

use std::sync::Arc;

use model::lifecycle::command::{Arrival, Command};
use model::lifecycle::row::RowChange;
use protocol::node::NodeError;

use super::Sandboxes;
use super::entry::{NotChanged, SandboxEntry, StopOutcome, Turn};
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::outcome::EndReason;
use crate::records::LifecycleEvent;

/// Pause before a failed attempt is retried, in microseconds.
const STOP_RETRY_US: i64 = SECOND_US;

impl Sandboxes {
    /// Kills a sandbox for a client, or waits for a termination in progress. `None` if there is no running sandbox to
    /// end.
    pub(crate) async fn stop(self: &Arc<Self>, entry: &Arc<SandboxEntry>) -> Option<StopOutcome> {
        self.stop_because(entry, EndReason::Killed).await
    }

    /// As [`Self::stop`], for another reason than a client's request.
    pub(crate) async fn stop_because(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        reason: EndReason,
    ) -> Option<StopOutcome> {
        match self.begin_stop(entry, reason) {
            Arrival::Refuse(_) => None,
            Arrival::Run | Arrival::Join | Arrival::Wait | Arrival::Cancel => Some(entry.stopped().await),
        }
    }

    /// Stops traffic to a sandbox immediately and ends it on a task of its own.
    pub(super) fn begin_stop(self: &Arc<Self>, entry: &Arc<SandboxEntry>, reason: EndReason) -> Arrival {
        let arrival = entry.begin_stop();
        if arrival == Arrival::Cancel {
            self.tracked.log(&entry.id, &LifecycleEvent::Ending(reason));
        }
        // Otherwise another task ends it, or has done so.
        if matches!(arrival, Arrival::Cancel | Arrival::Wait) {
            let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
            self.work.spawn(async move {
                // Reported even if the task panics or is cancelled, because others wait for it.
                let mut ended = StopReport {
                    sandboxes,
                    entry,
                    outcome: StopOutcome::Failed,
                };
                ended.outcome = ended.sandboxes.end(&ended.entry, reason).await;
                if ended.outcome == StopOutcome::Gone {
                    ended.sandboxes.count_end(&ended.entry, reason);
                }
            });
        }
        arrival
    }

    fn count_end(&self, entry: &SandboxEntry, reason: EndReason) {
        self.tracked.metrics.end(reason);
        if reason == EndReason::Expired {
            self.tracked.metrics.expired(self.clock.now_us() - entry.end_us());
        }
    }

    /// Ends a sandbox. Its row says first that it ends: it is in no list from then on, and what a crash leaves is ended at the
    /// next start.
    async fn end(self: &Arc<Self>, entry: &Arc<SandboxEntry>, reason: EndReason) -> StopOutcome {
        let id = &entry.id;
        // What writes its processes to disk gives up, whether or not a client waits for that.
        let turn = entry.turn_of(Command::Stop { is_retry: false }).await;
        if let Some(moved) = self.moved(entry) {
            // It has moved to another node before its end had its turn.
            let ended = Box::pin(self.stop_because(&moved, reason)).await;
            return ended.unwrap_or(StopOutcome::Gone);
        }
        self.tracked.deadlines.remove(id);
        self.record_stop(&turn).await;
        turn.cut();
        match turn.node.handle.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => {}
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot end a sandbox");
                return match error {
                    NodeError::Away | NodeError::Unreachable(_) => StopOutcome::Away,
                    _ => StopOutcome::Failed,
                };
            }
        }
        let deleted = match turn.node.rows.sandbox_delete(id).await {
            Ok(deleted) => deleted,
            Err(error) => {
                self.tracked
                    .store_failed(&error, id, "cannot remove the row of an ended sandbox");
                return StopOutcome::Unrecorded;
            }
        };
        self.tracked.remove(&turn.node, id);
        match deleted {
            Some(row) => self.remove_parcels(&row),
            // It may have been brought to another node by another server, or an attempt has removed it whose answer was lost.
            None => self.remove_parcels_without_row(id).await,
        }
        StopOutcome::Gone
    }

    async fn record_stop(&self, turn: &Turn<'_>) {
        let change = turn
            .node
            .rows
            .sandbox_change_state(&turn.id, turn.version(), RowChange::Stopping);
        match turn.changed(change.await) {
            // One that was changed concurrently is removed as well.
            Ok(_) | Err(NotChanged::Stale | NotChanged::Missing) => {}
            Err(NotChanged::Store(error)) => {
                self.tracked
                    .store_failed(&error, &turn.id, "cannot record that a sandbox is stopping");
            }
        }
    }
}

/// Reports the outcome of ending a sandbox when dropped.
struct StopReport {
    sandboxes: Arc<Sandboxes>,
    entry: Arc<SandboxEntry>,
    outcome: StopOutcome,
}

impl Drop for StopReport {
    fn drop(&mut self) {
        // The next session of its node finds it in its row, and ends it.
        if self.outcome != StopOutcome::Gone && !self.entry.node.over.is_cancelled() {
            let again_us = self.sandboxes.clock.now_us() + STOP_RETRY_US;
            self.sandboxes.tracked.deadlines.set(&self.entry.id, again_us);
        }
        self.entry.set_stopped(self.outcome);
    }
}
