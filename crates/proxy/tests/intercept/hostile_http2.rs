//! Programs that want the secret to go elsewhere, or the gateway to do too much, over HTTP/2. Frames are written by hand,
//! because clients do not send most of these.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use model::injection::PathPattern;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::support::{HOST, OTHER, SECRET, World, before_silence, rule, text};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Headers as literals, never indexed (RFC 7541 section 6.2.2).
fn block(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in headers {
        block.push(0);
        for text in [name, value] {
            assert!(text.len() < 127);
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

async fn open(world: &World) -> TlsStream<TcpStream> {
    let mut stream = world.tls(HOST, &["h2"]).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    stream
}

/// The frames that come back, until the end or a second of silence: kind, stream and payload.
async fn frames(stream: &mut TlsStream<TcpStream>) -> (Vec<(u8, u32, Vec<u8>)>, bool) {
    let mut found = Vec::new();
    loop {
        let mut head = [0; 9];
        match before_silence(stream.read_exact(&mut head)).await {
            None => return (found, false),
            Some(Err(_)) => return (found, true),
            Some(Ok(_)) => {}
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        let mut payload = vec![0; length as usize];
        if stream.read_exact(&mut payload).await.is_err() {
            return (found, true);
        }
        found.push((head[3], id, payload));
    }
}

/// Sends the headers of one request and returns what the server got.
async fn attack(headers: &[(&str, &str)]) -> (World, String, Vec<(u8, u32, Vec<u8>)>) {
    let world = World::new().await;
    let server = world.echo().await;
    let other = world.record(OTHER, "HTTP/1.1 200 OK\r\n\r\n").await;
    let mut stream = open(&world).await;
    let authority = world.authority();
    let headers: Vec<(&str, String)> = headers
        .iter()
        .map(|(name, value)| (*name, value.replace('@', &authority)))
        .collect();
    let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    stream
        .write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 1, &block(&headers)))
        .await
        .unwrap();
    let (found, _) = frames(&mut stream).await;
    assert_eq!(*other.connections.lock(), 0);
    (world, server.text(), found)
}

#[tokio::test]
async fn requests_that_are_not_for_the_host_are_not_forwarded() {
    let base = [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "@"),
        (":path", "/"),
    ];
    let with = |at: usize, value: &'static str| {
        let mut headers = base.to_vec();
        headers[at].1 = value;
        headers
    };
    let and = |name: &'static str, value: &'static str| [&base[..], &[(name, value)]].concat();
    let cases = [
        with(2, "other.example"),
        with(2, "api.example"),
        with(2, "api.example:1"),
        with(2, "user%40@"),
        with(2, "other.example%2f@"),
        with(1, "http"),
        with(0, "CONNECT"),
        with(3, "*"),
        with(3, "v1"),
        with(3, ""),
        and("host", "other.example"),
        and(":authority", "other.example"),
        and(":path", "/other"),
        and(":protocol", "websocket"),
        and("Upper", "x"),
        and("connection", "close"),
        and("transfer-encoding", "chunked"),
        and("te", "gzip"),
        and("content-length", "5"),
        and("x", "a\r\nb: c"),
        and("x\r\nb", "a"),
        and("x", "a\0b"),
        vec![(":method", "CONNECT"), (":authority", "other.example:443")],
        vec![(":method", "GET"), (":scheme", "https"), (":path", "/")],
        vec![
            ("x", "y"),
            (":method", "GET"),
            (":scheme", "https"),
            (":authority", "@"),
            (":path", "/"),
        ],
    ];
    for headers in cases {
        let (world, seen, _) = attack(&headers).await;
        assert_eq!(world.gateway.counters().injected, 0, "{headers:?}: {seen}");
        assert!(!seen.contains(SECRET), "{headers:?}: {seen}");
    }
    let (_, seen, _) = attack(&base).await;
    assert!(seen.contains(SECRET), "the frames are right otherwise: {seen}");
}

#[tokio::test]
async fn a_second_host_on_a_connection_gets_nothing() {
    let world = World::new().await;
    let server = world.echo().await;
    let other = world.record(OTHER, "HTTP/1.1 200 OK\r\n\r\n").await;
    let mut client = world.http2().await;
    for (authority, status) in [
        (world.authority(), 200),
        (format!("{OTHER}:{}", world.port), 421),
        (world.authority(), 200),
    ] {
        let request = Request::get(format!("https://{authority}/"))
            .body(Full::<Bytes>::default())
            .unwrap();
        let response = client.send_request(request).await.unwrap();
        assert_eq!(response.status(), status, "{authority}");
        text(response).await;
    }
    assert_eq!(*other.connections.lock(), 0);
    assert!(!server.text().contains(OTHER));
    assert_eq!(world.gateway.counters().requests_refused, 1);
}

