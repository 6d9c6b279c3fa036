//! Create requests with an `Idempotency-Key`.

use std::sync::Arc;

use model::id::SandboxId;
use store::idempotency::{Claim, NewIdempotencyKey, StoredResponse};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::platform::{Behaviour, KEY, OTHER_KEY, Reply, TestPlatform, team, within};

const BODY: &str =
    r#"{"templateID":"base","timeout":600,"metadata":{"a":"1","b":"2"},"envVars":{"PASSWORD":"hunter2"}}"#;
const DAY_S: i64 = 24 * 3600;

async fn create_as(platform: &TestPlatform, api_key: &str, path: &str, key: &str, body: &str) -> Reply {
    let headers = [
        ("host", "localhost"),
        ("x-api-key", api_key),
        ("content-type", "application/json"),
        ("idempotency-key", key),
    ];
    platform.send("POST", path, &headers, body.to_owned()).await
}

async fn create(platform: &TestPlatform, key: &str, body: &str) -> Reply {
    create_as(platform, KEY, "/sandboxes", key, body).await
}

fn id(reply: &Reply) -> SandboxId {
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json["sandboxID"].as_str().expect("an id").parse().expect("an id")
}

/// Repeats a create request until its key is not in progress any more.
async fn settled(platform: &TestPlatform, key: &str, body: &str) -> Reply {
    within(async {
        loop {
            let reply = create(platform, key, body).await;
            if reply.status != 409 {
                return reply;
            }
            assert_eq!(reply.json["error_code"], "idempotency_in_progress", "{reply:?}");
        }
    })
    .await
}

#[tokio::test]
async fn repeated_requests_return_the_same_sandbox() {
    let platform = TestPlatform::start().await;
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let first = create_as(&platform, KEY, path, path, BODY).await;
        // The same values in another order and with other white space.
        let other = r#"{"envVars": {"PASSWORD":"hunter2"}, "metadata":{"b":"2","a":"1"}, "timeout":600,
                        "templateID":"base"}"#;
        for body in [BODY, other, BODY] {
            let again = create_as(&platform, KEY, path, path, body).await;
            assert_eq!(id(&again), id(&first));
            assert_eq!(again.json, first.json);
        }
        // Without a key or with another key, it is another request.
        assert_ne!(id(&platform.call("POST", path, BODY).await), id(&first));
        assert_ne!(
            id(&create_as(&platform, KEY, path, &format!("{path}2"), BODY).await),
            id(&first)
        );
        // Keys are separate for each team.
        assert_ne!(id(&create_as(&platform, OTHER_KEY, path, path, BODY).await), id(&first));
    }
    assert_eq!(platform.node.ids().len(), 8);
}

#[tokio::test]
async fn a_repeated_answer_includes_the_traffic_token() {
    let platform = TestPlatform::start().await;
    let body = r#"{"templateID":"base","network":{"allowPublicTraffic":false}}"#;
    let first = create(&platform, "k", body).await;
    assert!(first.json["trafficAccessToken"].is_string(), "{first:?}");
    assert_eq!(create(&platform, "k", body).await.json, first.json);
}

#[tokio::test]
async fn a_key_cannot_be_reused_for_another_request() {
    let platform = TestPlatform::start().await;
    let other = r#"{"templateID":"base","timeout":601}"#;
    for (path, elsewhere, status) in [
        ("/sandboxes", "/v2/sandboxes", 422),
        ("/v2/sandboxes", "/sandboxes", 409),
    ] {
        let first = create_as(&platform, KEY, path, path, BODY).await;
        // The same body means something else on the other path.
        for (path, key, body, status) in [
            (elsewhere, path, BODY, status),
            (path, path, other, if status == 422 { 409 } else { 422 }),
        ] {
            let reply = create_as(&platform, KEY, path, key, body).await;
            reply.error(status);
            assert_eq!(reply.json["error_code"], "idempotency_request_mismatch");
        }
        assert_eq!(id(&create_as(&platform, KEY, path, path, BODY).await), id(&first));
    }
    assert_eq!(platform.node.ids().len(), 2);
}

#[tokio::test]
async fn invalid_keys_are_refused() {
    let platform = TestPlatform::start().await;
    let longest = "k".repeat(255);
    for good in ["k", "!\"#~", "0192f0c1-7b1e", &longest] {
        id(&create(&platform, good, BODY).await);
    }
    let too_long = "k".repeat(256);
    for bad in ["", "a b", &too_long, "\u{e9}"] {
        let reply = create(&platform, bad, BODY).await;
        assert!(reply.error(400).contains("Idempotency-Key"), "{bad}: {reply:?}");
    }
    let headers = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("content-type", "application/json"),
        ("idempotency-key", "a"),
        ("idempotency-key", "b"),
    ];
    let twice = platform.send("POST", "/sandboxes", &headers, BODY).await;
    assert!(twice.error(400).contains("once"), "{twice:?}");
    assert_eq!(platform.node.ids().len(), 4);
}

