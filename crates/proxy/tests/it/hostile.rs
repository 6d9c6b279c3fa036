//! Servers inside that answer too much, too little or too early, and clients that are still sending then.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt as _;
use hyper::body::Frame;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use super::clock::Clock;
use super::support::{ChannelBody, ID, Wire, exchange, front, get, h2_client, h2_request, origin, within};

const HINT: &str = "HTTP/1.1 103 Early Hints\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A `POST` that announces a body of this many bytes.
fn post(port: u16, bytes: usize) -> String {
    get(port).replace("GET / HTTP/1.1", &format!("POST / HTTP/1.1\r\nContent-Length: {bytes}"))
}

#[tokio::test]
async fn informational_answers_come_to_an_end() {
    let sent = Arc::new(AtomicUsize::new(0));
    let endless = {
        let sent = Arc::clone(&sent);
        origin(move |mut wire| {
            let sent = Arc::clone(&sent);
            async move {
                wire.head().await;
                let hints = HINT.repeat(1000);
                while let Ok(written) = wire.tcp.write(hints.as_bytes()).await {
                    sent.fetch_add(written, Ordering::SeqCst);
                }
            }
        })
        .await
    };
    let large = origin(|mut wire| async move {
        wire.head().await;
        let hint = format!("HTTP/1.1 103 Early Hints\r\nLink: {}\r\n\r\n", "x".repeat(60_000));
        while wire.tcp.write_all(hint.as_bytes()).await.is_ok() {}
    })
    .await;
    let several = origin(|mut wire| async move {
        wire.head().await;
        wire.write(&format!("{}{OK}", HINT.repeat(30))).await;
        wire.rest().await.1.ok();
    })
    .await;
    let front = front([(1, endless), (2, large), (3, several)]).await;
    for port in [1, 2] {
        let text = within(exchange(front.addr, &get(port))).await;
        assert!(text.starts_with("HTTP/1.1 502 "), "{text}");
    }
    // What was taken, and what the two sockets hold.
    let taken = sent.load(Ordering::SeqCst);
    assert!(taken < 16 << 20, "{taken} bytes of informational answers");
    let text = exchange(front.addr, &get(3)).await;
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_head_that_began_has_to_end_and_one_that_did_not_may_take_its_time() {
    const LONG: Duration = Duration::from_secs(3600);
    let stalls = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 200 OK\r\nContent-").await;
        wire.rest().await.1.ok();
    })
    .await;
    let thinks = origin(|mut wire| async move {
        wire.head().await;
        tokio::time::sleep(LONG).await;
        wire.write(HINT).await;
        tokio::time::sleep(LONG).await;
        wire.write(OK).await;
    })
    .await;
    let front = front([(1, stalls), (2, thinks)]).await;
    let begun = Instant::now();
    let text = patient(front.addr, &get(1), 3 * LONG).await;
    assert!(text.starts_with("HTTP/1.1 502 "), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let text = patient(front.addr, &get(2), 3 * LONG).await;
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
}

/// Like [`exchange`], with a longer time limit.
async fn patient(addr: SocketAddr, request: &str, most: Duration) -> String {
    let mut wire = Wire::connect(addr).await;
    wire.write(request).await;
    let mut text = String::new();
    let read = tokio::time::timeout(most, wire.tcp.read_to_string(&mut text)).await;
    read.expect("an answer").expect("a clean end");
    text
}

#[tokio::test]
async fn the_early_answer_of_a_server_that_hangs_up_reaches_a_client_that_is_still_sending() {
    let refuses = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope")
            .await;
        // Closed on what it has not read, which resets the connection.
    })
    .await;
    let front = front([(3000, refuses)]).await;
    let body = "x".repeat(32 << 20);
    for _ in 0..10 {
        // Like most clients: everything is written before anything is read.
        let text = within(exchange(front.addr, &format!("{}{body}", post(3000, body.len())))).await;
        assert!(text.starts_with("HTTP/1.1 401 ") && text.ends_with("nope"), "{text}");
    }
}

#[tokio::test]
async fn over_http_2_a_refused_upload_ends_and_the_connection_serves_on() {
    let hangs_up = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope")
            .await;
    })
    .await;
    let front = front([(3000, hangs_up)]).await;
    let mut client = h2_client(&front).await;
    // Refused by the proxy, and by the server inside.
    for (id, status) in [("igone", 502), (ID, 401), ("igone", 502)] {
        let (parts, body) = ChannelBody::new();
        let mut request = h2_request(Method::POST, body);
        *request.uri_mut() = format!("http://3000-{id}.example.com/").parse().expect("an address");
        let answer = tokio::spawn(client.send_request(request));
        let chunk = Bytes::from(vec![0; 64 * 1024]);
        for sent in 0..512 {
            let sending = within(parts.send(Frame::data(chunk.clone()))).await;
            assert!(sending.is_ok(), "{id}: the upload was broken off after {sent} chunks");
        }
        drop(parts);
        let response = within(answer).await.expect("a task").expect("a response");
        assert_eq!(response.status(), status);
        within(response.into_body().collect()).await.expect("a whole body");
    }
}

#[tokio::test(start_paused = true)]
async fn over_http_2_an_answer_does_not_end_before_the_request_unless_its_client_is_silent() {
    let clock = Clock::hold();
    let front = front([]).await;
    let mut client = h2_client(&front).await;
    let (parts, body) = ChannelBody::new();
    let mut request = h2_request(Method::POST, body);
    *request.uri_mut() = "http://3000-igone.example.com/".parse().expect("an address");
    let answer = tokio::spawn(client.send_request(request));
    let chunk = Bytes::from(vec![0; 16 * 1024]);
    within(parts.send(Frame::data(chunk.clone()))).await.expect("sent");
    let response = within(answer).await.expect("a task").expect("a response");
    assert_eq!(response.status(), 502);
    let reading = tokio::spawn(response.into_body().collect());
    for _ in 0..20 {
        within(parts.send(Frame::data(chunk.clone()))).await.expect("sent");
        tokio::task::yield_now().await;
        assert!(!reading.is_finished(), "the answer ended before the request");
    }
    // Neither sent nor ended: the answer does not wait for that.
    clock.until(reading).await.expect("a task").expect("a whole body");
    drop(parts);
}
