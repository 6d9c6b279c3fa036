//! Keeping sandboxes when the server is stopped, or their node drains, where the operator wants that: what is only in memory ends
//! with the host.
//!
//! Those that run are paused, and those that are paused in memory are written to disk. Where the node writes processes to disk, it
//! is asked to for a limited time; of all others the files are kept, for which there is time left until the service
//! manager kills the platform.

use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use model::lifecycle::{Kept, State};

use super::Sandboxes;
use super::entry::SandboxEntry;
use super::pause::{PauseError, PauseRequest};
use crate::chain::Chain;
use crate::nodes::ServedNode;
use crate::outcome::PauseReason;
use crate::records::LifecycleEvent;

/// Sandboxes that are kept at the same time. Each writes out its disk.
const AT_ONCE: usize = 8;

impl Sandboxes {
    /// Pauses every running sandbox, and keeps on disk whatever the node has. Processes are written for as long as the operator
    /// allows. Sandboxes that cannot be kept stay as they are, until the host stops.
    pub(crate) async fn keep_all(self: &Arc<Self>) {
        let settings = &self.defaults.pause;
        let entries = self.tracked.registry.all_present();
        // All are looked at nevertheless: one may be about to be resumed, by a request whose client is gone.
        let in_memory = entries
            .iter()
            .filter(|entry| entry.state() != State::Paused || entry.is_in_memory());
        tracing::info!(
            sandboxes = in_memory.count(),
            "keeping what is in memory on disk, because the platform is being stopped"
        );
        let keeping = stream::iter(entries)
            .map(|entry| async move { self.keep_on_disk(&entry, PauseReason::Shutdown).await })
            .buffer_unordered(AT_ONCE)
            .collect::<()>();
        tokio::pin!(keeping);
        tokio::select! {
            () = &mut keeping => return,
            () = tokio::time::sleep(settings.checkpoints_at_shutdown_within), if settings.processes_on_disk => {}
        }
        tracing::warn!("no time is left to write processes to disk: files are kept");
        self.work.end_checkpoints();
        keeping.await;
    }

    /// Keeps on disk whatever a draining node has, as [`Self::keep_all`] does, and returns how many of its sandboxes are kept there
    /// since, and how many are not. Once the node does not drain any more, nothing else is paused.
    pub(crate) async fn keep_all_of(self: &Arc<Self>, node: &Arc<ServedNode>) -> (usize, usize) {
        let mut entries = self.tracked.registry.all_present();
        entries.retain(|entry| Arc::ptr_eq(&entry.node, node));
        entries.retain(|entry| entry.state() != State::Paused || entry.is_in_memory());
        let keeping = stream::iter(entries)
            .map(|entry| async move {
                if node.is_draining() {
                    self.keep_on_disk(&entry, PauseReason::Drain).await;
                }
                (entry.state(), entry.is_in_memory())
            })
            .buffer_unordered(AT_ONCE);
        let count = |(kept, not): (usize, usize), left| match left {
            (State::Paused, false) => (kept + 1, not),
            // It was ended meanwhile.
            (State::Stopping | State::Gone, _) => (kept, not),
            _ => (kept, not + 1),
        };
        keeping.fold((0, 0), async |counts, left| count(counts, left)).await
    }

    async fn keep_on_disk(self: &Arc<Self>, entry: &Arc<SandboxEntry>, reason: PauseReason) {
        let request = |keep| PauseRequest {
            reason,
            keep,
            is_limited: false,
        };
        let mut paused = if self.writes_checkpoints(&entry.node) {
            self.pause(entry, request(Kept::Memory)).await
        } else {
            self.pause(entry, request(Kept::Filesystem)).await
        };
        // Also one whose checkpoint was not complete in time.
        if let Err(PauseError::Cancelled | PauseError::Unsupported(_) | PauseError::Node(_)) = paused {
            paused = self.pause(entry, request(Kept::Filesystem)).await;
        }
        match paused {
            Ok(()) | Err(PauseError::Paused) => {}
            Err(PauseError::Stopping | PauseError::Gone) => return,
            Err(error) => {
                tracing::error!(sandbox.id = %entry.id, error = %Chain(&error), "cannot pause a sandbox whose host is about to stop");
                return;
            }
        }
        if entry.is_in_memory() && self.writes_checkpoints(&entry.node) {
            self.write_to_disk(entry, Kept::Checkpoint).await;
        }
        if entry.is_in_memory() {
            self.write_to_disk(entry, Kept::Filesystem).await;
            let event = LifecycleEvent::Paused(reason, Kept::Filesystem);
            if !entry.is_in_memory() {
                self.tracked.log(&entry.id, &event);
            }
        }
    }

    /// Whether the node is asked to write processes to disk.
    fn writes_checkpoints(&self, node: &ServedNode) -> bool {
        self.writes_processes(node) && self.work.has_time_for_checkpoints()
    }
}
