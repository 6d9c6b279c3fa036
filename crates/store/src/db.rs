//! Connections, and the few ways in which statements are run on them.
//!
//! SQLite allows one writer at a time, so there it is one connection, and waiting writers queue in its pool, in order
//! and without ever meeting a busy error of each other. Readers have connections of their own and, thanks to the
//! write-ahead log, never wait for the writer. PostgreSQL needs no such care: both names mean one pool.

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use sqlx::any::{AnyArguments, AnyRow};
use sqlx::pool::PoolConnection;
use sqlx::{Any, AnyConnection, AnyPool, Executor};

use crate::dialect::Engine;
use crate::error::{StoreError, sort};
use crate::reserve::{Reserve, beside};
use crate::row::{Columns, FromColumns};

/// A statement with its arguments.
pub(crate) type Query = sqlx::query::Query<'static, Any, AnyArguments>;

/// A transaction that may write. Its connection goes back to the pool after a commit that worked, and is closed in
/// every other case, which rolls back whatever there was: after an error only the engine knows what is left of a
/// transaction. SQLite takes some transactions back by itself (a full disk, an I/O error) and refuses the `ROLLBACK`
/// that follows, upon which a count of open transactions is wrong for good; so there is none, and the driver's own
/// transactions are not used.
#[derive(Debug)]
pub(crate) struct Transaction {
    connection: PoolConnection<Any>,
    is_open: bool,
}

impl Transaction {
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        self.connection.execute("COMMIT").await?;
        self.is_open = false;
        Ok(())
    }
}

impl Deref for Transaction {
    type Target = AnyConnection;

    fn deref(&self) -> &AnyConnection {
        &self.connection
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        &mut self.connection
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.is_open {
            self.connection.close_on_drop();
        }
    }
}

/// The connections of one database.
#[derive(Debug, Clone)]
pub(crate) struct Db {
    pub(crate) engine: Engine,
    pub(crate) read: AnyPool,
    pub(crate) write: AnyPool,
    /// The write-ahead log, on SQLite.
    pub(crate) log: Option<Arc<WriteAheadLog>>,
}

/// The write-ahead log of a SQLite file.
#[derive(Debug)]
pub(crate) struct WriteAheadLog {
    path: PathBuf,
    /// The database.
    file: PathBuf,
    reserve: OnceLock<Reserve>,
}

impl WriteAheadLog {
    pub(crate) fn of(file: &Path) -> Self {
        Self {
            path: beside(file, "-wal"),
            file: file.to_owned(),
            reserve: OnceLock::new(),
        }
    }

    fn reserve_space(&self) -> std::io::Result<()> {
        if let Some(reserve) = self.reserve.get() {
            return reserve.hold();
        }
        let reserve = Reserve::of(&self.file)?;
        self.reserve.get_or_init(|| reserve).hold()
    }

    /// Makes every commit so far survive a power cut. What a checkpoint moved into the file in the meantime was synced
    /// by the checkpoint. No lock lies on this file, so closing a descriptor of it drops none.
    fn sync(&self) -> std::io::Result<()> {
        File::open(&self.path)?.sync_data()?;
        // The log is a new file after each opening of the database, and a file is no more durable than its name.
        match self.path.parent() {
            Some(dir) => File::open(dir)?.sync_all(),
            None => Ok(()),
        }
    }
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

    /// Waits until everything that was committed survives a power cut. Whoever does without it may lose the last
    /// moments to one, on SQLite: right for what is worth nothing after a reboot, as a sandbox is. It costs a wait for
    /// the disk, and is done beside the writer, so that a create never waits for a key.
    pub(crate) async fn sync(&self, what: &'static str) -> Result<(), StoreError> {
        let Some(log) = self.log.clone() else { return Ok(()) };
        let synced = tokio::task::spawn_blocking(move || log.sync()).await;
        synced
            .unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| sort(&sqlx::Error::Io(error), "row", what))
    }

    /// See [`crate::Store::reserve_space`].
    pub(crate) async fn reserve_space(&self) -> Result<(), StoreError> {
        const WHAT: &str = "hold disk space for the database";
        let Some(log) = self.log.clone() else { return Ok(()) };
        let held = tokio::task::spawn_blocking(move || log.reserve_space()).await;
        held.unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| sort(&sqlx::Error::Io(error), "row", WHAT))
    }

    /// Whether only what must be written may be, because hardly any space is left that this database holds.
    pub(crate) fn is_low_on_space(&self) -> bool {
        let reserve = self.log.as_ref().and_then(|log| log.reserve.get());
        reserve.is_some_and(Reserve::is_low)
    }

    /// Like [`Self::write`], and durable when it returns: see [`Self::sync`].
    pub(crate) async fn write_durably(
        &self,
        row: &'static str,
        what: &'static str,
        query: Query,
    ) -> Result<u64, StoreError> {
        let rows = self.write(row, what, query).await?;
        // Also when nothing changed: the change may be there because an earlier call ended before this point.
        self.sync(what).await?;
        Ok(rows)
    }

    /// Like [`Self::write_returning`], and durable when it returns: see [`Self::sync`].
    pub(crate) async fn write_returning_durably<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Option<T>, StoreError> {
        let row = self.write_returning(what, query).await?;
        self.sync(what).await?;
        Ok(row)
    }

    pub(crate) async fn begin(&self, what: &'static str) -> Result<Transaction, StoreError> {
        let begun = async {
            // Open from before the statement is sent: a caller that goes away while it runs leaves a transaction, too.
            let mut tx = Transaction {
                connection: self.write.acquire().await?,
                is_open: true,
            };
            tx.execute(self.engine.begin()).await?;
            Ok(tx)
        };
        begun.await.map_err(|error: sqlx::Error| sort(&error, "row", what))
    }
}

#[cfg(test)]
mod tests;
