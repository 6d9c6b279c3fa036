//! Secrets of teams, and the headers of sandboxes that refer to them.

use std::collections::BTreeMap;
use std::time::Duration;

use model::id::SandboxId;
use model::injection::InjectionRule;
use serde_json::{Value, json};

use super::platform::{OTHER_KEY, Reply, TestPlatform, team, within};

async fn post(platform: &TestPlatform, path: &str, body: &Value) -> Reply {
    platform.call("POST", path, &body.to_string()).await
}

async fn create(platform: &TestPlatform, name: &str, value: &str) -> Value {
    let reply = post(platform, "/secrets", &json!({"name": name, "value": value})).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json
}

/// The headers that the node sets for a sandbox, by host.
fn headers(platform: &TestPlatform, sandbox: &str) -> BTreeMap<String, Vec<(String, String)>> {
    let id: SandboxId = sandbox.parse().expect("an id");
    let policies = platform.node.egress.lock();
    let rules = policies.get(&id).expect("a policy").interception.as_ref();
    let shown = |rule: &InjectionRule| {
        let headers = rule.headers.iter();
        headers
            .map(|header| (header.name.clone(), header.value.expose().to_owned()))
            .collect()
    };
    let rules = rules.into_iter().flat_map(|interception| &interception.rules);
    rules.map(|rule| (rule.host.as_str().to_owned(), shown(rule))).collect()
}

fn one(host: &str, name: &str, value: &str) -> BTreeMap<String, Vec<(String, String)>> {
    BTreeMap::from([(host.to_owned(), vec![(name.to_owned(), value.to_owned())])])
}

fn with_rules(rules: &Value) -> String {
    format!(",\"network\":{{\"rules\":{rules}}}")
}

#[tokio::test]
async fn secrets_are_stored_changed_listed_and_deleted() {
    let platform = TestPlatform::start().await;
    let body = json!({"name": "OpenAI-Key", "value": "sk-first-value", "metadata": {"env": "prod"}});
    let reply = post(&platform, "/secrets", &body).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    assert_eq!(reply.header("cache-control"), "no-store");
    let created = reply.json;
    let id = created["secretID"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("sec_") && id.len() == 30, "{id}");
    assert_eq!(created["name"], "openai-key");
    assert_eq!(created["currentVersion"], 1);
    assert_eq!(created["metadata"], json!({"env": "prod"}));
    assert_eq!(created["createdAt"], created["updatedAt"]);
    let keys: Vec<&String> = created.as_object().expect("an object").keys().collect();
    assert_eq!(
        keys,
        [
            "createdAt",
            "currentVersion",
            "metadata",
            "name",
            "secretID",
            "updatedAt"
        ]
    );

    // By id and by name, in any case.
    for key in [id.as_str(), "openai-key", "OPENAI-KEY"] {
        let reply = platform.call("GET", &format!("/secrets/{key}"), "").await;
        assert_eq!((reply.status.as_u16(), &reply.json), (200, &created), "{key}");
        assert_eq!(reply.header("cache-control"), "no-store");
    }
    let reply = post(&platform, "/secrets", &json!({"name": "openai-KEY", "value": "x"})).await;
    assert!(reply.error(409).contains("already exists"), "{reply:?}");

    platform.clock.advance(5);
    let reply = post(&platform, "/secrets/openai-key", &json!({"value": "sk-second-value"})).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json["currentVersion"], 2);
    assert_eq!(reply.json["metadata"], json!({"env": "prod"}));
    assert_ne!(reply.json["createdAt"], reply.json["updatedAt"]);
    let body = json!({"value": "sk-third-value", "metadata": {}});
    let reply = post(&platform, &format!("/secrets/{id}"), &body).await;
    assert_eq!(
        (&reply.json["currentVersion"], &reply.json["metadata"]),
        (&json!(3), &json!({}))
    );

    // Pages, newest first.
    platform.clock.advance(1);
    create(&platform, "b", "x").await;
    let reply = platform.call("GET", "/secrets?limit=1", "").await;
    assert_eq!(reply.json[0]["name"], "b");
    assert_eq!(reply.header("cache-control"), "no-store");
    let next = reply.header("x-next-token").to_owned();
    let reply = platform
        .call("GET", &format!("/secrets?limit=1&nextToken={next}"), "")
        .await;
    assert_eq!(reply.json.as_array().map(Vec::len), Some(1));
    assert_eq!(reply.json[0]["name"], "openai-key");
    assert_eq!(reply.header("x-next-token"), "");

    // Neither value is in the database, nor in any response.
    let file = std::fs::read(platform.directory.path().join("test.db")).expect("the database");
    let log = std::fs::read(platform.directory.path().join("test.db-wal")).unwrap_or_default();
    let stored = [file, log].concat();
    let has = |text: &str| stored.windows(text.len()).any(|window| window == text.as_bytes());
    // The search finds what is there.
    assert!(has("openai-key") && has(&id));
    for value in ["sk-first-value", "sk-second-value", "sk-third-value"] {
        assert!(!has(value), "{value}");
    }

    // Another team has none of it, and may use the same name.
    for (method, body) in [("GET", ""), ("POST", "{\"value\":\"x\"}"), ("DELETE", "")] {
        for key in [id.as_str(), "openai-key"] {
            let reply = platform
                .call_as(Some(OTHER_KEY), method, &format!("/secrets/{key}"), body)
                .await;
            assert!(reply.error(404).contains("doesn't exist"), "{reply:?}");
            assert_eq!(reply.header("cache-control"), "no-store");
        }
    }
    let reply = platform.call_as(Some(OTHER_KEY), "GET", "/secrets", "").await;
    assert_eq!(reply.json, json!([]));
    let body = json!({"name": "openai-key", "value": "x"}).to_string();
    assert_eq!(
        platform
            .call_as(Some(OTHER_KEY), "POST", "/secrets", &body)
            .await
            .status,
        201
    );
    platform.call_as(None, "GET", "/secrets", "").await.error(401);

    assert_eq!(platform.call("DELETE", "/secrets/openai-key", "").await.status, 204);
    platform.call("DELETE", "/secrets/openai-key", "").await.error(404);
    platform.call("GET", &format!("/secrets/{id}"), "").await.error(404);
}

