//! Connect over HTTP/1.1: from a request to a message, and from an answer or an error back.

mod compression;

use std::cell::Cell;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::agent::{OUTPUT_HEADER, UNTIL_EXIT};
use protocol::connect::{self, Code, Codec, Error, Message};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::http::{self as answers, Body, header_text};
use super::messages::{MESSAGE_LIMIT, MessageMemory};
use crate::caller::Caller;
pub(crate) use compression::Writer;
use compression::{STREAM, UNARY};

const TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");
const VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const KEEPALIVE: HeaderName = HeaderName::from_static("keepalive-ping-interval");
const OUTPUT: HeaderName = HeaderName::from_static(OUTPUT_HEADER);
/// Used when the client names no interval, or none that makes sense.
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

/// What a method gets besides its message.
pub(crate) struct Call {
    pub(crate) caller: Caller,
    /// When the client stops waiting.
    pub(crate) deadline: Option<Instant>,
    /// How long a stream may be silent.
    pub(crate) keepalive: Duration,
    /// Whether a process ends with its exit, and not with its output.
    pub(crate) until_exit: bool,
    /// The request's share of the memory for messages, for methods that keep the message.
    share: Cell<Option<OwnedSemaphorePermit>>,
}

impl Call {
    /// Hands over the memory share; it is given back when the result is dropped.
    pub(crate) fn take_share(&self) -> Option<OwnedSemaphorePermit> {
        self.share.take()
    }
}

/// The unary form of an error.
pub(crate) fn unary_error(error: &Error) -> Response<Body> {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = answers::response(status, "application/json", error.to_json());
    UNARY.advertise(response.headers_mut());
    response
}

/// The form of an error that fits the request's content type.
pub(crate) fn error_for(headers: &HeaderMap, error: &Error) -> Response<Body> {
    match Codec::of_stream(header_text(headers, header::CONTENT_TYPE).unwrap_or_default()) {
        Some(codec) => {
            let end = connect::end_of_stream(Some(error));
            let mut response = answers::response(StatusCode::OK, codec.stream_content_type(), end);
            STREAM.advertise(response.headers_mut());
            response
        }
        None => unary_error(error),
    }
}

/// What serves methods: the memory for their messages, and tasks that outlive a request.
#[derive(Debug, Clone)]
pub(crate) struct Rpc {
    memory: MessageMemory,
    tasks: TaskTracker,
}

impl Rpc {
    pub(crate) fn new(memory: MessageMemory, tasks: TaskTracker) -> Self {
        Self { memory, tasks }
    }

    /// Serves a unary method.
    pub(crate) async fn unary<I: Message, O: Message>(
        &self,
        caller: Caller,
        request: Request<Incoming>,
        method: impl AsyncFnOnce(&Call, I) -> Result<O, Error>,
    ) -> Response<Body> {
        let Some(codec) = accepted(&request, Codec::of_unary) else {
            return refuse(&request, "application/json, application/proto");
        };
        let compress = UNARY.answer(request.headers());
        let work = async {
            check_version(request.headers())?;
            let compressed = UNARY.request(request.headers())?;
            let (call, deadline) = call(caller, request.headers())?;
            let work = async {
                let mut message = self.memory.read(request.into_body()).await?;
                if compressed {
                    message = compression::decompress(&self.memory, message.bytes).await?;
                }
                call.share.set(Some(message.share));
                let input = codec.decode(&message.bytes)?;
                method(&call, input).await
            };
            in_time(deadline, work).await
        };
        match work.await {
            Ok(output) => {
                let content = codec.encode(&output);
                drop(output);
                let mut response = answers::response(StatusCode::OK, codec.unary_content_type(), content);
                UNARY.advertise(response.headers_mut());
                if compress {
                    compression::compress(response).await
                } else {
                    response
                }
            }
            Err(error) => unary_error(&error),
        }
    }

