//! Error responses from outside of handlers, and invalid bodies.

use bytes::Bytes;
use model::limits::BODY_MAX_BYTES;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::platform::{Behaviour, KEY, TestPlatform, within};

const JSON: (&str, &str) = ("content-type", "application/json");
const HOST: (&str, &str) = ("host", "localhost");
const AUTH: (&str, &str) = ("x-api-key", KEY);

#[tokio::test]
async fn unknown_paths_and_methods_have_json_errors() {
    let platform = TestPlatform::start().await;
    for path in [
        "/",
        "/v1/sandboxes",
        "/sandboxes/",
        "/sandboxes/ia/pause/x",
        "//sandboxes",
        "/files",
        "/%00",
    ] {
        platform.call("GET", path, "").await.error(404);
    }
    for (method, path, allow) in [
        ("PUT", "/sandboxes", "GET,HEAD,POST"),
        ("DELETE", "/v2/sandboxes", "GET,HEAD,POST"),
        ("PATCH", "/sandboxes/ia", "GET,HEAD,DELETE"),
        ("GET", "/sandboxes/ia/timeout", "POST"),
        ("DELETE", "/v2/sandboxes/ia/connect", "POST"),
        ("POST", "/health", "GET,HEAD"),
        ("BREW", "/health", "GET,HEAD"),
    ] {
        let reply = platform.call(method, path, "").await;
        reply.error(405);
        assert_eq!(reply.header("allow"), allow, "{method} {path}");
    }
}

