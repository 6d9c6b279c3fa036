//! A plain HTTP client, and Connect on top of it.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use protocol::connect::{self, Codec, EndOfStream, Error, FLAG_END, Message};
use protocol::process::{ProcessEvent, StreamResponse};
use tokio::io::{AsyncRead, AsyncWrite};

pub(crate) type Body = BoxBody<Bytes, std::io::Error>;

/// One connection.
pub(crate) struct Client {
    sender: SendRequest<Body>,
    /// Sent with every request.
    pub(crate) headers: HeaderMap,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

impl Client {
    pub(crate) async fn new(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self {
            sender,
            headers: HeaderMap::new(),
        }
    }

    /// Adds a header to every request.
    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.insert(name, value.parse().unwrap());
        self
    }

    /// Sends requests as this user of the sandbox.
    pub(crate) fn user(self, name: &str) -> Self {
        use base64::Engine;
        let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{name}:"));
        self.with("authorization", &format!("Basic {encoded}"))
    }

    pub(crate) async fn request(
        &mut self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Body,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder().method(method).uri(path).body(body).unwrap();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert("host", "sandbox".parse().unwrap());
        if !content_type.is_empty() {
            request
                .headers_mut()
                .insert("content-type", content_type.parse().unwrap());
        }
        self.sender.ready().await.unwrap();
        self.sender.send_request(request).await.unwrap()
    }

    pub(crate) async fn send(&mut self, method: Method, path: &str, content_type: &str, body: Body) -> Answer {
        let response = self.request(method, path, content_type, body).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Answer {
        self.send(Method::GET, path, "", full("")).await
    }

    pub(crate) async fn post(&mut self, path: &str, body: &str) -> Answer {
        self.send(Method::POST, path, "application/json", full(body.to_owned()))
            .await
    }

    /// A unary call of the process service.
    pub(crate) async fn unary<O: Message>(
        &mut self,
        codec: Codec,
        method: &str,
        message: &impl Message,
    ) -> Result<O, Error> {
        self.call(codec, &format!("/process.Process/{method}"), message).await
    }

    /// A unary call of any service.
    pub(crate) async fn call<O: Message>(
        &mut self,
        codec: Codec,
        path: &str,
        message: &impl Message,
    ) -> Result<O, Error> {
        let body = full(codec.encode(message));
        let answer = self.send(Method::POST, path, codec.unary_content_type(), body).await;
        if answer.status == 200 {
            assert_eq!(answer.header("content-type"), codec.unary_content_type());
            return Ok(codec.decode(&answer.body).unwrap());
        }
        assert_eq!(answer.header("content-type"), "application/json");
        let error: Error = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(error.code.http_status(), answer.status);
        Err(error)
    }

    /// A streaming call of the process service. The client is of no other use until the stream ended.
    pub(crate) async fn stream(&mut self, codec: Codec, method: &str, message: &impl Message) -> Events {
        self.raw_stream(codec, method, codec.envelope(message)).await
    }

    /// A streaming call with a body of any bytes.
    pub(crate) async fn raw_stream(&mut self, codec: Codec, method: &str, body: impl Into<Bytes>) -> Events {
        let path = format!("/process.Process/{method}");
        let response = self
            .request(Method::POST, &path, codec.stream_content_type(), full(body))
            .await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], codec.stream_content_type());
        Events {
            codec,
            body: response.into_body(),
            buffer: BytesMut::new(),
        }
    }
}

/// The answer to a streaming call.
pub(crate) struct Events {
    codec: Codec,
    body: Incoming,
    buffer: BytesMut,
}

impl Events {
    /// The next event, or how the stream ended.
    pub(crate) async fn next(&mut self) -> Result<ProcessEvent, EndOfStream> {
        loop {
            if let Some((flags, message)) = connect::take_envelope(&mut self.buffer, 1 << 24).unwrap() {
                if flags & FLAG_END == 0 {
                    let response: StreamResponse = self.codec.decode(&message).unwrap();
                    return Ok(response.event.unwrap());
                }
                assert!(self.buffer.is_empty());
                return Err(serde_json::from_slice(&message).unwrap());
            }
            let frame = self
                .body
                .frame()
                .await
                .expect("the stream ended without an end")
                .unwrap();
            self.buffer.extend_from_slice(&frame.into_data().unwrap());
        }
    }

    /// The start event's pid.
    pub(crate) async fn started(&mut self) -> u32 {
        self.next().await.unwrap().start.expect("start comes first").pid
    }

    /// All the rest, in the order of each kind.
    pub(crate) async fn rest(mut self) -> Rest {
        let mut rest = Rest::default();
        loop {
            match self.next().await {
                Ok(event) => {
                    assert!(rest.end.is_none(), "nothing follows the end");
                    if let Some(data) = event.data {
                        rest.stdout.extend_from_slice(&data.stdout.unwrap_or_default());
                        rest.stderr.extend_from_slice(&data.stderr.unwrap_or_default());
                        rest.pty.extend_from_slice(&data.pty.unwrap_or_default());
                    }
                    rest.keepalives += usize::from(event.keepalive.is_some());
                    rest.end = event.end;
                }
                Err(end) => {
                    rest.error = end.error;
                    return rest;
                }
            }
        }
    }

    /// How the stream failed, when it has no event at all.
    pub(crate) async fn failed(mut self) -> Error {
        self.next().await.unwrap_err().error.expect("an error")
    }

    /// Collects output until this text has been seen.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            let data = self.next().await.expect("more output").data.unwrap_or_default();
            for bytes in [data.stdout, data.stderr, data.pty].into_iter().flatten() {
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
        seen
    }
}

/// What a stream held after its start.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) keepalives: usize,
    pub(crate) end: Option<protocol::process::EndEvent>,
    pub(crate) error: Option<Error>,
}

impl Rest {
    pub(crate) fn out(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    pub(crate) fn err(&self) -> &str {
        std::str::from_utf8(&self.stderr).unwrap()
    }

    /// Exit code, and how the end is described.
    pub(crate) fn exit(&self) -> (i32, bool, &str, Option<&str>) {
        assert_eq!(self.error, None);
        let end = self.end.as_ref().expect("an end");
        (end.exit_code, end.exited, &end.status, end.error.as_deref())
    }
}
