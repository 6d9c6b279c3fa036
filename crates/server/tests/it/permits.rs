//! Permits that come with starts, from nodes that are processes of their own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use server::settings::{PoolSettings, ServerSettings};
use tempfile::TempDir;
use testkit::node::FakeNode;

use crate::platform::{Reply, open, pause, seed, within};
use crate::several::{Several, authority, has};

fn limit(node: &FakeNode, max_sandboxes: Option<usize>) {
    if let Some(load) = &mut *node.permits.load.lock() {
        load.bounds.max_sandboxes = max_sandboxes.map(|max| u32::try_from(max).expect("few"));
    }
}

/// How often a node was asked for a permit, by a call and by a start.
fn asked(node: &FakeNode) -> (usize, usize) {
    let by_start = &node.permits.asked_by_start;
    (
        node.permits.asked.load(Ordering::Relaxed),
        by_start.load(Ordering::Relaxed),
    )
}

async fn create(several: &Several, template: &str) -> Reply {
    let body = format!(r#"{{"templateID":"{template}","timeout":600}}"#);
    several.call("POST", "/sandboxes", &body).await
}

fn id_of(reply: &Reply) -> SandboxId {
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json["sandboxID"].as_str().expect("an id").parse().expect("an id")
}

/// Creates sandboxes until a start asks for its permit, if the node says that starts do.
async fn until_asked(several: &Several, node: &FakeNode) {
    let comes_with_start = node.permits.come_with_starts.load(Ordering::Relaxed);
    let creating = async {
        loop {
            let before = asked(node);
            if create(several, "base").await.status != 201 {
                // It is not there yet.
                continue;
            }
            let now = asked(node);
            if !comes_with_start {
                assert_eq!(now, (before.0 + 1, 0));
                return;
            }
            if now == (before.0, before.1 + 1) {
                return;
            }
        }
    };
    within(creating).await;
}

/// Whether a node is asked before or by the start makes no difference for a client, nor for what is left.
#[tokio::test]
async fn a_full_node_refuses_a_start_as_it_refuses_a_permit() {
    let mut answers = Vec::new();
    for comes_with_start in [true, false] {
        let several = Several::start().await;
        let node = FakeNode::new();
        node.permits.come_with_starts.store(comes_with_start, Ordering::Relaxed);
        let _connected = several.join(&node).await;
        until_asked(&several, &node).await;
        let running = node.running.lock().len();
        limit(&node, Some(running));
        let refusing = async {
            loop {
                let before = asked(&node);
                let refused = create(&several, "base").await;
                let now = asked(&node);
                // Once more, because a pooled one may have just ended.
                assert_eq!(now.0 + now.1, before.0 + before.1 + 2);
                // By the start, unless the machine stood still meanwhile.
                if (now.1 > before.1) == comes_with_start {
                    return refused;
                }
            }
        };
        let refused = within(refusing).await;
        assert_eq!(refused.json["error_code"], "sandbox_capacity_unavailable");
        let message = refused.error(503).to_owned();
        let headers = ["retry-after", "should-retry"].map(|name| refused.header(name).to_owned());
        answers.push((message, refused.json.clone(), headers));

        assert_eq!(node.running.lock().len(), running, "nothing was begun");
        assert_eq!(node.counted(), running, "no permit is left");
        let listed = several.call("GET", "/sandboxes", "").await;
        assert_eq!(listed.json.as_array().map(Vec::len), Some(running));
        limit(&node, Some(running + 1));
        id_of(&create(&several, "base").await);
        create(&several, "base").await.error(503);
        several.close().await;
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0].2[0], "30");
}

/// A start that is not answered must not be made elsewhere, and a permit that is not answered can be asked for elsewhere.
#[tokio::test]
async fn one_of_several_nodes_is_asked_before_the_start() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let (_one, _other) = (several.join(&one).await, several.join(&other).await);
    let both_are_there = async {
        let mut placed = [false, false];
        while placed != [true, true] {
            let reply = create(&several, "base").await;
            if reply.status == 201 {
                let id = id_of(&reply);
                placed = [placed[0] || has(&one, &id), placed[1] || has(&other, &id)];
            }
        }
    };
    within(both_are_there).await;
    let mut quick = 0;
    while quick < 4 {
        let (before, begun) = ((asked(&one), asked(&other)), Instant::now());
        id_of(&create(&several, "base").await);
        // A node that does not answer for a second is passed over, as where the machine stood still.
        let is_quick = begun.elapsed() < Duration::from_secs(1);
        let now = (asked(&one), asked(&other));
        assert_eq!((now.0.1, now.1.1), (before.0.1, before.1.1), "no start has asked");
        let calls = now.0.0 + now.1.0 - before.0.0 - before.1.0;
        assert!(calls == 1 || (calls == 2 && !is_quick), "{calls}");
        quick += usize::from(is_quick);
    }
    several.close().await;
}

#[tokio::test]
async fn pooled_sandboxes_make_way_for_a_start_that_gets_no_permit() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    seed(&store).await;
    let adjust = |settings: &mut ServerSettings| {
        // The only server: where there are others, nodes are asked before.
        settings.servers = None;
        settings.pool = PoolSettings {
            base: 2,
            per_template: 1,
            total: 16,
            memory_mb: 2048,
            check_interval: Duration::from_millis(5),
        };
    };
    let several = Several::one_of(directory, store, 1, authority(), Some(adjust)).await;
    let several = several.expect("a server");
    let node = FakeNode::new();
    limit(&node, Some(2));
    let _connected = several.join(&node).await;
    let frozen = async {
        while node.frozen.lock().len() < 2 {
            pause().await;
        }
    };
    within(frozen).await;
    let before = asked(&node);
    // Of another template.
    let ids = [create(&several, "own").await, create(&several, "own").await].map(|reply| id_of(&reply));
    assert!(ids.iter().all(|id| has(&node, id)) && node.frozen.lock().is_empty());
    // The second needs the place of the other one, or has it if both made way.
    assert!(asked(&node).1 > before.1, "the start has asked");
    create(&several, "own").await.error(503);
    assert_eq!(node.counted(), 2);
    several.close().await;
}

/// Servers know nothing of each other: only the node keeps their starts within its limit.
#[tokio::test]
async fn a_burst_of_starts_gets_no_more_than_the_node_may_have() {
    let several = Arc::new(Several::start().await);
    let node = FakeNode::new();
    let _connected = several.join(&node).await;
    until_asked(&several, &node).await;
    let running = node.running.lock().len();
    limit(&node, Some(running + 5));
    let mut creates = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let several = Arc::clone(&several);
        creates.spawn(async move { create(&several, "base").await.status.as_u16() });
    }
    let mut statuses = creates.join_all().await;
    statuses.sort_unstable();
    assert_eq!(statuses, [[201; 5].as_slice(), [503; 35].as_slice()].concat());
    assert_eq!((node.ids().len(), node.counted()), (running + 5, running + 5));
    Arc::into_inner(several).expect("the only one").close().await;
}
