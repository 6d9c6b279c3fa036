//! Idempotency keys.

use store::error::StoreError;
use store::idempotency::{Claim, IdempotencyRow, NewIdempotencyKey, StoredResponse};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, node_id, sandbox_id, team, team_id};

const EXPIRES_US: i64 = 1_000;

/// A claim of `key` for sandbox `n` by team `team`, at `created_us`.
fn new(team: u32, key: &str, n: u32, created_us: i64) -> NewIdempotencyKey {
    NewIdempotencyKey {
        team_id: team_id(team),
        key: key.to_owned(),
        body_hash: format!("hash {n}"),
        sandbox_id: sandbox_id(n),
        created_us,
        expires_us: created_us + EXPIRES_US,
    }
}

fn row(new: NewIdempotencyKey, response: Option<StoredResponse>) -> IdempotencyRow {
    IdempotencyRow {
        team_id: new.team_id,
        key: new.key,
        body_hash: new.body_hash,
        sandbox_id: new.sandbox_id,
        node_id: Some(node_id(1)),
        response,
        created_us: new.created_us,
        expires_us: new.expires_us,
    }
}

fn created() -> StoredResponse {
    StoredResponse {
        status: 201,
        json: "{}".to_owned(),
    }
}

pub(crate) async fn claim_complete_and_abandon(db: Database) {
    let store = db.open().await;
    let (one, _) = (team(&store, 1).await, team(&store, 2).await);
    let first = new(1, "key", 1, 0);
    assert_eq!(store.idempotency_by_key(&one, "key").await.unwrap(), None);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&first)
            .await
            .unwrap(),
        Claim::Acquired
    );
    // The same key of another team is another key.
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&new(2, "key", 2, 0))
            .await
            .unwrap(),
        Claim::Acquired
    );
    let running = row(first.clone(), None);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&new(1, "key", 3, 5))
            .await
            .unwrap(),
        Claim::Existing(running.clone())
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_list_in_progress()
            .await
            .unwrap(),
        [running, row(new(2, "key", 2, 0), None)]
    );

    assert!(
        store
            .idempotency_complete(&one, "key", &sandbox_id(1), &created())
            .await
            .unwrap()
    );
    let done = row(first, Some(created()));
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&new(1, "key", 3, 5))
            .await
            .unwrap(),
        Claim::Existing(done.clone())
    );
    assert!(
        store
            .idempotency_abandon(&team_id(2), "key", &sandbox_id(2))
            .await
            .unwrap()
    );
    assert!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_list_in_progress()
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&new(2, "key", 4, 6))
            .await
            .unwrap(),
        Claim::Acquired
    );

    // The same after a restart.
    store.close().await;
    let store = db.open().await;
    assert_eq!(store.idempotency_by_key(&one, "key").await.unwrap(), Some(done));
    let error = store
        .of_node(node_id(1), FIRST_EPOCH)
        .idempotency_claim(&new(3, "key", 1, 0))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Dangling { .. }), "{error:?}");
    store.close().await;
}

pub(crate) async fn one_of_many_concurrent_claims_succeeds(db: Database) {
    let stores = [db.open().await, db.open().await];
    team(&stores[0], 1).await;
    for round in 0..20 {
        let key = format!("key {round}");
        let mut claims = JoinSet::new();
        for n in 0..16_u32 {
            let store = stores[usize::try_from(n % 2).unwrap()].clone();
            let new = new(1, &key, n, 0);
            claims.spawn(async move {
                (
                    n,
                    store
                        .of_node(node_id(1), FIRST_EPOCH)
                        .idempotency_claim(&new)
                        .await
                        .unwrap(),
                )
            });
        }
        let claims = claims.join_all().await;
        let winners: Vec<u32> = claims
            .iter()
            .filter(|(_, claim)| *claim == Claim::Acquired)
            .map(|(n, _)| *n)
            .collect();
        assert_eq!(winners.len(), 1, "{claims:?}");
        let winner = Claim::Existing(row(new(1, &key, winners[0], 0), None));
        assert!(
            claims.iter().all(|(n, claim)| *n == winners[0] || *claim == winner),
            "{claims:?}"
        );
    }
    for store in stores {
        store.close().await;
    }
}

pub(crate) async fn expired_claims_can_be_acquired_again(db: Database) {
    let store = db.open().await;
    let one = team(&store, 1).await;
    for (n, key) in [(1, "a"), (2, "b"), (3, "c")] {
        let claim = new(1, key, n, i64::from(n));
        assert_eq!(
            store
                .of_node(node_id(1), FIRST_EPOCH)
                .idempotency_claim(&claim)
                .await
                .unwrap(),
            Claim::Acquired
        );
    }
    store
        .idempotency_complete(&one, "a", &sandbox_id(1), &created())
        .await
        .unwrap();
    // One microsecond before the expiry, and exactly at it.
    let late = new(1, "a", 4, EXPIRES_US);
    let present = store
        .of_node(node_id(1), FIRST_EPOCH)
        .idempotency_claim(&late)
        .await
        .unwrap();
    assert_eq!(present, Claim::Existing(row(new(1, "a", 1, 1), Some(created()))));
    let late = new(1, "a", 4, 1 + EXPIRES_US);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&late)
            .await
            .unwrap(),
        Claim::Acquired
    );
    assert_eq!(
        store.idempotency_by_key(&one, "a").await.unwrap(),
        Some(row(late, None))
    );

    assert_eq!(store.idempotency_purge(1 + EXPIRES_US, 10).await.unwrap(), 0);
    assert_eq!(store.idempotency_purge(3 + EXPIRES_US, 1).await.unwrap(), 1);
    assert_eq!(store.idempotency_by_key(&one, "b").await.unwrap(), None);
    assert_eq!(store.idempotency_purge(3 + EXPIRES_US, 10).await.unwrap(), 1);
    assert!(store.idempotency_by_key(&one, "a").await.unwrap().is_some());
    store.close().await;
}

pub(crate) async fn former_owners_cannot_change_a_claim(db: Database) {
    let store = db.open().await;
    let one = team(&store, 1).await;
    let claim = store
        .of_node(node_id(1), FIRST_EPOCH)
        .idempotency_claim(&new(1, "key", 1, 0))
        .await
        .unwrap();
    assert_eq!(claim, Claim::Acquired);
    let taken = new(1, "key", 2, EXPIRES_US);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .idempotency_claim(&taken)
            .await
            .unwrap(),
        Claim::Acquired
    );
    let (old, new_one) = (sandbox_id(1), sandbox_id(2));
    assert!(!store.idempotency_complete(&one, "key", &old, &created()).await.unwrap());
    assert!(!store.idempotency_abandon(&one, "key", &old).await.unwrap());
    assert_eq!(
        store.idempotency_by_key(&one, "key").await.unwrap(),
        Some(row(taken, None))
    );
    assert!(
        store
            .idempotency_complete(&one, "key", &new_one, &created())
            .await
            .unwrap()
    );
    // A completed claim does not change.
    let other = StoredResponse {
        status: 500,
        json: "[]".to_owned(),
    };
    assert!(!store.idempotency_complete(&one, "key", &new_one, &other).await.unwrap());
    assert!(!store.idempotency_abandon(&one, "key", &new_one).await.unwrap());
    let row = store.idempotency_by_key(&one, "key").await.unwrap().unwrap();
    assert_eq!(row.response, Some(created()));
    store.close().await;
}
