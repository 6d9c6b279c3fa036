//! What sandboxes may reach, and the host that requests have inside: from the request to the row to the node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use model::id::SandboxId;
use model::network::EgressPolicy;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::platform::{Behaviour, KEY, OTHER_KEY, Reply, TestPlatform, within};

fn id(text: &str) -> SandboxId {
    text.parse().expect("an id")
}

/// A policy from its JSON; absent keys are empty.
fn policy(json: Value) -> EgressPolicy {
    serde_json::from_value(json).expect("a policy")
}

/// A policy that allows nothing.
fn closed() -> EgressPolicy {
    policy(json!({"deny": ["0.0.0.0/0"]}))
}

async fn update(platform: &TestPlatform, sandbox: &str, body: &Value) -> Reply {
    let path = format!("/sandboxes/{sandbox}/network");
    platform.call("PUT", &path, &body.to_string()).await
}

async fn detail(platform: &TestPlatform, sandbox: &str) -> Value {
    let reply = platform.call("GET", &format!("/sandboxes/{sandbox}"), "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json
}

/// What the node enforces, without the interception that every sandbox has.
fn enforced(platform: &TestPlatform, sandbox: &str) -> EgressPolicy {
    let policies = platform.node.egress.lock();
    let policy = policies.get(&id(sandbox)).expect("a policy").clone();
    let interception = policy.interception.as_ref().expect("an interception");
    assert!(interception.rules.is_empty(), "{policy:?}");
    EgressPolicy {
        interception: None,
        ..policy
    }
}

#[tokio::test]
async fn requested_settings_reach_the_node_and_are_shown() {
    let platform = TestPlatform::start().await;
    let all = json!(["0.0.0.0/0"]);
    for (keys, want, shown) in [
        (json!({}), json!({}), json!([null, null])),
        (json!({"allow_internet_access": true}), json!({}), json!([true, null])),
        (
            json!({"allow_internet_access": false}),
            json!({"deny": all}),
            json!([false, null]),
        ),
        (
            json!({"network": {"allowOut": ["1.1.1.1"], "denyOut": ["8.8.0.0/16"]}}),
            json!({"allow": ["1.1.1.1/32"], "deny": ["8.8.0.0/16"]}),
            json!([null, {"allowPublicTraffic": true, "allowOut": ["1.1.1.1"], "denyOut": ["8.8.0.0/16"]}]),
        ),
        (
            json!({"network": {"allowOut": ["API.example.com", "*.a.b"], "denyOut": all, "dnsServers": ["9.9.9.9"]}}),
            json!({"allow_domains": ["api.example.com", "*.a.b"], "deny": all, "dns_servers": ["9.9.9.9"]}),
            json!([null, {
                "allowPublicTraffic": true, "allowOut": ["API.example.com", "*.a.b"], "denyOut": all,
                "dnsServers": ["9.9.9.9"],
            }]),
        ),
        (
            json!({"allow_internet_access": false, "network": {"allowPublicTraffic": false, "allowOut": ["*"]}}),
            json!({"allow_domains": ["*"], "deny": all}),
            json!([false, {"allowPublicTraffic": false, "allowOut": ["*"]}]),
        ),
        (
            json!({"network": {"maskRequestHost": "localhost:${PORT}"}}),
            json!({}),
            json!([null, {"allowPublicTraffic": true, "maskRequestHost": "localhost:${PORT}"}]),
        ),
        (
            json!({"network": {"httpsPorts": [8443, 1, 65535]}}),
            json!({}),
            json!([null, {"allowPublicTraffic": true, "httpsPorts": [8443, 1, 65535]}]),
        ),
        (
            json!({"network": {"httpsPorts": []}}),
            json!({}),
            json!([null, {"allowPublicTraffic": true}]),
        ),
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let mut body = keys.clone();
            body["templateID"] = json!("base");
            let reply = platform.call("POST", path, &body.to_string()).await;
            assert_eq!(reply.status, 201, "{keys}: {reply:?}");
            let sandbox = reply.json["sandboxID"].as_str().expect("an id");
            assert_eq!(enforced(&platform, sandbox), policy(want.clone()), "{keys}");
            let detail = detail(&platform, sandbox).await;
            assert_eq!(
                json!([detail["allowInternetAccess"], detail["network"]]),
                shown,
                "{keys}"
            );
        }
    }
}

