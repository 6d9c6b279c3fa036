//! Adoption at startup: sandboxes that still run are adopted, everything else is removed.

use std::collections::{BTreeMap, HashSet};

use model::id::SandboxId;
use model::lifecycle::{Recovery, State};
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
        let adopted: HashSet<SandboxId> = self.node.reconcile(wanted).await?.into_iter().collect();
        let mut count = 0;
        for row in rows {
            let runs = adopted.contains(&row.id);
            let row = match (row.state.recovery(), runs) {
                (Recovery::AdoptOrKeep, true) => self.settle_state(row, State::Running).await?,
                (Recovery::AdoptOrKeep, false) => self.settle_state(row, State::Paused).await?,
                (Recovery::Adopt | Recovery::Keep | Recovery::Remove, _) => row,
            };
            if row.state == State::Paused {
                // A paused sandbox has no entry in the registry.
                self.records.track(&row);
            } else if row.state == State::Running && runs {
                let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
                let admission = admission.occupy(&row.team_id, share).await?;
                let entry = self.register(&row, admission);
                if let Some(injections) = injections.get(&row.id) {
                    entry.set_saved_rules(injections.saved_rules());
                }
                self.records.start_sampling(&row);
                self.deadlines.set(&row.id, row.end_us);
                count += 1;
            } else {
                self.rows.sandbox_delete(&row.id).await?;
                self.records.track(&row);
                // No client knows any other to be running.
                if row.state == State::Running {
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

    /// Stores the actual state of a sandbox that was changing state when the platform stopped.
    async fn settle_state(&self, row: SandboxRow, state: State) -> Result<SandboxRow, StoreError> {
        let change = self.rows.sandbox_set_state(&row.id, row.version, state).await?;
        // Nothing else changes rows before the start is over.
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
            Recovery::Keep => WantedState::Paused,
            Recovery::AdoptOrKeep => WantedState::RunningOrPaused,
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
