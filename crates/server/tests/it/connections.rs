//! Connections: protocols, malformed input, silence.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::platform::{KEY, TestPlatform, within};

#[tokio::test]
async fn http2_works_with_prior_knowledge() {
    let platform = TestPlatform::start().await;
    let tcp = TcpStream::connect(platform.addr).await.expect("connect");
    let (mut client, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
        .await
        .expect("handshake");
    tokio::spawn(connection);
    for status in [201, 201] {
        let request = Request::post("http://localhost/v2/sandboxes")
            .header("x-api-key", KEY)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(b"{\"templateID\":\"base\"}")))
            .expect("a request");
        let response = within(client.send_request(request)).await.expect("a response");
        assert_eq!(response.status(), status);
        within(response.into_body().collect()).await.expect("a body");
    }
    assert_eq!(platform.node.ids().len(), 2);
}

#[tokio::test]
async fn malformed_input_does_not_affect_other_clients() {
    let platform = TestPlatform::start().await;
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1_000_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000));
    for garbage in [
        "\0\0\0\0",
        "\x16\x03\x01\x02\x00\x01\x00\x01",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nwhat follows is no frame at all, and long enough to be one",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET http://[::1/ HTTP/1.1\r\n\r\n",
        "POST /sandboxes HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        &long,
        &many,
    ] {
        let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
        // The server may read it, answer it or close the connection.
        let _ = tcp.write_all(garbage.as_bytes()).await;
        let _ = tcp.shutdown().await;
        let mut answer = Vec::new();
        let _ = within(tcp.read_to_end(&mut answer)).await;
        assert_eq!(platform.call("GET", "/health", "").await.status, 200, "{garbage:.60}");
    }
}

#[tokio::test]
async fn silent_connections_are_closed() {
    let platform = TestPlatform::start().await;
    for greeting in ["", "GET / HT", "PRI * HTTP/2.0\r\n"] {
        let begun = Instant::now();
        let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
        tcp.write_all(greeting.as_bytes()).await.expect("written");
        tokio::time::pause();
        let mut buffer = [0; 64];
        let got = tcp.read(&mut buffer).await.unwrap_or(0);
        assert_eq!(got, 0, "{greeting}");
        let waited = begun.elapsed();
        assert!(
            (Duration::from_secs(9)..Duration::from_secs(20)).contains(&waited),
            "{greeting}: {waited:?}"
        );
        tokio::time::resume();
    }
}
