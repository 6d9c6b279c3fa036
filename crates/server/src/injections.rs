//! Injections: from sealed rows to the rules that a node applies.
//!
//! A saved rule belongs to a user, and sandboxes refer to it by its id. The reference is resolved whenever the policy of
//! a sandbox is made, so that a changed rule is used by the sandboxes that refer to it, and a deleted one by none.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use model::id::{SandboxId, UserId};
use model::injection::InjectionRule;
use model::injection::provider::Providers;
use model::injection::spec::{Injection, InjectionItem};
use model::limits::INJECTIONS_BYTES_MAX;
use model::secret::Secret;
use serde::{Deserialize, Serialize};
use store::Store;
use store::error::StoreError;
use store::injection_rules::InjectionRuleRow;
use store::keys::SealedSecret;

use crate::seal::{SealError, Sealer};

/// The injections of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxInjections {
    /// The user whose rules the injections refer to.
    pub(crate) user: UserId,
    /// The injections, in the order of the request.
    pub(crate) items: Vec<InjectionItem>,
}

impl SandboxInjections {
    /// The ids of the saved rules that the injections refer to.
    pub(crate) fn saved_rules(&self) -> BTreeSet<String> {
        let ids = self.items.iter().filter_map(|item| match item {
            InjectionItem::Saved(saved) => Some(saved.id.clone()),
            InjectionItem::Own(_) => None,
        });
        ids.collect()
    }
}

/// A sealed column has an invalid value.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnreadableInjection {
    #[error(transparent)]
    Sealed(#[from] SealError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Why injections of a request are refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RefusedInjections {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// With what is wrong, for the client.
    #[error("{0}")]
    Invalid(String),
}

/// Seals, opens and resolves injections.
#[derive(Debug)]
pub(crate) struct Injections {
    store: Store,
    sealer: Sealer,
    pub(crate) providers: Providers,
    /// How often a saved rule was changed or deleted, so that whoever has just resolved one can tell.
    changes: AtomicU64,
}

fn rule_owner(id: &str) -> String {
    format!("injection-rule/{id}")
}

fn sandbox_owner(id: &SandboxId) -> String {
    format!("sandbox-injections/{id}")
}

impl Injections {
    pub(crate) fn new(store: Store, sealer: Sealer, providers: Providers) -> Self {
        Self {
            store,
            sealer,
            providers,
            changes: AtomicU64::new(0),
        }
    }

