//! Moving a platform to PostgreSQL, and its node to a process of its own.

use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use store::builds::{BuildStatus, FileRow};
use store::records::RecordBatch;
use store::transfer::TransferError;

use crate::database::{Database, Databases};
use crate::samples::{
    FIRST_EPOCH, build, build_id, node_id, running, sandbox, sandbox_id, team, team_id, template, template_id,
};

/// The number of rows of each table, by name.
async fn counts(db: &Database) -> Vec<(String, i64)> {
    let mut raw = db.raw().await;
    let tables = if db.file.is_some() {
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name"
    } else {
        "SELECT CAST(table_name AS TEXT) AS name FROM information_schema.tables WHERE table_schema = 'public' ORDER BY 1"
    };
    let mut counts = Vec::new();
    for table in sqlx::query(tables).fetch_all(&mut raw).await.unwrap() {
        let name: String = table.get("name");
        let sql = format!("SELECT COUNT(*) AS rows_of FROM {name}");
        let row = sqlx::query(AssertSqlSafe(sql)).fetch_one(&mut raw).await.unwrap();
        counts.push((name, row.get("rows_of")));
    }
    raw.close().await.unwrap();
    counts
}

#[tokio::test]
async fn a_file_moves_to_postgres_with_all_its_rows() {
    let (files, servers) = (Databases::sqlite(), Databases::postgres());
    let (from, to) = (files.create().await, servers.create().await);
    let file = from.open().await;
    team(&file, 1).await;
    file.template_insert(&template(1, Some(&team_id(1)), &["a"]))
        .await
        .unwrap();
    file.build_insert(&build(1, 1, BuildStatus::Ready, 1)).await.unwrap();
    for number in 1..=3 {
        running(&file, sandbox(number, 1), 5).await;
    }
    let batch = RecordBatch {
        entries: (0..450).map(|n| crate::records::entry(1, 1, n)).collect(),
        ..RecordBatch::default()
    };
    file.records_write(&batch).await.unwrap();
    // A table that nothing here fills has a row, too.
    file.node_token_insert("hash", 1, 2).await.unwrap();
    let store = to.open().await;
    let moved = store.fill_from(&file).await.unwrap();
    let (before, after) = (counts(&from).await, counts(&to).await);
    assert_eq!(before, after, "every table is moved");
    let of_schema = before.iter().find(|(name, _)| name == "schema_versions").unwrap().1;
    let all: i64 = before.iter().map(|(_, rows)| rows).sum();
    assert_eq!(moved, u64::try_from(all - of_schema).unwrap());
    for number in 1..=3 {
        let id = sandbox_id(number);
        assert_eq!(
            store.sandbox_by_id(&id).await.unwrap(),
            file.sandbox_by_id(&id).await.unwrap()
        );
    }
    // Once.
    let again = store.fill_from(&file).await;
    assert!(
        matches!(again, Err(TransferError::NotEmpty { table: "teams" })),
        "{again:?}"
    );
    let back = file.fill_from(&store).await;
    assert!(matches!(back, Err(TransferError::Kind)), "{back:?}");
    file.close().await;
    store.close().await;
}

pub(crate) async fn a_node_leaves_its_builds_to_a_server(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    store
        .template_insert(&template(1, Some(&team_id(1)), &["a"]))
        .await
        .unwrap();
    let mut built = build(1, 1, BuildStatus::Ready, 1);
    built.node_id = Some(node_id(1));
    store.build_insert(&built).await.unwrap();
    running(&store, sandbox(1, 1), 5).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    let file = FileRow {
        team_id: team_id(1),
        hash: "a".repeat(64),
        bytes: 1,
    };
    rows.template_file_put(&file, 1).await.unwrap();
    let mut lease = crate::nodes::lease_request(1, 1, 0).lease;
    lease.until_us = store.lease_time_us(100).await.unwrap() + 60_000_000;
    assert!(store.node_lease_renew(&node_id(1), &lease).await.unwrap());
    let separate = async || store.node_separate(&node_id(1), "a host", &node_id(7), 100).await;
    let refused = separate().await;
    assert!(matches!(refused, Err(TransferError::InUse)), "{refused:?}");
    assert!(store.node_lease_release(&node_id(1), &lease.owner).await.unwrap());
    for _ in 0..2 {
        separate().await.unwrap();
    }
    let row = store.build_by_id(&template_id(1), &build_id(1)).await.unwrap().unwrap();
    assert_eq!(row.node_id, Some(node_id(7)));
    let row = store.sandbox_by_id(&sandbox_id(1)).await.unwrap().unwrap();
    assert_eq!(row.node_id, Some(node_id(1)));
    assert_eq!(store.joined_node(&node_id(1)).await.unwrap().unwrap().name, "a host");
    assert_eq!(rows.template_file_total(&team_id(1)).await.unwrap(), 0);
    let server = store.of_node(node_id(7), FIRST_EPOCH);
    assert_eq!(server.template_file_total(&team_id(1)).await.unwrap(), 1);
    store.close().await;
}
