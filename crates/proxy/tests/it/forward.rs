//! What a server in the sandbox gets to see of a request, and a client of a response.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use protocol::agent;
use proxy::ingress::Access;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::clock::Clock;
use super::support::{
    ChannelBody, ID, Wire, exchange, front, front_with, get, h2_client, h2_request, http_origin, origin, within,
};

/// Answers with the request as it arrived: target, headers, then the body.
async fn mirror(request: Request<Incoming>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let mut text = format!("{} {} {:?}\n", parts.method, parts.uri, parts.version);
    for (name, value) in &parts.headers {
        text.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
    }
    let body = body.collect().await.expect("a body").to_bytes();
    text.push_str(&format!("body {:?}\n", String::from_utf8_lossy(&body)));
    Response::new(Full::from(text))
}

#[tokio::test]
async fn the_head_crosses_without_what_belongs_to_one_connection() {
    let front = front([(3000, http_origin(mirror).await)]).await;
    let text = exchange(
        front.addr,
        &format!(
            "GET /a%2Fb//c?q=1&q=%zz HTTP/1.1\r\nHost: 3000-{ID}.example.com:99\r\nConnection: close, X-Hop\r\n\
             X-Hop: 1\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nTE: gzip\r\nProxy-Authorization: x\r\n\
             X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Anything: x\r\nForwarded: for=6.6.6.6\r\nX-Real: kept\r\n\
             Cookie: a=1\r\nCookie: b=2\r\nX-Access-Token: t\r\n\r\n"
        ),
    )
    .await;
    assert!(text.contains("GET /a%2Fb//c?q=1&q=%zz HTTP/1.1\n"), "{text}");
    for kept in [
        format!("host: 3000-{ID}.example.com:99\n"),
        "x-real: kept\n".to_owned(),
        "cookie: a=1\ncookie: b=2\n".to_owned(),
        "x-access-token: t\n".to_owned(),
    ] {
        assert!(text.contains(&kept), "{kept}: {text}");
    }
    let (_, text) = text.split_once("GET /a").expect("the request");
    for dropped in [
        // The connection into the sandbox is kept, whatever becomes of the client's.
        "\nconnection:",
        "x-hop",
        "keep-alive",
        "proxy-",
        "\nte:",
        "forwarded",
        "6.6.6.6",
        "transfer-encoding",
    ] {
        assert!(!text.contains(dropped), "{dropped}: {text}");
    }
}

#[tokio::test]
async fn names_of_headers_keep_their_case() {
    let server = origin(|mut wire| async move {
        while let Some(head) = wire.next_head().await {
            let head = head.trim_end().replace("\r\n", "|");
            wire.write(&format!(
                "HTTP/1.1 200 OK\r\ncontent-LENGTH: {}\r\nETag: 1\r\nx-lower: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\n{head}",
                head.len()
            ))
            .await;
        }
    })
    .await;
    let front = front([(3000, server)]).await;
    // The second one on a connection that is kept.
    for _ in 0..2 {
        let text = exchange(
            front.addr,
            &format!(
                "GET / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close\r\nX-API-key: 1\r\nx-lower: 1\r\nSOAPAction: a\r\n\
                 x-multi: 1\r\nX-Multi: 2\r\n\r\n"
            ),
        )
        .await;
        for name in [
            "|Host: ",
            "|X-API-key: 1",
            "|x-lower: 1",
            "|SOAPAction: a",
            "|x-multi: 1|X-Multi: 2",
            "\r\ncontent-LENGTH: ",
            "\r\nETag: 1",
            "\r\nx-lower: 1",
            "\r\nSet-Cookie: a\r\nset-cookie: b",
        ] {
            assert!(text.contains(name), "{name}: {text}");
        }
    }
    // HTTP/2 has no case.
    let mut client = h2_client(&front).await;
    let mut request = h2_request(Method::GET, ChannelBody::empty());
    request.headers_mut().insert("x-api-key", "1".parse().expect("a value"));
    let response = within(client.send_request(request)).await.expect("a response");
    let body = within(response.into_body().collect()).await.expect("a body").to_bytes();
    let text = String::from_utf8_lossy(&body);
    assert!(
        text.contains("|X-Api-Key: 1") && text.contains("|Host: ") && text.contains("|Te: trailers"),
        "{text}"
    );
}

