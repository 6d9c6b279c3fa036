//! Several nodes on one database.

use model::lifecycle::Kept;
use model::lifecycle::row::RowChange;
use store::builds::{BuildEnd, BuildReason, BuildStart, CachedLayerRow, FileRow};
use store::error::StoreError;
use store::idempotency::{Claim, NewIdempotencyKey};
use store::nodes::{Lease, LeaseOutcome, LeaseRequest, NodeRow};
use store::sandboxes::{SandboxFilter, SandboxQuery};
use store::snapshots::NewSnapshot;
use store::{Change, Store};
use tokio::task::JoinSet;

use crate::builds;
use crate::database::Database;
use crate::samples::{FIRST_EPOCH, build_id, node_id, running, sandbox, sandbox_id, team, template_id, uuid};

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
        last_epoch: None,
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
    let row = |owner, epoch, now_us| NodeRow {
        id: node_id(1),
        name: format!("host {owner}"),
        created_us: 100,
        epoch,
        lease: Some(lease(owner, now_us)),
    };
    let acquired = |epoch| LeaseOutcome::Acquired { epoch };
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), None);
    assert_eq!(acquire(&store, 1, 1, 100).await, acquired(1));
    // While it is valid, only its owner can acquire it.
    for now_us in [100, 100 + LEASE_US - 1] {
        assert_eq!(acquire(&store, 1, 2, now_us).await, LeaseOutcome::Held(row(1, 1, 100)));
        assert!(row(1, 1, 100).is_leased(now_us));
    }
    assert_eq!(acquire(&store, 1, 1, 105).await, acquired(2));
    assert_eq!(acquire(&store, 1, 2, 110).await, LeaseOutcome::Held(row(1, 2, 105)));
    // It is valid while it is renewed, even a little late.
    assert!(store.node_lease_renew(&node_id(1), &lease(1, 130)).await.unwrap());
    assert_eq!(acquire(&store, 1, 2, 139).await, LeaseOutcome::Held(row(1, 2, 130)));
    // The lease of another node is independent.
    assert_eq!(acquire(&store, 2, 2, 139).await, acquired(1));
    // Once it has expired, another owner can acquire it, and the former owner cannot renew it.
    assert!(!row(1, 2, 130).is_leased(140));
    assert_eq!(acquire(&store, 1, 2, 140).await, acquired(3));
    assert!(!store.node_lease_renew(&node_id(1), &lease(1, 141)).await.unwrap());
    assert!(!store.node_lease_release(&node_id(1), &lease(1, 0).owner).await.unwrap());
    assert!(!store.node_delete(&node_id(1), &lease(1, 0).owner).await.unwrap());
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), Some(row(2, 3, 140)));
    // Once released, it is free immediately.
    assert!(store.node_lease_release(&node_id(1), &lease(2, 0).owner).await.unwrap());
    let free = NodeRow {
        lease: None,
        ..row(2, 3, 0)
    };
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), Some(free));
    assert_eq!(acquire(&store, 1, 1, 141).await, acquired(4));
    // A lease that the caller knows to have expired, whatever the clocks say.
    let mut request = lease_request(1, 2, 142);
    request.expired_us = 141 + LEASE_US;
    assert_eq!(store.node_lease_acquire(&request).await.unwrap(), acquired(5));
    // One that was valid is left alone, as is an own one; another's that has expired is not renewed any more once it was ended.
    let valid_us = 142 + LEASE_US - 1;
    store
        .node_lease_end_expired(&node_id(1), &lease(1, 0).owner, valid_us)
        .await
        .unwrap();
    store
        .node_lease_end_expired(&node_id(1), &lease(2, 0).owner, 1000)
        .await
        .unwrap();
    assert!(store.node_lease_renew(&node_id(1), &lease(2, 142)).await.unwrap());
    store
        .node_lease_end_expired(&node_id(1), &lease(1, 0).owner, 142 + LEASE_US)
        .await
        .unwrap();
    assert!(!store.node_lease_renew(&node_id(1), &lease(2, 160)).await.unwrap());
    assert_eq!(acquire(&store, 1, 1, 161).await, acquired(6));
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
        .filter(|outcome| matches!(outcome, LeaseOutcome::Acquired { epoch: 1 }))
        .count();
    assert_eq!(winners, 1, "{outcomes:?}");
    for store in stores {
        store.close().await;
    }
}

