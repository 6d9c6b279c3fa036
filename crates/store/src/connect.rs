//! Opens the connections of a database, with the options of each engine.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use formats::percent;
use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::{AnyPool, ConnectOptions, Executor};

use crate::db::{Db, WriteAheadLog, new_file};
use crate::dialect::Engine;
use crate::error::{StoreError, classify};
use crate::postgres::Server;

/// Readers of one SQLite file. Reads take tens of microseconds, so a few serve thousands of requests per second.
const SQLITE_READERS: u32 = 4;
/// Connections to PostgreSQL, of the 100 that a server allows by default.
const POSTGRES_CONNECTIONS: u32 = 16;
/// What a connection to PostgreSQL begins with. A server that is stopped in the middle of a transaction, as when its machine is
/// suspended, has its connections nevertheless, and whoever needs a row that it has locked would wait for as long. So the
/// database ends a transaction whose next statement does not come, sooner than a statement that waits is given up.
const POSTGRES_SESSION: &str = "SET idle_in_transaction_session_timeout = '5s'";
/// How long a caller waits for a connection before the database counts as unavailable.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
const CREATE_FILE: &str = "create the SQLite file";

/// The writer of a SQLite file. WAL lets readers continue during writes. `synchronous=NORMAL` with WAL loses nothing
/// when the process is killed; after a power failure the file is consistent but may lack the most recent commits.
/// `FULL` would make every commit wait for the disk (milliseconds instead of a hundredth of one), also those of
/// sandboxes, which do not survive a reboot themselves; what must be durable calls [`Db::sync`]. Other processes
/// (`ringfence key create` beside a running platform) may write too, so it waits for them.
const SQLITE_WRITER: &str = "PRAGMA busy_timeout = 10000; PRAGMA foreign_keys = ON; PRAGMA journal_mode = WAL; \
     PRAGMA synchronous = NORMAL;";
/// A reader of a SQLite file. A write through it is an error, not a lock held against the writer.
const SQLITE_READER: &str = "PRAGMA busy_timeout = 10000; PRAGMA query_only = ON;";

/// Serialises opening SQLite files within a process. The file is created here, with the right mode, before SQLite opens
/// it; closing that descriptor releases every lock of this process on the file, so there must be none.
static SQLITE_OPENING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Connects to the database that `url` names.
pub(crate) async fn connect(url: &str) -> Result<Db, StoreError> {
    sqlx::any::install_default_drivers();
    if let Some(path) = url.strip_prefix("sqlite:") {
        return connect_sqlite(path.strip_prefix("//").unwrap_or(path)).await;
    }
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return connect_postgres(url).await;
    }
    Err(StoreError::Address {
        why: "must begin with sqlite: or postgres://",
    })
}

async fn connect_postgres(url: &str) -> Result<Db, StoreError> {
    let server = Server::of(url, options(url)?)?;
    match server.try_connect(ACQUIRE_TIMEOUT).await {
        // It is being started: the pool tries again.
        Err(StoreError::Unavailable { source, .. }) if source.has_code() => {}
        reached => reached?,
    }
    let pool = AnyPoolOptions::new()
        .max_connections(POSTGRES_CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .after_connect(|connection, _| {
            Box::pin(async move {
                connection.execute(POSTGRES_SESSION).await?;
                Ok(())
            })
        })
        .connect_with(options(url)?)
        .await
        .map_err(|error| classify(&error, "database", "connect to PostgreSQL").at(&server.address))?;
    Ok(Db {
        engine: Engine::Postgres,
        read: pool.clone(),
        write: pool,
        log: None,
        server: Some(Arc::new(server)),
    })
}

async fn connect_sqlite(path: &str) -> Result<Db, StoreError> {
    if path.is_empty() || path.starts_with(':') {
        return Err(StoreError::Address {
            why: "sqlite: must be followed by the path of a file",
        });
    }
    let _opening = SQLITE_OPENING.lock().await;
    let path = sqlite_file(Path::new(path)).map_err(|error| classify(&sqlx::Error::Io(error), "file", CREATE_FILE))?;
    let url = sqlite_url(&path)?;
    // The writer first: it switches a new file to write-ahead logging.
    let write = sqlite_pool(&url, 1, SQLITE_WRITER).await?;
    let read = sqlite_pool(&url, SQLITE_READERS, SQLITE_READER).await?;
    Ok(Db {
        engine: Engine::Sqlite,
        read,
        write,
        log: Some(Arc::new(WriteAheadLog::of(&path))),
        server: None,
    })
}

async fn sqlite_pool(url: &str, connections: u32, pragmas: &'static str) -> Result<AnyPool, StoreError> {
    AnyPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // The connection is a thread of this process: it cannot be lost, and a test query would double the cost.
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .after_connect(move |connection, _| {
            Box::pin(async move {
                connection.execute(pragmas).await?;
                Ok(())
            })
        })
        .connect_with(options(url)?)
        .await
        .map_err(|error| classify(&error, "database", "open the SQLite file"))
}

fn options(url: &str) -> Result<AnyConnectOptions, StoreError> {
    let options: AnyConnectOptions = url.parse().map_err(|_| StoreError::Address { why: "not a URL" })?;
    // Our own logs name the operation; formatting each statement as well would cost time in every create request.
    Ok(options.disable_statement_logging())
}

/// Creates the file if it does not exist, readable by its owner only, and returns its canonical path.
fn sqlite_file(path: &Path) -> io::Result<PathBuf> {
    match new_file(path) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    path.canonicalize()
}

/// The URL of a file for the driver, which interprets `?` and `#` and decodes percent escapes.
fn sqlite_url(path: &Path) -> Result<String, StoreError> {
    let path = path.to_str().ok_or(StoreError::Address {
        why: "the path of the file is not UTF-8",
    })?;
    Ok(format!("sqlite://{}", percent::encode_path(path)))
}
