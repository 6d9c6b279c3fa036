//! Logs of builds. Entries are numbered in the order of their writing, and never change.

use model::id::BuildId;
use model::log::Level;

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns};
use crate::statement::InTransaction as _;

/// An entry of the log of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildLogRow {
    /// Its number, from 1.
    pub seq: i64,
    /// When it was written, in microseconds since the Unix epoch.
    pub at_us: i64,
    /// Severity.
    pub level: Level,
    /// The step of the build that it is about, if any.
    pub step: Option<String>,
    /// The message.
    pub message: String,
}

/// The size of the log of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BuildLogSize {
    /// The number of the last entry; 0 if there is none.
    pub last_seq: i64,
    /// Length of all messages together.
    pub bytes: i64,
}

/// Selects entries of the log of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildLogQuery {
    /// Earliest time, in microseconds since the Unix epoch.
    pub from_us: i64,
    /// Latest time, in microseconds since the Unix epoch.
    pub to_us: i64,
    /// Lowest level.
    pub level: Level,
    /// How many entries to leave out at the beginning.
    pub offset: u32,
    /// Maximum number of entries.
    pub limit: u32,
    /// Newest first.
    pub is_backward: bool,
}

impl FromColumns for BuildLogRow {
    const TABLE: &'static str = "build_logs";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let level = usize::try_from(columns.int("level")?).ok();
        Ok(Self {
            seq: columns.int("seq")?,
            at_us: columns.int("at_us")?,
            level: level
                .and_then(|at| Level::ALL.get(at).copied())
                .ok_or_else(|| columns.corrupt("level"))?,
            step: columns.text_opt("step")?,
            message: columns.text("message")?,
        })
    }
}

impl FromColumns for BuildLogSize {
    const TABLE: &'static str = "build_logs";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            last_seq: columns.int("last_seq")?,
            bytes: columns.int("bytes")?,
        })
    }
}

fn level_number(level: Level) -> i64 {
    Level::ALL
        .iter()
        .position(|other| *other == level)
        .map_or(0, |at| i64::try_from(at).unwrap_or(0))
}

/// A text of a program as both engines can store it.
fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

impl Store {
    /// Writes entries, all or none.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when there is an entry with one of the numbers; [`StoreError::Dangling`] when there is
    /// no such build.
    pub async fn build_log_append(&self, build: &BuildId, entries: &[BuildLogRow]) -> Result<(), StoreError> {
        const WHAT: &str = "write the log of a build";
        let mut tx = self.db.begin(WHAT).await?;
        for entry in entries {
            sqlx::query(
                "INSERT INTO build_logs (build_id, seq, at_us, level, step, message) VALUES ($1, $2, $3, $4, $5, $6)",
            )
            .bind(build.as_str())
            .bind(entry.seq)
            .bind(entry.at_us)
            .bind(level_number(entry.level))
            .bind(entry.step.as_deref().map(clean))
            .bind(clean(&entry.message))
            .execute_in(&mut tx)
            .await
            .map_err(|error| classify(&error, "entry of a log", WHAT))?;
        }
        tx.commit()
            .await
            .map_err(|error| classify(&error, "entry of a log", WHAT))
    }

    /// The size of the log of a build.
    pub async fn build_log_size(&self, build: &BuildId) -> Result<BuildLogSize, StoreError> {
        let query = sqlx::query(
            "SELECT COALESCE(MAX(seq), 0) AS last_seq, CAST(COALESCE(SUM(LENGTH(message)), 0) AS BIGINT) AS bytes \
             FROM build_logs WHERE build_id = $1",
        )
        .bind(build.as_str());
        let size = self.db.read_optional("measure the log of a build", query).await?;
        Ok(size.unwrap_or_default())
    }

    /// Entries of the log of a build, in the order of the query.
    pub async fn build_log_list(&self, build: &BuildId, query: &BuildLogQuery) -> Result<Vec<BuildLogRow>, StoreError> {
        let sql = if query.is_backward {
            "SELECT seq, at_us, level, step, message FROM build_logs WHERE build_id = $1 AND level >= $2 \
             AND at_us >= $3 AND at_us <= $4 ORDER BY seq DESC LIMIT $5 OFFSET $6"
        } else {
            "SELECT seq, at_us, level, step, message FROM build_logs WHERE build_id = $1 AND level >= $2 \
             AND at_us >= $3 AND at_us <= $4 ORDER BY seq LIMIT $5 OFFSET $6"
        };
        let query = sqlx::query(sql)
            .bind(build.as_str())
            .bind(level_number(query.level))
            .bind(query.from_us)
            .bind(query.to_us)
            .bind(i64::from(query.limit))
            .bind(i64::from(query.offset));
        self.db.read_all("read the log of a build", query).await
    }
}
