//! What works on an intercepted connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use model::injection::PathPattern;
use model::network::{Cidr, EgressPolicy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::support::{BEARER, HOST, OTHER, SECRET, World, read_available, rule, text, until};

fn get(world: &World, path: &str) -> Request<Full<Bytes>> {
    Request::get(path)
        .header("host", world.authority())
        .body(Full::default())
        .unwrap()
}

#[tokio::test]
async fn requests_get_the_header_over_both_versions() {
    let world = World::new().await;
    let server = world.echo().await;
    let mut client = world.http1().await;
    for _ in 0..2 {
        client.ready().await.unwrap();
        let mut request = get(&world, "/a?b=c");
        request.headers_mut().append("Authorization", "mine".parse().unwrap());
        request
            .headers_mut()
            .append("authorization", "mine too".parse().unwrap());
        let response = client.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        text(response).await;
    }
    let mut client = world.http2().await;
    let uri = format!("https://{}/a?b=c", world.authority());
    let response = client
        .send_request(Request::post(uri).body(Full::from("x")).unwrap())
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let seen = server.text();
    assert_eq!(seen.matches("GET /a?b=c HTTP/1.1").count(), 2, "{seen}");
    assert_eq!(seen.matches(BEARER).count(), 3);
    assert!(seen.contains("/a?b=c HTTP/2.0"));
    assert!(!seen.contains("mine"));
    assert_eq!(*server.connections.lock(), 2, "one connection for each of the program");
    let requests = world.requests(3).await;
    let first = &requests[0];
    assert_eq!(
        (first.rule.as_str(), first.host.as_str(), first.port),
        ("injections[0]", HOST, world.port)
    );
    assert_eq!(
        (first.method.as_str(), first.path.as_str(), first.status),
        ("GET", "/a", Some(200))
    );
    assert!(!world.reported().contains(SECRET));
    let counters = world.gateway.counters();
    assert_eq!((counters.intercepted, counters.injected), (2, 3));
}

#[tokio::test]
async fn requests_that_no_rule_is_for_pass_unchanged() {
    let world = World::with(vec![rule(PathPattern::Prefix("/v1/".to_owned()))], |_, _| {}).await;
    let server = world.record(HOST, "HTTP/1.1 204 No Content\r\n\r\n").await;
    let request = format!(
        "GET /v2?x=%7e HTTP/1.1\r\nHost: {}\r\nX-Odd-CASE: 1\r\nAuthorization: mine\r\nAccept-Encoding: gzip\r\n\r\n",
        world.authority()
    );
    let answer = world.raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    let seen = server.text();
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&seen), sorted(&request));
    assert_eq!(world.gateway.counters().injected, 0);
}

#[tokio::test]
async fn other_hosts_are_never_decrypted() {
    let world = World::with(vec![rule(PathPattern::Any)], |_, policy| {
        policy.deny = vec![Cidr::ALL];
        policy.allow_domains = vec![HOST.parse().unwrap(), OTHER.parse().unwrap()];
    })
    .await;
    let server = world.record(OTHER, "HTTP/1.1 204 No Content\r\n\r\n").await;
    // The program sees the certificate of the server, which it does not trust here.
    let error = world.tls(OTHER, &[]).await.unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    let allowed = world.record(HOST, "HTTP/1.1 204 No Content\r\n\r\n").await;
    world
        .raw(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority()).as_bytes())
        .await;
    assert!(allowed.has_secret());
    assert!(!server.has_secret());
    assert_eq!(world.gateway.counters().intercepted, 1);
}

#[tokio::test]
async fn the_network_policy_decides_first() {
    let world = World::with(vec![rule(PathPattern::Any)], |_, policy| policy.deny = vec![Cidr::ALL]).await;
    let server = world.record(HOST, "HTTP/1.1 204 No Content\r\n\r\n").await;
    assert!(world.tls(HOST, &[]).await.is_err());
    assert_eq!(*server.connections.lock(), 0);
    assert!(world.reported().contains("Denied"), "{}", world.reported());
}

#[tokio::test]
async fn an_address_of_the_host_that_is_closed_is_not_used() {
    // The destination is open, but the only address of the name is not.
    let world = World::with(vec![rule(PathPattern::Any)], |settings, _| {
        settings.deny = vec!["127.0.0.2".parse().unwrap()];
    })
    .await;
    let server = world.record(HOST, "HTTP/1.1 204 No Content\r\n\r\n").await;
    assert!(world.tls(HOST, &[]).await.is_err());
    assert_eq!(*server.connections.lock(), 0);
}

