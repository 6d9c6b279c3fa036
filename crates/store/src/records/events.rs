//! Lifecycle events of sandboxes, and the queue of those that are to be sent to webhooks.
//!
//! An event and its deliveries are written in one transaction: no event that was stored is forgotten. The queue is
//! bounded per webhook and in all; what does not fit is counted at its webhook.

use std::collections::BTreeMap;

use model::event::{EventType, EventTypes};
use model::id::{SandboxId, TeamId};

use super::transaction::{WRITE, execute};
use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Transaction};

/// A lifecycle event to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    /// Its id, which no other event has.
    pub id: String,
    /// The owning team.
    pub team_id: TeamId,
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// When it happened, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// Orders events of the same time.
    pub seq: i64,
    /// What happened.
    pub kind: EventType,
    /// The event in JSON, as clients get it.
    pub body_json: String,
}

/// The size of an event besides its body: ids, and keys of its indexes.
const EVENT_OVERHEAD_BYTES: usize = 500;

impl NewEvent {
    /// The accounted size of the event, in bytes: about what it takes in the database.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::try_from(EVENT_OVERHEAD_BYTES + self.body_json.len()).unwrap_or(u64::MAX)
    }
}

/// How many events may wait to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryLimits {
    /// For one webhook, so that a slow receiver displaces nothing of others.
    pub per_webhook: u32,
    /// For all webhooks of all teams.
    pub total: u32,
}

impl Default for DeliveryLimits {
    fn default() -> Self {
        Self {
            per_webhook: 500,
            total: 100_000,
        }
    }
}

/// A query for events of a team.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQuery {
    /// The sandbox; none for all of them.
    pub sandbox_id: Option<SandboxId>,
    /// The types.
    pub types: EventTypes,
    /// Whether the oldest come first.
    pub is_ascending: bool,
    /// How many are passed over.
    pub offset: i64,
    /// Maximum number of events.
    pub limit: u32,
}

/// How much the events of a team take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSize {
    /// The team.
    pub team_id: TeamId,
    /// Accounted size of its events in bytes, see [`NewEvent::bytes`].
    pub bytes: u64,
}

impl FromColumns for EventSize {
    const TABLE: &'static str = "lifecycle_events";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let bytes = columns.int("bytes")?;
        Ok(Self {
            team_id: columns.id("team_id")?,
            bytes: u64::try_from(bytes).map_err(|_| columns.corrupt("bytes"))?,
        })
    }
}

/// A webhook that wants events of its team.
struct Subscriber {
    id: String,
    types: EventTypes,
}

impl FromColumns for Subscriber {
    const TABLE: &'static str = "webhooks";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let bits = columns.int("type_mask")?;
        Ok(Self {
            id: columns.text("id")?,
            types: EventTypes::from_bits(bits).ok_or_else(|| columns.corrupt("type_mask"))?,
        })
    }
}

async fn fetch<T: FromColumns>(tx: &mut Transaction, query: crate::statement::Query) -> Result<Vec<T>, StoreError> {
    let rows = query
        .all_in(tx)
        .await
        .map_err(|error| classify(&error, "record", WRITE))?;
    rows.iter().map(Columns::decode).collect()
}

/// The number of deliveries that a query counts.
async fn waiting(tx: &mut Transaction, query: crate::statement::Query) -> Result<u32, StoreError> {
    Ok(fetch(tx, query).await?.first().copied().unwrap_or(0))
}

/// Writes events, and what is to be sent of them.
pub(super) async fn insert(
    tx: &mut Transaction,
    events: &[NewEvent],
    limits: DeliveryLimits,
) -> Result<(), StoreError> {
    let mut of_teams: BTreeMap<&TeamId, Vec<&NewEvent>> = BTreeMap::new();
    for event in events {
        storable("event", &event.body_json)?;
        let query = sqlx::query(
            "INSERT INTO lifecycle_events (id, team_id, sandbox_id, at_us, seq, type_bit, body_json, bytes) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING",
        )
        .bind(event.id.clone())
        .bind(event.team_id.as_str())
        .bind(event.sandbox_id.as_str())
        .bind(event.at_us)
        .bind(event.seq)
        .bind(event.kind.bit())
        .bind(event.body_json.clone())
        .bind(i64::try_from(event.bytes()).unwrap_or(i64::MAX));
        let inserted = query
            .execute_in(tx)
            .await
            .map_err(|error| classify(&error, "record", WRITE))?;
        // One that was there already has its deliveries, or had them.
        if inserted.rows_affected() == 0 {
            continue;
        }
        of_teams.entry(&event.team_id).or_default().push(event);
    }
    for (team, events) in of_teams {
        enqueue(tx, team, &events, limits).await?;
    }
    Ok(())
}

