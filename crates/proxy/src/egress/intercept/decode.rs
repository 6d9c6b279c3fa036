//! Bodies that a server encodes although it was asked not to, so that they can be searched: they go on to the program as
//! they are without the encoding.
//!
//! A body is decoded as the program reads it, and a part of it at a time: how much it grows is no matter of memory.

use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::HeaderMap;
use http::header::{self, HeaderName, HeaderValue};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;

use super::error::BoxError;

/// Decoded bytes of which a part has at least that many, unless the server has sent no more, and at most some 64 KiB more.
const PART: usize = 16 << 10;
/// Codings that leave the bytes of a body as they are. `aws-chunked` is what object stores show of an upload.
const PLAIN: [&str; 2] = ["identity", "aws-chunked"];
/// Headers about the bytes of an encoded body, which are wrong for the decoded one.
const OF_ENCODED: [HeaderName; 6] = [
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::ACCEPT_RANGES,
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
];

/// How a body is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// The bytes of the body are its text.
    Plain,
    Gzip,
    Deflate,
    /// In a way that is not decoded here, or in several.
    Unknown,
}

impl Coding {
    /// What the head of a response says.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut coding = Self::Plain;
        for value in headers.get_all(header::CONTENT_ENCODING) {
            let Ok(value) = value.to_str() else {
                return Self::Unknown;
            };
            let listed = value.split(',').map(|coding| coding.trim().to_ascii_lowercase());
            for listed in listed.filter(|listed| !listed.is_empty() && !PLAIN.contains(&listed.as_str())) {
                coding = match (coding, listed.as_str()) {
                    (Self::Plain, "gzip" | "x-gzip") => Self::Gzip,
                    (Self::Plain, "deflate") => Self::Deflate,
                    _ => return Self::Unknown,
                };
            }
        }
        coding
    }
}

/// Changes a head so that it describes the decoded body.
pub(super) fn describe_decoded(headers: &mut HeaderMap) {
    for name in OF_ENCODED {
        headers.remove(name);
    }
    // The same text in other bytes (RFC 9110 section 8.8.1).
    let tag = headers.get(header::ETAG).map(HeaderValue::as_bytes);
    let weak = tag.filter(|tag| !tag.starts_with(b"W/"));
    if let Some(weak) = weak.and_then(|tag| HeaderValue::from_bytes(&[b"W/", tag].concat()).ok()) {
        headers.insert(header::ETAG, weak);
    }
}

/// A body without its encoding.
pub(super) struct Decoded {
    inner: Incoming,
    decoder: Decoder,
    /// Bytes of the server that are not decoded yet.
    input: Bytes,
    /// Whether the server has sent a byte.
    is_begun: bool,
    /// What comes after the last byte of the server, once that has come.
    end: Option<Option<Frame<Bytes>>>,
    is_over: bool,
    /// The permission to decode one more body.
    _permit: OwnedSemaphorePermit,
}

enum Decoder {
    /// Deflate, of which the first bytes say whether it is in the format of zlib: servers send both.
    Undecided(Vec<u8>),
    Gzip(MultiGzDecoder<Vec<u8>>),
    Zlib(ZlibDecoder<Vec<u8>>),
    Raw(DeflateDecoder<Vec<u8>>),
}

impl Decoded {
    pub(super) fn new(inner: Incoming, is_gzip: bool, permit: OwnedSemaphorePermit) -> Self {
        Self {
            inner,
            decoder: if is_gzip {
                Decoder::Gzip(MultiGzDecoder::new(Vec::new()))
            } else {
                Decoder::Undecided(Vec::new())
            },
            input: Bytes::new(),
            is_begun: false,
            end: None,
            is_over: false,
            _permit: permit,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = ready!(self.poll(cx));
        if !matches!(polled, Some(Ok(_))) {
            self.is_over = true;
        }
        Poll::Ready(polled)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            let output = if !self.input.is_empty() {
                self.decoder.push(&mut self.input)
            } else if let Some(end) = self.end.take() {
                self.is_over = end.is_none();
                return Poll::Ready(end.map(Ok));
            } else {
                match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
                    Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(data) => {
                            self.is_begun |= !data.is_empty();
                            self.input = data;
                            continue;
                        }
                        Err(trailers) => self.end = Some(Some(trailers)),
                    },
                    None => self.end = Some(None),
                }
                // A body without a byte is none that was encoded.
                if !self.is_begun {
                    continue;
                }
                self.decoder.finish()
            };
            match output {
                Err(error) => {
                    let why = format!("the body of the server is not what its Content-Encoding says: {error}");
                    return Poll::Ready(Some(Err(why.into())));
                }
                Ok(output) if output.is_empty() => {}
                Ok(output) => return Poll::Ready(Some(Ok(Frame::data(output)))),
            }
        }
    }
}

impl Decoder {
    /// Decodes some of the bytes, at least one of them.
    fn push(&mut self, input: &mut Bytes) -> io::Result<Bytes> {
        if let Self::Undecided(first) = self {
            let taken = input.split_to(input.len().min(2 - first.len()));
            first.extend_from_slice(&taken);
            let &[one, two] = first.as_slice() else {
                return Ok(Bytes::new());
            };
            // The method, and a checksum of both bytes (RFC 1950 section 2.2).
            let is_zlib = one & 0xF == 8 && u16::from_be_bytes([one, two]) % 31 == 0;
            let first = std::mem::take(first);
            *self = if is_zlib {
                Self::Zlib(ZlibDecoder::new(Vec::new()))
            } else {
                Self::Raw(DeflateDecoder::new(Vec::new()))
            };
            self.writer().write_all(&first)?;
        }
        while !input.is_empty() && self.output().len() < PART {
            let taken = match self.writer().write(input)? {
                // What comes after the end is no part of the text.
                0 => input.len(),
                taken => taken,
            };
            input.advance(taken);
        }
        if input.is_empty() {
            // A server may wait now until the program has got this.
            self.writer().flush()?;
        }
        Ok(std::mem::take(self.output()).into())
    }

    /// The last bytes, after all have been pushed.
    fn finish(&mut self) -> io::Result<Bytes> {
        match self {
            Self::Undecided(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Self::Gzip(decoder) => decoder.try_finish()?,
            Self::Zlib(decoder) => decoder.try_finish()?,
            Self::Raw(decoder) => decoder.try_finish()?,
        }
        Ok(std::mem::take(self.output()).into())
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Undecided(first) => first,
            Self::Gzip(decoder) => decoder,
            Self::Zlib(decoder) => decoder,
            Self::Raw(decoder) => decoder,
        }
    }

    /// Buffer of decoded bytes that were not taken yet.
    fn output(&mut self) -> &mut Vec<u8> {
        match self {
            Self::Undecided(first) => first,
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zlib(decoder) => decoder.get_mut(),
            Self::Raw(decoder) => decoder.get_mut(),
        }
    }
}
