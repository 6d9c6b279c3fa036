//! Repositories as resources of a create request: what is refused before anything is started, and what becomes of a
//! sandbox whose agent fails meanwhile. `conformance/fence` has the tests with git.

use serde_json::{Value, json};

use super::metrics::scrape;
use super::platform::{Behaviour, TestPlatform};

fn resource(url: &str, path: &str, token: &str) -> Value {
    json!({"type": "code_host_repository", "url": url, "mount_path": path, "authorization_token": token})
}

fn body(resources: &Value) -> String {
    json!({"templateID": "base", "resources": resources}).to_string()
}

#[tokio::test]
async fn invalid_resources_are_refused() {
    let platform = TestPlatform::start().await;
    let url = "https://github.com/o/r";
    let good = resource(url, "/a", "t");
    let with = |key: &str, value: Value| {
        let mut changed = good.clone();
        changed[key] = value;
        json!([changed])
    };
    let many: Vec<Value> = (0..21).map(|n| resource(url, &format!("/{n}"), "t")).collect();
    for (resources, part) in [
        (json!({}), "/resources: value must be an array"),
        (json!([1]), "/resources/0: value must be an object"),
        (json!(many), "maximum number of items is 20"),
        (
            with("type", json!("kodo")),
            "/resources/0/type: value must be code_host_repository",
        ),
        (json!([{"type": "github_repository"}]), "\"url\" is missing"),
        (
            with("url", json!("https://user:word@github.com/o/r")),
            "must not contain credentials",
        ),
        (
            with("url", json!("ftp://github.com/o/r")),
            "/resources/0/url: must be https://",
        ),
        (
            with("url", json!("https://example.com/o/r")),
            "resources[0].url: only repositories of github.com",
        ),
        (
            with("mount_path", json!("a")),
            "/resources/0/mount_path: must be an absolute path",
        ),
        (with("mount_path", json!("/proc")), "belongs to the system"),
        (with("authorization_token", json!("")), "1 to 1024 visible ASCII"),
        (with("authorization_token", json!("a b")), "1 to 1024 visible ASCII"),
        (with("authorization_token", Value::Null), "not nullable"),
        (
            json!([good, resource(url, "/b", "other")]),
            "resources[1].authorization_token: all repositories",
        ),
        (
            json!([good, resource(url, "/a/", "t")]),
            "resources[1].mount_path: the same as that of resources[0]",
        ),
        (json!([good, resource(url, "/a/b", "t")]), "resources[1].mount_path"),
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let reply = platform.call("POST", path, &body(&resources)).await;
            let message = reply.error(400);
            assert!(message.contains(part), "{resources}: {message}");
            assert!(!message.contains("word"), "{message}");
        }
    }
    assert!(platform.node.started.lock().is_empty());
    assert_eq!(platform.call("POST", "/sandboxes", &body(&json!([]))).await.status, 201);
}

#[tokio::test]
async fn a_sandbox_that_does_not_get_its_repositories_is_ended() {
    let platform = TestPlatform::start().await;
    // Nothing listens where the agent should be.
    let resources = json!([resource("https://github.com/o/r", "/a", "ghp_canary")]);
    let reply = platform.call("POST", "/sandboxes", &body(&resources)).await;
    assert!(!reply.error(500).contains("canary"));
    assert!(platform.node.ids().is_empty());
    assert_eq!(platform.call("GET", "/sandboxes", "").await.json, json!([]));
    let started = platform.node.started.lock().clone();
    let egress = &started[0].egress;
    // Meanwhile it reaches the code host and nothing else, with the token.
    let hosts: Vec<&str> = egress.allow_domains.iter().map(|domain| domain.as_str()).collect();
    assert_eq!(hosts, ["github.com", "api.github.com"]);
    assert!(egress.denies_everything_else() && egress.allow.is_empty());
    let rules = &egress.interception.as_ref().expect("rules").rules;
    let values: Vec<&str> = rules.iter().map(|rule| rule.headers[0].value.expose()).collect();
    assert_eq!(
        values,
        ["Basic eC1hY2Nlc3MtdG9rZW46Z2hwX2NhbmFyeQ==", "Bearer ghp_canary"]
    );
    assert!(!format!("{:?}", started[0].init.env_vars).contains("canary"));
    let read = scrape(&platform).await;
    for (reason, count) in [
        ("failed", 1.0),
        ("refused", 0.0),
        ("timeout", 0.0),
        ("unreachable", 0.0),
    ] {
        read.is(
            &format!("ringfence_repositories_failures_total{{reason=\"{reason}\"}}"),
            count,
        );
    }
    read.is("ringfence_repositories_prepared_total", 0.0);
    read.is("ringfence_repositories_from_copy_total", 0.0);
    *platform.node.start.lock() = Behaviour::Fails;
    platform.call("POST", "/sandboxes", &body(&resources)).await.error(500);
}
