//! Logs of sandboxes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use model::id::{SandboxId, TeamId};
use model::log::Level;

use super::transaction::{WRITE, execute};
use crate::Store;
use crate::dialect::Engine;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Query, Transaction};

/// An entry of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRow {
    /// When the entry happened, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// Distinguishes and orders entries of the same time.
    pub seq: i64,
    /// Severity.
    pub level: Level,
    /// The part of the platform that wrote the entry.
    pub logger: String,
    /// The message, one sentence.
    pub message: String,
    /// Structured fields.
    pub fields: BTreeMap<String, String>,
}

/// An entry to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewLogEntry {
    /// The owning team.
    pub team_id: TeamId,
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// The entry.
    pub row: LogRow,
}

/// The size of an entry besides its texts: the key twice, once in the table and once in its index.
const ENTRY_OVERHEAD_BYTES: usize = 150;

impl LogRow {
    /// The accounted size of the entry, in bytes: about what it takes in the database.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let fields: usize = self.fields.iter().map(|(key, value)| key.len() + value.len() + 6).sum();
        let bytes = ENTRY_OVERHEAD_BYTES + self.logger.len() + self.message.len() + fields;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// The size of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSize {
    /// The owning team.
    pub team_id: TeamId,
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// Number of entries.
    pub entries: u64,
    /// Accounted size of its entries in bytes, see [`LogRow::bytes`].
    pub bytes: u64,
}

/// The order of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogOrder {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// A query for entries of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogQuery {
    /// Earliest time, in microseconds since the Unix epoch.
    pub from_us: i64,
    /// Latest time, in microseconds since the Unix epoch.
    pub to_us: i64,
    /// Lowest level.
    pub level: Level,
    /// Text that the message must contain, case-sensitive. Empty matches all.
    pub search: String,
    /// The order, which also decides which end the limit cuts off.
    pub order: LogOrder,
    /// Maximum number of entries.
    pub limit: u32,
}

impl FromColumns for LogRow {
    const TABLE: &'static str = "sandbox_logs";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let fields = serde_json::from_str(&columns.text("fields_json")?);
        let level = usize::try_from(columns.int("level")?).ok();
        Ok(Self {
            at_us: columns.int("at_us")?,
            seq: columns.int("seq")?,
            level: level
                .and_then(|at| Level::ALL.get(at).copied())
                .ok_or_else(|| columns.corrupt("level"))?,
            logger: columns.text("logger")?,
            message: columns.text("message")?,
            fields: fields.map_err(|_| columns.corrupt("fields_json"))?,
        })
    }
}

impl FromColumns for LogSize {
    const TABLE: &'static str = "sandbox_records";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let size = |column| u64::try_from(columns.int(column)?).map_err(|_| columns.corrupt(column));
        Ok(Self {
            team_id: columns.id("team_id")?,
            sandbox_id: columns.id("sandbox_id")?,
            entries: size("log_entries")?,
            bytes: size("log_bytes")?,
        })
    }
}

/// A level as a number with the same order. The numbers are stored, so they never change.
fn level_number(level: Level) -> i64 {
    match level {
        Level::Debug => 0,
        Level::Info => 1,
        Level::Warn => 2,
        Level::Error => 3,
    }
}

/// Entries per statement. A statement with one entry costs as much as one with twenty.
const ROWS: usize = 32;

/// The statement that inserts [`ROWS`] entries.
static INSERT_MANY: LazyLock<String> = LazyLock::new(|| insert_sql(ROWS));
/// The statement that inserts one entry.
static INSERT_ONE: LazyLock<String> = LazyLock::new(|| insert_sql(1));

fn insert_sql(rows: usize) -> String {
    let mut sql = String::from(
        "INSERT INTO sandbox_logs \
         (team_id, sandbox_id, at_us, seq, level, logger, message, fields_json, bytes) VALUES ",
    );
    for row in 0..rows {
        let first = row * 9 + 1;
        sql.push_str(if row == 0 { "(" } else { ", (" });
        for at in first..first + 9 {
            let comma = if at == first { "" } else { ", " };
            let _ = write!(sql, "{comma}${at}");
        }
        sql.push(')');
    }
    sql.push_str(" ON CONFLICT (team_id, sandbox_id, at_us, seq) DO NOTHING");
    sql
}