#[tokio::test]
async fn changed_rules_hold_for_the_next_request() {
    let world = World::new().await;
    let server = world.echo().await;
    let mut client = world.http2().await;
    let mut send = async |path: &str| {
        let uri = format!("https://{}{path}", world.authority());
        text(
            client
                .send_request(Request::get(uri).body(Full::default()).unwrap())
                .await
                .unwrap(),
        )
        .await;
        std::mem::take(&mut *server.bytes.lock())
    };
    assert!(String::from_utf8(send("/").await).unwrap().contains(BEARER));
    let mut changed = rule(PathPattern::Any);
    changed.headers[0].name = "x-api-key".to_owned();
    world.set_rules(vec![changed]);
    let seen = String::from_utf8(send("/").await).unwrap();
    assert!(
        seen.contains(&format!("x-api-key: {BEARER}")) && !seen.contains("authorization"),
        "{seen}"
    );
    world.set_rules(Vec::new());
    assert!(!String::from_utf8(send("/").await).unwrap().contains(SECRET));
    assert_eq!(*server.connections.lock(), 1);
}

/// The burst is answered, what is beyond gets 429 on every connection, and after a while requests are answered again.
#[tokio::test]
async fn requests_per_second_are_limited() {
    let world = World::with(vec![rule(PathPattern::Any)], |settings, _| {
        settings.limits.requests_per_s = 2;
    })
    .await;
    let server = world.echo().await;
    let mut http2 = world.http2().await;
    let uri = format!("https://{}/", world.authority());
    let post = |uri: &str| Request::post(uri).body(Full::from("x")).unwrap();
    let mut http1 = world.http1().await;
    // While it is tried, nothing is earned.
    tokio::time::pause();
    let clock = Clock::hold();
    let mut answered = 0;
    while answered < 1000 {
        let response = http2.send_request(post(&uri)).await.unwrap();
        let status = response.status();
        text(response).await;
        if status == 429 {
            break;
        }
        assert_eq!(status, 200);
        answered += 1;
    }
    assert_eq!(answered, 8);
    let response = http1.send_request(get(&world, "/")).await.unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(response.headers()["connection"], "close");
    assert!(text(response).await.contains("too many requests per second"));
    let counters = world.gateway.counters();
    assert_eq!((counters.injected, counters.requests_limited), (answered, 2));
    assert_eq!(server.text().matches(BEARER).count() as u64, answered);
    let is_admitted = async || http2.send_request(post(&uri)).await.unwrap().status() == 200;
    clock.until(until(is_admitted, "requests are admitted again")).await;
}

#[tokio::test]
async fn a_connection_is_closed_by_a_policy_that_denies_it() {
    let world = World::new().await;
    world.echo().await;
    let mut client = world.http1().await;
    let response = client.send_request(get(&world, "/")).await.unwrap();
    text(response).await;
    world.attachment.set_policy(EgressPolicy {
        deny: vec![Cidr::ALL],
        ..EgressPolicy::default()
    });
    let is_closed = async || {
        let Ok(response) = client.send_request(get(&world, "/")).await else {
            return true;
        };
        // Otherwise the client would close the connection itself.
        text(response).await;
        false
    };
    until(is_closed, "the connection is closed").await;
}

#[tokio::test]
async fn a_connection_that_is_held_is_reset_with_the_next_policy() {
    let world = World::new().await;
    world.echo().await;
    let mut stream = world.tls(HOST, &["http/1.1"]).await.unwrap();
    let denied = EgressPolicy {
        deny: vec![Cidr::ALL],
        ..EgressPolicy::default()
    };
    world.attachment.hold(denied);
    let mut refused = world.connect().await;
    let mut byte = [0];
    let silent = Duration::from_millis(200);
    // What is refused meanwhile, too.
    assert!(tokio::time::timeout(silent, stream.read(&mut byte)).await.is_err());
    assert!(tokio::time::timeout(silent, refused.read(&mut byte)).await.is_err());
    world.set_rules(vec![rule(PathPattern::Any)]);
    let errors = [
        stream.read(&mut byte).await.unwrap_err().kind(),
        refused.read(&mut byte).await.unwrap_err().kind(),
    ];
    assert_eq!(errors, [std::io::ErrorKind::ConnectionReset; 2]);
}

#[tokio::test]
async fn bodies_stream_in_both_directions() {
    let world = World::new().await;
    world.echo().await;
    for alpn in ["http/1.1", "h2"] {
        let stream = world.tls(HOST, &[alpn]).await.unwrap();
        let (frames, source) = tokio::sync::mpsc::channel::<Result<_, std::io::Error>>(1);
        let source = futures_util::stream::unfold(source, async |mut source| Some((source.recv().await?, source)));
        let body = StreamBody::new(Box::pin(source));
        let request = Request::post(match alpn {
            "h2" => format!("https://{}/stream", world.authority()),
            _ => "/stream".to_owned(),
        })
        .header("te", "trailers")
        .header("trailer", "x-sum");
        let response = if alpn == "h2" {
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                    .await
                    .unwrap();
            tokio::spawn(connection);
            sender.send_request(request.body(body).unwrap()).await.unwrap()
        } else {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .unwrap();
            tokio::spawn(connection);
            let request = request.header("host", world.authority()).body(body).unwrap();
            sender.send_request(request).await.unwrap()
        };
        let mut body = response.into_body();
        // Each part comes back before the next one is sent.
        for part in 0..5 {
            let data = Bytes::from(format!("part {part}"));
            frames.send(Ok(http_body::Frame::data(data.clone()))).await.unwrap();
            let back = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(back, data, "{alpn}");
        }
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", "1".parse().unwrap());
        trailers.insert("authorization", "mine".parse().unwrap());
        frames.send(Ok(http_body::Frame::trailers(trailers))).await.unwrap();
        drop(frames);
        if alpn == "h2" {
            let back = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
            assert_eq!(back.get("x-sum").unwrap(), "1");
            assert!(!back.contains_key("authorization"), "{back:?}");
        }
        assert!(
            body.frame()
                .await
                .is_none_or(|frame| frame.is_ok_and(|frame| frame.is_trailers())),
            "{alpn}"
        );
    }
}

