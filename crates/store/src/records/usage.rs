//! What teams used, by minute.
//!
//! A row is of one server process, because only that knows when a minute is complete. Processes of one node follow each
//! other, so of the same minute the larger number counts; those of several nodes are added up.

use model::id::TeamId;

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns, storable};
use crate::statement::Query;

/// What a team used in a minute, as one process saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTeamUsage {
    /// The team.
    pub team_id: TeamId,
    /// When the minute began, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// The node.
    pub node_id: String,
    /// The process of the server.
    pub process: String,
    /// The most sandboxes that ran at a time.
    pub sandboxes: u32,
    /// How many were started.
    pub starts: u32,
}

/// What a team used in a minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TeamUsage {
    /// When the minute began, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// The most sandboxes that ran at a time on each node, added up.
    pub sandboxes: u32,
    /// How many were started.
    pub starts: u32,
}

impl FromColumns for TeamUsage {
    const TABLE: &'static str = "team_usage";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            at_us: columns.int("at_us")?,
            sandboxes: columns.count("sandboxes")?,
            starts: columns.count("starts")?,
        })
    }
}

pub(super) fn insert(usage: &NewTeamUsage) -> Result<Query, StoreError> {
    storable("node", &usage.node_id)?;
    storable("process", &usage.process)?;
    let query = sqlx::query(
        "INSERT INTO team_usage (team_id, at_us, node_id, process, sandboxes, starts) VALUES ($1, $2, $3, $4, $5, $6) \
         ON CONFLICT (team_id, at_us, node_id, process) DO UPDATE SET \
         sandboxes = excluded.sandboxes, starts = excluded.starts",
    )
    .bind(usage.team_id.as_str())
    .bind(usage.at_us)
    .bind(usage.node_id.clone())
    .bind(usage.process.clone())
    .bind(i64::from(usage.sandboxes))
    .bind(i64::from(usage.starts));
    Ok(query)
}

impl Store {
    /// What a team used in the minutes that began between two times, both included, oldest first.
    pub async fn team_usage(&self, team: &TeamId, from_us: i64, to_us: i64) -> Result<Vec<TeamUsage>, StoreError> {
        let query = sqlx::query(
            "SELECT at_us, CAST(SUM(sandboxes) AS BIGINT) AS sandboxes, CAST(SUM(starts) AS BIGINT) AS starts FROM \
             (SELECT at_us, node_id, MAX(sandboxes) AS sandboxes, SUM(starts) AS starts FROM team_usage \
             WHERE team_id = $1 AND at_us >= $2 AND at_us <= $3 GROUP BY at_us, node_id) AS nodes \
             GROUP BY at_us ORDER BY at_us",
        )
        .bind(team.as_str())
        .bind(from_us)
        .bind(to_us);
        self.db.read_all("read the usage of a team", query).await
    }

    /// Removes at most `limit` minutes that began at `at_us` or before, oldest first, and returns how many.
    pub async fn team_usage_purge(&self, at_us: i64, limit: u32) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM team_usage WHERE (team_id, at_us, node_id, process) IN \
             (SELECT team_id, at_us, node_id, process FROM team_usage WHERE at_us <= $1 ORDER BY at_us LIMIT $2)",
        )
        .bind(at_us)
        .bind(i64::from(limit));
        self.db.write("record", "remove old usage of teams", query).await
    }
}
