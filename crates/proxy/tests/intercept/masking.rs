//! Servers that show the secret to their client.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use model::injection::PathPattern;
use model::secret::Secret;

use crate::support::{BEARER, HOST, SECRET, World, rule, text};

#[tokio::test]
async fn echoed_secrets_are_hidden() {
    let world = World::new().await;
    let server = world.echo().await;
    let uri = format!("https://{}/", world.authority());
    let request = Request::get(uri)
        .header("accept-encoding", "gzip")
        .body(Full::default())
        .unwrap();
    let response = world.http2().await.send_request(request).await.unwrap();
    let header = response.headers()["x-echo"].to_str().unwrap().to_owned();
    let body = text(response).await;
    for shown in [&header, &body] {
        assert!(!shown.contains("0123456789"), "{shown}");
        assert!(shown.contains(&"*".repeat(BEARER.len())), "{shown}");
    }
    let seen = server.text();
    assert!(
        seen.contains(BEARER) && seen.contains("accept-encoding: identity"),
        "{seen}"
    );
}

#[tokio::test]
async fn encoded_secrets_are_hidden_and_lengths_stay() {
    let basic = STANDARD.encode(format!("x-access-token:{SECRET}"));
    let mut with_basic = rule(PathPattern::Any);
    with_basic.headers[0].value = Secret::new(format!("Basic {basic}"));
    let world = World::with(vec![with_basic], |_, _| {}).await;
    let shown = format!("{basic} {SECRET} {} end", STANDARD.encode(SECRET));
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nX-A: {SECRET}\r\n\r\n{shown}",
        shown.len()
    );
    world.record(HOST, Box::leak(answer.into_boxed_str())).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(body.len(), shown.len());
    assert!(body.ends_with(" end"), "{body}");
    assert!(!head.contains(SECRET) && !body.contains(SECRET), "{answer}");
    assert!(!body.contains(&STANDARD.encode(SECRET)[..8]), "{body}");
    // Of the encoded pair, the user may be left.
    assert!(!body.contains(&basic[24..36]), "{body}");
}

#[tokio::test]
async fn bodies_are_searched_up_to_a_size() {
    let world = World::with(vec![rule(PathPattern::Any)], |settings, _| settings.mask_bytes = 100).await;
    world.echo().await;
    let send = async |data: Vec<u8>| {
        let uri = format!("https://{}/stream", world.authority());
        let request = Request::post(uri).body(Full::new(Bytes::from(data))).unwrap();
        text(world.http2().await.send_request(request).await.unwrap()).await
    };
    let body = [
        vec![b'x'; 50],
        SECRET.as_bytes().to_vec(),
        vec![b'x'; 50],
        SECRET.as_bytes().to_vec(),
    ]
    .concat();
    let back = send(body.clone()).await;
    assert_eq!(back.len(), body.len());
    assert_eq!(back.matches(SECRET).count(), 1, "{back}");
    assert!(!back[..100].contains(SECRET));
}

#[tokio::test]
async fn compressed_bodies_are_untouched() {
    let world = World::new().await;
    world.echo().await;
    let uri = format!("https://{}/gzip", world.authority());
    let request = Request::get(uri).body(Full::default()).unwrap();
    let response = world.http2().await.send_request(request).await.unwrap();
    assert_eq!(response.headers()["content-encoding"], "gzip");
    // Not compressed in truth, which shows that it was not searched.
    assert!(text(response).await.contains(SECRET));
}

#[tokio::test]
async fn without_a_size_only_headers_are_searched() {
    let world = World::with(vec![rule(PathPattern::Any)], |settings, _| settings.mask_bytes = 0).await;
    let server = world.echo().await;
    let uri = format!("https://{}/", world.authority());
    let request = Request::get(uri)
        .header("accept-encoding", "br")
        .body(Full::default())
        .unwrap();
    let response = world.http2().await.send_request(request).await.unwrap();
    assert!(!response.headers()["x-echo"].to_str().unwrap().contains(SECRET));
    assert!(text(response).await.contains(SECRET));
    assert!(server.text().contains("accept-encoding: br"));
}

#[tokio::test]
async fn redirects_are_not_followed_and_hide_the_secret() {
    let world = World::new().await;
    let location = format!("https://other.example/{SECRET}");
    let answer = format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
    let other = world
        .record("other.example", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        .await;
    world.record(HOST, Box::leak(answer.into_boxed_str())).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 302"), "{answer}");
    assert!(
        answer.contains("other.example/***") && !answer.contains(SECRET),
        "{answer}"
    );
    assert_eq!(*other.connections.lock(), 0);
}

#[tokio::test]
async fn answers_do_not_lead_to_http3() {
    let world = World::new().await;
    world
        .record(
            HOST,
            "HTTP/1.1 200 OK\r\nAlt-Svc: h3=\":443\"\r\nContent-Length: 0\r\n\r\n",
        )
        .await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && !answer.to_lowercase().contains("alt-svc"),
        "{answer}"
    );
}
