//! Draining a node: it gets no new sandboxes, and what it has goes on.

#[path = "../../../store/tests/it/unreadable.rs"]
mod unreadable;

use std::time::Duration;

use model::id::SandboxId;
use serde_json::{Value, json};
use server::settings::{PoolSettings, ServerSettings};
use sqlx::Connection as _;
use tempfile::TempDir;
use testkit::node::{Behaviour, FakeNode};
use tokio_util::sync::CancellationToken;

use self::unreadable::make_unreadable;
use crate::builds::text;
use crate::platform::{Reply, open, pause, seed, within};
use crate::servers::two;
use crate::several::{Several, authority, has};

/// How many creates show that a node gets none: it would have got some of them otherwise.
const CREATES: usize = 12;

async fn nodes(server: &Several) -> Vec<Value> {
    let (status, nodes) = server.operator("GET", "/nodes", "").await;
    assert_eq!(status, 200);
    nodes.as_array().expect("a list").clone()
}

/// The ids of the nodes, in the order in which they have joined.
async fn ids(server: &Several) -> Vec<String> {
    let nodes = nodes(server).await.into_iter();
    nodes
        .map(|node| node["id"].as_str().expect("an id").to_owned())
        .collect()
}

/// Changes a node, which has to succeed, and returns what the operator is told.
async fn change(server: &Several, node: &str, status: &str) -> Value {
    let body = json!({ "status": status }).to_string();
    let (answered, node) = server.operator("POST", &format!("/nodes/{node}"), &body).await;
    assert_eq!(answered, 200, "{node}");
    node
}

/// Creates sandboxes until one is on this node.
async fn one_on(server: &Several, node: &FakeNode) -> SandboxId {
    within(async {
        loop {
            let id = server.created().await;
            if has(node, &id) {
                return id;
            }
        }
    })
    .await
}

async fn post(server: &Several, id: &SandboxId, verb: &str, body: &str) -> Reply {
    server.call("POST", &format!("/sandboxes/{id}/{verb}"), body).await
}

fn assert_draining(reply: &Reply) {
    assert_eq!(
        (reply.status.as_u16(), &reply.json["error_code"]),
        (503, &"node_draining".into()),
        "{reply:?}"
    );
    assert_ne!(reply.header("retry-after"), "", "{reply:?}");
}

