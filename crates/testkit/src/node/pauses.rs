//! Pauses of the fake node.

use std::sync::atomic::Ordering;

use model::lifecycle::Kept;
use protocol::node::{NodeError, PauseSandbox, PausedSandbox};
use tokio_util::sync::CancellationToken;

use super::{Behaviour, FakeNode};

impl FakeNode {
    pub(super) async fn pause_one(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> Result<PausedSandbox, NodeError> {
        let PauseSandbox { id, mut keep, .. } = request;
        if keep == Kept::Checkpoint && *self.keeps_checkpoints_in_memory.lock() {
            keep = Kept::Memory;
        }
        let behaviour = match keep {
            Kept::Memory => *self.pause.lock(),
            Kept::Filesystem => *self.pause_to_disk.lock(),
            Kept::Checkpoint => *self.write.lock(),
        };
        match keep {
            Kept::Checkpoint => tokio::select! {
                written = self.behave(behaviour) => written?,
                () = cancel.cancelled() => return Err(NodeError::Cancelled),
            },
            Kept::Memory | Kept::Filesystem => self.behave(behaviour).await?,
        }
        if !self.running.lock().contains(&id) && !self.kept.lock().contains(&id) {
            return Err(NodeError::NotFound(id));
        }
        match keep {
            Kept::Filesystem | Kept::Checkpoint => {
                self.running.lock().remove(&id);
                self.paused.lock().remove(&id);
                self.kept.lock().insert(id.clone());
            }
            Kept::Memory => drop(self.paused.lock().insert(id.clone())),
        }
        match behaviour {
            Behaviour::ExitsEarly => self.exit(&id).await,
            Behaviour::PanicsAfterwards => panic!("the fake node panics as configured"),
            _ => {}
        }
        Ok(PausedSandbox {
            kept: keep,
            memory_bytes: match keep {
                Kept::Memory => self.frozen_bytes.load(Ordering::SeqCst),
                Kept::Checkpoint | Kept::Filesystem => 0,
            },
            disk_bytes: self.kept_bytes.load(Ordering::SeqCst),
            network: self
                .samples
                .lock()
                .iter()
                .find(|one| one.id == id)
                .map(|one| one.network),
        })
    }
}
