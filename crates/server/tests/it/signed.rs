//! Signed requests, with signatures made by a client of the test.

use std::io::Write as _;
use std::process::{Command, Stdio};

use server::seal::Sealer;
use server::settings::ServerSettings;
use store::keys::{AccessKeyRow, SealedSecret};

use super::platform::{KEY, OTHER_KEY, Reply, TestPlatform, team, user};

const ACCESS: &str = "rfa_test";
const SECRET: &str = "rfs_secret";

/// The signature of a text, made by another program.
fn signature(secret: &str, text: &str) -> String {
    const PROGRAM: &str = "import base64, hashlib, hmac, sys\n\
        digest = hmac.new(sys.argv[1].encode(), sys.stdin.buffer.read(), hashlib.sha1).digest()\n\
        print(base64.urlsafe_b64encode(digest).decode(), end='')";
    let mut python = Command::new("python3")
        .args(["-c", PROGRAM, secret])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let mut input = python.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("written");
    drop(input);
    let output = python.wait_with_output().expect("ended");
    String::from_utf8(output.stdout).expect("text")
}

async fn access_key(platform: &TestPlatform, revoked_us: Option<i64>) {
    let sealed = Sealer::new([8; 32]).seal(ACCESS, SECRET).expect("sealed");
    let row = AccessKeyRow {
        id: ACCESS.to_owned(),
        team_id: team(1),
        user_id: user(1),
        name: "key".to_owned(),
        secret_sealed: SealedSecret::new(sealed),
        created_us: 0,
        revoked_us,
    };
    platform.store.access_key_insert(&row).await.expect("a key");
}

/// A request as the Go client signs it; `extra` are more headers of the request.
async fn call(platform: &TestPlatform, method: &str, path: &str, body: &str, extra: &[(&str, &str)]) -> Reply {
    let kind = if body.is_empty() {
        "application/x-www-form-urlencoded"
    } else {
        "application/json"
    };
    let text = format!("{method} {path}\nHost: localhost\nContent-Type: {kind}\n\n{body}");
    let authorization = format!("Qiniu {ACCESS}:{}", signature(SECRET, &text));
    let mut headers = vec![("host", "localhost"), ("content-type", kind)];
    headers.push(("authorization", &authorization));
    headers.extend(extra);
    platform.send(method, path, &headers, body.to_owned()).await
}

const RULE: &str =
    r#"{"name":"one","injection":{"type":"http","base_url":"a.b","headers":{"X-Key":"a value to be shown"}}}"#;

