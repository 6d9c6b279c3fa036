//! Deadlines that a node keeps itself: what it is told, and what follows from what it has done while no server was there.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::Kept;
use protocol::node::{Expired, ExpiredSandbox, NodeDeadline, Overdue, WantedState};
use serde_json::{Value, json};
use testkit::node::{Behaviour, FakeNode};

use crate::platform::{Reply, pause, within};
use crate::several::{Several, has};

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

/// A node that keeps deadlines.
fn keeping() -> Arc<FakeNode> {
    let node = FakeNode::new();
    node.deadlines.are_kept.store(true, Ordering::Relaxed);
    node
}

/// Creates a sandbox, once a node is there.
async fn created(server: &Several, timeout_s: u32, auto_pause: bool) -> SandboxId {
    let body = json!({ "templateID": "base", "timeout": timeout_s, "autoPause": auto_pause }).to_string();
    within(async {
        loop {
            let reply = server.call("POST", "/sandboxes", &body).await;
            if reply.status == 201 {
                return text(&reply.json["sandboxID"]).parse().expect("an id");
            }
            assert_eq!(reply.status, 503, "{reply:?}");
        }
    })
    .await
}

async fn change(server: &Several, id: &SandboxId, verb: &str, body: Value) -> Reply {
    let path = format!("/sandboxes/{id}/{verb}");
    server.call("POST", &path, &body.to_string()).await
}

async fn shown(server: &Several, id: &SandboxId) -> Reply {
    server.call("GET", &format!("/sandboxes/{id}"), "").await
}

/// What clients are told of a sandbox.
async fn events(server: &Several, id: &SandboxId) -> Vec<String> {
    let reply = server
        .call("GET", &format!("/events/sandboxes/{id}?orderAsc=true"), "")
        .await;
    let events = reply.json.as_array().expect("a list").iter();
    let kinds = events.map(|event| text(&event["type"]).replace("sandbox.lifecycle.", ""));
    kinds.collect()
}

fn is_about(deadline: Option<NodeDeadline>, left_s: u64, then: Overdue) {
    let deadline = deadline.expect("a deadline");
    assert_eq!(deadline.then, then);
    let late = Duration::from_secs(left_s).checked_sub(deadline.left);
    assert!(late.is_some_and(|late| late < Duration::from_secs(30)), "{deadline:?}");
}

#[tokio::test]
async fn a_node_is_told_each_deadline_and_nothing_is_changed_without_it() {
    let several = Several::start().await;
    let node = keeping();
    let connected = several.join(&node).await;
    let id = created(&several, 60, true).await;
    let ended = created(&several, 70, false).await;
    let started: HashMap<SandboxId, _> = (node.started.lock().iter())
        .map(|request| (request.id.clone(), request.deadline))
        .collect();
    is_about(started[&id], 60, Overdue::Pause(Kept::Memory));
    is_about(started[&ended], 70, Overdue::End);

    let told = || node.deadlines.told.lock().remove(&id);
    assert_eq!(
        change(&several, &id, "timeout", json!({ "timeout": 600 })).await.status,
        204
    );
    is_about(told(), 600, Overdue::Pause(Kept::Memory));
    // Nothing is extended by these.
    assert_eq!(
        change(&several, &id, "refreshes", json!({ "duration": 30 }))
            .await
            .status,
        204
    );
    assert_eq!(
        change(&several, &id, "connect", json!({ "timeout": 30 })).await.status,
        200
    );
    assert_eq!(told(), None);
    assert_eq!(
        change(&several, &id, "connect", json!({ "timeout": 700 })).await.status,
        200
    );
    is_about(told(), 700, Overdue::Pause(Kept::Memory));

    let before = shown(&several, &id).await.json["endAt"].clone();
    let is_refused = async || {
        for (verb, body) in [
            ("timeout", json!({ "timeout": 5 })),
            ("connect", json!({ "timeout": 900 })),
        ] {
            let refused = change(&several, &id, verb, body).await;
            assert_eq!(
                (refused.status.as_u16(), text(&refused.json["error_code"])),
                (503, "node_away".to_owned())
            );
        }
        assert_eq!(shown(&several, &id).await.json["endAt"], before);
    };
    for behaviour in [Behaviour::Fails, Behaviour::Unsupported] {
        *node.deadlines.set.lock() = behaviour;
        is_refused().await;
    }
    // A resume tells it with what it asks for.
    *node.deadlines.set.lock() = Behaviour::Works;
    assert_eq!(
        change(&several, &id, "pause", json!({ "memory": false })).await.status,
        204
    );
    assert_eq!(
        change(&several, &id, "connect", json!({ "timeout": 80 })).await.status,
        201
    );
    let booted = node.booted.lock().last().expect("resumed").deadline;
    is_about(booted, 80, Overdue::Pause(Kept::Memory));
    assert!(told().is_some(), "the deadline at the end of the start");

    // Where it is away, it cannot be told.
    let before = shown(&several, &ended).await.json["endAt"].clone();
    drop(connected);
    let refused = change(&several, &ended, "timeout", json!({ "timeout": 900 })).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json["error_code"]),
        (503, &json!("node_away"))
    );
    assert_eq!(shown(&several, &ended).await.json["endAt"], before);
    several.close().await;
}

