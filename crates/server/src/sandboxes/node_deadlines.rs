//! Deadlines that nodes keep themselves, for when no server is there: what a node is told, and what follows from what it has done.
//!
//! A node that is a process of its own is told the deadline of a sandbox with its start, and with each change. The server is the
//! one that acts at deadlines; but when none is there, the node does, and tells the server that takes it over next. Then the rows,
//! logs, events and figures become what they would be if that server had done it.
//!
//! A change is told to the node first, and stored after it. So a client that was told that its sandbox lives longer has a
//! sandbox that does, whether or not a server is there then; and where the node cannot be told, nothing is changed.

use std::collections::HashMap;
use std::time::Duration;

use model::id::{SandboxId, TeamId};
use model::lifecycle::Kept;
use model::sandbox::LifecycleSpec;
use protocol::node::{Expired, ExpiredSandbox, NodeDeadline, NodeError, Overdue};
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::Turn;
use super::lifecycle::lifecycle_of;
use super::pause::within;
use crate::chain::Chain;
use crate::node::kept_bytes;
use crate::nodes::ServedNode;
use crate::outcome::{EndReason, PauseReason};
use crate::records::LifecycleEvent;

/// How long a node may take to note a deadline.
const NODE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a node has done by itself with a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeExpiry {
    /// When, in microseconds since the Unix epoch.
    pub(super) at_us: i64,
    /// What has become of the sandbox.
    pub(super) outcome: Expired,
}

impl NodeExpiry {
    /// What the node has kept of the sandbox, and the space that this takes; none if it has ended.
    pub(super) fn kept(self) -> Option<(Kept, u64)> {
        match self.outcome {
            Expired::Ended => None,
            Expired::Paused { kept, disk_bytes } => Some((kept, kept_bytes(disk_bytes))),
        }
    }

    /// Moves the time to between the start of the sandbox of the row and now: a node is not believed any other one.
    pub(super) fn of_row(self, row: &SandboxRow, now_us: i64) -> Self {
        let at_us = self.at_us.max(row.started_us).min(now_us);
        Self { at_us, ..self }
    }
}

impl Sandboxes {
    /// The deadline of the sandbox of a row, as its node is told it; none if the node keeps no deadlines.
    pub(super) async fn node_deadline(
        &self,
        node: &ServedNode,
        row: &SandboxRow,
    ) -> Result<Option<NodeDeadline>, StoreError> {
        if !node.keeps_deadlines {
            return Ok(None);
        }
        let then = self.overdue(node, &row.team_id, lifecycle_of(row)).await?;
        let left = self.left_until(row.end_us);
        Ok(Some(NodeDeadline { left, then }))
    }

    /// What a node does with a sandbox that is overdue, if no server does anything.
    async fn overdue(&self, node: &ServedNode, team: &TeamId, lifecycle: LifecycleSpec) -> Result<Overdue, StoreError> {
        if !lifecycle.auto_pause || !node.admission.quota_of(team).await?.keeps_paused() {
            return Ok(Overdue::End);
        }
        Ok(Overdue::Pause(match lifecycle.keep() {
            Kept::Memory if self.writes_processes(node) => Kept::Checkpoint,
            keep => keep,
        }))
    }

    fn left_until(&self, end_us: i64) -> Duration {
        Duration::from_micros(u64::try_from(end_us.saturating_sub(self.clock.now_us())).unwrap_or(0))
    }

    /// Tells the node of a running sandbox another deadline.
    ///
    /// # Errors
    /// When the node was not told. Whether it was is unknown if it did not answer.
    pub(super) async fn tell_deadline(&self, turn: &Turn<'_>, end_us: i64) -> Result<(), ChangeError> {
        let node = &turn.node;
        if !node.keeps_deadlines {
            return Ok(());
        }
        let then = self.overdue(node, &turn.team, turn.lifecycle()).await?;
        let left = self.left_until(end_us);
        match within(
            NODE_TIMEOUT,
            node.handle.set_deadline(&turn.id, NodeDeadline { left, then }),
        )
        .await
        {
            Ok(()) => Ok(()),
            // Its end is about to be reported.
            Err(NodeError::NotFound(_)) => Err(ChangeError::Gone),
            Err(error) => Err(ChangeError::NotTold(error)),
        }
    }

    /// Tells a node the deadline of a sandbox whose start may have taken longer than the node knows, if `is_longer`: times are taken at
    /// its end.
    pub(super) async fn tell_start(&self, node: &ServedNode, row: &SandboxRow, is_longer: bool) {
        if !is_longer {
            return;
        }
        let told = match self.node_deadline(node, row).await {
            Ok(Some(deadline)) => within(NODE_TIMEOUT, node.handle.set_deadline(&row.id, deadline)).await,
            Ok(None) => return,
            // It has an earlier one, which counts only while no server is there.
            Err(error) => return tracing::warn!(error = %Chain(&error), "cannot read the limits of a team"),
        };
        if let Err(error) = told {
            tracing::warn!(sandbox.id = %row.id, error = %Chain(&error), "a node was not told the deadline of a sandbox");
        }
    }

    /// What a node that is about to be taken over has done by itself.
    pub(super) async fn expired_on(&self, node: &ServedNode) -> Result<HashMap<SandboxId, NodeExpiry>, NodeError> {
        if !node.keeps_deadlines {
            return Ok(HashMap::new());
        }
        let now_us = self.clock.now_us();
        let expired = node.handle.expired().await?.into_iter();
        let expired = expired.map(|ExpiredSandbox { id, ago, outcome }| {
            let at_us = now_us.saturating_sub(i64::try_from(ago.as_micros()).unwrap_or(i64::MAX));
            (id, NodeExpiry { at_us, outcome })
        });
        Ok(expired.collect())
    }

    /// Has a node forget what it has done by itself: the rows say so.
    pub(super) async fn forget_expired(&self, node: &ServedNode, expired: HashMap<SandboxId, NodeExpiry>) {
        if expired.is_empty() {
            return;
        }
        tracing::info!(node.id = %node.id(), sandboxes = expired.len(), "the node has ended or paused sandboxes at their deadlines, while no server was there");
        if let Err(error) = node.handle.forget_expired(expired.into_keys().collect()).await {
            // It says so again. What was paused then is paused in its row, and what has ended has none.
            tracing::warn!(error = %Chain(&error), "a node was not told that what it has done is known");
        }
    }

    /// Logs and counts that a node has paused a sandbox at its deadline. `before` is the row of before that.
    pub(super) fn note_paused_by_node(&self, before: &SandboxRow, at_us: i64, kept: Kept) {
        let records = &self.tracked.records;
        // It was not paused then, so this is news.
        records.track(before);
        records.run_has_ended(&before.id, at_us);
        self.tracked
            .log(&before.id, &LifecycleEvent::Paused(PauseReason::Timeout, kept));
        self.tracked.metrics.pause(PauseReason::Timeout);
    }

    /// Logs and counts that a node has ended a sandbox at its deadline, or that it was lost.
    pub(super) fn note_gone(&self, row: &SandboxRow, expiry: Option<NodeExpiry>) {
        let Some(NodeExpiry { at_us, .. }) = expiry else {
            return self.tracked.has_ended(&row.id, EndReason::Lost);
        };
        self.tracked.records.run_has_ended(&row.id, at_us);
        self.tracked.has_ended(&row.id, EndReason::Expired);
        self.tracked.metrics.expired(at_us.saturating_sub(row.end_us));
    }
}
