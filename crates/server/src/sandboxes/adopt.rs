//! Adoption when a node is taken over, at a start and after the node was restarted: sandboxes that still run or are paused
//! are adopted, everything else is removed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use model::id::SandboxId;
use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, Recovery, State};
use protocol::node::{AdoptedState, Expired, NodeError, Wanted, WantedState};
use store::error::StoreError;
use store::nodes::NodeRows;
use store::sandboxes::{Pause, SandboxRow};

use super::Sandboxes;
use super::entry::CountedAs;
use super::node_deadlines::NodeExpiry;
use crate::admission::quota::ResourceUse;
use crate::injections::SandboxInjections;
use crate::nodes::ServedNode;

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
        let mut expired = self.expired_on(node).await?;
        // Those that are paused are since a server has paused them, or has taken that over.
        let settled = rows.iter().filter(|row| row.state == State::Paused);
        let known: Vec<_> = settled.filter_map(|row| expired.remove_entry(&row.id)).collect();
        let now_us = self.clock.now_us();
        let mut wanted = Vec::new();
        for row in &rows {
            if let Some(expiry) = expired.get_mut(&row.id) {
                *expiry = expiry.of_row(row, now_us);
            }
            let expiry = expired.get(&row.id).copied();
            wanted.extend(self.wanted(node, row, expiry, injections.get(&row.id)).await?);
        }
        let adopted = node.handle.reconcile(wanted).await?.into_iter();
        let adopted: HashMap<SandboxId, AdoptedState> = adopted.map(|one| (one.id, one.state)).collect();
        let mut taken_over = HashSet::new();
        for row in rows {
            let state = adopted.get(&row.id).copied();
            let was_known = row.state.recovery(kept(&row)) != Recovery::Remove;
            let exists = state.is_some() && was_known;
            let expiry = expired.get(&row.id).copied();
            let before = expiry.is_some().then(|| row.clone());
            let row = match state.filter(|_| was_known) {
                Some(AdoptedState::Running) => self.settle_running(node, row).await?,
                Some(AdoptedState::Paused(kept)) => self.settle_paused(node, row, kept, expiry).await?,
                // What is kept in memory is lost with the processes, for example when the host was restarted.
                None => row,
            };
            let is_copied = !exists && self.is_copied(&row).await?;
            if is_copied {
                node.lacks.lock().insert(row.id.clone());
                tracing::warn!(sandbox.id = %row.id, node.id = %node.id(), "a node has lost a paused sandbox, which goes on from its copy in the blob store");
            }
            if exists || is_copied {
                let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
                let counted = CountedAs::of(&row);
                let mut admission = node.admission.occupy(&row.team_id, counted.share(share)).await?;
                if row.state == State::Paused && kept(&row) != Kept::Memory {
                    admission.leave_host();
                }
                let entry = self.register(&row, node, admission, injections.get(&row.id));
                if let (Some(before), Some(NodeExpiry { at_us, .. })) = (&before, expiry)
                    && row.state == State::Paused
                {
                    self.note_paused_by_node(before, at_us, kept(&row));
                }
                if row.state == State::Paused {
                    self.tracked.records.stop_sampling(&row.id, None);
                    let paused_us = row.paused_us.unwrap_or_else(|| self.clock.now_us());
                    self.retain(&entry.turn().await, paused_us);
                } else {
                    self.tracked.runs(&row);
                }
                taken_over.insert(row.id);
            } else {
                let expiry = expiry.filter(|expiry| expiry.outcome == Expired::Ended);
                self.lose_row(&node.rows, &row, expiry).await?;
            }
        }
        self.tracked.records.recall(&taken_over).await?;
        expired.extend(known);
        self.forget_expired(node, expired).await;
        Ok(taken_over.len())
    }

    /// Whether the blob store has the current copy of a sandbox that is paused on a disk.
    async fn is_copied(&self, row: &SandboxRow) -> Result<bool, StoreError> {
        if self.parcels.is_none() || row.state != State::Paused || kept(row) == Kept::Memory {
            return Ok(false);
        }
        let parcel = self.store().sandbox_parcel(&row.id).await?;
        Ok(parcel.is_some_and(|parcel| parcel.current.is_some()))
    }

    /// Removes the rows of a node of which nothing is left: it was forgotten. Returns how many sandboxes those were, and how many are
    /// left, because the blob store has what is kept of them.
    pub(crate) async fn lose_all(&self, rows: &NodeRows) -> Result<(usize, usize), StoreError> {
        let mut live = rows.sandbox_list_live().await?;
        let all = live.len();
        if self.parcels.is_some() {
            let copied: HashSet<SandboxId> = rows.sandbox_list_packed(true).await?.into_iter().collect();
            live.retain(|row| !copied.contains(&row.id));
        }
        for row in &live {
            self.lose_row(rows, row, None).await?;
        }
        Ok((live.len(), all - live.len()))
    }

    /// Removes the row of a sandbox of which nothing is left, with what its node has done by itself.
    async fn lose_row(&self, rows: &NodeRows, row: &SandboxRow, expiry: Option<NodeExpiry>) -> Result<(), StoreError> {
        let deleted = rows.sandbox_delete(&row.id).await?;
        self.tracked.records.track(row);
        // No client knows any other.
        if row.state.recovery(kept(row)) != Recovery::Remove {
            self.note_gone(row, expiry);
        }
        self.tracked.records.end(&row.id);
        if let Some(deleted) = deleted {
            self.remove_parcels(&deleted);
        }
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
        expiry: Option<NodeExpiry>,
    ) -> Result<SandboxRow, StoreError> {
        if row.state == State::Paused && row.kept == Some(kept) {
            return Ok(row);
        }
        let paused_us = match (expiry, row.state, row.paused_us) {
            (Some(expiry), ..) => expiry.at_us,
            (None, State::Paused | State::Resuming, Some(paused_us)) => paused_us,
            _ => self.clock.now_us(),
        };
        let bytes = expiry.and_then(NodeExpiry::kept).map(|(_, bytes)| bytes);
        let bytes = bytes.and_then(|bytes| i64::try_from(bytes).ok());
        if row.state == State::Running {
            let change = node.rows.sandbox_pausing(&row.id, row.version, kept, None).await?;
            row = change.applied().unwrap_or(row);
        }
        let pause = Pause {
            kept,
            kept_bytes: bytes.or(row.kept_bytes).unwrap_or(0),
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
        node: &ServedNode,
        row: &SandboxRow,
        expiry: Option<NodeExpiry>,
        injections: Option<&SandboxInjections>,
    ) -> Result<Option<Wanted>, StoreError> {
        let state = match (row.state.recovery(kept(row)), expiry) {
            (Recovery::Remove, _) => return Ok(None),
            // Its node has gone on where the row stops.
            (_, Some(expiry)) => match expiry.kept() {
                Some((kept, _)) => WantedState::Paused(kept),
                None => return Ok(None),
            },
            (Recovery::Adopt, None) => WantedState::Running,
            (Recovery::Keep(kept), None) => WantedState::Paused(kept),
            (Recovery::AdoptOrKeep(kept), None) => WantedState::RunningOrPaused(kept),
        };
        let context = self.policies.context_of(&row.team_id, injections).await?;
        Ok(Some(Wanted {
            id: row.id.clone(),
            state,
            egress: self.policies.of(row, context).await?,
            deadline: self.node_deadline(node, row).await?,
        }))
    }
}

/// What is kept of a sandbox that is paused, or between that and running. A version that did not store it kept the disk.
fn kept(row: &SandboxRow) -> Kept {
    row.kept.unwrap_or(Kept::Filesystem)
}
