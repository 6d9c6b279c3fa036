//! Copies of paused sandboxes, and their move to another node.

use model::lifecycle::{Kept, State};
use store::Store;
use store::keys::SealedSecret;
use store::nodes::{LeaseOutcome, NodeRows};
use store::sandboxes::{Leaving, Move, Pause, Resumption, SandboxRow};

use crate::database::Database;
use crate::nodes::lease_request;
use crate::samples::{node_id, sandbox, sandbox_id, team, uuid};
use crate::servers::{join, taken};

async fn paused(rows: &NodeRows, number: u32) -> SandboxRow {
    let new = sandbox(number, 1);
    let (id, end_us) = (new.id.clone(), new.end_us);
    let row = rows.sandbox_insert_running(new, 5, end_us, "0.6.13").await.unwrap();
    let pausing = rows
        .sandbox_pausing(&id, row.version, Kept::Checkpoint, None)
        .await
        .unwrap();
    pause(rows, pausing.applied().unwrap()).await
}

async fn pause(rows: &NodeRows, row: SandboxRow) -> SandboxRow {
    let pause = Pause {
        kept: Kept::Checkpoint,
        kept_bytes: 7,
        paused_us: 9,
        resume_error: None,
    };
    let paused = rows.sandbox_paused(&row.id, row.version, pause).await.unwrap();
    paused.applied().unwrap()
}

async fn current(store: &Store, row: &SandboxRow) -> Option<String> {
    store.sandbox_parcel(&row.id).await.unwrap().unwrap().current
}

fn moved(row: &SandboxRow) -> Move<'_> {
    Move {
        id: &row.id,
        version: row.version,
        parcel: "p1",
        kept: Kept::Filesystem,
        kept_bytes: 11,
    }
}

pub(crate) async fn a_copy_is_that_of_one_pause(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = taken(&store, 7, 1).await;
    let row = paused(&rows, 1).await;
    let key = SealedSecret::new("first".to_owned());
    assert_eq!(rows.sandbox_parcel_key(&row.id, &key).await.unwrap(), Some(key.clone()));
    let other = SealedSecret::new("second".to_owned());
    assert_eq!(rows.sandbox_parcel_key(&row.id, &other).await.unwrap(), Some(key));
    assert_eq!(rows.sandbox_parcel_key(&sandbox_id(9), &other).await.unwrap(), None);
    assert_eq!(
        rows.sandbox_list_packed(false).await.unwrap(),
        std::slice::from_ref(&row.id)
    );
    assert_eq!(current(&store, &row).await, None);
    assert!(!rows.sandbox_packed(&row.id, "another", "p1").await.unwrap());
    assert!(rows.sandbox_packed(&row.id, &row.execution_id, "p1").await.unwrap());
    assert_eq!(current(&store, &row).await.as_deref(), Some("p1"));
    assert_eq!(
        rows.sandbox_list_packed(true).await.unwrap(),
        std::slice::from_ref(&row.id)
    );
    assert_eq!(rows.sandbox_list_packed(false).await.unwrap(), []);

    // A resume that has begun makes it old, also when the sandbox is paused again at once.
    let resumption = Resumption {
        end_us: 50,
        max_end_us: 60,
        execution_id: uuid(77),
        lifecycle_json: None,
    };
    let resuming = rows.sandbox_resuming(&row.id, row.version, &resumption).await.unwrap();
    let resuming = resuming.applied().unwrap();
    assert_eq!(current(&store, &row).await, None);
    assert!(
        !rows
            .sandbox_packed(&row.id, &resuming.execution_id, "p2")
            .await
            .unwrap()
    );
    let again = pause(&rows, resuming).await;
    assert_eq!(current(&store, &again).await, None);
    store.close().await;
}

pub(crate) async fn a_damaged_copy_counts_and_is_made_again(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (from, to) = (taken(&store, 7, 1).await, taken(&store, 8, 1).await);
    let row = paused(&from, 1).await;
    let whole = paused(&from, 2).await;
    let listed = async |with_copy| {
        let mut listed = from.sandbox_list_packed(with_copy).await.unwrap();
        listed.sort();
        listed
    };
    let damaged = async |parcel: &str| store.sandbox_parcel_damaged(&row.id, parcel).await.unwrap();
    assert!(!damaged("p1").await);
    for row in [&row, &whole] {
        assert!(from.sandbox_packed(&row.id, &row.execution_id, "p1").await.unwrap());
    }
    // Not another one.
    assert!(!damaged("p0").await);
    assert_eq!(listed(false).await, []);
    assert!(damaged("p1").await);
    assert!(!damaged("p1").await, "it has the mark already");
    let found = async || store.sandbox_parcel(&row.id).await.unwrap().unwrap();
    assert_eq!(
        (found().await.current.as_deref(), found().await.is_damaged),
        (Some("p1"), true)
    );
    let mut both = vec![row.id.clone(), whole.id.clone()];
    both.sort();
    assert_eq!((listed(false).await, listed(true).await), (vec![row.id.clone()], both));

    // Another one has no mark.
    assert!(from.sandbox_packed(&row.id, &row.execution_id, "p2").await.unwrap());
    assert_eq!(
        (found().await.current.as_deref(), found().await.is_damaged),
        (Some("p2"), false)
    );
    assert_eq!(listed(false).await, []);
    assert!(!damaged("p1").await, "that was the one before");

    // What was damaged for a while is used.
    assert!(damaged("p2").await);
    let held = Leaving::Held(&from);
    assert_eq!(to.sandbox_take(moved(&row), &held).await.unwrap(), None);
    let move_of = Move {
        parcel: "p2",
        ..moved(&row)
    };
    assert!(to.sandbox_take(move_of, &held).await.unwrap().is_some());
    assert_eq!(
        to.sandbox_list_packed(false).await.unwrap(),
        std::slice::from_ref(&row.id)
    );
    store.close().await;
}

