//! Records of sandboxes: logs, metrics, lifecycle events, and what teams used.
//!
//! All outlive the sandbox and are removed by age. The records of many sandboxes are written in one transaction,
//! because a transaction holds the only writer of SQLite, and create requests wait for that writer. The caller keeps
//! batches small for the same reason. Writing a batch again, because the result of its first commit was lost, changes
//! nothing.
//!
//! Invariant: rows are read by team and sandbox together, so one team's id never opens another team's rows. The
//! operator, who may see all of them, looks up the team of a sandbox first.

mod events;
mod logs;
mod metrics;
mod transaction;
mod usage;

use model::id::{SandboxId, TeamId};

pub use self::events::{DeliveryLimits, EventQuery, EventSize, NewEvent};
pub use self::logs::{LogOrder, LogQuery, LogRow, LogSize, NewLogEntry};
pub use self::metrics::MetricChunk;
use self::transaction::{WRITE, execute};
pub use self::usage::{NewTeamUsage, TeamUsage};
use crate::Store;
use crate::error::{Failure, StoreError, classify};

/// Records to write, of any number of sandboxes.
#[derive(Debug, Default)]
pub struct RecordBatch {
    /// Log entries.
    pub entries: Vec<NewLogEntry>,
    /// Samples of metrics.
    pub chunks: Vec<MetricChunk>,
    /// Sandboxes that ended, with the time in microseconds since the Unix epoch, at which the retention of their logs
    /// begins.
    pub ended: Vec<(TeamId, SandboxId, i64)>,
    /// Lifecycle events.
    pub events: Vec<NewEvent>,
    /// How many of these may wait to be sent.
    pub delivery_limits: DeliveryLimits,
    /// What teams used.
    pub usage: Vec<NewTeamUsage>,
}

impl Store {
    /// Writes a batch, and returns the sizes of the logs that grew, so that the caller can trim them.
    ///
    /// # Errors
    /// When the database fails. Then either nothing of the batch was written, or all of it.
    pub async fn records_write(&self, batch: &RecordBatch) -> Result<Vec<LogSize>, StoreError> {
        if self.db.is_low_on_space() {
            return Err(StoreError::Full {
                what: WRITE,
                source: Failure::new("the remaining space is reserved for keys and the lifecycle of sandboxes"),
            });
        }
        let mut tx = self.db.begin(WRITE).await?;
        logs::insert(&mut tx, &batch.entries).await?;
        let mut sizes = Vec::new();
        for grown in logs::growth(&batch.entries) {
            sizes.push(logs::note_growth(&mut tx, &grown).await?);
        }
        for chunk in &batch.chunks {
            execute(&mut tx, metrics::insert(chunk)).await?;
        }
        for (team, sandbox, at_us) in &batch.ended {
            let query = sqlx::query(
                "UPDATE sandbox_records SET ended_us = COALESCE(ended_us, $3) WHERE team_id = $1 AND sandbox_id = $2",
            )
            .bind(team.as_str())
            .bind(sandbox.as_str())
            .bind(*at_us);
            execute(&mut tx, query).await?;
        }
        events::insert(&mut tx, &batch.events, batch.delivery_limits).await?;
        for usage in &batch.usage {
            execute(&mut tx, usage::insert(usage)?).await?;
        }
        tx.commit().await.map_err(|error| classify(&error, "record", WRITE))?;
        Ok(sizes)
    }

    /// Returns the team that owns or owned a sandbox, as long as there are records of it. For the operator: requests of
    /// a team know their team.
    pub async fn record_owner(&self, sandbox: &SandboxId) -> Result<Option<TeamId>, StoreError> {
        let query = sqlx::query("SELECT team_id AS value FROM sandbox_records WHERE sandbox_id = $1 LIMIT 1")
            .bind(sandbox.as_str());
        self.db.read_optional("find the team of a log", query).await
    }

    /// Begins the retention of the logs of sandboxes that no longer have a row: they ended without a record of it.
    /// Those whose logs have an entry after `quiet_us` are left out: one that is being created has a log, and no row yet.
    /// Returns how many.
    pub async fn records_end_orphans(&self, at_us: i64, quiet_us: i64) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "UPDATE sandbox_records SET ended_us = $1 WHERE ended_us IS NULL \
             AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.id = sandbox_records.sandbox_id) \
             AND NOT EXISTS (SELECT 1 FROM sandbox_logs l WHERE l.team_id = sandbox_records.team_id \
             AND l.sandbox_id = sandbox_records.sandbox_id AND l.at_us > $2)",
        )
        .bind(at_us)
        .bind(quiet_us);
        self.db.write("record", "record the ends of sandboxes", query).await
    }
}