/// Adds events of a team to the queues of its webhooks.
async fn enqueue(
    tx: &mut Transaction,
    team: &TeamId,
    events: &[&NewEvent],
    limits: DeliveryLimits,
) -> Result<(), StoreError> {
    let wanted = sqlx::query("SELECT id, type_mask FROM webhooks WHERE team_id = $1 AND enabled = 1 ORDER BY id");
    let subscribers: Vec<Subscriber> = fetch(tx, wanted.bind(team.as_str())).await?;
    if subscribers.is_empty() {
        return Ok(());
    }
    let all = sqlx::query("SELECT COUNT(*) AS value FROM webhook_deliveries");
    let mut room_of_all = limits.total.saturating_sub(waiting(tx, all).await?);
    for subscriber in &subscribers {
        let wanted = events.iter().filter(|event| subscriber.types.contains(event.kind));
        let wanted: Vec<_> = wanted.collect();
        if wanted.is_empty() {
            continue;
        }
        let own = sqlx::query("SELECT COUNT(*) AS value FROM webhook_deliveries WHERE webhook_id = $1");
        let mut room = limits
            .per_webhook
            .saturating_sub(waiting(tx, own.bind(subscriber.id.clone())).await?);
        let mut dropped: i64 = 0;
        for event in wanted {
            if room == 0 || room_of_all == 0 {
                dropped += 1;
                continue;
            }
            room -= 1;
            room_of_all -= 1;
            let query = sqlx::query(
                "INSERT INTO webhook_deliveries (webhook_id, event_id, team_id, due_us, attempts) \
                 VALUES ($1, $2, $3, $4, 0) ON CONFLICT (webhook_id, event_id) DO NOTHING",
            )
            .bind(subscriber.id.clone())
            .bind(event.id.clone())
            .bind(team.as_str())
            .bind(event.at_us);
            execute(tx, query).await?;
        }
        if dropped > 0 {
            let query = sqlx::query("UPDATE webhooks SET dropped = dropped + $2 WHERE id = $1")
                .bind(subscriber.id.clone())
                .bind(dropped);
            execute(tx, query).await?;
        }
    }
    Ok(())
}

/// `$1` team, `$2` types, `$3` limit, `$4` offset, `$5` sandbox.
macro_rules! list_sql {
    ($sandbox:literal, $direction:literal) => {
        concat!(
            "SELECT body_json AS value FROM lifecycle_events WHERE team_id = $1 AND (type_bit & $2) <> 0",
            $sandbox,
            " ORDER BY at_us ",
            $direction,
            ", seq ",
            $direction,
            " LIMIT $3 OFFSET $4"
        )
    };
}

impl Store {
    /// Events of a team, in JSON, in the order of their times.
    pub async fn event_list(&self, team: &TeamId, query: &EventQuery) -> Result<Vec<String>, StoreError> {
        const OF_SANDBOX: bool = true;
        let sql = match (query.sandbox_id.is_some(), query.is_ascending) {
            (OF_SANDBOX, true) => list_sql!(" AND sandbox_id = $5", "ASC"),
            (OF_SANDBOX, false) => list_sql!(" AND sandbox_id = $5", "DESC"),
            (_, true) => list_sql!("", "ASC"),
            (_, false) => list_sql!("", "DESC"),
        };
        let mut statement = sqlx::query(sql)
            .bind(team.as_str())
            .bind(query.types.bits())
            .bind(i64::from(query.limit))
            .bind(query.offset);
        if let Some(sandbox) = &query.sandbox_id {
            statement = statement.bind(sandbox.as_str().to_owned());
        }
        self.db.read_all("read lifecycle events", statement).await
    }

    /// Removes at most `limit` events that happened at `at_us` or before, oldest first, and returns how many.
    pub async fn event_purge(&self, at_us: i64, limit: u32) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM lifecycle_events WHERE id IN \
             (SELECT id FROM lifecycle_events WHERE at_us <= $1 ORDER BY at_us LIMIT $2)",
        )
        .bind(at_us)
        .bind(i64::from(limit));
        self.db.write("record", "remove old lifecycle events", query).await
    }

    /// How much the events of each team take, largest first.
    pub async fn event_sizes(&self) -> Result<Vec<EventSize>, StoreError> {
        let query = sqlx::query(
            "SELECT team_id, CAST(SUM(bytes) AS BIGINT) AS bytes FROM lifecycle_events GROUP BY team_id \
             ORDER BY 2 DESC, team_id",
        );
        self.db.read_all("add up lifecycle events", query).await
    }

    /// Removes at most `limit` events of a team, oldest first, and returns how many.
    pub async fn event_evict(&self, team: &TeamId, limit: u32) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM lifecycle_events WHERE id IN \
             (SELECT id FROM lifecycle_events WHERE team_id = $1 ORDER BY at_us, seq LIMIT $2)",
        )
        .bind(team.as_str())
        .bind(i64::from(limit));
        self.db
            .write("record", "remove lifecycle events of a team", query)
            .await
    }
}