#[tokio::test]
async fn body_parsing_follows_the_contract() {
    let platform = TestPlatform::start().await;
    let good = r#"{"templateID":"base"}"#;
    let post = async |headers: &[(&str, &str)], body: &str| {
        let headers = [&[HOST, AUTH], headers].concat();
        platform.send("POST", "/sandboxes", &headers, body.to_owned()).await
    };
    for content_type in [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON ;x=y",
    ] {
        assert_eq!(
            post(&[("content-type", content_type)], good).await.status,
            201,
            "{content_type}"
        );
    }
    for content_type in [
        "",
        "text/plain",
        "application/jsonx",
        "application/x-www-form-urlencoded",
    ] {
        let reply = post(&[("content-type", content_type)], good).await;
        assert!(reply.error(400).contains("Content-Type"), "{content_type}: {reply:?}");
    }
    assert!(post(&[], good).await.error(400).contains("Content-Type"));
    for bad in [
        "{",
        "{\"a\":}",
        "nul",
        "{} {}",
        "\"\\ud800\"",
        "{\"a\":1e999}",
        "\u{feff}{}",
    ] {
        let reply = post(&[JSON], bad).await;
        assert!(
            reply.error(400).contains("failed to decode request body"),
            "{bad}: {reply:?}"
        );
    }
    for bad in ["[]", "1", "null", "\"x\"", "true"] {
        assert!(post(&[JSON], bad).await.error(400).contains("object"), "{bad}");
    }
    let deep = "[".repeat(100_000);
    post(&[JSON], &deep).await.error(400);
    let reply = post(&[JSON], "").await;
    assert!(reply.error(400).contains("value is required but missing"), "{reply:?}");
    // A body of an operation without one is ignored.
    let reply = platform
        .send("GET", "/sandboxes", &[HOST, AUTH], "whatever".to_owned())
        .await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn body_size_is_limited_with_and_without_content_length() {
    let platform = TestPlatform::start().await;
    let body = |bytes: usize| {
        let frame = r#"{"templateID":"base","x":""}"#;
        let padding = "x".repeat(bytes - frame.len());
        Bytes::from(frame.replace("\"\"}", &format!("\"{padding}\"}}")))
    };
    let at_limit = platform
        .send("POST", "/sandboxes", &[HOST, AUTH, JSON], body(BODY_MAX_BYTES))
        .await;
    assert_eq!(at_limit.status, 201);
    let over = body(BODY_MAX_BYTES + 1);
    assert_eq!(over.len(), BODY_MAX_BYTES + 1);
    platform
        .send("POST", "/sandboxes", &[HOST, AUTH, JSON], over)
        .await
        .error(413);

    // Chunked, so that the size is not known in advance; written completely before the response is read, as most
    // clients do.
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let head = format!(
        "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n\
         Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    );
    tcp.write_all(head.as_bytes()).await.expect("written");
    let chunk = format!("100000\r\n{}\r\n", " ".repeat(0x10_0000));
    for _ in 0..17 {
        within(tcp.write_all(chunk.as_bytes())).await.expect("written");
    }
    tcp.write_all(b"0\r\n\r\n").await.expect("written");
    let mut text = String::new();
    within(tcp.read_to_string(&mut text)).await.expect("a clean end");
    assert!(text.starts_with("HTTP/1.1 413 "), "{text}");

    // A client with `Expect` is refused before it sends the body.
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let head = head.replace(
        "Transfer-Encoding: chunked",
        &format!("Expect: 100-continue\r\nContent-Length: {}", BODY_MAX_BYTES + 1),
    );
    tcp.write_all(head.as_bytes()).await.expect("written");
    let mut text = String::new();
    within(tcp.read_to_string(&mut text)).await.expect("a clean end");
    assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
}

#[tokio::test]
async fn health_needs_no_key() {
    let platform = TestPlatform::start().await;
    for method in ["GET", "HEAD"] {
        assert_eq!(platform.call_as(None, method, "/health", "").await.status, 200);
    }
}

#[tokio::test]
async fn cors_headers_allow_browsers() {
    let platform = TestPlatform::start().await;
    let preflight = platform
        .send(
            "OPTIONS",
            "/sandboxes",
            &[
                HOST,
                ("origin", "https://example.com"),
                ("access-control-request-method", "POST"),
                ("access-control-request-headers", "x-api-key,e2b-sandbox-id"),
            ],
            "",
        )
        .await;
    assert_eq!(preflight.status, 200);
    assert_eq!(preflight.header("access-control-allow-origin"), "*");
    let allowed = preflight.header("access-control-allow-headers");
    assert!(
        allowed.contains("x-api-key") && allowed.contains("e2b-sandbox-id"),
        "{allowed}"
    );
    let reply = platform
        .send(
            "GET",
            "/sandboxes",
            &[HOST, AUTH, ("origin", "https://example.com")],
            "",
        )
        .await;
    assert!(reply.header("access-control-expose-headers").contains("x-next-token"));
}

#[tokio::test]
async fn malformed_requests_have_json_errors() {
    let platform = TestPlatform::start().await;
    let headers: String = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect();
    for (sent, status) in [
        ("GARBAGE\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), 400),
        ("GET /health HTTP/1.1\r\nhost\r\n\r\n".to_owned(), 400),
        (
            "POST /sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n".to_owned(),
            400,
        ),
        (format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70_000)), 414),
        (format!("GET / HTTP/1.1\r\n{headers}\r\n"), 431),
    ] {
        // On a new connection, and after a successful request.
        for first in ["", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
            let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
            tcp.write_all(first.as_bytes()).await.expect("written");
            if !first.is_empty() {
                let mut answer = Vec::new();
                while !answer.ends_with(b"\r\n\r\nHealth check successful") {
                    answer.push(within(tcp.read_u8()).await.expect("an answer"));
                }
            }
            tcp.write_all(sent.as_bytes()).await.expect("written");
            let mut text = String::new();
            within(tcp.read_to_string(&mut text)).await.expect("a clean end");
            let (head, body) = text.split_once("\r\n\r\n").expect("a head");
            let start: String = sent.chars().take(40).collect();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{start}: {text}");
            assert!(
                head.contains(&format!("content-length: {}", body.len())),
                "{start}: {text}"
            );
            assert!(head.contains("content-type: application/json"), "{start}: {text}");
            let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
            assert_eq!(body["code"], status, "{start}");
            assert!(body["message"].is_string(), "{start}");
        }
    }
}

#[tokio::test]
async fn a_request_that_times_out_is_not_retried() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    *platform.node.kill.lock() = Behaviour::Waits;
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let request =
        format!("DELETE /sandboxes/{id} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\nconnection: close\r\n\r\n");
    tcp.write_all(request.as_bytes()).await.expect("written");
    within(platform.node.waiting.notified()).await;
    tokio::time::pause();
    tokio::time::advance(std::time::Duration::from_secs(71)).await;
    tokio::time::resume();
    let mut answer = String::new();
    within(tcp.read_to_string(&mut answer)).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
    assert!(
        answer.contains("should-retry: false") && answer.contains("in time"),
        "{answer}"
    );
    // The work that was begun continues.
    platform.node.go.notify_one();
    platform.until_gone(&id).await;
}
