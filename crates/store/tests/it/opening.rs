//! Opening, migrating, reopening.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use sqlx::Row;
use store::Store;
use store::error::StoreError;
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::{running, sandbox, team};

pub(crate) async fn many_open_a_new_database_at_once(db: Database) {
    let mut openings = JoinSet::new();
    for _ in 0..8 {
        let url = db.url.clone();
        openings.spawn(async move { Store::open(&url).await.unwrap() });
    }
    let stores = openings.join_all().await;
    team(&stores[0], 1).await;
    for store in &stores {
        assert_eq!(store.team_list().await.unwrap().len(), 1);
        store.close().await;
    }
}

pub(crate) async fn a_second_migration_changes_nothing(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    store.close().await;
    let again = db.open().await;
    assert_eq!(again.sandbox_by_id(&row.id).await.unwrap(), Some(row));
    assert_eq!(again.team_list().await.unwrap().len(), 1);
    let versions = sqlx::query("SELECT version FROM schema_versions")
        .fetch_all(&mut db.raw().await)
        .await
        .unwrap();
    let versions: Vec<i64> = versions.iter().map(|row| row.get("version")).collect();
    assert_eq!(versions, [1]);
    again.close().await;
}

pub(crate) async fn a_newer_schema_is_refused(db: Database) {
    db.open().await.close().await;
    sqlx::raw_sql("INSERT INTO schema_versions (version) VALUES (1000)")
        .execute(&mut db.raw().await)
        .await
        .unwrap();
    let error = Store::open(&db.url).await.unwrap_err();
    assert!(
        matches!(error, StoreError::SchemaTooNew { found: 1000, .. }),
        "{error:?}"
    );
}

pub(crate) async fn rows_survive_a_drop_without_close(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    if let Some(file) = &db.file {
        // What lies on disk at this moment is what a kill of the process would leave.
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("copy.db");
        fs::copy(file, &copy).unwrap();
        fs::copy(file.with_extension("db-wal"), copy.with_extension("db-wal")).unwrap();
        let found = Store::open(&format!("sqlite:{}", copy.display())).await.unwrap();
        assert_eq!(found.sandbox_by_id(&row.id).await.unwrap().as_ref(), Some(&row));
        found.close().await;
    }
    drop(store);
    let again = db.open().await;
    assert_eq!(again.sandbox_by_id(&row.id).await.unwrap(), Some(row));
    again.close().await;
}

/// The portable subset, checked against the catalogue of each engine.
pub(crate) async fn columns_are_text_or_bigint(db: Database) {
    let store = db.open().await;
    let sql = if db.file.is_some() {
        "SELECT lower(c.type) AS kind, m.name || '.' || c.name AS name \
         FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
    } else {
        "SELECT CAST(data_type AS TEXT) AS kind, CAST(table_name || '.' || column_name AS TEXT) AS name \
         FROM information_schema.columns WHERE table_schema = 'public'"
    };
    let columns = sqlx::query(sql).fetch_all(&mut db.raw().await).await.unwrap();
    assert!(columns.len() > 60, "{}", columns.len());
    for column in columns {
        let (kind, name): (String, String) = (column.get("kind"), column.get("name"));
        assert!(kind == "text" || kind == "bigint", "{name} is {kind}");
    }
    store.close().await;
}

#[tokio::test]
async fn addresses_of_no_known_form_are_refused() {
    for url in [
        "",
        "mysql://x",
        "sqlite:",
        "sqlite::memory:",
        "sqlite://",
        "/tmp/x",
        "postgres://[",
    ] {
        let error = Store::open(url).await.unwrap_err();
        assert!(matches!(error, StoreError::Address { .. }), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn an_unreachable_database_is_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/no/such/dir/x.db", dir.path().display());
    let error = Store::open(&url).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn sqlite_files_are_private_and_any_path_will_do() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("a b%20?c#d &é");
    fs::create_dir(&odd).unwrap();
    let file = odd.join("x?mode=ro.db");
    let store = Store::open(&format!("sqlite:{}", file.display())).await.unwrap();
    team(&store, 1).await;
    let mut names = Vec::new();
    for entry in fs::read_dir(&odd).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(
            entry.metadata().unwrap().permissions().mode() & 0o777,
            0o600,
            "{entry:?}"
        );
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    assert_eq!(names, ["x?mode=ro.db", "x?mode=ro.db-shm", "x?mode=ro.db-wal"]);
    store.close().await;
    // A clean end folds the log into the file.
    assert_eq!(fs::read_dir(&odd).unwrap().count(), 1);
}
