//! Sandboxes on nodes of other servers, and on nodes of this one that are away.
//!
//! Teams see all their sandboxes, on every node. Only the server of its node can change a sandbox: any other server
//! returns an error that names the node, instead of reporting an unknown sandbox.

use std::sync::Arc;

use model::id::{SandboxId, TeamId};
use model::lifecycle::State;
use secrecy::SecretString;
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::entry::SandboxEntry;

/// Why this server cannot change a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AbsentError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("there is no such sandbox")]
    Unknown,
    #[error("the sandbox is on node {node}, which is not connected")]
    Away {
        /// The name of the node's host.
        node: String,
    },
    #[error("the sandbox is on node {node}")]
    Elsewhere {
        /// The name of the node's host.
        node: String,
    },
}

impl Sandboxes {
    /// The entry of a team's sandbox, for operations that change it.
    pub(crate) async fn entry_of_team(&self, id: &SandboxId, team: &TeamId) -> Result<Arc<SandboxEntry>, AbsentError> {
        if let Some(entry) = self.tracked.registry.get(id) {
            return if entry.team == *team {
                Ok(entry)
            } else {
                Err(AbsentError::Unknown)
            };
        }
        let row = self.store().sandbox_by_id(id).await?;
        match row.filter(|row| row.team_id == *team) {
            Some(row) => match self.absent(&row).await? {
                // Its node may have been taken over since the first look, and the registry has its sandboxes before it is served.
                AbsentError::Unknown => self.tracked.registry.get(id).ok_or(AbsentError::Unknown),
                absent => Err(absent),
            },
            None => Err(AbsentError::Unknown),
        }
    }

    /// The state of a team's sandbox on a node that another server serves, as its row says, and the token of its agent; none for
    /// any other sandbox.
    pub(crate) async fn agent_elsewhere(
        &self,
        id: &SandboxId,
        team: &TeamId,
    ) -> Result<Option<(State, SecretString)>, StoreError> {
        let row = self.store().sandbox_by_id(id).await?;
        let row = row.filter(|row| row.team_id == *team && !matches!(row.state, State::Creating | State::Gone));
        let row = row.filter(|row| row.node_id.as_ref().is_some_and(|node| self.nodes.has_elsewhere(node)));
        Ok(row.map(|row| (row.state, self.policies.tokens.access_token(id))))
    }

    /// Why a sandbox with this row is not in the registry.
    pub(crate) async fn absent(&self, row: &SandboxRow) -> Result<AbsentError, StoreError> {
        // No client knows a sandbox that is still being created.
        if self.is_here(row) || matches!(row.state, State::Creating | State::Gone) {
            return Ok(AbsentError::Unknown);
        }
        let node = match &row.node_id {
            Some(id) => self
                .store()
                .node_by_id(id)
                .await?
                .map_or_else(|| id.to_string(), |node| node.name),
            None => return Ok(AbsentError::Unknown),
        };
        let is_own = row.node_id.as_ref().is_some_and(|id| self.nodes.is_own(id));
        Ok(if is_own {
            AbsentError::Away { node }
        } else {
            AbsentError::Elsewhere { node }
        })
    }

    /// Whether a row belongs to a node that is served here: then the registry knows the sandbox better.
    pub(crate) fn is_here(&self, row: &SandboxRow) -> bool {
        row.node_id.as_ref().is_none_or(|node| self.nodes.is_served(node))
    }
}
