//! Attacks by clients without credentials, and credentials that sandboxes must not receive.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::platform::{KEY, OTHER_KEY, TestPlatform, within};

/// A key in the platform's format that is unknown to it.
const FOREIGN_KEY: &str = "e2b_00000000000000000000000000000000000000ff";

/// A server in every sandbox that responds with the request head.
async fn mirror() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 128 * 1024];
                let got = tcp.read(&mut buffer).await.unwrap_or(0);
                let head = &buffer[..got];
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {got}\r\n\r\n");
                let _ = tcp.write_all(answer.as_bytes()).await;
                let _ = tcp.write_all(head).await;
            });
        }
    });
    addr
}

#[tokio::test]
async fn only_platform_credentials_are_stripped() {
    let platform = TestPlatform::start().await;
    *platform.node.origin.lock() = Some(mirror().await);
    let private = r#"{"templateID":"base","secure":true,"network":{"allowPublicTraffic":false}}"#;
    let created = platform.call("POST", "/v2/sandboxes", private).await;
    let text = |name: &str| created.json[name].as_str().expect("a text").to_owned();
    let (id, traffic, access) = (text("sandboxID"), text("trafficAccessToken"), text("envdAccessToken"));
    let made = platform.call("POST", "/access-tokens", r#"{"name":"a"}"#).await;
    let token = made.json["token"].as_str().expect("a token").to_owned();

    let bearer = |secret: &str| format!("Bearer {secret}");
    for port in [3000, 49983] {
        let is_agent = port == 49983;
        for (name, value, kept) in [
            ("x-api-key", KEY.to_owned(), false),
            ("x-api-key", OTHER_KEY.to_owned(), false),
            ("x-api-key", token.clone(), false),
            ("authorization", bearer(KEY), false),
            ("authorization", bearer(&token), false),
            ("authorization", format!("bearer  {KEY}"), false),
            ("x-access-token", access.clone(), is_agent),
            ("x-api-key", FOREIGN_KEY.to_owned(), true),
            ("x-api-key", "an application's own".to_owned(), true),
            ("x-api-key", format!("{KEY}00"), true),
            ("authorization", bearer(FOREIGN_KEY), true),
            ("authorization", "Basic dXNlcjo=".to_owned(), true),
            ("x-access-token", "an application's own".to_owned(), true),
            ("cookie", format!("key={KEY}"), true),
        ] {
            // The second time, the result is cached.
            for _ in 0..2 {
                let host = format!("{port}-{id}.x");
                let headers = [
                    ("host", host.as_str()),
                    ("e2b-traffic-access-token", traffic.as_str()),
                    (name, value.as_str()),
                ];
                let reply = platform.send("GET", "/", &headers, "").await;
                assert_eq!(reply.status, 200, "{reply:?}");
                assert_eq!(
                    reply.text.contains(&value),
                    kept,
                    "{port} {name}: {value}: {}",
                    reply.text
                );
                assert!(!reply.text.contains(&traffic), "{}", reply.text);
            }
        }
    }
    // Of several values, only the platform's is removed.
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let request = format!(
        "GET / HTTP/1.1\r\nHost: 3000-{id}.x\r\nConnection: close\r\nX-API-Key: one\r\nX-API-Key: {KEY}\r\n\
         X-API-Key: two\r\nE2b-Traffic-Access-Token: {traffic}\r\n\r\n"
    );
    tcp.write_all(request.as_bytes()).await.expect("written");
    let mut text = String::new();
    within(tcp.read_to_string(&mut text)).await.expect("a clean end");
    assert!(
        text.contains("X-API-Key: one") && text.contains("X-API-Key: two"),
        "{text}"
    );
    assert!(!text.contains(KEY), "{text}");
}

#[tokio::test]
async fn a_refused_upload_still_gets_its_response() {
    let platform = TestPlatform::start().await;
    let body = vec![b'x'; 32 << 20];
    for (path, status) in [("/sandboxes", "401"), ("/nothing", "404"), ("/health", "405")] {
        let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        // Like most clients, writes everything before reading.
        within(async {
            tcp.write_all(head.as_bytes()).await?;
            tcp.write_all(&body).await
        })
        .await
        .expect("sent to the end");
        let mut text = String::new();
        within(tcp.read_to_string(&mut text)).await.expect("a clean end");
        assert_eq!(text.get(9..12), Some(status), "{path}: {text}");
    }

    let tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let (mut client, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
        .await
        .expect("handshake");
    tokio::spawn(connection);
    for _ in 0..3 {
        for (path, status) in [("/sandboxes", 401), ("/nothing", 404), ("/health", 405)] {
            let request = Request::post(format!("http://localhost{path}"))
                .body(Full::new(Bytes::from(body.clone())))
                .expect("a request");
            let response = within(client.send_request(request)).await.expect("a response");
            assert_eq!(response.status(), status, "{path}");
            within(response.into_body().collect()).await.expect("a whole body");
        }
    }
}

/// A body that is sent in parts.
struct Parts(mpsc::Receiver<Bytes>);

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}

#[tokio::test]
async fn over_http_2_a_refusal_waits_for_the_upload_unless_that_stops() {
    let platform = TestPlatform::start().await;
    let tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let (mut client, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
        .await
        .expect("handshake");
    tokio::spawn(connection);
    let mut cases = vec![true, false];
    'cases: while let Some(ends) = cases.pop() {
        let (parts, body) = mpsc::channel(1);
        let request = Request::post("http://localhost/sandboxes")
            .body(Parts(body))
            .expect("a request");
        let answer = tokio::spawn(client.send_request(request));
        let (mut sent, mut slowest) = (Instant::now(), Duration::ZERO);
        for _ in 0..100 {
            let part = within(parts.send(Bytes::from(vec![0; 64 * 1024]))).await;
            slowest = slowest.max(sent.elapsed());
            sent = Instant::now();
            // An upload that stood still for half a second was not waited for.
            if slowest >= Duration::from_millis(300) {
                answer.abort();
                cases.push(ends);
                continue 'cases;
            }
            part.expect("sent");
            assert!(!answer.is_finished(), "the refusal came before the upload had ended");
        }
        let held = if ends { None } else { Some(parts) };
        let response = within(answer).await.expect("a task").expect("a response");
        assert_eq!(response.status(), 401);
        within(response.into_body().collect()).await.expect("a whole body");
        drop(held);
    }
}

#[tokio::test]
async fn idle_connections_do_not_block_new_clients() {
    const MOST: usize = 20;
    let platform = TestPlatform::start_adjusted(|settings| settings.connections.total = MOST).await;
    let mut held = Vec::new();
    for _ in 0..10 * MOST {
        if let Ok(tcp) = TcpStream::connect(platform.addr).await {
            held.push(tcp);
        }
        assert_eq!(platform.call("GET", "/health", "").await.status, 200);
    }
    // Evicted connections are closed, and the maximum number is left.
    let mut open = 0;
    for tcp in &mut held {
        let silent = tokio::time::timeout(Duration::from_millis(20), tcp.read_u8()).await;
        open += usize::from(silent.is_err());
    }
    assert!(open <= MOST, "{open} connections are open");
}

#[tokio::test]
async fn busy_connections_are_not_evicted() {
    let platform = TestPlatform::start_adjusted(|settings| settings.connections.total = 4).await;
    let origin = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    *platform.node.origin.lock() = Some(origin.local_addr().expect("address"));
    let id = platform.create("").await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut client = TcpStream::connect(platform.addr).await.expect("connect");
        let request = format!("GET / HTTP/1.1\r\nHost: 3000-{id}.x\r\n\r\n");
        client.write_all(request.as_bytes()).await.expect("written");
        let (server, _) = within(origin.accept()).await.expect("a connection");
        streams.push((client, server));
    }
    for _ in 0..20 {
        // The limit is reached, and no connection can be evicted.
        if let Ok(mut refused) = TcpStream::connect(platform.addr).await {
            let got = within(refused.read(&mut [0; 16])).await.unwrap_or(0);
            assert_eq!(got, 0);
        }
    }
    for (client, server) in &mut streams {
        server
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .await
            .expect("written");
        let mut answer = vec![0; 12];
        within(client.read_exact(&mut answer)).await.expect("an answer");
        assert_eq!(answer, b"HTTP/1.1 200");
    }
    assert_eq!(
        platform.call("GET", "/health", "").await.status,
        200,
        "one that is idle now"
    );
}

