//! Pausing and resuming sandboxes: by clients, at deadlines, and by traffic.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use model::id::SandboxId;
use model::lifecycle::State;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::platform::{Behaviour, KEY, MAX_LIFETIME_S, OTHER_KEY, Reply, TestPlatform, within};

/// A server in every sandbox: `/stream` begins a response that does not end, all else is answered.
pub(crate) async fn origin() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 8192];
                let got = tcp.read(&mut buffer).await.unwrap_or(0);
                if String::from_utf8_lossy(&buffer[..got]).contains("/stream") {
                    let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\npart").await;
                    let _ = tcp.read(&mut buffer).await;
                    return;
                }
                let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            });
        }
    });
    addr
}

pub(crate) async fn platform() -> TestPlatform {
    let platform = TestPlatform::start().await;
    *platform.node.origin.lock() = Some(origin().await);
    platform
}

pub(crate) fn parsed(id: &str) -> SandboxId {
    id.parse().expect("an id")
}

pub(crate) async fn post(platform: &TestPlatform, id: &str, what: &str, body: &str) -> Reply {
    platform.call("POST", &format!("/sandboxes/{id}/{what}"), body).await
}

pub(crate) async fn pause(platform: &TestPlatform, id: &str) {
    let reply = post(platform, id, "pause", "").await;
    assert_eq!((reply.status.as_u16(), reply.text.as_str()), (204, ""), "{reply:?}");
}

pub(crate) async fn detail(platform: &TestPlatform, id: &str) -> Value {
    let reply = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json
}

pub(crate) async fn state(platform: &TestPlatform, id: &str) -> State {
    let row = platform.store.sandbox_by_id(&parsed(id)).await.expect("a database");
    row.expect("a row").state
}

/// Waits until clients see the sandbox in a state.
pub(crate) async fn until_state(platform: &TestPlatform, id: &str, wanted: &str) {
    within(async { while detail(platform, id).await["state"] != wanted {} }).await;
}

