//! Starting and stopping.

use std::sync::Arc;

use secrecy::SecretBox;
use server::clock::Clock;
use server::lease::NodeLease;
use server::seal::Sealer;
use server::server::{Server, StartError};
use server::settings::ServerSettings;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::platform::{Behaviour, FakeNode, KEY, TestPlatform, host, send, within};

fn settings() -> ServerSettings {
    ServerSettings::new(
        "sandbox.test".to_owned(),
        SecretBox::new(Box::new([7; 32])),
        Sealer::new([8; 32]),
    )
}

async fn lease(directory: &TempDir) -> NodeLease {
    let url = format!("sqlite:{}", directory.path().join("test.db").display());
    let store = store::Store::open(&url).await.expect("a database");
    NodeLease::take(&store, host(1), Clock::system())
        .await
        .expect("a lease")
}

#[tokio::test]
async fn requests_are_answered_503_until_reconciled() {
    let directory = TempDir::new().expect("a directory");
    let lease = lease(&directory).await;
    let node = FakeNode::new();
    *node.reconcile.lock() = Behaviour::Waits;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    let stop = CancellationToken::new();
    let starting = tokio::spawn(Server::start(
        listener,
        lease,
        super::reached(&node),
        settings(),
        stop.clone(),
    ));
    within(node.waiting.notified()).await;
    for (host, path) in [
        ("localhost", "/health"),
        ("localhost", "/sandboxes"),
        ("80-iabc.x", "/"),
    ] {
        let reply = send(addr, "GET", path, &[("host", host), ("x-api-key", KEY)], "".into()).await;
        reply.error(503);
        if host == "localhost" {
            assert_eq!(reply.header("retry-after"), "1", "{path}");
            assert_eq!(reply.header("x-request-id").len(), 32, "{path}");
        }
    }
    node.go.notify_one();
    let server = within(starting).await.expect("no panic").expect("a server");
    let reply = send(addr, "GET", "/health", &[("host", "localhost")], "".into()).await;
    assert_eq!(reply.status, 200);
    stop.cancel();
    within(server.drained()).await;
}

#[tokio::test]
async fn a_failed_start_stops_listening_and_keeps_the_callers_token() {
    let directory = TempDir::new().expect("a directory");
    let node = FakeNode::new();
    *node.reconcile.lock() = Behaviour::Fails;
    // Where nobody else listens, also afterwards.
    let listener = TcpListener::bind("127.0.0.2:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    let stop = CancellationToken::new();
    let start = Server::start(
        listener,
        lease(&directory).await,
        super::reached(&node),
        settings(),
        stop.clone(),
    );
    assert!(matches!(within(start).await, Err(StartError::Adopt(_))));
    assert!(!stop.is_cancelled());
    TcpStream::connect(addr).await.expect_err("not listening");

    // The lease of the node was released, too.
    *node.reconcile.lock() = Behaviour::Works;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let second = Server::start(
        listener,
        lease(&directory).await,
        super::reached(&node),
        settings(),
        stop.clone(),
    );
    let second = within(second).await.expect("a server");
    stop.cancel();
    within(second.drained()).await;
}

#[tokio::test]
async fn drain_finishes_requests_and_keeps_sandboxes() {
    let platform = TestPlatform::start().await;
    let old = platform.create("").await;
    *platform.node.start.lock() = Behaviour::Waits;
    let mut client = TcpStream::connect(platform.addr).await.expect("connect");
    let body = r#"{"templateID":"base"}"#;
    let request = format!(
        "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(request.as_bytes()).await.expect("written");
    within(platform.node.waiting.notified()).await;
    // An idle connection of a client's pool.
    let mut idle = TcpStream::connect(platform.addr).await.expect("connect");
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .expect("written");
    let mut buffer = vec![0; 4096];
    within(idle.read(&mut buffer)).await.expect("an answer");

    platform.stop.cancel();
    let node = Arc::clone(&platform.node);
    let addr = platform.addr;
    let drained = tokio::spawn(platform.server.drained());
    assert_eq!(within(idle.read(&mut buffer)).await.expect("a clean end"), 0);
    node.go.notify_one();
    let mut text = String::new();
    within(client.read_to_string(&mut text)).await.expect("an answer");
    assert!(text.starts_with("HTTP/1.1 201 "), "{text}");
    within(drained).await.expect("no panic");
    TcpStream::connect(addr).await.expect_err("not listening");
    let ids = node.ids();
    assert!(ids.contains(&old) && ids.len() == 2);
    assert_eq!(node.kills.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[tokio::test]
async fn drain_cuts_sandbox_streams() {
    let platform = TestPlatform::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    *platform.node.origin.lock() = Some(listener.local_addr().expect("address"));
    let id = platform.create("").await;
    let mut client = TcpStream::connect(platform.addr).await.expect("connect");
    client
        .write_all(format!("GET / HTTP/1.1\r\nHost: 80-{id}.x\r\n\r\n").as_bytes())
        .await
        .expect("written");
    let (mut guest, _) = within(listener.accept()).await.expect("a connection");
    let mut buffer = vec![0; 4096];
    within(guest.read(&mut buffer)).await.expect("a request");
    guest
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n")
        .await
        .expect("written");
    let mut text = String::new();
    while !text.contains("part") {
        let got = within(client.read(&mut buffer)).await.expect("read");
        text.push_str(&String::from_utf8_lossy(&buffer[..got]));
    }
    platform.stop.cancel();
    within(platform.server.drained()).await;
    let error = within(client.read(&mut buffer)).await.expect_err("not a clean end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(platform.node.ids(), [id].into());
}
