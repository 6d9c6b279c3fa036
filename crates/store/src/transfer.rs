//! Moving a platform: all rows of a file of SQLite to an empty PostgreSQL database, and what of a platform becomes that of a server
//! when its data directory becomes that of a node.

use model::id::NodeId;
use sqlx::any::AnyRow;
use sqlx::{AssertSqlSafe, Row as _};

use crate::Store;
use crate::dialect::Engine;
use crate::error::{StoreError, classify};
use crate::row::storable;
use crate::statement::InTransaction as _;

/// All tables, each after those that it refers to. The version of the schema is not among them: both databases have the same.
const TABLES: &[&str] = &[
    "teams",
    "users",
    "api_keys",
    "access_keys",
    "access_tokens",
    "templates",
    "template_aliases",
    "builds",
    "template_tags",
    "build_logs",
    "layer_cache",
    "template_files",
    "sandboxes",
    "idempotency_keys",
    "sandbox_records",
    "sandbox_logs",
    "sandbox_metrics",
    "nodes",
    "injection_rules",
    "platform_secrets",
    "secrets",
    "blob_removals",
    "lifecycle_events",
    "webhooks",
    "webhook_deliveries",
    "webhook_attempts",
    "team_usage",
    "joined_nodes",
    "node_tokens",
    "servers",
    "fork_memories",
];
/// Rows that are read and inserted by one statement.
const BATCH: usize = 200;

/// Why rows were not moved. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// A database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The databases are of other kinds than these.
    #[error("rows are moved from a file of SQLite to PostgreSQL")]
    Kind,
    /// The database to fill has rows.
    #[error("the database has rows already, in the table {table}: name an empty one")]
    NotEmpty {
        /// The table.
        table: &'static str,
    },
    /// A server has the lease of the node.
    #[error("a platform uses the database: stop it first; sandboxes keep running")]
    InUse,
}

/// A column, and whether it holds numbers and not text.
struct Column {
    name: String,
    is_number: bool,
}

const WHAT: &str = "move the rows of a database";

fn failed(error: &sqlx::Error) -> StoreError {
    classify(error, "row", WHAT)
}

impl Store {
    /// Inserts all rows of a file of SQLite that nothing writes to meanwhile into this database, which must be an empty one of
    /// PostgreSQL, and returns how many: all or none.
    ///
    /// # Errors
    /// When this database has rows, the databases are of other kinds, or one fails.
    pub async fn fill_from(&self, file: &Self) -> Result<u64, TransferError> {
        if (self.db.engine, file.db.engine) != (Engine::Postgres, Engine::Sqlite) {
            return Err(TransferError::Kind);
        }
        let mut tx = self.db.begin(WHAT).await?;
        for table in TABLES {
            let found = sqlx::query(AssertSqlSafe(format!("SELECT 1 FROM {table} LIMIT 1")));
            if found
                .optional_in(&mut tx)
                .await
                .map_err(|error| failed(&error))?
                .is_some()
            {
                return Err(TransferError::NotEmpty { table });
            }
        }
        let mut moved = 0;
        for table in TABLES {
            let columns = file.columns(table).await?;
            let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
            let names = names.join(", ");
            let select =
                format!("SELECT rowid AS at_row, {names} FROM {table} WHERE rowid > $1 ORDER BY rowid LIMIT {BATCH}");
            let mut after = i64::MIN;
            loop {
                let query = sqlx::query(AssertSqlSafe(select.clone())).bind(after);
                let rows = query.fetch_all(&file.db.read).await.map_err(|error| failed(&error))?;
                let Some(last) = rows.last() else { break };
                after = last.try_get("at_row").map_err(|error| failed(&error))?;
                let insert = insert(table, &names, &columns, &rows)?;
                moved += insert
                    .execute_in(&mut tx)
                    .await
                    .map_err(|error| failed(&error))?
                    .rows_affected();
            }
        }
        tx.commit().await.map_err(|error| failed(&error))?;
        Ok(moved)
    }

    async fn columns(&self, table: &'static str) -> Result<Vec<Column>, StoreError> {
        let query = sqlx::query("SELECT name, lower(type) AS kind FROM pragma_table_info($1) ORDER BY cid").bind(table);
        let rows = query.fetch_all(&self.db.read).await.map_err(|error| failed(&error))?;
        let read = |row: &AnyRow| {
            let kind: String = row.try_get("kind")?;
            Ok(Column {
                name: row.try_get("name")?,
                is_number: kind == "bigint",
            })
        };
        rows.iter()
            .map(read)
            .collect::<Result<_, sqlx::Error>>()
            .map_err(|error| failed(&error))
    }

    /// Makes the node of a platform one that has joined a server: that server has its builds and uploads from now on, and the
    /// sandboxes stay those of the node. Repeating it changes nothing more.
    ///
    /// # Errors
    /// When a server has the lease of the node, or the database fails.
    pub async fn node_separate(
        &self,
        node: &NodeId,
        name: &str,
        server: &NodeId,
        now_us: i64,
    ) -> Result<(), TransferError> {
        storable("host name", name)?;
        let time_us = self.lease_time_us(now_us).await?;
        if self.node_by_id(node).await?.is_some_and(|row| row.is_leased(time_us)) {
            return Err(TransferError::InUse);
        }
        let mut tx = self.db.begin(WHAT).await?;
        for sql in [
            "UPDATE builds SET node_id = $2 WHERE node_id = $1",
            "UPDATE layer_cache SET node_id = $2 WHERE node_id = $1",
            "UPDATE template_files SET node_id = $2 WHERE node_id = $1",
            "UPDATE idempotency_keys SET node_id = $2 WHERE node_id = $1",
            "UPDATE webhook_deliveries SET node_id = $2 WHERE node_id = $1",
        ] {
            let query = sqlx::query(sql).bind(node.as_str().to_owned());
            let query = query.bind(server.as_str().to_owned());
            query.execute_in(&mut tx).await.map_err(|error| failed(&error))?;
        }
        sqlx::query("INSERT INTO joined_nodes (id, name, joined_us) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING")
            .bind(node.as_str().to_owned())
            .bind(name.to_owned())
            .bind(now_us)
            .execute_in(&mut tx)
            .await
            .map_err(|error| failed(&error))?;
        tx.commit().await.map_err(|error| failed(&error))?;
        Ok(())
    }
}

/// The statement that inserts some rows.
fn insert(
    table: &str,
    names: &str,
    columns: &[Column],
    rows: &[AnyRow],
) -> Result<crate::statement::Query, StoreError> {
    let places = |row: usize| {
        let from = row * columns.len();
        let places: Vec<String> = (1..=columns.len()).map(|at| format!("${}", from + at)).collect();
        format!("({})", places.join(", "))
    };
    let values: Vec<String> = (0..rows.len()).map(places).collect();
    let mut query = sqlx::query(AssertSqlSafe(format!(
        "INSERT INTO {table} ({names}) VALUES {}",
        values.join(", ")
    )));
    for row in rows {
        for column in columns {
            let name = column.name.as_str();
            query = if column.is_number {
                query.bind(row.try_get::<Option<i64>, _>(name).map_err(|error| failed(&error))?)
            } else {
                query.bind(row.try_get::<Option<String>, _>(name).map_err(|error| failed(&error))?)
            };
        }
    }
    Ok(query)
}