#[tokio::test]
async fn invalid_secrets_are_refused() {
    let platform = TestPlatform::start().await;
    let many: BTreeMap<String, String> = (0..33).map(|n| (n.to_string(), String::new())).collect();
    for (body, part) in [
        (json!({}), "\"name\" is missing"),
        (json!({"name": "a"}), "\"value\" is missing"),
        (json!({"name": "", "value": "x"}), "1 to 128 characters"),
        (json!({"name": "a{b", "value": "x"}), "must not contain"),
        (json!({"name": "a\u{1}", "value": "x"}), "must not contain"),
        (json!({"name": "SEC_a", "value": "x"}), "reserved for ids"),
        (json!({"name": "a", "value": ""}), "1 to 8192 bytes"),
        (json!({"name": "a", "value": "v".repeat(8193)}), "1 to 8192 bytes"),
        (json!({"name": "a", "value": "x\n"}), "printable ASCII"),
        (
            json!({"name": "a", "value": "x", "metadata": many}),
            "at most 32 entries",
        ),
        (
            json!({"name": "a", "value": "x", "metadata": {"a": "v".repeat(1025)}}),
            "1024",
        ),
        (
            json!({"name": "a", "value": "x", "metadata": {"a": 1}}),
            "must be a string",
        ),
        (json!({"name": "a", "value": "x", "metadata": {"a": "\0"}}), "NUL"),
    ] {
        let reply = post(&platform, "/secrets", &body).await;
        let message = reply.error(400);
        assert!(message.contains(part), "{body}: {message}");
        assert_eq!(reply.header("cache-control"), "no-store");
    }
    assert_eq!(platform.call("GET", "/secrets", "").await.json, json!([]));
    post(&platform, "/secrets/gone", &json!({"value": "x"}))
        .await
        .error(404);
    platform.call("GET", "/secrets/a%00b", "").await.error(404);
    platform.call("GET", "/secrets/%FF", "").await.error(400);
}

