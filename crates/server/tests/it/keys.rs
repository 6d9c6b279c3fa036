//! Teams, API keys and access tokens, and what each is accepted for.

use serde_json::Value;

use super::platform::{KEY, OTHER_KEY, Reply, TestPlatform, team};

const HOST: (&str, &str) = ("host", "localhost");
const JSON: (&str, &str) = ("content-type", "application/json");

async fn bearer(platform: &TestPlatform, token: &str, method: &str, path: &str, body: &str) -> Reply {
    let header = format!("Bearer {token}");
    let headers = [HOST, JSON, ("authorization", &header)];
    platform.send(method, path, &headers, body.to_owned()).await
}

fn text<'a>(json: &'a Value, key: &str) -> &'a str {
    json[key].as_str().unwrap_or_else(|| panic!("{key} in {json}"))
}

async fn new_token(platform: &TestPlatform, key: &str) -> (String, String) {
    let reply = platform
        .call_as(Some(key), "POST", "/access-tokens", r#"{"name":"laptop"}"#)
        .await;
    assert_eq!(reply.status, 201, "{reply:?}");
    (
        text(&reply.json, "id").to_owned(),
        text(&reply.json, "token").to_owned(),
    )
}

#[tokio::test]
async fn bearer_takes_an_api_key_or_an_access_token() {
    let platform = TestPlatform::start().await;
    assert_eq!(bearer(&platform, KEY, "GET", "/sandboxes", "").await.status, 200);
    let (_, token) = new_token(&platform, KEY).await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    assert_eq!(bearer(&platform, &token, "GET", &path, "").await.status, 200);
    let (_, foreign) = new_token(&platform, OTHER_KEY).await;
    bearer(&platform, &foreign, "GET", &path, "").await.error(404);

    for (value, fragment) in [
        ("", "malformed"),
        ("Bearer", "malformed"),
        ("Basic dXNlcjpwYXNz", "malformed"),
        (KEY, "malformed"),
        ("Bearer ", "malformed"),
        ("Bearer x", "malformed"),
        ("Bearer sk_e2b_", "invalid access token"),
        ("Bearer sk_e2b_0g", "invalid access token"),
        (
            "Bearer sk_e2b_0000000000000000000000000000000000000001",
            "invalid access token",
        ),
        ("Bearer e2b_0000000000000000000000000000000000000009", "invalid API key"),
    ] {
        let reply = platform
            .send("GET", "/sandboxes", &[HOST, ("authorization", value)], "")
            .await;
        assert!(reply.error(401).contains(fragment), "{value:?}: {reply:?}");
        assert!(reply.header("www-authenticate").starts_with("Bearer"));
    }
    let reply = platform
        .send(
            "GET",
            "/sandboxes",
            &[HOST, ("authorization", &format!("bEARER  {token}"))],
            "",
        )
        .await;
    assert_eq!(reply.status, 200, "the scheme's case does not matter");
    // An access token is not an API key.
    platform.call_as(Some(&token), "GET", "/sandboxes", "").await.error(401);
}

#[tokio::test]
async fn the_api_key_header_takes_precedence() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}");
    for (key, authorization, status) in [
        (KEY, "Bearer sk_e2b_00".to_owned(), 200),
        (KEY, format!("Bearer {OTHER_KEY}"), 200),
        (OTHER_KEY, format!("Bearer {KEY}"), 404),
        ("e2b_00", format!("Bearer {KEY}"), 401),
    ] {
        let headers = [HOST, ("x-api-key", key), ("authorization", authorization.as_str())];
        let reply = platform.send("GET", &path, &headers, "").await;
        assert_eq!(reply.status, status, "{key} {authorization}: {reply:?}");
    }
}

#[tokio::test]
async fn other_teams_are_not_found() {
    let platform = TestPlatform::start().await;
    let ask = async |named: &str| {
        let headers = [HOST, ("x-api-key", KEY), ("x-team-id", named)];
        platform.send("GET", "/sandboxes", &headers, "").await
    };
    assert_eq!(ask(team(1).as_str()).await.status, 200);
    let foreign = ask(team(2).as_str()).await;
    let missing = ask(team(9).as_str()).await;
    assert_eq!(
        foreign.error(404).replace(team(2).as_str(), ""),
        missing.error(404).replace(team(9).as_str(), "")
    );
    ask("junk").await.error(404);
}