#[tokio::test]
async fn the_host_is_masked_except_on_the_agents_port() {
    let mirror = http_origin(mirror).await;
    let access = Access {
        mask_host: "localhost:${PORT}".parse().ok(),
        ..Access::default()
    };
    let front = front_with([(3000, mirror), (agent::PORT, mirror)], access).await;
    let request = |port: u16| {
        format!(
            "GET / HTTP/1.1\r\nHost: {port}-{ID}.x:8\r\nConnection: close, x-forwarded-host\r\n\
             X-Forwarded-Host: forged\r\n\r\n"
        )
    };
    let text = exchange(front.addr, &request(3000)).await;
    let forwarded = |host: &str| format!("x-forwarded-host: {host}\n");
    assert!(text.contains("\nhost: localhost:3000\n"), "{text}");
    assert!(text.contains(&forwarded(&format!("3000-{ID}.x:8"))), "{text}");
    let text = exchange(front.addr, &request(agent::PORT)).await;
    assert!(text.contains(&format!("\nhost: {}-{ID}.x:8\n", agent::PORT)), "{text}");
    assert!(!text.contains("x-forwarded-host"), "{text}");

    let mut client = h2_client(&front).await;
    let request = h2_request(Method::GET, ChannelBody::empty());
    let response = within(client.send_request(request)).await.expect("a response");
    let body = within(response.into_body().collect()).await.expect("a body").to_bytes();
    let text = String::from_utf8_lossy(&body);
    assert!(text.contains("\nhost: localhost:3000\n"), "{text}");
    assert!(text.contains(&forwarded(&format!("3000-{ID}.example.com"))), "{text}");
    assert_eq!(text.matches("host: ").count(), 2, "{text}");
}

#[tokio::test]
async fn the_token_of_a_sandbox_reaches_its_agent_and_its_code_interpreter_alone() {
    let mirror = http_origin(mirror).await;
    let access = Access {
        access_token: Some("own".to_owned().into()),
        ..Access::default()
    };
    let ports = [(3000, false), (49_998, false), (49_999, true), (agent::PORT, true)];
    let front = front_with(ports.map(|(port, _)| (port, mirror)), access).await;
    for (port, arrives) in ports {
        let text = exchange(
            front.addr,
            &format!(
                "GET / HTTP/1.1\r\nHost: {port}-{ID}.x\r\nConnection: close\r\n\
                 X-Access-Token: own\r\nX-Access-Token: another\r\n\r\n"
            ),
        )
        .await;
        assert_eq!(text.contains("x-access-token: own\n"), arrives, "{port}: {text}");
        // A name that programs use for tokens of their own.
        assert!(text.contains("x-access-token: another\n"), "{port}: {text}");
    }
}

#[tokio::test]
async fn a_client_cannot_have_framing_or_host_removed() {
    let front = front([(3000, http_origin(mirror).await)]).await;
    let text = exchange(
        front.addr,
        &format!(
            "POST / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close, content-length, host\r\n\
             Content-Length: 2\r\n\r\nok"
        ),
    )
    .await;
    assert!(text.contains(&format!("host: 3000-{ID}.x\n")), "{text}");
    assert!(
        text.contains("content-length: 2\n") && text.contains("body \"ok\""),
        "{text}"
    );
}

