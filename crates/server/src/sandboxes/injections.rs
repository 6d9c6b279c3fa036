//! Changing the injections of sandboxes, and applying changed rules to those that run.

use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::command::Command;
use model::secret::Secret;
use store::injection_rules::Stamp;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::SandboxEntry;
use crate::chain::Chain;
use crate::injections::SandboxInjections;
use crate::records::LifecycleEvent;

/// How often rules and secrets are compared with those of the database, which servers of other nodes may have changed, and
/// failed policies are tried again.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(5);

/// A change of the injections of a sandbox. It was validated.
#[derive(Debug)]
pub(crate) enum InjectionUpdate {
    /// All are replaced.
    Replace(SandboxInjections),
    /// The token of its code hosts is replaced.
    Token(Secret),
}

impl Sandboxes {
    /// Changes the injections of a sandbox. Concurrent changes are made one after the other.
    pub(crate) async fn set_injections(
        self: &Arc<Self>,
        entry: &Arc<SandboxEntry>,
        update: InjectionUpdate,
    ) -> Result<(), ChangeError> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        // On a task, so that a client disconnect cannot leave row and node different.
        let task = self
            .work
            .spawn(async move { sandboxes.set_injections_on_task(&entry, update).await });
        task.await.unwrap_or(Err(ChangeError::TaskFailed))
    }

    async fn set_injections_on_task(
        &self,
        entry: &Arc<SandboxEntry>,
        update: InjectionUpdate,
    ) -> Result<(), ChangeError> {
        let turn = self.turn_to_change(entry).await?;
        let mut row = self.store().sandbox_by_id(&entry.id).await?.ok_or(ChangeError::Gone)?;
        let injections = match update {
            InjectionUpdate::Replace(injections) => injections,
            InjectionUpdate::Token(token) => {
                let has_repositories;
                (row, has_repositories) = self.store_repository_token(&turn, row, &token).await?;
                let after = match self.policies.injections.of_sandbox(&row.id).await? {
                    Some(before) => self.policies.injections.with_token(before, &token).await?,
                    None => None,
                };
                match after {
                    Some(after) => after,
                    None if has_repositories => {
                        self.tracked.log(&row.id, &LifecycleEvent::InjectionsChanged);
                        return self.set_policy(&turn, &row).await;
                    }
                    None => return Err(ChangeError::NoToken),
                }
            }
        };
        let sealed = self.policies.injections.seal_sandbox(&row.id, &injections)?;
        let change = turn
            .node
            .rows
            .sandbox_set_injections(&row.id, row.version, sealed.as_ref());
        let row = turn.changed(change.await)?;
        turn.set_saved_rules(injections.saved_rules());
        self.tracked.log(&row.id, &LifecycleEvent::InjectionsChanged);
        self.set_policy(&turn, &row).await
    }

    /// Applies a changed or deleted rule to the running sandboxes that refer to it.
    pub(crate) async fn apply_rule(self: &Arc<Self>, id: &str) {
        self.policies.injections.note_change();
        let entries: Vec<_> = self
            .tracked
            .registry
            .all_running()
            .into_iter()
            .filter(|entry| entry.uses_rule(id))
            .collect();
        let sandboxes = Arc::clone(self);
        // On a task, so that a client disconnect leaves no sandbox with the rule before.
        let task = self.work.spawn(async move {
            for entry in entries {
                sandboxes.apply_again(&entry).await;
            }
        });
        let _ = task.await;
    }

    /// Applies the row of a sandbox and the rules as they are now.
    pub(crate) async fn apply_again(&self, entry: &Arc<SandboxEntry>) {
        let applied = async {
            let turn = entry.turn_of(Command::Change).await;
            turn.check(Command::Change)?;
            let row = self.store().sandbox_by_id(&entry.id).await?.ok_or(ChangeError::Gone)?;
            self.set_policy(&turn, &row).await
        };
        self.log_not_applied(&entry.id, applied.await);
    }

    /// Logs that a policy was not applied, unless something else applies it.
    pub(super) fn log_not_applied(&self, id: &SandboxId, applied: Result<(), ChangeError>) {
        match applied {
            // A resume applies what there is then.
            Ok(()) | Err(ChangeError::Gone | ChangeError::Stopping | ChangeError::Changing(_)) => {}
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot apply changed network settings, it will be tried again");
            }
        }
    }

    /// Applies rules and secrets that servers of other nodes have changed, and policies that could not be applied, until
    /// `stop`. Changes of this server are applied at once.
    pub(crate) async fn follow_rules(self: Arc<Self>, stop: CancellationToken) {
        let mut seen = Followed::default();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(FOLLOW_INTERVAL) => {}
            }
            let running = self.tracked.registry.all_running();
            if running.is_empty() {
                // Nothing is known about changes before the next sandbox.
                seen = Followed::default();
                continue;
            }
            for entry in running.iter().filter(|entry| entry.is_policy_pending()) {
                self.apply_again(entry).await;
            }
            if let Ok(stamp) = self.store().injection_rule_stamp().await
                && seen.rules.replace(stamp) != Some(stamp)
            {
                self.policies.injections.note_change();
                for entry in running.iter().filter(|entry| entry.uses_rules()) {
                    self.apply_again(entry).await;
                }
            }
            if let Ok(stamp) = self.store().secret_stamp().await
                && seen.secrets != Some(stamp)
            {
                match self.apply_secrets().await {
                    Ok(()) => seen.secrets = Some(stamp),
                    Err(error) => tracing::error!(error = %Chain(&error), "cannot apply changed secrets"),
                }
            }
        }
    }
}

/// The state of the database that was last applied.
#[derive(Debug, Default)]
struct Followed {
    rules: Option<Stamp>,
    secrets: Option<Stamp>,
}
