//! Traffic that resumes paused sandboxes, and limits of what is paused.

use bytes::Bytes;
use model::lifecycle::State;
use serde_json::json;
use server::settings::ServerSettings;

use super::pause::{detail, origin, pause, platform, post, state, traffic, until_state};
use super::platform::{Behaviour, TestPlatform, send, within};

#[tokio::test]
async fn traffic_resumes_where_that_was_asked_for() {
    let platform = platform().await;
    let id = platform
        .create(r#","timeout":400,"autoPause":true,"autoResume":{"enabled":true}"#)
        .await;
    let lifecycle = detail(&platform, &id).await["lifecycle"].clone();
    assert_eq!(lifecycle, json!({"onTimeout": "pause", "autoResume": true}));
    pause(&platform, &id).await;
    // The control routes of the agent wake nothing.
    let host = format!("49983-{id}.sandbox.test");
    platform.send("POST", "/init", &[("host", &host)], "").await.error(404);
    assert_eq!(state(&platform, &id).await, State::Paused);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    assert_eq!(platform.seconds_left(&id).await, 400);
    // Many at once resume it once.
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Waits;
    let all: Vec<_> = (0..8)
        .map(|_| {
            let (addr, host) = (platform.addr, format!("3000-{id}.sandbox.test"));
            tokio::spawn(async move { send(addr, "GET", "/x", &[("host", &host)], Bytes::new()).await.text })
        })
        .collect();
    within(platform.node.waiting.notified()).await;
    *platform.node.resume.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    for each in all {
        assert_eq!(within(each).await.expect("no panic"), "ok");
    }
    // A shorter time counts as 300 s.
    let short = platform.create(r#","timeout":10,"autoResume":{"enabled":true}"#).await;
    pause(&platform, &short).await;
    assert_eq!(traffic(&platform, &short, 3000, &[]).await.text, "ok");
    assert_eq!(platform.seconds_left(&short).await, 300);
    // One that cannot be resumed now.
    pause(&platform, &short).await;
    *platform.node.resume.lock() = Behaviour::Fails;
    let reply = traffic(&platform, &short, 3000, &[]).await;
    assert_eq!(
        reply.error(409),
        "The sandbox is still transitioning. Try again in a moment."
    );
}

#[tokio::test]
async fn traffic_resumes_only_with_the_tokens_that_it_needs() {
    let platform = platform().await;
    let made = platform
        .call(
            "POST",
            "/v2/sandboxes",
            r#"{"templateID":"base","autoResume":{"enabled":true},"network":{"allowPublicTraffic":false}}"#,
        )
        .await;
    assert_eq!(made.status, 201, "{made:?}");
    let text = |key: &str| made.json[key].as_str().expect("a text").to_owned();
    let (id, access, traffic_token) = (text("sandboxID"), text("envdAccessToken"), text("trafficAccessToken"));
    let refused = "This sandbox can't be resumed with the credentials provided. Check your access token and try again.";
    let (agent, port) = ("x-access-token", "e2b-traffic-access-token");
    for (number, header, token, resumes) in [
        (3000, None, "", false),
        (3000, Some(port), "x", false),
        (3000, Some(agent), access.as_str(), false),
        (3000, Some(port), traffic_token.as_str(), true),
        (49983, None, "", false),
        (49983, Some(agent), "x", false),
        (49983, Some(port), traffic_token.as_str(), false),
        (49983, Some(agent), access.as_str(), true),
    ] {
        pause(&platform, &id).await;
        let headers: Vec<(&str, &str)> = header.map(|name| (name, token)).into_iter().collect();
        let reply = traffic(&platform, &id, number, &headers).await;
        if resumes {
            assert_eq!(reply.text, "ok", "{number} {header:?}");
        } else {
            assert_eq!(reply.error(403), refused, "{number} {header:?}");
            assert_eq!(reply.json["sandboxId"], id);
            assert_eq!(state(&platform, &id).await, State::Paused, "{number} {header:?}");
            assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
        }
    }
}

fn one_of_each(settings: &mut ServerSettings) {
    settings.limits.default.sandboxes = Some(2);
    settings.limits.default.paused_sandboxes = 1;
}

#[tokio::test]
async fn limits_count_what_is_paused_apart_from_what_runs() {
    let platform = TestPlatform::start_adjusted(one_of_each).await;
    *platform.node.origin.lock() = Some(origin().await);
    let first = platform
        .create(r#","timeout":1000,"autoResume":{"enabled":true}"#)
        .await;
    let second = platform.create(r#","timeout":20,"autoPause":true"#).await;
    pause(&platform, &first).await;
    let reply = post(&platform, &second, "pause", "").await;
    let message = reply.error(429);
    assert!(
        message.contains("1 paused sandboxes") && message.contains("resume or kill"),
        "{message}"
    );
    assert_eq!(reply.header("should-retry"), "false");
    assert_eq!(detail(&platform, &second).await["state"], "running");
    // Another one runs instead, so the first cannot.
    let third = platform.create(r#","timeout":1000"#).await;
    let reply = post(&platform, &first, "resume", "").await;
    assert!(reply.error(429).contains("2 concurrent sandboxes"), "{reply:?}");
    let reply = traffic(&platform, &first, 3000, &[]).await;
    assert!(reply.error(429).contains("Sandbox limit reached"), "{reply:?}");
    // After a restart both are counted as before.
    let platform = platform.restart().await;
    post(&platform, &first, "resume", "").await.error(429);
    post(&platform, &second, "pause", "").await.error(429);
    // No other is promised to be paused at its deadline.
    let body = r#"{"templateID":"base","autoPause":true}"#;
    let reply = platform.call("POST", "/sandboxes", body).await;
    assert!(reply.error(429).contains("1 paused sandboxes"), "{reply:?}");
    // One that was promised that is kept beyond the limit.
    platform.clock.advance(21);
    until_state(&platform, &second, "paused").await;
    let log = platform.call("GET", &format!("/v2/sandboxes/{second}/logs"), "").await;
    assert!(log.text.contains("limits.paused_sandboxes"), "{}", log.text);
    assert_eq!(post(&platform, &first, "resume", "").await.status, 201);
    // Both places are taken by what runs and by what is paused.
    assert!(
        post(&platform, &third, "pause", "")
            .await
            .error(429)
            .contains("1 are in use")
    );
    for id in [&second, &third] {
        assert_eq!(
            platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
            204
        );
    }
    pause(&platform, &first).await;
}

#[tokio::test]
async fn where_nothing_may_be_paused_it_ends_at_its_deadline() {
    let platform = TestPlatform::start_adjusted(none).await;
    let id = platform.create(r#","timeout":20,"autoPause":true"#).await;
    platform.clock.advance(21);
    platform.until_gone(&id).await;
    let log = platform.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await;
    assert!(log.text.contains("pause_failed"), "{}", log.text);
}

fn one_disk(settings: &mut ServerSettings) {
    settings.limits.default.paused_disk_mb = Some(100);
    settings.limits.default.memory_mb = Some(2048);
    settings.capacity.max_sandboxes = Some(2);
}

#[tokio::test]
async fn a_sandbox_on_disk_takes_nothing_but_that() {
    let platform = TestPlatform::start_adjusted(one_disk).await;
    let one = || platform.create(r#","timeout":1000"#);
    let (first, second) = (one().await, one().await);
    let to_disk = r#"{"memory":false}"#;
    // Each takes 64 MiB.
    for id in [&first, &second] {
        assert_eq!(post(&platform, id, "pause", to_disk).await.status, 204);
    }
    // Neither their memory nor their places on the host are taken.
    let (third, fourth) = (one().await, one().await);
    let full = platform.call("POST", "/sandboxes", r#"{"templateID":"base"}"#).await;
    full.error(429);
    let reply = post(&platform, &third, "pause", to_disk).await;
    let message = reply.error(429);
    assert!(
        message.contains("100 MiB of disks of paused sandboxes, 128 are in use"),
        "{message}"
    );
    post(&platform, &first, "resume", "").await.error(429);
    // After a restart it is the same.
    let platform = platform.restart().await;
    post(&platform, &third, "pause", to_disk).await.error(429);
    post(&platform, &first, "resume", "").await.error(429);
    for id in [&third, &second] {
        assert_eq!(
            platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
            204
        );
    }
    assert_eq!(post(&platform, &first, "resume", "").await.status, 201);
    assert_eq!(post(&platform, &fourth, "pause", to_disk).await.status, 204);
}

fn for_an_hour(settings: &mut ServerSettings) {
    settings.pause.retention_s = Some(3600);
}

#[tokio::test]
async fn paused_sandboxes_are_kept_as_long_as_the_operator_says() {
    let platform = TestPlatform::start_adjusted(for_an_hour).await;
    let mut ids = Vec::new();
    for body in ["", r#"{"memory":false}"#] {
        let id = platform.create(r#","timeout":1000"#).await;
        assert_eq!(post(&platform, &id, "pause", body).await.status, 204);
        ids.push(id);
    }
    let resumed = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &resumed).await;
    platform.clock.advance(3500);
    assert_eq!(
        post(&platform, &resumed, "resume", r#"{"timeout":3000}"#).await.status,
        201
    );
    // Also those of an earlier start.
    let platform = platform.restart().await;
    for id in &ids {
        assert_eq!(detail(&platform, id).await["state"], "paused");
    }
    platform.clock.advance(101);
    for id in &ids {
        platform.until_gone(id).await;
        let log = platform.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await;
        assert!(log.text.contains("retention"), "{}", log.text);
    }
    assert!(platform.node.kept.lock().is_empty());
    assert_eq!(detail(&platform, &resumed).await["state"], "running");
}

fn none(settings: &mut ServerSettings) {
    settings.limits.default.paused_sandboxes = 0;
    settings.capacity.max_sandboxes = Some(1);
}

fn capacity_of_one(settings: &mut ServerSettings) {
    settings.capacity.max_sandboxes = Some(1);
}

#[tokio::test]
async fn a_paused_sandbox_keeps_its_place_on_the_host() {
    let platform = TestPlatform::start_adjusted(none).await;
    let id = platform.create("").await;
    post(&platform, &id, "pause", "").await.error(429);
    let platform = TestPlatform::start_adjusted(capacity_of_one).await;
    let id = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &id).await;
    let full = platform.call("POST", "/sandboxes", r#"{"templateID":"base"}"#).await;
    full.error(503);
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    platform.create("").await;
}
