//! Webhooks of teams, the queue of events that are to be sent to them, and the log of attempts.
//!
//! Several servers may share the queue. A server claims a delivery by moving its due time, guarded by the time that it
//! has read, and everything that it says of the delivery afterwards is guarded by its claim: of two servers one sends it.
//! A server that is killed while it sends leaves a delivery that its next process takes over, or that becomes due again.

use model::event::{EventType, EventTypes};
use model::id::{NodeId, TeamId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// A webhook of a team, with its sealed secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookRow {
    /// A UUID.
    pub id: String,
    /// The owning team.
    pub team_id: TeamId,
    /// The name that the client chose.
    pub name: String,
    /// Where events are sent to.
    pub url: String,
    /// Whether they are sent.
    pub enabled: bool,
    /// The types of events that it wants.
    pub types: EventTypes,
    /// What signs its events, sealed by the caller.
    pub secret_sealed: SealedSecret,
    /// How many events were not sent because too many waited.
    pub dropped: i64,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
}

/// A change of a webhook. What is none stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WebhookChange {
    /// Its name.
    pub name: Option<String>,
    /// Where events are sent to.
    pub url: Option<String>,
    /// Whether they are sent. Those that wait are dropped if not.
    pub enabled: Option<bool>,
    /// The types of events that it wants.
    pub types: Option<EventTypes>,
    /// What signs its events, sealed by the caller.
    pub secret_sealed: Option<SealedSecret>,
}

/// A webhook with events that wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingWebhook {
    /// The webhook.
    pub webhook_id: String,
    /// Its team.
    pub team_id: TeamId,
    /// When its next event is due, in microseconds since the Unix epoch.
    pub due_us: i64,
}

/// An event that waits to be sent to a webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryRow {
    /// The event.
    pub event_id: String,
    /// When it is due, in microseconds since the Unix epoch.
    pub due_us: i64,
    /// How many attempts have failed.
    pub attempts: u32,
}

/// What is sent where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shipment {
    /// Where the event is sent to.
    pub url: String,
    /// What signs it, sealed by the caller.
    pub secret_sealed: SealedSecret,
    /// Its type.
    pub kind: EventType,
    /// The event in JSON.
    pub body_json: String,
}

/// What became of an attempt to send an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptRow {
    /// A UUID, which the receiver got too.
    pub id: String,
    /// The webhook.
    pub webhook_id: String,
    /// The event.
    pub event_id: String,
    /// Its type.
    pub kind: EventType,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// When it began, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// How long it took, in microseconds.
    pub duration_us: i64,
    /// The status of the response, if there was one.
    pub status: Option<i64>,
    /// Why the attempt failed, in one word; none if the event was received.
    pub error: Option<String>,
    /// When the next attempt is due, in microseconds since the Unix epoch; none if it was the last.
    pub next_us: Option<i64>,
}

fn types(columns: &Columns<'_>) -> Result<EventTypes, StoreError> {
    EventTypes::from_bits(columns.int("type_mask")?).ok_or_else(|| columns.corrupt("type_mask"))
}

fn kind(columns: &Columns<'_>) -> Result<EventType, StoreError> {
    let bit = columns.int("type_bit")?;
    let found = EventType::ALL.into_iter().find(|one| one.bit() == bit);
    found.ok_or_else(|| columns.corrupt("type_bit"))
}

impl FromColumns for WebhookRow {
    const TABLE: &'static str = "webhooks";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            team_id: columns.id("team_id")?,
            name: columns.text("name")?,
            url: columns.text("url")?,
            enabled: columns.flag("enabled")?,
            types: types(columns)?,
            secret_sealed: SealedSecret::new(columns.text("secret_sealed")?),
            dropped: columns.int("dropped")?,
            created_us: columns.int("created_us")?,
        })
    }
}

impl FromColumns for WaitingWebhook {
    const TABLE: &'static str = "webhook_deliveries";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            webhook_id: columns.text("webhook_id")?,
            team_id: columns.id("team_id")?,
            due_us: columns.int("due_us")?,
        })
    }
}

impl FromColumns for DeliveryRow {
    const TABLE: &'static str = "webhook_deliveries";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            event_id: columns.text("event_id")?,
            due_us: columns.int("due_us")?,
            attempts: columns.count("attempts")?,
        })
    }
}