#[tokio::test]
async fn invalid_settings_are_refused() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.egress.deny = vec!["9.9.9.9".parse().expect("an address")];
    })
    .await;
    let sandbox = platform.create("").await;
    for (rules, part) in [
        (json!({"allowOut": ["0.0.0.0"]}), "0.0.0.0/0"),
        (json!({"allowOut": ["10.0.0.0/40"]}), "allowOut[0]"),
        (json!({"allowOut": ["1.1.1.1", "a..b"]}), "allowOut[1]: \"a..b\""),
        (json!({"allowOut": ["a.b"]}), "add \"0.0.0.0/0\" to denyOut"),
        (
            json!({"allowOut": ["a.b"], "denyOut": ["128.0.0.0/1"]}),
            "add \"0.0.0.0/0\" to denyOut",
        ),
        (json!({"denyOut": ["a.b"]}), "only addresses and networks can be denied"),
        (json!({"denyOut": ["::/0"]}), "0.0.0.0/0"),
        (json!({"dnsServers": ["::1"]}), "dnsServers[0]"),
        (
            json!({"egressProxy": {}}),
            "/egressProxy/address: property \"address\" is missing",
        ),
        (
            json!({"egressProxy": {"address": 1}}),
            "/egressProxy/address: value must be a string",
        ),
        (
            json!({"egressProxy": {"address": "a.b"}}),
            "egressProxy.address: must be a host and a port",
        ),
        (
            json!({"egressProxy": {"address": "10.0.0.1:1"}}),
            "10.0.0.1 cannot be used: the address is not public",
        ),
        (
            json!({"egressProxy": {"address": "9.9.9.9:1"}}),
            "9.9.9.9 cannot be used: the operator closed",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "password": "p"}}),
            "requires a username",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "username": ""}}),
            "egressProxy.username: must have 1 to 255",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "tls": {}}}),
            "/egressProxy/tls/enabled: property \"enabled\" is missing",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "tls": {"enabled": false, "serverName": "x"}}}),
            "enabled is true",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "tls": {"enabled": true, "serverName": "x y"}}}),
            "tls.serverName",
        ),
        (
            json!({"egressProxy": {"address": "a:1", "tls": {"enabled": true, "caCert": "x"}}}),
            "tls.caCert",
        ),
        (json!({"allowOut": "1.1.1.1"}), "/allowOut: value must be an array"),
        (json!({"allowOut": [1]}), "/allowOut/0: value must be a string"),
        (json!({"allowOut": [null]}), "/allowOut/0: value must be a string"),
        (json!({"denyOut": null}), "/denyOut: value is not nullable"),
        (json!({"rules": []}), "/rules: value must be an object"),
    ] {
        let body = json!({"templateID": "base", "network": rules}).to_string();
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let reply = platform.call("POST", path, &body).await;
            assert!(reply.error(400).contains(part), "{rules}: {reply:?}");
        }
        let reply = update(&platform, &sandbox, &rules).await;
        assert!(reply.error(400).contains(part), "{rules}: {reply:?}");
        // The request is checked before the sandbox is looked up.
        update(&platform, "inobody", &rules).await.error(400);
    }
    for mask in ["a b", "ü.example", "u@a", "a:0", "a\r\nX-Injected: 1", "http://a"] {
        let body = json!({"templateID": "base", "network": {"maskRequestHost": mask}}).to_string();
        let reply = platform.call("POST", "/sandboxes", &body).await;
        assert!(
            reply.error(400).contains("network.maskRequestHost"),
            "{mask}: {reply:?}"
        );
    }
    assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
    assert_eq!(platform.node.started.lock().len(), 1);
}

