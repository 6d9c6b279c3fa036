//! Many writers at once.

use model::lifecycle::State;
use store::{Change, Store};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::{running, sandbox, sandbox_id, team, template, template_id};

const WRITERS: u32 = 16;

pub(crate) async fn one_writer_wins_each_version(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    for version in row.version..row.version + 20 {
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let (store, id) = (store.clone(), row.id.clone());
            writers.spawn(async move { store.sandbox_set_state(&id, version, State::Running).await.unwrap() });
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
            let after = store.sandbox_extend_end(&id, end_us).await.unwrap().applied().unwrap();
            assert!(after.end_us >= end_us);
        });
    }
    writers.join_all().await;
    let last = store.sandbox_by_id(&row.id).await.unwrap().unwrap();
    assert_eq!(last.end_us, row.end_us + i64::from(WRITERS) - 1);
    store.close().await;
}

/// Two stores on one database are what `ringfence key create` beside a running platform is. Neither may see the other
/// as an error.
pub(crate) async fn two_processes_write_at_once(db: Database) {
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
                    store.sandbox_delete(&sandbox_id(n)).await.unwrap().unwrap();
                }
            }
        });
    }
    writers.join_all().await;
    for store in &stores {
        assert_eq!(store.sandbox_list_live().await.unwrap().len(), 160);
        assert!(store.template_by_id(&template_id(319)).await.unwrap().is_some());
        store.close().await;
    }
}

/// A client that hangs up cancels its request at any point, also within a transaction.
pub(crate) async fn abandoned_changes_leave_no_lock(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for n in 0..100 {
        let task = tokio::spawn(abandoned(store.clone(), n));
        for _ in 0..n % 10 {
            tokio::task::yield_now().await;
        }
        task.abort();
        let _ = task.await;
    }
    for n in 0..100 {
        let template = store.template_by_id(&template_id(n)).await.unwrap();
        // All of it or nothing.
        assert!(template.is_none_or(|row| row.aliases.len() == 2));
    }
    let fresh = template(1000, None, &["fresh"]);
    store.template_insert(&fresh).await.unwrap();
    assert_eq!(store.template_by_id(&fresh.id).await.unwrap(), Some(fresh));
    store.close().await;
}

async fn abandoned(store: Store, n: u32) {
    let aliases = [format!("a{n}"), format!("b{n}")];
    store
        .template_insert(&template(n, None, &[&aliases[0], &aliases[1]]))
        .await
        .unwrap();
}
