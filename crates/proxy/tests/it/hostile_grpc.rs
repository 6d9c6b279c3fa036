//! Servers inside that answer calls of gRPC with what no server sends. Frames are written by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use crate::support::{
    ChannelBody, Front, Wire, exchange, front, get, h2_client, h2_request, http_origin, origin, within,
};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// `:status: 200` as an index (RFC 7541 appendix A).
const OK: u8 = 0x88;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header as a literal that is never indexed.
fn literal(name: &str, value: &str) -> Vec<u8> {
    let length = |text: &str| u8::try_from(text.len()).expect("short");
    assert!(length(name) < 127 && length(value) < 127);
    [
        &[0x10, length(name)],
        name.as_bytes(),
        &[length(value)],
        value.as_bytes(),
    ]
    .concat()
}

fn head() -> Vec<u8> {
    frame(HEADERS, END_HEADERS, 1, &[OK])
}

/// A server that writes `first` as soon as a call has begun, and then `then` without end. The number is that of its open
/// connections.
async fn server(first: Vec<u8>, then: Vec<u8>) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let open = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&open);
    let addr = origin(move |mut wire: Wire| {
        let (first, then, count) = (first.clone(), then.clone(), Arc::clone(&count));
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            let (mut read, mut write) = wire.tcp.split();
            // Its settings, and the head of the call comes with or after the preface.
            let mut buffer = [0; 4096];
            let mut seen = Vec::new();
            while seen.len() < 24 || !seen[24..].windows(2).any(|at| at == [0, HEADERS]) {
                match read.read(&mut buffer).await {
                    Ok(0) | Err(_) => break,
                    Ok(got) => seen.extend_from_slice(&buffer[..got]),
                }
            }
            let discard = async { while !matches!(read.read(&mut buffer).await, Ok(0) | Err(_)) {} };
            let attack = async {
                write.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
                write.write_all(&first).await?;
                while !then.is_empty() {
                    write.write_all(&then).await?;
                }
                std::future::pending::<std::io::Result<()>>().await
            };
            tokio::select! {
                () = discard => {}
                _ = attack => {}
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    (addr, open)
}

async fn with_neighbour(server: std::net::SocketAddr) -> Front {
    let neighbour =
        http_origin(|_: Request<Incoming>| async { Response::new(Bytes::from_static(b"fine").into()) }).await;
    front([(3000, server), (3001, neighbour)]).await
}

/// A call whose body stays open.
async fn call(front: &Front) -> (mpsc::Sender<Frame<Bytes>>, hyper::Result<Response<Incoming>>) {
    let (parts, sent) = ChannelBody::new();
    let mut request = h2_request(Method::POST, sent);
    let kind = HeaderValue::from_static("application/grpc");
    request.headers_mut().insert("content-type", kind);
    let response = within(h2_client(front).await.send_request(request)).await;
    (parts, response)
}

async fn none_open(open: &AtomicUsize) {
    within(async {
        while open.load(Ordering::SeqCst) > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn what_is_no_response_is_a_bad_gateway() {
    let oversized: Vec<u8> = (0..1000).flat_map(|_| literal("name", &"v".repeat(120))).collect();
    let mut long = vec![frame(HEADERS, 0, 1, &[OK])];
    long.extend(oversized.chunks(16_000).map(|part| frame(CONTINUATION, 0, 1, part)));
    long.push(frame(CONTINUATION, END_HEADERS, 1, &[]));
    // One entry of the dynamic table, named a thousand times: 120 kB in one.
    let mut repeated = [&[OK, 0x40, 1, b'x', 120][..], &[b'v'; 120]].concat();
    repeated.extend([0xbe; 1000]);
    let window = |size: u32| size.to_be_bytes();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing but an end of the call", frame(RST_STREAM, 0, 1, &[0, 0, 0, 2])),
        ("an end of the connection", frame(GOAWAY, 0, 0, &[0; 8])),
        ("data before the head", frame(DATA, 0, 1, b"x")),
        ("a head of no stream", frame(HEADERS, END_HEADERS, 0, &[OK])),
        (
            "a head of a stream that is not open",
            frame(HEADERS, END_HEADERS, 7, &[OK]),
        ),
        ("a continuation of nothing", frame(CONTINUATION, END_HEADERS, 1, &[OK])),
        (
            "another frame inside a head",
            [frame(HEADERS, 0, 1, &[OK]), frame(PING, 0, 0, &[0; 8])].concat(),
        ),
        (
            "a head without a status",
            frame(HEADERS, END_HEADERS, 1, &literal("a", "b")),
        ),
        (
            "a head with a request",
            frame(HEADERS, END_HEADERS, 1, &literal(":path", "/")),
        ),
        (
            "an index of nothing",
            frame(HEADERS, END_HEADERS, 1, &[OK, 0xff, 0xff, 0xff, 0x7f]),
        ),
        ("a head that is too large", long.concat()),
        (
            "a small head that becomes large",
            frame(HEADERS, END_HEADERS, 1, &repeated),
        ),
        ("a promise", frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2, OK])),
        ("settings that are invalid", frame(SETTINGS, 0, 0, &[0, 5, 0, 0, 0, 1])),
        ("settings of a stream", frame(SETTINGS, 0, 1, &[])),
        (
            "a window that overflows",
            frame(WINDOW_UPDATE, 0, 0, &window(0x7fff_ffff)),
        ),
        ("a window of nothing", frame(WINDOW_UPDATE, 0, 0, &window(0))),
        ("a frame that is too long", frame(DATA, 0, 1, &[0; 16_385])),
    ];
    for (name, first) in cases {
        let (addr, open) = server(first, Vec::new()).await;
        let front = with_neighbour(addr).await;
        let (_parts, response) = call(&front).await;
        assert_eq!(response.expect("an answer").status(), 502, "{name}");
        none_open(&open).await;
    }
}

#[tokio::test]
async fn a_response_that_breaks_the_rules_is_reset() {
    let windows = frame(DATA, 0, 1, &[0; 16_384]).repeat(9);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("more than the window", windows),
        ("frames of nothing", frame(DATA, 0, 1, &[]).repeat(1000)),
        ("a second head", head()),
        (
            "trailers that do not end",
            frame(HEADERS, END_HEADERS, 1, &literal("a", "b")),
        ),
        ("an abort", frame(RST_STREAM, 0, 1, &[0, 0, 0, 2])),
    ];
    for (name, then) in cases {
        let (addr, open) = server([head(), then].concat(), Vec::new()).await;
        let front = with_neighbour(addr).await;
        let (_parts, response) = call(&front).await;
        // What breaks the rules may come with the head.
        if let Ok(response) = response
            && response.status() == 200
        {
            // The client reads nothing until the server is cut.
            none_open(&open).await;
            let mut body = response.into_body();
            let end = loop {
                match within(body.frame()).await {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => break Err(error),
                    None => break Ok(()),
                }
            };
            assert!(end.is_err(), "{name}");
        }
        none_open(&open).await;
    }
}

#[tokio::test]
async fn endless_frames_delay_no_other_request_and_end_with_the_call() {
    let early = frame(HEADERS, END_HEADERS, 1, &[&[0x08, 3][..], b"103"].concat());
    let cases: Vec<(&str, Vec<u8>, Vec<u8>)> = vec![
        ("early hints", Vec::new(), early),
        ("pings", Vec::new(), frame(PING, 0, 0, &[0; 8])),
        ("settings", Vec::new(), frame(SETTINGS, 0, 0, &[])),
        ("unknown frames", Vec::new(), frame(0xbe, 0, 0, &[0; 64])),
        ("windows", head(), frame(WINDOW_UPDATE, 0, 5, &[0, 0, 0, 1])),
        ("pings after the head", head(), frame(PING, 0, 0, &[0; 8])),
    ];
    for (name, first, then) in cases {
        let (addr, open) = server(first, then.repeat(100)).await;
        let front = with_neighbour(addr).await;
        let begun = tokio::time::timeout(std::time::Duration::from_millis(200), call(&front)).await;
        for _ in 0..20 {
            let text = within(exchange(front.addr, &get(3001))).await;
            assert!(text.ends_with("fine"), "{name}: {text}");
        }
        drop(begun);
        none_open(&open).await;
    }
}