#[tokio::test]
async fn lists_and_entries_are_bounded() {
    let platform = TestPlatform::start().await;
    let sandbox = platform.create("").await;
    let longest = [
        ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(61)].join("."),
        String::new(),
    ]
    .join(".");
    assert_eq!(longest.len(), 254);
    let all = json!(["0.0.0.0/0"]);
    for (rules, refusal) in [
        (
            json!({"allowOut": vec!["1.1.1.1"; 256], "denyOut": vec!["2.2.2.2"; 256]}),
            None,
        ),
        (
            json!({"allowOut": vec!["1.1.1.1"; 257]}),
            Some("number of items is 256"),
        ),
        (json!({"denyOut": vec!["1.1.1.1"; 257]}), Some("number of items is 256")),
        (json!({"dnsServers": []}), Some("minimum number of items is 1")),
        (json!({"dnsServers": vec!["255.255.255.255"; 10]}), None),
        (
            json!({"dnsServers": vec!["1.1.1.1"; 11]}),
            Some("number of items is 10"),
        ),
        (json!({"dnsServers": ["1234567890123456"]}), Some("string length is 15")),
        (json!({"allowOut": [longest], "denyOut": all}), None),
        (
            json!({"allowOut": [format!("e{longest}")], "denyOut": all}),
            Some("string length is 254"),
        ),
        (
            json!({"denyOut": [format!("e{longest}")]}),
            Some("string length is 254"),
        ),
    ] {
        let body = json!({"templateID": "base", "network": rules}).to_string();
        let created = platform.call("POST", "/sandboxes", &body).await;
        let updated = update(&platform, &sandbox, &rules).await;
        match refusal {
            None => assert_eq!(
                (created.status.as_u16(), updated.status.as_u16()),
                (201, 204),
                "{rules}"
            ),
            Some(part) => {
                assert!(created.error(400).contains(part), "{created:?}");
                assert!(updated.error(400).contains(part), "{updated:?}");
            }
        }
    }
    for (mask, status) in [("a".repeat(255), 201), ("a".repeat(256), 400)] {
        let body = json!({"templateID": "base", "network": {"maskRequestHost": mask}}).to_string();
        assert_eq!(platform.call("POST", "/sandboxes", &body).await.status, status);
    }
    let ports = |count: u16| (1..=count).collect::<Vec<_>>();
    for (ports, part) in [
        (json!(ports(128)), None),
        (json!(ports(129)), Some("maximum number of items is 128")),
        (json!([0]), Some("/network/httpsPorts/0: number must be a port")),
        (json!([1, 65536]), Some("/network/httpsPorts/1: number must be a port")),
        (json!([49982, 49984]), None),
        (json!([49983]), Some("/network/httpsPorts/0: the agent")),
        (json!(["1"]), Some("/network/httpsPorts/0: value must be an integer")),
    ] {
        let body = json!({"templateID": "base", "network": {"httpsPorts": ports}}).to_string();
        let reply = platform.call("POST", "/sandboxes", &body).await;
        match part {
            None => assert_eq!(reply.status, 201, "{reply:?}"),
            Some(part) => assert!(reply.error(400).contains(part), "{reply:?}"),
        }
    }
}

