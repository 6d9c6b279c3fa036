//! Where the messages of a program over HTTP/1.1 begin and end, so that heads which readers could understand differently
//! are refused.
//!
//! The library that reads requests accepts lines without a carriage return, and a length beside chunks. What it forwards
//! is unambiguous, but a program that sends such a head wants a message to be understood in two ways, so it gets 400 and
//! the end of the connection. The bytes pass unchanged until then; in place of the byte that completes the fault comes one
//! that no head can have, so that the library refuses it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::counters::Counters;

/// A byte that is allowed nowhere in a head.
const FORBIDDEN: u8 = 0;
/// How much of a line is looked at: enough for the headers that matter, whose values are short.
const LINE_KEPT: usize = 256;
/// Most digits of a length.
const LENGTH_DIGITS: usize = 19;

/// Whether two readers could disagree about the bytes up to here.
#[derive(Debug, PartialEq, Eq)]
struct Ambiguous;

/// What the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Head,
    /// A body, or a chunk with its line end, with that many bytes left.
    Data {
        left: u64,
        is_chunk: bool,
    },
    /// The line with the size of a chunk.
    Size,
    /// Lines after the last chunk.
    Trailers,
    /// What is not read as HTTP/1.1 any more: after an upgrade, or after what the library refuses too.
    Rest,
}

/// Follows the bytes of a connection.
#[derive(Debug)]
struct Framing {
    part: Part,
    /// The current line, without its end, as far as it matters.
    line: Vec<u8>,
    /// Whether the last byte was a carriage return.
    has_return: bool,
    /// Framing headers of the current head.
    is_begun: bool,
    length: Option<u64>,
    is_chunked: bool,
    is_upgrade: bool,
}

impl Framing {
    const fn new() -> Self {
        Self {
            part: Part::Head,
            line: Vec::new(),
            has_return: false,
            is_begun: false,
            length: None,
            is_chunked: false,
            is_upgrade: false,
        }
    }

    /// Follows further bytes. If one of them completes a fault, returns its position.
    fn follow(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            match self.part {
                Part::Rest => return None,
                Part::Data { left, is_chunk } => {
                    let rest = u64::try_from(bytes.len() - at).unwrap_or(u64::MAX);
                    let taken = left.min(rest);
                    at += usize::try_from(taken).unwrap_or(usize::MAX);
                    self.part = match left - taken {
                        0 if is_chunk => Part::Size,
                        0 => Part::Head,
                        left => Part::Data { left, is_chunk },
                    };
                }
                Part::Head | Part::Size | Part::Trailers => {
                    let end = bytes[at..].iter().position(|byte| *byte == b'\n');
                    let text = &bytes[at..end.map_or(bytes.len(), |end| at + end)];
                    if let Some(last) = text.last() {
                        self.has_return = *last == b'\r';
                        let kept = LINE_KEPT.saturating_sub(self.line.len()).min(text.len());
                        self.line.extend_from_slice(&text[..kept]);
                    }
                    at += text.len();
                    if end.is_some() {
                        if self.line_ended() == Err(Ambiguous) {
                            return Some(at);
                        }
                        at += 1;
                        self.line.clear();
                        self.has_return = false;
                    }
                }
            }
        }
        None
    }

    fn line_ended(&mut self) -> Result<(), Ambiguous> {
        if !self.has_return {
            return Err(Ambiguous);
        }
        if self.line.last() == Some(&b'\r') {
            self.line.pop();
        }
        match self.part {
            Part::Head if self.line.is_empty() && self.is_begun => self.head_ended(),
            // Empty lines before a request are skipped.
            Part::Head if self.line.is_empty() => {}
            Part::Head => {
                self.is_begun = true;
                self.read_header()?;
            }
            Part::Size => {
                let digits = self.line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
                let size = std::str::from_utf8(&self.line[..digits]);
                let size = size.ok().and_then(|digits| u64::from_str_radix(digits, 16).ok());
                self.part = match size {
                    Some(0) => Part::Trailers,
                    Some(size) => Part::Data {
                        left: size.saturating_add(2),
                        is_chunk: true,
                    },
                    None => Part::Rest,
                };
            }
            Part::Trailers if self.line.is_empty() => self.part = Part::Head,
            Part::Trailers | Part::Data { .. } | Part::Rest => {}
        }
        Ok(())
    }

    /// Reads a line of a head. The request line has no colon before its first space, so it is none of these.
    fn read_header(&mut self) -> Result<(), Ambiguous> {
        let Some(colon) = self.line.iter().position(|byte| *byte == b':') else {
            return Ok(());
        };
        let (name, value) = (&self.line[..colon], self.line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.is_chunked = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let is_length = (1..=LENGTH_DIGITS).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
            let length = std::str::from_utf8(value).ok().filter(|_| is_length);
            let length = length.and_then(|value| value.parse().ok()).ok_or(Ambiguous)?;
            if self.length.replace(length).is_some_and(|before| before != length) {
                return Err(Ambiguous);
            }
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.is_upgrade |= is_websocket(value);
        }
        if self.is_chunked && self.length.is_some() {
            return Err(Ambiguous);
        }
        Ok(())
    }

    fn head_ended(&mut self) {
        self.part = match self.length {
            // The connection is not used for another request, whatever the server answers.
            _ if self.is_upgrade => Part::Rest,
            _ if self.is_chunked => Part::Size,
            Some(left @ 1..) => Part::Data { left, is_chunk: false },
            Some(0) | None => Part::Head,
        };
        self.is_begun = false;
        self.is_chunked = false;
        self.length = None;
    }
}