async fn ids(platform: &TestPlatform, query: &str) -> Vec<String> {
    let reply = platform.call("GET", query, "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let items = reply.json.as_array().expect("a list").clone();
    let id = |item: &Value| {
        format!(
            "{} {}",
            item["sandboxID"].as_str().expect("an id"),
            item["state"].as_str().expect("a state")
        )
    };
    items.iter().map(id).collect()
}

/// The time as the server writes it, whose clock stands still: that of a sandbox that starts now.
async fn now(platform: &TestPlatform) -> Value {
    let id = platform.create("").await;
    let started = detail(platform, &id).await["startedAt"].clone();
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    started
}

pub(crate) async fn metrics(platform: &TestPlatform) -> String {
    let headers = [("host", "localhost")];
    super::platform::send(platform.metrics, "GET", "/metrics", &headers, Bytes::new())
        .await
        .text
}

/// A request to a port of a sandbox.
pub(crate) async fn traffic(platform: &TestPlatform, id: &str, port: u16, more: &[(&str, &str)]) -> Reply {
    let host = format!("{port}-{id}.sandbox.test");
    let headers: Vec<(&str, &str)> = [("host", host.as_str())]
        .into_iter()
        .chain(more.iter().copied())
        .collect();
    platform.send("GET", "/x", &headers, "").await
}

#[tokio::test]
async fn a_client_pauses_and_resumes() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":60,"metadata":{"a":"b"}"#).await;
    let before = detail(&platform, &id).await;
    assert_eq!(before["pauseMode"], Value::Null);
    platform.clock.advance(10);
    pause(&platform, &id).await;
    assert!(platform.node.paused.lock().contains(&parsed(&id)));
    let paused = detail(&platform, &id).await;
    // Where it is kept is part of the details.
    assert_eq!(paused["state"], "paused");
    assert_eq!(
        (&paused["pauseMode"], &paused["pauseStorage"]),
        (&json!("full"), &json!("memory"))
    );
    assert_eq!(paused["startedAt"], before["startedAt"]);
    assert_eq!(paused["endAt"], now(&platform).await);
    for key in [
        "metadata",
        "templateID",
        "envdAccessToken",
        "domain",
        "lifecycle",
        "memoryMB",
    ] {
        assert_eq!(paused[key], before[key], "{key}");
    }
    // Its deadline does not matter any more.
    platform.clock.advance(100_000);
    let listed = ids(&platform, "/v2/sandboxes").await;
    assert_eq!(listed, [format!("{id} paused")]);
    assert!(
        post(&platform, &id, "pause", "{}")
            .await
            .error(409)
            .contains("already paused")
    );
    for (method, what, body) in [
        ("POST", "timeout", r#"{"timeout":5}"#),
        ("POST", "refreshes", ""),
        ("PUT", "network", "{}"),
    ] {
        let reply = platform.call(method, &format!("/sandboxes/{id}/{what}"), body).await;
        reply.error(404);
    }
    let resumed = post(&platform, &id, "resume", "").await;
    assert_eq!(resumed.status, 201, "{resumed:?}");
    assert_eq!(resumed.json["sandboxID"], id);
    assert_eq!(resumed.json["envdAccessToken"], before["envdAccessToken"]);
    assert!(!platform.node.paused.lock().contains(&parsed(&id)));
    assert_eq!(platform.seconds_left(&id).await, 15);
    let after = detail(&platform, &id).await;
    assert_eq!(
        (&after["state"], &after["pauseMode"]),
        (&json!("running"), &Value::Null)
    );
    assert_eq!(after["startedAt"], now(&platform).await);
    assert!(
        post(&platform, &id, "resume", "")
            .await
            .error(409)
            .contains("already running")
    );
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 200);
    // The new run has a maximum lifetime of its own.
    let body = format!("{{\"timeout\":{}}}", 10 * MAX_LIFETIME_S);
    assert_eq!(post(&platform, &id, "timeout", &body).await.status, 204);
    assert_eq!(platform.seconds_left(&id).await, i64::from(MAX_LIFETIME_S));
    platform.clock.advance(i64::from(MAX_LIFETIME_S) + 1);
    platform.until_gone(&id).await;
}