#[tokio::test]
async fn a_node_that_drains_gets_no_new_sandboxes_and_its_own_go_on() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let _connected = (several.join(&one).await, several.join(&other).await);
    let (kept, ended) = (one_on(&several, &one).await, one_on(&several, &one).await);
    one_on(&several, &other).await;
    let [drained, left] = <[String; 2]>::try_from(ids(&several).await).expect("two nodes");
    assert!(
        nodes(&several)
            .await
            .iter()
            .all(|node| node.get("draining_at").is_none())
    );

    let before = one.running.lock().len();
    let shown = change(&several, &drained, "draining").await;
    assert_eq!(shown["state"], "connected");
    assert_eq!(shown["left"]["running"], json!(before));
    let since = shown["draining_at"].as_str().expect("a time").to_owned();
    // Again, which changes nothing.
    assert_eq!(
        change(&several, &drained, "draining").await["draining_at"],
        json!(since)
    );
    for _ in 0..CREATES {
        assert!(has(&other, &several.created().await));
    }
    assert_eq!(one.running.lock().len(), before);

    // What is there is used as before.
    let path = format!("/sandboxes/{kept}");
    assert_eq!(several.call("GET", &path, "").await.status, 200);
    assert_eq!(post(&several, &kept, "timeout", r#"{"timeout":600}"#).await.status, 204);
    assert_eq!(post(&several, &kept, "pause", "").await.status, 204);
    assert_eq!(post(&several, &kept, "resume", "{}").await.status, 201);
    assert!(has(&one, &kept));
    assert_draining(&post(&several, &kept, "fork", "{}").await);
    assert!(one.forked.lock().is_empty());
    assert_eq!(
        several.call("DELETE", &format!("/sandboxes/{ended}"), "").await.status,
        204
    );

    // With all of them, nobody gets one, and is told why.
    change(&several, &left, "draining").await;
    assert_draining(&several.create().await);
    let shown = nodes(&several).await;
    assert_eq!(shown[0]["left"]["running"], json!(before - 1));
    change(&several, &drained, "ready").await;
    assert!(nodes(&several).await[0].get("left").is_none());
    for _ in 0..CREATES {
        assert!(has(&one, &several.created().await));
    }
    assert_eq!(post(&several, &kept, "fork", "{}").await.status, 201);

    let (status, _) = several
        .operator("POST", &format!("/nodes/{drained}"), r#"{"status":"x"}"#)
        .await;
    assert_eq!(status, 400);
    let unknown = "00000000-0000-4000-8000-000000000001";
    for (node, status) in [(unknown, "draining"), (unknown, "ready"), ("x", "draining")] {
        let body = json!({ "status": status }).to_string();
        assert_eq!(several.operator("POST", &format!("/nodes/{node}"), &body).await.0, 404);
    }
    several.close().await;
}

#[tokio::test]
async fn a_drain_outlives_the_node_and_the_server_and_ends_when_the_node_is_forgotten() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let (first, second) = (several.join(&one).await, several.join(&other).await);
    let on_one = one_on(&several, &one).await;
    let drained = ids(&several).await.swap_remove(0);
    change(&several, &drained, "draining").await;
    let credentials = (first.credentials.clone(), second.credentials.clone());
    drop(first);
    // While it is away.
    let shown = nodes(&several).await.swap_remove(0);
    assert!(shown["draining_at"].is_string(), "{shown}");
    assert_eq!(shown["left"]["running"], 1);

    let again = FakeNode::new();
    again.adopts_all.store(true, std::sync::atomic::Ordering::SeqCst);
    let first = within(several.connect(&again, &credentials.0)).await;
    let path = format!("/sandboxes/{on_one}");
    let is_back = async {
        while nodes(&several).await[0]["state"] != "connected" {
            pause().await;
        }
    };
    within(is_back).await;
    for _ in 0..CREATES {
        assert!(has(&other, &several.created().await));
    }
    assert_eq!(several.call("GET", &path, "").await.status, 200);

    let (several, _) = (several.restarted().await, (first, second));
    let _first = within(several.connect(&again, &credentials.0)).await;
    let is_back = async {
        while nodes(&several).await[0]["state"] != "connected" {
            pause().await;
        }
    };
    within(is_back).await;
    // It is the only one that is there.
    assert_draining(&several.create().await);
    other.adopts_all.store(true, std::sync::atomic::Ordering::SeqCst);
    let _second = within(several.connect(&other, &credentials.1)).await;
    for _ in 0..CREATES {
        assert!(has(&other, &several.created().await));
    }
    assert_eq!(
        several.operator("DELETE", &format!("/nodes/{drained}"), "").await.0,
        204
    );
    within(async { while several.call("GET", &path, "").await.status != 404 {} }).await;
    let shown = nodes(&several).await.swap_remove(0);
    assert_eq!((&shown["state"], shown.get("draining_at")), (&"forgotten".into(), None));
    several.close().await;
}

#[tokio::test]
async fn what_is_left_is_paused_on_disk() {
    let several = Several::start().await;
    let node = FakeNode::new();
    let _connected = several.join(&node).await;
    let first = several.created().await;
    let second = several.created().await;
    assert_eq!(post(&several, &second, "pause", "").await.status, 204);
    let id = ids(&several).await.swap_remove(0);
    let path = format!("/nodes/{id}/pause");
    // Not one that gets new ones.
    assert_eq!(several.operator("POST", &path, "").await.0, 409);
    change(&several, &id, "draining").await;
    let (status, paused) = several.operator("POST", &path, "").await;
    assert_eq!((status, &paused["failed"]), (200, &json!(0)), "{paused}");
    let shown = nodes(&several).await.swap_remove(0);
    assert_eq!(
        shown["left"],
        json!({"running": 0, "paused_in_memory": 0, "paused_on_disk": 2})
    );
    assert_eq!(shown["sandboxes"], 0);
    // They are resumed there.
    for id in [&first, &second] {
        assert_eq!(post(&several, id, "resume", "{}").await.status, 201);
        assert!(has(&node, id));
    }
    *node.pause_to_disk.lock() = Behaviour::Fails;
    let (_, paused) = several.operator("POST", &path, "").await;
    assert_eq!((&paused["paused"], &paused["failed"]), (&json!(0), &json!(2)));
    several.close().await;
}

#[tokio::test]
async fn a_drain_that_is_ended_pauses_no_more() {
    let several = Several::start().await;
    let node = FakeNode::new();
    let _connected = several.join(&node).await;
    let mut created = Vec::new();
    for _ in 0..10 {
        created.push(several.created().await);
    }
    let id = ids(&several).await.swap_remove(0);
    let path = format!("/nodes/{id}/pause");
    change(&several, &id, "draining").await;
    *node.pause_to_disk.lock() = Behaviour::Waits;
    let done = CancellationToken::new();
    let pausing = async {
        let answer = several.operator("POST", &path, "").await;
        done.cancel();
        answer
    };
    let ending = async {
        node.waiting.notified().await;
        change(&several, &id, "ready").await;
        *node.pause_to_disk.lock() = Behaviour::Works;
        // Those that were begun, of which eight are at the same time.
        while !done.is_cancelled() {
            node.go.notify_waiters();
            pause().await;
        }
    };
    let ((status, paused), ()) = tokio::join!(within(pausing), within(ending));
    assert_eq!(status, 409, "{paused}");
    let mut running = 0;
    for id in &created {
        let shown = several.call("GET", &format!("/sandboxes/{id}"), "").await;
        running += usize::from(shown.json["state"] == "running");
    }
    assert_eq!(running, 2);
    several.close().await;
}

#[tokio::test]
async fn what_is_kept_ready_ends_and_comes_back() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    seed(&store).await;
    let several = Several::one_of(
        directory,
        store,
        1,
        authority(),
        Some(|settings: &mut ServerSettings| {
            settings.pool = PoolSettings {
                base: 2,
                per_template: 1,
                total: 16,
                memory_mb: 2048,
                check_interval: Duration::from_millis(5),
            };
        }),
    );
    let several = several.await.expect("a server");
    let node = FakeNode::new();
    let _connected = several.join(&node).await;
    let until = async |count: usize| {
        within(async {
            while node.frozen.lock().len() != count || node.running.lock().len() != count {
                pause().await;
            }
        })
        .await;
    };
    until(2).await;
    let id = ids(&several).await.swap_remove(0);
    change(&several, &id, "draining").await;
    until(0).await;
    let started = node.started.lock().len();
    // Some checks of the pool later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(node.started.lock().len(), started);
    change(&several, &id, "ready").await;
    until(2).await;
    several.close().await;
}