#[tokio::test]
async fn a_repeated_request_in_progress_is_refused() {
    let platform = Arc::new(TestPlatform::start().await);
    *platform.node.start.lock() = Behaviour::Waits;
    let first = {
        let platform = Arc::clone(&platform);
        tokio::spawn(async move { create(&platform, "k", BODY).await })
    };
    within(platform.node.waiting.notified()).await;
    let early = create(&platform, "k", BODY).await;
    early.error(409);
    assert_eq!(early.json["error_code"], "idempotency_in_progress");
    assert_eq!(early.header("retry-after"), "1");
    let other = create(&platform, "k", r#"{"templateID":"base"}"#).await;
    other.error(409);
    assert_eq!(other.json["error_code"], "idempotency_request_mismatch");
    platform.node.go.notify_one();
    let first = first.await.expect("no panic");
    assert_eq!(id(&create(&platform, "k", BODY).await), id(&first));
    assert_eq!(platform.node.ids().len(), 1);
}

#[tokio::test]
async fn one_of_many_concurrent_requests_proceeds() {
    let platform = Arc::new(TestPlatform::start().await);
    let mut creates = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let platform = Arc::clone(&platform);
        creates.spawn(async move { settled(&platform, "k", BODY).await });
    }
    let replies = creates.join_all().await;
    let first = id(&replies[0]);
    assert!(replies.iter().all(|reply| id(reply) == first));
    assert_eq!(platform.node.started.lock().len(), 1);
}

#[tokio::test]
async fn a_failed_create_frees_its_key() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.sandboxes = Some(1)).await;
    for (key, behaviour) in [
        ("fails", Behaviour::Fails),
        ("full", Behaviour::Full),
        ("panics", Behaviour::Panics),
        ("dies", Behaviour::ExitsEarly),
    ] {
        *platform.node.start.lock() = behaviour;
        // The remains of a failed start, including the key, may be removed after the response.
        let status = within(async {
            loop {
                let status = settled(&platform, key, BODY).await.status.as_u16();
                if status != 429 {
                    return status;
                }
            }
        })
        .await;
        assert!(status >= 500, "{key}: {status}");
        *platform.node.start.lock() = Behaviour::Works;
        let retried = within(async {
            loop {
                let reply = settled(&platform, key, BODY).await;
                if reply.status != 429 {
                    return reply;
                }
            }
        })
        .await;
        let killed = platform
            .call("DELETE", &format!("/sandboxes/{}", id(&retried)), "")
            .await;
        assert_eq!(killed.status, 204);
    }
    // Requests refused before anything is created: the key is free when the response arrives.
    create(&platform, "k", r#"{"templateID":"unknown"}"#).await.error(404);
    create(&platform, "k", r#"{"templateID":"base","timeout":0}"#)
        .await
        .error(400);
    let running = create(&platform, "k", BODY).await;
    create(&platform, "quota", BODY).await.error(429);
    assert_eq!(
        id(&create(&platform, "k", BODY).await),
        id(&running),
        "an answer costs no quota"
    );
    platform
        .call("DELETE", &format!("/sandboxes/{}", id(&running)), "")
        .await;
    assert_ne!(id(&create(&platform, "quota", BODY).await), id(&running));
}

#[tokio::test]
async fn a_repeated_request_does_not_count_as_a_create() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.creates_per_minute = Some(1)).await;
    let first = create(&platform, "k", BODY).await;
    assert_eq!(id(&create(&platform, "k", BODY).await), id(&first));
    create(&platform, "l", BODY).await.error(429);
}