impl FromColumns for Shipment {
    const TABLE: &'static str = "webhooks";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            url: columns.text("url")?,
            secret_sealed: SealedSecret::new(columns.text("secret_sealed")?),
            kind: kind(columns)?,
            body_json: columns.text("body_json")?,
        })
    }
}

impl FromColumns for AttemptRow {
    const TABLE: &'static str = "webhook_attempts";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            webhook_id: columns.text("webhook_id")?,
            event_id: columns.text("event_id")?,
            kind: kind(columns)?,
            attempt: columns.count("attempt")?,
            at_us: columns.int("at_us")?,
            duration_us: columns.int("duration_us")?,
            status: columns.int_opt("status")?,
            error: columns.text_opt("error")?,
            next_us: columns.int_opt("next_us")?,
        })
    }
}

macro_rules! columns {
    () => {
        "id, team_id, name, url, enabled, type_mask, secret_sealed, dropped, created_us"
    };
}

const ROW: &str = "webhook";

impl Store {
    /// Stores a new webhook.
    ///
    /// # Errors
    /// [`StoreError::Dangling`] when there is no such team.
    pub async fn webhook_insert(&self, webhook: &WebhookRow) -> Result<(), StoreError> {
        storable("webhook name", &webhook.name)?;
        storable("webhook URL", &webhook.url)?;
        let query = sqlx::query(concat!(
            "INSERT INTO webhooks (",
            columns!(),
            ") VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        ))
        .bind(webhook.id.clone())
        .bind(webhook.team_id.as_str())
        .bind(webhook.name.clone())
        .bind(webhook.url.clone())
        .bind(i64::from(webhook.enabled))
        .bind(webhook.types.bits())
        .bind(webhook.secret_sealed.as_str().to_owned())
        .bind(webhook.dropped)
        .bind(webhook.created_us);
        self.db.write_durably(ROW, "insert a webhook", query).await?;
        Ok(())
    }

    /// Changes a webhook of a team, and returns its row; none when the team has no such webhook.
    pub async fn webhook_update(
        &self,
        team: &TeamId,
        id: &str,
        change: &WebhookChange,
    ) -> Result<Option<WebhookRow>, StoreError> {
        storable("webhook ID", id)?;
        for text in [&change.name, &change.url].into_iter().flatten() {
            storable("webhook", text)?;
        }
        let query = sqlx::query(concat!(
            "UPDATE webhooks SET name = COALESCE($3, name), url = COALESCE($4, url), enabled = COALESCE($5, enabled), \
             type_mask = COALESCE($6, type_mask), secret_sealed = COALESCE($7, secret_sealed) \
             WHERE team_id = $1 AND id = $2 RETURNING ",
            columns!()
        ))
        .bind(team.as_str())
        .bind(id.to_owned())
        .bind(change.name.clone())
        .bind(change.url.clone())
        .bind(change.enabled.map(i64::from))
        .bind(change.types.map(EventTypes::bits))
        .bind(change.secret_sealed.as_ref().map(|sealed| sealed.as_str().to_owned()));
        let changed: Option<WebhookRow> = self.db.write_returning_durably("change a webhook", query).await?;
        if let Some(webhook) = &changed
            && !webhook.enabled
        {
            let query = sqlx::query("DELETE FROM webhook_deliveries WHERE webhook_id = $1").bind(webhook.id.clone());
            self.db.write(ROW, "drop the events of a webhook", query).await?;
        }
        Ok(changed)
    }

    /// A webhook of a team; none when the team has no such webhook.
    pub async fn webhook_find(&self, team: &TeamId, id: &str) -> Result<Option<WebhookRow>, StoreError> {
        storable("webhook ID", id)?;
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM webhooks WHERE team_id = $1 AND id = $2"
        ))
        .bind(team.as_str())
        .bind(id.to_owned());
        self.db.read_optional("find a webhook", query).await
    }

