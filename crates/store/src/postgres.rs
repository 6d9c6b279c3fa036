//! A PostgreSQL server: where it is, and why it cannot be reached.

use std::fmt;
use std::time::Duration;

use sqlx::any::AnyConnectOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AnyConnection, Connection as _};

use crate::error::{Failure, StoreError, classify};

/// A PostgreSQL server. Its `Debug` shows no password.
pub(crate) struct Server {
    options: AnyConnectOptions,
    /// Its host and port, or its socket: never a user or a password.
    pub(crate) address: String,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.address)
    }
}

impl Server {
    /// The server of an address.
    ///
    /// # Errors
    /// When the address is not a URL.
    pub(crate) fn of(url: &str, options: AnyConnectOptions) -> Result<Self, StoreError> {
        let parsed: PgConnectOptions = url.parse().map_err(|_| StoreError::Address { why: "not a URL" })?;
        let (host, port) = (parsed.get_host(), parsed.get_port());
        Ok(Self {
            options,
            address: match parsed.get_socket() {
                Some(directory) => format!("the socket {}/.s.PGSQL.{port}", directory.display()),
                None if host.contains(':') => format!("[{host}]:{port}"),
                None => format!("{host}:{port}"),
            },
        })
    }

    /// Connects once, and not through a pool: that one tries again until the time of its callers is over, and then tells
    /// them that it is.
    pub(crate) async fn try_connect(&self, within: Duration) -> Result<(), StoreError> {
        const WHAT: &str = "connect to PostgreSQL";
        match tokio::time::timeout(within, AnyConnection::connect_with(&self.options)).await {
            Ok(Ok(connection)) => {
                let _ = connection.close().await;
                Ok(())
            }
            Ok(Err(error)) => Err(classify(&error, "database", WHAT).at(&self.address)),
            Err(_) => Err(StoreError::Unavailable {
                what: WHAT,
                source: Failure::new(&format!("no answer within {} s", within.as_secs())),
            }
            .at(&self.address)),
        }
    }
}