#[tokio::test]
async fn a_node_of_the_version_before_is_neither_told_nor_asked() {
    let several = Several::start().await;
    let node = FakeNode::new();
    let connected = several.join(&node).await;
    let id = created(&several, 60, true).await;
    assert!(node.started.lock().iter().all(|request| request.deadline.is_none()));
    *node.deadlines.set.lock() = Behaviour::Fails;
    assert_eq!(
        change(&several, &id, "timeout", json!({ "timeout": 600 })).await.status,
        204
    );
    // It would be asked, and believed.
    node.deadlines.expired.lock().push(ExpiredSandbox {
        id: id.clone(),
        ago: Duration::ZERO,
        outcome: Expired::Ended,
    });
    node.adopts_all.store(true, Ordering::SeqCst);
    let several = several.restarted().await;
    let _again = several.connect(&node, &connected.credentials).await;
    within(async {
        while shown(&several, &id).await.json["state"] != "running" || node.wanted.lock().is_empty() {
            pause().await;
        }
    })
    .await;
    assert_eq!(events(&several, &id).await, ["created", "updated"]);
    several.close().await;
}

#[tokio::test]
async fn what_a_node_says_is_believed_within_bounds() {
    let several = Several::start().await;
    let node = keeping();
    let connected = several.join(&node).await;
    let paused = created(&several, 60, true).await;
    let ended = created(&several, 60, false).await;
    let own = created(&several, 60, false).await;
    let row = async |server: &Several, id: &SandboxId| server.store.sandbox_by_id(id).await.expect("a row");
    node.kept_bytes.store(u64::MAX, Ordering::SeqCst);
    assert_eq!(
        change(&several, &own, "pause", json!({ "memory": false })).await.status,
        204
    );
    let kept_bytes = row(&several, &own).await.and_then(|row| row.kept_bytes);
    assert_eq!(kept_bytes, Some(1 << 50));
    let started_us = row(&several, &paused).await.map(|row| row.started_us);
    let several = several.restarted().await;
    for id in [&paused, &ended] {
        node.running.lock().remove(id);
    }
    node.kept.lock().insert(paused.clone());
    let disk_bytes = u64::MAX;
    let kept = Kept::Filesystem;
    for (id, outcome) in [
        (&paused, Expired::Paused { kept, disk_bytes }),
        (&ended, Expired::Ended),
    ] {
        node.deadlines.expired.lock().push(ExpiredSandbox {
            id: id.clone(),
            ago: Duration::from_secs(u64::MAX),
            outcome,
        });
    }
    let _again = several.connect(&node, &connected.credentials).await;
    within(async {
        while !node.deadlines.expired.lock().is_empty() {
            pause().await;
        }
    })
    .await;
    let after = row(&several, &paused).await.expect("a row");
    assert_eq!((after.paused_us, after.kept_bytes), (started_us, Some(1 << 50)));
    assert_eq!(shown(&several, &ended).await.status, 404);
    several.close().await;
}

