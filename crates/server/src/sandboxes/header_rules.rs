//! Headers by domain (`network.rules`): from the request to the rules of the gateway. The values of secrets are looked up
//! whenever a policy is made, so that a changed secret reaches the sandboxes that refer to it.

use std::sync::Arc;

use model::header_rules::{HeaderRules, RulesSpec};
use model::id::TeamId;
use model::injection::InjectionRule;
use model::lifecycle::command::Command;
use model::sandbox::NetworkSpec;
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::SandboxEntry;
use super::policy::{Policies, rules_owner, spec_of};
use crate::chain::Chain;

/// Why header rules of a request were refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RulesError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// For the client.
    #[error("{0}")]
    Invalid(String),
}

impl Policies {
    /// Checks the header rules of a request: all secrets must exist.
    pub(crate) async fn check_rules(&self, team: &TeamId, network: &NetworkSpec) -> Result<(), RulesError> {
        if network.rules.is_empty() {
            return Ok(());
        }
        let rules = network
            .header_rules()
            .map_err(|error| RulesError::Invalid(error.to_string()))?;
        match self.secrets.missing(team, &rules.secrets()).await?.first() {
            None => Ok(()),
            Some(name) => Err(RulesError::Invalid(format!(
                "rules: secret {name:?} does not exist: create it with POST /secrets first"
            ))),
        }
    }

    /// The rules of the gateway from the header rules of a row. Rules that cannot be read are left out, so that nothing is
    /// sent to a wrong host.
    pub(super) async fn header_rules(&self, row: &SandboxRow) -> Result<Vec<InjectionRule>, StoreError> {
        let Some(rules) = self.rules_of(row) else {
            return Ok(Vec::new());
        };
        let values = self.secrets.values(&row.team_id, &rules.secrets()).await?;
        let resolved = rules.resolve(&values);
        for why in resolved.left_out {
            tracing::warn!(sandbox.id = %row.id, "network.rules: {why}");
        }
        Ok(resolved.rules)
    }

    /// The header rules of a row, if it has any.
    fn rules_of(&self, row: &SandboxRow) -> Option<HeaderRules> {
        let sealed = spec_of(row).ok().flatten()?.rules_sealed?;
        let opened = match self.sealer.open(&rules_owner(&row.id), &sealed) {
            Ok(opened) => opened,
            Err(error) => {
                tracing::error!(sandbox.id = %row.id, "cannot open network.rules: {error}");
                return None;
            }
        };
        let parsed = serde_json::from_str::<RulesSpec>(&opened).ok();
        let parsed = parsed.and_then(|spec| HeaderRules::parse(&spec).ok());
        if parsed.is_none() {
            tracing::error!(sandbox.id = %row.id, "invalid network.rules in column network_json of sandboxes");
        }
        parsed
    }
}

impl Sandboxes {
    /// Applies a changed or deleted secret to the sandboxes of its team that refer to it: their new connections follow it
    /// when this returns. It goes on if the client disconnects. A sandbox that fails keeps the value before until it
    /// is tried again, seconds later; this is logged.
    pub(crate) async fn apply_secret(self: &Arc<Self>, team: &TeamId, name: &str) {
        let sandboxes = Arc::clone(self);
        let (team, name) = (team.clone(), name.to_owned());
        let task = self.work.spawn(async move {
            sandboxes.policies.injections.note_change();
            let refers =
                |row: &SandboxRow, rules: &HeaderRules| row.team_id == team && rules.secrets().contains(name.as_str());
            if let Err(error) = sandboxes.apply_to_those_that_refer(refers).await {
                sandboxes.tracked.metrics.store_error();
                tracing::error!(error = %Chain(&error), "cannot apply a changed secret");
            }
        });
        let _ = task.await;
    }

    /// Applies the secrets as they are now to all sandboxes that refer to any.
    pub(super) async fn apply_secrets(&self) -> Result<(), StoreError> {
        self.policies.injections.note_change();
        self.apply_to_those_that_refer(|_, rules| !rules.secrets().is_empty())
            .await
    }

    async fn apply_to_those_that_refer(
        &self,
        refers: impl Fn(&SandboxRow, &HeaderRules) -> bool,
    ) -> Result<(), StoreError> {
        for row in self.rows_of_all().await? {
            if !self.policies.rules_of(&row).is_some_and(|rules| refers(&row, &rules)) {
                continue;
            }
            // Without an entry it is ending. One that is being created notices the change at its end.
            let Some(entry) = self.tracked.registry.get(&row.id) else {
                continue;
            };
            match self.apply_policy(&entry).await {
                Ok(()) | Err(ChangeError::Stopping | ChangeError::Gone) => {}
                Err(error) => {
                    tracing::error!(sandbox.id = %row.id, error = %Chain(&error), "cannot apply a changed secret");
                }
            }
        }
        Ok(())
    }

    /// The rows of all sandboxes on the nodes that are served.
    async fn rows_of_all(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let mut rows = Vec::new();
        for node in self.nodes.all() {
            rows.extend(node.rows.sandbox_list_live().await?);
        }
        Ok(rows)
    }

    /// Makes the policy of a sandbox again and applies it.
    async fn apply_policy(&self, entry: &Arc<SandboxEntry>) -> Result<(), ChangeError> {
        let turn = entry.turn_unless_refused(Command::Change).await?;
        let row = self.store().sandbox_by_id(&entry.id).await?.ok_or(ChangeError::Gone)?;
        self.set_policy(&turn, &row).await
    }
}
