//! What changes of running sandboxes have in common.

use std::sync::Arc;

use model::lifecycle::command::{Command, Refusal};
use protocol::node::NodeError;
use store::error::StoreError;

use super::Sandboxes;
use super::entry::{NotChanged, SandboxEntry, Turn};
use crate::seal::SealError;

/// Why a running sandbox was not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The row is in doubt, or behind the sandbox: another attempt can work.
    #[error("the row of the sandbox is not as it should be")]
    Stale,
    #[error("the sandbox is being ended")]
    Stopping,
    /// Another command pauses, resumes or copies the sandbox; the text is the verb.
    #[error("the sandbox is being {0}")]
    Changing(&'static str),
    #[error("the sandbox is gone")]
    Gone,
    /// The row was changed, and the node failed.
    #[error("the change was stored but not applied")]
    NotApplied(#[source] NodeError),
    /// Nothing was changed: the node, which has to know, was not told, or did not say so.
    #[error("the node was not told")]
    NotTold(#[source] NodeError),
    #[error("the sandbox has no injection with a token")]
    NoToken,
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error("the task panicked or was cancelled")]
    TaskFailed,
}

impl From<NotChanged> for ChangeError {
    fn from(why: NotChanged) -> Self {
        match why {
            NotChanged::Stale => Self::Stale,
            NotChanged::Missing => Self::Gone,
            NotChanged::Store(error) => Self::Store(error),
        }
    }
}

impl From<Refusal> for ChangeError {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Stopping => Self::Stopping,
            Refusal::Pausing => Self::Changing("paused"),
            Refusal::Resuming => Self::Changing("resumed"),
            Refusal::InSnapshot => Self::Changing("copied"),
            Refusal::Running | Refusal::Paused | Refusal::Gone => Self::Gone,
        }
    }
}

impl Sandboxes {
    /// Waits for the turn of a change of the settings in the row of a sandbox, unless that is refused.
    pub(super) async fn turn_to_change<'a>(&self, entry: &'a Arc<SandboxEntry>) -> Result<Turn<'a>, ChangeError> {
        let turn = entry.turn_unless_refused(Command::Change).await?;
        self.recording.settle(&turn).await?;
        Ok(turn)
    }
}