fn bind(query: Query, entry: &NewLogEntry) -> Query {
    let fields = serde_json::to_string(&entry.row.fields).expect("a map of texts is always JSON");
    query
        .bind(entry.team_id.as_str())
        .bind(entry.sandbox_id.as_str())
        .bind(entry.row.at_us)
        .bind(entry.row.seq)
        .bind(level_number(entry.row.level))
        .bind(entry.row.logger.as_str())
        .bind(entry.row.message.as_str())
        .bind(fields)
        .bind(i64::try_from(entry.row.bytes()).unwrap_or(i64::MAX))
}

pub(super) async fn insert(tx: &mut Transaction, entries: &[NewLogEntry]) -> Result<(), StoreError> {
    for entry in entries {
        storable("logger", &entry.row.logger)?;
        storable("message", &entry.row.message)?;
    }
    let (groups, rest) = entries.as_chunks::<ROWS>();
    for group in groups {
        let query = group.iter().fold(sqlx::query(INSERT_MANY.as_str()), bind);
        execute(tx, query).await?;
    }
    for entry in rest {
        execute(tx, bind(sqlx::query(INSERT_ONE.as_str()), entry)).await?;
    }
    Ok(())
}

/// The growth of each log by a batch of entries.
pub(super) fn growth(entries: &[NewLogEntry]) -> Vec<LogSize> {
    let mut of: BTreeMap<(&TeamId, &SandboxId), (u64, u64)> = BTreeMap::new();
    for entry in entries {
        let (count, bytes) = of.entry((&entry.team_id, &entry.sandbox_id)).or_default();
        *count += 1;
        *bytes += entry.row.bytes();
    }
    of.into_iter()
        .map(|((team_id, sandbox_id), (entries, bytes))| LogSize {
            team_id: team_id.clone(),
            sandbox_id: sandbox_id.clone(),
            entries,
            bytes,
        })
        .collect()
}

pub(super) async fn note_growth(tx: &mut Transaction, grown: &LogSize) -> Result<LogSize, StoreError> {
    let rows = sqlx::query(
        "INSERT INTO sandbox_records (team_id, sandbox_id, log_entries, log_bytes) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (team_id, sandbox_id) DO UPDATE SET \
         log_entries = sandbox_records.log_entries + excluded.log_entries, \
         log_bytes = sandbox_records.log_bytes + excluded.log_bytes \
         RETURNING team_id, sandbox_id, log_entries, log_bytes",
    )
    .bind(grown.team_id.as_str())
    .bind(grown.sandbox_id.as_str())
    .bind(i64::try_from(grown.entries).unwrap_or(i64::MAX))
    .bind(i64::try_from(grown.bytes).unwrap_or(i64::MAX))
    .all_in(tx)
    .await
    .map_err(|error| classify(&error, "record", WRITE))?;
    let row = rows.first().expect("an upsert without a condition returns its row");
    Columns::decode(row)
}

/// `$1` team, `$2` sandbox, `$3` and `$4` the times, `$5` level, `$6` the text to search, `$7` limit.
macro_rules! list_sql {
    ($position:literal, $direction:literal) => {
        concat!(
            "SELECT at_us, seq, level, logger, message, fields_json FROM sandbox_logs \
             WHERE team_id = $1 AND sandbox_id = $2 AND at_us >= $3 AND at_us <= $4 AND level >= $5 AND ($6 = '' OR ",
            $position,
            "(message, $6) > 0) ORDER BY at_us ",
            $direction,
            ", seq ",
            $direction,
            " LIMIT $7"
        )
    };
}

const EVICT: &str = "remove the oldest logs";
const TRIM: &str = "trim the log of a sandbox";
/// Entries removed in one transaction.
const TRIM_SLICE: i64 = 500;

/// Where a log is trimmed: its newest entry to remove.
struct TrimPoint {
    at_us: i64,
    seq: i64,
    rest: LogRest,
}

/// The remaining size of a log.
struct LogRest {
    entries: i64,
    bytes: i64,
}

impl FromColumns for TrimPoint {
    const TABLE: &'static str = "sandbox_logs";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            at_us: columns.int("at_us")?,
            seq: columns.int("seq")?,
            rest: LogRest::from_columns(columns)?,
        })
    }
}

