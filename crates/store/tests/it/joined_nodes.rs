//! Nodes that have joined, and their tokens.

use store::joined_nodes::{JoinedNode, TokenOutcome};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::samples::node_id;

pub(crate) async fn a_token_makes_one_node_once(db: Database) {
    let store = db.open().await;
    let node = |id, seen_us| JoinedNode {
        id: node_id(id),
        name: "a host".to_owned(),
        joined_us: 150,
        seen_us,
        forgotten_us: None,
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