#[tokio::test]
async fn signed_requests_act_for_the_owner_and_show_headers() {
    let platform = TestPlatform::start().await;
    access_key(&platform, None).await;
    // An API key beside it does not count.
    let created = call(&platform, "POST", "/injection-rules", RULE, &[("x-api-key", OTHER_KEY)]).await;
    assert_eq!(created.status, 201, "{created:?}");
    let id = created.json["ruleID"].as_str().expect("an id");
    let path = format!("/injection-rules/{id}");
    let shown = "a value to be shown";
    assert_eq!(created.json["injection"]["headers"]["X-Key"], shown);
    let read = call(&platform, "GET", &path, "", &[]).await;
    assert_eq!(read.json["injection"]["headers"]["X-Key"], shown);
    let put = call(&platform, "PUT", &path, r#"{"name":"two"}"#, &[]).await;
    assert_eq!(put.json["injection"]["headers"]["X-Key"], shown);
    // An API key sees less, and another user nothing.
    let masked = platform.call("GET", &path, "").await;
    assert_eq!(masked.json["injection"]["headers"]["X-Key"], "a va****");
    platform.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);

    let body = format!(r#"{{"templateID":"base","injections":[{{"type":"id","id":"{id}"}}]}}"#);
    let sandbox = call(&platform, "POST", "/sandboxes", &body, &[]).await;
    assert_eq!(sandbox.status, 201, "{sandbox:?}");
    assert_eq!(call(&platform, "DELETE", &path, "", &[]).await.status, 204);
}

#[tokio::test]
async fn other_signatures_are_refused() {
    let platform = TestPlatform::start().await;
    access_key(&platform, None).await;
    let wrong = format!("Qiniu {ACCESS}:{}", signature("another", "x"));
    let unknown = format!("Qiniu rfa_nobody:{}", signature(SECRET, "x"));
    let body = RULE.to_owned();
    for (authorization, fragment) in [
        (wrong.as_str(), "does not match"),
        (unknown.as_str(), "unknown access key"),
        ("Qiniu x", "malformed"),
        ("QBox x:y", "authorization header is malformed"),
    ] {
        let headers = [
            ("host", "localhost"),
            ("content-type", "application/json"),
            ("authorization", authorization),
        ];
        let reply = platform.send("POST", "/injection-rules", &headers, body.clone()).await;
        assert!(reply.error(401).contains(fragment), "{authorization}: {reply:?}");
    }
    // Nor does a valid API key help a wrong signature.
    let headers = [("host", "localhost"), ("authorization", &wrong), ("x-api-key", KEY)];
    platform.send("GET", "/injection-rules", &headers, "").await.error(401);
    // Elsewhere there are no signed requests.
    call(&platform, "GET", "/sandboxes", "", &[]).await.error(401);
    assert_eq!(
        call(&platform, "GET", "/v2/sandboxes", "", &[("x-api-key", KEY)])
            .await
            .status,
        200
    );
    platform.store.access_key_revoke(ACCESS, 1).await.expect("a database");
    call(&platform, "GET", "/injection-rules", "", &[]).await.error(401);
}

#[tokio::test]
async fn bodies_of_signed_requests_are_limited() {
    let platform = TestPlatform::start().await;
    access_key(&platform, None).await;
    let body = format!("{}{}", RULE, " ".repeat(1024 * 1024));
    call(&platform, "POST", "/injection-rules", &body, &[]).await.error(413);
}

#[tokio::test]
async fn a_signed_date_expires() {
    let platform = TestPlatform::start().await;
    access_key(&platform, None).await;
    for (age_s, status) in [
        (0, 200),
        (14 * 60, 200),
        (-14 * 60, 200),
        (16 * 60, 401),
        (-16 * 60, 401),
    ] {
        let date = jiff::Timestamp::from_microsecond(platform.clock.now_us() - age_s * 1_000_000).expect("a time");
        let date = date.strftime("%Y%m%dT%H%M%SZ").to_string();
        let text = format!("GET /injection-rules\nHost: localhost\nX-Qiniu-Date: {date}\n\n");
        let authorization = format!("Qiniu {ACCESS}:{}", signature(SECRET, &text));
        let headers = [
            ("host", "localhost"),
            ("authorization", &authorization),
            ("x-qiniu-date", &date),
        ];
        let reply = platform.send("GET", "/injection-rules", &headers, "").await;
        assert_eq!(reply.status, status, "{age_s}: {reply:?}");
    }
}

#[tokio::test]
async fn the_operator_can_require_signatures_and_dates() {
    let platform = TestPlatform::start_adjusted(|settings: &mut ServerSettings| {
        settings.signing.require_date = true;
        settings.signing.required_for_rules = true;
        settings.signing.schemes = vec!["Own".to_owned(), "Qiniu".to_owned()];
    })
    .await;
    access_key(&platform, None).await;
    assert!(
        platform
            .call("GET", "/injection-rules", "")
            .await
            .error(401)
            .contains("signed")
    );
    assert!(
        call(&platform, "GET", "/injection-rules", "", &[])
            .await
            .error(401)
            .contains("date")
    );
    let date = jiff::Timestamp::from_microsecond(platform.clock.now_us()).expect("a time");
    let date = date.strftime("%Y%m%dT%H%M%SZ").to_string();
    for scheme in ["Own", "Qiniu"] {
        let text = format!("GET /injection-rules\nHost: localhost\nX-{scheme}-Date: {date}\n\n");
        let authorization = format!("{scheme} {ACCESS}:{}", signature(SECRET, &text));
        let name = format!("x-{}-date", scheme.to_lowercase());
        let headers = [
            ("host", "localhost"),
            ("authorization", &authorization),
            (&name, date.as_str()),
        ];
        let reply = platform.send("GET", "/injection-rules", &headers, "").await;
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    // An API key is still enough to create a sandbox.
    platform.create("").await;
}
