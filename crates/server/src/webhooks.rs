//! Webhooks of teams: addresses to which the events of their sandboxes are sent.
//!
//! The secret that signs events goes in and never comes out: it is sealed for the database, and opened only while an event
//! is sent ([`deliver`]).

mod client;
pub(crate) mod deliver;
pub(crate) mod receiver;
mod signature;

use std::sync::Arc;

use model::event::EventTypes;
use model::id::TeamId;
use model::secret::Secret;
use store::Store;
use store::error::StoreError;
use store::keys::SealedSecret;
use store::webhooks::{AttemptRow, WebhookChange, WebhookRow};
use uuid::Uuid;

use self::receiver::ReceiverRules;
use self::signature::owner;
use crate::clock::Clock;
use crate::seal::{SealError, Sealer};

/// Why a webhook was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WebhookError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The request is not acceptable; for the client.
    #[error("{0}")]
    Invalid(String),
    #[error("the team has {0} webhooks, and cannot have more")]
    TooMany(u32),
    #[error("the team has no such webhook")]
    Unknown,
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// A webhook to create.
#[derive(Debug)]
pub(crate) struct NewWebhook {
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) enabled: bool,
    pub(crate) types: EventTypes,
    pub(crate) secret: Secret,
}

/// What a client changes of a webhook. What is none stays as it is.
#[derive(Debug)]
pub(crate) struct WebhookUpdate {
    pub(crate) name: Option<String>,
    pub(crate) url: Option<String>,
    pub(crate) enabled: Option<bool>,
    pub(crate) types: Option<EventTypes>,
    pub(crate) secret: Option<Secret>,
}

/// The webhooks of all teams.
#[derive(Debug)]
pub(crate) struct Webhooks {
    store: Store,
    sealer: Sealer,
    clock: Clock,
    rules: Arc<ReceiverRules>,
    per_team: u32,
}

impl Webhooks {
    pub(crate) fn new(store: Store, sealer: Sealer, clock: Clock, rules: Arc<ReceiverRules>, per_team: u32) -> Self {
        Self {
            store,
            sealer,
            clock,
            rules,
            per_team,
        }
    }

    /// Stores a new webhook.
    pub(crate) async fn create(&self, team: &TeamId, new: NewWebhook) -> Result<WebhookRow, WebhookError> {
        self.rules.check(&new.url).map_err(WebhookError::Invalid)?;
        // Two concurrent requests may exceed the limit by one each, which is harmless.
        if self.store.webhook_count(team).await? >= self.per_team {
            return Err(WebhookError::TooMany(self.per_team));
        }
        let id = Uuid::now_v7().to_string();
        let row = WebhookRow {
            secret_sealed: self.seal(&id, &new.secret)?,
            id,
            team_id: team.clone(),
            name: new.name,
            url: new.url,
            enabled: new.enabled,
            types: new.types,
            dropped: 0,
            created_us: self.clock.now_us(),
        };
        self.store.webhook_insert(&row).await?;
        Ok(row)
    }

    /// Changes a webhook.
    pub(crate) async fn update(
        &self,
        team: &TeamId,
        id: &str,
        update: WebhookUpdate,
    ) -> Result<WebhookRow, WebhookError> {
        // First, so that other teams get no other errors.
        self.find(team, id).await?;
        if let Some(url) = &update.url {
            self.rules.check(url).map_err(WebhookError::Invalid)?;
        }
        let secret_sealed = update.secret.as_ref().map(|secret| self.seal(id, secret)).transpose()?;
        let change = WebhookChange {
            name: update.name,
            url: update.url,
            enabled: update.enabled,
            types: update.types,
            secret_sealed,
        };
        let changed = self.store.webhook_update(team, id, &change).await?;
        changed.ok_or(WebhookError::Unknown)
    }

    /// The webhooks of a team, oldest first.
    pub(crate) async fn list(&self, team: &TeamId) -> Result<Vec<WebhookRow>, WebhookError> {
        Ok(self.store.webhook_list(team).await?)
    }

    /// A webhook of a team.
    pub(crate) async fn find(&self, team: &TeamId, id: &str) -> Result<WebhookRow, WebhookError> {
        let found = self.store.webhook_find(team, id).await?;
        found.ok_or(WebhookError::Unknown)
    }

    /// Deletes a webhook, with what waits to be sent to it.
    pub(crate) async fn delete(&self, team: &TeamId, id: &str) -> Result<(), WebhookError> {
        if self.store.webhook_delete(team, id).await? {
            Ok(())
        } else {
            Err(WebhookError::Unknown)
        }
    }

    /// The latest attempts to send something to a webhook, newest first.
    pub(crate) async fn attempts(
        &self,
        team: &TeamId,
        id: &str,
        offset: i64,
        limit: u32,
    ) -> Result<Vec<AttemptRow>, WebhookError> {
        self.find(team, id).await?;
        Ok(self.store.attempt_list(id, offset, limit).await?)
    }

    fn seal(&self, id: &str, secret: &Secret) -> Result<SealedSecret, SealError> {
        self.sealer.seal(&owner(id), secret.expose()).map(SealedSecret::new)
    }
}
