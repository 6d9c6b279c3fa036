//! Concurrent writers.

use sqlx::{Executor, Row};
use store::error::StoreError;
use store::records::{MetricChunk, RecordBatch};
use store::{Change, Store};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, sandbox_id, team, team_id, template, template_id};

const WRITERS: u32 = 16;

pub(crate) async fn one_writer_wins_each_version(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    for version in row.version..row.version + 20 {
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let (store, id) = (store.clone(), row.id.clone());
            writers.spawn(async move {
                store
                    .of_node(node_id(1), FIRST_EPOCH)
                    .sandbox_set_end(&id, Some(version), 9)
                    .await
                    .unwrap()
            });
        }
        let outcomes = writers.join_all().await;
        let applied = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Change::Applied(_)))
            .count();
        let stale = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Change::Stale))
            .count();
        assert_eq!((applied, stale), (1, 15));
    }
    let last = store.sandbox_by_id(&row.id).await.unwrap().unwrap();
    assert_eq!(last.version, row.version + 20);
    store.close().await;
}

pub(crate) async fn extensions_never_shorten(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    let mut writers = JoinSet::new();
    for n in 0..WRITERS {
        let (store, id) = (store.clone(), row.id.clone());
        let end_us = row.end_us + i64::from(n * 7 % WRITERS);
        writers.spawn(async move {
            let after = store
                .of_node(node_id(1), FIRST_EPOCH)
                .sandbox_extend_end(&id, end_us)
                .await
                .unwrap()
                .applied()
                .unwrap();
            assert!(after.end_us >= end_us);
        });
    }
    writers.join_all().await;
    let last = store.sandbox_by_id(&row.id).await.unwrap().unwrap();
    assert_eq!(last.end_us, row.end_us + i64::from(WRITERS) - 1);
    store.close().await;
}

/// Two stores on one database, like `ringfence key create` beside a running platform. Neither may cause errors in the
/// other.
pub(crate) async fn two_processes_write_at_the_same_time(db: Database) {
    const ROUNDS: u32 = 20;
    let stores = [db.open().await, db.open().await];
    team(&stores[0], 1).await;
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = stores[usize::try_from(writer % 2).unwrap()].clone();
        writers.spawn(async move {
            for round in 0..ROUNDS {
                let n = writer * ROUNDS + round;
                running(&store, sandbox(n, 1), i64::from(n)).await;
                store
                    .template_insert(&template(n, None, &[&format!("alias{n}")]))
                    .await
                    .unwrap();
                assert!(store.sandbox_by_id(&sandbox_id(n)).await.unwrap().is_some());
                if round % 2 == 0 {
                    store
                        .of_node(node_id(1), FIRST_EPOCH)
                        .sandbox_delete(&sandbox_id(n))
                        .await
                        .unwrap()
                        .unwrap();
                }
            }
        });
    }
    writers.join_all().await;
    for store in &stores {
        assert_eq!(
            store
                .of_node(node_id(1), FIRST_EPOCH)
                .sandbox_list_live()
                .await
                .unwrap()
                .len(),
            160
        );
        assert!(store.template_by_id(&template_id(319)).await.unwrap().is_some());
        store.close().await;
    }
}

/// A client that disconnects cancels its request at any point, also within a transaction.
pub(crate) async fn cancelled_changes_leave_no_lock(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for n in 0..100 {
        let task = tokio::spawn(insert_template(store.clone(), n));
        for _ in 0..n % 10 {
            tokio::task::yield_now().await;
        }
        task.abort();
        let _ = task.await;
    }
    for n in 0..100 {
        let template = store.template_by_id(&template_id(n)).await.unwrap();
        // The template has both aliases or does not exist.
        assert!(template.is_none_or(|row| row.aliases.len() == 2));
    }
    let fresh = template(1000, None, &["fresh"]);
    store.template_insert(&fresh).await.unwrap();
    assert_eq!(store.template_by_id(&fresh.id).await.unwrap(), Some(fresh));
    store.close().await;
}

async fn insert_template(store: Store, n: u32) {
    let aliases = [format!("a{n}"), format!("b{n}")];
    store
        .template_insert(&template(n, None, &[&aliases[0], &aliases[1]]))
        .await
        .unwrap();
}

/// More than there are connections: if each cut lost one, none would be left at the end.
const CUTS: u32 = 20;

/// An administrator, a restart or a network failure ends a connection in the middle of a transaction. Only PostgreSQL
/// has connections that another process can end.
pub(crate) async fn a_connection_lost_in_a_transaction_is_replaced(db: Database) {
    if db.file.is_some() {
        return;
    }
    let store = db.open().await;
    team(&store, 1).await;
    let batch = |at_us| RecordBatch {
        chunks: vec![MetricChunk {
            team_id: team_id(1),
            sandbox_id: sandbox_id(1),
            from_us: at_us,
            to_us: at_us,
            samples: "x".to_owned(),
        }],
        ..RecordBatch::default()
    };
    let mut admin = db.raw().await;
    for cut in 0..CUTS {
        // The transaction begins, and waits for the lock at its first row.
        admin
            .execute("BEGIN; LOCK TABLE sandbox_metrics IN ACCESS EXCLUSIVE MODE")
            .await
            .unwrap();
        let writing = tokio::spawn({
            let (store, batch) = (store.clone(), batch(i64::from(cut)));
            async move { store.records_write(&batch).await }
        });
        loop {
            let ended = sqlx::query(
                "SELECT CAST(COUNT(*) FILTER (WHERE pg_terminate_backend(pid)) AS BIGINT) AS ended FROM pg_locks \
                 WHERE NOT granted AND relation = CAST('sandbox_metrics' AS regclass)",
            )
            .fetch_one(&mut admin)
            .await
            .unwrap();
            if ended.get::<i64, _>("ended") > 0 {
                break;
            }
            tokio::task::yield_now().await;
        }
        admin.execute("ROLLBACK").await.unwrap();
        let error = writing.await.unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    }
    for n in 0..CUTS {
        store.records_write(&batch(i64::from(1000 + n))).await.unwrap();
    }
    let chunks = store
        .metric_list(&team_id(1), &sandbox_id(1), 0, i64::MAX)
        .await
        .unwrap();
    assert_eq!(chunks.len(), usize::try_from(CUTS).unwrap());
    store.close().await;
}
