//! Connections, and the functions that run statements on them.
//!
//! SQLite allows one writer at a time, so its write pool has one connection: writers queue for it in order and never
//! get a busy error because of each other. Readers have their own connections and, thanks to the write-ahead log, never
//! wait for the writer. PostgreSQL needs no separation: `read` and `write` are the same pool.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sqlx::AnyPool;
use sqlx::any::AnyRow;

use crate::dialect::Engine;
use crate::error::{Failure, StoreError, classify};
use crate::postgres::Server;
use crate::reserve::{Reserve, sibling_path};
use crate::row::{Columns, FromColumns};
use crate::statement::{Query, Transaction, single};

/// How long a ping waits, and how long it takes at most to find out why there was no answer.
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// The connections of one database.
#[derive(Debug, Clone)]
pub(crate) struct Db {
    pub(crate) engine: Engine,
    pub(crate) read: AnyPool,
    pub(crate) write: AnyPool,
    /// The write-ahead log, on SQLite.
    pub(crate) log: Option<Arc<WriteAheadLog>>,
    /// The server, of PostgreSQL.
    pub(crate) server: Option<Arc<Server>>,
}

/// The write-ahead log of a SQLite file.
#[derive(Debug)]
pub(crate) struct WriteAheadLog {
    path: PathBuf,
    /// The database file.
    file: PathBuf,
    reserve: OnceLock<Reserve>,
}

impl WriteAheadLog {
    pub(crate) fn of(file: &Path) -> Self {
        Self {
            path: sibling_path(file, "-wal"),
            file: file.to_owned(),
            reserve: OnceLock::new(),
        }
    }

    fn reserve_space(&self) -> std::io::Result<()> {
        if let Some(reserve) = self.reserve.get() {
            return reserve.allocate();
        }
        let reserve = Reserve::of(&self.file)?;
        self.reserve.get_or_init(|| reserve).allocate()
    }

    /// Makes every commit so far survive a power failure. What a checkpoint has moved into the database file was synced
    /// by the checkpoint. SQLite has no lock on the log file, so closing a descriptor of it releases none.
    fn sync(&self) -> std::io::Result<()> {
        File::open(&self.path)?.sync_data()?;
        // The log is a new file after each opening of the database, so its directory entry must be durable as well.
        match self.path.parent() {
            Some(dir) => File::open(dir)?.sync_all(),
            None => Ok(()),
        }
    }
}

impl Db {
    pub(crate) async fn close(&self) {
        // The writer is closed last: the last connection to close moves SQLite's log into the database file.
        self.read.close().await;
        self.write.close().await;
    }

    pub(crate) async fn ping(&self) -> Result<(), StoreError> {
        const WHAT: &str = "ping";
        let query = sqlx::query("SELECT 1").fetch_all(&self.read);
        let answered = tokio::time::timeout(PING_TIMEOUT, query).await;
        let error = match answered {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => classify(&error, "row", WHAT),
            Err(_) => StoreError::Unavailable {
                what: WHAT,
                source: Failure::new("no answer in time"),
            },
        };
        match &self.server {
            // The pool only tells that it has waited. All connections may be busy, too.
            Some(server) => server.try_connect(PING_TIMEOUT).await,
            None => Err(error),
        }
    }

    pub(crate) async fn read_all<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Vec<T>, StoreError> {
        let rows = single(self.engine, &self.read, |connection| {
            Box::pin(query.fetch_all(connection))
        })
        .await;
        let rows = rows.map_err(|error| classify(&error, T::TABLE, what))?;
        rows.iter().map(Columns::decode).collect()
    }

    pub(crate) async fn read_optional<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Option<T>, StoreError> {
        let row = single(self.engine, &self.read, |connection| {
            Box::pin(query.fetch_optional(connection))
        })
        .await;
        let row = row.map_err(|error| classify(&error, T::TABLE, what))?;
        row.as_ref().map(Columns::decode).transpose()
    }

    /// Runs a query for one number, as column `value`.
    pub(crate) async fn read_number<T: FromColumns + Default>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<T, StoreError> {
        Ok(self.read_optional(what, query).await?.unwrap_or_default())
    }

