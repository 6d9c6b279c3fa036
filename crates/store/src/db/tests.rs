//! What is left of a connection when the disk was full. SQLite's own bound on pages stands for the disk: it is set on the
//! very connection that the store writes with, and goes when that connection goes.

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

/// A batch of one entry of that many bytes: the kind of statement that SQLite takes the whole transaction back for.
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

/// Lets the database become no larger than it is, as the connection sees it that writes now.
async fn fill(store: &Store) {
    // SQLite never sets the bound below the present size.
    sqlx::raw_sql("PRAGMA max_page_count = 1")
        .execute(&store.db.write)
        .await
        .unwrap();
}

async fn make_room(store: &Store) {
    sqlx::raw_sql("PRAGMA max_page_count = 1000000")
        .execute(&store.db.write)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_full_disk_costs_a_transaction_and_none_that_follow() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for round in 0..20 {
        fill(&store).await;
        let error = store.records_write(&batch(round, 100_000)).await.unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
        make_room(&store).await;
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
async fn a_commit_that_fails_leaves_no_transaction() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let mut tx = store.db.begin("test").await.unwrap();
    // A foreign key that is checked at the end only makes the commit itself fail.
    sqlx::raw_sql(
        "PRAGMA defer_foreign_keys = ON; INSERT INTO users (id, team_id, name, created_us) VALUES ('u', 'none', 'n', 1)",
    )
    .execute(&mut *tx)
    .await
    .unwrap();
    tx.commit().await.unwrap_err();
    store.records_write(&batch(1, 10)).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn single_statements_tell_of_a_full_disk_and_go_on_after_it() {
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
    make_room(&store).await;
    store.team_insert(&team).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn space_is_held_beside_the_lengths_of_files_and_again_once_it_is_used_up() {
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
    // Locks of SQLite outlive it: another process finds the database in use, and this one goes on writing.
    for round in 0..8 {
        store.records_write(&batch(round, 1 << 20)).await.unwrap();
    }
    // SQLite moves the log into the file, which grows into what is held for it.
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