#[tokio::test]
async fn a_build_goes_to_another_node_and_to_one_that_drains_if_there_is_none() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let _connected = (several.join(&one).await, several.join(&other).await);
    one_on(&several, &one).await;
    one_on(&several, &other).await;
    let [drained, left] = <[String; 2]>::try_from(ids(&several).await).expect("two nodes");
    let build = async |number: usize| {
        let name = json!({ "name": format!("built-{number}") }).to_string();
        let reply = several.call("POST", "/v3/templates", &name).await;
        assert_eq!(reply.status, 202, "{reply:?}");
        let (template, build) = (text(&reply, "templateID"), text(&reply, "buildID"));
        let path = format!("/v2/templates/{template}/builds/{build}");
        let steps = json!({
            "fromTemplate": "base",
            "force": true,
            "steps": [{ "type": "WORKDIR", "args": [format!("/of/{number}")] }],
        });
        let begun = several.call("POST", &path, &steps.to_string()).await;
        assert_eq!(begun.status, 202, "{begun:?}");
        let status = format!("/templates/{template}/builds/{build}/status");
        let ended = async {
            loop {
                let status = several.call("GET", &status, "").await.json;
                if status["status"] != "building" && status["status"] != "waiting" {
                    return status;
                }
                pause().await;
            }
        };
        within(ended).await
    };
    change(&several, &drained, "draining").await;
    let before = (one.started.lock().len(), other.started.lock().len());
    for number in 0..3 {
        build(number).await;
    }
    assert_eq!(one.started.lock().len(), before.0);
    assert!(other.started.lock().len() > before.1);
    change(&several, &left, "draining").await;
    build(3).await;
    assert!(one.started.lock().len() + other.started.lock().len() > before.0 + before.1 + 3);
    several.close().await;
}