#[tokio::test]
async fn an_update_replaces_egress_and_nothing_else() {
    let platform = TestPlatform::start().await;
    let sandbox = platform
        .create(
            r#","timeout":1000,"allow_internet_access":false,"network":{"allowPublicTraffic":false,
            "maskRequestHost":"a.b","httpsPorts":[8443],"allowOut":["1.1.1.1"],"dnsServers":["9.9.9.9"]}"#,
        )
        .await;
    let kept = json!({"allowPublicTraffic": false, "maskRequestHost": "a.b", "httpsPorts": [8443]});
    let before = detail(&platform, &sandbox).await;

    let rules = json!({"denyOut": ["8.8.8.8"]});
    let reply = update(&platform, &sandbox, &rules).await;
    assert_eq!((reply.status.as_u16(), reply.text.as_str()), (204, ""));
    assert_eq!(enforced(&platform, &sandbox), policy(json!({"deny": ["8.8.8.8/32"]})));
    let mut shown = kept.clone();
    shown["denyOut"] = json!(["8.8.8.8"]);
    let mut after = detail(&platform, &sandbox).await;
    assert_eq!(after["network"], shown);
    assert!(after.get("allowInternetAccess").is_none(), "{after}");
    after["network"] = before["network"].clone();
    after["allowInternetAccess"] = json!(false);
    assert_eq!(after, before);

    // Keys that are not about egress are ignored, as in any body.
    let rules = json!({"allow_internet_access": false, "allowPublicTraffic": true, "maskRequestHost": "x"});
    assert_eq!(update(&platform, &sandbox, &rules).await.status, 204);
    assert_eq!(enforced(&platform, &sandbox), closed());
    let after = detail(&platform, &sandbox).await;
    assert_eq!(
        (&after["network"], &after["allowInternetAccess"]),
        (&kept, &json!(false))
    );

    assert_eq!(update(&platform, &sandbox, &json!({})).await.status, 204);
    assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
    assert_eq!(detail(&platform, &sandbox).await["network"], kept);
    // The deadline can still be changed: the registry knows the version of the row.
    let path = format!("/sandboxes/{sandbox}");
    let reply = platform
        .call("POST", &format!("{path}/timeout"), r#"{"timeout":5}"#)
        .await;
    assert_eq!(reply.status, 204);
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);

    // Without settings there are none after an empty update, and some after any other.
    let plain = platform.create("").await;
    assert_eq!(update(&platform, &plain, &json!({})).await.status, 204);
    assert!(detail(&platform, &plain).await.get("network").is_none());
    update(&platform, &plain, &json!({"allowOut": ["1.1.1.1"]})).await;
    let want = json!({"allowPublicTraffic": true, "allowOut": ["1.1.1.1"]});
    assert_eq!(detail(&platform, &plain).await["network"], want);
}

#[tokio::test]
async fn updates_of_other_sandboxes_are_refused() {
    let platform = TestPlatform::start().await;
    let sandbox = platform.create("").await;
    let path = format!("/sandboxes/{sandbox}/network");
    platform.call("PUT", &path, "").await.error(400);
    platform.call_as(None, "PUT", &path, "{}").await.error(401);
    platform.call_as(Some(OTHER_KEY), "PUT", &path, "{}").await.error(404);
    update(&platform, "inobody", &json!({})).await.error(404);
    assert_eq!(
        platform
            .call("DELETE", &format!("/sandboxes/{sandbox}"), "")
            .await
            .status,
        204
    );
    update(&platform, &sandbox, &json!({})).await.error(404);
    // The node knows first that a sandbox has ended.
    let sandbox = platform.create("").await;
    platform.node.running.lock().remove(&id(&sandbox));
    update(&platform, &sandbox, &json!({})).await.error(404);
}

