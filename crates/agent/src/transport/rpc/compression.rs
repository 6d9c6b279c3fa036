//! Messages in gzip, both ways.
//!
//! A request may be compressed as it likes; what it decompresses to is bounded and counted like any other message, so
//! that a kilobyte cannot become a gigabyte in memory. Answers are compressed for clients that accept it, and only
//! those that shrink. Both go in pieces between which other work gets its turn, because one thread does everything.

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Response, header};
use protocol::connect::{self, Code, Codec, ENVELOPE_HEADER, Error, FLAG_COMPRESSED};

use crate::gzip::{self, Gzip};
use crate::transport::encoding::prefers_gzip;
use crate::transport::http::Body;
use crate::transport::messages::{MESSAGE_LIMIT, Message, MessageMemory};

/// Name of the coding in headers.
const GZIP: HeaderValue = HeaderValue::from_static("gzip");
/// Below this, in bytes, a message is one packet either way.
const SMALL: usize = 1024;
/// Bytes that are compressed or decompressed before others get a turn.
const PIECE: usize = 64 * 1024;

/// The headers in which a kind of call says what it sends and what it accepts.
#[derive(Debug)]
pub(super) struct Names {
    sent: HeaderName,
    accepted: HeaderName,
}

pub(super) const UNARY: Names = Names {
    sent: header::CONTENT_ENCODING,
    accepted: header::ACCEPT_ENCODING,
};
pub(super) const STREAM: Names = Names {
    sent: HeaderName::from_static("connect-content-encoding"),
    accepted: HeaderName::from_static("connect-accept-encoding"),
};

impl Names {
    /// Whether the request is, or its messages may be, in gzip.
    ///
    /// # Errors
    /// `unimplemented` for anything but gzip and identity.
    pub(super) fn request(&self, headers: &HeaderMap) -> Result<bool, Error> {
        match headers.get(&self.sent).map(HeaderValue::as_bytes) {
            None | Some(b"" | b"identity") => Ok(false),
            Some(b"gzip") => Ok(true),
            Some(other) => {
                let shown = String::from_utf8_lossy(other);
                let message = format!("unknown compression {shown:?}: supported encodings are gzip, identity");
                Err(Error::new(Code::Unimplemented, message))
            }
        }
    }

    /// Whether the client prefers answers in gzip.
    pub(super) fn answer(&self, headers: &HeaderMap) -> bool {
        prefers_gzip(headers, &self.accepted)
    }

    /// Tells in an answer what requests may be in.
    pub(super) fn advertise(&self, answer: &mut HeaderMap) {
        answer.insert(self.accepted.clone(), GZIP);
    }

    /// Tells in an answer that it is, or its messages may be, in gzip.
    pub(super) fn declare(&self, answer: &mut HeaderMap) {
        answer.insert(self.sent.clone(), GZIP);
    }
}

/// How the messages of a stream of answers are written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writer {
    pub(super) codec: Codec,
    pub(super) gzip: bool,
}

impl Writer {
    /// One message as an envelope, compressed if the client accepts it and it shrinks.
    pub(crate) fn envelope<M: connect::Message>(self, message: &M) -> Bytes {
        let plain = self.codec.envelope(message);
        let content = &plain[ENVELOPE_HEADER..];
        if !self.gzip || content.len() < SMALL {
            return plain;
        }
        let mut gzip = Gzip::new();
        let mut compressed = Vec::new();
        let done = gzip
            .write(content, &mut compressed)
            .and_then(|()| gzip.finish(&mut compressed));
        match done {
            Ok(()) if shrinks(content.len(), compressed.len()) => connect::wrap(FLAG_COMPRESSED, &compressed),
            _ => plain,
        }
    }
}

/// Compresses the body of a unary answer if it shrinks.
pub(super) async fn compress(mut response: Response<Body>) -> Response<Body> {
    let Body::Full(content) = response.body() else {
        return response;
    };
    if content.len() < SMALL {
        return response;
    }
    let mut gzip = Gzip::new();
    let mut compressed = Vec::new();
    for piece in content.chunks(PIECE) {
        if gzip.write(piece, &mut compressed).is_err() {
            return response;
        }
        tokio::task::yield_now().await;
    }
    if gzip.finish(&mut compressed).is_ok() && shrinks(content.len(), compressed.len()) {
        UNARY.declare(response.headers_mut());
        *response.body_mut() = Body::Full(compressed.into());
    }
    response
}

/// An eighth must go, or the other side decompresses for nothing.
fn shrinks(length: usize, compressed: usize) -> bool {
    compressed <= length - length / 8
}

/// Decompresses a message of a request. One without any bytes is empty either way.
///
/// # Errors
/// `invalid_argument` when it is not gzip or decompresses to more than [`MESSAGE_LIMIT`] bytes, `resource_exhausted` when
/// it does to more than there is memory for.
pub(super) async fn decompress(memory: &MessageMemory, compressed: Bytes) -> Result<Message, Error> {
    let broken = |_: std::io::Error| Error::new(Code::InvalidArgument, "decompress message: invalid gzip");
    let mut share = memory.reserve(0)?;
    let mut message = Vec::new();
    let mut decoder = MultiGzDecoder::new(Vec::new());
    let empty = compressed.is_empty();
    let mut rest = compressed;
    while !rest.is_empty() {
        gzip::decompress(&mut decoder, &mut rest, PIECE).map_err(broken)?;
        take(memory, decoder.get_mut(), &mut message, &mut share)?;
        tokio::task::yield_now().await;
    }
    if !empty {
        let mut last = decoder.finish().map_err(broken)?;
        take(memory, &mut last, &mut message, &mut share)?;
    }
    Ok(Message {
        bytes: message.into(),
        share,
    })
}

/// Moves what was decompressed to the message, if that may become so long.
fn take(
    memory: &MessageMemory,
    made: &mut Vec<u8>,
    message: &mut Vec<u8>,
    share: &mut tokio::sync::OwnedSemaphorePermit,
) -> Result<(), Error> {
    if message.len() + made.len() > MESSAGE_LIMIT {
        let text = format!("message decompresses to more than the limit of {MESSAGE_LIMIT} bytes");
        return Err(Error::new(Code::InvalidArgument, text));
    }
    share.merge(memory.reserve(made.len())?);
    message.append(made);
    Ok(())
}
