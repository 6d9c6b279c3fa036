//! Servers that show the secret to their client.

use std::convert::Infallible;
use std::io::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use model::injection::PathPattern;
use model::secret::Secret;
use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;

use crate::support::{BEARER, HOST, SECRET, World, rule, text};

/// A page with the secret.
fn page() -> String {
    format!("before {SECRET} after")
}

fn hidden_page() -> String {
    format!("before {} after", "*".repeat(SECRET.len()))
}

fn encoded(coding: &str, text: &[u8]) -> Vec<u8> {
    let level = Compression::default();
    macro_rules! encode {
        ($encoder:ident) => {{
            let mut encoder = $encoder::new(Vec::new(), level);
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        }};
    }
    match coding {
        "gzip" | "x-gzip" | "GZIP" | "aws-chunked, gzip" => encode!(GzEncoder),
        "deflate" => encode!(ZlibEncoder),
        "raw" => encode!(DeflateEncoder),
        _ => text.to_vec(),
    }
}

/// Frames of a body, all of which are there.
#[derive(Debug)]
struct Frames(std::vec::IntoIter<Frame<Bytes>>);

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.next().map(Ok))
    }
}

/// A server of HTTP/1.1 and HTTP/2 whose answers a function makes of the heads of requests, which are returned.
async fn serve(
    world: &World,
    answer: impl Fn(&HeaderMap, &str) -> Response<Vec<Frame<Bytes>>> + Send + Sync + 'static,
) -> Arc<Mutex<Vec<HeaderMap>>> {
    let mut config = world.certificate(HOST, (2020, 2049));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let listener = world.listen(HOST).await;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let answer = Arc::new(answer);
    let seen: Arc<Mutex<Vec<HeaderMap>>> = Arc::default();
    let record = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, answer, record) = (acceptor.clone(), Arc::clone(&answer), Arc::clone(&record));
            tokio::spawn(async move {
                let stream = acceptor.accept(stream).await.unwrap();
                let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
                    record.lock().push(request.headers().clone());
                    let response = answer(request.headers(), request.uri().path());
                    let is_head = request.method() == http::Method::HEAD;
                    let response = response.map(|frames| Frames(if is_head { Vec::new() } else { frames }.into_iter()));
                    std::future::ready(Ok::<_, Infallible>(response))
                });
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    seen
}

/// A request over HTTP/2 or HTTP/1.1: the head of the answer, and its body and trailers, or why there is no whole body.
async fn ask(
    world: &World,
    is_http2: bool,
    request: http::request::Builder,
) -> (http::response::Parts, Result<(Vec<u8>, HeaderMap), String>) {
    let mut request = request.body(Full::default()).unwrap();
    let path = request.uri().path().to_owned();
    let response = if is_http2 {
        *request.uri_mut() = format!("https://{}{path}", world.authority()).parse().unwrap();
        world.http2().await.send_request(request).await
    } else {
        let host = HeaderValue::from_str(&world.authority()).unwrap();
        request.headers_mut().insert("host", host);
        world.http1().await.send_request(request).await
    };
    let response = match response {
        Ok(response) => response,
        // With HTTP/2, the end of a body can overtake the head.
        Err(error) => return (Response::new(()).into_parts().0, Err(format!("{error:?}"))),
    };
    let (parts, body) = response.into_parts();
    let body = body.collect().await.map_err(|error| format!("{error:?}")).map(|body| {
        let trailers = body.trailers().cloned().unwrap_or_default();
        (body.to_bytes().to_vec(), trailers)
    });
    (parts, body)
}

fn data(bytes: impl Into<Bytes>) -> Frame<Bytes> {
    Frame::data(bytes.into())
}

#[tokio::test]
async fn encoded_bodies_are_decoded_and_searched() {
    let world = World::new().await;
    serve(&world, |_, path| {
        let coding = path.trim_start_matches('/').replace('_', ", ");
        let bytes = encoded(&coding, page().as_bytes());
        let (one, two) = bytes.split_at(bytes.len() / 2);
        let frames = vec![data(one.to_vec()), data(Bytes::new()), data(two.to_vec())];
        let coding = if coding == "raw" { "deflate" } else { &coding };
        Response::builder()
            .header("content-encoding", coding)
            .header("content-length", bytes.len())
            .header("etag", "\"a\"")
            .body(frames)
            .unwrap()
    })
    .await;
    for is_http2 in [true, false] {
        for coding in ["gzip", "x-gzip", "GZIP", "aws-chunked_gzip", "deflate", "raw"] {
            let (parts, body) = ask(&world, is_http2, Request::get(format!("/{coding}"))).await;
            assert_eq!(body.unwrap().0, hidden_page().as_bytes(), "{coding} {is_http2}");
            let headers = &parts.headers;
            assert_eq!(headers["etag"], "W/\"a\"", "{coding}");
            assert!(
                !headers.contains_key("content-encoding") && !headers.contains_key("content-length"),
                "{headers:?}"
            );
        }
        // One that is not encoded passes as it is, and so does the head of one without a body.
        let (parts, body) = ask(&world, is_http2, Request::get("/identity")).await;
        assert_eq!(body.unwrap().0, hidden_page().as_bytes());
        assert_eq!(
            (&parts.headers["content-encoding"], &parts.headers["etag"]),
            (
                &HeaderValue::from_static("identity"),
                &HeaderValue::from_static("\"a\"")
            )
        );
        let (parts, body) = ask(&world, is_http2, Request::head("/gzip")).await;
        assert_eq!((parts.status, body.unwrap().0.len()), (StatusCode::OK, 0));
        assert!(!parts.headers.contains_key("content-encoding"), "{parts:?}");
    }
}