#[tokio::test]
async fn incomplete_heads_time_out() {
    let platform = TestPlatform::start().await;
    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    tcp.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .expect("written");
    let mut answer = Vec::new();
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        answer.push(within(tcp.read_u8()).await.expect("an answer"));
    }
    tcp.write_all(b"GET /health HTTP/1.1\r\nX: ").await.expect("written");
    tokio::time::pause();
    let begun = Instant::now();
    let mut rest = Vec::new();
    // The rest of the body, and then the end.
    let _ = tcp.read_to_end(&mut rest).await;
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(20), "{waited:?}");
    tokio::time::resume();
}

#[tokio::test]
async fn request_head_size_is_limited() {
    let platform = TestPlatform::start().await;
    *platform.node.origin.lock() = Some(mirror().await);
    let id = platform.create("").await;
    let host = format!("3000-{id}.x");
    let cookie = "x".repeat(60_000);
    let reply = platform
        .send("GET", "/", &[("host", &host), ("cookie", &cookie)], "")
        .await;
    assert!(reply.status == 200 && reply.text.contains(&cookie));

    let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\nCookie: {}", "x".repeat(200_000));
    let _ = tcp.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = within(tcp.read_to_end(&mut answer)).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 431 "),
        "{}",
        answer.escape_ascii()
    );
}

#[tokio::test]
async fn streams_per_sandbox_are_limited() {
    let platform = TestPlatform::start_adjusted(|settings| settings.connections.per_sandbox = 3).await;
    let origin = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    *platform.node.origin.lock() = Some(origin.local_addr().expect("address"));
    let (id, neighbour) = (platform.create("").await, platform.create("").await);
    let open = async |id: &str| {
        let mut client = TcpStream::connect(platform.addr).await.expect("connect");
        let request = format!("GET / HTTP/1.1\r\nHost: 3000-{id}.x\r\n\r\n");
        client.write_all(request.as_bytes()).await.expect("written");
        client
    };
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push((open(&id).await, within(origin.accept()).await.expect("a connection")));
    }
    let host = format!("3000-{id}.x");
    let reply = platform.send("GET", "/", &[("host", &host)], "").await;
    assert!(reply.error(429).contains("limit: 3"), "{reply:?}");
    assert_eq!(reply.json["connectionLimit"], 3);
    let other = (
        open(&neighbour).await,
        within(origin.accept()).await.expect("a connection"),
    );
    drop((streams, other));
    let mut place = None;
    within(async {
        while place.is_none() {
            let client = open(&id).await;
            let accepted = tokio::time::timeout(Duration::from_millis(200), origin.accept()).await;
            place = accepted.ok().map(|server| (client, server));
        }
    })
    .await;
}
