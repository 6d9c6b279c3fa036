//! Sandbox traffic over the API's port.

use std::net::SocketAddr;
use std::sync::Arc;

use protocol::signature::Claim;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::platform::{Behaviour, Reply, TestPlatform, within};

/// A server in every sandbox that answers with the request's first line.
async fn origin() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 8192];
                let got = tcp.read(&mut buffer).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&buffer[..got]).into_owned();
                let line = head.lines().next().unwrap_or_default();
                if line.contains("/stream") {
                    let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\npart").await;
                    let _ = tcp.read(&mut buffer).await;
                    return;
                }
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{line}", line.len());
                let _ = tcp.write_all(answer.as_bytes()).await;
            });
        }
    });
    addr
}

async fn platform() -> TestPlatform {
    let platform = TestPlatform::start().await;
    *platform.node.origin.lock() = Some(origin().await);
    platform
}

async fn by_host(platform: &TestPlatform, host: &str, path: &str) -> Reply {
    platform.send("GET", path, &[("host", host)], "").await
}

#[tokio::test]
async fn requests_find_their_sandbox_by_host_and_by_header() {
    let platform = platform().await;
    let id = platform.create("").await;
    for host in [
        format!("3000-{id}.sandbox.test:3000"),
        format!("3000-{id}-6532622b.localhost"),
    ] {
        let reply = by_host(&platform, &host, "/sandboxes?x").await;
        assert_eq!(reply.text, "GET /sandboxes?x HTTP/1.1", "{host}");
    }
    let headers = [
        ("host", "localhost"),
        ("e2b-sandbox-id", id.as_str()),
        ("e2b-sandbox-port", "49983"),
    ];
    let reply = platform.send("GET", "/health", &headers, "").await;
    assert_eq!(reply.text, "GET /health HTTP/1.1");
    for half in [&headers[..2], &[headers[0], headers[2]]] {
        platform.send("GET", "/health", half, "").await.error(400);
    }
    platform
        .send("GET", "/health", &[("host", "0-iabc.x")], "")
        .await
        .error(400);
    by_host(&platform, "3000-inobody.x", "/").await.error(502);
    let reply = by_host(&platform, &format!("49983-{id}.x"), "/init").await;
    reply.error(404);
}

#[tokio::test]
async fn a_signed_link_finds_its_sandbox() {
    let platform = platform().await;
    let (first, second) = (platform.create("").await, platform.create("").await);
    for id in [&first, &second] {
        let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
        let token = detail.json["envdAccessToken"].as_str().expect("a token").to_owned();
        let claim = Claim {
            path: "/a b",
            operation: "read",
            username: "user",
            expiration: Some(4_000_000_000),
        };
        let signature = claim.sign(&token).replace('+', "%2B").replace('/', "%2F");
        let path = format!("/files?path=%2Fa+b&username=user&signature_expiration=4000000000&signature={signature}");
        let reply = by_host(&platform, "localhost", &path).await;
        assert_eq!(reply.text, format!("GET {path} HTTP/1.1"));
        // Another method is another operation, and another path another claim.
        platform
            .send("POST", &path, &[("host", "localhost")], "x")
            .await
            .error(401);
        by_host(&platform, "localhost", &path.replace("a+b", "b"))
            .await
            .error(401);
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
        by_host(&platform, "localhost", &path).await.error(401);
    }
}

#[tokio::test]
async fn a_private_sandbox_asks_for_the_token_that_create_returned() {
    let platform = platform().await;
    let reply = platform
        .call(
            "POST",
            "/v2/sandboxes",
            r#"{"templateID":"base","network":{"allowPublicTraffic":false}}"#,
        )
        .await;
    let id = reply.json["sandboxID"].as_str().expect("an id").to_owned();
    let token = reply.json["trafficAccessToken"].as_str().expect("a token").to_owned();
    assert_ne!(reply.json["envdAccessToken"], token.as_str());
    let host = format!("3000-{id}.x");
    by_host(&platform, &host, "/").await.error(403);
    let with = async |token: &str| {
        let headers = [("host", host.as_str()), ("e2b-traffic-access-token", token)];
        platform.send("GET", "/", &headers, "").await
    };
    with("wrong").await.error(403);
    assert_eq!(with(&token).await.status, 200);
    assert_eq!(by_host(&platform, &format!("49983-{id}.x"), "/").await.status, 200);
    let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(detail.json["network"]["allowPublicTraffic"], false);
    let connected = platform.call("POST", &format!("/v2/sandboxes/{id}/connect"), "").await;
    assert_eq!(connected.json["trafficAccessToken"], token.as_str());
}

#[tokio::test]
async fn a_sandbox_that_ends_answers_nobody_and_its_streams_are_cut() {
    let platform = Arc::new(platform().await);
    let id = platform.create("").await;
    let host = format!("3000-{id}.x");
    let mut stream = TcpStream::connect(platform.addr).await.expect("connect");
    stream
        .write_all(format!("GET /stream HTTP/1.0\r\nHost: {host}\r\n\r\n").as_bytes())
        .await
        .expect("written");
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.ends_with("part") {
        let got = within(stream.read(&mut buffer)).await.expect("read");
        assert_ne!(got, 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..got]));
    }

    *platform.node.kill.lock() = Behaviour::Waits;
    let delete = {
        let (platform, path) = (Arc::clone(&platform), format!("/sandboxes/{id}"));
        tokio::spawn(async move { platform.call("DELETE", &path, "").await.status })
    };
    within(platform.node.waiting.notified()).await;
    let reply = by_host(&platform, &host, "/").await;
    assert!(reply.error(502).contains("was not found"), "{reply:?}");
    platform.node.go.notify_one();
    assert_eq!(within(delete).await.expect("no panic"), 204);
    let error = within(stream.read(&mut buffer)).await.expect_err("not a clean end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_closed_port_is_no_gone_sandbox() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let reply = by_host(&platform, &format!("8080-{id}.x"), "/").await;
    assert!(reply.error(502).contains("port is not open"), "{reply:?}");
    assert_eq!(reply.json["port"], 8080);
}
