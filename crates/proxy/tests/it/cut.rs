//! Streams of a sandbox that ends are cut, never ended.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;

use http::Method;
use http_body_util::BodyExt as _;
use protocol::agent;
use tokio::sync::Notify;

use super::clock::Clock;
use super::support::{ChannelBody, ID, Wire, front, get, h2_client, h2_request, healthy, origin, within};

/// A server that answers with `head`, sends one part, and then keeps the connection open.
async fn silent(head: &'static str) -> SocketAddr {
    origin(move |mut wire| async move {
        wire.head().await;
        wire.write(head).await;
        wire.rest().await.1.ok();
    })
    .await
}

const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n";
const UNTIL_CLOSE: &str = "HTTP/1.1 200 OK\r\n\r\npart";
const SIZED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart";
const UPGRADED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\npart";

#[tokio::test]
async fn http_1_streams_are_reset() {
    for platform_stops in [false, true] {
        for (head, version, extra) in [
            (CHUNKED, "1.1", ""),
            (UNTIL_CLOSE, "1.1", ""),
            (UNTIL_CLOSE, "1.0", ""),
            (SIZED, "1.1", ""),
            (UPGRADED, "1.1", "Connection: Upgrade\r\nUpgrade: x\r\n"),
        ] {
            let front = front([(3000, silent(head).await)]).await;
            let mut wire = Wire::connect(front.addr).await;
            wire.write(&format!("GET / HTTP/{version}\r\nHost: 3000-{ID}.x\r\n{extra}\r\n"))
                .await;
            wire.until("part").await;
            if platform_stops {
                front.stop.cancel();
            } else {
                front.ending.cancel();
            }
            let (rest, ended) = wire.rest().await;
            assert!(!rest.contains("0\r\n\r\n"), "{head}: {rest:?}");
            let error = ended.expect_err("not a clean end");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{head}");
        }
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_too() {
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write(CHUNKED).await;
        let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
        // More than all buffers on the way hold, until the connection is taken away.
        while tokio::io::AsyncWriteExt::write_all(&mut wire.tcp, chunk.as_bytes())
            .await
            .is_ok()
        {}
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&get(3000)).await;
    wire.until("part").await;
    front.ending.cancel();
    let (rest, ended) = wire.rest().await;
    assert!(!rest.ends_with("0\r\n\r\n"));
    assert_eq!(ended.expect_err("not a clean end").kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn http_2_streams_are_reset_and_their_connection_lives() {
    for head in [CHUNKED, UNTIL_CLOSE, SIZED] {
        let front = front([(3000, silent(head).await)]).await;
        let mut client = h2_client(&front).await;
        let response = within(client.send_request(h2_request(Method::GET, ChannelBody::empty())))
            .await
            .expect("a response");
        let mut received = response.into_body();
        let frame = within(received.frame()).await.expect("a frame").expect("no error");
        assert_eq!(frame.into_data().expect("data"), "part");
        front.ending.cancel();
        within(received.frame())
            .await
            .expect("not a clean end")
            .expect_err("not a part");
        // The other streams of the connection have nothing to do with it.
        let response = within(client.send_request(h2_request(Method::GET, ChannelBody::empty())))
            .await
            .expect("a response");
        assert_eq!(response.status(), 502);
    }
}

#[tokio::test]
async fn a_clean_end_of_a_living_sandbox_stays_clean() {
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.write(UNTIL_CLOSE).await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!("GET / HTTP/1.0\r\nHost: 3000-{ID}.x\r\n\r\n"))
        .await;
    let (text, ended) = wire.rest().await;
    assert!(text.ends_with("part"), "{text}");
    ended.expect("a clean end");
}

/// What is behind the agent's port when a stream ends.
#[derive(Clone, Copy)]
enum Agent {
    /// The agent does not listen.
    Gone,
    /// The port still accepts, and then the connection closes without an answer.
    Exiting,
    /// The agent accepts connections and does not answer in time.
    Busy,
    Running,
}

#[tokio::test(start_paused = true)]
async fn an_end_that_is_the_sandboxs_own_is_not_clean() {
    let clock = Clock::hold();
    let upgrade = "Connection: Upgrade\r\nUpgrade: x\r\n";
    for (head, version, extra) in [
        (UNTIL_CLOSE, "1.1", ""),
        (UNTIL_CLOSE, "1.0", ""),
        (UPGRADED, "1.1", upgrade),
    ] {
        for agent in [Agent::Gone, Agent::Exiting, Agent::Busy, Agent::Running] {
            let dead = matches!(agent, Agent::Gone | Agent::Exiting);
            let die = Arc::new(Notify::new());
            let dies = Arc::clone(&die);
            let guest = origin(move |mut wire| {
                let dies = Arc::clone(&dies);
                async move {
                    wire.head().await;
                    wire.write(head).await;
                    dies.notified().await;
                }
            })
            .await;
            let front = front([(3000, guest)]).await;
            let mut wire = Wire::connect(front.addr).await;
            wire.write(&format!("GET / HTTP/{version}\r\nHost: 3000-{ID}.x\r\n{extra}\r\n"))
                .await;
            wire.until("part").await;
            // The node has not noticed, and the stream ends as it does when a server closes it.
            let port = match agent {
                Agent::Gone => None,
                Agent::Exiting => Some(origin(|mut wire| async move { drop(wire.head().await) }).await),
                Agent::Busy => Some(origin(|mut wire| async move { drop(wire.rest().await) }).await),
                Agent::Running => Some(origin(healthy).await),
            };
            match port {
                Some(port) => front.node.ports.lock().insert(agent::PORT, port),
                None => front.node.ports.lock().remove(&agent::PORT),
            };
            die.notify_one();
            if version == "1.1" && !dead && extra.is_empty() {
                assert!(clock.until(wire.until("0\r\n\r\n")).await.ends_with("0\r\n\r\n"));
                continue;
            }
            let (rest, ended) = clock.until(wire.rest()).await;
            assert!(!rest.contains("0\r\n\r\n"), "{rest:?}");
            match ended {
                Ok(()) => assert!(!dead, "{head} {version}"),
                Err(error) => assert!(dead && error.kind() == ErrorKind::ConnectionReset, "{head}: {error}"),
            }
        }
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_not_completed() {
    for head in [CHUNKED, SIZED] {
        let guest = origin(move |mut wire| async move {
            wire.head().await;
            wire.write(head).await;
        })
        .await;
        let front = front([(3000, guest)]).await;
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&get(3000)).await;
        wire.until("part").await;
        let (rest, ended) = wire.rest().await;
        assert!(!rest.contains("0\r\n\r\n"), "{rest:?}");
        assert_eq!(ended.expect_err("not a clean end").kind(), ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn before_the_head_the_end_is_told() {
    let guest = origin(|mut wire| async move {
        wire.rest().await.1.ok();
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&get(3000)).await;
    // The request is on its way once the node was asked for the port.
    while front.node.dials.load(std::sync::atomic::Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    front.ending.cancel();
    let (text, ended) = wire.rest().await;
    ended.expect("a clean end");
    assert!(
        text.starts_with("HTTP/1.1 502 ") && text.contains("was not found"),
        "{text}"
    );
}