    /// The webhooks of a team, oldest first.
    pub async fn webhook_list(&self, team: &TeamId) -> Result<Vec<WebhookRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM webhooks WHERE team_id = $1 ORDER BY created_us, id"
        ))
        .bind(team.as_str());
        self.db.read_all("list webhooks", query).await
    }

    /// Counts the webhooks of a team.
    pub async fn webhook_count(&self, team: &TeamId) -> Result<u32, StoreError> {
        let query = sqlx::query("SELECT COUNT(*) AS value FROM webhooks WHERE team_id = $1").bind(team.as_str());
        self.db.read_number("count webhooks", query).await
    }

    /// Deletes a webhook of a team with all that waits for it, and returns whether the team had it.
    ///
    /// # Errors
    /// When the database fails. Then nothing was deleted.
    pub async fn webhook_delete(&self, team: &TeamId, id: &str) -> Result<bool, StoreError> {
        const WHAT: &str = "delete a webhook";
        storable("webhook ID", id)?;
        let failed = |error: sqlx::Error| classify(&error, ROW, WHAT);
        let mut tx = self.db.begin(WHAT).await?;
        let deleted = sqlx::query("DELETE FROM webhooks WHERE team_id = $1 AND id = $2")
            .bind(team.as_str())
            .bind(id.to_owned())
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        if deleted.rows_affected() == 0 {
            return Ok(false);
        }
        sqlx::query("DELETE FROM webhook_deliveries WHERE webhook_id = $1")
            .bind(id.to_owned())
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        self.db.sync(WHAT).await?;
        Ok(true)
    }

    /// The webhooks for which events wait.
    pub async fn webhooks_waiting(&self) -> Result<Vec<WaitingWebhook>, StoreError> {
        let query = sqlx::query(
            "SELECT webhook_id, team_id, MIN(due_us) AS due_us FROM webhook_deliveries GROUP BY webhook_id, team_id \
             ORDER BY 3",
        );
        self.db.read_all("find events to send", query).await
    }

    /// The events that are due for a webhook at `now_us`, those that have waited longest first.
    pub async fn deliveries_due(&self, webhook: &str, now_us: i64, limit: u32) -> Result<Vec<DeliveryRow>, StoreError> {
        let query = sqlx::query(
            "SELECT event_id, due_us, attempts FROM webhook_deliveries WHERE webhook_id = $1 AND due_us <= $2 \
             ORDER BY due_us, event_id LIMIT $3",
        )
        .bind(webhook.to_owned())
        .bind(now_us)
        .bind(i64::from(limit));
        self.db.read_all("find events to send", query).await
    }

    /// Claims a delivery for an attempt of a node until `until_us`. Returns whether it was still as it had been read.
    pub async fn delivery_claim(
        &self,
        webhook: &str,
        delivery: &DeliveryRow,
        attempt_id: &str,
        node: &NodeId,
        until_us: i64,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE webhook_deliveries SET claim = $4, due_us = $5, node_id = $6 \
             WHERE webhook_id = $1 AND event_id = $2 AND due_us = $3",
        )
        .bind(webhook.to_owned())
        .bind(delivery.event_id.clone())
        .bind(delivery.due_us)
        .bind(attempt_id.to_owned())
        .bind(until_us)
        .bind(node.as_str());
        Ok(self.db.write(ROW, "claim an event to send", query).await? > 0)
    }

    /// Gives up all claims of a node, whose earlier process is gone, and returns how many.
    pub async fn deliveries_recover(&self, node: &NodeId, now_us: i64) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "UPDATE webhook_deliveries SET claim = NULL, node_id = NULL, due_us = $2 \
             WHERE claim IS NOT NULL AND node_id = $1",
        )
        .bind(node.as_str())
        .bind(now_us);
        self.db.write(ROW, "take over events to send", query).await
    }

    /// What is sent where, of a delivery; none if the event is no longer kept, or the webhook is not enabled.
    pub async fn delivery_shipment(&self, webhook: &str, event_id: &str) -> Result<Option<Shipment>, StoreError> {
        let query = sqlx::query(
            "SELECT w.url, w.secret_sealed, e.type_bit, e.body_json FROM webhooks w JOIN lifecycle_events e \
             ON e.team_id = w.team_id WHERE w.id = $1 AND w.enabled = 1 AND e.id = $2",
        )
        .bind(webhook.to_owned())
        .bind(event_id.to_owned());
        self.db.read_optional("read an event to send", query).await
    }

    /// Gives up a claim: the delivery is due at `due_us`.
    pub async fn delivery_release(&self, attempt_id: &str, key: (&str, &str), due_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE webhook_deliveries SET claim = NULL, due_us = $4 \
             WHERE webhook_id = $1 AND event_id = $2 AND claim = $3",
        )
        .bind(key.0.to_owned())
        .bind(key.1.to_owned())
        .bind(attempt_id.to_owned())
        .bind(due_us);
        self.db.write(ROW, "release an event to send", query).await?;
        Ok(())
    }

    /// Removes a delivery of which there is nothing to send.
    pub async fn delivery_drop(&self, webhook: &str, event_id: &str) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM webhook_deliveries WHERE webhook_id = $1 AND event_id = $2")
            .bind(webhook.to_owned())
            .bind(event_id.to_owned());
        self.db.write(ROW, "drop an event to send", query).await?;
        Ok(())
    }

    /// Records what became of an attempt: the delivery is due at [`AttemptRow::next_us`], or is over.
    ///
    /// # Errors
    /// When the database fails. Then nothing was changed, and the delivery becomes due again when its claim ends.
    pub async fn delivery_finish(&self, attempt: &AttemptRow) -> Result<(), StoreError> {
        const WHAT: &str = "record an attempt to send an event";
        let failed = |error: sqlx::Error| classify(&error, ROW, WHAT);
        let mut tx = self.db.begin(WHAT).await?;
        sqlx::query(
            "INSERT INTO webhook_attempts \
             (id, webhook_id, event_id, type_bit, attempt, at_us, duration_us, status, error, next_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (id) DO NOTHING",
        )
        .bind(attempt.id.clone())
        .bind(attempt.webhook_id.clone())
        .bind(attempt.event_id.clone())
        .bind(attempt.kind.bit())
        .bind(i64::from(attempt.attempt))
        .bind(attempt.at_us)
        .bind(attempt.duration_us)
        .bind(attempt.status)
        .bind(attempt.error.clone())
        .bind(attempt.next_us)
        .execute_in(&mut tx)
        .await
        .map_err(failed)?;
        let end = match attempt.next_us {
            None => {
                sqlx::query("DELETE FROM webhook_deliveries WHERE webhook_id = $1 AND event_id = $2 AND claim = $3")
                    .bind(attempt.webhook_id.clone())
                    .bind(attempt.event_id.clone())
                    .bind(attempt.id.clone())
            }
            Some(next_us) => sqlx::query(
                "UPDATE webhook_deliveries SET claim = NULL, due_us = $4, attempts = $5 \
                 WHERE webhook_id = $1 AND event_id = $2 AND claim = $3",
            )
            .bind(attempt.webhook_id.clone())
            .bind(attempt.event_id.clone())
            .bind(attempt.id.clone())
            .bind(next_us)
            .bind(i64::from(attempt.attempt)),
        };
        end.execute_in(&mut tx).await.map_err(failed)?;
        tx.commit().await.map_err(failed)
    }

    /// The latest attempts to send something to a webhook, newest first.
    pub async fn attempt_list(&self, webhook: &str, offset: i64, limit: u32) -> Result<Vec<AttemptRow>, StoreError> {
        let query = sqlx::query(
            "SELECT id, webhook_id, event_id, type_bit, attempt, at_us, duration_us, status, error, next_us \
             FROM webhook_attempts WHERE webhook_id = $1 ORDER BY at_us DESC, id DESC LIMIT $2 OFFSET $3",
        )
        .bind(webhook.to_owned())
        .bind(i64::from(limit))
        .bind(offset);
        self.db.read_all("list attempts to send events", query).await
    }

    /// Removes at most `limit` attempts: those that began at `at_us` or before, and those that a webhook has beyond `keep`.
    /// Returns how many.
    pub async fn attempt_purge(&self, at_us: i64, keep: u32, limit: u32) -> Result<u64, StoreError> {
        const WHAT: &str = "remove old attempts to send events";
        let old = sqlx::query(
            "DELETE FROM webhook_attempts WHERE id IN \
             (SELECT id FROM webhook_attempts WHERE at_us <= $1 ORDER BY at_us LIMIT $2)",
        )
        .bind(at_us)
        .bind(i64::from(limit));
        let removed = self.db.write(ROW, WHAT, old).await?;
        if removed > 0 {
            return Ok(removed);
        }
        let beyond = sqlx::query(
            "DELETE FROM webhook_attempts WHERE id IN (SELECT id FROM \
             (SELECT id, ROW_NUMBER() OVER (PARTITION BY webhook_id ORDER BY at_us DESC, id DESC) AS place \
             FROM webhook_attempts) AS counted WHERE place > $1 LIMIT $2)",
        )
        .bind(i64::from(keep))
        .bind(i64::from(limit));
        self.db.write(ROW, WHAT, beyond).await
    }
}