    /// Serves a method that answers with a stream of envelopes, which the method's result writes itself in the way that
    /// it is given.
    pub(crate) async fn stream<I: Message, S: Stream<Item = io::Result<Bytes>> + 'static>(
        &self,
        caller: Caller,
        request: Request<Incoming>,
        method: impl AsyncFnOnce(&Call, Writer, I) -> Result<S, Error>,
    ) -> Response<Body> {
        let Some(codec) = accepted(&request, Codec::of_stream) else {
            return refuse(&request, "application/connect+json, application/connect+proto");
        };
        let headers = request.headers().clone();
        let gzip = STREAM.answer(&headers);
        let work = async {
            check_version(&headers)?;
            let compressible = STREAM.request(&headers)?;
            let (call, deadline) = call(caller, &headers)?;
            let work = async {
                let mut message = self.memory.read(request.into_body()).await?;
                let (flags, content) = connect::only_envelope(message.bytes, MESSAGE_LIMIT)?;
                message.bytes = content;
                if connect::is_compressed(flags, compressible)? {
                    message = compression::decompress(&self.memory, message.bytes).await?;
                }
                call.share.set(Some(message.share));
                let input = codec.decode(&message.bytes)?;
                method(&call, Writer { codec, gzip }, input).await
            };
            in_time(deadline, work).await
        };
        match work.await {
            Ok(stream) => {
                let mut response = Response::new(Body::Stream {
                    stream: Box::pin(stream),
                    length: None,
                });
                let content_type = HeaderValue::from_static(codec.stream_content_type());
                let answer = response.headers_mut();
                answer.insert(header::CONTENT_TYPE, content_type);
                STREAM.advertise(answer);
                if gzip {
                    STREAM.declare(answer);
                }
                response
            }
            Err(error) => error_for(&headers, &error),
        }
    }

    /// Serves a method whose request is a stream of messages, and whose answer is one.
    pub(crate) async fn client_stream<O: Message>(
        &self,
        caller: Caller,
        request: Request<Incoming>,
        method: impl AsyncFnOnce(&Call, &mut Inbox) -> Result<O, Error>,
    ) -> Response<Body> {
        let Some(codec) = accepted(&request, Codec::of_stream) else {
            return refuse(&request, "application/connect+json, application/connect+proto");
        };
        let (head, body) = request.into_parts();
        let mut inbox = match Inbox::new(&self.memory, codec, body) {
            Ok(inbox) => inbox,
            Err(error) => return error_for(&head.headers, &error),
        };
        let work = async {
            check_version(&head.headers)?;
            inbox.compressible = STREAM.request(&head.headers)?;
            let (call, deadline) = call(caller, &head.headers)?;
            in_time(deadline, method(&call, &mut inbox)).await
        };
        match work.await {
            Ok(output) => {
                let answer = [codec.envelope(&output), connect::end_of_stream(None)].concat();
                let mut response = answers::response(StatusCode::OK, codec.stream_content_type(), answer);
                STREAM.advertise(response.headers_mut());
                response
            }
            Err(error) => {
                // The answer goes out at once, but a connection that is closed on a client which is still sending is
                // reset, and the answer with it.
                self.tasks.spawn_local(answers::read_on(inbox.body));
                error_for(&head.headers, &error)
            }
        }
    }
}

/// The messages of a request, one at a time: the next is not read from the socket before it is asked for.
pub(crate) struct Inbox {
    memory: MessageMemory,
    codec: Codec,
    /// Whether messages may be in gzip.
    compressible: bool,
    body: Incoming,
    buffer: BytesMut,
    /// As much as is in the buffer.
    share: OwnedSemaphorePermit,
}

/// A message out of an [`Inbox`].
pub(crate) struct Received<I> {
    pub(crate) message: I,
    /// Its share of the memory for messages.
    pub(crate) _share: Option<OwnedSemaphorePermit>,
}

impl Inbox {
    fn new(memory: &MessageMemory, codec: Codec, body: Incoming) -> Result<Self, Error> {
        Ok(Self {
            share: memory.reserve(0)?,
            memory: memory.clone(),
            codec,
            compressible: false,
            body,
            buffer: BytesMut::new(),
        })
    }