#[tokio::test]
async fn a_node_of_another_server_is_drained_once_that_one_knows() {
    let two = two().await;
    let [_, moved] = two.one_of_each().await;
    let [one, other] = &two.servers;
    let [own, away] = <[String; 2]>::try_from(ids(one).await).expect("two nodes");
    let before = two.nodes[1].running.lock().len();
    let shown = change(one, &away, "draining").await;
    assert_eq!(shown["left"]["running"], json!(before));
    for _ in 0..CREATES {
        for server in [one, other] {
            assert!(has(&two.nodes[0], &server.created().await));
        }
    }
    assert_eq!(two.nodes[1].running.lock().len(), before);
    // The one that has it says the same, and what is there is used through either.
    assert!(nodes(other).await[1]["draining_at"].is_string());
    assert_draining(&post(one, &moved, "fork", "{}").await);
    assert_eq!(post(one, &moved, "timeout", r#"{"timeout":600}"#).await.status, 204);

    change(other, &own, "draining").await;
    for server in [one, other] {
        assert_draining(&server.create().await);
    }
    // Whoever comes right afterwards may be too early: the other one finds out by itself.
    change(one, &away, "ready").await;
    assert!(has(&two.nodes[1], &other.created().await));
    // A second drain waits for what is told of it, not of the first one.
    for _ in 0..2 {
        change(one, &away, "draining").await;
        assert_draining(&other.create().await);
        change(one, &away, "ready").await;
    }
    two.close().await;
}

#[tokio::test]
async fn a_server_goes_on_that_cannot_add_up_what_teams_use_elsewhere() {
    let two = two().await;
    let [unreadable, on_drained] = two.one_of_each().await;
    let [one, other] = &two.servers;
    let [_, away] = <[String; 2]>::try_from(ids(one).await).expect("two nodes");
    let url = format!("sqlite:{}", one.directory.path().join("test.db").display());
    let mut raw = sqlx::AnyConnection::connect(&url).await.expect("a database");
    make_unreadable(&mut raw, &unreadable).await;
    let away = away.parse().expect("an id");
    one.store.joined_node_drain(&away, 1).await.expect("a database");
    // Only its beat tells the other one.
    within(async {
        while post(other, &on_drained, "fork", "{}").await.json["error_code"] != "node_draining" {
            pause().await;
        }
    })
    .await;
    raw.close().await.expect("a database");
    two.close().await;
}

#[tokio::test]
async fn what_is_left_is_paused_through_the_other_server() {
    let two = two().await;
    let [first, _] = two.one_of_each().await;
    let [own, other] = &two.servers;
    let id = {
        let nodes = nodes(own).await;
        let connected = nodes.iter().find(|node| node["state"] == "connected");
        connected.expect("a node")["id"].as_str().expect("an id").to_owned()
    };
    let path = format!("/nodes/{id}/pause");
    // Not one that gets new ones.
    assert_eq!(other.operator("POST", &path, "").await.0, 409);
    change(other, &id, "draining").await;
    let (status, paused) = other.operator("POST", &path, "").await;
    assert_eq!(status, 200, "{paused}");
    assert_eq!(paused["failed"], 0, "{paused}");
    assert!(paused["paused"].as_u64() >= Some(1), "{paused}");
    let shown = own.call("GET", &format!("/sandboxes/{first}"), "").await;
    assert_eq!(shown.json["state"], "paused");
    // Again: there is nothing left.
    let (status, again) = other.operator("POST", &path, "").await;
    assert_eq!((status, again), (200, json!({"paused": 0, "failed": 0})));
    two.close().await;
}