#[tokio::test]
async fn large_bodies_arrive_whole() {
    let world = World::new().await;
    world.echo().await;
    let data: Bytes = (0..=250u8).cycle().take(20_000_000).collect();
    for version in [1, 2] {
        let response = if version == 1 {
            let mut request = get(&world, "/stream");
            *request.method_mut() = http::Method::POST;
            *request.body_mut() = Full::new(data.clone());
            world.http1().await.send_request(request).await.unwrap()
        } else {
            let uri = format!("https://{}/stream", world.authority());
            let request = Request::post(uri).body(Full::new(data.clone())).unwrap();
            world.http2().await.send_request(request).await.unwrap()
        };
        let back = response.into_body().collect().await.unwrap().to_bytes();
        assert!(back == data, "{version}: {} bytes", back.len());
    }
    let counters = world.gateway.counters();
    assert!(
        counters.bytes_sent > 40_000_000 && counters.bytes_received > 40_000_000,
        "{counters:?}"
    );
    // There is one sandbox.
    let traffic = world.traffic.read();
    assert_eq!(
        (traffic.sent, traffic.received),
        (counters.bytes_sent, counters.bytes_received)
    );
}

#[tokio::test]
async fn a_server_may_ask_for_the_body() {
    let world = World::new().await;
    let server = world
        .record(HOST, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
        .await;
    let mut stream = world.tls(HOST, &["http/1.1"]).await.unwrap();
    let head = format!(
        "PUT / HTTP/1.1\r\nHost: {}\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
        world.authority()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut part = [0; 25];
    stream.read_exact(&mut part).await.unwrap();
    assert_eq!(&part, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"body").await.unwrap();
    let answer = read_available(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    assert!(
        server.text().to_lowercase().contains("expect: 100-continue"),
        "{}",
        server.text()
    );
}

#[tokio::test]
async fn a_server_may_refuse_the_body() {
    let world = World::new().await;
    let server = world
        .record(HOST, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        .await;
    let mut stream = world.tls(HOST, &["http/1.1"]).await.unwrap();
    let head = format!(
        "PUT / HTTP/1.1\r\nHost: {}\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
        world.authority()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_available(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    assert!(
        server.text().ends_with("\r\n\r\n"),
        "no body was sent: {}",
        server.text()
    );
}

#[tokio::test]
async fn websockets_are_relayed() {
    let world = World::new().await;
    let server = world.echo().await;
    let mut client = world.http1().await;
    let mut request = get(&world, "/upgrade");
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    request.headers_mut().insert("sec-websocket-key", "x".parse().unwrap());
    let mut response = client.send_request(request).await.unwrap();
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["upgrade"], "websocket");
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
    for _ in 0..3 {
        stream.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"hello");
        // The pace of a client: both sides have nothing to send for a while.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(server.has_secret());
}

#[tokio::test]
async fn the_end_of_the_server_is_the_end_of_the_connection() {
    let world = World::new().await;
    let server = world
        .record(
            HOST,
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        )
        .await;
    let answer = world
        .raw(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority()).as_bytes())
        .await;
    assert!(
        answer.to_lowercase().contains("connection: close") && answer.ends_with("ok"),
        "{answer}"
    );
    assert_eq!(*server.connections.lock(), 1);
}

#[tokio::test]
async fn a_response_that_is_cut_is_cut_for_the_program_too() {
    let world = World::new().await;
    let listener = world.listen(HOST).await;
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(world.certificate(HOST, (2020, 2049))));
    let is_relayed = Arc::new(Notify::new());
    let relayed = Arc::clone(&is_relayed);
    tokio::spawn(async move {
        let mut stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await;
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        relayed.notified().await;
    });
    let mut stream = world.tls(HOST, &["http/1.1"]).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    while !answer.contains("hello") {
        let mut part = [0; 4096];
        let length = stream.read(&mut part).await.unwrap();
        assert!(length > 0, "{answer}");
        answer += std::str::from_utf8(&part[..length]).unwrap();
    }
    is_relayed.notify_one();
    answer += &read_available(&mut stream).await;
    assert!(answer.contains("hello") && !answer.ends_with("0\r\n\r\n"), "{answer}");
}