#[tokio::test]
async fn api_keys_are_created_listed_renamed_and_revoked() {
    let platform = TestPlatform::start().await;
    let made = platform.call("POST", "/api-keys", r#"{"name":"ci"}"#).await;
    assert_eq!(made.status, 201, "{made:?}");
    let (id, key) = (text(&made.json, "id").to_owned(), text(&made.json, "key").to_owned());
    assert!(key.starts_with("e2b_") && key.len() == 44, "{key}");
    assert_eq!(text(&made.json, "name"), "ci");
    let mask = &made.json["mask"];
    assert_eq!((text(mask, "prefix"), mask["valueLength"].as_u64()), ("e2b_", Some(40)));
    assert_eq!(text(mask, "maskedValuePrefix"), &key[4..6]);
    assert_eq!(text(mask, "maskedValueSuffix"), &key[40..]);
    assert!(made.json["lastUsed"].is_null());
    // It is valid immediately, for the same team.
    let sandbox = platform.create("").await;
    let path = format!("/sandboxes/{sandbox}");
    assert_eq!(platform.call_as(Some(&key), "GET", &path, "").await.status, 200);

    let listed = platform.call("GET", "/api-keys", "").await;
    assert!(!listed.text.contains(&key), "keys are shown once");
    let find = |reply: &Reply| {
        let keys = reply.json.as_array().expect("an array").clone();
        keys.into_iter().find(|key| key["id"] == *id)
    };
    assert_eq!(find(&listed).expect("listed")["name"], "ci");
    let foreign = platform.call_as(Some(OTHER_KEY), "GET", "/api-keys", "").await;
    assert!(find(&foreign).is_none());

    let one = format!("/api-keys/{id}");
    let upper = format!("/api-keys/{}", id.to_uppercase());
    let renamed = platform.call("PATCH", &upper, r#"{"name":"build"}"#).await;
    assert_eq!(renamed.status, 200, "{renamed:?}");
    assert_eq!(text(&renamed.json, "name"), "build");
    platform
        .call_as(Some(OTHER_KEY), "PATCH", &one, r#"{"name":"mine"}"#)
        .await
        .error(404);
    platform.call_as(Some(OTHER_KEY), "DELETE", &one, "").await.error(404);
    for bad in ["x", "00000000000000000000000000000000", "%00", &format!("{{{id}}}")] {
        let path = format!("/api-keys/{}", bad.replace('{', "%7B").replace('}', "%7D"));
        platform.call("DELETE", &path, "").await.error(400);
    }

    assert_eq!(platform.call("DELETE", &one, "").await.status, 204);
    platform.call_as(Some(&key), "GET", &path, "").await.error(401);
    platform.call("DELETE", &one, "").await.error(404);
    platform.call("PATCH", &one, r#"{"name":"again"}"#).await.error(404);
    assert!(find(&platform.call("GET", "/api-keys", "").await).is_none());
}

#[tokio::test]
async fn names_are_validated() {
    let platform = TestPlatform::start().await;
    let post = async |name: &str| {
        let body = serde_json::json!({ "name": name }).to_string();
        platform.call("POST", "/api-keys", &body).await
    };
    for good in ["a", &"é".repeat(64), "a b"] {
        assert_eq!(post(good).await.status, 201, "{good}");
    }
    for bad in ["", &"é".repeat(65), " a", "a ", "a\nb", "\0"] {
        assert!(post(bad).await.error(400).contains("64"), "{bad:?}");
    }
    for bad in ["{}", r#"{"name":null}"#, r#"{"name":1}"#] {
        platform.call("POST", "/access-tokens", bad).await.error(400);
    }
}

#[tokio::test]
async fn access_tokens_belong_to_their_user_and_are_revoked_immediately() {
    let platform = TestPlatform::start().await;
    let (id, token) = new_token(&platform, KEY).await;
    assert!(token.starts_with("sk_e2b_") && token.len() == 47, "{token}");
    let path = format!("/access-tokens/{id}");
    platform.call_as(Some(OTHER_KEY), "DELETE", &path, "").await.error(404);
    assert_eq!(bearer(&platform, &token, "GET", "/sandboxes", "").await.status, 200);
    // With the token that is deleted.
    assert_eq!(bearer(&platform, &token, "DELETE", &path, "").await.status, 204);
    bearer(&platform, &token, "GET", "/sandboxes", "").await.error(401);
    platform.call("DELETE", &path, "").await.error(404);
}

#[tokio::test]
async fn a_login_gets_the_same_key_until_it_is_revoked() {
    let platform = TestPlatform::start().await;
    // A caller with an API key gets that key.
    let reply = platform.call("GET", "/teams", "").await;
    assert_eq!(
        reply.json,
        serde_json::json!([{"teamID": team(1).as_str(), "name": "team1", "apiKey": KEY, "isDefault": true}])
    );
    let (_, token) = new_token(&platform, KEY).await;
    let key = async || {
        let reply = bearer(&platform, &token, "GET", "/teams", "").await;
        assert_eq!(reply.status, 200, "{reply:?}");
        text(&reply.json[0], "apiKey").to_owned()
    };
    let first = key().await;
    assert_ne!(first, KEY);
    assert_eq!(
        platform.call_as(Some(&first), "GET", "/sandboxes", "").await.status,
        200
    );
    assert_eq!(key().await, first);
    let keys = platform.call("GET", "/api-keys", "").await;
    let keys = keys.json.as_array().expect("an array").clone();
    let row = keys
        .iter()
        .find(|row| row["name"] == "created at login")
        .expect("listed");
    let path = format!("/api-keys/{}", text(row, "id"));
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    platform.call_as(Some(&first), "GET", "/sandboxes", "").await.error(401);
    let second = key().await;
    assert_ne!(second, first);
    assert_eq!(key().await, second);
}

#[tokio::test]
async fn last_use_is_recorded_at_most_once_a_minute() {
    let platform = TestPlatform::start().await;
    let noted = async || {
        let rows = platform.store.api_key_list(&team(1)).await.expect("a database");
        rows[0].last_used_us
    };
    let until = async |time: i64| {
        super::platform::within(async { while noted().await != Some(time) {} }).await;
    };
    let first = platform.clock.now_us();
    platform.call("GET", "/sandboxes", "").await;
    until(first).await;
    platform.clock.advance(59);
    platform.call("GET", "/sandboxes", "").await;
    platform.clock.advance(1);
    platform.call("GET", "/sandboxes", "").await;
    until(first + 60_000_000).await;
}
