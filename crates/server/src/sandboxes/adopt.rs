//! Adoption at startup: sandboxes that still run or are paused are adopted, everything else is removed.

use std::collections::{BTreeMap, HashMap};

use model::id::SandboxId;
use model::lifecycle::{Kept, Recovery, State};
use protocol::node::{NodeError, Wanted, WantedState};
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use crate::admission::AdmissionControl;
use crate::admission::quota::ResourceUse;
use crate::injections::SandboxInjections;
use crate::outcome::EndReason;
use crate::records::LifecycleEvent;

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
    /// Reconciles rows, node and memory at startup, and returns how many sandboxes were adopted. Everything that does
    /// not run is removed.
    pub(crate) async fn adopt(&self, admission: &AdmissionControl) -> Result<usize, AdoptError> {
        let rows = self.rows.sandbox_list_live().await?;
        let sealed = self.rows.sandbox_injections_list().await?;
        let injections: BTreeMap<SandboxId, SandboxInjections> = sealed
            .iter()
            .filter_map(|(id, sealed)| Some((id.clone(), self.injections.open_sandbox(id, sealed)?)))
            .collect();
        let mut wanted = Vec::new();
        for row in &rows {
            wanted.extend(self.wanted(row, injections.get(&row.id)).await?);
        }
        let adopted = self.node.reconcile(wanted).await?.into_iter();
        let adopted: HashMap<SandboxId, bool> = adopted.map(|one| (one.id, one.is_paused)).collect();
        let mut count = 0;
        for row in rows {
            let is_paused = adopted.get(&row.id).copied();
            let was_known = row.state.recovery() != Recovery::Remove;
            let row = match (row.state.recovery(), is_paused) {
                (Recovery::AdoptOrKeep, Some(false)) => self.settle_running(row).await?,
                (Recovery::AdoptOrKeep, Some(true)) => self.settle_paused(row).await?,
                (Recovery::AdoptOrKeep, None) if kept(&row) != Kept::Memory => self.settle_paused(row).await?,
                (Recovery::Adopt | Recovery::Keep | Recovery::AdoptOrKeep | Recovery::Remove, _) => row,
            };
            let exists = match row.state {
                State::Running => is_paused.is_some(),
                // What is kept in memory is lost with the processes, for example when the host was restarted.
                State::Paused => is_paused.is_some() || kept(&row) != Kept::Memory,
                State::Creating | State::Pausing | State::Resuming | State::Stopping | State::Gone => false,
            };
            if exists {
                let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
                let share = match row.state {
                    State::Paused => share.paused(),
                    _ => share,
                };
                let admission = admission.occupy(&row.team_id, share).await?;
                let entry = self.register(&row, admission);
                if let Some(injections) = injections.get(&row.id) {
                    entry.set_saved_rules(injections.saved_rules());
                }
                if row.state == State::Paused {
                    self.records.stop_sampling(&row.id);
                } else {
                    self.records.start_sampling(&row);
                    self.deadlines.set(&row.id, row.end_us);
                }
                count += 1;
            } else {
                self.rows.sandbox_delete(&row.id).await?;
                self.records.track(&row);
                // No client knows any other.
                if was_known {
                    self.metrics.end(EndReason::Lost);
                    self.records
                        .log_event(&row.id, &LifecycleEvent::Ending(EndReason::Lost));
                }
                self.records.end(&row.id);
            }
        }
        self.store.records_end_orphans(self.clock.now_us()).await?;
        Ok(count)
    }

    /// Stores that a sandbox runs which was being paused or resumed when the platform stopped.
    async fn settle_running(&self, row: SandboxRow) -> Result<SandboxRow, StoreError> {
        let started_us = match row.state {
            State::Resuming => self.clock.now_us(),
            _ => row.started_us,
        };
        let change = self
            .rows
            .sandbox_resumed(&row.id, row.version, started_us, row.end_us)
            .await?;
        // Nothing else changes rows before the start is over.
        let state = State::Running;
        Ok(change.applied().unwrap_or(SandboxRow { state, ..row }))
    }

    /// Stores that a sandbox is paused which was being paused or resumed when the platform stopped.
    async fn settle_paused(&self, row: SandboxRow) -> Result<SandboxRow, StoreError> {
        let paused_us = match (row.state, row.paused_us) {
            (State::Resuming, Some(paused_us)) => paused_us,
            _ => self.clock.now_us(),
        };
        let change = self
            .rows
            .sandbox_paused(&row.id, row.version, kept(&row), paused_us)
            .await?;
        let state = State::Paused;
        Ok(change.applied().unwrap_or(SandboxRow { state, ..row }))
    }

    /// The state in which the node should keep the sandbox of a row, if any.
    async fn wanted(
        &self,
        row: &SandboxRow,
        injections: Option<&SandboxInjections>,
    ) -> Result<Option<Wanted>, StoreError> {
        let state = match row.state.recovery() {
            Recovery::Adopt => WantedState::Running,
            Recovery::Keep => WantedState::Paused(kept(row)),
            Recovery::AdoptOrKeep => WantedState::RunningOrPaused(kept(row)),
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
