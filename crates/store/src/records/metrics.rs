//! Metrics of sandboxes, in rows of some minutes each.

use model::id::{SandboxId, TeamId};

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns};
use crate::statement::Query;

/// The samples of one sandbox over some minutes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricChunk {
    /// The owning team.
    pub team_id: TeamId,
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// When the first sample was taken, in microseconds since the Unix epoch.
    pub from_us: i64,
    /// When the last sample was taken, in microseconds since the Unix epoch.
    pub to_us: i64,
    /// The samples, in a format of the caller.
    pub samples: String,
}

impl FromColumns for MetricChunk {
    const TABLE: &'static str = "sandbox_metrics";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            team_id: columns.id("team_id")?,
            sandbox_id: columns.id("sandbox_id")?,
            from_us: columns.int("from_us")?,
            to_us: columns.int("to_us")?,
            samples: columns.text("samples")?,
        })
    }
}

pub(super) fn insert(chunk: &MetricChunk) -> Query {
    sqlx::query(
        "INSERT INTO sandbox_metrics (team_id, sandbox_id, from_us, to_us, samples) VALUES ($1, $2, $3, $4, $5) \
         ON CONFLICT (team_id, sandbox_id, from_us) DO UPDATE SET to_us = excluded.to_us, samples = excluded.samples",
    )
    .bind(chunk.team_id.as_str())
    .bind(chunk.sandbox_id.as_str())
    .bind(chunk.from_us)
    .bind(chunk.to_us)
    .bind(chunk.samples.as_str())
}

impl Store {
    /// The chunks of a sandbox that may contain samples between two times, both included, oldest first.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn metric_list(
        &self,
        team: &TeamId,
        sandbox: &SandboxId,
        from_us: i64,
        to_us: i64,
    ) -> Result<Vec<MetricChunk>, StoreError> {
        let query = sqlx::query(
            "SELECT team_id, sandbox_id, from_us, to_us, samples FROM sandbox_metrics \
             WHERE team_id = $1 AND sandbox_id = $2 AND from_us <= $4 AND to_us >= $3 ORDER BY from_us",
        )
        .bind(team.as_str())
        .bind(sandbox.as_str())
        .bind(from_us)
        .bind(to_us);
        self.db.read_all("read metrics of a sandbox", query).await
    }

    /// The newest chunk of a sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn metric_latest(&self, team: &TeamId, sandbox: &SandboxId) -> Result<Option<MetricChunk>, StoreError> {
        let query = sqlx::query(
            "SELECT team_id, sandbox_id, from_us, to_us, samples FROM sandbox_metrics \
             WHERE team_id = $1 AND sandbox_id = $2 ORDER BY from_us DESC LIMIT 1",
        )
        .bind(team.as_str())
        .bind(sandbox.as_str());
        self.db.read_optional("read the last metrics of a sandbox", query).await
    }

    /// The newest chunk of each sandbox that is not gone, on whatever node, if it may contain a sample of `from_us` or later: of all
    /// teams, in one query.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn metric_latest_of_all(&self, from_us: i64) -> Result<Vec<MetricChunk>, StoreError> {
        let query = sqlx::query(
            "SELECT m.team_id, m.sandbox_id, m.from_us, m.to_us, m.samples FROM sandboxes s JOIN sandbox_metrics m \
             ON m.team_id = s.team_id AND m.sandbox_id = s.id AND m.from_us = (SELECT MAX(l.from_us) FROM sandbox_metrics l \
             WHERE l.team_id = s.team_id AND l.sandbox_id = s.id) \
             WHERE s.state <> 'gone' AND m.to_us >= $1",
        )
        .bind(from_us);
        self.db.read_all("read the last metrics of all sandboxes", query).await
    }

    /// The number of chunks of all sandboxes.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn metric_count(&self) -> Result<u64, StoreError> {
        let query = sqlx::query("SELECT COUNT(*) AS value FROM sandbox_metrics");
        self.db.read_number("count metrics", query).await
    }

    /// Removes at most `limit` chunks whose last sample was taken at `to_us` or before, oldest first, and returns how
    /// many.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn metric_purge(&self, to_us: i64, limit: u32) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM sandbox_metrics WHERE to_us <= $1 AND (team_id, sandbox_id, from_us) IN \
             (SELECT team_id, sandbox_id, from_us FROM sandbox_metrics WHERE to_us <= $1 ORDER BY to_us LIMIT $2)",
        )
        .bind(to_us)
        .bind(i64::from(limit));
        self.db.write("record", "remove old metrics", query).await
    }
}
