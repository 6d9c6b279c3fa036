//! Nodes that have joined, and their tokens.

use model::lifecycle::{Kept, State};
use store::joined_nodes::{JoinedNode, LeftOnNode, TokenOutcome};
use store::node_pauses::NodePause;
use store::sandboxes::Pause;
use tokio::task::JoinSet;

use crate::database::Database;
use crate::nodes::lease_request;
use crate::samples::{node_id, sandbox, sandbox_id, team};
use crate::servers::{join, taken};

pub(crate) async fn a_token_makes_one_node_once(db: Database) {
    let store = db.open().await;
    let node = |id, seen_us| JoinedNode {
        id: node_id(id),
        name: "a host".to_owned(),
        joined_us: 150,
        seen_us,
        forgotten_us: None,
        draining_us: None,
    };
    for hash in ["a", "b", "c"] {
        store.node_token_insert(hash, 100, 200).await.unwrap();
    }
    let join = async |hash: &str, id, now_us| store.node_join(hash, &node_id(id), "a host", now_us).await.unwrap();
    assert_eq!(join("d", 1, 150).await, TokenOutcome::Unknown);
    assert_eq!(join("a", 1, 200).await, TokenOutcome::Expired);
    assert_eq!(store.joined_node_list().await.unwrap(), []);
    assert_eq!(join("a", 1, 150).await, TokenOutcome::Joined);
    assert_eq!(join("a", 2, 151).await, TokenOutcome::Used);
    store.joined_node_seen(&node_id(1), "a host", 160).await.unwrap();
    assert_eq!(store.joined_node_list().await.unwrap(), [node(1, Some(160))]);
    assert_eq!(join("b", 2, 161).await, TokenOutcome::Joined);
    let second = JoinedNode {
        joined_us: 161,
        ..node(2, None)
    };
    assert_eq!(
        store.joined_node_list().await.unwrap(),
        [node(1, Some(160)), second.clone()]
    );
    assert!(store.joined_node_forget(&node_id(1), 170).await.unwrap());
    assert!(!store.joined_node_forget(&node_id(1), 171).await.unwrap());
    assert!(!store.joined_node_forget(&node_id(3), 171).await.unwrap());
    let forgotten = store.joined_node(&node_id(1)).await.unwrap().unwrap();
    assert_eq!(forgotten.forgotten_us, Some(170));
    assert_eq!(store.joined_node(&node_id(2)).await.unwrap(), Some(second));
    // What is left of it is listed until a server has removed it, unless one has its lease.
    assert_eq!(store.forgotten_node_list(i64::MAX).await.unwrap(), []);
    taken(&store, 1, 1).await;
    taken(&store, 2, 1).await;
    let until_us = lease_request(1, 1, 100).lease.until_us;
    assert_eq!(store.forgotten_node_list(until_us - 1).await.unwrap(), []);
    assert_eq!(store.forgotten_node_list(until_us).await.unwrap(), [node_id(1)]);
    assert_eq!(join("b", 3, 173).await, TokenOutcome::Used);
    // Old tokens are removed with the next one.
    store
        .node_token_insert("e", 1_000_000_000_000, 1_000_000_000_001)
        .await
        .unwrap();
    assert_eq!(join("a", 3, 174).await, TokenOutcome::Unknown);
}

pub(crate) async fn one_of_many_that_use_a_token_joins(db: Database) {
    let store = db.open().await;
    store.node_token_insert("a", 100, 200).await.unwrap();
    store.node_token_insert("b", 100, 200).await.unwrap();
    let mut joining = JoinSet::new();
    for id in 1..=8 {
        let (store, hash) = (store.clone(), if id % 2 == 0 { "a" } else { "b" });
        joining.spawn(async move { store.node_join(hash, &node_id(id), "a host", 150).await.unwrap() });
    }
    let outcomes = joining.join_all().await;
    let joined = outcomes.iter().filter(|outcome| **outcome == TokenOutcome::Joined);
    // One with each token.
    assert_eq!(joined.count(), 2, "{outcomes:?}");
    assert_eq!(store.joined_node_list().await.unwrap().len(), 2);
}