#[tokio::test]
async fn a_retry_after_a_disconnect_finds_the_sandbox() {
    let platform = TestPlatform::start().await;
    *platform.node.start.lock() = Behaviour::Waits;
    let mut client = TcpStream::connect(platform.addr).await.expect("connect");
    let request = format!(
        "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n\
         Idempotency-Key: k\r\nContent-Length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    client.write_all(request.as_bytes()).await.expect("written");
    within(platform.node.waiting.notified()).await;
    drop(client);
    create(&platform, "k", BODY).await.error(409);
    platform.node.go.notify_one();
    let again = settled(&platform, "k", BODY).await;
    assert_eq!(platform.node.ids(), [id(&again).to_string()].into());
}

#[tokio::test]
async fn a_claim_that_another_server_has_settled_leaves_no_second_sandbox() {
    let team = team(1);
    for is_answer in [false, true] {
        let platform = Arc::new(TestPlatform::start().await);
        *platform.node.start.lock() = Behaviour::Waits;
        let first = {
            let platform = Arc::clone(&platform);
            tokio::spawn(async move { create(&platform, "k", BODY).await })
        };
        within(platform.node.waiting.notified()).await;
        // What another server does when this one seems to be gone.
        let claimed = platform.store.idempotency_by_key(&team, "k").await.expect("a database");
        let sandbox = claimed.expect("a claim").sandbox_id;
        if is_answer {
            let answer = StoredResponse {
                status: 201,
                json: "{}".to_owned(),
            };
            let stored = platform.store.idempotency_complete(&team, "k", &sandbox, &answer);
            assert!(stored.await.expect("a database"));
        } else {
            let freed = platform.store.idempotency_abandon(&team, "k", &sandbox);
            freed.await.expect("a database");
        }
        platform.node.go.notify_one();
        let first = first.await.expect("no panic");
        if is_answer {
            assert_eq!(id(&first), sandbox);
            assert_eq!(platform.node.ids().len(), 1);
        } else {
            first.error(504);
            within(async {
                while !platform.node.ids().is_empty() {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
    }
}

#[tokio::test]
async fn answers_are_kept_for_a_day_even_if_the_sandbox_ended() {
    let platform = TestPlatform::start().await;
    let first = create(&platform, "k", BODY).await;
    platform.call("DELETE", &format!("/sandboxes/{}", id(&first)), "").await;
    assert_eq!(create(&platform, "k", BODY).await.json, first.json);
    let platform = platform.restart().await;
    platform.clock.advance(DAY_S - 1);
    assert_eq!(create(&platform, "k", BODY).await.json, first.json);
    platform.clock.advance(1);
    let next = create(&platform, "k", r#"{"templateID":"base"}"#).await;
    assert_ne!(id(&next), id(&first), "the key is as new");
}

#[tokio::test]
async fn claims_interrupted_by_a_crash_are_resolved() {
    let platform = TestPlatform::start().await;
    let made = id(&create(&platform, "made", BODY).await);
    let row = platform.store.idempotency_by_key(&team(1), "made").await;
    let row = row.expect("a database").expect("a row");
    let running = id(&platform.call("POST", "/sandboxes", BODY).await);
    // Claims as left by a killed platform: before there was a sandbox, and just after it ran.
    let now_us = platform.clock.now_us();
    let claim = async |platform: &TestPlatform, key: &str, sandbox: &SandboxId| {
        let new = NewIdempotencyKey {
            team_id: team(1),
            key: key.to_owned(),
            body_hash: row.body_hash.clone(),
            sandbox_id: sandbox.clone(),
            created_us: now_us,
            expires_us: row.expires_us,
        };
        let claimed = platform.rows().idempotency_claim(&new).await.expect("a database");
        assert_eq!(claimed, Claim::Acquired);
    };
    let nothing: SandboxId = "inothing".parse().expect("an id");
    for (key, sandbox) in [("nothing", &nothing), ("running", &running)] {
        claim(&platform, key, sandbox).await;
    }
    let platform = platform.restart().await;
    let left = platform
        .rows()
        .idempotency_list_in_progress()
        .await
        .expect("a database");
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(id(&create(&platform, "running", BODY).await), running);
    assert_eq!(id(&create(&platform, "made", BODY).await), made);
    let new = id(&create(&platform, "nothing", BODY).await);
    assert!(new != running && new != made && new != nothing);
    assert_eq!(platform.node.ids().len(), 3);

    // The same without a restart: the database failed when the claim was to be completed.
    for (key, sandbox) in [("nothing2", &nothing), ("running2", &running)] {
        claim(&platform, key, sandbox).await;
    }
    assert_eq!(id(&create(&platform, "running2", BODY).await), running);
    id(&create(&platform, "nothing2", BODY).await);
    assert_eq!(platform.node.ids().len(), 4);
}

#[tokio::test]
async fn stored_answers_hold_no_secret() {
    let platform = TestPlatform::start().await;
    let reply = create(&platform, "k", BODY).await;
    let row = platform.store.idempotency_by_key(&team(1), "k").await;
    let row = row.expect("a database").expect("a row");
    let kept = format!("{row:?}");
    let token = reply.json["envdAccessToken"].as_str().expect("a token");
    assert!(!kept.contains("hunter2") && !kept.contains(token), "{kept}");
    assert_eq!(row.body_hash.len(), 64);
}