impl FromColumns for LogRest {
    const TABLE: &'static str = "sandbox_logs";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            entries: columns.int("kept_entries")?,
            bytes: columns.int("kept_bytes")?,
        })
    }
}

impl Store {
    /// Entries of a log. A log that does not exist is empty.
    pub async fn log_list(
        &self,
        team: &TeamId,
        sandbox: &SandboxId,
        query: &LogQuery,
    ) -> Result<Vec<LogRow>, StoreError> {
        // No message contains a NUL character, so none matches.
        if query.search.contains('\0') {
            return Ok(Vec::new());
        }
        let sql = match (self.db.engine, query.order) {
            (Engine::Sqlite, LogOrder::Forward) => list_sql!("instr", "ASC"),
            (Engine::Sqlite, LogOrder::Backward) => list_sql!("instr", "DESC"),
            (Engine::Postgres, LogOrder::Forward) => list_sql!("strpos", "ASC"),
            (Engine::Postgres, LogOrder::Backward) => list_sql!("strpos", "DESC"),
        };
        let statement = sqlx::query(sql)
            .bind(team.as_str())
            .bind(sandbox.as_str())
            .bind(query.from_us)
            .bind(query.to_us)
            .bind(level_number(query.level))
            .bind(query.search.as_str())
            .bind(i64::from(query.limit));
        self.db.read_all("read the log of a sandbox", statement).await
    }

    /// Trims a log to its newest entries: at most `entries`, of at most `bytes` together. Long operations run on a
    /// reader or in slices, so that the writer is never held for long; nothing else changes old entries in between.
    pub async fn log_trim(
        &self,
        team: &TeamId,
        sandbox: &SandboxId,
        entries: u64,
        bytes: u64,
    ) -> Result<(), StoreError> {
        let newest_to_remove = sqlx::query(
            "SELECT at_us, seq, place - 1 AS kept_entries, CAST(total - bytes AS BIGINT) AS kept_bytes FROM \
             (SELECT at_us, seq, bytes, ROW_NUMBER() OVER newest AS place, SUM(bytes) OVER newest AS total \
             FROM sandbox_logs WHERE team_id = $1 AND sandbox_id = $2 \
             WINDOW newest AS (ORDER BY at_us DESC, seq DESC)) AS counted \
             WHERE place > $3 OR total > $4 ORDER BY at_us DESC, seq DESC LIMIT 1",
        )
        .bind(team.as_str())
        .bind(sandbox.as_str())
        .bind(i64::try_from(entries).unwrap_or(i64::MAX))
        .bind(i64::try_from(bytes).unwrap_or(i64::MAX));
        let rest = match self.db.read_optional::<TrimPoint>(TRIM, newest_to_remove).await? {
            Some(point) => {
                while self.log_trim_slice(team, sandbox, &point).await? > 0 {}
                Some(point.rest)
            }
            // The log is within its limits: a batch that was written twice was counted twice.
            None => {
                let count = sqlx::query(
                    "SELECT COUNT(*) AS kept_entries, CAST(COALESCE(SUM(bytes), 0) AS BIGINT) AS kept_bytes \
                     FROM sandbox_logs WHERE team_id = $1 AND sandbox_id = $2",
                )
                .bind(team.as_str())
                .bind(sandbox.as_str());
                self.db.read_optional::<LogRest>(TRIM, count).await?
            }
        };
        let Some(rest) = rest else { return Ok(()) };
        let note = sqlx::query(
            "UPDATE sandbox_records SET log_entries = $3, log_bytes = $4 WHERE team_id = $1 AND sandbox_id = $2",
        )
        .bind(team.as_str())
        .bind(sandbox.as_str())
        .bind(rest.entries)
        .bind(rest.bytes);
        self.db.write("record", TRIM, note).await?;
        Ok(())
    }

    async fn log_trim_slice(&self, team: &TeamId, sandbox: &SandboxId, point: &TrimPoint) -> Result<u64, StoreError> {
        let delete = sqlx::query(
            "DELETE FROM sandbox_logs WHERE (team_id, sandbox_id, at_us, seq) IN \
             (SELECT team_id, sandbox_id, at_us, seq FROM sandbox_logs WHERE team_id = $1 AND sandbox_id = $2 \
             AND (at_us < $3 OR (at_us = $3 AND seq <= $4)) ORDER BY at_us, seq LIMIT $5)",
        )
        .bind(team.as_str())
        .bind(sandbox.as_str())
        .bind(point.at_us)
        .bind(point.seq)
        .bind(TRIM_SLICE);
        self.db.write("record", TRIM, delete).await
    }

