//! Sandboxes that another server has.
//!
//! Teams see all of theirs, wherever they are. What changes a sandbox is for the server of its node: any other says
//! which node that is, instead of claiming that there is no such sandbox.

use std::sync::Arc;

use model::id::{SandboxId, TeamId};
use model::lifecycle::State;
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::registry::SandboxEntry;

/// Why this server cannot change a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AbsentError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("there is no such sandbox")]
    Unknown,
    #[error("the sandbox is on node {node}")]
    Elsewhere {
        /// The name of the node's host.
        node: String,
    },
}

impl Sandboxes {
    /// The entry of a team's sandbox, for what changes it.
    pub(crate) async fn entry_of_team(&self, id: &SandboxId, team: &TeamId) -> Result<Arc<SandboxEntry>, AbsentError> {
        if let Some(entry) = self.registry.get(id) {
            return if entry.team == *team {
                Ok(entry)
            } else {
                Err(AbsentError::Unknown)
            };
        }
        let row = self.store.sandbox_by_id(id).await?;
        match row.filter(|row| row.team_id == *team) {
            Some(row) => Err(self.absent(&row).await?),
            None => Err(AbsentError::Unknown),
        }
    }

    /// Why a sandbox with this row is not in memory.
    pub(crate) async fn absent(&self, row: &SandboxRow) -> Result<AbsentError, StoreError> {
        // One that is being created is known to no client yet.
        if !self.is_elsewhere(row) || matches!(row.state, State::Creating | State::Gone) {
            return Ok(AbsentError::Unknown);
        }
        let node = match &row.node_id {
            Some(id) => self
                .store
                .node_by_id(id)
                .await?
                .map_or_else(|| id.to_string(), |node| node.name),
            None => return Ok(AbsentError::Unknown),
        };
        Ok(AbsentError::Elsewhere { node })
    }

    /// Whether a row is another node's.
    pub(crate) fn is_elsewhere(&self, row: &SandboxRow) -> bool {
        row.node_id.as_ref().is_some_and(|node| node != self.rows.node())
    }
}
