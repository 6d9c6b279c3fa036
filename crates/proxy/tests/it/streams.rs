//! Streams both ways, unbuffered, over HTTP/1.1, HTTP/2 and after an upgrade.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::BodyExt as _;
use hyper::body::Frame;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::support::{ChannelBody, ID, Wire, exchange, front, get, h2_client, h2_request, origin, within};

#[tokio::test]
async fn each_part_of_a_response_arrives_before_the_next_is_made() {
    let (next, on_next) = mpsc::channel::<()>(1);
    let on_next = std::sync::Arc::new(tokio::sync::Mutex::new(on_next));
    let guest = origin(move |mut wire| {
        let on_next = std::sync::Arc::clone(&on_next);
        async move {
            wire.head().await;
            wire.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                .await;
            for part in ["one", "two"] {
                on_next.lock().await.recv().await;
                wire.write(&format!("3\r\n{part}\r\n")).await;
            }
            wire.write("0\r\n\r\n").await;
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&get(3000)).await;
    assert!(wire.head().await.contains("Transfer-Encoding: chunked"));
    for part in ["3\r\none\r\n", "3\r\ntwo\r\n"] {
        next.send(()).await.expect("listened to");
        assert_eq!(wire.until("\r\n").await + &wire.until("\r\n").await, part);
    }
    assert_eq!(wire.until("\r\n\r\n").await, "0\r\n\r\n");
}

#[tokio::test]
async fn request_and_response_stream_at_the_same_time() {
    // Answers before the request's body has begun, and then each part with what it got.
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await;
        for part in ["ping1", "ping2", "ping3"] {
            wire.until(part).await;
            wire.write(&format!("5\r\n{}\r\n", part.replace("ping", "pong"))).await;
        }
        wire.until("0\r\n\r\n").await;
        wire.write("0\r\n\r\n").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!(
        "POST / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nTransfer-Encoding: chunked\r\n\r\n"
    ))
    .await;
    wire.head().await;
    for n in 1..=3 {
        wire.write(&format!("5\r\nping{n}\r\n")).await;
        wire.until(&format!("pong{n}\r\n")).await;
    }
    wire.write("0\r\n\r\n").await;
    wire.until("0\r\n\r\n").await;

    // The connection is still good for another request.
    wire.write(&get(1)).await;
    assert!(wire.head().await.starts_with("HTTP/1.1 502 "));
}

#[tokio::test]
async fn an_early_answer_does_not_cut_the_upload_short() {
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        wire.until("the end").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!(
        "POST / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nContent-Length: 1000007\r\n\r\n"
    ))
    .await;
    wire.until("ok").await;
    let upload = "x".repeat(1_000_000) + "the end";
    within(wire.tcp.write_all(upload.as_bytes()))
        .await
        .expect("the upload is taken");
}

#[tokio::test]
async fn trailers_cross() {
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        assert!(
            head.contains("TE: trailers") && head.contains("Trailer: x-sum"),
            "{head}"
        );
        let body = wire.until("0\r\n").await + &wire.until("\r\n\r\n").await;
        // Those of trailers are not known, so they are written as for HTTP/2.
        assert!(body.contains("X-Sum: 1"), "{body}");
        wire.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-end\r\n\r\n")
            .await;
        wire.write("2\r\nok\r\n0\r\nx-end: done\r\n\r\n").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let text = exchange(
        front.addr,
        &format!(
            "POST / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close, te\r\nTE: trailers\r\nTrailer: x-sum\r\n\
             Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 1\r\n\r\n"
        ),
    )
    .await;
    assert!(text.ends_with("0\r\nx-end: done\r\n\r\n"), "{text}");
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_connection_into_the_sandbox_along() {
    let (events, mut on_event) = mpsc::channel(1);
    for answered in [false, true] {
        let events = events.clone();
        let guest = origin(move |mut wire| {
            let events = events.clone();
            async move {
                wire.head().await;
                if answered {
                    wire.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
                        .await;
                } else {
                    events.send(()).await.expect("listened to");
                }
                wire.rest().await.1.ok();
                events.send(()).await.expect("listened to");
            }
        })
        .await;
        let front = front([(3000, guest)]).await;
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&get(3000)).await;
        if answered {
            wire.until("a\r\n").await;
        } else {
            within(on_event.recv()).await.expect("the server has the request");
        }
        drop(wire);
        within(on_event.recv()).await.expect("the server's connection ends");
    }
}

/// A server that takes an upgrade and echoes in capitals until the client is done, then says goodbye.
async fn echo() -> std::net::SocketAddr {
    origin(|mut wire| async move {
        let head = wire.head().await;
        assert!(
            head.contains("Connection: upgrade\r\n") && head.contains("Upgrade: Echo/1\r\n"),
            "{head}"
        );
        wire.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: Echo/1\r\nX-A: b\r\n\r\nhello")
            .await;
        let mut buffer = [0; 1024];
        loop {
            match wire.tcp.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(got) => {
                    let text = String::from_utf8_lossy(&buffer[..got]).to_uppercase();
                    wire.write(&text).await;
                }
            }
        }
        wire.write("bye").await;
    })
    .await
}

