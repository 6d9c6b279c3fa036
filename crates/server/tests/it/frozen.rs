//! Pauses that are answered when the processes are stopped, and written to disk afterwards.

use std::sync::atomic::Ordering;

use model::lifecycle::State;
use protocol::node::WantedState;
use serde_json::{Value, json};
use server::settings::{PauseAnswer, ServerSettings};

use super::pause::{detail, origin, pause, post, state, traffic};
use super::platform::{Behaviour, FakeNode, TestPlatform, within};

fn frozen(settings: &mut ServerSettings) {
    settings.pause.processes_on_disk = true;
    settings.pause.answer = PauseAnswer::Frozen;
}

/// A platform whose node writes until it is told to go on.
async fn platform() -> TestPlatform {
    let platform = TestPlatform::start_adjusted(frozen).await;
    *platform.node.origin.lock() = Some(origin().await);
    *platform.node.write.lock() = Behaviour::Waits;
    platform
}

/// Pauses a sandbox, and waits until it is being written.
async fn pause_and_write(platform: &TestPlatform, id: &str) {
    pause(platform, id).await;
    within(platform.node.waiting.notified()).await;
    assert_eq!(storage(platform, id).await, json!("memory"));
}

async fn storage(platform: &TestPlatform, id: &str) -> Value {
    let detail = detail(platform, id).await;
    assert_eq!(
        (&detail["state"], &detail["pauseMode"]),
        (&json!("paused"), &json!("full"))
    );
    detail["pauseStorage"].clone()
}

async fn until_on_disk(platform: &TestPlatform, id: &str) {
    within(async { while storage(platform, id).await != json!("disk") {} }).await;
}

#[tokio::test]
async fn it_is_written_after_the_answer() {
    let platform = platform().await;
    let id = platform.create("").await;
    pause_and_write(&platform, &id).await;
    let before = detail(&platform, &id).await;
    // Nobody waits for it but who changes the sandbox.
    post(&platform, &id, "pause", "").await.error(409);
    post(&platform, &id, "fork", "").await.error(409);
    post(&platform, &id, "snapshots", "{}").await.error(404);
    post(&platform, &id, "timeout", r#"{"timeout":5}"#).await.error(404);
    platform.node.go.notify_one();
    until_on_disk(&platform, &id).await;
    let after = detail(&platform, &id).await;
    assert_eq!(after["endAt"], before["endAt"]);
    assert_eq!(after["pauseDiskBytes"], json!(64 << 20));
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    assert_eq!(platform.node.booted.lock().len(), 1);
    // A pause that keeps the files alone is answered as before.
    assert_eq!(post(&platform, &id, "pause", r#"{"memory":false}"#).await.status, 204);
    assert_eq!(detail(&platform, &id).await["pauseMode"], "filesystem");
}

#[tokio::test]
async fn a_resume_or_traffic_goes_on_from_memory() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":400,"autoResume":{"enabled":true}"#).await;
    for (path, body) in [("connect", r#"{"timeout":60}"#), ("resume", r#"{"autoPause":true}"#)] {
        pause_and_write(&platform, &id).await;
        assert_eq!(post(&platform, &id, path, body).await.status, 201);
        assert_eq!(state(&platform, &id).await, State::Running);
    }
    pause_and_write(&platform, &id).await;
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    assert_eq!(platform.node.booted.lock().len(), 0);
    assert!(platform.node.paused.lock().is_empty());
    // One that gives up the processes has nothing to wait for either.
    pause_and_write(&platform, &id).await;
    assert_eq!(post(&platform, &id, "resume", r#"{"memory":false}"#).await.status, 201);
    assert_eq!(platform.node.booted.lock().len(), 1);
}

#[tokio::test]
async fn a_kill_ends_both() {
    let platform = platform().await;
    let id = platform.create("").await;
    pause_and_write(&platform, &id).await;
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    platform.until_gone(&id).await;
    assert!(platform.node.running.lock().is_empty() && platform.node.kept.lock().is_empty());
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn what_is_not_written_stays_in_memory() {
    let platform = platform().await;
    let id = platform.create("").await;
    // A resume that fails interrupts it only for a while.
    pause_and_write(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Fails;
    post(&platform, &id, "resume", "").await.error(503);
    let why = detail(&platform, &id).await["resumeError"].clone();
    assert!(why.is_string());
    within(platform.node.waiting.notified()).await;
    assert_eq!(storage(&platform, &id).await, json!("memory"));
    platform.node.go.notify_one();
    until_on_disk(&platform, &id).await;
    assert_eq!(detail(&platform, &id).await["resumeError"], why);
    *platform.node.resume.lock() = Behaviour::Works;
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    for behaviour in [Behaviour::Fails, Behaviour::Panics] {
        *platform.node.write.lock() = behaviour;
        pause(&platform, &id).await;
        assert_eq!(storage(&platform, &id).await, json!("memory"));
        assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    }
}

#[tokio::test]
async fn the_next_start_writes_what_is_in_memory() {
    let platform = platform().await;
    let id = platform.create("").await;
    *platform.node.write.lock() = Behaviour::Fails;
    pause(&platform, &id).await;
    assert_eq!(storage(&platform, &id).await, json!("memory"));
    // The first server may try until its end.
    let node = FakeNode::new();
    *node.write.lock() = Behaviour::Works;
    let platform = platform.restart_on(node).await;
    let wanted = platform.node.wanted.lock().clone();
    assert_eq!(wanted[0].state, WantedState::Paused(model::lifecycle::Kept::Memory));
    until_on_disk(&platform, &id).await;
}
