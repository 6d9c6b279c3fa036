//! JSON bodies for error responses to malformed HTTP/1 requests.
//!
//! The HTTP/1 library itself answers a request head that it cannot parse, with a status and no body, before any service
//! is called. Clients of the API rely on a JSON body with every error, so this stream wraps the socket and adds a body
//! to such a response. It changes nothing else: the bytes must be exactly what the library writes, while no request is
//! in progress and the previous response has been flushed.
//!
//! HTTP/2 has no such responses: a malformed request ends its stream or the connection with an error code, except that
//! a header list that is too large is answered 431 without a body.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::{Buf as _, Bytes};
use http::{Response, StatusCode};
use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connections::{Connection, RequestInProgress};
use crate::api;

/// No request is in progress, and everything written has been flushed.
const IDLE: u8 = 0;
/// A request is in progress, or the connection has switched to another protocol.
const ANSWERING: u8 = 1;
/// The response is complete, but may not have been flushed yet.
const ANSWERED: u8 = 2;

/// The state of the requests of a connection, shared by its stream and its service.
#[derive(Debug, Clone, Default)]
pub(super) struct ResponseState(Arc<AtomicU8>);

impl ResponseState {
    /// Called when a request begins.
    pub(super) fn begin(&self) {
        self.0.store(ANSWERING, Ordering::Release);
    }

    /// Tracks a response to its end. After one that switches protocols, there are no more requests.
    pub(super) fn track(&self, response: Response<Body>, in_progress: RequestInProgress) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            // The other protocol counts as a request in progress until the connection is closed.
            in_progress.hold_until_close();
            return response;
        }
        let state = self.clone();
        response.map(|body| {
            Body::new(TrackedBody {
                body,
                state,
                _in_progress: in_progress,
            })
        })
    }

    fn flushed(&self) {
        let _ = self
            .0
            .compare_exchange(ANSWERED, IDLE, Ordering::AcqRel, Ordering::Acquire);
    }

    fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == IDLE
    }
}

/// A body that records when the library is done with it.
struct TrackedBody {
    body: Body,
    state: ResponseState,
    _in_progress: RequestInProgress,
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        let _ = self
            .state
            .0
            .compare_exchange(ANSWERING, ANSWERED, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl http_body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that adds bodies to the error responses of the HTTP/1 library.
#[derive(Debug)]
pub(super) struct ErrorBodyStream<S> {
    stream: S,
    state: ResponseState,
    /// Kept as long as the socket, even after a switch to another protocol.
    connection: Arc<Connection>,
    /// What is written instead of an intercepted response.
    pending: Bytes,
}

impl<S> ErrorBodyStream<S> {
    pub(super) fn new(stream: S, state: ResponseState, connection: Arc<Connection>) -> Self {
        Self {
            stream,
            state,
            connection,
            pending: Bytes::new(),
        }
    }
}

impl<S: AsyncWrite + Unpin> ErrorBodyStream<S> {
    fn poll_pending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.pending.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.pending))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.pending.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Intercepts the bytes if they are a response of the library without a body.
    fn intercept(&mut self, bytes: &[u8]) -> bool {
        let answer = if self.state.is_idle() {
            with_error_body(bytes)
        } else {
            None
        };
        match answer {
            Some(answer) => {
                self.pending = answer;
                true
            }
            None => false,
        }
    }
}

/// The response with a body, if these bytes are an error response of the library.
fn with_error_body(bytes: &[u8]) -> Option<Bytes> {
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let mut lines = head.split("\r\n");
    let status_line = lines.next()?;
    let status: StatusCode = status_line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let body = api::malformed_request_body(status)?;
    let mut answer = format!("{status_line}\r\n");
    for line in lines {
        let (name, value) = line.split_once(": ")?;
        match (name, value) {
            ("content-length", "0") => {}
            ("date", _) | ("connection", "close") => {
                answer.push_str(line);
                answer.push_str("\r\n");
            }
            _ => return None,
        }
    }
    answer.push_str("content-type: application/json; charset=utf-8\r\ncontent-length: ");
    answer.push_str(&body.len().to_string());
    answer.push_str("\r\n\r\n");
    Some([answer.as_bytes(), &body].concat().into())
}

impl<S: AsyncRead + Unpin> AsyncRead for ErrorBodyStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.connection.on_read();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ErrorBodyStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_pending(cx))?;
        if self.intercept(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_pending(cx))?;
        if let [buf] = bufs
            && self.intercept(buf)
        {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_pending(cx))?;
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.state.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_pending(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_empty_library_errors_get_a_body() {
        let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n";
        let answer = with_error_body(head.as_bytes()).expect("completed");
        let answer = std::str::from_utf8(&answer).expect("text");
        assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\nconnection: close\r\ndate: x\r\ncontent-type:"));
        assert!(answer.contains("{\"code\":400,"), "{answer}");
        for other in [
            "",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n",
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nx-own: 1\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 1\r\n\r\n",
            "HTTP/1.1 4",
        ] {
            assert_eq!(with_error_body(other.as_bytes()), None, "{other:?}");
        }
    }
}
