//! Connections into a sandbox that serve several requests: when they are kept, and that nothing of one exchange gets into
//! another.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::clock::Clock;
use super::support::{Front, ID, Wire, exchange, front, front_limited, get, origin, within};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A request on a connection that the client keeps.
fn request(method: &str, port: u16, rest: &str) -> String {
    format!("{method} / HTTP/1.1\r\nHost: {port}-{ID}.x\r\n{rest}")
}

fn plain(method: &str) -> String {
    request(method, 3000, "\r\n")
}

fn dials(front: &Front) -> usize {
    front.node.dials.load(Ordering::SeqCst)
}

/// A server that gives each request the same response and keeps its connections.
async fn keeping(response: &'static str) -> SocketAddr {
    origin(move |mut wire| async move {
        while wire.next_head().await.is_some() {
            wire.write(response).await;
        }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn connections_are_shared_by_clients_of_one_port_only() {
    let _clock = Clock::hold();
    let guest = keeping(OK).await;
    let front = front([(1, guest), (2, guest)]).await;
    for (port, dialed) in [(1, 1), (1, 1), (2, 2), (1, 2), (2, 2)] {
        let text = exchange(front.addr, &get(port)).await;
        assert!(text.ends_with("ok"), "{text}");
        assert_eq!(dials(&front), dialed, "port {port}");
    }
}

#[tokio::test(start_paused = true)]
async fn chunked_responses_and_sent_bodies_keep_the_connection() {
    let clock = Clock::hold();
    let guest = origin(|mut wire| async move {
        for _ in 0..3 {
            wire.until("hello").await;
            wire.write("HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
                .await;
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    for _ in 0..3 {
        wire.write(&request("PUT", 3000, "Content-Length: 5\r\n\r\nhello"))
            .await;
        wire.until("0\r\n\r\n").await;
        // Idle, while nothing shows it: a body cannot be sent twice, so the connection has to prove itself.
        clock.pass(Duration::from_millis(20)).await;
    }
    assert_eq!(dials(&front), 1);
}

#[tokio::test]
async fn after_a_doubtful_end_the_connection_is_closed() {
    for (method, response) in [
        (
            "GET",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x, Close\r\n\r\nok",
        ),
        ("GET", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        (
            "GET",
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        ),
        ("GET", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more"),
        (
            "GET",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        ),
        (
            "GET",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        ),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n"),
        ("HEAD", OK),
        // The response comes before the request is complete.
        ("POST", OK),
    ] {
        let (events, mut on_event) = mpsc::channel(4);
        let guest = origin(move |mut wire| {
            let events = events.clone();
            async move {
                wire.head().await;
                wire.write(response).await;
                let (rest, _) = wire.rest().await;
                events.send(rest).await.expect("listened to");
            }
        })
        .await;
        let front = front([(3000, guest)]).await;
        let mut wire = Wire::connect(front.addr).await;
        let rest = if method == "POST" {
            "Content-Length: 5\r\n\r\n"
        } else {
            "\r\n"
        };
        wire.write(&request(method, 3000, rest)).await;
        wire.head().await;
        if method == "POST" {
            wire.until("ok").await;
            wire.write("hello").await;
        }
        // The end of the connection, and no other request before it.
        let rest = within(on_event.recv()).await.expect("the connection ends");
        assert!(rest.is_empty() || rest == "hello", "{method} {response:?}: {rest:?}");
    }
}

#[tokio::test]
async fn a_body_that_was_not_read_closes_the_connection() {
    let (events, mut on_event) = mpsc::channel(4);
    let guest = origin(move |mut wire| {
        let events = events.clone();
        async move {
            wire.head().await;
            wire.write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart").await;
            wire.rest().await.1.ok();
            events.send(()).await.expect("listened to");
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&plain("GET")).await;
    wire.until("part").await;
    drop(wire);
    within(on_event.recv()).await.expect("the connection ends");
}

/// A server that answers the first request of each connection, and closes the connection when it has read another.
async fn one_each(heads: Arc<AtomicUsize>) -> SocketAddr {
    origin(move |mut wire| {
        let heads = Arc::clone(&heads);
        async move {
            wire.head().await;
            heads.fetch_add(1, Ordering::SeqCst);
            wire.write(OK).await;
            if wire.next_head().await.is_some() {
                heads.fetch_add(1, Ordering::SeqCst);
            }
        }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_request_is_sent_again_only_if_that_is_harmless() {
    let clock = Clock::hold();
    for (method, body, is_repeated) in [
        ("GET", "\r\n", true),
        ("OPTIONS", "\r\n", true),
        ("DELETE", "\r\n", true),
        ("PUT", "Content-Length: 5\r\n\r\nhello", false),
        ("POST", "\r\n", false),
        ("POST", "Content-Length: 5\r\n\r\nhello", false),
    ] {
        let heads = Arc::new(AtomicUsize::new(0));
        let front = front([(3000, one_each(Arc::clone(&heads)).await)]).await;
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&plain("GET")).await;
        wire.until("ok").await;
        // Idle, while nothing shows it: only then a request that must not be sent twice uses the connection, too.
        clock.pass(Duration::from_millis(20)).await;
        wire.write(&request(method, 3000, body)).await;
        let head = wire.head().await;
        let (status, count) = if is_repeated { ("200", 3) } else { ("502", 2) };
        assert_eq!(&head[9..12], status, "{method} {body:?}");
        assert_eq!(heads.load(Ordering::SeqCst), count, "{method} {body:?}");
        assert_eq!(dials(&front), 1 + usize::from(is_repeated));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_sent_again_once() {
    let _clock = Clock::hold();
    let connections = Arc::new(AtomicUsize::new(0));
    let guest = {
        let connections = Arc::clone(&connections);
        origin(move |mut wire| {
            let first = connections.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                wire.head().await;
                if first {
                    wire.write(OK).await;
                    wire.head().await;
                }
            }
        })
        .await
    };
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&plain("GET")).await;
    wire.until("ok").await;
    wire.write(&plain("GET")).await;
    assert!(wire.head().await.starts_with("HTTP/1.1 502 "));
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_began_is_not_fetched_again() {
    let _clock = Clock::hold();
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write(OK).await;
        wire.head().await;
        wire.write("HTTP/1.1 2").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&plain("GET")).await;
    wire.until("ok").await;
    wire.write(&plain("GET")).await;
    assert!(wire.head().await.starts_with("HTTP/1.1 502 "));
    assert_eq!(dials(&front), 1);
}

#[tokio::test]
async fn a_connection_closed_without_notice_is_not_used() {
    // Announces nothing, and closes at once.
    let guest = origin(|mut wire| async move {
        wire.until("\r\n\r\n").await;
        wire.write(OK).await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    for n in 0..200 {
        let rest = if n % 2 == 0 {
            "Content-Length: 0\r\n\r\n"
        } else {
            "\r\n"
        };
        wire.write(&request(["POST", "GET"][n % 2], 3000, rest)).await;
        let head = wire.head().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "request {n}: {head}");
        wire.until("ok").await;
    }
}

#[tokio::test]
async fn data_on_an_idle_connection_is_not_a_response() {
    const FORGED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";
    let forgeries = Arc::new(AtomicUsize::new(0));
    let guest = {
        let forgeries = Arc::clone(&forgeries);
        origin(move |mut wire| {
            let forgeries = Arc::clone(&forgeries);
            async move {
                while wire.next_head().await.is_some() {
                    wire.write(OK).await;
                    // Like the second half of a response that was too long.
                    tokio::task::yield_now().await;
                    if tokio::io::AsyncWriteExt::write_all(&mut wire.tcp, FORGED.as_bytes())
                        .await
                        .is_ok()
                    {
                        forgeries.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        })
        .await
    };
    let front = front([(3000, guest)]).await;
    for n in 1..=100 {
        let text = exchange(front.addr, &get(3000)).await;
        assert!(text.ends_with("\r\n\r\nok"), "{text}");
        // It is in the socket, whether or not the event loop has said so.
        while forgeries.load(Ordering::SeqCst) < n {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(dials(&front), 100);
}

/// A server with one thread: it serves each connection to its end before the next.
async fn single_threaded() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let mut wire = Wire::new(tcp);
            while wire.next_head().await.is_some() {
                wire.write(OK).await;
            }
        }
    });
    addr
}

#[tokio::test]
async fn a_server_with_one_thread_serves_several_clients() {
    let front = front([(3000, single_threaded().await)]).await;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let addr = front.addr;
        clients.spawn(async move {
            let mut wire = Wire::connect(addr).await;
            for _ in 0..25 {
                wire.write(&plain("GET")).await;
                wire.until("ok").await;
                // The pace of a client.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
    // With connections that are kept for their time, this would take a minute.
    let all = tokio::time::timeout(Duration::from_secs(15), clients.join_all());
    all.await.expect("no client waits for the end of idle connections");
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_does_not_wait_for_the_end_of_an_idle_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let guest = listener.local_addr().expect("address");
    let front = front([(3000, guest)]).await;
    let mut clients = [Wire::connect(front.addr).await, Wire::connect(front.addr).await];
    for wire in &mut clients {
        wire.write(&plain("GET")).await;
    }
    while dials(&front) < 2 {
        tokio::task::yield_now().await;
    }
    // Both connections are made before the server handles the first, and it handles one at a time.
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let mut wire = Wire::new(tcp);
            while wire.next_head().await.is_some() {
                wire.write(OK).await;
            }
        }
    });
    let begun = tokio::time::Instant::now();
    for wire in &mut clients {
        wire.until("ok").await;
    }
    let waited_ms = begun.elapsed().as_millis();
    assert!(waited_ms < 900, "{waited_ms} ms");
}

#[tokio::test(start_paused = true)]
async fn a_slow_response_does_not_prevent_reuse() {
    let clock = Clock::hold();
    let guest = origin(|mut wire| async move {
        while let Some(head) = wire.next_head().await {
            if head.starts_with("POST") {
                return wire.rest().await.1.expect("a clean end");
            }
            wire.write(OK).await;
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut waiting = Wire::connect(front.addr).await;
    waiting.write(&request("POST", 3000, "Content-Length: 0\r\n\r\n")).await;
    let is_received = async {
        while dials(&front) == 0 {
            tokio::task::yield_now().await;
        }
    };
    within(is_received).await;
    // Longer than a response should take.
    clock.pass(Duration::from_millis(50)).await;
    let mut wire = Wire::connect(front.addr).await;
    for _ in 0..5 {
        wire.write(&plain("GET")).await;
        wire.until("ok").await;
    }
    assert_eq!(dials(&front), 2);
}

#[tokio::test]
async fn the_end_of_the_sandbox_closes_kept_connections() {
    for platform_stops in [false, true] {
        let (events, mut on_event) = mpsc::channel(4);
        let guest = origin(move |mut wire| {
            let events = events.clone();
            async move {
                wire.head().await;
                wire.write(OK).await;
                wire.rest().await.1.ok();
                events.send(()).await.expect("listened to");
            }
        })
        .await;
        let front = front([(3000, guest)]).await;
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&plain("GET")).await;
        wire.until("ok").await;
        if platform_stops {
            front.stop.cancel();
        } else {
            front.ending.cancel();
        }
        within(on_event.recv()).await.expect("the connection ends");
        // The client's connection had nothing to do with it.
        if !platform_stops {
            wire.write(&plain("GET")).await;
            assert!(wire.head().await.contains("502"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_after_a_second() {
    let (events, mut on_event) = mpsc::channel(4);
    let guest = origin(move |mut wire| {
        let events = events.clone();
        async move {
            wire.head().await;
            wire.write(OK).await;
            wire.rest().await.1.expect("a clean end");
            events.send(()).await.expect("listened to");
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&plain("GET")).await;
    wire.until("ok").await;
    let begun = tokio::time::Instant::now();
    within(on_event.recv()).await.expect("the connection ends");
    let idle_ms = begun.elapsed().as_millis();
    assert!((900..1500).contains(&idle_ms), "{idle_ms} ms");
}

#[tokio::test]
async fn kept_connections_give_way_to_new_ones() {
    let guest = keeping(OK).await;
    for (total, per_sandbox) in [(2, 100), (100, 2)] {
        let front = front_limited([(1, guest), (2, guest), (3, guest)], total, per_sandbox).await;
        for port in [1, 2, 3, 1, 2, 3] {
            let text = exchange(front.addr, &get(port)).await;
            assert!(text.ends_with("ok"), "{text}");
        }
    }
}

#[tokio::test]
async fn what_a_client_sends_is_one_request_on_a_shared_connection() {
    // Echoes the head that it reads, so a request in a body would show up in a response.
    let guest = origin(|mut wire| async move {
        while let Some(head) = wire.next_head().await {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("Content-Length: "))
                .map_or(0, |length| length.parse().expect("a number"));
            let body = wire.exactly(length).await;
            let text = format!("{}|{body}", head.lines().next().expect("a line"));
            wire.write(&format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}",
                text.len()
            ))
            .await;
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let hidden = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
    let attacker = request(
        "PUT",
        3000,
        &format!(
            "Connection: content-length\r\nContent-Length: {}\r\n\r\n{hidden}",
            hidden.len()
        ),
    );
    for _ in 0..10 {
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&attacker).await;
        assert!(wire.head().await.starts_with("HTTP/1.1 200 "));
        assert_eq!(wire.until(hidden).await, format!("PUT / HTTP/1.1|{hidden}"));
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&plain("GET")).await;
        wire.head().await;
        assert_eq!(wire.until("|").await, "GET / HTTP/1.1|");
    }
    assert!(dials(&front) < 20, "{} connections", dials(&front));
}
