//! Creating a sandbox from one of the pool: it gets its identity first, and then its row, which says that it runs. After
//! a crash in between the next start ends it, because there is no row.

use std::sync::Arc;

use protocol::node::ClaimSandbox;

use super::Sandboxes;
use super::create::{CreateError, CreateRequest, Created};
use super::idempotency::KeyClaim;
use super::repositories::preparation_policy;
use crate::chain::Chain;
use crate::pool::Taken;

impl Sandboxes {
    /// Gives a sandbox of the pool the identity of the request. None if it could not be claimed, because it had ended or
    /// does not respond: nothing of it is left, and the request can be tried with another sandbox.
    pub(super) async fn create_from_pool(
        self: &Arc<Self>,
        create: &CreateRequest,
        mut taken: Taken,
        claim: Option<&mut KeyClaim>,
    ) -> Result<Option<Created>, CreateError> {
        let CreateRequest {
            team,
            user,
            spec,
            build,
            injections,
            repositories,
            admission,
            node,
            ..
        } = create;
        let changes = self.policies.injections.changes();
        let context = self.policies.context_of(team, Some(injections)).await?;
        let mut new = self.row_of(taken.id().clone(), team.clone(), user.clone(), spec.clone());
        new.injections_sealed = self.policies.injections.seal_sandbox(&new.id, injections)?;
        new.environment_sealed = self.seal_environment(&new.id, &spec.env_vars)?;
        let row = node.rows.sandbox_unstored(new.clone());
        let egress = self.policies.of(&row, context).await?;
        if let Some(claim) = claim {
            claim.move_to(&row.id).await?;
        }
        // Before it leaves the pool, so that its end is noticed in any case.
        let entry = self.register(&row, node, admission.clone(), Some(injections));
        let Some(log) = taken.begin() else {
            self.discard(node, &row.id).await;
            taken.finish(false);
            return Ok(None);
        };
        log.into_iter()
            .for_each(|entry| self.tracked.records.log_from_node(entry));
        let request = ClaimSandbox {
            id: row.id.clone(),
            init: self.init_of(&row, build, spec.env_vars.clone()),
            egress: if repositories.is_empty() {
                egress.clone()
            } else {
                preparation_policy(&egress)
            },
            deadline: self.node_deadline(node, &row).await?,
        };
        let claimed = match node.handle.claim(request).await {
            Ok(claimed) => claimed,
            Err(error) => {
                tracing::warn!(sandbox.id = %row.id, error = %Chain(&error), "a pooled sandbox cannot be claimed");
                self.discard(node, &row.id).await;
                taken.finish(false);
                return Ok(None);
            }
        };
        taken.finish(true);

        let prepared = if repositories.is_empty() {
            None
        } else {
            Some(self.prepare(node, &row, build, repositories, egress).await?)
        };

        let (row, stored) = self
            .insert_started(node, new, &claimed.agent_version, spec.timeout_s)
            .await?;
        self.tell_start(node, &row, prepared.is_some()).await;
        self.announce(&row, &entry, changes).await?;
        let mut stages = claimed.stages;
        stages.extend(prepared);
        stages.push(stored);
        Ok(Some(Created { row, stages }))
    }
}
