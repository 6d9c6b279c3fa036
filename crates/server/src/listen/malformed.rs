//! Answers to what is no request.
//!
//! The HTTP/1 library answers a head that it cannot read by itself, with a status and no body, before any service is
//! asked. Clients of the API rely on a JSON body with every error, so this stream stands under the library and gives
//! such an answer one on its way out. It touches nothing else: the bytes must be exactly what the library writes, at a
//! moment when no request is being answered and all of the answer before has left.
//!
//! HTTP/2 has no such answers to complete: what is malformed there ends its stream or the connection with an error code,
//! except that a header list that is too large is answered 431 without a body.

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

use super::connections::{Connection, UnderWay};
use crate::api;

/// No request is being answered, and all that was written has left.
const IDLE: u8 = 0;
/// A request is being answered, or the connection is not one of HTTP any more.
const ANSWERING: u8 = 1;
/// The answer is complete, and may not have left yet.
const ANSWERED: u8 = 2;

/// Where the requests of a connection are, shared by its stream and its service.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn(Arc<AtomicU8>);

impl Turn {
    /// A request is here.
    pub(super) fn begin(&self) {
        self.0.store(ANSWERING, Ordering::Release);
    }

    /// Follows its answer to the end. After one that switches protocols, no request comes any more.
    pub(super) fn follow(&self, response: Response<Body>, under_way: UnderWay) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            // The other protocol is under way until the connection is closed, and the connection knows when that is.
            under_way.leave();
            return response;
        }
        let turn = self.clone();
        response.map(|body| {
            Body::new(Followed {
                body,
                turn,
                _under_way: under_way,
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

/// A body that says when the library is done with it.
struct Followed {
    body: Body,
    turn: Turn,
    _under_way: UnderWay,
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _ = self
            .turn
            .0
            .compare_exchange(ANSWERING, ANSWERED, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl http_body::Body for Followed {
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

/// The stream.
#[derive(Debug)]
pub(super) struct WholeAnswers<S> {
    stream: S,
    turn: Turn,
    /// Kept as long as the socket is, also when it has left for another protocol.
    place: Arc<Connection>,
    /// What is to be written in place of what was taken.
    pending: Bytes,
}

impl<S> WholeAnswers<S> {
    pub(super) fn new(stream: S, turn: Turn, place: Arc<Connection>) -> Self {
        Self {
            stream,
            turn,
            place,
            pending: Bytes::new(),
        }
    }
}

impl<S: AsyncWrite + Unpin> WholeAnswers<S> {
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

    /// Takes a bodiless answer of the library's own, if that is what is to be written.
    fn take(&mut self, bytes: &[u8]) -> bool {
        let answer = if self.turn.is_idle() { complete(bytes) } else { None };
        match answer {
            Some(answer) => {
                self.pending = answer;
                true
            }
            None => false,
        }
    }
}

/// The answer with its body, if these bytes are one that the library writes by itself.
fn complete(bytes: &[u8]) -> Option<Bytes> {
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let mut lines = head.split("\r\n");
    let status_line = lines.next()?;
    let status: StatusCode = status_line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let body = api::malformed(status)?;
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

impl<S: AsyncRead + Unpin> AsyncRead for WholeAnswers<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.place.read();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WholeAnswers<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_pending(cx))?;
        if self.take(buf) {
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
            && self.take(buf)
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
        self.turn.flushed();
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
    fn only_bodiless_answers_of_the_library_are_completed() {
        let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n";
        let answer = complete(head.as_bytes()).expect("completed");
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
            assert_eq!(complete(other.as_bytes()), None, "{other:?}");
        }
    }
}
