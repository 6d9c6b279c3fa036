//! Statements: on a connection of their own, or in a transaction, and how long PostgreSQL may take to answer them.
//!
//! A server that is lost without a word (its machine is gone, its process is stopped) leaves connections that look open until
//! the kernel gives up on them, after a quarter of an hour. Whoever waits on one would wait as long, and the connection would
//! be missing in the pool when the database is back. So each statement has a time, and a connection that did not answer
//! in it, or whose caller has gone meanwhile, is closed instead of returned. What became of the statement is not known then.
//!
//! SQLite is a file: it answers, or its own time for other writers is over.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use sqlx::any::{AnyArguments, AnyQueryResult, AnyRow};
use sqlx::pool::PoolConnection;
use sqlx::{Any, AnyConnection, AnyPool, Executor as _};

use crate::dialect::Engine;

/// A statement with its arguments.
pub(crate) type Query = sqlx::query::Query<'static, Any, AnyArguments>;

/// What a statement does on its connection.
pub(crate) type Answer<'c, T> = Pin<Box<dyn Future<Output = Result<T, sqlx::Error>> + Send + 'c>>;

/// Waits for an answer, for as long as it may take.
pub(crate) async fn within<T>(
    bound: Option<Duration>,
    answer: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match bound {
        None => answer.await,
        Some(bound) => tokio::time::timeout(bound, answer)
            .await
            .unwrap_or_else(|_| Err(late(bound))),
    }
}

fn late(bound: Duration) -> sqlx::Error {
    let why = format!("no answer within {} s", bound.as_secs());
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, why))
}

/// Runs one statement on a connection of a pool.
pub(crate) async fn single<T>(
    engine: Engine,
    pool: &AnyPool,
    run: impl for<'c> FnOnce(&'c mut AnyConnection) -> Answer<'c, T>,
) -> Result<T, sqlx::Error> {
    let mut lent = Lent {
        connection: pool.acquire().await?,
        bound: engine.answer(),
        is_answered: false,
    };
    let bound = lent.bound;
    let answer = within(bound, run(&mut lent.connection)).await;
    // Also an error is an answer, unless it is that there was none.
    lent.is_answered = !matches!(&answer, Err(sqlx::Error::Io(error)) if error.kind() == io::ErrorKind::TimedOut);
    answer
}

/// A connection while a statement runs on it.
struct Lent {
    connection: PoolConnection<Any>,
    bound: Option<Duration>,
    is_answered: bool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.bound.is_some() && !self.is_answered {
            self.connection.close_on_drop();
        }
    }
}

/// A transaction that may write. Its connection returns to the pool after a successful commit, and is closed in every
/// other case, which rolls the transaction back: after an error only the engine knows the state of a transaction.
/// SQLite rolls some transactions back by itself (a full disk, an I/O error) and refuses the `ROLLBACK` that follows,
/// after which a counter of open transactions would stay wrong. So there is no counter, and the driver's own
/// transactions are not used.
#[derive(Debug)]
pub(crate) struct Transaction {
    connection: PoolConnection<Any>,
    bound: Option<Duration>,
    is_open: bool,
}

impl Transaction {
    pub(crate) async fn begin(engine: Engine, pool: &AnyPool) -> Result<Self, sqlx::Error> {
        let bound = engine.answer();
        // Marked open before the statement is sent: a caller cancelled while it runs leaves a transaction as well.
        let mut tx = Self {
            connection: pool.acquire().await?,
            bound,
            is_open: true,
        };
        within(bound, tx.connection.execute(engine.begin())).await?;
        Ok(tx)
    }

    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        within(self.bound, self.connection.execute("COMMIT")).await?;
        self.is_open = false;
        Ok(())
    }

    /// The connection, for statements that may take any time: changes of the schema.
    pub(crate) fn without_bound(&mut self) -> &mut AnyConnection {
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

/// A statement that runs in a transaction.
pub(crate) trait InTransaction {
    /// Runs a statement that returns no rows.
    async fn execute_in(self, tx: &mut Transaction) -> Result<AnyQueryResult, sqlx::Error>;

    /// Runs a statement that returns any number of rows.
    async fn all_in(self, tx: &mut Transaction) -> Result<Vec<AnyRow>, sqlx::Error>;

    /// Runs a statement that returns a row or none.
    async fn optional_in(self, tx: &mut Transaction) -> Result<Option<AnyRow>, sqlx::Error>;

    /// Runs a statement that returns a row.
    async fn one_in(self, tx: &mut Transaction) -> Result<AnyRow, sqlx::Error>;
}

impl InTransaction for Query {
    async fn execute_in(self, tx: &mut Transaction) -> Result<AnyQueryResult, sqlx::Error> {
        within(tx.bound, self.execute(&mut *tx.connection)).await
    }

    async fn all_in(self, tx: &mut Transaction) -> Result<Vec<AnyRow>, sqlx::Error> {
        within(tx.bound, self.fetch_all(&mut *tx.connection)).await
    }

    async fn optional_in(self, tx: &mut Transaction) -> Result<Option<AnyRow>, sqlx::Error> {
        within(tx.bound, self.fetch_optional(&mut *tx.connection)).await
    }

    async fn one_in(self, tx: &mut Transaction) -> Result<AnyRow, sqlx::Error> {
        within(tx.bound, self.fetch_one(&mut *tx.connection)).await
    }
}
