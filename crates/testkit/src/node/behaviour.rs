//! How the fake node responds to calls.

use protocol::node::{Failure, NodeError};

use super::{FakeNode, OWNER_LIMIT, SECRET};

/// How the node responds to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// The call succeeds.
    Works,
    /// The call fails.
    Fails,
    /// The connection is lost before the call does anything, so that nobody knows what became of it.
    Lost,
    /// The call fails because the host has no capacity.
    Full,
    /// The call fails because the host does not support it.
    Unsupported,
    /// The call panics.
    Panics,
    /// The call does its work, and panics before it returns.
    PanicsAfterwards,
    /// A start reports the end of its sandbox before it returns.
    ExitsEarly,
    /// The call waits for [`super::FakeNode::go`], then succeeds.
    Waits,
    /// The call waits for [`super::FakeNode::go`], then fails.
    WaitsAndFails,
    /// The call fails because others are being restored: [`super::OWNER_LIMIT`] of the same owner, or as many as the host can.
    Busy {
        /// Whether the other sandboxes are of the same owner.
        is_own: bool,
    },
}

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
}
