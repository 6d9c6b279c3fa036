//! What is remembered of a sandbox beside its row: its log and its metrics.
//!
//! Both outlive the sandbox and end by age. Everything of many sandboxes is written in one transaction, because a
//! transaction holds the one writer of SQLite, and creates wait for that writer. The caller keeps batches small for the
//! same reason. A batch that is written twice, because its first commit was not heard of, is there once.
//!
//! Invariant: rows are read by team and sandbox together, so one team's id never opens another team's rows. The operator,
//! who may see all of them, asks whose a sandbox was first.

mod logs;
mod metrics;
mod transaction;

use model::id::{SandboxId, TeamId};

pub use self::logs::{LogOrder, LogQuery, LogRow, LogSize, NewLogEntry};
pub use self::metrics::MetricChunk;
use self::transaction::{WRITE, execute};
use crate::Store;
use crate::error::{Failure, StoreError, sort};
use crate::row::{Columns, FromColumns};

/// Things to remember, of any sandboxes.
#[derive(Debug, Default)]
pub struct RecordBatch {
    /// Entries for logs.
    pub entries: Vec<NewLogEntry>,
    /// Samples.
    pub chunks: Vec<MetricChunk>,
    /// Sandboxes that ended, and when, in microseconds since the Unix epoch: from then on their logs age.
    pub ended: Vec<(TeamId, SandboxId, i64)>,
}

struct Owner(TeamId);

impl FromColumns for Owner {
    const TABLE: &'static str = "sandbox_records";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self(columns.id("team_id")?))
    }
}

impl Store {
    /// Writes a batch, and returns the sizes of the logs that grew, so that the caller can have them cut.
    ///
    /// # Errors
    /// When the database fails. Nothing of the batch is there then, or all of it.
    pub async fn records_write(&self, batch: &RecordBatch) -> Result<Vec<LogSize>, StoreError> {
        if self.db.is_low_on_space() {
            return Err(StoreError::Full {
                what: WRITE,
                source: Failure::told("the space that is left is for keys and for the life of sandboxes"),
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
        tx.commit().await.map_err(|error| sort(&error, "record", WRITE))?;
        Ok(sizes)
    }

    /// The team whose sandbox this is or was, as long as anything is remembered of it. For the operator: requests of
    /// teams know theirs.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn record_owner(&self, sandbox: &SandboxId) -> Result<Option<TeamId>, StoreError> {
        let query =
            sqlx::query("SELECT team_id FROM sandbox_records WHERE sandbox_id = $1 LIMIT 1").bind(sandbox.as_str());
        let owner = self.db.read_optional::<Owner>("find whose a log is", query).await?;
        Ok(owner.map(|owner| owner.0))
    }

    /// Lets the logs of sandboxes age that have no row any more: they ended while nobody could note it. Says how many.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn records_end_orphans(&self, at_us: i64) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "UPDATE sandbox_records SET ended_us = $1 WHERE ended_us IS NULL \
             AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.id = sandbox_records.sandbox_id)",
        )
        .bind(at_us);
        self.db.write("record", "note the ends of sandboxes", query).await
    }
}