#[tokio::test]
async fn trailers_do_not_become_headers_of_the_rule() {
    let world = World::new().await;
    let server = world.echo().await;
    let mut stream = open(&world).await;
    let authority = world.authority();
    let head = block(&[
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", &authority),
        (":path", "/"),
    ]);
    stream.write_all(&frame(HEADERS, END_HEADERS, 1, &head)).await.unwrap();
    stream.write_all(&frame(DATA, 0, 1, b"x")).await.unwrap();
    let trailers = block(&[("authorization", "mine"), ("x-sum", "1")]);
    stream
        .write_all(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &trailers))
        .await
        .unwrap();
    let (found, _) = frames(&mut stream).await;
    let body: Vec<u8> = found
        .into_iter()
        .filter(|(kind, ..)| *kind == DATA)
        .flat_map(|(.., payload)| payload)
        .collect();
    let body = String::from_utf8_lossy(&body).into_owned();
    assert!(body.contains("x-sum") && !body.contains("mine"), "{body}");
    assert!(server.has_secret());
}

/// Attacks on what the gateway does for frames. All end with the connection, and the next one is served.
#[tokio::test]
async fn floods_end_the_connection() {
    let authority = |world: &World| world.authority();
    let world = World::new().await;
    world.echo().await;
    let whole = block(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", &authority(&world)),
        (":path", "/"),
    ]);
    let long = block(&[("x-a", &"a".repeat(100))]).repeat(1000);
    let resets: Vec<u8> = (0..2000u32)
        .flat_map(|at| {
            let id = at * 2 + 1;
            let open = frame(HEADERS, END_HEADERS | END_STREAM, id, &whole);
            [open, frame(RST_STREAM, 0, id, &8u32.to_be_bytes())].concat()
        })
        .collect();
    let mut continuations = frame(HEADERS, END_STREAM, 1, &whole);
    for _ in 0..2000 {
        continuations.extend(frame(CONTINUATION, 0, 1, &long[..10_000]));
    }
    let empty: Vec<u8> = [
        frame(HEADERS, END_STREAM, 1, &whole),
        frame(CONTINUATION, 0, 1, &[]).repeat(100_000),
    ]
    .concat();
    for (name, attack, ends) in [
        ("resets", resets, true),
        ("continuations", continuations, true),
        ("empty continuations", empty, true),
        (
            "headers that are too long",
            frame(HEADERS, END_HEADERS | END_STREAM, 1, &long[..16_384]).repeat(1),
            false,
        ),
        ("data on no stream", frame(DATA, 0, 1, b"x"), true),
        (
            "a stream of the server",
            frame(HEADERS, END_HEADERS | END_STREAM, 2, &whole),
            true,
        ),
        ("a frame that is too long", frame(DATA, 0, 1, &[0; 20_000]), true),
        ("no HTTP/2", b"GET / HTTP/1.1\r\n\r\n".to_vec(), true),
        (
            "a bad index",
            frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0xff, 0xff, 0xff, 0x7f]),
            true,
        ),
    ] {
        let mut stream = open(&world).await;
        // The gateway may close while it is written to.
        let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(&attack)).await;
        let (found, ended) = frames(&mut stream).await;
        let goes = found.iter().any(|(kind, ..)| *kind == GOAWAY);
        assert!(!ends || ended || goes, "{name}: {:?}", found.len());
        let request = Request::get(format!("https://{}/", world.authority()))
            .body(Full::default())
            .unwrap();
        assert_eq!(
            world.http2().await.send_request(request).await.unwrap().status(),
            200,
            "{name}"
        );
    }
}

/// A program that never reads what it asks for is not answered for ever.
#[tokio::test]
async fn answers_that_are_not_read_are_bounded() {
    let world = World::new().await;
    world.echo().await;
    let mut stream = open(&world).await;
    for (name, attack) in [
        ("pings", frame(PING, 0, 0, &[1; 8])),
        ("settings", frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100])),
    ] {
        let burst = attack.repeat(1000);
        let mut written = 0;
        let write = async {
            while stream.write_all(&burst).await.is_ok() {
                written += burst.len();
            }
        };
        // It waits, or it ends the connection.
        let _ = tokio::time::timeout(Duration::from_secs(2), write).await;
        assert!(written < 64 << 20, "{name}: {written}");
    }
}

#[tokio::test]
async fn streams_at_a_time_are_limited() {
    let world = World::with(vec![rule(PathPattern::Any)], |_, _| {}).await;
    world.echo().await;
    let mut stream = open(&world).await;
    let authority = world.authority();
    let head = block(&[
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", &authority),
        (":path", "/"),
    ]);
    for at in 0..300u32 {
        if stream
            .write_all(&frame(HEADERS, END_HEADERS, at * 2 + 1, &head))
            .await
            .is_err()
        {
            break;
        }
    }
    let (found, ended) = frames(&mut stream).await;
    let refused = found
        .iter()
        .filter(|(kind, ..)| *kind == RST_STREAM || *kind == GOAWAY)
        .count();
    assert!(ended || refused > 0);
    assert!(
        world.gateway.counters().injected <= 110,
        "{:?}",
        world.gateway.counters()
    );
}
