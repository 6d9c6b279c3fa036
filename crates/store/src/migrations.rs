//! The schema, as numbered steps that are never edited once released.
//!
//! All missing steps run in one transaction under a lock: of several programs that start at the same time one migrates
//! and the others find nothing to do, and a crash leaves either the old schema or the new one.
//!
//! A step needs tables for itself, for a moment, and waits for whoever reads them for long, such as a copy of the database. On
//! PostgreSQL all statements of the running servers that come later wait behind it, so it waits for seconds, lets them go first, and
//! tries again.

use std::time::Duration;

use sqlx::Row;
use sqlx::any::AnyRow;

use crate::db::Db;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns};
use crate::slug::free_slug;
use crate::statement::{InTransaction as _, Transaction};

/// The steps, oldest first; the version of a step is its position, counted from 1.
const STEPS: &[&str] = &[
    include_str!("migrations/0001_first.sql"),
    include_str!("migrations/0002_rest.sql"),
    include_str!("migrations/0003_records.sql"),
    include_str!("migrations/0004_lists.sql"),
    include_str!("migrations/0005_nodes.sql"),
    include_str!("migrations/0006_injection_rules.sql"),
    include_str!("migrations/0007_secrets.sql"),
    include_str!("migrations/0008_builds.sql"),
    include_str!("migrations/0009_pause.sql"),
    include_str!("migrations/0010_templates.sql"),
    include_str!("migrations/0011_kept_disks.sql"),
    include_str!("migrations/0012_snapshots.sql"),
    include_str!("migrations/0013_forks.sql"),
    include_str!("migrations/0014_events.sql"),
    include_str!("migrations/0015_lease_epochs.sql"),
    include_str!("migrations/0016_joined_nodes.sql"),
    include_str!("migrations/0017_servers.sql"),
    include_str!("migrations/0018_draining.sql"),
    include_str!("migrations/0019_pause_draining.sql"),
    include_str!("migrations/0020_parcels.sql"),
    include_str!("migrations/0021_use.sql"),
    include_str!("migrations/0022_memory_keys.sql"),
    include_str!("migrations/0023_fork_memories.sql"),
];

const WHAT: &str = "migrate the schema";
const ROW: &str = "schema version";

/// How often the steps are tried that have to wait for others.
const TRIES: u32 = 12;
/// Pause before the steps are tried again.
const PAUSE: Duration = Duration::from_secs(2);

/// The oldest transaction of another connection, which a migration most likely waits for.
struct Oldest {
    process: i64,
    application: String,
    seconds: i64,
}

impl FromColumns for Oldest {
    const TABLE: &'static str = "pg_stat_activity";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            process: columns.int("process")?,
            application: columns.text("application")?,
            seconds: columns.int("seconds")?,
        })
    }
}

/// Brings the schema up to date.
pub(crate) async fn run(db: &Db) -> Result<(), StoreError> {
    for _ in 1..TRIES {
        match try_once(db).await {
            Err(StoreError::Unavailable { source, .. }) if source.is_of_lock() => warn_of_others(db).await,
            done => return done,
        }
        tokio::time::sleep(PAUSE).await;
    }
    try_once(db).await
}

/// Says what keeps the steps from being applied.
async fn warn_of_others(db: &Db) {
    let query = sqlx::query(
        "SELECT CAST(pid AS BIGINT) AS process, COALESCE(application_name, '') AS application, \
         CAST(EXTRACT(EPOCH FROM now() - xact_start) AS BIGINT) AS seconds FROM pg_stat_activity \
         WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid() \
         ORDER BY xact_start LIMIT 1",
    );
    let oldest: Result<Option<Oldest>, StoreError> = db.read_optional("find what a migration waits for", query).await;
    if let Ok(Some(oldest)) = oldest {
        tracing::warn!(
            process = oldest.process,
            application = oldest.application,
            seconds = oldest.seconds,
            "the migration of the database waits for a transaction of another connection, and is tried again: the oldest one is \
             that of this process of PostgreSQL"
        );
    } else {
        tracing::warn!("the migration of the database waits for a lock on a table, and is tried again");
    }
}

async fn try_once(db: &Db) -> Result<(), StoreError> {
    let known = i64::try_from(STEPS.len()).expect("there are few steps");
    let mut tx = db.begin(WHAT).await?;
    if let Some((lock, argument)) = db.engine.migration_lock() {
        // Another server may be changing the schema, for as long as that takes.
        sqlx::query(lock)
            .bind(argument)
            .execute(tx.without_bound())
            .await
            .map_err(|error| classify(&error, ROW, WHAT))?;
    }
    if let Some(bound) = db.engine.migration_lock_bound() {
        execute(&mut tx, sqlx::query(bound)).await?;
    }
    execute(
        &mut tx,
        sqlx::query("CREATE TABLE IF NOT EXISTS schema_versions (version BIGINT PRIMARY KEY)"),
    )
    .await?;
    let found = current(&mut tx).await?;
    if found > known {
        return Err(StoreError::SchemaTooNew { found, known });
    }
    for (version, step) in (1_i64..).zip(STEPS) {
        if version <= found {
            continue;
        }
        sqlx::raw_sql(*step)
            .execute(tx.without_bound())
            .await
            .map_err(|error| classify(&error, ROW, WHAT))?;
        let insert = sqlx::query("INSERT INTO schema_versions (version) VALUES ($1)").bind(version);
        execute(&mut tx, insert).await?;
    }
    name_teams(&mut tx).await?;
    tx.commit().await.map_err(|error| classify(&error, ROW, WHAT))
}

/// Gives teams of versions before step 8 their namespaces.
async fn name_teams(tx: &mut Transaction) -> Result<(), StoreError> {
    let teams = sqlx::query("SELECT id, name FROM teams WHERE slug IS NULL ORDER BY created_us, id")
        .all_in(tx)
        .await
        .map_err(|error| classify(&error, ROW, WHAT))?;
    for team in teams {
        let text = |column| {
            team.try_get::<String, _>(column)
                .map_err(|_| StoreError::Corrupt { table: "teams", column })
        };
        let (id, name) = (text("id")?, text("name")?);
        let slug = free_slug(tx, &id, &name).await?;
        let update = sqlx::query("UPDATE teams SET slug = $2 WHERE id = $1")
            .bind(id)
            .bind(slug);
        execute(tx, update).await?;
    }
    Ok(())
}

async fn execute(tx: &mut Transaction, query: crate::statement::Query) -> Result<(), StoreError> {
    query
        .execute_in(tx)
        .await
        .map_err(|error| classify(&error, ROW, WHAT))?;
    Ok(())
}

async fn current(tx: &mut Transaction) -> Result<i64, StoreError> {
    let row: AnyRow = sqlx::query("SELECT COALESCE(MAX(version), 0) AS version FROM schema_versions")
        .one_in(tx)
        .await
        .map_err(|error| classify(&error, ROW, WHAT))?;
    row.try_get("version").map_err(|_| StoreError::Corrupt {
        table: "schema_versions",
        column: "version",
    })
}
