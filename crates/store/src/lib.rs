//! Durable facts of the platform, in SQLite or PostgreSQL, through one SQL text.
//!
//! What is kept, and why it may not be rebuilt from observation:
//!
//! - teams, users, API keys, access tokens and access keys: who may ask for what. API keys and access tokens only as
//!   hashes; the secrets of access keys only as ciphertext that the caller sealed;
//! - templates, their aliases and builds: what a name means to a team;
//! - nodes: which hosts share the database, and which server may change the rows of each;
//! - sandboxes: who owns them, what they were made of, where they are and when they end. Deadlines survive a restart of the platform.
//!   Environment variables are secrets of the client and are **not** stored;
//! - logs and metrics of sandboxes, for some days after their end: nothing else tells what happened;
//! - idempotency keys: which request came first, and what of its answer is no secret.
//!
//! Everything else (routes, connections, deadlines in order) lives in memory and is rebuilt from these rows.
//!
//! Invariants: this is the only crate that knows SQL. It has no HTTP, no clock and no randomness: times (microseconds
//! since the Unix epoch) and ids are arguments. Every change of a sandbox raises its `version`, so that a decision
//! taken on an old view of the row can be recognised.
//!
//! The portable subset: columns are `TEXT` or `BIGINT` only; flags are 0 and 1, times are microseconds, JSON is `TEXT`
//! that no query takes apart. What differs between the engines is in `dialect.rs` and `connect.rs`.

mod connect;
mod db;
mod dialect;
mod migrations;
mod reserve;
mod row;

pub mod error;
pub mod idempotency;
pub mod keys;
pub mod nodes;
pub mod records;
pub mod sandboxes;
pub mod teams;
pub mod templates;
pub mod tokens;

use crate::db::Db;
use crate::error::StoreError;

/// The outcome of a change that holds only for a row in an expected condition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Change<T> {
    /// The change is durable; this is the row after it.
    Applied(T),
    /// The row exists, but its version or state is not the expected one. Nothing was changed.
    Stale,
    /// There is no such row.
    Missing,
}

impl<T> Change<T> {
    /// The row, when the change was applied.
    #[must_use]
    pub fn applied(self) -> Option<T> {
        match self {
            Self::Applied(row) => Some(row),
            Self::Stale | Self::Missing => None,
        }
    }
}

/// The database. Cloning it shares the connections.
#[derive(Debug, Clone)]
pub struct Store {
    db: Db,
}

impl Store {
    /// Opens `sqlite:<path>` (created with mode 0600 when it does not exist) or `postgres://…`, and brings the schema
    /// up to date. Several processes may open one database at the same moment: one migrates, the others wait.
    ///
    /// # Errors
    /// When the address is of neither form, the database cannot be reached, or its schema is newer than this program.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let db = connect::connect(url).await?;
        migrations::run(&db).await?;
        Ok(Self { db })
    }

    /// Waits for running statements and closes every connection; SQLite folds its log into the file. Dropping the
    /// store instead loses nothing.
    pub async fn close(&self) {
        self.db.close().await;
    }

    /// Takes disk space ahead of need, 32 MiB, so that keys can be revoked and sandboxes end on a disk that something
    /// else has filled. To be called every now and then, because a growing database uses it up. Does nothing where the
    /// database is not a file of this host.
    ///
    /// # Errors
    /// [`StoreError::Full`] when there is not as much left: logs and metrics are refused from the point on where half
    /// of it is used up.
    pub async fn reserve_space(&self) -> Result<(), StoreError> {
        self.db.reserve_space().await
    }

    /// Answers when the database does.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.db.ping().await
    }
}
