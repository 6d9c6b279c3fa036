//! Pauses that are answered when the processes are on disk, and what cancels them before.

use model::lifecycle::State;
use serde_json::json;
use server::settings::ServerSettings;
use tokio::task::JoinHandle;

use super::injections::{id_of, rules, save, shown};
use super::pause::{detail, origin, post, state, traffic, until_state};
use super::platform::{Behaviour, KEY, MAX_LIFETIME_S, Reply, TestPlatform, send, within};

fn on_disk(settings: &mut ServerSettings) {
    settings.pause.processes_on_disk = true;
    settings.limits.default.sandboxes = Some(1);
}

/// A platform whose node writes until it is told to go on.
async fn platform() -> TestPlatform {
    let platform = TestPlatform::start_adjusted(on_disk).await;
    *platform.node.origin.lock() = Some(origin().await);
    *platform.node.write.lock() = Behaviour::Waits;
    platform
}

/// Begins a pause, and waits until it writes.
async fn begin(platform: &TestPlatform, id: &str) -> JoinHandle<Reply> {
    let (addr, path) = (platform.addr, format!("/sandboxes/{id}/pause"));
    let pausing = tokio::spawn(async move {
        let headers = [("host", "localhost"), ("X-API-KEY", KEY)];
        send(addr, "POST", &path, &headers, bytes::Bytes::new()).await
    });
    within(platform.node.waiting.notified()).await;
    pausing
}

#[tokio::test]
async fn traffic_cancels_it() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600,"autoResume":{"enabled":true}"#).await;
    let before = detail(&platform, &id).await;
    let pausing = begin(&platform, &id).await;
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    assert_eq!(within(pausing).await.expect("no panic").status, 409);
    let after = detail(&platform, &id).await;
    assert_eq!(
        (&after["state"], &after["startedAt"]),
        (&json!("running"), &before["startedAt"])
    );
}

/// A sandbox that is being paused is left out when rules change, because its resume applies them. This one is not resumed.
#[tokio::test]
async fn a_rule_that_changes_before_it_is_cancelled_is_applied() {
    let platform = platform().await;
    let injection = json!({"type": "http", "base_url": "a.b", "headers": {"x-key": "before"}});
    let rule = id_of(&save(&platform, KEY, "one", &injection).await);
    let settings = format!(
        r#","timeout":600,"autoResume":{{"enabled":true}},"injections":{}"#,
        json!([{"type": "id", "id": rule}])
    );
    let id = platform.create(&settings).await;
    let pausing = begin(&platform, &id).await;
    let change = json!({"injection": {"type": "http", "base_url": "a.b", "headers": {"x-key": "after"}}}).to_string();
    let path = format!("/injection-rules/{rule}");
    assert_eq!(within(platform.call("PUT", &path, &change)).await.status, 200);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    assert_eq!(within(pausing).await.expect("no panic").status, 409);
    assert_eq!(shown(&rules(&platform, &id)), [[rule.as_str(), "a.b", "after"]]);
}

#[tokio::test]
async fn a_kill_cancels_it() {
    let platform = platform().await;
    let id = platform.create("").await;
    let pausing = begin(&platform, &id).await;
    let path = format!("/sandboxes/{id}");
    assert_eq!(within(platform.call("DELETE", &path, "")).await.status, 204);
    let paused = within(pausing).await.expect("no panic");
    assert!([404, 409].contains(&paused.status.as_u16()), "{paused:?}");
    assert!(!paused.text.contains("resumed"), "{paused:?}");
    platform.until_gone(&id).await;
    assert!(platform.node.running.lock().is_empty() && platform.node.kept.lock().is_empty());
}

/// A resume that is not the same as going on, and one for which there is no place.
#[tokio::test]
async fn what_means_more_or_is_not_allowed_waits_for_it() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":60"#).await;
    for body in [r#"{"timeout":7200}"#, r#"{"autoPause":true}"#, r#"{"memory":false}"#] {
        // Its longest lifetime has begun before.
        platform.clock.advance(5);
        let pausing = begin(&platform, &id).await;
        let (resumed, ()) = tokio::join!(post(&platform, &id, "resume", body), async {
            until_state(&platform, &id, "paused").await;
            platform.node.go.notify_one();
        });
        assert_eq!(resumed.status, 201, "{body}");
        assert_eq!(within(pausing).await.expect("no panic").status, 204, "{body}");
    }
    assert_eq!(MAX_LIFETIME_S, 7200);
    // The place of one that is being paused is free.
    let pausing = begin(&platform, &id).await;
    let other = platform.create("").await;
    let (resumed, ()) = tokio::join!(post(&platform, &id, "resume", ""), async {
        tokio::task::yield_now().await;
        platform.node.go.notify_one();
    });
    assert_eq!(resumed.status, 429);
    assert_eq!(within(pausing).await.expect("no panic").status, 204);
    assert_eq!(state(&platform, &id).await, State::Paused);
    assert_eq!(detail(&platform, &other).await["state"], "running");
}