/// Every change that a server makes at its start, while it runs and at `down`, attempted by the server of another node.
pub(crate) async fn rows_can_only_be_changed_by_their_node(db: Database) {
    let store = db.open().await;
    let (first, second) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
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
    store.records_end_orphans(1, i64::MAX).await.unwrap();
    // A node is removed only by the owner of its lease, and only when it has no rows.
    assert!(!store.node_delete(&node_id(2), &lease(2, 0).owner).await.unwrap());
    second.sandbox_delete(&theirs.id).await.unwrap().unwrap();
    assert!(store.node_delete(&node_id(2), &lease(2, 0).owner).await.unwrap());
    assert!(!store.node_delete(&node_id(1), &lease(2, 0).owner).await.unwrap());

    // The rows are unchanged, and a team sees its sandboxes on every node.
    assert_eq!(first.sandbox_list_live().await.unwrap(), [row.clone(), creating]);
    assert_eq!(store.sandbox_by_id(id).await.unwrap(), Some(row.clone()));
    // The node comes back with a lease of its first epoch, because nothing was left of it.
    let again = acquire(&store, 2, 2, 1).await;
    assert_eq!(again, LeaseOutcome::Acquired { epoch: FIRST_EPOCH });
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
    let (first, second) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
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

/// Every change of a server whose lease another one has acquired meanwhile, as after a minute in which its machine was
/// suspended.
pub(crate) async fn a_server_that_has_lost_its_lease_changes_nothing(db: Database) {
    let store = db.open().await;
    let team = team(&store, 1).await;
    let before = store.of_node(node_id(1), FIRST_EPOCH);
    let row = running(&store, sandbox(1, 1), 5).await;
    let creating = before.sandbox_insert(sandbox(2, 1)).await.unwrap();
    let entry = CachedLayerRow {
        layer: "a".repeat(64).parse().unwrap(),
        bytes: 5,
        state_json: "{}".to_owned(),
    };
    before.layer_cache_put(&team, "key", &entry, 5).await.unwrap();
    let file = FileRow {
        team_id: team.clone(),
        hash: "hash".to_owned(),
        bytes: 7,
    };
    before.template_file_put(&file, 5).await.unwrap();
    for n in [1, 2] {
        store.build_request(&builds::new(n, None, &[])).await.unwrap();
    }
    let start = BuildStart {
        recipe_json: "{}".to_owned(),
        registry_sealed: None,
        now_us: 5,
    };
    let started = before.build_start(&template_id(1), &build_id(1), &start).await.unwrap();
    assert!(matches!(started, Change::Applied(_)));
    let job = before.build_begin_next(6).await.unwrap().unwrap();
    assert_eq!(job.id, build_id(1));

    let outcome = acquire(&store, 1, 9, 1_000_000).await;
    assert_eq!(outcome, LeaseOutcome::Acquired { epoch: 2 });
    let after = store.of_node(node_id(1), 2);
    let rows = async || {
        (
            after.sandbox_list_live().await.unwrap(),
            after.layer_cache_layers().await.unwrap(),
            after.template_file_total(&team).await.unwrap(),
            after.build_list_building().await.unwrap(),
            after.idempotency_list_in_progress().await.unwrap(),
        )
    };
    let (seen, id, version) = (rows().await, &row.id, row.version);
    let key = NewIdempotencyKey {
        team_id: team.clone(),
        key: "key".to_owned(),
        body_hash: "hash".to_owned(),
        sandbox_id: sandbox_id(3),
        created_us: 1,
        expires_us: 100,
    };
    let failed = BuildEnd::Failed(BuildReason {
        message: "failed".to_owned(),
        step: None,
    });
    let snapshot = NewSnapshot {
        template: template_id(3),
        build: build_id(3),
        team: team.clone(),
        alias: None,
        tag: "default".to_owned(),
        cpu_count: 1,
        memory_mb: 512,
        disk_mb: 1024,
        agent_version: "0.6.13".to_owned(),
        memory: None,
        spec_json: "{}".to_owned(),
        sandbox: id.clone(),
        started_us: 5,
        now_us: 6,
    };
    let refused = |what: &str, result: Result<(), StoreError>| {
        assert!(
            matches!(result, Err(StoreError::LeaseLost { .. })),
            "{what}: {result:?}"
        );
    };
    refused("insert", before.sandbox_insert(sandbox(4, 1)).await.map(drop));
    let running = before.sandbox_insert_running(sandbox(5, 1), 5, 6, "0.6.13").await;
    refused("insert running", running.map(drop));
    refused(
        "started",
        before.sandbox_started(&creating.id, 1, 5, 6, "0.6.13").await.map(drop),
    );
    refused(
        "state",
        before
            .sandbox_change_state(id, version, RowChange::Stopping)
            .await
            .map(drop),
    );
    refused(
        "pausing",
        before.sandbox_pausing(id, version, Kept::Memory, None).await.map(drop),
    );
    refused("deadline", before.sandbox_set_end(id, None, 1).await.map(drop));
    refused("extend", before.sandbox_extend_end(id, i64::MAX).await.map(drop));
    refused(
        "network",
        before
            .sandbox_set_network(id, version, Some("{}"), None)
            .await
            .map(drop),
    );
    refused(
        "injections",
        before.sandbox_set_injections(id, version, None).await.map(drop),
    );
    refused("delete", before.sandbox_delete(id).await.map(drop));
    refused("claim", before.idempotency_claim(&key).await.map(drop));
    refused("cache", before.layer_cache_put(&team, "other", &entry, 5).await);
    refused(
        "file",
        before
            .template_file_put(
                &FileRow {
                    hash: "other".to_owned(),
                    ..file.clone()
                },
                5,
            )
            .await,
    );
    refused(
        "build",
        before
            .build_start(&template_id(2), &build_id(2), &start)
            .await
            .map(drop),
    );
    refused(
        "end of a build",
        before.build_end(&build_id(1), &failed, 7).await.map(drop),
    );
    refused("snapshot", before.snapshot_insert(&snapshot).await.map(drop));
    // These find nothing, as where there is nothing.
    assert_eq!(before.layer_cache_find(&team, "key", 9).await.unwrap(), None);
    assert_eq!(before.layer_cache_purge(i64::MAX, 0).await.unwrap(), 0);
    assert_eq!(before.layer_cache_forget(&entry.layer).await.unwrap(), 0);
    assert_eq!(before.template_file_find(&team, "hash", 9).await.unwrap(), None);
    assert_eq!(before.template_file_take_unused(i64::MAX).await.unwrap(), None);
    assert!(before.build_begin_next(9).await.unwrap().is_none());
    assert_eq!(before.build_requeue(0, 9, "failed").await.unwrap(), 0);
    assert!(!before.build_import(&build_id(2), "{}", "0.6.13", 9).await.unwrap());
    assert_eq!(rows().await, seen);

    // The one that has it changes all of that.
    let change = after
        .sandbox_change_state(id, version, RowChange::Stopping)
        .await
        .unwrap();
    assert!(matches!(change, Change::Applied(_)));
    assert_eq!(after.build_requeue(9, 9, "failed").await.unwrap(), 1);
    assert_eq!(after.layer_cache_forget(&entry.layer).await.unwrap(), 1);
    // Once the lease is released, nobody does.
    let owner = lease(9, 0).owner;
    assert!(store.node_lease_release(&node_id(1), &owner).await.unwrap());
    refused("after the release", after.sandbox_delete(id).await.map(drop));
    store.close().await;
}
