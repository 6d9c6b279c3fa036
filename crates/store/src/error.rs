//! What can go wrong, told without a value that was stored.
//!
//! Engines like to quote the offending row in an error's detail, and rows hold hashes and sealed secrets. So an error
//! of the driver never leaves this crate: only its code and its one-line message do, which name columns, not values.

use std::fmt;

/// An operation that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A row with this key exists already. Nothing was changed.
    #[error("{what} exists already")]
    Conflict {
        /// The kind of row, e.g. `team`.
        what: &'static str,
    },
    /// A row that the new one refers to (its team, user, template…) does not exist. Nothing was changed.
    #[error("{what} refers to something that does not exist")]
    Dangling {
        /// The kind of row that was to be stored.
        what: &'static str,
    },
    /// The value cannot be stored by every engine (a NUL character, or a line break in an alias).
    #[error("{what} holds a character that cannot be stored")]
    UnsupportedCharacter {
        /// The field, e.g. `team name`.
        what: &'static str,
    },
    /// The address of the database is of no known form.
    #[error("database address: {why}")]
    Address {
        /// What is wrong with it.
        why: &'static str,
    },
    /// The database cannot be reached, or refuses work for now. Trying again later may succeed.
    #[error("database unavailable while it was to {what}")]
    Unavailable {
        /// What was being done, e.g. `insert a sandbox`.
        what: &'static str,
        /// What the driver said.
        #[source]
        source: Failure,
    },
    /// The disk that the database lies on is full. Nothing was changed, and trying again succeeds once there is room.
    #[error("no disk space left to {what}")]
    Full {
        /// What was being done.
        what: &'static str,
        /// What the driver said.
        #[source]
        source: Failure,
    },
    /// The database refused the statement. Trying again is of no use.
    #[error("database refused to {what}")]
    Database {
        /// What was being done.
        what: &'static str,
        /// What the driver said.
        #[source]
        source: Failure,
    },
    /// A stored value is not one that this program writes.
    #[error("column {column} of {table} holds what it must not")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
    },
    /// The database was migrated by a newer release.
    #[error("the database has schema version {found}, this program knows {known} at most")]
    SchemaTooNew {
        /// The version in the database.
        found: i64,
        /// The newest version this program has.
        known: i64,
    },
}

/// What a driver said: its error code and one line, without the values of the statement.
pub struct Failure {
    code: Option<String>,
    message: String,
}

impl Failure {
    /// A reason of our own.
    pub(crate) fn told(message: &str) -> Self {
        Self {
            code: None,
            message: message.to_owned(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.code {
            Some(code) => write!(f, "{} (code {code})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Failure {}

/// Sorts an error of the driver. `row` names the kind of row concerned and `what` the attempt.
pub(crate) fn sort(error: &sqlx::Error, row: &'static str, what: &'static str) -> StoreError {
    if let sqlx::Error::Database(database) = error {
        if database.is_unique_violation() {
            return StoreError::Conflict { what: row };
        }
        if database.is_foreign_key_violation() {
            return StoreError::Dangling { what: row };
        }
    }
    let source = failure(error);
    let is_full = match error {
        sqlx::Error::Io(error) => error.kind() == std::io::ErrorKind::StorageFull,
        _ => source.code.as_deref().is_some_and(crate::dialect::is_full_code),
    };
    if is_full {
        StoreError::Full { what, source }
    } else if is_passing(error, source.code.as_deref()) {
        StoreError::Unavailable { what, source }
    } else {
        StoreError::Database { what, source }
    }
}

fn failure(error: &sqlx::Error) -> Failure {
    match error {
        sqlx::Error::Database(database) => Failure {
            code: database.code().map(|code| code.into_owned()),
            message: database.message().to_owned(),
        },
        other => Failure {
            code: None,
            message: other.to_string(),
        },
    }
}

/// Whether the error is about the moment and not about the statement.
fn is_passing(error: &sqlx::Error, code: Option<&str>) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(_) => code.is_some_and(crate::dialect::is_passing_code),
        _ => false,
    }
}