#[tokio::test]
async fn the_number_of_secrets_is_limited() {
    let platform = TestPlatform::start().await;
    for n in 0..1000 {
        let row = store::secrets::SecretRow {
            id: format!("sec_{n:026}"),
            team_id: team(1),
            name: format!("s{n}"),
            version: 1,
            value_sealed: store::keys::SealedSecret::new("v1.AAAA".to_owned()),
            metadata: BTreeMap::new(),
            created_us: n,
            updated_us: n,
        };
        platform.store.secret_insert(&row).await.expect("a secret");
    }
    let reply = post(&platform, "/secrets", &json!({"name": "a", "value": "x"})).await;
    assert!(reply.error(429).contains("limited to 1000 secrets"), "{reply:?}");
    assert_eq!(reply.json["error_code"], "secret_limit_reached");
    assert_eq!(reply.header("should-retry"), "false");
    platform.call("DELETE", "/secrets/s1", "").await;
    create(&platform, "a", "x").await;
}

#[tokio::test]
async fn secrets_reach_the_node_and_are_shown_to_nobody() {
    let platform = TestPlatform::start().await;
    create(&platform, "api-key", "sk-0123456789").await;
    let rules = json!({
        "API.example.com": [{"transform": {"headers": {
            "Authorization": "Bearer ${e2b.secrets.API-Key}",
            "X-Inline": "inline-secret-value",
        }}}],
        "none.example": [{}],
    });
    let sandbox = platform.create(&with_rules(&rules)).await;
    let set = BTreeMap::from([(
        "api.example.com".to_owned(),
        vec![
            ("authorization".to_owned(), "Bearer sk-0123456789".to_owned()),
            ("x-inline".to_owned(), "inline-secret-value".to_owned()),
        ],
    )]);
    assert_eq!(headers(&platform, &sandbox), set);
    let reply = platform.call("GET", &format!("/sandboxes/{sandbox}"), "").await;
    let shown = json!({
        "API.example.com": [{"transform": {"headers": {
            "Authorization": "Bearer ${e2b.secrets.API-Key}",
            "X-Inline": "inli****",
        }}}],
        "none.example": [{}],
    });
    assert_eq!(reply.json["network"]["rules"], shown);
    let id: SandboxId = sandbox.parse().expect("an id");
    let row = platform
        .store
        .sandbox_by_id(&id)
        .await
        .expect("a database")
        .expect("a row");
    let stored = row.network_json.expect("settings");
    assert!(
        !stored.contains("inline-secret-value") && !stored.contains("sk-0123456789"),
        "{stored}"
    );

    // After a restart, a change of the settings, and their reset.
    let platform = platform.restart().await;
    assert_eq!(headers(&platform, &sandbox), set);
    let path = format!("/sandboxes/{sandbox}/network");
    let rules = json!({"rules": {"*.example.com": [{"transform": {"headers": {"x-k": "${e2b.secrets.api-key}"}}}]}});
    let reply = platform.call("PUT", &path, &rules.to_string()).await;
    assert_eq!(reply.status, 204, "{reply:?}");
    assert_eq!(
        headers(&platform, &sandbox),
        one("*.example.com", "x-k", "sk-0123456789")
    );
    assert_eq!(platform.call("PUT", &path, "{}").await.status, 204);
    assert_eq!(headers(&platform, &sandbox), BTreeMap::new());
    let reply = platform.call("GET", &format!("/sandboxes/{sandbox}"), "").await;
    assert_eq!(reply.json["network"]["rules"], Value::Null);
}

