//! Forks of sandboxes: what their children get, and what is left of those that fail. The node is a fake.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::pause::{parsed, pause, post};
use super::platform::{Behaviour, OTHER_KEY, TestPlatform, within};

async fn fork(platform: &TestPlatform, id: &str, body: &str) -> Vec<Value> {
    let reply = post(platform, id, "fork", body).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json.as_array().expect("a list").clone()
}

fn id_of(entry: &Value) -> &str {
    entry["sandbox"]["sandboxID"].as_str().expect("an id")
}

async fn detail(platform: &TestPlatform, id: &str) -> Value {
    platform.call("GET", &format!("/sandboxes/{id}"), "").await.json
}

async fn listed(platform: &TestPlatform) -> HashSet<String> {
    let list = platform.call("GET", "/v2/sandboxes", "").await.json;
    let items = list.as_array().expect("a list").iter();
    items
        .map(|item| item["sandboxID"].as_str().expect("an id").to_owned())
        .collect()
}

#[tokio::test]
async fn children_have_what_their_parent_was_created_with() {
    let platform = TestPlatform::start().await;
    let keys = r#","metadata":{"a":"b"},"envVars":{"NAME":"value"},"autoPause":true,"timeout":600,
        "injections":[{"type":"http","base_url":"a.b","headers":{"x-key":"value"}}],
        "network":{"allowOut":["8.8.8.8"],"allowPublicTraffic":false,
            "egressProxy":{"address":"8.8.4.4:1080","username":"u","password":"p"},
            "rules":{"example.com":[{"transform":{"headers":{"x-rule":"other value"}}}]}}"#;
    let id = platform.create(keys).await;
    let entries = fork(&platform, &id, r#"{"count":2,"timeout":60}"#).await;
    assert_eq!(entries.len(), 2);
    let request = platform.node.forked.lock().last().expect("a fork").clone();
    assert_eq!(request.id, parsed(&id));
    let started = platform.node.started.lock().last().expect("a start").clone();
    let before = detail(&platform, &id).await;
    let mut tokens = HashSet::from([started.init.access_token.clone()]);
    for (entry, child) in entries.iter().zip(&request.children) {
        assert_eq!(child.id.as_str(), id_of(entry));
        let init = &child.boot.init;
        assert_eq!(init.sandbox_id.as_deref(), Some(id_of(entry)));
        assert_eq!(
            init.access_token.as_deref(),
            entry["sandbox"]["envdAccessToken"].as_str()
        );
        assert!(tokens.insert(init.access_token.clone()), "a token of its own");
        assert_eq!(init.env_vars, started.init.env_vars);
        assert_eq!(init.default_user, started.init.default_user);
        assert_eq!(child.boot.resources, started.resources);
        assert_eq!(child.boot.template, started.template);
        // With its secrets, and the authority that programs in it trust.
        assert_eq!(child.egress, started.egress);
        let rules = &child.egress.interception.as_ref().expect("an authority").rules;
        assert_eq!(rules.len(), 2);
        assert!(child.egress.proxy.as_ref().expect("a proxy").credentials.is_some());
        let after = detail(&platform, id_of(entry)).await;
        for key in [
            "metadata",
            "templateID",
            "cpuCount",
            "memoryMB",
            "network",
            "alias",
            "lifecycle",
        ] {
            assert_eq!(after[key], before[key], "{key}");
        }
        assert!((59..=60).contains(&platform.seconds_left(id_of(entry)).await));
    }
    assert!(platform.seconds_left(&id).await > 590);
    // A child of a child, and the same after a restart.
    let child = id_of(&entries[0]).to_owned();
    let grandchild = id_of(&fork(&platform, &child, "").await[0]).to_owned();
    let policies = |platform: &TestPlatform| {
        let policies = platform.node.egress.lock();
        [&id, &child, &grandchild].map(|id| policies[&parsed(id)].clone())
    };
    let [parent, of_child, of_grandchild] = policies(&platform);
    assert!(parent == of_child && of_child == of_grandchild);
    platform.node.adopts_all.store(true, Ordering::SeqCst);
    let platform = platform.restart().await;
    assert_eq!(policies(&platform), [parent, of_child, of_grandchild]);
    // It can be changed by itself.
    let network = format!("/sandboxes/{child}/network");
    let changed = platform.call("PUT", &network, r#"{"denyOut":["8.8.4.4"]}"#).await;
    assert_eq!(changed.status, 204, "{changed:?}");
    let [parent, of_child, _] = policies(&platform);
    assert_ne!(parent, of_child);
    let authority = |policy: &model::network::EgressPolicy| policy.interception.as_ref().map(|it| it.ca_seed.clone());
    assert_eq!(authority(&parent), authority(&of_child));
}

#[tokio::test]
async fn nothing_is_left_of_children_that_fail() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    platform.node.forks_started.store(1, Ordering::SeqCst);
    let entries = fork(&platform, &id, r#"{"count":3}"#).await;
    assert_eq!(
        listed(&platform).await,
        HashSet::from([id.clone(), id_of(&entries[0]).to_owned()])
    );
    for entry in &entries[1..] {
        assert_eq!(entry["error"]["code"], 500, "{entry}");
        assert!(entry.get("sandbox").is_none());
        assert!(!entry.to_string().contains(testkit::node::SECRET));
    }
    assert_eq!(platform.rows().sandbox_list_live().await.expect("rows").len(), 2);
    // As a whole.
    for (behaviour, status) in [
        (Behaviour::Fails, 503),
        (Behaviour::Full, 503),
        (Behaviour::Unsupported, 501),
        (Behaviour::Panics, 503),
    ] {
        *platform.node.fork.lock() = behaviour;
        let reply = post(&platform, &id, "fork", r#"{"count":2}"#).await;
        let message = reply.error(status);
        assert!(!message.contains(testkit::node::SECRET), "{behaviour:?}: {message}");
        assert_eq!(listed(&platform).await.len(), 2, "{behaviour:?}");
        let rows = platform.rows().sandbox_list_live().await.expect("rows");
        assert_eq!(rows.len(), 2, "{behaviour:?}");
    }
    *platform.node.fork.lock() = Behaviour::Works;
    fork(&platform, &id, "").await;
}

#[tokio::test]
async fn requests_are_checked() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.sandboxes = Some(4)).await;
    let id = platform.create("").await;
    for body in [
        r#"{"count":0}"#,
        r#"{"count":4}"#,
        r#"{"count":101}"#,
        r#"{"count":"1"}"#,
        r#"{"timeout":0}"#,
        r#"{"timeout":-5}"#,
        r#"{"timeout":100000000}"#,
        "[]",
    ] {
        post(&platform, &id, "fork", body).await.error(400);
    }
    post(&platform, "inobody", "fork", "").await.error(404);
    let path = format!("/sandboxes/{id}/fork");
    platform.call_as(None, "POST", &path, "").await.error(401);
    platform.call_as(Some(OTHER_KEY), "POST", &path, "").await.error(404);
    assert!(platform.node.forked.lock().is_empty());
    // Those beyond the limit are told so, each by itself.
    platform.create("").await;
    let entries = fork(&platform, &id, r#"{"count":3}"#).await;
    let codes: Vec<_> = entries.iter().map(|entry| entry["error"]["code"].clone()).collect();
    assert_eq!(codes, [Value::Null, Value::Null, json!(429)]);
    assert_eq!(platform.node.forked.lock().last().expect("a fork").children.len(), 2);
    // With no place for any, nothing is copied.
    let entries = fork(&platform, &id, "").await;
    assert_eq!(entries[0]["error"]["code"], 429);
    assert_eq!(platform.node.forked.lock().len(), 1);
    pause(&platform, &id).await;
    assert!(post(&platform, &id, "fork", "").await.error(409).contains("paused"));
}

#[tokio::test]
async fn it_waits_for_a_change_of_its_parent_and_keeps_others_waiting() {
    let platform = std::sync::Arc::new(TestPlatform::start().await);
    let id = platform.create("").await;
    *platform.node.fork.lock() = Behaviour::Waits;
    let forking = tokio::spawn({
        let (platform, id) = (std::sync::Arc::clone(&platform), id.clone());
        async move { post(&platform, &id, "fork", "").await }
    });
    within(platform.node.waiting.notified()).await;
    let pausing = tokio::spawn({
        let (platform, id) = (std::sync::Arc::clone(&platform), id.clone());
        async move { post(&platform, &id, "pause", "").await }
    });
    platform.node.go.notify_one();
    assert_eq!(within(forking).await.expect("an answer").status, 201);
    assert_eq!(within(pausing).await.expect("an answer").status, 204);
}
