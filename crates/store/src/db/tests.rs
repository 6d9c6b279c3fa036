//! The state of connections after the disk was full. SQLite's limit on pages stands for a full disk: it is set on the
//! connection that the store writes with, and disappears when that connection is closed.

use std::collections::BTreeMap;

use model::id::TeamId;
use model::log::Level;

use crate::Store;
use crate::error::StoreError;
use crate::records::{LogOrder, LogQuery, LogRow, NewLogEntry, RecordBatch};
use crate::teams::TeamRow;

fn team_id() -> TeamId {
    "00000000-0000-4000-8000-000000000001".parse().unwrap()
}

/// A batch with one log entry of this many bytes. When the disk is full, SQLite rolls the whole transaction back for
/// it.
fn batch(seq: i64, bytes: usize) -> RecordBatch {
    RecordBatch {
        entries: vec![NewLogEntry {
            team_id: team_id(),
            sandbox_id: "i00000000000000000001".parse().unwrap(),
            row: LogRow {
                at_us: 1,
                seq,
                level: Level::Info,
                logger: "test".to_owned(),
                message: "x".repeat(bytes),
                fields: BTreeMap::new(),
            },
        }],
        ..RecordBatch::default()
    }
}

async fn open(dir: &tempfile::TempDir) -> Store {
    Store::open(&format!("sqlite:{}", dir.path().join("full.db").display()))
        .await
        .unwrap()
}

/// Keeps the database from growing, for the current write connection.
async fn fill(store: &Store) {
    // SQLite never sets the limit below the current size.
    sqlx::raw_sql("PRAGMA max_page_count = 1")
        .execute(&store.db.write)
        .await
        .unwrap();
}

async fn free_space(store: &Store) {
    sqlx::raw_sql("PRAGMA max_page_count = 1000000")
        .execute(&store.db.write)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_full_disk_fails_one_transaction_and_none_that_follow() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for round in 0..20 {
        fill(&store).await;
        let error = store.records_write(&batch(round, 100_000)).await.unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
        free_space(&store).await;
        store.records_write(&batch(round, 10)).await.unwrap();
    }
    let all = LogQuery {
        from_us: 0,
        to_us: i64::MAX,
        level: Level::Debug,
        search: String::new(),
        order: LogOrder::Forward,
        limit: 100,
    };
    let rows = store
        .log_list(&team_id(), &"i00000000000000000001".parse().unwrap(), &all)
        .await
        .unwrap();
    assert_eq!(rows.len(), 20);
    assert!(rows.iter().all(|row| row.message.len() == 10));
    store.close().await;
}

#[tokio::test]
async fn a_failed_commit_leaves_no_open_transaction() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let mut tx = store.db.begin("test").await.unwrap();
    // A deferred foreign key makes the commit itself fail.
    sqlx::raw_sql(
        "PRAGMA defer_foreign_keys = ON; INSERT INTO users (id, team_id, name, created_us) VALUES ('u', 'none', 'n', 1)",
    )
    .execute(tx.without_bound())
    .await
    .unwrap();
    tx.commit().await.unwrap_err();
    store.records_write(&batch(1, 10)).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn single_statements_report_a_full_disk_and_work_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    fill(&store).await;
    let team = TeamRow {
        id: team_id(),
        name: "n".repeat(100_000),
        created_us: 1,
    };
    let error = store.team_insert(&team).await.unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
    assert!(store.team_by_id(&team.id).await.unwrap().is_none());
    free_space(&store).await;
    store.team_insert(&team).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn the_reserve_leaves_file_lengths_alone_and_is_renewed_once_used_up() {
    use std::os::unix::fs::MetadataExt;

    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let beyond = |name: &str| {
        let file = std::fs::metadata(dir.path().join(name)).unwrap();
        (file.blocks() * 512).saturating_sub(file.len())
    };
    assert!(beyond("full.db") < 1 << 20);
    store.reserve_space().await.unwrap();
    assert!(beyond("full.db") >= 16 << 20);
    assert!(beyond("full.db-wal") >= 15 << 20);
    // SQLite's locks survive it: other processes still find the database in use, and this one can write.
    for round in 0..8 {
        store.records_write(&batch(round, 1 << 20)).await.unwrap();
    }
    // SQLite moves the log into the file, which grows into its reserve.
    sqlx::raw_sql("PRAGMA wal_checkpoint(PASSIVE)")
        .execute(&store.db.write)
        .await
        .unwrap();
    assert!(beyond("full.db") < 12 << 20);
    store.reserve_space().await.unwrap();
    assert!(beyond("full.db") >= 16 << 20);
    assert!(!store.db.is_low_on_space());
    store.close().await;
}
