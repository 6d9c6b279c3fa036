//! Ending a sandbox, once, however many ask for it.
//!
//! It leaves traffic at once and is ended on a task of its own. Whoever asks while it is being ended waits for the same
//! end; an end that failed is tried again at a new deadline.

use std::sync::Arc;

use model::lifecycle::State;
use protocol::node::NodeError;
use store::Change;

use super::Sandboxes;
use super::registry::{SandboxEntry, StopOutcome, StopRole};
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::outcome::EndReason;
use crate::records::LifecycleEvent;

/// Pause before an end that failed is tried again, in microseconds.
const STOP_RETRY_US: i64 = SECOND_US;

impl Sandboxes {
    /// Ends a sandbox, or waits until whoever ends it already is done. `None` when it is not there to be ended.
    pub(crate) async fn stop(self: &Arc<Self>, entry: &Arc<SandboxEntry>) -> Option<StopOutcome> {
        self.stop_because(entry, EndReason::Killed).await
    }

    /// As [`Self::stop`], for another reason than that its client asked for it.
    pub(crate) async fn stop_because(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        reason: EndReason,
    ) -> Option<StopOutcome> {
        match self.begin_stop(entry, reason) {
            StopRole::Begin | StopRole::Retry | StopRole::Join => Some(entry.stopped().await),
            StopRole::Gone => None,
        }
    }

    /// Takes a sandbox out of traffic at once and ends it on a task of its own.
    pub(super) fn begin_stop(self: &Arc<Self>, entry: &Arc<SandboxEntry>, reason: EndReason) -> StopRole {
        let stop = entry.stop();
        if stop == StopRole::Begin {
            self.records.log_event(&entry.id, &LifecycleEvent::Ending(reason));
        }
        if matches!(stop, StopRole::Begin | StopRole::Retry) {
            let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
            self.work.spawn(async move {
                // Told even if the task breaks off, because others wait for it.
                let mut ended = StopReport {
                    sandboxes,
                    entry,
                    outcome: StopOutcome::Failed,
                };
                ended.outcome = ended.sandboxes.end(&ended.entry).await;
                if ended.outcome == StopOutcome::Gone {
                    ended.sandboxes.count_end(&ended.entry, reason);
                }
            });
        }
        stop
    }

    fn count_end(&self, entry: &SandboxEntry, reason: EndReason) {
        self.metrics.end(reason);
        if reason == EndReason::Expired {
            self.metrics.expired(self.clock.now_us() - entry.end_us());
        }
    }

    async fn end(&self, entry: &SandboxEntry) -> StopOutcome {
        let id = &entry.id;
        let _guard = entry.change_lock.lock().await;
        self.deadlines.remove(id);
        match self.rows.sandbox_set_state(id, entry.version(), State::Stopping).await {
            Ok(Change::Applied(row)) => entry.update(row.version, row.end_us),
            // Another hand is at the row. The sandbox is ended all the same, and the row goes with it.
            Ok(Change::Stale | Change::Missing) => {}
            Err(error) => self.log_store_error(&error, id, "record that a sandbox ends"),
        }
        entry.ending.cancel();
        match self.node.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => {}
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "end a sandbox");
                return StopOutcome::Failed;
            }
        }
        if let Err(error) = self.rows.sandbox_delete(id).await {
            self.log_store_error(&error, id, "remove the row of an ended sandbox");
            return StopOutcome::Failed;
        }
        self.registry.remove(id);
        self.records.end(id);
        StopOutcome::Gone
    }
}

/// Tells how the end of a sandbox went, when dropped.
struct StopReport {
    sandboxes: Arc<Sandboxes>,
    entry: Arc<SandboxEntry>,
    outcome: StopOutcome,
}

impl Drop for StopReport {
    fn drop(&mut self) {
        if self.outcome == StopOutcome::Failed {
            let again_us = self.sandboxes.clock.now_us() + STOP_RETRY_US;
            self.sandboxes.deadlines.set(&self.entry.id, again_us);
        }
        self.entry.set_stopped(self.outcome);
    }
}
