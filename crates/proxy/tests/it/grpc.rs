//! Calls of gRPC, forwarded over HTTP/2 to a server inside that speaks nothing else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

use crate::support::{ChannelBody, Front, ID, Wire, front, front_limited, h2_client, h2_request, origin, within};

/// A server that sends back what it receives, with the number of bytes in the trailers. The number is that of its open
/// connections.
async fn echo() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    let open = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&open);
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let _ = builder.serve_connection(TokioIo::new(tcp), service_fn(serve)).await;
                count.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    (addr, open)
}

async fn serve(request: Request<Incoming>) -> Result<Response<ChannelBody>, std::convert::Infallible> {
    assert_eq!(
        request.uri().to_string(),
        format!("http://3000-{ID}.example.com/path?q=1")
    );
    assert_eq!(request.headers()["te"], "trailers");
    assert!(!request.headers().contains_key("host"), "{:?}", request.headers());
    let (parts, body) = ChannelBody::new();
    let mut received = request.into_body();
    tokio::spawn(async move {
        let mut bytes = 0;
        while let Some(Ok(frame)) = received.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if parts.send(frame).await.is_err() {
                return;
            }
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        trailers.insert("bytes", HeaderValue::from(bytes));
        let _ = parts.send(Frame::trailers(trailers)).await;
    });
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

fn call(body: ChannelBody) -> Request<ChannelBody> {
    let mut request = h2_request(Method::POST, body);
    request
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc+proto"));
    request
}

#[tokio::test]
async fn a_call_that_fails_has_its_status_in_the_head() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let guest = listener.local_addr().expect("address");
    tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.expect("a connection");
        let fail = service_fn(|_: Request<Incoming>| async {
            let mut response = Response::new(ChannelBody::empty());
            let status = HeaderValue::from_static("5");
            response.headers_mut().insert("grpc-status", status);
            Ok::<_, std::convert::Infallible>(response)
        });
        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = builder.serve_connection(TokioIo::new(tcp), fail).await;
    });
    let front = front([(3000, guest)]).await;
    let (_parts, sent) = ChannelBody::new();
    let response = within(h2_client(&front).await.send_request(call(sent))).await;
    let response = response.expect("a response");
    assert_eq!(response.headers()["grpc-status"], "5");
    // Without another frame.
    assert!(response.body().is_end_stream());
}

async fn message(body: &mut Incoming) -> Bytes {
    let frame = within(body.frame()).await.expect("a frame").expect("no error");
    frame.into_data().expect("data")
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
async fn messages_cross_both_ways_and_the_status_is_in_the_trailers() {
    let (guest, open) = echo().await;
    let front = front([(3000, guest)]).await;
    let mut client = h2_client(&front).await;
    let (parts, sent) = ChannelBody::new();
    let response = within(client.send_request(call(sent))).await.expect("a response");
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/grpc");
    let mut received = response.into_body();
    for text in ["one", "two", "three"] {
        parts.send(Frame::data(Bytes::from(text))).await.expect("taken");
        assert_eq!(message(&mut received).await, text);
    }
    drop(parts);
    let last = within(received.frame()).await.expect("a frame").expect("no error");
    let trailers = last.into_trailers().expect("trailers");
    assert_eq!(trailers["grpc-status"], "0");
    assert_eq!(trailers["bytes"], "11");
    assert!(within(received.frame()).await.is_none());
    none_open(&open).await;
}

/// A call of which one message has come back.
async fn begun(front: &Front) -> (tokio::sync::mpsc::Sender<Frame<Bytes>>, Incoming) {
    let (parts, sent) = ChannelBody::new();
    let response = within(h2_client(front).await.send_request(call(sent)))
        .await
        .expect("a response");
    let mut received = response.into_body();
    parts.send(Frame::data(Bytes::from_static(b"x"))).await.expect("taken");
    assert_eq!(message(&mut received).await, "x");
    (parts, received)
}

#[tokio::test]
async fn the_end_of_the_sandbox_resets_calls() {
    let (guest, open) = echo().await;
    let front = front([(3000, guest)]).await;
    let (_parts, mut received) = begun(&front).await;
    front.ending.cancel();
    let end = within(received.frame()).await.expect("an end");
    assert!(end.is_err(), "{end:?}");
    none_open(&open).await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_call() {
    let (guest, open) = echo().await;
    let front = front([(3000, guest)]).await;
    let call = begun(&front).await;
    assert_eq!(open.load(Ordering::SeqCst), 1);
    drop(call);
    none_open(&open).await;
}

#[tokio::test]
async fn calls_count_as_connections() {
    let (guest, open) = echo().await;
    let front = front_limited([(3000, guest)], usize::MAX, 1).await;
    let first = begun(&front).await;
    let (_parts, sent) = ChannelBody::new();
    let second = within(h2_client(&front).await.send_request(call(sent)))
        .await
        .expect("a response");
    assert_eq!(second.status(), 429);
    drop(first);
    none_open(&open).await;
    let _third = begun(&front).await;
}

#[tokio::test]
async fn a_server_that_does_not_speak_http_2_is_told_from_one_that_does() {
    for nonsense in ["HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", ""] {
        let guest = origin(move |mut wire: Wire| async move {
            wire.write(nonsense).await;
        })
        .await;
        let front = front([(3000, guest)]).await;
        let (_parts, sent) = ChannelBody::new();
        let response = within(h2_client(&front).await.send_request(call(sent)))
            .await
            .expect("a response");
        assert_eq!(response.status(), 502);
    }
}
