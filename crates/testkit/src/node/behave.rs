//! How the fake node behaves in a call.

use model::id::SandboxId;
use protocol::node::{Failure, NodeDeadline, NodeError};

use super::{Behaviour, FakeNode, OWNER_LIMIT, SECRET};

impl FakeNode {
    pub(super) async fn behave(&self, behaviour: Behaviour) -> Result<(), NodeError> {
        match behaviour {
            Behaviour::Works | Behaviour::PanicsAfterwards | Behaviour::ExitsEarly => Ok(()),
            Behaviour::Fails => Err(NodeError::failed(SECRET)),
            Behaviour::Lost => Err(NodeError::Unreachable(Failure::new(SECRET))),
            Behaviour::Full => Err(NodeError::Capacity(SECRET.to_owned())),
            Behaviour::Unsupported => Err(NodeError::Unsupported(SECRET.to_owned())),
            Behaviour::Panics => panic!("the fake node panics as configured"),
            Behaviour::Waits => {
                self.waiting.notify_one();
                self.go.notified().await;
                Ok(())
            }
            Behaviour::WaitsAndFails => {
                self.waiting.notify_one();
                self.go.notified().await;
                Err(NodeError::failed(SECRET))
            }
            Behaviour::Busy { is_own } => Err(NodeError::Busy {
                owner_limit: is_own.then_some(OWNER_LIMIT),
            }),
        }
    }

    pub(super) async fn note_deadline(&self, id: &SandboxId, deadline: NodeDeadline) -> Result<(), NodeError> {
        let behaviour = *self.deadlines.set.lock();
        self.behave(behaviour).await?;
        if !self.running.lock().contains(id) {
            return Err(NodeError::NotFound(id.clone()));
        }
        self.deadlines.told.lock().insert(id.clone(), deadline);
        Ok(())
    }
}
