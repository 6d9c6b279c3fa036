//! Restores that fail, or whose turn does not come: they are not tried again and again, and clients are told when they may be.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use model::lifecycle::State;
use serde_json::json;
use server::settings::ServerSettings;

use super::pause::{detail, origin, pause, post, state, traffic, until_state};
use super::platform::{Behaviour, KEY, OTHER_KEY, Reply, TestPlatform, send, within};

fn on_disk(settings: &mut ServerSettings) {
    settings.pause.processes_on_disk = true;
}

async fn platform() -> TestPlatform {
    let platform = TestPlatform::start_adjusted(on_disk).await;
    *platform.node.origin.lock() = Some(origin().await);
    *platform.node.write.lock() = Behaviour::Works;
    platform
}

fn resumes(platform: &TestPlatform) -> usize {
    platform.node.resumes.load(Ordering::SeqCst)
}

fn is_delayed(reply: &Reply, wait_s: u32) {
    let message = reply.error(503);
    assert!(message.contains("the host failed to start it"), "{message}");
    assert!(
        message.contains(&format!("not tried again for {wait_s} s")),
        "{message}"
    );
    assert_eq!(reply.json["error_code"], "sandbox_resume_delayed");
    assert_eq!(reply.header("retry-after"), wait_s.to_string());
}