/// Whether a value of `Upgrade` has the only protocol to which connections are upgraded.
pub(super) fn is_websocket(value: &[u8]) -> bool {
    let mut protocols = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    protocols.any(|protocol| protocol.eq_ignore_ascii_case(b"websocket"))
}

/// The stream of a program over HTTP/1.1, of which ambiguous heads do not come through.
pub(super) struct CheckedStream<S> {
    stream: S,
    framing: Framing,
    /// Whether a fault was found, after which nothing comes.
    is_refused: bool,
    counters: Arc<Counters>,
}

impl<S> CheckedStream<S> {
    pub(super) fn new(stream: S, counters: Arc<Counters>) -> Self {
        Self {
            stream,
            framing: Framing::new(),
            is_refused: false,
            counters,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CheckedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_refused {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        if let Some(fault) = this.framing.follow(&buf.filled()[before..]) {
            buf.filled_mut()[before + fault] = FORBIDDEN;
            buf.set_filled(before + fault + 1);
            this.is_refused = true;
            this.counters.request_refused();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CheckedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The position of the fault, which must not depend on how the bytes are cut.
    #[track_caller]
    fn fault(text: &str) -> Option<usize> {
        let bytes = text.as_bytes();
        let whole = Framing::new().follow(bytes);
        for cut in 0..bytes.len() {
            let mut framing = Framing::new();
            let first = framing.follow(&bytes[..cut]);
            let found = first.or_else(|| framing.follow(&bytes[cut..]).map(|at| at + cut));
            assert_eq!(found, whole, "{text:?} at {cut}");
        }
        let mut framing = Framing::new();
        let each = bytes.chunks(1).position(|byte| framing.follow(byte).is_some());
        assert_eq!(each, whole, "{text:?} byte by byte");
        whole
    }

    #[test]
    fn usual_messages_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET /transfer-encoding:x HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\na\nbGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n\n\n\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nX-A: 1\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n\n\n\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n\n\n",
        ] {
            assert_eq!(fault(text), None, "{text:?}");
        }
        let long = format!("GET / HTTP/1.1\r\nX-A: {}\r\n\r\n", "a".repeat(3 * LINE_KEPT));
        assert_eq!(fault(&long), None);
    }

    #[test]
    fn ambiguous_heads_do_not() {
        // The fault is the line end in place of the bar.
        for text in [
            "GET / HTTP/1.1|Host: a\n\n",
            "|GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a|X: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n|",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r|\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: x\r\nCONTENT-LENGTH: 1\r|\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r|\r\n",
            "POST / HTTP/1.1\r\nContent-Length: +1\r|\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1|\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1|a\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1|\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y|\r\n",
            "GET / HTTP/1.1\r\nUpgrade: h2c\r\n\r\nGET / HTTP/1.1|\n",
        ] {
            assert_eq!(fault(&text.replace('|', "\n")), text.find('|'), "{text:?}");
        }
    }
}
