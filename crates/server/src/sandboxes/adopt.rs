//! Adoption when a node is taken over, at a start and after the node was restarted: sandboxes that still run or are paused
//! are adopted, everything else is removed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use model::id::SandboxId;
use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, Recovery, State};
use protocol::node::{AdoptedState, NodeError, Wanted, WantedState};
use store::error::StoreError;
use store::nodes::NodeRows;
use store::sandboxes::{Pause, SandboxRow};

use super::Sandboxes;
use super::entry::CountedAs;
use crate::admission::quota::ResourceUse;
use crate::injections::SandboxInjections;
use crate::nodes::ServedNode;
use crate::outcome::EndReason;

/// Why the sandboxes of an earlier start could not be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The node failed.
    #[error(transparent)]
    Node(#[from] NodeError),
}

impl Sandboxes {
    /// Reconciles rows, node and memory when a node is taken over, and returns how many sandboxes were adopted. Everything that
    /// does not run is removed.
    pub(crate) async fn adopt(&self, node: &Arc<ServedNode>) -> Result<usize, AdoptError> {
        let rows = node.rows.sandbox_list_live().await?;
        let sealed = node.rows.sandbox_injections_list().await?;
        let injections: BTreeMap<SandboxId, SandboxInjections> = sealed
            .iter()
            .filter_map(|(id, sealed)| Some((id.clone(), self.policies.injections.open_sandbox(id, sealed)?)))
            .collect();
        let mut wanted = Vec::new();
        for row in &rows {
            wanted.extend(self.wanted(row, injections.get(&row.id)).await?);
        }
        let adopted = node.handle.reconcile(wanted).await?.into_iter();
        let adopted: HashMap<SandboxId, AdoptedState> = adopted.map(|one| (one.id, one.state)).collect();
        let mut taken_over = HashSet::new();
        for row in rows {
            let state = adopted.get(&row.id).copied();
            let was_known = row.state.recovery(kept(&row)) != Recovery::Remove;
            let exists = state.is_some() && was_known;
            let row = match state.filter(|_| was_known) {
                Some(AdoptedState::Running) => self.settle_running(node, row).await?,
                Some(AdoptedState::Paused(kept)) => self.settle_paused(node, row, kept).await?,
                // What is kept in memory is lost with the processes, for example when the host was restarted.
                None => row,
            };
            if exists {
                let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
                let counted = CountedAs::of(&row);
                let mut admission = node.admission.occupy(&row.team_id, counted.share(share)).await?;
                if row.state == State::Paused && kept(&row) != Kept::Memory {
                    admission.leave_host();
                }
                let entry = self.register(&row, node, admission, injections.get(&row.id));
                if row.state == State::Paused {
                    self.tracked.records.stop_sampling(&row.id, None);
                    let paused_us = row.paused_us.unwrap_or_else(|| self.clock.now_us());
                    self.retain(&entry.turn().await, paused_us);
                } else {
                    self.tracked.runs(&row);
                }
                taken_over.insert(row.id);
            } else {
                self.lose_row(&node.rows, &row).await?;
            }
        }
        self.tracked.records.recall(&taken_over).await?;
        Ok(taken_over.len())
    }

    /// Removes the rows of a node of which nothing is left: it was forgotten. Returns how many sandboxes those were.
    pub(crate) async fn lose_all(&self, rows: &NodeRows) -> Result<usize, StoreError> {
        let live = rows.sandbox_list_live().await?;
        for row in &live {
            self.lose_row(rows, row).await?;
        }
        Ok(live.len())
    }

    /// Removes the row of a sandbox of which nothing is left.
    async fn lose_row(&self, rows: &NodeRows, row: &SandboxRow) -> Result<(), StoreError> {
        rows.sandbox_delete(&row.id).await?;
        self.tracked.records.track(row);
        // No client knows any other.
        if row.state.recovery(kept(row)) != Recovery::Remove {
            self.tracked.has_ended(&row.id, EndReason::Lost);
        }
        self.tracked.records.end(&row.id);
        Ok(())
    }

    /// Stores that a sandbox runs which was being paused or resumed when the platform stopped.
    async fn settle_running(&self, node: &ServedNode, row: SandboxRow) -> Result<SandboxRow, StoreError> {
        let started_us = match row.state {
            State::Running => return Ok(row),
            State::Resuming => self.clock.now_us(),
            _ => row.started_us,
        };
        let change = node
            .rows
            .sandbox_resumed(&row.id, row.version, started_us, row.end_us, None)
            .await?;
        // Nothing else changes rows before the start is over.
        let state = RowChange::Running.state();
        Ok(change.applied().unwrap_or(SandboxRow { state, ..row }))
    }

    /// Stores that a sandbox is paused, and what is kept of it: one that was being paused or resumed when the platform
    /// stopped, and one whose last row was lost with the power of the host.
    async fn settle_paused(
        &self,
        node: &ServedNode,
        mut row: SandboxRow,
        kept: Kept,
    ) -> Result<SandboxRow, StoreError> {
        if row.state == State::Paused && row.kept == Some(kept) {
            return Ok(row);
        }
        let paused_us = match (row.state, row.paused_us) {
            (State::Paused | State::Resuming, Some(paused_us)) => paused_us,
            _ => self.clock.now_us(),
        };
        if row.state == State::Running {
            let change = node.rows.sandbox_pausing(&row.id, row.version, kept, None).await?;
            row = change.applied().unwrap_or(row);
        }
        let pause = Pause {
            kept,
            kept_bytes: row.kept_bytes.unwrap_or(0),
            paused_us,
            resume_error: None,
        };
        let change = node.rows.sandbox_paused(&row.id, row.version, pause).await?;
        let (state, kept) = (RowChange::Paused.state(), Some(kept));
        Ok(change.applied().unwrap_or(SandboxRow { state, kept, ..row }))
    }

    /// The state in which the node should keep the sandbox of a row, if any.
    async fn wanted(
        &self,
        row: &SandboxRow,
        injections: Option<&SandboxInjections>,
    ) -> Result<Option<Wanted>, StoreError> {
        let state = match row.state.recovery(kept(row)) {
            Recovery::Adopt => WantedState::Running,
            Recovery::Keep(kept) => WantedState::Paused(kept),
            Recovery::AdoptOrKeep(kept) => WantedState::RunningOrPaused(kept),
            Recovery::Remove => return Ok(None),
        };
        let context = self.policies.context_of(&row.team_id, injections).await?;
        Ok(Some(Wanted {
            id: row.id.clone(),
            state,
            egress: self.policies.of(row, context).await?,
        }))
    }
}

/// What is kept of a sandbox that is paused, or between that and running. A version that did not store it kept the disk.
fn kept(row: &SandboxRow) -> Kept {
    row.kept.unwrap_or(Kept::Filesystem)
}
