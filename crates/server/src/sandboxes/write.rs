//! Writing to disk what is paused in memory, in the background: where the operator wants pauses to be answered as soon as the
//! processes are stopped, this follows.
//!
//! Until it is complete, the sandbox is one that is paused in memory, and its row says so. Whoever resumes or ends it
//! interrupts this, and finds it as it was. A failure leaves it in memory as well, and so does the end of the platform; the
//! next start tries again.

use std::sync::Arc;

use model::lifecycle::Kept;
use model::lifecycle::command::AtTurn;
use protocol::node::NodeError;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::entry::SandboxEntry;
use crate::chain::Chain;
use crate::nodes::ServedNode;
use crate::settings::PauseAnswer;

impl Sandboxes {
    /// Whether processes are written to disk after their pause was answered.
    pub(super) fn writes_later(&self, node: &ServedNode) -> bool {
        self.writes_processes(node) && self.defaults.pause.answer == PauseAnswer::Frozen
    }

    /// Whether a node writes processes to disk.
    pub(super) fn writes_processes(&self, node: &ServedNode) -> bool {
        self.defaults.pause.processes_on_disk && node.writes_processes
    }

    /// Writes every sandbox of a node that is paused in memory, in the background.
    pub(crate) fn write_all(self: &Arc<Self>, node: &Arc<ServedNode>) {
        for entry in self.tracked.registry.on(node) {
            self.write_later(&entry);
        }
    }

    /// Writes a sandbox in the background, if it is paused in memory by then.
    pub(super) fn write_later(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        if !self.writes_later(&entry.node) || !entry.is_in_memory() {
            return;
        }
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        self.work.spawn(async move {
            // Also when the server is being stopped, for as long as it waits for work: the host may be stopped next.
            if let Some(_turn) = sandboxes.work.turn_to_write().await {
                sandboxes.write_to_disk(&entry, Kept::Checkpoint).await;
            }
        });
    }

    /// Moves a sandbox that is paused in memory to disk, with its processes or its files alone.
    pub(super) async fn write_to_disk(self: &Arc<Self>, entry: &Arc<SandboxEntry>, keep: Kept) {
        let id = &entry.id;
        let turn = entry.turn().await;
        match turn.decide(turn.writing(), turn.state()) {
            AtTurn::Run => {}
            AtTurn::Join | AtTurn::Refuse(_) => return,
        }
        let row = match self.store().sandbox_by_id(id).await {
            Ok(Some(row)) => row,
            Ok(None) => return,
            Err(error) => {
                return self
                    .tracked
                    .store_failed(&error, id, "cannot read the row of a paused sandbox");
            }
        };
        // It counts as kept on disk afterwards, which survives a loss of power.
        let synced = tokio::select! {
            biased;
            synced = turn.node.rows.sync() => synced,
            () = turn.interrupted() => return,
        };
        if let Err(error) = synced {
            return self
                .tracked
                .store_failed(&error, id, "cannot write a paused sandbox to disk");
        }
        let cancel = CancellationToken::new();
        let pausing = self.pause_on_node(&turn.node, id, keep, false, cancel.clone());
        tokio::pin!(pausing);
        let written = tokio::select! {
            biased;
            written = &mut pausing => written,
            () = turn.interrupted() => {
                cancel.cancel();
                pausing.await
            }
            () = self.work.checkpoints_ended(), if keep == Kept::Checkpoint => {
                cancel.cancel();
                pausing.await
            }
        };
        match written {
            Ok(paused) if paused.kept == Kept::Memory => {
                tracing::info!(sandbox.id = %id, "a paused sandbox stays in memory");
            }
            Ok(paused) => {
                let paused_us = row.paused_us.unwrap_or_else(|| self.clock.now_us());
                let (kept, disk_bytes) = (paused.kept.as_str(), paused.disk_bytes);
                self.finish_pause(&turn, paused, paused_us, row.resume_error).await;
                tracing::info!(sandbox.id = %id, kept, disk_bytes, "a paused sandbox is on disk");
                self.pack_later(entry);
            }
            // Who resumes it goes on from here; that of one that has ended is reported.
            Err(NodeError::Cancelled | NodeError::NotFound(_)) => {}
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot write a paused sandbox to disk");
            }
        }
    }
}
