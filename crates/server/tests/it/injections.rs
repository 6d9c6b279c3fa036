//! Injection rules and injections of sandboxes, from the request to the policy that the node gets.

use model::injection::{InjectionRule, Interception};
use serde_json::{Value, json};
use store::teams::UserRow;

use super::platform::{Behaviour, KEY, OTHER_KEY, Reply, TestPlatform, team, user, within};

const SECRET: &str = "sk-live-0123456789";

/// What the node enforces.
fn interception(platform: &TestPlatform, sandbox: &str) -> Interception {
    let policies = platform.node.egress.lock();
    let policy = policies.get(&sandbox.parse().expect("an id")).expect("a policy");
    *policy.interception.clone().expect("an interception")
}

pub(crate) fn rules(platform: &TestPlatform, sandbox: &str) -> Vec<InjectionRule> {
    interception(platform, sandbox).rules
}

/// Name, host and first header of each rule.
pub(crate) fn shown(rules: &[InjectionRule]) -> Vec<[String; 3]> {
    let all = rules.iter().map(|rule| {
        let header = rule.headers.first().map_or("", |header| header.value.expose());
        [rule.name.clone(), rule.host.as_str().to_owned(), header.to_owned()]
    });
    all.collect()
}

pub(crate) async fn save(platform: &TestPlatform, key: &str, name: &str, injection: &Value) -> Reply {
    let body = json!({"name": name, "injection": injection}).to_string();
    platform.call_as(Some(key), "POST", "/injection-rules", &body).await
}

pub(crate) fn id_of(reply: &Reply) -> String {
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json["ruleID"].as_str().expect("an id").to_owned()
}

