//! Sandbox traffic over the API's port.

use std::net::SocketAddr;
use std::sync::Arc;

use protocol::signature::Claim;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::platform::{Behaviour, KEY, Reply, TestPlatform, within};

/// A server in every sandbox that responds with the request line.
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
async fn requests_are_routed_by_host_and_by_header() {
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
    assert!(
        reply.error(404).contains("reserved for the E2B control plane"),
        "{reply:?}"
    );
}

#[tokio::test]
async fn api_requests_with_routing_headers_reach_the_api() {
    let platform = platform().await;
    let id = platform.create("").await;
    let send = async |method: &str, host: &str, path: &str, port: &str, key: &str| {
        let body = if method == "POST" { r#"{"timeout":60}"# } else { "" };
        let headers = [
            ("host", host),
            ("e2b-sandbox-id", id.as_str()),
            ("e2b-sandbox-port", port),
            ("x-api-key", key),
            ("content-type", "application/json"),
        ];
        platform.send(method, path, &headers, body).await
    };
    let connect = format!("/sandboxes/{id}/connect");
    // The connect request of Python SDKs 2.7 to 2.26, by address and by name.
    for host in [
        "127.0.0.1:3000",
        "localhost",
        "api.sandbox.test:3000",
        "api.sandbox.test",
    ] {
        let reply = send("POST", host, &connect, "49983", KEY).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.json["sandboxID"]),
            (200, &json!(id)),
            "{host}"
        );
    }
    // An unknown key in the platform's format is refused by the API, because only the API can check it.
    let unknown = "e2b_0000000000000000000000000000000000000009";
    send("POST", "localhost", &connect, "49983", unknown).await.error(401);
    // Everything else goes to the sandbox: another port, a path that is not an API route, a key of an application, a
    // route that needs no key.
    for (method, path, port, key) in [
        ("POST", connect.as_str(), "3000", KEY),
        ("GET", connect.as_str(), "49983", KEY),
        ("POST", "/process.Process/List", "49983", KEY),
        ("GET", "/sandboxes", "49983", "a key of some application"),
        ("GET", "/health", "49983", KEY),
        ("GET", "/sandboxes", "8000", KEY),
    ] {
        let reply = send(method, "localhost", path, port, key).await;
        assert_eq!(reply.text, format!("{method} {path} HTTP/1.1"), "{port} {key}");
    }
    // The API's own host name serves only the API.
    let api = async |method: &str, path: &str, port: &str| send(method, "api.sandbox.test:3000", path, port, KEY).await;
    assert!(
        api("POST", "/process.Process/List", "49983")
            .await
            .error(404)
            .contains("no operation")
    );
    assert_eq!(api("GET", "/health", "3000").await.text, "Health check successful");
    let list = api("GET", "/sandboxes", "3000").await;
    assert_eq!(list.json[0]["sandboxID"], id.as_str());
}

#[tokio::test]
async fn signed_links_are_routed_to_their_sandbox() {
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
        // Another method is another operation, and another path is not covered by the signature.
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
async fn a_private_sandbox_requires_its_traffic_token() {
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
    let refused = by_host(&platform, &host, "/").await;
    assert!(
        refused
            .error(403)
            .starts_with("Sandbox is secured with traffic access token."),
        "{refused:?}"
    );
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
async fn ending_a_sandbox_stops_traffic_and_cuts_streams() {
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
    assert_eq!(reply.error(502), "The sandbox was not found");
    platform.node.go.notify_one();
    assert_eq!(within(delete).await.expect("no panic"), 204);
    let error = within(stream.read(&mut buffer)).await.expect_err("not a clean end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_closed_port_is_not_reported_as_a_missing_sandbox() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let reply = by_host(&platform, &format!("8080-{id}.x"), "/").await;
    assert_eq!(reply.error(502), "The sandbox is running but port is not open");
    assert_eq!(reply.json["port"], 8080);
}
