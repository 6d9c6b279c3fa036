//! The durable state of the platform, in SQLite or PostgreSQL, through the same SQL statements.
//!
//! What is stored, and why it cannot be rebuilt from observation:
//!
//! - teams, users, API keys, access tokens and access keys: who may do what. API keys and access tokens only as hashes;
//!   the secrets of access keys only as ciphertext that the caller sealed;
//! - injection rules of users and injections of sandboxes: only as ciphertext that the caller sealed;
//! - templates, their aliases, tags and builds: which template a name stands for in a team, and what it consists of;
//! - removals of objects from the blob store, which the nodes that share it announce to each other;
//! - logs of builds, and which layers and uploaded files a node has for the builds of a team;
//! - nodes: which hosts share the database, and which server may change the rows of each;
//! - servers: which of them work as one service, where each is reached, and what its nodes have left;
//! - sandboxes: their owner, template, node and deadline. Deadlines survive a restart of the platform. The environment
//!   that a client set is a secret of that client. It is stored only as ciphertext that the caller sealed, and it is
//!   removed when the sandbox ends;
//! - secrets of teams, their values only as ciphertext that the caller sealed;
//! - webhooks of teams, the secrets of which only as ciphertext that the caller sealed, what is to be sent to them, and what
//!   became of the attempts;
//! - logs, metrics and lifecycle events of sandboxes, and what teams used, for some days after their end: the only record of what happened;
//! - idempotency keys: which request came first, and its response without secrets.
//!
//! Everything else (routes, connections, deadlines in order) lives in memory and is rebuilt from these rows.
//!
//! Invariants: this is the only crate that knows SQL. It has no HTTP, no clock and no randomness: times (microseconds
//! since the Unix epoch) and ids are arguments. Every change of a sandbox raises its `version`, so that a decision
//! based on an outdated row is detected. Whatever asks the database fails when that does; a section `Errors` names what else
//! can go wrong.
//!
//! The portable subset: columns are `TEXT` or `BIGINT` only; flags are 0 and 1, times are microseconds, JSON is `TEXT`
//! that queries do not inspect. What differs between the engines is in `dialect.rs` and `connect.rs`.

mod connect;
mod db;
mod dialect;
mod migrations;
mod postgres;
mod reserve;
mod row;
mod slug;
mod statement;

pub mod builds;
pub mod error;
pub mod idempotency;
pub mod injection_rules;
pub mod joined_nodes;
pub mod keys;
pub mod node_pauses;
pub mod nodes;
pub mod records;
pub mod removals;
pub mod sandboxes;
pub mod sealed;
pub mod secrets;
pub mod servers;
pub mod snapshots;
pub mod tags;
pub mod teams;
pub mod templates;
pub mod tokens;
pub mod transfer;
pub mod webhooks;

use crate::db::Db;
use crate::error::StoreError;

/// The outcome of a conditional change of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Change<T> {
    /// The change is durable; this is the row after it.
    Applied(T),
    /// The row exists, but its version or state is not the expected one. Nothing was changed.
    Stale,
    /// The row does not exist.
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

/// The database. Clones share the connections.
#[derive(Debug, Clone)]
pub struct Store {
    db: Db,
}

impl Store {
    /// Opens `sqlite:<path>` (created with mode 0600 when it does not exist) or `postgres://…`, and brings the schema
    /// up to date. Several processes may open one database at the same time: one migrates, the others wait.
    ///
    /// # Errors
    /// When the address has neither form, the database cannot be reached, or its schema is newer than this program.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let db = connect::connect(url).await?;
        migrations::run(&db).await?;
        Ok(Self { db })
    }

    /// Waits for running statements and closes every connection; SQLite moves its log into the file. Dropping the
    /// store instead loses nothing.
    pub async fn close(&self) {
        self.db.close().await;
    }

    /// Allocates 32 MiB of disk space in advance, so that keys can be revoked and sandboxes end on a disk that
    /// something else has filled. To be called periodically, because a growing database uses the reserve up. Does
    /// nothing where the database is not a file of this host.
    ///
    /// # Errors
    /// [`StoreError::Full`] when the disk has less than that left. Once half of the reserve is used up, logs and
    /// metrics are refused.
    pub async fn reserve_space(&self) -> Result<(), StoreError> {
        self.db.reserve_space().await
    }

    /// Writes a copy of the database, as it is at one moment, to a new file. `false` if the database is not a file of
    /// this host, whose copies are made by its server.
    ///
    /// # Errors
    /// When the file exists or cannot be written, or the database fails.
    pub async fn copy_to(&self, path: &std::path::Path) -> Result<bool, StoreError> {
        self.db.copy_to(path).await
    }

    /// Checks that the database responds.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.db.ping().await
    }
}