const UPGRADE: &str = "Connection: keep-alive, Upgrade\r\nUpgrade: Echo/1\r\n\r\n";

#[tokio::test]
async fn an_upgrade_becomes_bytes_both_ways() {
    let front = front([(3000, echo().await)]).await;
    let mut wire = Wire::connect(front.addr).await;
    // The first bytes of the new protocol come right behind the head, from both sides.
    wire.write(&format!("GET /ws HTTP/1.1\r\nHost: 3000-{ID}.x\r\n{UPGRADE}early "))
        .await;
    let head = wire.head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(
        head.contains("Upgrade: Echo/1\r\n") && head.contains("X-A: b\r\n"),
        "{head}"
    );
    wire.until("hello").await;
    wire.until("EARLY ").await;
    for text in ["one", "two"] {
        wire.write(text).await;
        wire.until(&text.to_uppercase()).await;
    }
    // One side may be done while the other still speaks, and then the end is clean.
    wire.tcp.shutdown().await.expect("half closed");
    let (rest, end) = wire.rest().await;
    assert_eq!(rest, "bye");
    end.expect("a clean end");
}

#[tokio::test]
async fn upgrades_that_nobody_could_look_into_are_not_passed_on() {
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        assert!(!head.contains("upgrade"), "{head}");
        wire.write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    })
    .await;
    let front = front([(3000, guest), (49983, guest)]).await;
    for (port, protocol) in [(3000, "h2c"), (3000, "websocket, h2c"), (49983, "websocket")] {
        let text = exchange(
            front.addr,
            &format!(
                "GET / HTTP/1.1\r\nHost: {port}-{ID}.x\r\nConnection: Upgrade, HTTP2-Settings, close\r\n\
                 Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
            ),
        )
        .await;
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    }
}

#[tokio::test]
async fn a_large_transfer_is_relayed_as_it_is() {
    const BYTES: usize = 32 * 1024 * 1024;
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: Echo/1\r\n\r\n")
            .await;
        let (mut read, mut write) = wire.tcp.split();
        tokio::io::copy(&mut read, &mut write).await.expect("copied");
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!("GET /ws HTTP/1.1\r\nHost: 3000-{ID}.x\r\n{UPGRADE}"))
        .await;
    wire.head().await;
    let (mut read, mut write) = wire.tcp.into_split();
    let sending = tokio::spawn(async move {
        let block: Vec<u8> = (0..=250).cycle().take(64 * 1024).collect();
        for _ in 0..BYTES / block.len() {
            write.write_all(&block).await.expect("written");
        }
        write.shutdown().await.expect("half closed");
    });
    let mut got = Vec::with_capacity(BYTES);
    within(read.read_to_end(&mut got)).await.expect("a clean end");
    sending.await.expect("no panic");
    assert_eq!(got.len(), BYTES);
    let expected: Vec<u8> = (0..=250).cycle().take(64 * 1024).collect();
    assert!(got.chunks(expected.len()).all(|block| block == expected));
}

#[tokio::test]
async fn http_2_streams_both_ways_with_no_length_known() {
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        assert!(head.starts_with("POST /path?q=1 HTTP/1.1\r\n"), "{head}");
        assert!(head.contains(&format!("Host: 3000-{ID}.example.com\r\n")), "{head}");
        assert!(head.contains("Transfer-Encoding: chunked"), "{head}");
        wire.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-end\r\n\r\n")
            .await;
        wire.until("ping").await;
        wire.write("4\r\npong\r\n").await;
        wire.until("0\r\n\r\n").await;
        wire.write("0\r\nx-end: done\r\n\r\n").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut client = h2_client(&front).await;
    let (parts, sent) = ChannelBody::new();
    let response = within(client.send_request(h2_request(Method::POST, sent)))
        .await
        .expect("a response");
    assert_eq!(response.status(), 200);
    let mut received = response.into_body();
    parts
        .send(Frame::data(Bytes::from_static(b"ping")))
        .await
        .expect("taken");
    let frame = within(received.frame()).await.expect("a frame").expect("no error");
    assert_eq!(frame.into_data().expect("data"), "pong");
    drop(parts);
    let frame = within(received.frame()).await.expect("a frame").expect("no error");
    let mut want = HeaderMap::new();
    want.insert("x-end", HeaderValue::from_static("done"));
    assert_eq!(frame.into_trailers().expect("trailers"), want);
}

#[tokio::test]
async fn http_2_carries_many_requests_at_once_and_bare_gets() {
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        assert!(!head.contains("transfer-encoding"), "{head}");
        wire.write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let client = h2_client(&front).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let mut client = client.clone();
        tasks.spawn(async move {
            let request = h2_request(Method::GET, ChannelBody::empty());
            let response = within(client.send_request(request)).await.expect("a response");
            response.into_body().collect().await.expect("a body").to_bytes()
        });
    }
    while let Some(done) = tasks.join_next().await {
        assert_eq!(done.expect("no panic"), "ok");
    }
}
