//! Changing what sandboxes may reach.
//!
//! The row is written first, then the node is told. After a crash in between, adoption applies the row.

use std::sync::Arc;
use std::time::Duration;

use model::sandbox::NetworkSpec;
use protocol::node::{Failure, NodeError};
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::{SandboxEntry, Turn};
use super::policy::spec_of;
use crate::records::LifecycleEvent;

/// How long a node may take to apply a policy. It changes memory only; the bound is for a node that does not answer,
/// because the sandbox cannot be ended meanwhile.
const APPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// New settings of a sandbox, of which those of egress replace all that it had. They were validated.
#[derive(Debug, Clone)]
pub(crate) struct EgressUpdate {
    /// Only the egress settings of these are used.
    pub(crate) network: NetworkSpec,
    /// The requested internet access; none when the request did not set it.
    pub(crate) allow_internet_access: Option<bool>,
    /// The ports whose servers speak TLS; none to keep them.
    pub(crate) https_ports: Option<Vec<u16>>,
}

impl Sandboxes {
    /// Replaces what a sandbox may reach. Concurrent changes are made one after the other, each with the row and on the
    /// node, so that both have the last one.
    pub(crate) async fn set_egress(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        update: EgressUpdate,
    ) -> Result<(), ChangeError> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        // On a task, so that a client disconnect cannot leave row and node different.
        let task = self
            .work
            .spawn(async move { sandboxes.set_egress_on_task(&entry, update).await });
        task.await.unwrap_or(Err(ChangeError::TaskFailed))
    }

    async fn set_egress_on_task(&self, entry: &Arc<SandboxEntry>, update: EgressUpdate) -> Result<(), ChangeError> {
        let turn = self.turn_to_change(entry).await?;
        let row = self.store().sandbox_by_id(&entry.id).await?.ok_or(ChangeError::Gone)?;
        let allow_internet_access = update.allow_internet_access;
        let https_ports = update.https_ports.clone();
        let network = replace_egress(&row, update).map(|network| self.policies.to_json(&row.id, &network));
        let change =
            entry
                .node
                .rows
                .sandbox_set_network(&row.id, row.version, network.as_deref(), allow_internet_access);
        let row = turn.changed(change.await)?;
        self.tracked.log(&row.id, &LifecycleEvent::NetworkChanged);
        if let Some(ports) = https_ports {
            turn.set_https_ports(ports);
        }
        self.set_policy(&turn, &row).await
    }

    /// Applies the policy of a row. If it fails, it is tried again every few seconds, see [`Self::follow_rules`].
    pub(super) async fn set_policy(&self, turn: &Turn<'_>, row: &SandboxRow) -> Result<(), ChangeError> {
        turn.set_policy_pending(true);
        let applied = turn.node.handle.set_egress(&row.id, self.policies.of_row(row).await?);
        match tokio::time::timeout(APPLY_TIMEOUT, applied).await {
            Ok(Ok(())) => {
                turn.set_policy_pending(false);
                Ok(())
            }
            Ok(Err(NodeError::NotFound(_))) => Err(ChangeError::Gone),
            Ok(Err(error)) => Err(ChangeError::NotApplied(error)),
            Err(elapsed) => Err(ChangeError::NotApplied(NodeError::Unreachable(Failure::of(&elapsed)))),
        }
    }
}

/// The network settings of a row after an update; none if it has no settings and gets none.
fn replace_egress(row: &SandboxRow, update: EgressUpdate) -> Option<NetworkSpec> {
    let egress = update.network;
    let lists = [&egress.allow_out, &egress.deny_out, &egress.dns_servers];
    let is_empty = lists.iter().all(|list| list.is_empty()) && egress.egress_proxy.is_none() && egress.rules.is_empty();
    if is_empty && update.https_ports.is_none() && row.network_json.is_none() {
        return None;
    }
    let before = spec_of(row).ok().flatten().unwrap_or_default();
    Some(NetworkSpec {
        allow_public_traffic: row.allow_public_traffic,
        mask_request_host: before.mask_request_host,
        https_ports: update.https_ports.unwrap_or(before.https_ports),
        repository_token_sealed: before.repository_token_sealed,
        ..egress
    })
}