#[tokio::test]
async fn a_changed_secret_reaches_running_sandboxes() {
    let platform = TestPlatform::start().await;
    create(&platform, "k", "before").await;
    create(&platform, "other", "x").await;
    let rules = json!({"a.example": [{"transform": {"headers": {"x-k": "${e2b.secrets.K}"}}}]});
    let (first, plain) = (platform.create(&with_rules(&rules)).await, platform.create("").await);
    let second = platform.create(&with_rules(&rules)).await;
    for sandbox in [&first, &second] {
        assert_eq!(headers(&platform, sandbox), one("a.example", "x-k", "before"));
    }
    let version = |id: &str| {
        let id: SandboxId = id.parse().expect("an id");
        let store = platform.store.clone();
        async move {
            store
                .sandbox_by_id(&id)
                .await
                .expect("a database")
                .expect("a row")
                .version
        }
    };
    let before = version(&plain).await;
    assert_eq!(
        post(&platform, "/secrets/k", &json!({"value": "after"})).await.status,
        200
    );
    for sandbox in [&first, &second] {
        assert_eq!(headers(&platform, sandbox), one("a.example", "x-k", "after"));
    }
    assert_eq!(version(&plain).await, before);
    assert_eq!(headers(&platform, &plain), BTreeMap::new());
    // The secret of the same name of another team changes nothing.
    let body = json!({"name": "k", "value": "foreign"}).to_string();
    assert_eq!(
        platform
            .call_as(Some(OTHER_KEY), "POST", "/secrets", &body)
            .await
            .status,
        201
    );
    let body = json!({"value": "foreign again"}).to_string();
    platform.call_as(Some(OTHER_KEY), "POST", "/secrets/k", &body).await;
    assert_eq!(headers(&platform, &first), one("a.example", "x-k", "after"));
    // Without its secret, the header is not set; with a new one of that name, it is again.
    assert_eq!(platform.call("DELETE", "/secrets/k", "").await.status, 204);
    assert_eq!(headers(&platform, &first), BTreeMap::new());
    let reply = platform.call("GET", &format!("/sandboxes/{first}"), "").await;
    assert_eq!(reply.status, 200);
    create(&platform, "k", "anew").await;
    assert_eq!(headers(&platform, &first), one("a.example", "x-k", "anew"));
}