    /// The accounted size of all logs, in bytes.
    pub async fn log_total(&self) -> Result<u64, StoreError> {
        let query = sqlx::query("SELECT CAST(COALESCE(SUM(log_bytes), 0) AS BIGINT) AS value FROM sandbox_records");
        self.db.read_number("add up the logs", query).await
    }

    /// Removes the logs of the sandboxes that ended first, about `limit` entries in all, and returns their accounted
    /// size in bytes; none when no sandbox with a log has ended.
    pub async fn log_evict(&self, limit: u32) -> Result<Option<u64>, StoreError> {
        let oldest = sqlx::query(
            "SELECT team_id, sandbox_id, log_entries, log_bytes FROM sandbox_records WHERE ended_us IS NOT NULL \
             ORDER BY ended_us LIMIT $1",
        )
        .bind(i64::from(limit));
        let oldest: Vec<LogSize> = self.db.read_all(EVICT, oldest).await?;
        let Some(first) = oldest.first() else { return Ok(None) };
        if first.entries > u64::from(limit) {
            // In slices, so that the writer is not held for long; the next call removes the record of the empty log.
            self.log_trim(&first.team_id, &first.sandbox_id, 0, 0).await?;
            return Ok(Some(first.bytes));
        }
        let mut entries = 0;
        let mut bytes = 0;
        let mut tx = self.db.begin(EVICT).await?;
        for log in &oldest {
            entries += log.entries;
            if entries > u64::from(limit) {
                break;
            }
            bytes += log.bytes;
            for sql in [
                "DELETE FROM sandbox_logs WHERE team_id = $1 AND sandbox_id = $2",
                "DELETE FROM sandbox_records WHERE team_id = $1 AND sandbox_id = $2",
            ] {
                let query = sqlx::query(sql)
                    .bind(log.team_id.as_str())
                    .bind(log.sandbox_id.as_str());
                execute(&mut tx, query).await?;
            }
        }
        tx.commit().await.map_err(|error| classify(&error, "record", EVICT))?;
        Ok(Some(bytes))
    }

    /// The largest log; none when there are no logs.
    pub async fn log_largest(&self) -> Result<Option<LogSize>, StoreError> {
        let query = sqlx::query(
            "SELECT team_id, sandbox_id, log_entries, log_bytes FROM sandbox_records \
             ORDER BY log_bytes DESC, team_id, sandbox_id LIMIT 1",
        );
        self.db.read_optional("find the largest log", query).await
    }

    /// Removes at most `limit` entries of sandboxes that ended by `ended_us`, in the order of their ends, and returns
    /// the number of removed rows; 0 when there is nothing left to remove.
    pub async fn log_purge(&self, ended_us: i64, limit: u32) -> Result<u64, StoreError> {
        const WHAT: &str = "remove old logs";
        let entries = sqlx::query(
            "DELETE FROM sandbox_logs WHERE (team_id, sandbox_id, at_us, seq) IN \
             (SELECT l.team_id, l.sandbox_id, l.at_us, l.seq FROM sandbox_records r JOIN sandbox_logs l \
             ON l.team_id = r.team_id AND l.sandbox_id = r.sandbox_id \
             WHERE r.ended_us <= $1 ORDER BY r.ended_us LIMIT $2)",
        )
        .bind(ended_us)
        .bind(i64::from(limit));
        let removed = self.db.write("record", WHAT, entries).await?;
        if removed > 0 {
            return Ok(removed);
        }
        let records = sqlx::query(
            "DELETE FROM sandbox_records WHERE (team_id, sandbox_id) IN \
             (SELECT r.team_id, r.sandbox_id FROM sandbox_records r WHERE r.ended_us <= $1 \
             AND NOT EXISTS (SELECT 1 FROM sandbox_logs l WHERE l.team_id = r.team_id AND l.sandbox_id = r.sandbox_id) \
             ORDER BY r.ended_us LIMIT $2)",
        )
        .bind(ended_us)
        .bind(i64::from(limit));
        self.db.write("record", WHAT, records).await
    }
}