    /// Runs a statement that changes rows, and returns how many. `row` is the kind of row, for errors.
    pub(crate) async fn write(&self, row: &'static str, what: &'static str, query: Query) -> Result<u64, StoreError> {
        let result = single(self.engine, &self.write, |connection| {
            Box::pin(query.execute(connection))
        })
        .await;
        let result = result.map_err(|error| classify(&error, row, what))?;
        Ok(result.rows_affected())
    }

    /// Runs a statement that changes at most one row and returns it.
    ///
    /// All rows are fetched although only one is expected: SQLite commits when a statement has been stepped to its end,
    /// and a fetch that stops at the first row would hide an error of that commit.
    pub(crate) async fn write_returning<T: FromColumns>(
        &self,
        what: &'static str,
        query: Query,
    ) -> Result<Option<T>, StoreError> {
        let rows = single(self.engine, &self.write, |connection| {
            Box::pin(query.fetch_all(connection))
        })
        .await;
        let rows: Vec<AnyRow> = rows.map_err(|error| classify(&error, T::TABLE, what))?;
        rows.first().map(Columns::decode).transpose()
    }

    /// Waits until every commit so far survives a power failure. Without it, SQLite may lose the most recent commits:
    /// acceptable for what a reboot ends anyway, such as a sandbox. It waits for the disk, without holding the writer,
    /// so that a create request never waits for the sync of a key.
    pub(crate) async fn sync(&self, what: &'static str) -> Result<(), StoreError> {
        let Some(log) = self.log.clone() else { return Ok(()) };
        let synced = tokio::task::spawn_blocking(move || log.sync()).await;
        synced
            .unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| classify(&sqlx::Error::Io(error), "row", what))
    }

    /// Implements [`crate::Store::reserve_space`].
    pub(crate) async fn reserve_space(&self) -> Result<(), StoreError> {
        const WHAT: &str = "reserve disk space for the database";
        let Some(log) = self.log.clone() else { return Ok(()) };
        let reserved = tokio::task::spawn_blocking(move || log.reserve_space()).await;
        reserved
            .unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| classify(&sqlx::Error::Io(error), "row", WHAT))
    }

    /// Implements [`crate::Store::copy_to`]. One statement, so it sees one moment, and writers go on meanwhile.
    pub(crate) async fn copy_to(&self, path: &Path) -> Result<bool, StoreError> {
        const WHAT: &str = "copy the database";
        if self.engine != Engine::Sqlite {
            return Ok(false);
        }
        let path = path.to_str().ok_or(StoreError::Address {
            why: "the path of the copy is not UTF-8",
        })?;
        // Created here, because SQLite would let others read it. It takes an empty file.
        new_file(Path::new(path)).map_err(|error| classify(&sqlx::Error::Io(error), "file", WHAT))?;
        sqlx::query("VACUUM INTO $1")
            .bind(path.to_owned())
            .execute(&self.write)
            .await
            .map_err(|error| classify(&error, "row", WHAT))?;
        Ok(true)
    }

    /// Whether the reserve is so low that only keys and the lifecycle of sandboxes may be written.
    pub(crate) fn is_low_on_space(&self) -> bool {
        let reserve = self.log.as_ref().and_then(|log| log.reserve.get());
        reserve.is_some_and(Reserve::is_low)
    }

    /// Like [`Self::write`], and durable on return (see [`Self::sync`]).
    pub(crate) async fn write_durably(
        &self,
        row: &'static str,
        what: &'static str,
        query: Query,
    ) -> Result<u64, StoreError> {
        let rows = self.write(row, what, query).await?;
        // Also when nothing changed: an earlier call may have made the change and been cancelled before its sync.
        self.sync(what).await?;
        Ok(rows)
    }

    /// Like [`Self::write_returning`], and durable on return (see [`Self::sync`]).
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
        Transaction::begin(self.engine, &self.write)
            .await
            .map_err(|error| classify(&error, "row", what))
    }
}

/// Creates a file that must not exist, readable by its owner only.
pub(crate) fn new_file(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests;
