//! Several nodes on one database.

use model::lifecycle::row::RowChange;
use store::idempotency::{Claim, NewIdempotencyKey};
use store::nodes::{Lease, LeaseOutcome, LeaseRequest, NodeRow};
use store::sandboxes::{SandboxFilter, SandboxQuery};
use store::{Change, Store};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::{node_id, running, sandbox, sandbox_id, team, uuid};

/// Duration of a lease, in microseconds.
const LEASE_US: i64 = 10;

fn lease(owner: u32, now_us: i64) -> Lease {
    Lease {
        owner: uuid(owner).parse().unwrap(),
        until_us: now_us + LEASE_US,
    }
}

/// The request of `owner` for the lease of `node` at `now_us`.
pub(crate) fn lease_request(node: u32, owner: u32, now_us: i64) -> LeaseRequest {
    LeaseRequest {
        node: node_id(node),
        name: format!("host {owner}"),
        lease: lease(owner, now_us),
        now_us,
        expired_us: now_us,
    }
}

async fn acquire(store: &Store, node: u32, owner: u32, now_us: i64) -> LeaseOutcome {
    store
        .node_lease_acquire(&lease_request(node, owner, now_us))
        .await
        .unwrap()
}

pub(crate) async fn a_lease_has_one_owner(db: Database) {
    let store = db.open().await;
    let row = |owner, now_us| NodeRow {
        id: node_id(1),
        name: format!("host {owner}"),
        created_us: 100,
        lease: Some(lease(owner, now_us)),
    };
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), None);
    assert_eq!(acquire(&store, 1, 1, 100).await, LeaseOutcome::Acquired);
    // While it is valid, only its owner can acquire it.
    for now_us in [100, 100 + LEASE_US - 1] {
        assert_eq!(acquire(&store, 1, 2, now_us).await, LeaseOutcome::Held(row(1, 100)));
        assert!(row(1, 100).is_leased(now_us));
    }
    assert_eq!(acquire(&store, 1, 1, 105).await, LeaseOutcome::Acquired);
    assert_eq!(acquire(&store, 1, 2, 110).await, LeaseOutcome::Held(row(1, 105)));
    // It is valid while it is renewed, even a little late.
    assert!(store.node_lease_renew(&node_id(1), &lease(1, 130)).await.unwrap());
    assert_eq!(acquire(&store, 1, 2, 139).await, LeaseOutcome::Held(row(1, 130)));
    // The lease of another node is independent.
    assert_eq!(acquire(&store, 2, 2, 139).await, LeaseOutcome::Acquired);
    // Once it has expired, another owner can acquire it, and the former owner cannot renew it.
    assert!(!row(1, 130).is_leased(140));
    assert_eq!(acquire(&store, 1, 2, 140).await, LeaseOutcome::Acquired);
    assert!(!store.node_lease_renew(&node_id(1), &lease(1, 141)).await.unwrap());
    assert!(!store.node_lease_release(&node_id(1), &lease(1, 0).owner).await.unwrap());
    assert!(!store.node_delete(&node_id(1), &lease(1, 0).owner).await.unwrap());
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), Some(row(2, 140)));
    // Once released, it is free immediately.
    assert!(store.node_lease_release(&node_id(1), &lease(2, 0).owner).await.unwrap());
    let free = NodeRow {
        lease: None,
        ..row(2, 0)
    };
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), Some(free));
    assert_eq!(acquire(&store, 1, 1, 141).await, LeaseOutcome::Acquired);
    // A lease that the caller knows to have expired, whatever the clocks say.
    let mut request = lease_request(1, 2, 142);
    request.expired_us = 141 + LEASE_US;
    assert_eq!(
        store.node_lease_acquire(&request).await.unwrap(),
        LeaseOutcome::Acquired
    );
    store.close().await;
}

pub(crate) async fn one_of_many_concurrent_requests_acquires_a_lease(db: Database) {
    let stores = [db.open().await, db.open().await];
    let mut tasks = JoinSet::new();
    for owner in 0..8 {
        let store = stores[usize::try_from(owner % 2).unwrap()].clone();
        tasks.spawn(async move { acquire(&store, 1, owner, 1).await });
    }
    let outcomes = tasks.join_all().await;
    let winners = outcomes
        .iter()
        .filter(|outcome| **outcome == LeaseOutcome::Acquired)
        .count();
    assert_eq!(winners, 1, "{outcomes:?}");
    for store in stores {
        store.close().await;
    }
}