#[tokio::test]
async fn bodies_of_every_framing_arrive_whole() {
    let front = front([(3000, http_origin(mirror).await)]).await;
    let send = async |head: &str, body: &str| {
        exchange(
            front.addr,
            &format!("{head} HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close\r\n{body}"),
        )
        .await
    };
    let chunked = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
    for method in ["POST", "GET", "DELETE", "PROPFIND"] {
        let text = send(&format!("{method} /"), chunked).await;
        assert!(text.contains("body \"abcde\""), "{method}: {text}");
        let text = send(&format!("{method} /"), "Content-Length: 3\r\n\r\nabc").await;
        assert!(
            text.contains("body \"abc\"") && text.contains("content-length: 3"),
            "{method}: {text}"
        );
    }
    let text = send("POST /", "Content-Length: 0\r\n\r\n").await;
    assert!(
        text.contains("content-length: 0") && text.contains("body \"\""),
        "{text}"
    );
    let text = send("GET /", "\r\n").await;
    assert!(!text.contains("transfer-encoding: chunked\n"), "{text}");
}

#[tokio::test]
async fn heads_without_bodies_keep_their_length_and_the_connection() {
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        let answer = match head.split(' ').nth(1) {
            Some("/304") => "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nKeep-Alive: 3\r\n\r\n",
            Some("/204") => "HTTP/1.1 204 No Content\r\n\r\n",
            Some("/early") => {
                "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            }
            _ => "HTTP/1.1 200 Fine\r\nContent-Length: 12345\r\nX: 1\r\n\r\n",
        };
        wire.write(answer).await;
        wire.rest().await.1.ok();
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    for (request, status, contains) in [
        ("HEAD /", "200", "Content-Length: 12345\r\n"),
        ("GET /304", "304", ""),
        ("GET /204", "204", ""),
        ("GET /early", "200", "Content-Length: 2\r\n"),
    ] {
        wire.write(&format!("{request} HTTP/1.1\r\nHost: 3000-{ID}.x\r\n\r\n"))
            .await;
        let head = wire.head().await;
        assert_eq!(&head[9..12], status, "{head}");
        assert!(head.contains(contains), "{head}");
        assert!(!head.to_lowercase().contains("keep-alive"), "{head}");
        if request == "GET /early" {
            wire.until("ok").await;
        }
    }
}

#[tokio::test]
async fn an_http_1_0_client_without_a_host_is_served_by_headers() {
    let front = front([(3000, http_origin(mirror).await)]).await;
    let text = exchange(
        front.addr,
        &format!("GET / HTTP/1.0\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n"),
    )
    .await;
    assert!(
        text.contains("GET / HTTP/1.1\n") && text.contains("host: localhost\n"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn requests_share_a_connection_that_the_server_keeps() {
    let _clock = Clock::hold();
    let front = front([(3000, http_origin(mirror).await)]).await;
    let mut wire = Wire::connect(front.addr).await;
    for _ in 0..3 {
        wire.write(&format!("GET / HTTP/1.1\r\nHost: 3000-{ID}.x\r\n\r\n"))
            .await;
        wire.until("body \"\"\n").await;
    }
    assert_eq!(front.node.dials.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_closed_port_is_tried_again_for_a_moment() {
    let guest = http_origin(mirror).await;
    for (closed_for, dials, waited_ms, status) in [
        (0, 1, 0, "200"),
        (1, 2, 25, "200"),
        (2, 3, 100, "200"),
        (3, 3, 100, "502"),
    ] {
        let front = front([(3000, guest)]).await;
        front.node.closed_for.store(closed_for, Ordering::SeqCst);
        let begun = Instant::now();
        let text = exchange(front.addr, &get(3000)).await;
        assert_eq!(&text[9..12], status, "{text}");
        assert_eq!(front.node.dials.load(Ordering::SeqCst), dials);
        let took_ms = begun.elapsed().as_millis();
        assert!((waited_ms..waited_ms + 100).contains(&took_ms), "{took_ms} ms");
    }
}

#[tokio::test]
async fn a_gone_sandbox_is_not_tried_again() {
    let front = front([]).await;
    let text = exchange(front.addr, &get(3000).replace(ID, "igone")).await;
    assert!(text.contains("was not found"), "{text}");
    assert_eq!(front.node.dials.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_body_waits_for_the_servers_word_when_the_client_does() {
    let _clock = Clock::hold();
    let (tell, mut told) = mpsc::channel(4);
    let guest = origin(move |mut wire| {
        let tell = tell.clone();
        async move {
            let head = wire.head().await;
            assert!(head.contains("Expect: 100-continue"), "{head}");
            if head.starts_with("POST /refuse") {
                wire.write("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")
                    .await;
                let (body, _) = wire.rest().await;
                tell.send(body).await.expect("listened to");
                return;
            }
            wire.write("HTTP/1.1 100 Continue\r\n\r\n").await;
            let body = wire.until("hello").await;
            tell.send(body).await.expect("listened to");
            wire.write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        }
    })
    .await;
    let front = front([(3000, guest)]).await;
    let head = |path| {
        format!("POST {path} HTTP/1.1\r\nHost: 3000-{ID}.x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    };

    let mut wire = Wire::connect(front.addr).await;
    wire.write(&head("/take")).await;
    assert!(wire.head().await.starts_with("HTTP/1.1 100 "));
    wire.write("hello").await;
    assert!(wire.head().await.starts_with("HTTP/1.1 200 "));
    assert_eq!(within(told.recv()).await.as_deref(), Some("hello"));

    let mut wire = Wire::connect(front.addr).await;
    wire.write(&head("/refuse")).await;
    assert!(wire.head().await.starts_with("HTTP/1.1 417 "));
    assert_eq!(within(told.recv()).await.as_deref(), Some(""));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ignores_the_expectation_gets_the_body_after_a_second() {
    let guest = origin(|mut wire| async move {
        wire.head().await;
        wire.until("hello").await;
        wire.write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!(
        "PUT / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    ))
    .await;
    assert!(wire.head().await.starts_with("HTTP/1.1 100 "));
    wire.write("hello").await;
    assert!(wire.head().await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn two_lengths_are_made_one_on_the_way_in() {
    let front = front([(3000, http_origin(mirror).await)]).await;
    for lengths in [
        "Content-Length: 60\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 60",
    ] {
        let mut wire = Wire::connect(front.addr).await;
        wire.write(&format!(
            "POST / HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close\r\n{lengths}\r\n\r\n2\r\nok\r\n0\r\n\r\n\
             GET /smuggled HTTP/1.1\r\nHost: 3000-{ID}.x\r\n\r\n"
        ))
        .await;
        let (text, _) = wire.rest().await;
        let refused = text.starts_with("HTTP/1.1 400 ");
        let one = text.contains("body \"ok\"") && !text.contains("content-length: 60");
        assert!(refused || one, "{text}");
        assert!(!text.contains("smuggled"), "{text}");
    }
}

#[tokio::test]
async fn a_server_inside_cannot_break_the_proxy() {
    const ANSWERS: [&str; 14] = [
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 999 What\r\nConnection: content-length, date\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.0 200 OK\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more than was said",
    ];
    let guest = origin(|mut wire| async move {
        let head = wire.head().await;
        let path = head.split(' ').nth(1).expect("a path");
        let answer: usize = path[1..].parse().expect("a number");
        wire.write(ANSWERS[answer]).await;
    })
    .await;
    let front = front([(3000, guest)]).await;
    for method in ["GET", "HEAD"] {
        for (n, answer) in ANSWERS.iter().enumerate() {
            let mut wire = Wire::connect(front.addr).await;
            wire.write(&format!(
                "{method} /{n} HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close\r\n\r\n"
            ))
            .await;
            let (text, end) = wire.rest().await;
            let lengths = text.to_lowercase().matches("content-length:").count();
            let chunked = text.to_lowercase().matches("transfer-encoding: chunked").count();
            assert!(
                text.starts_with("HTTP/1.1 ") || (text.is_empty() && end.is_err()),
                "{method} {answer:?}: {text:?}"
            );
            assert!(lengths + chunked <= 1, "{method} {answer:?}: {text:?}");
            assert!(!text.contains("more than was said"), "{text:?}");
        }
    }
}