#[tokio::test]
async fn what_a_node_has_done_is_as_if_a_server_had() {
    let several = Several::start().await;
    let node = keeping();
    let connected = several.join(&node).await;
    let [ended, paused, lives, lost] = [
        created(&several, 60, false).await,
        created(&several, 60, true).await,
        created(&several, 60, true).await,
        created(&several, 60, true).await,
    ];
    let several = several.restarted().await;
    for id in [&ended, &paused, &lost] {
        node.running.lock().remove(id);
    }
    node.kept.lock().insert(paused.clone());
    node.adoptable.lock().insert(lives.clone());
    let expired = |id: &SandboxId, outcome| ExpiredSandbox {
        id: id.clone(),
        ago: Duration::from_secs(30),
        outcome,
    };
    let all = [
        expired(&ended, Expired::Ended),
        expired(
            &paused,
            Expired::Paused {
                kept: Kept::Filesystem,
                disk_bytes: 4 << 20,
            },
        ),
        // Of another node, or long gone.
        expired(&"iother".parse().expect("an id"), Expired::Ended),
    ];
    node.deadlines.expired.lock().extend(all.clone());
    let first = several.connect(&node, &connected.credentials).await;
    let taken_over = async |server: &Several| {
        within(async {
            while !node.deadlines.expired.lock().is_empty() {
                pause().await;
            }
            while shown(server, &lives).await.json["state"] != "running" {
                pause().await;
            }
        })
        .await;
    };
    taken_over(&several).await;
    let wanted: HashMap<SandboxId, _> = (node.wanted.lock().iter())
        .map(|wanted| (wanted.id.clone(), (wanted.state, wanted.deadline)))
        .collect();
    assert!(!wanted.contains_key(&ended));
    assert_eq!(wanted[&paused].0, WantedState::Paused(Kept::Filesystem));
    assert_eq!(wanted[&lives].0, WantedState::Running);
    is_about(wanted[&lives].1, 60, Overdue::Pause(Kept::Memory));
    assert_eq!(shown(&several, &ended).await.status, 404);
    assert_eq!(shown(&several, &paused).await.json["state"], "paused");
    assert_eq!(events(&several, &ended).await, ["created", "killed"]);
    assert_eq!(events(&several, &paused).await, ["created", "paused"]);
    assert_eq!(events(&several, &lost).await, ["created", "killed"]);
    let reasons = async |id: &SandboxId| {
        let logs = several.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await;
        let logs = logs.json["logs"].as_array().expect("a list").clone();
        let reasons = logs
            .iter()
            .filter_map(|entry| entry["fields"]["reason"].as_str().map(str::to_owned));
        reasons.collect::<Vec<_>>()
    };
    assert_eq!(reasons(&ended).await, ["expired"]);
    assert_eq!(reasons(&paused).await, ["timeout"]);
    assert_eq!(reasons(&lost).await, ["lost"]);

    // The node was not told that this is known, and says it again.
    node.deadlines.expired.lock().extend(all);
    node.wanted.lock().clear();
    drop(first);
    let several = several.restarted().await;
    let _second = several.connect(&node, &connected.credentials).await;
    taken_over(&several).await;
    assert_eq!(shown(&several, &paused).await.json["state"], "paused");
    assert_eq!(events(&several, &paused).await, ["created", "paused"]);
    let resumed = change(&several, &paused, "connect", json!({ "timeout": 90 })).await;
    assert_eq!(resumed.status, 201, "{resumed:?}");
    assert!(has(&node, &paused));
    is_about(
        node.booted.lock().last().expect("resumed").deadline,
        90,
        Overdue::Pause(Kept::Memory),
    );
    several.close().await;
}