#[tokio::test]
async fn what_cannot_be_searched_is_refused() {
    let world = World::new().await;
    serve(&world, |_, path| {
        let response = Response::builder();
        let response = match path {
            "/br" => response.header("content-encoding", "br"),
            "/zstd" => response.header("content-encoding", "zstd"),
            "/two" => response.header("content-encoding", "gzip, gzip"),
            "/lines" => response
                .header("content-encoding", "gzip")
                .header("content-encoding", "br"),
            "/unknown" => response.header("content-encoding", "x-anything"),
            "/bytes" => response.header("content-encoding", HeaderValue::from_bytes(b"\xff").unwrap()),
            "/grpc" => response.header("grpc-encoding", "gzip"),
            "/part" => response.status(206).header("content-encoding", "gzip"),
            "/difference" => response.status(226).header("im", "gzip"),
            _ => response.status(404),
        };
        response.body(vec![data(page())]).unwrap()
    })
    .await;
    for is_http2 in [true, false] {
        for path in [
            "/br",
            "/zstd",
            "/two",
            "/lines",
            "/unknown",
            "/bytes",
            "/grpc",
            "/part",
            "/difference",
        ] {
            let (parts, body) = ask(&world, is_http2, Request::get(path)).await;
            let body = String::from_utf8(body.unwrap().0).unwrap();
            assert_eq!(parts.status, StatusCode::BAD_GATEWAY, "{path}");
            assert!(
                body.contains("cannot be searched") && !body.contains(SECRET),
                "{path}: {body}"
            );
        }
        let (parts, _) = ask(&world, is_http2, Request::head("/br")).await;
        assert_eq!(
            (parts.status, &parts.headers["content-encoding"]),
            (StatusCode::OK, &HeaderValue::from_static("br"))
        );
    }
}

#[tokio::test]
async fn a_transfer_coding_is_refused() {
    let world = World::new().await;
    let answer = format!(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n20\r\n{}\r\n0\r\n\r\n",
        "x".repeat(32)
    );
    world.record(HOST, Box::leak(answer.into_boxed_str())).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 502") && !answer.contains("xxx"),
        "{answer}"
    );
}

#[tokio::test]
async fn bodies_that_are_not_what_they_are_said_to_be_end_with_an_error() {
    let world = World::new().await;
    serve(&world, |_, path| {
        let whole = encoded("gzip", page().as_bytes());
        let bytes = match path {
            "/cut" => whole[..whole.len() - 3].to_vec(),
            "/plain" => page().into_bytes(),
            "/twice" => [whole.clone(), whole].concat(),
            _ => Vec::new(),
        };
        let response = Response::builder().header("content-encoding", "gzip");
        response.body(vec![data(bytes)]).unwrap()
    })
    .await;
    for is_http2 in [true, false] {
        for path in ["/cut", "/plain"] {
            let (_, body) = ask(&world, is_http2, Request::get(path)).await;
            body.expect_err(path);
        }
        let (_, body) = ask(&world, is_http2, Request::get("/twice")).await;
        assert_eq!(body.unwrap().0, hidden_page().repeat(2).as_bytes());
        let (_, body) = ask(&world, is_http2, Request::get("/empty")).await;
        assert!(body.unwrap().0.is_empty());
    }
}

/// A server that is read slowly cannot make the gateway hold what its answer grows to, and answers are limited in number.
#[tokio::test]
async fn decoding_is_bounded() {
    let world = World::new().await;
    let zeros = encoded("gzip", &vec![0; 32 << 20]);
    let length = zeros.len();
    serve(&world, move |_, _| {
        let response = Response::builder().header("content-encoding", "gzip");
        response.body(vec![data(zeros.clone())]).unwrap()
    })
    .await;
    assert!(length < 64 << 10);
    let (_, body) = ask(&world, true, Request::get("/")).await;
    assert_eq!(body.unwrap().0.len(), 32 << 20);
    let mut client = world.http2().await;
    let mut statuses = Vec::new();
    let mut unread = Vec::new();
    for _ in 0..65 {
        let request = Request::get(format!("https://{}/", world.authority()))
            .body(Full::default())
            .unwrap();
        let response = client.send_request(request).await.unwrap();
        statuses.push(response.status().as_u16());
        unread.push(response);
    }
    assert_eq!(
        (statuses[..64].iter().all(|status| *status == 200), statuses[64]),
        (true, 503),
        "{statuses:?}"
    );
}

