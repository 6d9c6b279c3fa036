//! What follows once a node has started a sandbox: its row says that it runs, and it is announced.

use std::sync::Arc;
use std::time::Instant;

use model::id::TeamId;
use protocol::agent;
use protocol::node::Stage;
use store::Change;
use store::error::StoreError;
use store::sandboxes::{NewSandbox, SandboxRow, TeamMost};

use super::Sandboxes;
use super::create::CreateError;
use super::entry::SandboxEntry;
use crate::admission::quota::{ResourceUse, TeamQuota};
use crate::clock::SECOND_US;
use crate::nodes::ServedNode;
use crate::records::LifecycleEvent;

impl Sandboxes {
    /// Stores the row of a sandbox that runs. If it fails, the sandbox is ended.
    pub(super) async fn insert_started(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        new: NewSandbox,
        agent_version: &str,
        timeout_s: u32,
    ) -> Result<(SandboxRow, Stage), CreateError> {
        let id = new.id.clone();
        // The start does not count as lifetime, so the times are taken now.
        let now_us = self.clock.now_us();
        let end_us = (now_us + i64::from(timeout_s) * SECOND_US).min(new.max_end_us);
        let version = known_version(agent_version);
        let clock = Instant::now();
        match self.store_running(node, new, (now_us, end_us), version).await {
            Ok(row) => Ok((row, Stage::new("store", clock.elapsed()))),
            Err(error) => {
                self.discard(node, &id).await;
                Err(error)
            }
        }
    }

    /// Stores the row of a sandbox that runs.
    async fn store_running(
        &self,
        node: &ServedNode,
        new: NewSandbox,
        (started_us, end_us): (i64, i64),
        version: &str,
    ) -> Result<SandboxRow, CreateError> {
        let rows = &node.rows;
        if let Some((quota, most)) = self.limits_of_all(node, &new.team_id).await? {
            let share = ResourceUse::one_sandbox(new.cpu_count, new.memory_mb);
            let stored = rows.sandbox_insert_running_within(new, started_us, end_us, version, most);
            return Ok(stored.await?.map_err(|used| quota.over_by(used, share))?);
        }
        Ok(rows.sandbox_insert_running(new, started_us, end_us, version).await?)
    }

    /// Stores the row of a sandbox that is about to be started.
    pub(super) async fn store_creating(&self, node: &ServedNode, new: NewSandbox) -> Result<SandboxRow, CreateError> {
        let rows = &node.rows;
        if let Some((quota, most)) = self.limits_of_all(node, &new.team_id).await? {
            let share = ResourceUse::one_sandbox(new.cpu_count, new.memory_mb);
            let stored = rows.sandbox_insert_within(new, most).await?;
            return Ok(stored.map_err(|used| quota.over_by(used, share))?);
        }
        Ok(rows.sandbox_insert(new).await?)
    }

    /// The limits of a team that the database has to hold; none where this server knows all that the team has. Where there are
    /// several servers, only the database knows that: what each of them knows of the others is some time old.
    pub(super) async fn limits_of_all(
        &self,
        node: &ServedNode,
        team: &TeamId,
    ) -> Result<Option<(Arc<TeamQuota>, TeamMost)>, StoreError> {
        if !self.nodes.have_several_servers() {
            return Ok(None);
        }
        let quota = node.admission.quota_of(team).await?;
        Ok(quota.most().map(|most| (quota, most)))
    }

    /// Stores that a sandbox runs which has a row and which the node has started. If it fails, the sandbox is ended.
    pub(super) async fn store_start(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        row: SandboxRow,
        agent_version: &str,
        timeout_s: u32,
    ) -> Result<SandboxRow, CreateError> {
        // The start does not count as lifetime, so the times are taken now.
        let now_us = self.clock.now_us();
        let end_us = (now_us + i64::from(timeout_s) * SECOND_US).min(row.max_end_us);
        let version = known_version(agent_version);
        let change = node
            .rows
            .sandbox_started(&row.id, row.version, now_us, end_us, version)
            .await;
        let error = match change {
            Ok(Change::Applied(row)) => return Ok(row),
            Ok(Change::Stale | Change::Missing) => CreateError::Died,
            Err(error) => error.into(),
        };
        self.discard(node, &row.id).await;
        Err(error)
    }

    /// Announces a sandbox whose row says that it runs. `changes` are the rules and secrets from which its policy was made.
    pub(super) async fn announce(
        self: &Arc<Self>,
        row: &SandboxRow,
        entry: &Arc<SandboxEntry>,
        changes: u64,
    ) -> Result<(), CreateError> {
        if entry.start(row).is_none() {
            self.discard(&entry.node, &row.id).await;
            return Err(CreateError::Died);
        }
        if self.policies.injections.changes() != changes {
            // A rule or a secret was changed while the sandbox was starting, when nobody could find it among those that run.
            self.apply_again(entry).await;
        }
        self.tracked.runs(row);
        self.tracked.log(&row.id, &LifecycleEvent::Created(row));
        Ok(())
    }
}

/// The version to report for an agent. A version reported from inside a sandbox is used only if it is valid, because
/// SDKs parse it and fail on anything else.
pub(super) fn known_version(reported: &str) -> &str {
    if agent::is_version(reported) {
        reported
    } else {
        agent::VERSION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_agent_versions_are_reported() {
        for (reported, want) in [
            ("0.6.13", "0.6.13"),
            ("1.2.3", "1.2.3"),
            ("", agent::VERSION),
            ("0.6", agent::VERSION),
            ("0.6.x", agent::VERSION),
            ("0..1", agent::VERSION),
            ("0.6.13\0", agent::VERSION),
        ] {
            assert_eq!(known_version(reported), want);
        }
    }
}