#[tokio::test]
async fn bodies_and_unknown_sandboxes() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    for body in ["{", r#"{"memory":1}"#, r#"{"requireHealthyGuest":"x"}"#, "[]"] {
        post(&platform, &id, "pause", body).await.error(400);
    }
    // Nothing answers as its agent.
    let reply = post(&platform, &id, "pause", r#"{"requireHealthyGuest":true}"#).await;
    assert!(reply.error(503).contains("does not respond"), "{reply:?}");
    assert_eq!(reply.json["error_code"], "sandbox_guest_agent_unresponsive");
    *platform.node.origin.lock() = Some(origin().await);
    let missing = post(&platform, "inobody", "pause", "").await;
    let foreign = platform
        .call_as(Some(OTHER_KEY), "POST", &format!("/sandboxes/{id}/pause"), "")
        .await;
    assert_eq!(foreign.error(404).replace(&id, "inobody"), missing.error(404));
    post(&platform, "inobody", "pause", r#"{"memory":false}"#)
        .await
        .error(404);
    assert_eq!(state(&platform, &id).await, State::Running);
    for body in [
        r#"{"memory":true}"#,
        r#"{"memory":true,"requireHealthyGuest":true}"#,
        "{}",
        "",
    ] {
        assert_eq!(post(&platform, &id, "pause", body).await.status, 204, "{body}");
        // A resume with no time would end it.
        for what in ["resume", "connect"] {
            post(&platform, &id, what, r#"{"timeout":0}"#).await.error(400);
            let body = format!("{{\"timeout\":{}}}", MAX_LIFETIME_S + 1);
            post(&platform, &id, what, &body).await.error(400);
            platform
                .call_as(
                    Some(OTHER_KEY),
                    "POST",
                    &format!("/sandboxes/{id}/{what}"),
                    r#"{"timeout":5}"#,
                )
                .await
                .error(404);
        }
        assert_eq!(state(&platform, &id).await, State::Paused);
        let body = format!("{{\"timeout\":{MAX_LIFETIME_S},\"memory\":true}}");
        assert_eq!(post(&platform, &id, "resume", &body).await.status, 201);
        assert_eq!(platform.seconds_left(&id).await, i64::from(MAX_LIFETIME_S));
    }
}

#[tokio::test]
async fn a_connect_resumes_and_never_shortens() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":60"#).await;
    let v2 = format!("/v2/sandboxes/{id}/connect");
    for (body, left) in [
        ("", 300),
        ("{}", 300),
        (r#"{"timeout":20}"#, 20),
        (r#"{"timeout":900}"#, 900),
    ] {
        pause(&platform, &id).await;
        platform.clock.advance(1000);
        let reply = platform.call("POST", &v2, body).await;
        assert_eq!(reply.status, 201, "{reply:?}");
        assert_eq!(platform.seconds_left(&id).await, left, "{body}");
        // A second one finds it running.
        let reply = platform.call("POST", &v2, r#"{"timeout":5}"#).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(platform.seconds_left(&id).await, left, "{body}");
    }
    pause(&platform, &id).await;
    post(&platform, &id, "connect", "").await.error(400);
    assert_eq!(post(&platform, &id, "connect", r#"{"timeout":30}"#).await.status, 201);
    assert_eq!(post(&platform, &id, "connect", r#"{"timeout":0}"#).await.status, 200);
    assert_eq!(platform.seconds_left(&id).await, 30);
}

#[tokio::test]
async fn lists_show_and_filter_paused_sandboxes() {
    let platform = TestPlatform::start().await;
    let first = platform.create(r#","timeout":1000"#).await;
    platform.clock.advance(1);
    let second = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &first).await;
    let (first, second) = (format!("{first} paused"), format!("{second} running"));
    for (query, wanted) in [
        ("/v2/sandboxes", &[&second, &first][..]),
        ("/v2/sandboxes?state=running,paused", &[&second, &first]),
        ("/v2/sandboxes?state=paused", &[&first]),
        ("/v2/sandboxes?state=running", &[&second]),
        ("/v2/sandboxes?order=asc", &[&first, &second]),
        ("/sandboxes", &[&second]),
        ("/sandboxes?limit=5", &[&second]),
        ("/sandboxes?state=paused", &[&first]),
        ("/sandboxes?state=paused,running", &[&second, &first]),
    ] {
        let listed = ids(&platform, query).await;
        assert_eq!(listed.iter().collect::<Vec<_>>(), wanted, "{query}");
    }
    for (query, total) in [
        ("/v2/sandboxes", "1"),
        ("/v2/sandboxes?state=paused", ""),
        ("/sandboxes", "1"),
    ] {
        assert_eq!(
            platform.call("GET", query, "").await.header("x-total-running"),
            total,
            "{query}"
        );
    }
    // A page at a time, each once.
    let page = platform.call("GET", "/v2/sandboxes?limit=1", "").await;
    let next = page.header("x-next-token").replace('=', "%3D");
    let listed = ids(&platform, &format!("/v2/sandboxes?limit=1&nextToken={next}")).await;
    assert_eq!(listed, [first]);
}

#[tokio::test]
async fn a_paused_sandbox_is_killed_at_once() {
    let platform = platform().await;
    let id = platform.create("").await;
    pause(&platform, &id).await;
    let path = format!("/sandboxes/{id}");
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    assert!(platform.node.ids().is_empty());
    assert_eq!(
        platform.store.sandbox_by_id(&parsed(&id)).await.expect("a database"),
        None
    );
    platform.call("DELETE", &path, "").await.error(404);
    platform.call("GET", &path, "").await.error(404);
    for what in ["pause", "resume", "connect"] {
        post(&platform, &id, what, r#"{"timeout":5}"#).await.error(404);
    }
}

#[tokio::test]
async fn streams_are_cut_and_traffic_is_answered_like_that_of_an_ended_sandbox() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":1000"#).await;
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let request = format!("GET /stream HTTP/1.1\r\nHost: 3000-{id}.sandbox.test\r\n\r\n");
    tcp.write_all(request.as_bytes()).await.expect("written");
    let mut seen = Vec::new();
    within(async {
        while !String::from_utf8_lossy(&seen).contains("part") {
            let mut buffer = [0; 1024];
            let got = tcp.read(&mut buffer).await.expect("a response");
            assert!(got > 0, "the stream ended early");
            seen.extend_from_slice(&buffer[..got]);
        }
    })
    .await;
    pause(&platform, &id).await;
    // Aborted, because clients take a clean end for the end of a command.
    let error = within(tcp.read_to_end(&mut seen)).await.expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let dials = platform.node.dials.load(Ordering::SeqCst);
    for port in [3000, 49983] {
        let reply = traffic(&platform, &id, port, &[]).await;
        assert_eq!(reply.error(502), "The sandbox was not found");
        assert_eq!(reply.json["sandboxId"], id);
    }
    // Nothing was asked of it.
    assert_eq!(platform.node.dials.load(Ordering::SeqCst), dials);
    assert_eq!(state(&platform, &id).await, State::Paused);
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
}

#[tokio::test]
async fn a_failed_pause_leaves_the_sandbox_running() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":1000"#).await;
    for (behaviour, status) in [
        (Behaviour::Fails, 503),
        (Behaviour::Unsupported, 501),
        (Behaviour::Panics, 503),
        (Behaviour::PanicsAfterwards, 503),
    ] {
        *platform.node.pause.lock() = behaviour;
        let reply = post(&platform, &id, "pause", "").await;
        let message = reply.error(status);
        assert!(!message.contains("secret of the operator"), "{message}");
        assert_eq!(state(&platform, &id).await, State::Running, "{behaviour:?}");
        assert_eq!(detail(&platform, &id).await["state"], "running", "{behaviour:?}");
        assert!(!platform.node.paused.lock().contains(&parsed(&id)), "{behaviour:?}");
        assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok", "{behaviour:?}");
    }
    // Its deadline is still enforced.
    *platform.node.pause.lock() = Behaviour::Works;
    platform.clock.advance(1001);
    platform.until_gone(&id).await;
}

/// Otherwise a client would keep a sandbox for longer than it may, by pauses that fail.
#[tokio::test]
async fn a_failed_pause_does_not_move_the_deadline() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":60"#).await;
    platform.clock.advance(59);
    *platform.node.pause.lock() = Behaviour::WaitsAndFails;
    let failed = tokio::join!(post(&platform, &id, "pause", ""), async {
        within(platform.node.waiting.notified()).await;
        platform.clock.advance(2);
        platform.node.go.notify_one();
    });
    failed.0.error(503);
    platform.until_gone(&id).await;
}

#[tokio::test]
async fn a_failed_resume_leaves_the_sandbox_paused() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &id).await;
    let paused = detail(&platform, &id).await;
    platform.clock.advance(50);
    *platform.node.resume.lock() = Behaviour::Fails;
    for what in ["resume", "connect"] {
        let reply = post(&platform, &id, what, r#"{"timeout":5}"#).await;
        assert!(reply.error(503).contains("still paused"), "{reply:?}");
        let mut still = detail(&platform, &id).await;
        let why = still["resumeError"].take();
        assert!(why.as_str().is_some_and(|why| why.contains("the host failed")), "{why}");
        still.as_object_mut().expect("an object").remove("resumeError");
        assert_eq!(still, paused);
        assert_eq!(state(&platform, &id).await, State::Paused);
    }
    *platform.node.resume.lock() = Behaviour::Works;
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
}

#[tokio::test]
async fn concurrent_requests_share_one_transition() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":1000"#).await;
    let send = |what: &'static str, body: &'static str| {
        let (addr, path) = (platform.addr, format!("/sandboxes/{id}/{what}"));
        tokio::spawn(async move {
            let headers = [
                ("host", "localhost"),
                ("x-api-key", KEY),
                ("content-type", "application/json"),
            ];
            let body = Bytes::from_static(body.as_bytes());
            super::platform::send(addr, "POST", &path, &headers, body)
                .await
                .status
                .as_u16()
        })
    };
    *platform.node.pause.lock() = Behaviour::Waits;
    let first = send("pause", "");
    within(platform.node.waiting.notified()).await;
    // Its state is that which it is entering, and it cannot be changed.
    assert_eq!(detail(&platform, &id).await["state"], "paused");
    assert_eq!(
        ids(&platform, "/v2/sandboxes?state=paused").await,
        [format!("{id} paused")]
    );
    let reply = post(&platform, &id, "timeout", r#"{"timeout":5}"#).await;
    assert!(reply.error(409).contains("being paused"), "{reply:?}");
    let second = send("pause", "{}");
    *platform.node.pause.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    assert_eq!(within(first).await.expect("no panic"), 204);
    // It came while the first was in progress, or after it.
    let status = within(second).await.expect("no panic");
    assert!([204, 409].contains(&status), "{status}");
    assert_eq!(state(&platform, &id).await, State::Paused);

    *platform.node.resume.lock() = Behaviour::Waits;
    let connect = send("connect", r#"{"timeout":20}"#);
    within(platform.node.waiting.notified()).await;
    assert_eq!(detail(&platform, &id).await["state"], "paused");
    let reply = post(&platform, &id, "timeout", r#"{"timeout":5}"#).await;
    assert!(reply.error(409).contains("being resumed"), "{reply:?}");
    let resume = send("resume", "");
    let longer = send("connect", r#"{"timeout":600}"#);
    *platform.node.resume.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    assert_eq!(within(connect).await.expect("no panic"), 201);
    let status = within(resume).await.expect("no panic");
    assert!([201, 409].contains(&status), "{status}");
    let status = within(longer).await.expect("no panic");
    assert!([200, 201].contains(&status), "{status}");
    // Each has at least the time that it asked for.
    assert_eq!(platform.seconds_left(&id).await, 600);
}

#[tokio::test]
async fn a_kill_during_a_transition_wins() {
    let platform = TestPlatform::start().await;
    for resumes in [false, true] {
        let id = platform.create(r#","timeout":1000"#).await;
        if resumes {
            pause(&platform, &id).await;
            *platform.node.resume.lock() = Behaviour::Waits;
        } else {
            *platform.node.pause.lock() = Behaviour::Waits;
        }
        let send = |method: &'static str, path: String| {
            let addr = platform.addr;
            tokio::spawn(async move {
                let headers = [("host", "localhost"), ("x-api-key", KEY)];
                let body = Bytes::new();
                super::platform::send(addr, method, &path, &headers, body)
                    .await
                    .status
                    .as_u16()
            })
        };
        let what = if resumes { "resume" } else { "pause" };
        let changing = send("POST", format!("/sandboxes/{id}/{what}"));
        within(platform.node.waiting.notified()).await;
        let killing = send("DELETE", format!("/sandboxes/{id}"));
        platform.until_gone(&id).await;
        platform.node.go.notify_one();
        assert_eq!(within(killing).await.expect("no panic"), 204);
        assert_eq!(within(changing).await.expect("no panic"), 404);
        assert!(platform.node.ids().is_empty());
        *platform.node.pause.lock() = Behaviour::Works;
        *platform.node.resume.lock() = Behaviour::Works;
    }
}

#[tokio::test]
async fn one_that_ends_while_it_is_paused_is_removed() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &id).await;
    platform.node.exit(&parsed(&id)).await;
    platform.until_gone(&id).await;
    // Also when that is found out by the next subscription.
    let id = platform.create(r#","timeout":1000"#).await;
    pause(&platform, &id).await;
    platform.node.running.lock().remove(&parsed(&id));
    platform.node.end_subscription();
    platform.until_gone(&id).await;
    // And when it ends while it is being paused.
    let id = platform.create(r#","timeout":1000"#).await;
    *platform.node.pause.lock() = Behaviour::ExitsEarly;
    let reply = post(&platform, &id, "pause", "").await;
    assert!([204, 404].contains(&reply.status.as_u16()), "{reply:?}");
    platform.until_gone(&id).await;
}

#[tokio::test]
async fn deadlines_pause_where_that_was_asked_for() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":10,"autoPause":true"#).await;
    let lifecycle = detail(&platform, &id).await["lifecycle"].clone();
    assert_eq!(lifecycle, json!({"onTimeout": "pause", "autoResume": false}));
    platform.clock.advance(11);
    until_state(&platform, &id, "paused").await;
    // Kept at a resume, and changed by its body.
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    platform.clock.advance(16);
    until_state(&platform, &id, "paused").await;
    // Without time it is paused at once.
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    assert_eq!(post(&platform, &id, "timeout", r#"{"timeout":0}"#).await.status, 204);
    until_state(&platform, &id, "paused").await;
    assert_eq!(
        post(&platform, &id, "resume", r#"{"autoPause":false}"#).await.status,
        201
    );
    assert_eq!(detail(&platform, &id).await["lifecycle"]["onTimeout"], "kill");
    platform.clock.advance(16);
    platform.until_gone(&id).await;

    // A node that fails is asked again; meanwhile the sandbox runs.
    let id = platform.create(r#","timeout":10,"autoPause":true"#).await;
    let before = platform.node.kills.load(Ordering::SeqCst);
    *platform.node.pause.lock() = Behaviour::Fails;
    // Each attempt has a row of its own: its version rises.
    let version = async || {
        let row = platform.store.sandbox_by_id(&parsed(&id)).await.expect("a database");
        row.expect("a row").version
    };
    let first = version().await;
    platform.clock.advance(11);
    within(async { while version().await < first + 2 {} }).await;
    *platform.node.pause.lock() = Behaviour::Works;
    within(async {
        while detail(&platform, &id).await["state"] != "paused" {
            platform.clock.advance(1);
        }
    })
    .await;
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), before);

    // A host that can keep nothing of it ends it.
    let id = platform.create(r#","timeout":10,"autoPause":true"#).await;
    *platform.node.pause.lock() = Behaviour::Unsupported;
    *platform.node.pause_to_disk.lock() = Behaviour::Unsupported;
    platform.clock.advance(11);
    platform.until_gone(&id).await;
    let log = platform.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await;
    assert!(
        log.text.contains("pause_failed") && log.text.contains("unsupported"),
        "{}",
        log.text
    );
}

#[tokio::test]
async fn a_paused_sandbox_survives_a_restart() {
    let platform = platform().await;
    let id = platform
        .create(r#","timeout":60,"autoPause":true,"metadata":{"a":"b"}"#)
        .await;
    pause(&platform, &id).await;
    let before = detail(&platform, &id).await;
    platform.clock.advance(1000);
    let platform = platform.restart().await;
    *platform.node.origin.lock() = Some(origin().await);
    assert_eq!(detail(&platform, &id).await, before);
    assert!(platform.node.paused.lock().contains(&parsed(&id)));
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 502);
    let scraped = metrics(&platform).await;
    assert!(scraped.contains("ringfence_sandboxes{state=\"paused\"} 1"), "{scraped}");
    assert_eq!(post(&platform, &id, "connect", r#"{"timeout":30}"#).await.status, 201);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
    let log = platform.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await.text;
    for event in ["sandbox_paused", "sandbox_resumed"] {
        assert!(log.contains(event), "{event}: {log}");
    }
    let scraped = metrics(&platform).await;
    assert!(
        scraped.contains("ringfence_sandbox_resumes_total{reason=\"client\"} 1"),
        "{scraped}"
    );
    platform.clock.advance(31);
    until_state(&platform, &id, "paused").await;
}
