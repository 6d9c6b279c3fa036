//! `POST /sandboxes` and `POST /v2/sandboxes`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use model::lifecycle::State;
use protocol::node::Image;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::platform::{BASE, Behaviour, KEY, MAX_LIFETIME_S, Reply, TestPlatform, pause, within};

/// Sends a create request for `base` with additional keys.
async fn create(platform: &TestPlatform, path: &str, keys: &str) -> Reply {
    let separator = if keys.is_empty() { "" } else { "," };
    platform
        .call("POST", path, &format!("{{\"templateID\":\"base\"{separator}{keys}}}"))
        .await
}

#[tokio::test]
async fn create_returns_all_fields() {
    let platform = TestPlatform::start().await;
    let reply = platform
        .call("POST", "/v2/sandboxes", r#"{"templateID":" BASE "}"#)
        .await;
    assert_eq!(reply.status, 201);
    assert_eq!(reply.header("content-type"), "application/json; charset=utf-8");
    let id = reply.json["sandboxID"].as_str().expect("an id");
    assert_eq!(id.len(), 21);
    assert!(id.starts_with('i'));
    let token = reply.json["envdAccessToken"].as_str().expect("a token");
    assert_eq!(token.len(), 64);
    let traffic = reply.json["trafficAccessToken"]
        .as_str()
        .expect("a traffic token in every response");
    assert!(traffic.len() == 64 && traffic != token);
    assert_eq!(
        reply.json,
        json!({
            "templateID": BASE, "sandboxID": id, "clientID": "6532622b", "alias": "base",
            "envdVersion": "0.6.13", "envdAccessToken": token, "domain": "sandbox.test:3000",
            "trafficAccessToken": reply.json["trafficAccessToken"],
        })
    );
    let stages: Vec<&str> = reply
        .header("server-timing")
        .split(", ")
        .map(|stage| stage.split(";dur=").next().expect("a name"))
        .collect();
    assert_eq!(stages, ["auth", "template", "spawn", "init", "store", "total"]);
    assert!(reply.header("server-timing").contains("spawn;dur=1.500"));
    assert_eq!(reply.header("x-request-id").len(), 32);

    let started = platform.node.started.lock();
    let start = started.first().expect("a start");
    assert_eq!(start.id.as_str(), id);
    assert_eq!(start.image, Image::Base);
    assert_eq!((start.resources.cpu_count, start.resources.memory_mb), (2, 1024));
    assert_eq!(start.init.access_token.as_deref(), Some(token));
    assert_eq!(start.init.sandbox_id.as_deref(), Some(id));
    assert_eq!(start.init.template_id.as_deref(), Some(BASE));
    assert_eq!(start.init.default_user.as_deref(), Some("user"));
    assert!(start.init.timestamp.as_deref().is_some_and(|time| time.ends_with('Z')));
}

#[tokio::test]
async fn only_v1_may_create_an_open_agent() {
    let platform = TestPlatform::start().await;
    for (path, keys, open) in [
        ("/sandboxes", "", true),
        ("/sandboxes", "\"secure\":false", true),
        ("/sandboxes", "\"secure\":true", false),
        ("/v2/sandboxes", "", false),
        ("/v2/sandboxes", "\"secure\":false", false),
        // Private ports make the agent secure by default.
        ("/sandboxes", r#""network":{"allowPublicTraffic":false}"#, false),
        ("/sandboxes", r#""network":{"allowPublicTraffic":true}"#, true),
        ("/sandboxes", r#""network":{"allowPublicTraffic":null}"#, true),
        (
            "/sandboxes",
            r#""secure":true,"network":{"allowPublicTraffic":false}"#,
            false,
        ),
        (
            "/sandboxes",
            r#""secure":false,"network":{"allowPublicTraffic":true}"#,
            true,
        ),
        ("/v2/sandboxes", r#""network":{"allowPublicTraffic":false}"#, false),
    ] {
        let reply = create(&platform, path, keys).await;
        assert_eq!(reply.status, 201, "{path} {keys}");
        assert!(
            reply.json["envdAccessToken"].is_string(),
            "a token comes with every sandbox"
        );
        let started = platform.node.started.lock();
        let init = &started.last().expect("a start").init;
        assert_eq!(init.open_to_anonymous, open, "{path} {keys}");
        assert!(init.access_token.is_some());
        assert_eq!((init.cpu_count, init.memory_mb), (Some(2), Some(1024)));
    }
}

#[tokio::test]
async fn defaults_differ_by_path_and_null_means_the_default() {
    let platform = TestPlatform::start().await;
    for (path, keys, seconds) in [
        ("/sandboxes", "", 15),
        ("/v2/sandboxes", "", 300),
        ("/sandboxes", r#""timeout":null"#, 15),
        ("/v2/sandboxes", r#""timeout":null,"autoPause":null,"mcp":null"#, 300),
        ("/sandboxes", r#""timeout":1"#, 1),
        ("/sandboxes", r#""timeout":60.0"#, 60),
        ("/sandboxes", r#""timeout":6e1"#, 60),
        ("/sandboxes", r#""timeout":7200"#, 7200),
    ] {
        let reply = create(&platform, path, keys).await;
        assert_eq!(reply.status, 201, "{path} {keys}: {reply:?}");
        let id = reply.json["sandboxID"].as_str().expect("an id");
        assert_eq!(platform.seconds_left(id).await, seconds, "{path} {keys}");
    }
}

#[tokio::test]
async fn sdk_bodies_are_accepted() {
    let platform = TestPlatform::start().await;
    for keys in [
        r#""timeout":300,"secure":true,"allow_internet_access":true"#,
        r#""timeout":300,"secure":true,"allow_internet_access":true,"metadata":{},"envVars":{},"autoPause":false"#,
        r#""secure":false,"allow_internet_access":false"#,
        r#""autoPause":false,"autoResume":{"enabled":false}"#,
        r#""mcp":{"anything":[1,{}]},"unknown":{"x":1}"#,
        r#""injections":[],"resources":[],"volumeMounts":[],"iam":{"tokens":{}},"iam2":1"#,
        r#""network":{"allowPublicTraffic":true,"allowOut":[],"denyOut":[],"rules":{},"egressProxy":null}"#,
        r#""network":{"allowPublicTraffic":null,"maskRequestHost":""}"#,
        r#""metadata":{"a":"","ü \u0000":"x"},"envVars":{"A":"1=2\n"}"#,
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let reply = create(&platform, path, keys).await;
            assert_eq!(reply.status, 201, "{path} {keys}: {reply:?}");
            assert!(reply.json["trafficAccessToken"].is_string());
        }
    }
    let started = platform.node.started.lock();
    let env = started.last().expect("a start").init.env_vars.clone();
    assert_eq!(env, Some([("A".to_owned(), "1=2\n".to_owned())].into()));
}

#[tokio::test]
async fn invalid_bodies_are_refused() {
    let platform = TestPlatform::start().await;
    for keys in [
        r#""timeout":-1"#,
        r#""timeout":1.5"#,
        r#""timeout":"60""#,
        r#""timeout":2147483648"#,
        r#""timeout":1e300"#,
        r#""timeout":18446744073709551616"#,
        r#""timeout":true"#,
        r#""autoPause":"no""#,
        r#""autoPauseMemory":0"#,
        r#""autoResume":{}"#,
        r#""autoResume":null"#,
        r#""autoResume":{"enabled":null}"#,
        r#""allow_internet_access":null"#,
        r#""allow_internet_access":"true""#,
        r#""metadata":null"#,
        r#""metadata":[]"#,
        r#""metadata":{"a":1}"#,
        r#""metadata":{"a":null}"#,
        r#""envVars":{"a":true}"#,
        r#""network":null"#,
        r#""network":[]"#,
        r#""network":{"allowPublicTraffic":1}"#,
        r#""network":{"allowOut":"1.1.1.1"}"#,
        r#""mcp":[]"#,
        r#""volumeMounts":{}"#,
        r#""iam":[]"#,
        r#""injections":{}"#,
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let reply = create(&platform, path, keys).await;
            assert!(
                reply.error(400).starts_with("validation error: "),
                "{path} {keys}: {reply:?}"
            );
        }
    }
    create(&platform, "/sandboxes", r#""secure":1"#).await.error(400);
    for body in ["{}", r#"{"templateID":null}"#, r#"{"templateID":1}"#] {
        let reply = platform.call("POST", "/sandboxes", body).await;
        assert!(reply.error(400).contains("templateID"), "{reply:?}");
    }
    assert!(platform.node.started.lock().is_empty());
}

#[tokio::test]
async fn unsupported_features_are_refused_by_name() {
    let platform = TestPlatform::start().await;
    let too_long = format!("\"timeout\":{}", MAX_LIFETIME_S + 1);
    for (keys, fragment) in [
        (r#""timeout":0"#, "greater than 0"),
        (too_long.as_str(), "2 hours"),
        (r#""autoPauseMemory":false"#, "requires autoPause"),
        (
            r#""autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}"#,
            "autoPauseMemory: false excludes autoResume",
        ),
        (r#""resources":[{}]"#, "resources"),
        (r#""volumeMounts":[{"name":"a","path":"/b"}]"#, "volumeMounts"),
        (r#""iam":{"tokens":{"a":{}}}"#, "iam"),
        (r#""secure":false,"network":{"allowPublicTraffic":false}"#, NOT_PUBLIC),
        (
            r#""network":{"egressProxy":{"address":"a"}}"#,
            "network: egressProxy.address",
        ),
        (r#""envVars":{"":"x"}"#, "envVars"),
        (r#""envVars":{"A=B":"x"}"#, "envVars"),
        (r#""envVars":{"A\u0000":"x"}"#, "envVars"),
        (r#""envVars":{"A":"\u0000"}"#, "envVars"),
    ] {
        let reply = create(&platform, "/sandboxes", keys).await;
        assert!(reply.error(400).contains(fragment), "{keys}: {reply:?}");
    }
    let reply = create(
        &platform,
        "/v2/sandboxes",
        r#""secure":false,"network":{"allowPublicTraffic":false}"#,
    )
    .await;
    assert_eq!(reply.error(400), NOT_PUBLIC);
    assert!(platform.node.started.lock().is_empty());
}

/// Error message that clients compare.
const NOT_PUBLIC: &str =
    "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.";

#[tokio::test]
async fn template_names_are_resolved_for_the_team() {
    let platform = TestPlatform::start().await;
    for (template, status, alias) in [
        ("base", 201, json!("base")),
        (BASE, 201, json!("base")),
        ("base:default", 201, json!("base")),
        ("mine", 201, json!("mine")),
        ("team1/own", 201, json!("own")),
        ("own00000000000000000", 201, json!("mine")),
        ("team2/own", 404, Value::Null),
        ("team1/base", 404, Value::Null),
        ("nobody/own", 404, Value::Null),
        ("private", 404, Value::Null),
        ("private0000000000000", 404, Value::Null),
        ("unknown", 404, Value::Null),
        ("unbuilt", 404, Value::Null),
        ("base:v2", 404, Value::Null),
        ("", 400, Value::Null),
        ("a b", 400, Value::Null),
        ("a/b/c", 400, Value::Null),
        ("base:", 400, Value::Null),
    ] {
        let body = json!({"templateID": template, "timeout": 60}).to_string();
        let reply = platform.call("POST", "/sandboxes", &body).await;
        assert_eq!(reply.status, status, "{template}: {reply:?}");
        if status == 201 {
            assert_eq!(reply.json["alias"], alias, "{template}");
        } else {
            reply.error(status);
        }
    }
    assert!(create(&platform, "/sandboxes", "").await.status == 201);
    let reply = platform.call("POST", "/sandboxes", r#"{"templateID":"base:v2"}"#).await;
    assert!(reply.error(404).contains("v2"), "{reply:?}");
}

#[tokio::test]
async fn checks_come_in_the_order_of_the_contract() {
    let platform = TestPlatform::start().await;
    for (body, status) in [
        // Schema before the template, the template before the timeout, the timeout before unsupported keys.
        (json!({"templateID": "unknown", "timeout": -1}), 400),
        (json!({"templateID": "a b", "timeout": 0}), 400),
        (json!({"templateID": "unknown", "timeout": 0, "autoPause": true}), 404),
    ] {
        platform
            .call("POST", "/sandboxes", &body.to_string())
            .await
            .error(status);
    }
    let reply = create(&platform, "/sandboxes", r#""timeout":0,"autoPause":true"#).await;
    assert!(reply.error(400).contains("timeout"), "{reply:?}");
}

#[tokio::test]
async fn a_failed_start_leaves_nothing_and_leaks_no_secret() {
    let platform = TestPlatform::start().await;
    for (behaviour, status, code) in [
        (Behaviour::Fails, 500, "sandbox_create_failed"),
        (Behaviour::Full, 503, "sandbox_capacity_unavailable"),
        (Behaviour::Panics, 500, "sandbox_create_failed"),
        (Behaviour::ExitsEarly, 500, "sandbox_create_failed"),
    ] {
        *platform.node.start.lock() = behaviour;
        let reply = create(&platform, "/sandboxes", "").await;
        assert!(!reply.error(status).contains("secret"), "{reply:?}");
        assert_eq!(reply.json["error_code"], code, "{behaviour:?}");
        within(async {
            while !platform
                .rows()
                .sandbox_list_live()
                .await
                .expect("a database")
                .is_empty()
            {
                pause().await;
            }
        })
        .await;
        assert!(platform.node.ids().is_empty());
    }
    *platform.node.start.lock() = Behaviour::Works;
    assert_eq!(create(&platform, "/sandboxes", "").await.status, 201);
}

#[tokio::test]
async fn a_client_disconnect_does_not_cancel_the_create() {
    let platform = TestPlatform::start().await;
    *platform.node.start.lock() = Behaviour::Waits;
    let mut client = TcpStream::connect(platform.addr).await.expect("connect");
    let body = r#"{"templateID":"base","timeout":60}"#;
    let head = format!(
        "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(head.as_bytes()).await.expect("written");
    within(platform.node.waiting.notified()).await;
    drop(client);
    platform.node.go.notify_one();
    let listed = within(async {
        loop {
            let list = platform.call("GET", "/sandboxes", "").await;
            if let Some(listed) = list.json.as_array().and_then(|list| list.first()).cloned() {
                return listed;
            }
        }
    })
    .await;
    platform.clock.advance(61);
    platform.until_gone(listed["sandboxID"].as_str().expect("an id")).await;
    within(async {
        while !platform.node.ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_sandbox_is_invisible_until_it_runs() {
    let platform = Arc::new(TestPlatform::start().await);
    *platform.node.start.lock() = Behaviour::Waits;
    let creating = {
        let platform = Arc::clone(&platform);
        tokio::spawn(async move { create(&platform, "/sandboxes", "").await })
    };
    within(platform.node.waiting.notified()).await;
    let id = platform.node.starting.lock().clone().expect("a start");
    // Not even a row: the next start ends what a crash leaves of it now.
    let rows = platform.rows().sandbox_list_live().await.expect("a database");
    assert!(rows.is_empty(), "{rows:?}");
    assert_eq!(platform.call("GET", "/sandboxes", "").await.text, "[]");
    for method in ["GET", "DELETE"] {
        platform.call(method, &format!("/sandboxes/{id}"), "").await.error(404);
    }
    platform.node.go.notify_one();
    assert_eq!(creating.await.expect("no panic").status, 201);
    let rows = platform.rows().sandbox_list_live().await.expect("a database");
    let states: Vec<_> = rows.iter().map(|row| (&row.id, row.state, row.version)).collect();
    assert_eq!(states, [(&id, State::Running, 1)]);
}

#[tokio::test]
async fn invalid_agent_versions_are_not_reported() {
    let platform = TestPlatform::start().await;
    for (reported, told) in [("0.7.1", "0.7.1"), ("0.6\"; evil", "0.6.13"), ("", "0.6.13")] {
        *platform.node.agent_version.lock() = reported.to_owned();
        assert_eq!(create(&platform, "/sandboxes", "").await.json["envdVersion"], told);
    }
}

#[tokio::test]
async fn a_hundred_concurrent_creates_succeed() {
    let platform = Arc::new(TestPlatform::start().await);
    let mut creates = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let platform = Arc::clone(&platform);
        creates.spawn(async move { create(&platform, "/sandboxes", "").await.status });
    }
    while let Some(status) = creates.join_next().await {
        assert_eq!(status.expect("no panic"), 201);
    }
    assert_eq!(platform.node.ids().len(), 100);
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn metadata_is_returned_and_secrets_are_not() {
    let platform = TestPlatform::start().await;
    let keys = r#""timeout":600,"secure":true,"mcp":{"tool":{"apiKey":"hunter2"}},"envVars":{"PASSWORD":"hunter2"},
        "metadata":{"user":"ü","empty":""}"#;
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let created = create(&platform, path, keys).await;
        assert_eq!(created.status, 201, "{created:?}");
        let id = created.json["sandboxID"].as_str().expect("an id");
        let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
        let list = platform.call("GET", "/sandboxes", "").await;
        let listed = list.json.as_array().expect("a list").iter();
        let listed = listed.clone().find(|one| one["sandboxID"] == id).expect("listed");
        for shown in [&detail.json, listed] {
            assert_eq!(shown["metadata"], json!({"user": "ü", "empty": ""}));
        }
        for text in [created.text, detail.text, list.text] {
            // A random id may contain a short word, but neither quotes nor capitals.
            for secret in ["hunter2", "PASSWORD", "envVars", "\"mcp\"", "apiKey", "\"secure\""] {
                assert!(!text.contains(secret), "{secret}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn a_sandbox_without_a_start_response_is_ended() {
    let platform = TestPlatform::start().await;
    *platform.node.start.lock() = Behaviour::PanicsAfterwards;
    *platform.node.kill.lock() = Behaviour::Fails;
    let body = r#"{"templateID":"base"}"#;
    platform.call("POST", "/sandboxes", body).await.error(500);
    assert_eq!(platform.node.started.lock().len(), 1);
    within(async {
        while platform.node.kills.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // It is retried until it succeeds.
    *platform.node.kill.lock() = Behaviour::Works;
    within(async {
        while !platform.node.ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(platform.node.kills.load(Ordering::SeqCst) >= 2);
}

#[tokio::test]
async fn a_start_after_the_timeout_is_ended() {
    let platform = TestPlatform::start().await;
    *platform.node.start.lock() = Behaviour::Waits;
    let body = r#"{"templateID":"base"}"#;
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let request = format!(
        "POST /sandboxes HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\nidempotency-key: one\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tcp.write_all(request.as_bytes()).await.expect("written");
    within(platform.node.waiting.notified()).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(31)).await;
    tokio::time::resume();
    let mut answer = String::new();
    within(tcp.read_to_string(&mut answer)).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
    assert!(answer.contains("sandbox_placement_timeout"), "{answer}");

    // It starts nevertheless, and is ended before any client sees it.
    *platform.node.start.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    within(async {
        while platform.node.kills.load(Ordering::SeqCst) == 0 || !platform.node.ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // The key is free again, so that a retry creates one.
    let headers = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("idempotency-key", "one"),
        ("content-type", "application/json"),
    ];
    let again = within(async {
        loop {
            let reply = platform.send("POST", "/sandboxes", &headers, body).await;
            if reply.status != 409 {
                return reply;
            }
        }
    })
    .await;
    assert_eq!(again.status, 201, "{again:?}");
    assert_eq!(platform.node.ids().len(), 1);
}