pub(crate) async fn a_sandbox_moves_once_and_never_behind_a_takeover(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (from, to) = (taken(&store, 7, 1).await, taken(&store, 8, 1).await);
    let row = paused(&from, 1).await;
    let held = Leaving::Held(&from);
    // Not without a copy of this pause.
    assert_eq!(to.sandbox_take(moved(&row), &held).await.unwrap(), None);
    assert!(from.sandbox_packed(&row.id, &row.execution_id, "p1").await.unwrap());
    let other = Move {
        parcel: "p0",
        ..moved(&row)
    };
    assert_eq!(to.sandbox_take(other, &held).await.unwrap(), None);
    let old = Move {
        version: row.version - 1,
        ..moved(&row)
    };
    assert_eq!(to.sandbox_take(old, &held).await.unwrap(), None);
    let after = to.sandbox_take(moved(&row), &held).await.unwrap().unwrap();
    assert_eq!(after.node_id, Some(node_id(8)));
    assert_eq!((after.version, after.state), (row.version + 1, State::Paused));
    assert_eq!((after.kept, after.kept_bytes), (Some(Kept::Filesystem), Some(11)));
    assert_eq!(to.sandbox_take(moved(&row), &held).await.unwrap(), None);
    assert_eq!(from.sandbox_list_live().await.unwrap(), []);

    // Back, from a node whose server is gone.
    let free = |epoch: i64, server: u32| Leaving::Free {
        node: node_id(8),
        epoch,
        owner: uuid(server).parse().unwrap(),
        now_us: 50,
    };
    let back = Move {
        kept: Kept::Filesystem,
        ..moved(&after)
    };
    // Server 1 has its lease until 100.
    let epoch = to.epoch();
    assert_eq!(from.sandbox_take(back, &free(epoch, 2)).await.unwrap(), None);
    // The node has come back since.
    let newer = taken(&store, 8, 1).await;
    assert_eq!(from.sandbox_take(back, &free(epoch, 1)).await.unwrap(), None);
    assert!(
        store
            .node_lease_release(&node_id(8), &uuid(1).parse().unwrap())
            .await
            .unwrap()
    );
    // And so has the node that it moves to: its next server has another lease.
    let later = taken(&store, 7, 2).await;
    assert_eq!(from.sandbox_take(back, &free(newer.epoch(), 1)).await.unwrap(), None);
    let row = later
        .sandbox_take(back, &free(newer.epoch(), 2))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(row.node_id, Some(node_id(7)));
    assert!(later.sandbox_packed(&row.id, &row.execution_id, "p2").await.unwrap());
    let away = |epoch: i64, server: u32| Leaving::Free {
        node: node_id(7),
        epoch,
        owner: uuid(server).parse().unwrap(),
        now_us: 50,
    };
    for left in [
        Leaving::Held(&later),
        away(later.epoch(), 1),
        away(later.epoch() - 1, 2),
    ] {
        assert!(!store.sandbox_delete_left(&row.id, row.version, &left).await.unwrap());
    }
    let left = away(later.epoch(), 2);
    assert!(
        !store
            .sandbox_delete_left(&row.id, row.version - 1, &left)
            .await
            .unwrap()
    );
    assert!(store.sandbox_delete_left(&row.id, row.version, &left).await.unwrap());
    assert_eq!(store.sandbox_by_id(&row.id).await.unwrap(), None);
    let request = lease_request(8, 3, 100);
    let LeaseOutcome::Acquired { epoch } = store.node_lease_acquire(&request).await.unwrap() else {
        panic!("the lease is free");
    };
    assert_eq!(store.of_node(node_id(8), epoch).sandbox_list_live().await.unwrap(), []);
    store.close().await;
}

pub(crate) async fn a_forgotten_node_whose_sandboxes_have_copies_is_left_alone(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    join(&store, 7).await;
    let (from, to) = (taken(&store, 7, 1).await, taken(&store, 8, 1).await);
    let rows = [paused(&from, 1).await, paused(&from, 2).await];
    let packed = async |row: &SandboxRow| from.sandbox_packed(&row.id, &row.execution_id, "p1").await.unwrap();
    assert!(packed(&rows[0]).await);
    let free_us = lease_request(7, 1, 100).lease.until_us;
    let listed = async |now_us| {
        let left = store.forgotten_node_list(now_us).await.unwrap();
        (left, store.forgotten_node_list_kept(now_us).await.unwrap())
    };
    assert_eq!(listed(free_us).await, (vec![], vec![]));
    assert!(store.joined_node_forget(&node_id(7), 170).await.unwrap());
    // One of two has a copy.
    assert_eq!(listed(free_us - 1).await, (vec![], vec![]));
    assert_eq!(listed(free_us).await, (vec![node_id(7)], vec![]));
    assert!(packed(&rows[1]).await);
    assert_eq!(listed(free_us - 1).await, (vec![], vec![]));
    assert_eq!(listed(free_us).await, (vec![], vec![node_id(7)]));
    // Once the last has moved, what is left of the node is removed.
    for (row, left) in rows
        .iter()
        .zip([(vec![], vec![node_id(7)]), (vec![node_id(7)], vec![])])
    {
        let held = Leaving::Held(&from);
        assert!(to.sandbox_take(moved(row), &held).await.unwrap().is_some());
        assert_eq!(listed(free_us).await, left);
    }
    store.close().await;
}