    /// The next message; `None` at the end of the request.
    ///
    /// # Errors
    /// `unknown` when the connection or the request ends within a message, and those of reading one.
    pub(crate) async fn next<I: Message>(&mut self) -> Result<Option<Received<I>>, Error> {
        /// Behind a longer message, what else is in the buffer is moved out of its memory.
        const LONG: usize = 64 * 1024;
        loop {
            if let Some((flags, bytes)) = connect::take_envelope(&mut self.buffer, MESSAGE_LIMIT)? {
                let compressed = connect::is_compressed(flags, self.compressible)?;
                let mut share = self.share.split(connect::ENVELOPE_HEADER + bytes.len());
                if bytes.len() > LONG || self.buffer.is_empty() {
                    self.buffer = BytesMut::from(&self.buffer[..]);
                }
                let mut bytes = bytes;
                if compressed {
                    let decompressed = compression::decompress(&self.memory, bytes).await?;
                    (bytes, share) = (decompressed.bytes, Some(decompressed.share));
                }
                let message = self.codec.decode(&bytes)?;
                return Ok(Some(Received { message, _share: share }));
            }
            let broken = |reason: &str| Error::new(Code::Unknown, format!("error streaming input: {reason}"));
            match self.body.frame().await {
                None if self.buffer.is_empty() => return Ok(None),
                None => {
                    return Err(broken(
                        "protocol error: incomplete envelope: unexpected end of the body",
                    ));
                }
                Some(Err(error)) => return Err(broken(&error.to_string())),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    self.share.merge(self.memory.reserve(data.len())?);
                    self.buffer.extend_from_slice(&data);
                }
            }
        }
    }
}

/// The error of a call whose client stopped waiting.
pub(crate) fn late() -> Error {
    Error::new(Code::DeadlineExceeded, "context deadline exceeded")
}

/// Does some work, unless the client stops waiting before it is done.
async fn in_time<T>(deadline: Option<Instant>, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline, work)
            .await
            .unwrap_or_else(|_| Err(late())),
    }
}

fn accepted<B>(request: &Request<B>, codec: impl Fn(&str) -> Option<Codec>) -> Option<Codec> {
    if request.method() != Method::POST {
        return None;
    }
    codec(header_text(request.headers(), header::CONTENT_TYPE)?)
}

/// The answer to a request that no codec can read.
fn refuse<B>(request: &Request<B>, types: &'static str) -> Response<Body> {
    let (status, name, value) = if request.method() == Method::POST {
        (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            HeaderName::from_static("accept-post"),
            types,
        )
    } else {
        (StatusCode::METHOD_NOT_ALLOWED, header::ALLOW, "POST")
    };
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = status;
    response.headers_mut().insert(name, HeaderValue::from_static(value));
    response
}

fn check_version(headers: &HeaderMap) -> Result<(), Error> {
    match headers.get(VERSION) {
        Some(version) if version != "1" => {
            let message = "connect-protocol-version must be \"1\"";
            Err(Error::new(Code::InvalidArgument, message))
        }
        _ => Ok(()),
    }
}

fn call(caller: Caller, headers: &HeaderMap) -> Result<(Call, Option<Instant>), Error> {
    let timeout = match headers.get(TIMEOUT) {
        // Something unreadable is as invalid as something that is not a number.
        Some(value) => connect::timeout(Some(value.to_str().unwrap_or("?")))?,
        None => None,
    };
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let seconds = header_text(headers, KEEPALIVE).and_then(|text| text.parse::<u32>().ok());
    let keepalive = match seconds {
        None | Some(0) => DEFAULT_KEEPALIVE,
        Some(seconds) => Duration::from_secs(u64::from(seconds)),
    };
    Ok((
        Call {
            caller,
            deadline,
            keepalive,
            until_exit: header_text(headers, OUTPUT) == Some(UNTIL_EXIT),
            share: Cell::new(None),
        },
        deadline,
    ))
}