pub(crate) async fn a_drain_lasts_until_it_is_ended(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for node in [7, 8] {
        join(&store, node).await;
    }
    assert_eq!(store.left_on_draining_nodes().await.unwrap(), []);
    let draining_us = async |id| store.joined_node(&node_id(id)).await.unwrap().unwrap().draining_us;
    assert_eq!(draining_us(7).await, None);
    assert_eq!(store.joined_node_drain(&node_id(7), 50).await.unwrap(), Some(50));
    // It drains since the first time.
    assert_eq!(store.joined_node_drain(&node_id(7), 60).await.unwrap(), Some(50));
    assert_eq!((draining_us(7).await, draining_us(8).await), (Some(50), None));
    // Whatever else is noted of it.
    store.joined_node_seen(&node_id(7), "a host", 70).await.unwrap();
    assert_eq!(draining_us(7).await, Some(50));
    let served = store.served_node_list().await.unwrap();
    let served: Vec<_> = served.into_iter().map(|node| (node.id, node.draining_us)).collect();
    assert_eq!(served, [(node_id(7), Some(50)), (node_id(8), None)]);

    let rows = taken(&store, 7, 1).await;
    for number in 1..=4 {
        let new = sandbox(number, 1);
        let end_us = new.end_us;
        rows.sandbox_insert_running(new, 5, end_us, "0.6.13").await.unwrap();
    }
    for (number, kept) in [(1, Kept::Memory), (2, Kept::Checkpoint), (3, Kept::Checkpoint)] {
        let row = store.sandbox_by_id(&sandbox_id(number)).await.unwrap().unwrap();
        let pausing = rows.sandbox_pausing(&row.id, row.version, kept, None).await;
        let pausing = pausing.unwrap().applied().unwrap();
        let pause = Pause {
            kept,
            kept_bytes: 1,
            paused_us: 9,
            resume_error: None,
        };
        let paused = rows.sandbox_paused(&row.id, pausing.version, pause).await.unwrap();
        assert!(paused.applied().is_some());
    }
    let of_other = taken(&store, 8, 1).await;
    let new = sandbox(5, 1);
    let end_us = new.end_us;
    of_other.sandbox_insert_running(new, 5, end_us, "0.6.13").await.unwrap();
    let mut left = store.left_on_draining_nodes().await.unwrap();
    left.sort_by_key(|part| (part.state != State::Running, part.count));
    let part = |state, kept, count| LeftOnNode {
        node: node_id(7),
        state,
        kept,
        count,
    };
    assert_eq!(
        left,
        [
            part(State::Running, None, 1),
            part(State::Paused, Some(Kept::Memory), 1),
            part(State::Paused, Some(Kept::Checkpoint), 2)
        ]
    );

    assert_eq!(store.node_pause_ask(&node_id(8), 75).await.unwrap(), None);
    assert_eq!(
        store.node_pause_ask(&node_id(7), 75).await.unwrap().unwrap().asked_us,
        75
    );
    assert!(store.node_pause_begin(&node_id(7), 75, 76).await.unwrap());
    // Another one was asked for.
    store.node_pause_ask(&node_id(7), 77).await.unwrap().unwrap();
    assert!(!store.node_pause_begin(&node_id(7), 75, 78).await.unwrap());
    store.node_pause_end(&node_id(7), 75, (1, 1)).await.unwrap();
    let pause = |begun_us, outcome| NodePause {
        node: node_id(7),
        asked_us: 77,
        begun_us,
        outcome,
    };
    assert_eq!(store.node_pause_list().await.unwrap(), [pause(None, None)]);
    // One that nobody waits for any more is not begun, and one that has begun goes on.
    assert!(!store.node_pause_withdraw(&node_id(7), 75).await.unwrap());
    assert!(store.node_pause_withdraw(&node_id(7), 77).await.unwrap());
    assert_eq!(store.node_pause_list().await.unwrap(), []);
    assert!(!store.node_pause_begin(&node_id(7), 77, 79).await.unwrap());
    store.node_pause_ask(&node_id(7), 77).await.unwrap().unwrap();
    assert!(store.node_pause_begin(&node_id(7), 77, 79).await.unwrap());
    assert!(!store.node_pause_withdraw(&node_id(7), 77).await.unwrap());
    assert_eq!(store.node_pause_list().await.unwrap(), [pause(Some(79), None)]);
    store.node_pause_end(&node_id(7), 77, (2, 0)).await.unwrap();
    assert_eq!(store.node_pause_list().await.unwrap(), [pause(Some(79), Some((2, 0)))]);

    assert!(store.joined_node_undrain(&node_id(7)).await.unwrap());
    assert_eq!(draining_us(7).await, None);
    assert_eq!(store.node_pause_list().await.unwrap(), []);
    assert!(!store.node_pause_begin(&node_id(7), 77, 79).await.unwrap());
    // It did not drain, which is what was wanted.
    assert!(store.joined_node_undrain(&node_id(8)).await.unwrap());
    assert_eq!(store.joined_node_drain(&node_id(8), 80).await.unwrap(), Some(80));
    assert!(store.joined_node_forget(&node_id(8), 90).await.unwrap());
    for gone in [8, 9] {
        assert_eq!(store.joined_node_drain(&node_id(gone), 91).await.unwrap(), None);
        assert!(!store.joined_node_undrain(&node_id(gone)).await.unwrap());
    }
    assert_eq!(store.left_on_draining_nodes().await.unwrap(), []);
}