#[tokio::test]
async fn policies_survive_a_restart() {
    let platform = TestPlatform::start().await;
    let plain = platform.create(r#","timeout":1000"#).await;
    let cut = platform
        .create(r#","timeout":1000,"allow_internet_access":false"#)
        .await;
    let changed = platform
        .create(r#","timeout":1000,"network":{"maskRequestHost":"a.b:${PORT}"}"#)
        .await;
    let rules = json!({"allowOut": ["*.a.b", "1.1.1.1"], "denyOut": ["0.0.0.0/0"], "dnsServers": ["9.9.9.9"]});
    assert_eq!(update(&platform, &changed, &rules).await.status, 204);
    let before = detail(&platform, &changed).await;
    let want = enforced(&platform, &changed);
    assert_eq!(want.allow_domains.len(), 1);

    let platform = platform.restart().await;
    assert_eq!(enforced(&platform, &plain), EgressPolicy::default());
    assert_eq!(enforced(&platform, &cut), closed());
    assert_eq!(enforced(&platform, &changed), want);
    assert_eq!(detail(&platform, &changed).await, before);
    // The mask was not part of the update, and requests still have it.
    *platform.node.origin.lock() = Some(echo().await);
    let reply = traffic(&platform, &format!("3000-{changed}.sandbox.test:3000")).await;
    assert!(reply.contains("host: a.b:3000\r\n"), "{reply}");
}

#[tokio::test]
async fn invalid_rows_get_no_network() {
    let platform = TestPlatform::start().await;
    for invalid in [
        "",
        "x",
        "null",
        "[]",
        "true",
        r#"{"allowOut":["0.0.0.0/0"],"denyOut":{}}"#,
        r#"{"allowOut":["0.0.0.0/0"],"denyOut":["nonsense!"]}"#,
        r#"{"allowOut":["a.b"]}"#,
        r#"{"maskRequestHost":"a b"}"#,
    ] {
        let sandbox = platform
            .create(r#","timeout":1000,"network":{"maskRequestHost":"a.b"}"#)
            .await;
        let row = platform.store.sandbox_by_id(&id(&sandbox)).await.expect("a database");
        let version = row.expect("a row").version;
        let change = platform
            .rows()
            .sandbox_set_network(&id(&sandbox), version, Some(invalid), Some(true))
            .await;
        assert!(change.expect("a database").applied().is_some());
    }
    let all = platform.node.ids();
    let platform = platform.restart().await;
    for sandbox in all {
        assert_eq!(enforced(&platform, &sandbox), closed(), "{sandbox}");
        assert!(detail(&platform, &sandbox).await["allowInternetAccess"] == true);
        // A client can repair it.
        assert_eq!(update(&platform, &sandbox, &json!({})).await.status, 204);
        assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
    }
}

#[tokio::test]
async fn a_failed_update_is_reported_and_applied_by_the_next_start() {
    let platform = TestPlatform::start().await;
    let sandbox = platform.create(r#","timeout":1000"#).await;
    for behaviour in [Behaviour::Fails, Behaviour::Panics] {
        *platform.node.set_egress.lock() = behaviour;
        let reply = update(&platform, &sandbox, &json!({"allow_internet_access": false})).await;
        assert!(!reply.error(500).contains("secret"), "{reply:?}");
        if behaviour == Behaviour::Fails {
            assert!(reply.error(500).contains("send the request again"), "{reply:?}");
            assert_eq!(reply.json["error_code"], "sandbox_change_not_applied");
            assert_eq!(reply.header("should-retry"), "true");
        }
        assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
        assert_eq!(detail(&platform, &sandbox).await["allowInternetAccess"], false);
    }
    *platform.node.set_egress.lock() = Behaviour::Works;
    let platform = platform.restart().await;
    assert_eq!(enforced(&platform, &sandbox), closed());
}

#[tokio::test]
async fn a_failed_update_is_tried_again() {
    let platform = TestPlatform::start().await;
    let sandbox = platform.create(r#","timeout":1000"#).await;
    *platform.node.set_egress.lock() = Behaviour::Fails;
    let reply = update(&platform, &sandbox, &json!({"allow_internet_access": false})).await;
    assert_eq!(reply.status, 500, "{reply:?}");
    // Gives it the time for another attempt, 5 seconds later: that fails, too, and changes nothing.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
    *platform.node.set_egress.lock() = Behaviour::Works;
    within(async {
        while enforced(&platform, &sandbox) != closed() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn an_update_changes_the_ports_of_tls_only_if_it_has_them() {
    let platform = TestPlatform::start().await;
    let sandbox = platform
        .create(r#","timeout":1000,"network":{"httpsPorts":[8443]}"#)
        .await;
    for (body, want) in [
        (json!({}), json!([8443])),
        (json!({"denyOut": ["1.1.1.1"]}), json!([8443])),
        (json!({"httpsPorts": [8443, 9443]}), json!([8443, 9443])),
        (json!({"httpsPorts": []}), Value::Null),
    ] {
        assert_eq!(update(&platform, &sandbox, &body).await.status, 204, "{body}");
        let shown = detail(&platform, &sandbox).await["network"]["httpsPorts"].clone();
        assert_eq!(shown, want, "{body}");
    }
    for invalid in [json!([49983]), json!([0]), json!(8443), Value::Null] {
        let reply = update(&platform, &sandbox, &json!({"httpsPorts": invalid})).await;
        assert_eq!(reply.status, 400, "{invalid}");
    }
    // Also for a sandbox that had no settings.
    let plain = platform.create(r#","timeout":1000"#).await;
    assert_eq!(
        update(&platform, &plain, &json!({"httpsPorts": [8443]})).await.status,
        204
    );
    assert_eq!(detail(&platform, &plain).await["network"]["httpsPorts"], json!([8443]));
}

#[tokio::test]
async fn concurrent_updates_are_applied_in_the_order_of_the_row() {
    let platform = Arc::new(TestPlatform::start().await);
    let sandbox = platform.create("").await;
    let start = |address: String| {
        let (platform, sandbox) = (Arc::clone(&platform), sandbox.clone());
        tokio::spawn(async move { update(&platform, &sandbox, &json!({"denyOut": [address]})).await.status })
    };
    *platform.node.set_egress.lock() = Behaviour::Waits;
    let first = start("1.1.1.1".to_owned());
    within(platform.node.waiting.notified()).await;
    let others: Vec<_> = (1..=8).map(|n| start(format!("2.2.2.{n}"))).collect();
    *platform.node.set_egress.lock() = Behaviour::Works;
    tokio::task::yield_now().await;
    // None of them overtakes the first.
    assert_eq!(enforced(&platform, &sandbox), EgressPolicy::default());
    platform.node.go.notify_one();
    assert_eq!(within(first).await.expect("no panic"), 204);
    for other in others {
        assert_eq!(within(other).await.expect("no panic"), 204);
    }
    let shown = detail(&platform, &sandbox).await["network"]["denyOut"][0].clone();
    let network = format!("{}/32", shown.as_str().expect("an address"));
    assert_eq!(enforced(&platform, &sandbox), policy(json!({"deny": [network]})));
}

#[tokio::test]
async fn a_disconnect_does_not_leave_row_and_node_different() {
    let platform = TestPlatform::start().await;
    let sandbox = platform.create("").await;
    *platform.node.set_egress.lock() = Behaviour::Waits;
    let request = {
        let (addr, path) = (platform.addr, format!("/sandboxes/{sandbox}/network"));
        let headers = [
            ("host", "localhost"),
            ("x-api-key", KEY),
            ("content-type", "application/json"),
        ];
        async move {
            let body = r#"{"allow_internet_access":false}"#;
            super::platform::send(addr, "PUT", &path, &headers, body.into()).await
        }
    };
    let request = tokio::spawn(request);
    within(platform.node.waiting.notified()).await;
    request.abort();
    platform.node.go.notify_one();
    within(async {
        while enforced(&platform, &sandbox) != closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(detail(&platform, &sandbox).await["allowInternetAccess"], false);
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), 0);
}

/// A server in every sandbox that responds with the head of the request, in lower case.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let mut buffer = vec![0; 8192];
            let got = tcp.read(&mut buffer).await.unwrap_or(0);
            let head = String::from_utf8_lossy(&buffer[..got]).to_lowercase();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{head}", head.len());
            let _ = tcp.write_all(answer.as_bytes()).await;
        }
    });
    addr
}

async fn traffic(platform: &TestPlatform, host: &str) -> String {
    platform.send("GET", "/", &[("host", host)], "").await.text
}

#[tokio::test]
async fn requests_have_the_masked_host_inside() {
    let platform = TestPlatform::start().await;
    *platform.node.origin.lock() = Some(echo().await);
    let masked = platform
        .create(r#","network":{"maskRequestHost":"localhost:${PORT}"}"#)
        .await;
    let plain = platform.create(r#","network":{"maskRequestHost":""}"#).await;
    let outside = format!("3000-{masked}.sandbox.test:3000");
    let head = traffic(&platform, &outside).await;
    assert!(head.contains("\r\nhost: localhost:3000\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nx-forwarded-host: {outside}\r\n")), "{head}");
    for outside in [
        format!("49983-{masked}.sandbox.test:3000"),
        format!("3000-{plain}.sandbox.test:3000"),
    ] {
        let head = traffic(&platform, &outside).await;
        assert!(head.contains(&format!("\r\nhost: {outside}\r\n")), "{head}");
        assert!(!head.contains("x-forwarded-host"), "{head}");
    }
}

#[tokio::test]
async fn the_password_of_a_proxy_reaches_the_node_and_nobody_else() {
    const PASSWORD: &str = "correct horse";
    let platform = TestPlatform::start().await;
    let proxy = json!({
        "address": "Proxy.example.com:1080", "username": "user", "password": PASSWORD,
        "tls": {"enabled": true, "serverName": "name.example.com"},
    });
    let shown = json!({
        "address": "Proxy.example.com:1080", "username": "user",
        "tls": {"enabled": true, "serverName": "name.example.com"},
    });
    let want = policy(json!({"proxy": {
        "host": {"Name": "proxy.example.com"}, "port": 1080,
        "credentials": {"username": "user", "password": PASSWORD},
        "tls": {"server_name": {"Name": "name.example.com"}, "ca_cert": null},
    }}));
    let body = json!({"templateID": "base", "timeout": 1000, "network": {"egressProxy": proxy}}).to_string();
    let created = platform.call("POST", "/sandboxes", &body).await;
    assert!(created.status == 201 && !created.text.contains(PASSWORD), "{created:?}");
    let made = created.json["sandboxID"].as_str().expect("an id").to_owned();
    let changed = platform.create(r#","timeout":1000"#).await;
    assert_eq!(
        update(&platform, &changed, &json!({"egressProxy": proxy})).await.status,
        204
    );
    let ended = platform.create(r#","timeout":1000"#).await;
    for rules in [json!({"egressProxy": proxy}), json!({"egressProxy": null})] {
        assert_eq!(update(&platform, &ended, &rules).await.status, 204);
    }
    let mut platform = platform;
    for _ in 0..2 {
        for sandbox in [&made, &changed] {
            assert_eq!(enforced(&platform, sandbox), want);
            let detail = detail(&platform, sandbox).await;
            assert_eq!(detail["network"]["egressProxy"], shown);
            assert!(!detail.to_string().contains("horse"), "{detail}");
            let row = platform
                .store
                .sandbox_by_id(&id(sandbox))
                .await
                .expect("a database")
                .expect("a row");
            let stored = row.network_json.expect("settings");
            assert!(
                stored.contains("\"passwordSealed\":\"v2.") && !stored.contains("horse"),
                "{stored}"
            );
        }
        assert_eq!(enforced(&platform, &ended), EgressPolicy::default());
        platform = platform.restart().await;
    }
    // A sealed password belongs to its sandbox. Without it nothing is open.
    let row = |sandbox: String| {
        let store = platform.store.clone();
        async move {
            store
                .sandbox_by_id(&id(&sandbox))
                .await
                .expect("a database")
                .expect("a row")
        }
    };
    let (from, to) = (row(made.clone()).await, row(ended.clone()).await);
    let change = platform
        .rows()
        .sandbox_set_network(&to.id, to.version, from.network_json.as_deref(), None)
        .await;
    assert!(change.expect("a database").applied().is_some());
    let platform = platform.restart().await;
    assert_eq!(enforced(&platform, &ended), closed());
    assert_eq!(enforced(&platform, &made), want);
}

#[tokio::test]
async fn a_team_has_a_default_of_its_own() {
    for default in [Some(false), Some(true), None] {
        let platform = match default {
            Some(false) => {
                TestPlatform::start_adjusted(|settings| settings.limits.default.egress_default_allow = Some(false))
                    .await
            }
            Some(true) => {
                TestPlatform::start_adjusted(|settings| settings.limits.default.egress_default_allow = Some(true)).await
            }
            None => TestPlatform::start().await,
        };
        let sandbox = platform.create(r#","timeout":1000"#).await;
        let of_team = |rules: Value| EgressPolicy {
            default_allow: default,
            ..policy(rules)
        };
        assert_eq!(enforced(&platform, &sandbox), of_team(json!({})));
        assert_eq!(
            update(&platform, &sandbox, &json!({"denyOut": ["1.1.1.1"]}))
                .await
                .status,
            204
        );
        assert_eq!(enforced(&platform, &sandbox), of_team(json!({"deny": ["1.1.1.1/32"]})));
        let platform = platform.restart().await;
        assert_eq!(enforced(&platform, &sandbox), of_team(json!({"deny": ["1.1.1.1/32"]})));
    }
}
