//! Authentication with API keys.

use super::platform::{KEY, OTHER_KEY, TestPlatform};

const ROUTES: [(&str, &str); 11] = [
    ("POST", "/sandboxes"),
    ("POST", "/v2/sandboxes"),
    ("GET", "/sandboxes"),
    ("GET", "/v2/sandboxes"),
    ("GET", "/sandboxes/ix"),
    ("DELETE", "/sandboxes/ix"),
    ("POST", "/sandboxes/ix/timeout"),
    ("POST", "/sandboxes/ix/refreshes"),
    ("POST", "/sandboxes/ix/connect"),
    ("POST", "/v2/sandboxes/ix/connect"),
    ("GET", "/sandboxes/BAD-ID-!"),
];

#[tokio::test]
async fn every_route_checks_the_key_first() {
    let platform = TestPlatform::start().await;
    let unknown = format!("{KEY}aa");
    for (method, path) in ROUTES {
        for (key, fragment) in [
            (None, "missing"),
            (Some(""), "malformed"),
            (Some("sk_e2b_00"), "malformed"),
            (Some("e2b_"), "invalid API key"),
            (Some("e2b_xyz!"), "invalid API key"),
            (Some("e2b_000"), "invalid API key"),
            (Some(unknown.as_str()), "invalid API key"),
        ] {
            // The body is invalid too, but the key is checked first.
            let reply = platform.call_as(key, method, path, "{").await;
            assert!(
                reply.error(401).contains(fragment),
                "{method} {path} {key:?}: {reply:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_revoked_key_is_refused_immediately() {
    let platform = TestPlatform::start().await;
    assert_eq!(platform.call("GET", "/sandboxes", "").await.status, 200);
    platform.store.api_key_revoke("key1", 1).await.expect("a database");
    platform.call("GET", "/sandboxes", "").await.error(401);
    assert_eq!(
        platform.call_as(Some(OTHER_KEY), "GET", "/sandboxes", "").await.status,
        200
    );
}

#[tokio::test]
async fn keys_are_case_insensitive() {
    let platform = TestPlatform::start().await;
    let upper = KEY.replace("e2b_", "").to_uppercase();
    let reply = platform
        .call_as(Some(&format!("e2b_{upper}")), "GET", "/sandboxes", "")
        .await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn sandboxes_of_other_teams_are_not_found() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    for (method, path, body) in [
        ("GET", format!("/sandboxes/{id}"), ""),
        ("DELETE", format!("/sandboxes/{id}"), ""),
        ("POST", format!("/sandboxes/{id}/timeout"), r#"{"timeout":5}"#),
        ("POST", format!("/sandboxes/{id}/refreshes"), ""),
        ("POST", format!("/sandboxes/{id}/connect"), r#"{"timeout":5}"#),
        ("POST", format!("/v2/sandboxes/{id}/connect"), "{}"),
    ] {
        let foreign = platform.call_as(Some(OTHER_KEY), method, &path, body).await;
        let missing = platform
            .call_as(Some(OTHER_KEY), method, &path.replace(&id, "inobody"), body)
            .await;
        assert_eq!(
            foreign.error(404).replace(&id, "inobody"),
            missing.error(404),
            "foreign and missing sandboxes get the same response"
        );
    }
    let list = platform.call_as(Some(OTHER_KEY), "GET", "/sandboxes", "").await;
    assert_eq!(list.text, "[]");
    assert_eq!(platform.call("GET", &format!("/sandboxes/{id}"), "").await.status, 200);
}