#[tokio::test]
async fn a_resume_that_failed_is_not_tried_again_at_once() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600,"autoResume":{"enabled":true}"#).await;
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Fails;
    for (tries, wait_s) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
        let reply = post(&platform, &id, "connect", r#"{"timeout":600}"#).await;
        assert!(reply.error(503).contains("could not be resumed"), "{reply:?}");
        let version = platform.store.sandbox_by_id(&id.parse().expect("an id")).await;
        let version = version.expect("a database").expect("a row").version;
        // Whoever asks is answered without a request to the node, or a change of the row.
        for what in ["connect", "resume"] {
            is_delayed(&post(&platform, &id, what, r#"{"timeout":600}"#).await, wait_s);
        }
        let reply = traffic(&platform, &id, 3000, &[]).await;
        assert!(reply.error(409).contains("still transitioning"), "{reply:?}");
        assert_eq!(reply.header("retry-after"), wait_s.to_string());
        assert!(!reply.text.contains("failed to start"), "not for strangers: {reply:?}");
        platform.clock.advance(i64::from(wait_s) - 1);
        is_delayed(&post(&platform, &id, "connect", r#"{"timeout":600}"#).await, 1);
        platform.clock.advance(1);
        assert_eq!(resumes(&platform), tries + 1);
        let row = platform.store.sandbox_by_id(&id.parse().expect("an id")).await;
        let row = row.expect("a database").expect("a row");
        assert_eq!((row.state, row.version), (State::Paused, version));
        assert!(detail(&platform, &id).await["resumeError"].is_string());
    }
    // Success ends it.
    *platform.node.resume.lock() = Behaviour::Works;
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Fails;
    post(&platform, &id, "connect", r#"{"timeout":600}"#).await.error(503);
    is_delayed(&post(&platform, &id, "connect", r#"{"timeout":600}"#).await, 1);
}

#[tokio::test]
async fn its_files_can_be_started_at_once() {
    let platform = platform().await;
    let id = platform.create("").await;
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Fails;
    let connect = |body: &'static str| post(&platform, &id, "connect", body);
    connect(r#"{"timeout":600}"#).await.error(503);
    is_delayed(&connect(r#"{"timeout":600}"#).await, 1);
    *platform.node.resume.lock() = Behaviour::Works;
    assert_eq!(connect(r#"{"timeout":600,"memory":false}"#).await.status, 201);
    // That it works is a success.
    pause(&platform, &id).await;
    assert_eq!(connect(r#"{"timeout":600}"#).await.status, 201);
    // What is kept in another way costs nobody a turn.
    assert_eq!(post(&platform, &id, "pause", r#"{"memory":false}"#).await.status, 204);
    *platform.node.resume.lock() = Behaviour::Fails;
    for _ in 0..2 {
        let reply = connect(r#"{"timeout":600}"#).await;
        assert!(reply.error(503).contains("could not be resumed"), "{reply:?}");
    }
    // A kill is never delayed.
    let path = format!("/sandboxes/{id}");
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
}

#[tokio::test]
async fn those_that_waited_for_an_attempt_do_not_make_others() {
    let platform = platform().await;
    let id = platform.create("").await;
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::WaitsAndFails;
    let connects: Vec<_> = (0..6)
        .map(|_| {
            let (addr, path) = (platform.addr, format!("/sandboxes/{id}/connect"));
            tokio::spawn(async move {
                let headers = [
                    ("host", "localhost"),
                    ("X-API-KEY", KEY),
                    ("content-type", "application/json"),
                ];
                send(addr, "POST", &path, &headers, r#"{"timeout":600}"#.into()).await
            })
        })
        .collect();
    within(platform.node.waiting.notified()).await;
    platform.node.go.notify_one();
    let mut codes = Vec::new();
    for connect in connects {
        let reply = within(connect).await.expect("no panic");
        reply.error(503);
        codes.push(reply.json["error_code"].as_str().unwrap_or_default().to_owned());
    }
    codes.sort();
    assert_eq!(resumes(&platform), 1);
    assert_eq!(codes[..1], [""]);
    assert_eq!(codes[1..], vec!["sandbox_resume_delayed"; 5]);
}

/// What was not tried does not count as a failure.
#[tokio::test]
async fn a_resume_whose_turn_did_not_come_can_be_tried_again() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600,"autoResume":{"enabled":true}"#).await;
    pause(&platform, &id).await;
    for (is_own, status, code, said) in [
        (true, 429, "restore_limit_reached", "limited to 2 sandboxes"),
        (false, 503, "restore_capacity_unavailable", "as many sandboxes"),
    ] {
        *platform.node.resume.lock() = Behaviour::Busy { is_own };
        for _ in 0..2 {
            let reply = post(&platform, &id, "connect", r#"{"timeout":600}"#).await;
            assert!(reply.error(status).contains(said), "{reply:?}");
            assert_eq!(reply.json["error_code"], code);
            assert_eq!(reply.header("retry-after"), "1");
        }
        let reply = traffic(&platform, &id, 3000, &[]).await;
        reply.error(if is_own { 429 } else { 409 });
        until_state(&platform, &id, "paused").await;
    }
    *platform.node.resume.lock() = Behaviour::Works;
    let reply = post(&platform, &id, "connect", r#"{"timeout":600}"#).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    assert_eq!(state(&platform, &id).await, State::Running);
}

#[tokio::test]
async fn a_start_whose_turn_did_not_come_is_refused() {
    let platform = platform().await;
    for (is_own, status, code) in [
        (true, 429, "restore_limit_reached"),
        (false, 503, "restore_capacity_unavailable"),
    ] {
        *platform.node.start.lock() = Behaviour::Busy { is_own };
        let body = json!({"templateID": "base"}).to_string();
        let reply = platform.call("POST", "/sandboxes", &body).await;
        reply.error(status);
        assert_eq!(
            (&reply.json["error_code"], reply.header("retry-after")),
            (&json!(code), "1")
        );
    }
    // Nothing is left of it.
    let list = platform.call("GET", "/v2/sandboxes", "").await.json;
    assert_eq!(list, json!([]));
}

#[tokio::test]
async fn a_sandbox_of_which_no_copy_starts_is_not_copied_again_at_once() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":3600"#).await;
    let fork = || post(&platform, &id, "fork", r#"{"count":2}"#);
    let copies = || platform.node.forked.lock().len();
    platform.node.forks_started.store(0, Ordering::SeqCst);
    // Turns that did not come do not count.
    *platform.node.forks_fail.lock() = Behaviour::Busy { is_own: true };
    for _ in 0..2 {
        let reply = fork().await;
        let children = reply.json.as_array().expect("a list");
        let codes: Vec<_> = children.iter().map(|child| &child["error"]["error_code"]).collect();
        assert_eq!(codes, [&json!("restore_limit_reached"); 2], "{reply:?}");
    }
    *platform.node.forks_fail.lock() = Behaviour::Fails;
    for wait_s in [1, 2, 4] {
        assert_eq!(fork().await.status, 201);
        let before = copies();
        let reply = fork().await;
        assert!(reply.error(503).contains("failed to start its copies"), "{reply:?}");
        assert_eq!(reply.json["error_code"], "sandbox_fork_delayed");
        assert_eq!(reply.header("retry-after"), wait_s.to_string());
        assert_eq!(copies(), before);
        platform.clock.advance(wait_s);
    }
    // One that starts is enough.
    platform.node.forks_started.store(1, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(fork().await.status, 201);
    }
    platform.node.forks_started.store(0, Ordering::SeqCst);
    assert_eq!(fork().await.status, 201);
    assert_eq!(fork().await.header("retry-after"), "1");
}

/// The node bounds what it restores by this name.
#[tokio::test]
async fn the_node_knows_what_belongs_to_one_team() {
    let platform = platform().await;
    let mut owners = Vec::new();
    for key in [KEY, KEY, OTHER_KEY] {
        let body = json!({"templateID": "base"}).to_string();
        let made = platform.call_as(Some(key), "POST", "/sandboxes", &body).await;
        let id = made.json["sandboxID"].as_str().expect("an id").to_owned();
        let started = platform
            .node
            .started
            .lock()
            .last()
            .and_then(|start| start.owner.clone());
        for (what, status) in [("fork", 201), ("pause", 204), ("connect", 201)] {
            let body = if what == "connect" { r#"{"timeout":60}"# } else { "" };
            let path = format!("/sandboxes/{id}/{what}");
            let reply = platform.call_as(Some(key), "POST", &path, body).await;
            assert_eq!(reply.status, status, "{reply:?}");
        }
        let node = Arc::clone(&platform.node);
        let resumed = node.booted.lock().last().and_then(|resume| resume.boot.clone()?.owner);
        let forked = node
            .forked
            .lock()
            .last()
            .and_then(|fork| fork.children[0].boot.owner.clone());
        assert!(started.is_some() && started == resumed && started == forked);
        owners.push(started);
    }
    assert_eq!(owners[0], owners[1]);
    assert_ne!(owners[0], owners[2]);
}