    /// A number that differs from an earlier one if a saved rule was changed in between.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Notes that a saved rule was changed or deleted.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    fn seal<T: Serialize>(&self, owner: &str, value: &T) -> Result<SealedSecret, SealError> {
        let text = serde_json::to_string(value).map_err(|_| SealError::Corrupt)?;
        self.sealer.seal(owner, &text).map(SealedSecret::new)
    }

    fn open<T: for<'a> Deserialize<'a>>(&self, owner: &str, sealed: &SealedSecret) -> Result<T, UnreadableInjection> {
        let text = self.sealer.open(owner, sealed.as_str())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// The column of a saved rule.
    pub(crate) fn seal_rule(&self, id: &str, injection: &Injection) -> Result<SealedSecret, SealError> {
        self.seal(&rule_owner(id), injection)
    }

    /// What a saved rule injects.
    pub(crate) fn open_rule(&self, row: &InjectionRuleRow) -> Result<Injection, UnreadableInjection> {
        self.open(&rule_owner(&row.id), &row.injection_sealed)
    }

    /// The column of a sandbox; none without injections.
    pub(crate) fn seal_sandbox(
        &self,
        id: &SandboxId,
        injections: &SandboxInjections,
    ) -> Result<Option<SealedSecret>, SealError> {
        if injections.items.is_empty() {
            return Ok(None);
        }
        self.seal(&sandbox_owner(id), injections).map(Some)
    }

    /// The injections of the column of a sandbox. What cannot be read injects nothing.
    pub(crate) fn open_sandbox(&self, id: &SandboxId, sealed: &SealedSecret) -> Option<SandboxInjections> {
        match self.open(&sandbox_owner(id), sealed) {
            Ok(injections) => Some(injections),
            Err(error) => {
                tracing::error!(sandbox.id = %id, "invalid injections of a sandbox, it gets none: {error}");
                None
            }
        }
    }

    /// The injections of a sandbox; none if it has none.
    pub(crate) async fn of_sandbox(&self, id: &SandboxId) -> Result<Option<SandboxInjections>, StoreError> {
        let sealed = self.store.sandbox_injections(id).await?;
        Ok(sealed.and_then(|sealed| self.open_sandbox(id, &sealed)))
    }

    /// Checks one injection of a request.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(crate) fn check_one(&self, injection: &Injection) -> Result<(), String> {
        injection
            .rules(&self.providers, "")
            .map_err(|error| error.to_string())?;
        check_size(injection)
    }

    /// Checks the injections of a request, and that the rules that they refer to exist.
    pub(crate) async fn check(&self, injections: &SandboxInjections) -> Result<(), RefusedInjections> {
        let at = |index, why: &str| RefusedInjections::Invalid(format!("injections[{index}]: {why}"));
        for (index, item) in injections.items.iter().enumerate() {
            if let InjectionItem::Own(injection) = item {
                self.check_one(injection).map_err(|why| at(index, &why))?;
            }
        }
        check_size(injections).map_err(RefusedInjections::Invalid)?;
        for (index, item) in injections.items.iter().enumerate() {
            if let InjectionItem::Saved(saved) = item
                && (saved.id.contains('\0')
                    || self
                        .store
                        .injection_rule_of(&injections.user, &saved.id)
                        .await?
                        .is_none())
            {
                return Err(at(index, &format!("there is no injection rule {:?}", saved.id)));
            }
        }
        Ok(())
    }

    /// The rules that the injections of a sandbox stand for. Rules that do not exist any more inject nothing.
    pub(crate) async fn rules(&self, injections: &SandboxInjections) -> Result<Vec<InjectionRule>, StoreError> {
        let mut rules = Vec::new();
        for (index, item) in injections.items.iter().enumerate() {
            let (name, injection) = match item {
                InjectionItem::Own(injection) => (format!("injections[{index}]"), injection.clone()),
                InjectionItem::Saved(saved) => match self.saved(&injections.user, &saved.id).await? {
                    Some(injection) => (saved.id.clone(), injection),
                    None => continue,
                },
            };
            match injection.rules(&self.providers, &name) {
                Ok(expanded) => rules.extend(expanded),
                // Such as that of a provider which the operator has removed.
                Err(error) => tracing::warn!(rule = name, "an injection is no longer valid: {error}"),
            }
        }
        Ok(rules)
    }

    /// What a saved rule of a user injects; none if there is no such rule, or it cannot be read.
    async fn saved(&self, user: &UserId, id: &str) -> Result<Option<Injection>, StoreError> {
        let Some(row) = self.store.injection_rule_of(user, id).await? else {
            return Ok(None);
        };
        let injection = self.open_rule(&row);
        Ok(injection
            .map_err(|error| tracing::error!(rule = id, "an injection rule cannot be read: {error}"))
            .ok())
    }

    /// The injections with another token for their code hosts; none if they have no code host. A reference to a saved
    /// rule with a token becomes an injection of the sandbox itself, because the rule stays as it is.
    pub(crate) async fn with_token(
        &self,
        mut injections: SandboxInjections,
        token: &Secret,
    ) -> Result<Option<SandboxInjections>, StoreError> {
        let mut has_token = false;
        for item in &mut injections.items {
            let own = match item {
                InjectionItem::Own(own) => Some(own.clone()),
                InjectionItem::Saved(saved) => self.saved(&injections.user, &saved.id).await?,
            };
            if let Some(mut own) = own.filter(Injection::has_token) {
                own.set_token(token.clone());
                *item = InjectionItem::Own(own);
                has_token = true;
            }
        }
        Ok(has_token.then_some(injections))
    }
}

fn check_size(injections: &impl Serialize) -> Result<(), String> {
    let size = serde_json::to_vec(injections).map_or(usize::MAX, |json| json.len());
    if size > INJECTIONS_BYTES_MAX {
        return Err(format!(
            "all injections together are larger than {INJECTIONS_BYTES_MAX} bytes"
        ));
    }
    Ok(())
}
