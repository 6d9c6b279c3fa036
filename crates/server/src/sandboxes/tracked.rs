//! What follows the rows of this server's sandboxes: the registry, the deadlines, the records, and what is counted.
//!
//! A sandbox is added to all of them with its row, and removed from all of them with it. Operations never wait for records
//! or metrics.

use std::sync::Arc;

use model::id::SandboxId;
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::entry::SandboxEntry;
use super::registry::Registry;
use crate::chain::Chain;
use crate::deadlines::Deadlines;
use crate::metrics::Metrics;
use crate::nodes::ServedNode;
use crate::outcome::EndReason;
use crate::records::{LifecycleEvent, Records};

/// What follows the rows of sandboxes.
#[derive(Debug)]
pub(crate) struct Tracked {
    /// The sandboxes in memory.
    pub(crate) registry: Arc<Registry>,
    /// When something is to be done with them.
    pub(crate) deadlines: Arc<Deadlines>,
    /// Their logs and metrics.
    pub(crate) records: Arc<Records>,
    /// What is counted of them all.
    pub(crate) metrics: Arc<Metrics>,
}

impl Tracked {
    /// Adds a sandbox.
    pub(super) fn add(&self, row: &SandboxRow, entry: &Arc<SandboxEntry>) {
        self.registry.insert(Arc::clone(entry));
        self.records.track(row);
    }

    /// Follows a sandbox that runs, from now on: its deadline, and what it uses.
    pub(super) fn runs(&self, row: &SandboxRow) {
        self.deadlines.set(&row.id, row.end_us);
        self.records.start_sampling(row);
    }

    /// Removes a sandbox of which nothing is left on a node.
    pub(super) fn remove(&self, node: &Arc<ServedNode>, id: &SandboxId) {
        if self.registry.remove(node, id) {
            self.deadlines.remove(id);
            self.records.end(id);
        }
    }

    /// Leaves all sandboxes of a node to its next session, and returns how many those are.
    pub(crate) fn leave(&self, node: &Arc<ServedNode>) -> usize {
        let mut left = 0;
        for entry in self.registry.on(node) {
            if self.registry.remove(node, &entry.id) {
                self.deadlines.remove(&entry.id);
                self.records.stop_sampling(&entry.id, None);
                left += 1;
            }
        }
        left
    }

    /// Writes an event to the log of a sandbox.
    pub(super) fn log(&self, id: &SandboxId, event: &LifecycleEvent<'_>) {
        self.records.log_event(id, event);
    }

    /// Counts and logs the end of a sandbox that ended by itself.
    pub(super) fn has_ended(&self, id: &SandboxId, reason: EndReason) {
        self.metrics.end(reason);
        self.log(id, &LifecycleEvent::Ending(reason));
    }

    /// Counts and logs a database error that is not reported to a client.
    pub(super) fn store_failed(&self, error: &StoreError, id: &SandboxId, what: &str) {
        self.metrics.store_error();
        tracing::error!(sandbox.id = %id, error = %Chain(error), "{what}");
    }
}
