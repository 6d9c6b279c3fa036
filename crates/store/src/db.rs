//! Connections, and the few ways in which statements are run on them.
//!
//! SQLite allows one writer at a time, so there it is one connection, and waiting writers queue in its pool, in order
//! and without ever meeting a busy error of each other. Readers have connections of their own and, thanks to the
//! write-ahead log, never wait for the writer. PostgreSQL needs no such care: both names mean one pool.

use sqlx::any::{AnyArguments, AnyRow};
use sqlx::{Any, AnyPool};

use crate::dialect::Engine;
use crate::error::{StoreError, sort};
use crate::row::{Columns, FromColumns};

/// A statement with its arguments.
pub(crate) type Query = sqlx::query::Query<'static, Any, AnyArguments>;
/// A transaction that may write. Dropping it rolls it back.
pub(crate) type Transaction = sqlx::Transaction<'static, Any>;

/// The connections of one database.
#[derive(Debug, Clone)]
pub(crate) struct Db {
    pub(crate) engine: Engine,
    pub(crate) read: AnyPool,
    pub(crate) write: AnyPool,
}

impl Db {
    pub(crate) async fn close(&self) {
        // The writer goes last: the last connection to close is the one that folds SQLite's log into the file.
        self.read.close().await;
        self.write.close().await;
    }

    pub(crate) async fn ping(&self) -> Result<(), StoreError> {
        const WHAT: &str = "answer";
        sqlx::query("SELECT 1")
            .fetch_all(&self.read)
            .await
            .map_err(|error| sort(&error, "row", WHAT))?;
        Ok(())
    }

    pub(crate) async fn read_all<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Vec<T>, StoreError> {
        let rows = query
            .fetch_all(&self.read)
            .await
            .map_err(|error| sort(&error, T::TABLE, what))?;
        rows.iter().map(Columns::decode).collect()
    }

    pub(crate) async fn read_optional<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Option<T>, StoreError> {
        let row = query
            .fetch_optional(&self.read)
            .await
            .map_err(|error| sort(&error, T::TABLE, what))?;
        row.as_ref().map(Columns::decode).transpose()
    }

    /// Runs a statement that changes rows and returns nothing. `row` names what a unique key protects.
    pub(crate) async fn write(&self, row: &'static str, what: &'static str, query: Query) -> Result<u64, StoreError> {
        let result = query
            .execute(&self.write)
            .await
            .map_err(|error| sort(&error, row, what))?;
        Ok(result.rows_affected())
    }

    /// Runs a statement that changes at most one row and returns it.
    ///
    /// All rows are fetched although one is wanted: SQLite commits when a statement has been stepped to its end, and a
    /// fetch that stops at the first row would hide an error of that commit.
    pub(crate) async fn write_returning<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Option<T>, StoreError> {
        let rows: Vec<AnyRow> = query
            .fetch_all(&self.write)
            .await
            .map_err(|error| sort(&error, T::TABLE, what))?;
        rows.first().map(Columns::decode).transpose()
    }

    pub(crate) async fn begin(&self, what: &'static str) -> Result<Transaction, StoreError> {
        self.write
            .begin_with(self.engine.begin())
            .await
            .map_err(|error| sort(&error, "row", what))
    }
}