/// Every change that a server makes at its start, while it runs and at `down`, attempted by the server of another node.
pub(crate) async fn rows_can_only_be_changed_by_their_node(db: Database) {
    let store = db.open().await;
    let (first, second) = (store.of_node(node_id(1)), store.of_node(node_id(2)));
    let team = team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    let theirs = second.sandbox_insert(sandbox(2, 1)).await.unwrap();
    let theirs = second
        .sandbox_started(&theirs.id, 1, 6, 1_000_000, "0.6.13")
        .await
        .unwrap();
    let theirs = theirs.applied().unwrap();
    assert_eq!(
        (row.node_id.clone(), theirs.node_id.clone()),
        (Some(node_id(1)), Some(node_id(2)))
    );

    assert_eq!(second.sandbox_list_live().await.unwrap(), std::slice::from_ref(&theirs));
    assert_eq!(first.sandbox_list_live().await.unwrap(), std::slice::from_ref(&row));
    let creating = first.sandbox_insert(sandbox(3, 1)).await.unwrap();
    assert_eq!(
        second.sandbox_started(&creating.id, 1, 1, 1, "0.6.13").await.unwrap(),
        Change::Missing
    );
    let (id, version) = (&row.id, row.version);
    assert_eq!(
        second
            .sandbox_change_state(id, version, RowChange::Stopping)
            .await
            .unwrap(),
        Change::Missing
    );
    assert_eq!(second.sandbox_set_end(id, None, 1).await.unwrap(), Change::Missing);
    assert_eq!(
        second.sandbox_set_end(id, Some(version), 1).await.unwrap(),
        Change::Missing
    );
    assert_eq!(second.sandbox_extend_end(id, i64::MAX).await.unwrap(), Change::Missing);
    assert_eq!(second.sandbox_delete(id).await.unwrap(), None);
    assert_eq!(second.sandbox_delete(&creating.id).await.unwrap(), None);
    store.records_end_orphans(1).await.unwrap();
    // A node is removed only by the owner of its lease, and only when it has no rows.
    assert_eq!(acquire(&store, 1, 1, 1).await, LeaseOutcome::Acquired);
    assert_eq!(acquire(&store, 2, 2, 1).await, LeaseOutcome::Acquired);
    assert!(!store.node_delete(&node_id(2), &lease(2, 0).owner).await.unwrap());
    second.sandbox_delete(&theirs.id).await.unwrap().unwrap();
    assert!(store.node_delete(&node_id(2), &lease(2, 0).owner).await.unwrap());
    assert!(!store.node_delete(&node_id(1), &lease(2, 0).owner).await.unwrap());

    // The rows are unchanged, and a team sees its sandboxes on every node.
    assert_eq!(first.sandbox_list_live().await.unwrap(), [row.clone(), creating]);
    assert_eq!(store.sandbox_by_id(id).await.unwrap(), Some(row.clone()));
    second.sandbox_insert(sandbox(4, 1)).await.unwrap();
    let query = SandboxQuery {
        filter: SandboxFilter::default(),
        order: Default::default(),
        after: None,
        limit: 10,
    };
    let mut seen: Vec<_> = store.sandbox_page(&team, &query).await.unwrap().rows;
    seen.sort_by(|a, b| a.id.as_str().cmp(b.id.as_str()));
    let ids: Vec<_> = seen.into_iter().map(|row| (row.id, row.node_id.unwrap())).collect();
    assert_eq!(
        ids,
        [(1, 1), (3, 1), (4, 2)].map(|(sandbox, node)| (sandbox_id(sandbox), node_id(node)))
    );
    store.close().await;
}

pub(crate) async fn keys_in_progress_belong_to_their_node(db: Database) {
    let store = db.open().await;
    let (first, second) = (store.of_node(node_id(1)), store.of_node(node_id(2)));
    let team = team(&store, 1).await;
    let key = |sandbox: u32| NewIdempotencyKey {
        team_id: team.clone(),
        key: "key".to_owned(),
        body_hash: "hash".to_owned(),
        sandbox_id: sandbox_id(sandbox),
        created_us: 1,
        expires_us: 100,
    };
    assert_eq!(first.idempotency_claim(&key(1)).await.unwrap(), Claim::Acquired);
    let Claim::Existing(row) = second.idempotency_claim(&key(2)).await.unwrap() else {
        panic!("claimed twice");
    };
    assert_eq!(row.node_id, Some(node_id(1)));
    assert_eq!(second.idempotency_list_in_progress().await.unwrap(), []);
    assert_eq!(first.idempotency_list_in_progress().await.unwrap(), [row]);
    // An expired one belongs to its new owner.
    let late = NewIdempotencyKey {
        created_us: 100,
        expires_us: 200,
        ..key(2)
    };
    assert_eq!(second.idempotency_claim(&late).await.unwrap(), Claim::Acquired);
    assert_eq!(second.idempotency_list_in_progress().await.unwrap().len(), 1);
    assert_eq!(first.idempotency_list_in_progress().await.unwrap(), []);
    store.close().await;
}
