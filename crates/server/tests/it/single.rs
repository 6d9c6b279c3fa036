//! `GET` and `DELETE /sandboxes/{sandboxID}`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::json;
use sqlx::{AnyConnection, Connection as _, Executor as _};

use super::platform::{BASE, Behaviour, TestPlatform, within};

#[tokio::test]
async fn detail_shows_the_requested_settings() {
    let platform = TestPlatform::start().await;
    let id = platform
        .create(r#","timeout":60,"metadata":{"a":"b"},"allow_internet_access":false,"network":{}"#)
        .await;
    let reply = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(reply.status, 200);
    let token = reply.json["envdAccessToken"].clone();
    assert_eq!(token.as_str().map(str::len), Some(64));
    let (started, end) = (reply.json["startedAt"].clone(), reply.json["endAt"].clone());
    let us = |time: &serde_json::Value| -> i64 {
        let time: jiff::Timestamp = time.as_str().expect("text").parse().expect("a time");
        time.as_microsecond()
    };
    assert_eq!(us(&end) - us(&started), 60_000_000);
    assert_eq!(us(&started), platform.clock.now_us());
    assert_eq!(
        reply.json,
        json!({
            "templateID": BASE, "sandboxID": id, "clientID": "6532622b", "alias": "base",
            "startedAt": started, "endAt": end, "cpuCount": 2, "memoryMB": 1024, "diskSizeMB": 10240,
            "metadata": {"a": "b"}, "state": "running", "envdVersion": "0.6.13", "volumeMounts": [],
            "envdAccessToken": token, "domain": "sandbox.test:3000", "allowInternetAccess": false,
            "network": {"allowPublicTraffic": true},
            "lifecycle": {"autoResume": false, "onTimeout": "kill"},
        })
    );
    // Absent, never null, when it was not requested.
    let id = platform.create("").await;
    let reply = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
    for key in ["allowInternetAccess", "network"] {
        assert!(reply.json.get(key).is_none(), "{key}");
    }
    // The id format of older clients.
    let path = format!("/sandboxes/{id}-6532622b");
    assert_eq!(platform.call("GET", &path, "").await.json["sandboxID"], id);
}

#[tokio::test]
async fn invalid_ids_are_refused() {
    let platform = TestPlatform::start().await;
    for id in ["IABC", "i_a", "i-a-b", "i-", "%2e%2e", "i%2Fa", "%ff", "i%00"] {
        for (method, path, body) in [
            ("GET", "", ""),
            ("DELETE", "", ""),
            ("POST", "/timeout", r#"{"timeout":1}"#),
            ("POST", "/refreshes", ""),
            ("POST", "/connect", r#"{"timeout":1}"#),
            ("PUT", "/network", "{}"),
        ] {
            let reply = platform.call(method, &format!("/sandboxes/{id}{path}"), body).await;
            assert!(reply.error(400).contains("invalid sandbox ID"), "{id}: {reply:?}");
        }
    }
    let unknown = platform.call("GET", "/sandboxes/iunknown", "").await;
    assert!(unknown.error(404).contains("\"iunknown\""), "{unknown:?}");
}

#[tokio::test]
async fn a_deleted_sandbox_is_gone_everywhere() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    let reply = platform.call("DELETE", &path, "").await;
    assert_eq!((reply.status.as_u16(), reply.text.as_str()), (204, ""));
    assert_eq!(reply.header("content-type"), "");
    assert!(platform.node.ids().is_empty());
    assert!(
        platform
            .rows()
            .sandbox_list_live()
            .await
            .expect("a database")
            .is_empty()
    );
    for (method, path, body) in [
        ("DELETE", path.clone(), ""),
        ("GET", path.clone(), ""),
        ("POST", format!("{path}/timeout"), r#"{"timeout":1}"#),
        ("POST", format!("{path}/refreshes"), ""),
        ("POST", format!("{path}/connect"), r#"{"timeout":1}"#),
        ("POST", format!("/v2{path}/connect"), ""),
        ("PUT", format!("{path}/network"), "{}"),
    ] {
        platform.call(method, &path, body).await.error(404);
    }
    assert_eq!(platform.call("GET", "/sandboxes", "").await.text, "[]");
}

#[tokio::test]
async fn concurrent_deletes_share_one_termination() {
    let platform = Arc::new(TestPlatform::start().await);
    // On an overloaded machine, the second request may come after the end, which is then not shared.
    let mut second = 404;
    for kills in 1..=10 {
        second = two_deletes(&platform).await;
        assert_eq!(platform.node.kills.load(Ordering::SeqCst), kills);
        if second != 404 {
            break;
        }
    }
    assert_eq!(second, 204);
}

/// Deletes a sandbox twice at the same time, and returns the status of the second answer.
async fn two_deletes(platform: &Arc<TestPlatform>) -> u16 {
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    *platform.node.kill.lock() = Behaviour::Waits;
    let delete = || {
        let (platform, path) = (Arc::clone(platform), path.clone());
        tokio::spawn(async move { platform.call("DELETE", &path, "").await.status })
    };
    let first = delete();
    within(platform.node.waiting.notified()).await;
    let second = delete();
    platform.call("GET", &path, "").await.error(404);
    for (path, body) in [
        (format!("{path}/connect"), r#"{"timeout":1}"#),
        (format!("/v2{path}/connect"), ""),
        (format!("{path}/timeout"), r#"{"timeout":1}"#),
        (format!("{path}/refreshes"), ""),
    ] {
        let reply = platform.call("POST", &path, body).await;
        assert!(reply.error(409).contains("killed"), "{reply:?}");
    }
    assert_eq!(platform.call("GET", "/sandboxes", "").await.text, "[]");
    platform.node.go.notify_one();
    assert_eq!(within(first).await.expect("no panic"), 204);
    within(second).await.expect("no panic").as_u16()
}

#[tokio::test]
async fn a_failed_termination_is_reported_and_retried() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    for behaviour in [Behaviour::Fails, Behaviour::Panics] {
        *platform.node.kill.lock() = behaviour;
        let reply = platform.call("DELETE", &path, "").await;
        // A node that panics has not answered, to a server that is another process.
        let is_silent = reply.json["error_code"] == "node_away" && behaviour == Behaviour::Panics;
        let status = if is_silent { 503 } else { 500 };
        assert!(!reply.error(status).contains("secret"), "{reply:?}");
        platform.call("GET", &path, "").await.error(404);
    }
    *platform.node.kill.lock() = Behaviour::Works;
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    platform.call("DELETE", &path, "").await.error(404);

    // If no client retries, the platform does.
    let id = platform.create("").await;
    *platform.node.kill.lock() = Behaviour::Fails;
    platform
        .call("DELETE", &format!("/sandboxes/{id}"), "")
        .await
        .error(500);
    *platform.node.kill.lock() = Behaviour::Works;
    platform.clock.advance(2);
    within(async {
        while !platform.node.ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_kill_whose_outcome_is_not_known_yet_is_503_and_retried() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    *platform.node.kill.lock() = Behaviour::Lost;
    let reply = platform.call("DELETE", &path, "").await;
    assert!(reply.error(503).contains("not connected"), "{reply:?}");
    assert_eq!(reply.json["error_code"], "node_away");
    assert_eq!(reply.header("retry-after"), "1");
    *platform.node.kill.lock() = Behaviour::Works;
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
}

#[tokio::test]
async fn a_kill_that_the_database_cannot_record_is_503_and_retried() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    let url = format!("sqlite:{}", platform.directory.path().join("test.db").display());
    let mut raw = AnyConnection::connect(&url).await.expect("a database");
    let refuse =
        "BEGIN; CREATE TRIGGER kept BEFORE DELETE ON sandboxes BEGIN SELECT RAISE(ABORT, 'no deletes'); END; COMMIT";
    raw.execute(refuse).await.expect("a trigger");
    for _ in 0..2 {
        let reply = platform.call("DELETE", &path, "").await;
        assert!(reply.error(503).contains("does not run any more"), "{reply:?}");
        assert_eq!(reply.header("retry-after"), "1");
        assert!(platform.node.ids().is_empty(), "something of it runs");
        platform.call("GET", &path, "").await.error(404);
    }
    raw.execute("DROP TRIGGER kept").await.expect("no trigger");
    // If no client retries, the platform does.
    platform.clock.advance(2);
    let id = id.parse().expect("an id");
    within(async {
        while platform.store.sandbox_by_id(&id).await.expect("a database").is_some() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    platform.call("DELETE", &path, "").await.error(404);
}

#[tokio::test]
async fn an_exited_sandbox_is_removed() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let other = platform.create("").await;
    for id in [&id, "iunknown"] {
        let id = id.parse().expect("an id");
        platform.node.exit(&id).await;
    }
    platform.until_gone(&id).await;
    platform
        .call("DELETE", &format!("/sandboxes/{id}"), "")
        .await
        .error(404);
    // Its row is removed shortly after its entry in memory.
    let listed = within(async {
        loop {
            let list = platform.call("GET", "/sandboxes", "").await;
            if list.json.as_array().map(Vec::len) == Some(1) {
                break list.json[0]["sandboxID"].clone();
            }
        }
    });
    assert_eq!(listed.await, other);
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_missed_exit_is_detected_at_the_next_subscription() {
    let platform = TestPlatform::start().await;
    let [lost, other] = [platform.create("").await, platform.create("").await];
    platform.node.running.lock().remove(&lost.parse().expect("an id"));
    platform.node.end_subscription();
    platform.until_gone(&lost).await;
    // Its row is removed shortly after its entry in memory.
    within(async {
        loop {
            let list = platform.call("GET", "/sandboxes", "").await;
            if list.json.as_array().map(Vec::len) == Some(1) {
                break;
            }
        }
    })
    .await;
    // Later events arrive.
    platform.node.exit(&other.parse().expect("an id")).await;
    platform.until_gone(&other).await;
}