#[tokio::test]
async fn names_of_headers_and_trailers_show_no_secret() {
    let world = World::new().await;
    serve(&world, |_, _| {
        let name = |before: &str| HeaderName::from_bytes(format!("{before}{SECRET}").as_bytes()).unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert(name("t-"), HeaderValue::from_static("1"));
        trailers.insert("t-value", HeaderValue::from_static(SECRET));
        Response::builder()
            .header(name(""), "1")
            .header(name("x-"), "1")
            .header("set-cookie", format!("a={SECRET}"))
            .header("set-cookie", "b=1")
            .header("trailer", "t-value")
            .body(vec![data(page()), Frame::trailers(trailers)])
            .unwrap()
    })
    .await;
    for is_http2 in [true, false] {
        let (parts, body) = ask(&world, is_http2, Request::get("/").header("te", "trailers")).await;
        let (body, trailers) = body.unwrap();
        let head = format!("{:?}", parts.headers);
        assert!(
            !head.contains(SECRET) && head.contains("a=***") && head.contains("b=1"),
            "{head}"
        );
        assert_eq!(body, hidden_page().as_bytes());
        let hidden = "*".repeat(SECRET.len());
        assert_eq!(trailers.len(), 1, "{trailers:?}");
        assert_eq!(trailers["t-value"], hidden.as_str());
    }
}

#[tokio::test]
async fn a_reason_and_early_heads_show_no_secret() {
    let world = World::new().await;
    let answer = format!(
        "HTTP/1.1 103 {SECRET}\r\nLink: <{SECRET}>\r\n\r\nHTTP/1.1 200 {SECRET}\r\nX-{}: 1\r\nX-{SECRET}: 1\r\nX-Left: 1\r\n\
Transfer-Encoding: chunked\r\n\r\n2;a={SECRET}\r\nok\r\n0;{SECRET}\r\nX-{SECRET}: 1\r\n\r\n",
        SECRET.to_uppercase()
    );
    world.record(HOST, Box::leak(answer.into_boxed_str())).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nTE: trailers\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("X-Left: 1") && answer.contains("ok"), "{answer}");
    assert!(!answer.to_lowercase().contains(SECRET), "{answer}");
}

#[tokio::test]
async fn only_a_whole_text_is_asked_for() {
    let world = World::with(vec![rule(PathPattern::Prefix("/with/".to_owned()))], |settings, _| {
        settings.mask_bytes = 100
    })
    .await;
    let seen = serve(&world, |_, _| Response::new(vec![data(page())])).await;
    let forms = [
        ("grpc-accept-encoding", "gzip"),
        ("connect-accept-encoding", "gzip"),
        ("a-im", "gzip"),
        ("accept-charset", "utf-16"),
    ];
    for is_http2 in [true, false] {
        for (path, ranges, stays) in [
            ("/with/", &[("range", "bytes=0-3")][..], false),
            ("/with/", &[("range", "bytes=-3")], false),
            ("/with/", &[("range", "bytes=99-")], false),
            ("/with/", &[("range", "bytes=100-200,3-4")], false),
            ("/with/", &[("range", "bytes=200-300"), ("range", "bytes=0-3")], false),
            ("/with/", &[("range", "items=200-300")], false),
            ("/with/", &[("range", "bytes= 200-")], false),
            ("/with/", &[("request-range", "bytes=0-3")], false),
            ("/with/", &[("range", "bytes=200-"), ("x-ms-range", "bytes=0-3")], false),
            // What is beyond the searched bytes is not hidden in the whole text either.
            ("/with/", &[("range", "bytes=100-")], true),
            ("/with/", &[("range", "bytes=200-300")], true),
            ("/without", &[("range", "bytes=0-3")], true),
        ] {
            let mut request = Request::get(path).header("if-range", "\"a\"");
            for (name, value) in ranges.iter().chain(&forms) {
                request = request.header(*name, *value);
            }
            ask(&world, is_http2, request).await.1.unwrap();
            let seen = seen.lock().pop().unwrap();
            let is_there = ranges.iter().any(|(name, _)| seen.contains_key(*name));
            assert_eq!(
                (is_there, seen.contains_key("if-range")),
                (stays, stays),
                "{path} {ranges:?}: {seen:?}"
            );
            for (name, _) in forms {
                assert_eq!(seen.contains_key(name), path == "/without", "{name}");
            }
        }
    }
}

#[tokio::test]
async fn answers_without_a_rule_are_untouched() {
    let world = World::with(vec![rule(PathPattern::Prefix("/with/".to_owned()))], |_, _| {}).await;
    serve(&world, |_, _| {
        let response = Response::builder()
            .header("content-encoding", "gzip")
            .header("etag", "\"a\"");
        response.body(vec![data(encoded("gzip", page().as_bytes()))]).unwrap()
    })
    .await;
    for is_http2 in [true, false] {
        let (parts, body) = ask(&world, is_http2, Request::get("/without")).await;
        assert_eq!(body.unwrap().0, encoded("gzip", page().as_bytes()));
        assert_eq!(parts.headers["etag"], "\"a\"");
        assert_eq!(parts.headers["content-encoding"], "gzip");
    }
}

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