pub(crate) async fn create(platform: &TestPlatform, injections: &Value) -> String {
    platform
        .create(&format!(r#","timeout":1000,"injections":{injections}"#))
        .await
}

#[tokio::test]
async fn rules_are_saved_changed_and_deleted() {
    let platform = TestPlatform::start().await;
    let injection = json!({"type": "openai", "api_key": SECRET, "base_url": "gateway.example.com/v1/*"});
    let created = save(&platform, KEY, "one", &injection).await;
    let id = id_of(&created);
    assert!(id.starts_with("rule_"), "{id}");
    let masked = json!({"type": "openai", "api_key": "sk-l****", "base_url": "gateway.example.com/v1/*"});
    assert_eq!(created.json["injection"], masked);
    assert_eq!(created.json["name"], "one");
    let path = format!("/injection-rules/{id}");
    let read = platform.call("GET", &path, "").await;
    assert_eq!(read.json, created.json);
    let list = platform.call("GET", "/injection-rules", "").await;
    assert_eq!(list.json, json!([created.json]));

    platform.clock.advance(5);
    let renamed = platform.call("PUT", &path, r#"{"name":"two"}"#).await;
    assert_eq!(renamed.status, 200, "{renamed:?}");
    assert_eq!(
        (&renamed.json["name"], &renamed.json["injection"]),
        (&json!("two"), &masked)
    );
    assert_eq!(renamed.json["createdAt"], created.json["createdAt"]);
    assert_ne!(renamed.json["updatedAt"], created.json["updatedAt"]);
    // The injection is replaced as a whole, also by one of another type.
    let body = json!({"injection": {"type": "code_host", "token": "ghp_0123456789"}}).to_string();
    let changed = platform.call("PUT", &path, &body).await;
    assert_eq!(
        changed.json["injection"],
        json!({"type": "code_host", "token": "ghp_****"})
    );
    assert_eq!(changed.json["name"], "two");
    let same = platform.call("PUT", &path, "{}").await;
    assert_eq!(same.json["injection"], changed.json["injection"]);

    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    for method in ["GET", "DELETE"] {
        platform.call(method, &path, "").await.error(404);
    }
    platform.call("PUT", &path, "{}").await.error(404);
    platform.call("GET", "/injection-rules/%00", "").await.error(404);
}

#[tokio::test]
async fn names_are_unique_for_a_user_and_rules_are_their_owners() {
    let platform = TestPlatform::start().await;
    let injection = json!({"type": "anthropic", "api_key": SECRET});
    let id = id_of(&save(&platform, KEY, "one", &injection).await);
    assert!(save(&platform, KEY, "one", &injection).await.error(409).contains("one"));
    let other = id_of(&save(&platform, OTHER_KEY, "one", &injection).await);
    let second = id_of(&save(&platform, KEY, "two", &injection).await);
    let path = format!("/injection-rules/{second}");
    platform.call("PUT", &path, r#"{"name":"one"}"#).await.error(409);
    for (method, body) in [("GET", ""), ("PUT", "{}"), ("DELETE", "")] {
        let foreign = format!("/injection-rules/{other}");
        platform.call(method, &foreign, body).await.error(404);
    }
    let refused = platform
        .call(
            "POST",
            "/sandboxes",
            &json!({"templateID": "base", "injections": [{"type": "id", "id": other}]}).to_string(),
        )
        .await;
    assert!(refused.error(400).contains("injections[0]"), "{refused:?}");
    create(&platform, &json!([{"type": "id", "id": id}])).await;
}

#[tokio::test]
async fn invalid_rules_are_refused() {
    let platform = TestPlatform::start().await;
    for (body, fragment) in [
        (json!({"name": "n"}), "injection"),
        (json!({"injection": {"type": "http", "base_url": "a.b"}}), "name"),
        (
            json!({"name": "n".repeat(65), "injection": {"type": "http", "base_url": "a.b"}}),
            "name",
        ),
        (json!({"name": "n", "injection": {}}), "type"),
        (json!({"name": "n", "injection": {"type": "nobody"}}), "injection.type"),
        (
            json!({"name": "n", "injection": {"type": "id", "id": "rule_1"}}),
            "injection.id",
        ),
        (
            json!({"name": "n", "injection": {"type": "http"}}),
            "injection.base_url",
        ),
        (
            json!({"name": "n", "injection": {"type": "http", "base_url": "http://a.b"}}),
            "https://",
        ),
        (
            json!({"name": "n", "injection": {"type": "http", "base_url": "a.b", "headers": {"a": 1}}}),
            "headers",
        ),
        (
            json!({"name": "n", "injection": {"type": "openai", "api_key": format!("{SECRET}\n")}}),
            "injection.api_key",
        ),
        (
            json!({"name": "n", "injection": {"type": "openai", "api_key": "sk-l****"}}),
            "masked",
        ),
    ] {
        let reply = platform.call("POST", "/injection-rules", &body.to_string()).await;
        let message = reply.error(400);
        assert!(message.contains(fragment), "{body}: {message}");
        assert!(!message.contains(SECRET), "{message}");
    }
    assert_eq!(platform.call("GET", "/injection-rules", "").await.json, json!([]));
}

#[tokio::test]
async fn injections_reach_the_node_in_their_order() {
    let platform = TestPlatform::start().await;
    let saved = id_of(&save(&platform, KEY, "one", &json!({"type": "qiniu", "api_key": SECRET})).await);
    let sandbox = create(
        &platform,
        &json!([
            {"type": "http", "base_url": "https://a.b", "headers": {"X-Key": "value one"}},
            {"type": "id", "id": saved},
            {"type": "github", "token": "ghp_0123456789"},
        ]),
    )
    .await;
    let want = [
        ["injections[0]", "a.b", "value one"],
        [saved.as_str(), "api.qnaigc.com", "Bearer sk-live-0123456789"],
        [
            "injections[2]",
            "github.com",
            "Basic eC1hY2Nlc3MtdG9rZW46Z2hwXzAxMjM0NTY3ODk=",
        ],
        ["injections[2]", "api.github.com", "Bearer ghp_0123456789"],
    ];
    assert_eq!(
        shown(&rules(&platform, &sandbox)),
        want.map(|rule| rule.map(str::to_owned))
    );
    let path = format!("/sandboxes/{sandbox}/injections");
    let all = platform.call("GET", &path, "").await;
    assert_eq!(
        all.json,
        json!({"injections": [
            {"type": "http", "base_url": "https://a.b", "headers": {"X-Key": "****"}},
            {"type": "id", "id": saved},
            {"type": "github", "token": "ghp_****"},
        ]})
    );

    let update = json!({"injections": [{"type": "provider_b", "api_key": SECRET}]}).to_string();
    assert_eq!(platform.call("PUT", &path, &update).await.status, 204);
    let replaced = [["injections[0]", "api.anthropic.com", SECRET]];
    assert_eq!(
        shown(&rules(&platform, &sandbox)),
        replaced.map(|rule| rule.map(str::to_owned))
    );
    assert_eq!(platform.call("PUT", &path, r#"{"injections":[]}"#).await.status, 204);
    assert!(rules(&platform, &sandbox).is_empty());
    assert_eq!(platform.call("GET", &path, "").await.json, json!({"injections": []}));
    platform.call("PUT", &path, "{}").await.error(400);
    let many = json!({"injections": vec![json!({"type": "http", "base_url": "a.b"}); 21]}).to_string();
    platform.call("PUT", &path, &many).await.error(400);
    platform.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);
    platform
        .call_as(Some(OTHER_KEY), "PUT", &path, r#"{"injections":[]}"#)
        .await
        .error(404);
}

#[tokio::test]
async fn saved_rules_reach_running_sandboxes() {
    let platform = TestPlatform::start().await;
    let injection = json!({"type": "http", "base_url": "a.b", "headers": {"x-key": "value one"}});
    let saved = id_of(&save(&platform, KEY, "one", &injection).await);
    let with = create(&platform, &json!([{"type": "id", "id": saved}])).await;
    let without = create(&platform, &json!([])).await;
    let path = format!("/injection-rules/{saved}");
    let body = json!({"injection": {"type": "http", "base_url": "c.d", "headers": {"x-key": "value two"}}});
    assert_eq!(platform.call("PUT", &path, &body.to_string()).await.status, 200);
    let want = [[saved.as_str(), "c.d", "value two"].map(str::to_owned)];
    assert_eq!(shown(&rules(&platform, &with)), want);
    assert!(rules(&platform, &without).is_empty());

    let before = interception(&platform, &with);
    let platform = platform.restart().await;
    assert_eq!(interception(&platform, &with), before);
    // After an adoption, too, changes are applied.
    let network = format!("/sandboxes/{with}/network");
    assert_eq!(
        platform
            .call("PUT", &network, r#"{"denyOut":["8.8.8.8"]}"#)
            .await
            .status,
        204
    );
    assert_eq!(interception(&platform, &with), before);
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    assert!(rules(&platform, &with).is_empty());
    assert_eq!(interception(&platform, &with).ca_seed, before.ca_seed);
    assert_ne!(interception(&platform, &without).ca_seed, before.ca_seed);
    // The reference stays, and refers to nothing.
    let injections = platform.call("GET", &format!("/sandboxes/{with}/injections"), "").await;
    assert_eq!(injections.json, json!({"injections": [{"type": "id", "id": saved}]}));
}

#[tokio::test]
async fn a_rule_changed_during_a_start_is_applied() {
    let platform = std::sync::Arc::new(TestPlatform::start().await);
    let injection = json!({"type": "http", "base_url": "a.b", "headers": {"x-key": "value one"}});
    let saved = id_of(&save(&platform, KEY, "one", &injection).await);
    *platform.node.start.lock() = Behaviour::Waits;
    let starting = tokio::spawn({
        let (platform, saved) = (std::sync::Arc::clone(&platform), saved.clone());
        async move { create(&platform, &json!([{"type": "id", "id": saved}])).await }
    });
    within(platform.node.waiting.notified()).await;
    let path = format!("/injection-rules/{saved}");
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    platform.node.go.notify_one();
    let sandbox = within(starting).await.expect("a sandbox");
    assert!(rules(&platform, &sandbox).is_empty());
}

#[tokio::test]
async fn the_token_of_code_hosts_is_replaced_and_nothing_else() {
    let platform = TestPlatform::start().await;
    let saved = id_of(
        &save(
            &platform,
            KEY,
            "one",
            &json!({"type": "github", "token": "ghp_saved_rule"}),
        )
        .await,
    );
    let sandbox = create(
        &platform,
        &json!([
            {"type": "openai", "api_key": SECRET},
            {"type": "github", "token": "ghp_0123456789", "base_url": "api.github.com/repos/*"},
            {"type": "id", "id": saved},
        ]),
    )
    .await;
    let path = format!("/sandboxes/{sandbox}/github-token");
    let set = platform
        .call("PUT", &path, r#"{"authorization_token":"ghp_another_one"}"#)
        .await;
    assert_eq!(set.status, 204, "{set:?}");
    let values: Vec<String> = shown(&rules(&platform, &sandbox))
        .into_iter()
        .map(|[.., value]| value)
        .collect();
    assert_eq!(
        values,
        [
            "Bearer sk-live-0123456789",
            "Bearer ghp_another_one",
            "Basic eC1hY2Nlc3MtdG9rZW46Z2hwX2Fub3RoZXJfb25l",
            "Bearer ghp_another_one",
        ]
    );
    // The saved rule of other sandboxes stays.
    let other = create(&platform, &json!([{"type": "id", "id": saved}])).await;
    assert_eq!(shown(&rules(&platform, &other))[1][2], "Bearer ghp_saved_rule");
    for body in [
        "{}",
        r#"{"authorization_token":""}"#,
        r#"{"authorization_token":"a\nb"}"#,
    ] {
        platform.call("PUT", &path, body).await.error(400);
    }
    let none = create(&platform, &json!([])).await;
    let path = format!("/sandboxes/{none}/github-token");
    let refused = platform.call("PUT", &path, r#"{"authorization_token":"ghp_x"}"#).await;
    assert!(refused.error(400).contains("code host"), "{refused:?}");
}

#[tokio::test]
async fn a_team_mate_refers_to_rules_of_their_own() {
    let platform = TestPlatform::start().await;
    platform
        .store
        .user_insert(&UserRow {
            id: user(3),
            team_id: team(1),
            name: "second".to_owned(),
            created_us: 0,
        })
        .await
        .expect("a user");
    let key = server::keys::NewKey::api_key().expect("random");
    let row = store::keys::ApiKeyRow {
        id: "key3".to_owned(),
        team_id: team(1),
        user_id: user(3),
        name: "second".to_owned(),
        mask: key.mask(),
        created_us: 0,
        revoked_us: None,
        last_used_us: None,
    };
    platform.store.api_key_insert(&row, &key.hash()).await.expect("a key");
    let key = key.expose();
    let http = |value: &str| json!({"type": "http", "base_url": "a.b", "headers": {"x-key": value}});
    let first = id_of(&save(&platform, KEY, "same", &http("of the first")).await);
    let second = id_of(&save(&platform, &key, "same", &http("of the second")).await);
    let sandbox = create(&platform, &json!([{"type": "id", "id": first}])).await;
    let path = format!("/sandboxes/{sandbox}/injections");
    let put = |id: &str| {
        let body = json!({"injections": [{"type": "id", "id": id}]}).to_string();
        let (platform, key, path) = (&platform, &key, &path);
        async move { platform.call_as(Some(key), "PUT", path, &body).await }
    };
    put(&first).await.error(400);
    assert_eq!(shown(&rules(&platform, &sandbox))[0][2], "of the first");
    assert_eq!(put(&second).await.status, 204);
    assert_eq!(shown(&rules(&platform, &sandbox))[0][2], "of the second");
}

#[tokio::test]
async fn the_database_has_no_secret_in_clear() {
    let platform = TestPlatform::start().await;
    save(&platform, KEY, "one", &json!({"type": "openai", "api_key": SECRET})).await;
    create(
        &platform,
        &json!([{"type": "http", "base_url": "a.b", "headers": {"x": SECRET}}]),
    )
    .await;
    let mut found = 0;
    for entry in std::fs::read_dir(platform.directory.path()).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            continue;
        }
        let content = std::fs::read(path).expect("a file");
        found += content.len();
        let has = |text: &[u8]| content.windows(text.len()).any(|window| window == text);
        assert!(!has(SECRET.as_bytes()));
    }
    assert!(found > 0);
}

#[tokio::test]
async fn large_injections_are_refused() {
    let platform = TestPlatform::start().await;
    let headers: serde_json::Map<String, Value> =
        (0..20).map(|n| (format!("x-{n}"), json!("v".repeat(8000)))).collect();
    let injection = json!({"type": "http", "base_url": "a.b", "headers": headers});
    assert!(
        save(&platform, KEY, "one", &injection)
            .await
            .error(400)
            .contains("larger")
    );
    let body = json!({"templateID": "base", "injections": [injection]}).to_string();
    platform.call("POST", "/sandboxes", &body).await.error(400);
    assert!(platform.node.started.lock().is_empty());
}
