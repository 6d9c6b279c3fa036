//! An empty database for each case, on either engine.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::any::AnyConnectOptions;
use sqlx::{AnyConnection, AssertSqlSafe, Connection};
use store::Store;
use tempfile::TempDir;

use crate::postgres::Server;

/// An engine that creates databases. Dropping it removes all of them.
pub(crate) enum Databases {
    Sqlite(TempDir, AtomicU32),
    Postgres(Server, AtomicU32),
}

/// One empty database.
pub(crate) struct Database {
    /// The argument of `Store::open`.
    pub(crate) url: String,
    /// The file, on SQLite.
    pub(crate) file: Option<PathBuf>,
}

impl Databases {
    pub(crate) fn sqlite() -> Self {
        Self::Sqlite(tempfile::tempdir().unwrap(), AtomicU32::new(0))
    }

    pub(crate) fn postgres() -> Self {
        Self::Postgres(Server::start(), AtomicU32::new(0))
    }

    pub(crate) async fn create(&self) -> Database {
        sqlx::any::install_default_drivers();
        match self {
            Self::Sqlite(dir, count) => {
                let file = dir.path().join(format!("{}.db", count.fetch_add(1, Ordering::Relaxed)));
                Database {
                    url: format!("sqlite:{}", file.display()),
                    file: Some(file),
                }
            }
            Self::Postgres(server, count) => {
                let name = format!("case_{}", count.fetch_add(1, Ordering::Relaxed));
                let mut admin = AnyConnection::connect(&server.url("postgres")).await.unwrap();
                sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}")))
                    .execute(&mut admin)
                    .await
                    .unwrap();
                admin.close().await.unwrap();
                Database {
                    url: server.url(&name),
                    file: None,
                }
            }
        }
    }
}

impl Database {
    pub(crate) async fn open(&self) -> Store {
        Store::open(&self.url).await.unwrap()
    }

    /// A connection beside the store, to inspect and corrupt rows.
    pub(crate) async fn raw(&self) -> AnyConnection {
        let options: AnyConnectOptions = self.url.parse().unwrap();
        AnyConnection::connect_with(&options).await.unwrap()
    }
}
