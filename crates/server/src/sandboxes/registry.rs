//! The registry: the sandboxes of this server in memory, by id.
//!
//! Requests are served from it without the database. It follows the rows: an entry is added and removed with its row,
//! except that a sandbox gets no more traffic as soon as it begins to stop.

use std::collections::HashMap;
use std::sync::Arc;

use model::id::SandboxId;
use model::lifecycle::State;
use parking_lot::RwLock;
use proxy::ingress::Access;

use super::entry::{CountedAs, SandboxEntry};
use crate::nodes::ServedNode;

/// All sandboxes of this server.
#[derive(Debug, Default)]
pub(crate) struct Registry(RwLock<HashMap<SandboxId, Arc<SandboxEntry>>>);

impl Registry {
    pub(crate) fn insert(&self, entry: Arc<SandboxEntry>) {
        self.0.write().insert(entry.id.clone(), entry);
    }

    /// Removes a sandbox of which nothing is left on a node, and releases its admission even if the entry is still in use.
    /// Returns whether there was one: another session of the node may have taken it over.
    pub(crate) fn remove(&self, node: &Arc<ServedNode>, id: &SandboxId) -> bool {
        let mut entries = self.0.write();
        if entries.get(id).is_none_or(|entry| !Arc::ptr_eq(&entry.node, node)) {
            return false;
        }
        let entry = entries.remove(id);
        drop(entries);
        if let Some(entry) = entry {
            entry.cut();
            entry.release();
        }
        true
    }

    /// Every sandbox on a node.
    pub(crate) fn on(&self, node: &Arc<ServedNode>) -> Vec<Arc<SandboxEntry>> {
        let entries = self.0.read();
        let on = entries.values().filter(|entry| Arc::ptr_eq(&entry.node, node));
        on.cloned().collect()
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.0.read().get(id).cloned()
    }

    /// Space that paused sandboxes take on the disk of the host, in bytes.
    pub(crate) fn paused_disk_bytes(&self) -> u64 {
        let entries = self.0.read();
        let of = |entry: &Arc<SandboxEntry>| match entry.counted() {
            CountedAs::Running => 0,
            CountedAs::Paused { disk_bytes, .. } => disk_bytes,
        };
        entries.values().map(of).fold(0, u64::saturating_add)
    }

    /// Sandboxes that are paused on the disk of a node that makes copies.
    pub(crate) fn paused_with_copies(&self) -> Vec<SandboxId> {
        let entries = self.0.read();
        let kept = entries
            .values()
            .filter(|entry| entry.node.makes_parcels && is_kept(entry));
        kept.map(|entry| entry.id.clone()).collect()
    }

    /// Number of sandboxes by state.
    pub(crate) fn count_by_state(&self) -> Vec<(&'static str, usize)> {
        let counted = State::ALL.into_iter().filter(|state| *state != State::Gone);
        let mut counts: Vec<_> = counted.map(|state| (state, 0)).collect();
        for entry in self.0.read().values() {
            let state = entry.state();
            if let Some((_, count)) = counts.iter_mut().find(|(counted, _)| *counted == state) {
                *count += 1;
            }
        }
        counts
            .into_iter()
            .map(|(state, count)| (state.as_str(), count))
            .collect()
    }

    /// The credentials that traffic to a sandbox requires; `None` unless it runs.
    pub(crate) fn access(&self, id: &SandboxId) -> Option<Arc<Access>> {
        self.get(id).and_then(|entry| entry.access())
    }

    /// The sandbox with that id, if it runs.
    pub(crate) fn running(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.get(id).filter(|entry| entry.state() == State::Running)
    }

    /// The sandbox with that id, if it is paused, is being paused or resumed, and traffic resumes it.
    pub(crate) fn asleep(&self, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        self.get(id).filter(|entry| entry.is_asleep())
    }

    /// Every sandbox that runs.
    pub(crate) fn all_running(&self) -> Vec<Arc<SandboxEntry>> {
        self.all_in(|state| state == State::Running)
    }

    /// Every sandbox that the node has, paused ones included, and that is known to clients.
    pub(crate) fn all_present(&self) -> Vec<Arc<SandboxEntry>> {
        self.all_in(State::is_present)
    }

    fn all_in(&self, is_wanted: impl Fn(State) -> bool) -> Vec<Arc<SandboxEntry>> {
        let all: Vec<_> = self.0.read().values().cloned().collect();
        all.into_iter().filter(|entry| is_wanted(entry.state())).collect()
    }
}

/// Whether a sandbox is paused on disk.
pub(super) fn is_kept(entry: &SandboxEntry) -> bool {
    entry.state() == State::Paused && !entry.is_in_memory()
}