/// What other servers of the database change is applied within seconds: values, deletions, and saved injection rules.
#[tokio::test]
async fn changes_through_other_servers_reach_running_sandboxes() {
    let first = TestPlatform::start().await;
    create(&first, "k", "before").await;
    let injection = json!({"type": "openai", "api_key": "sk-before-0123"});
    let saved = post(
        &first,
        "/injection-rules",
        &json!({"name": "r", "injection": injection}),
    )
    .await;
    let rule = saved.json["ruleID"].as_str().expect("an id");
    let second = first.start_beside(2).await;
    let rules = json!({"a.example": [{"transform": {"headers": {"x-k": "${e2b.secrets.k}"}}}]});
    let sandbox = second.create(&with_rules(&rules)).await;
    let saved = second
        .create(&format!(",\"injections\":[{{\"type\":\"id\",\"id\":\"{rule}\"}}]"))
        .await;
    assert_eq!(headers(&second, &sandbox), one("a.example", "x-k", "before"));
    let openai = |key: &str| one("api.openai.com", "authorization", &format!("Bearer {key}"));
    assert_eq!(headers(&second, &saved), openai("sk-before-0123"));
    let until = async |sandbox: &str, want: BTreeMap<_, _>| {
        within(async {
            while headers(&second, sandbox) != want {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    };

    // Before the second server has looked for the first time.
    post(&first, "/secrets/k", &json!({"value": "after"})).await;
    let body = json!({"injection": {"type": "openai", "api_key": "sk-after-0123"}}).to_string();
    first.clock.advance(1);
    first.call("PUT", &format!("/injection-rules/{rule}"), &body).await;
    until(&sandbox, one("a.example", "x-k", "after")).await;
    until(&saved, openai("sk-after-0123")).await;
    // The clock has not moved since, and a number of rows stays the same.
    post(&first, "/secrets/k", &json!({"value": "again"})).await;
    until(&sandbox, one("a.example", "x-k", "again")).await;
    assert_eq!(first.call("DELETE", "/secrets/k", "").await.status, 204);
    until(&sandbox, BTreeMap::new()).await;
}

#[tokio::test]
async fn invalid_rules_are_refused() {
    let platform = TestPlatform::start().await;
    let body = json!({"name": "foreign", "value": "x"}).to_string();
    platform.call_as(Some(OTHER_KEY), "POST", "/secrets", &body).await;
    let id = create(&platform, "own", "x").await["secretID"]
        .as_str()
        .expect("an id")
        .to_owned();
    let sandbox = platform.create("").await;
    let header = |name: &str, value: &str| json!({"a.b": [{"transform": {"headers": {name: value}}}]});
    let domains = |count: usize| -> Value { (0..count).map(|n| (format!("d{n}.b"), json!([]))).collect() };
    let names: BTreeMap<String, &str> = (0..21).map(|n| (format!("x-{n}"), "v")).collect();
    for (rules, part) in [
        (json!([]), "/rules: value must be an object"),
        (json!({"a.b": {}}), "/rules/a.b: value must be an array"),
        (json!({"a.b": [{}, {}]}), "maximum number of items is 1"),
        (
            json!({"a.b": [{"transform": []}]}),
            "/rules/a.b/0/transform: value must be an object",
        ),
        (
            json!({"a.b": [{"transform": {"headers": {"a": 1}}}]}),
            "value must be a string",
        ),
        (
            json!({"a.b": [{"transform": {"headers": names}}]}),
            "maximum number of headers is 20",
        ),
        (domains(11), "maximum number of domains is 10"),
        (
            json!({format!("{}.b", "d".repeat(127)): []}),
            "maximum string length is 128",
        ),
        (header(&"n".repeat(65), "v"), "maximum string length is 64"),
        (header("a", &"v".repeat(2049)), "maximum string length is 2048"),
        (json!({"*": []}), "never for an address or for all hosts"),
        (json!({"1.1.1.1": []}), "never for an address"),
        (header("host", "x"), "cannot be set"),
        (header("x-k", "a\nb"), "printable"),
        (header("x-k", "${e2b.secrets.gone}"), "secret \"gone\" does not exist"),
        (
            header("x-k", "${e2b.secrets.foreign}"),
            "secret \"foreign\" does not exist",
        ),
        // A placeholder has the name, not the id.
        (header("x-k", &format!("${{e2b.secrets.{id}}}")), "does not exist"),
        (
            header("x-k", "${e2b.identity.tokens.aws}"),
            "workload identity is not available",
        ),
        (header("x-k", "${e2b.own}"), "${e2b.own}"),
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let reply = post(
                &platform,
                path,
                &json!({"templateID": "base", "network": {"rules": rules}}),
            )
            .await;
            let message = reply.error(400);
            assert!(message.contains(part), "{rules}: {message}");
        }
        let path = format!("/sandboxes/{sandbox}/network");
        let reply = platform.call("PUT", &path, &json!({"rules": rules}).to_string()).await;
        assert!(reply.error(400).contains(part), "{rules}: {reply:?}");
    }
    assert_eq!(platform.node.started.lock().len(), 1);
    // The limits themselves are allowed.
    platform.create(&with_rules(&domains(10))).await;
    platform
        .create(&with_rules(&header(&"n".repeat(64), &"v".repeat(2048))))
        .await;
}

#[tokio::test]
async fn mcp_is_accepted_with_any_template_but_its_own_does_not_exist() {
    let platform = TestPlatform::start().await;
    let mcp = json!({"github": {"githubToken": "x"}, "any": [1]});
    for path in ["/sandboxes", "/v2/sandboxes"] {
        for mcp in [&mcp, &json!({}), &Value::Null] {
            let reply = post(&platform, path, &json!({"templateID": "base", "mcp": mcp})).await;
            assert_eq!(reply.status, 201, "{reply:?}");
        }
        let reply = post(&platform, path, &json!({"templateID": "mcp-gateway", "mcp": mcp})).await;
        let message = reply.error(404);
        assert!(
            message.contains("\"mcp-gateway\" is not available on this platform"),
            "{message}"
        );
    }
}
