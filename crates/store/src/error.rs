//! Errors of the store, without any stored value.
//!
//! Engines often quote the offending row in the detail of an error, and rows hold hashes and sealed secrets. So an
//! error of the driver never leaves this crate: only its code and its one-line message do, which name columns, not
//! values.

use std::fmt;

/// Why an operation of the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A row with this key exists already. Nothing was changed.
    #[error("{what} already exists")]
    Conflict {
        /// The kind of row, e.g. `team`.
        what: &'static str,
    },
    /// A row that the new one references (its team, user, template…) does not exist. Nothing was changed.
    #[error("{what} references a row that does not exist")]
    Dangling {
        /// The kind of the new row.
        what: &'static str,
    },
    /// The value contains a character that not every engine can store (NUL, or a line break in an alias).
    #[error("{what} contains an unsupported character (NUL or line break)")]
    UnsupportedCharacter {
        /// The field, e.g. `team name`.
        what: &'static str,
    },
    /// The address of the database is invalid.
    #[error("invalid database address: {why}")]
    Address {
        /// What is wrong with the address.
        why: &'static str,
    },
    /// The database cannot be reached, or temporarily refuses work. A later attempt may succeed.
    #[error("database unavailable: {what}")]
    Unavailable {
        /// The operation, e.g. `insert a sandbox`.
        what: &'static str,
        /// The error of the driver.
        #[source]
        source: Failure,
    },
    /// The disk of the database is full. Nothing was changed, and a later attempt succeeds once there is free space.
    #[error("disk of the database is full: {what}")]
    Full {
        /// The operation.
        what: &'static str,
        /// The error of the driver.
        #[source]
        source: Failure,
    },
    /// The database rejected the statement. Another attempt would fail as well.
    #[error("database error: {what}")]
    Database {
        /// The operation.
        what: &'static str,
        /// The error of the driver.
        #[source]
        source: Failure,
    },
    /// The lease of the node was acquired again, by another server or a later start of this one, which manages the rows of
    /// the node now. Nothing was changed.
    #[error("another server manages this node now: {what}")]
    LeaseLost {
        /// The operation.
        what: &'static str,
    },
    /// A stored value is not one that this program writes.
    #[error("invalid value in column {column} of {table}")]
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
        /// The newest version that this program supports.
        known: i64,
    },
}

/// An error of the driver: its code and one line, without the values of the statement.
pub struct Failure {
    code: Option<String>,
    message: String,
}

impl StoreError {
    /// Names the server in the reason.
    pub(crate) fn at(mut self, address: &str) -> Self {
        if let Self::Unavailable { source, .. } | Self::Full { source, .. } | Self::Database { source, .. } = &mut self
        {
            source.message = format!("{address}: {}", source.message);
        }
        self
    }
}

impl Failure {
    /// Whether the database server has reported this error.
    pub(crate) fn has_code(&self) -> bool {
        self.code.is_some()
    }

    /// Whether a statement has waited for a lock for as long as it may.
    pub(crate) fn is_of_lock(&self) -> bool {
        self.code.as_deref().is_some_and(crate::dialect::is_lock_code)
    }

    /// A failure with a reason of this crate, not of the driver.
    pub(crate) fn new(message: &str) -> Self {
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

/// Classifies an error of the driver. `row` is the kind of row and `what` the operation.
pub(crate) fn classify(error: &sqlx::Error, row: &'static str, what: &'static str) -> StoreError {
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
    } else if is_transient(error, source.code.as_deref()) {
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
        sqlx::Error::Io(error) => Failure::new(&error.to_string()),
        other => Failure {
            code: None,
            message: other.to_string(),
        },
    }
}

/// Whether the same statement may succeed later.
fn is_transient(error: &sqlx::Error, code: Option<&str>) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(_) => code.is_some_and(crate::dialect::is_transient_code),
        _ => false,
    }
}
