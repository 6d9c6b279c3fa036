//! The content of an upload, decompressed if it came compressed.
//!
//! A megabyte can decompress to a gigabyte. It is decompressed a piece at a time, as the disk takes it, so that only
//! the disk's size says when it is enough; and only so many uploads are decompressed at once, because each takes a
//! window of memory.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::StatusCode;
use http::header::{self, HeaderMap};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::failure::{Failure, blocking};
use crate::gzip;
use crate::transport::http::{header_text, read_on};

/// Bytes of a piece, about: one step of decompressing may make a few more.
const PIECE: usize = 64 * 1024;

/// The content of one upload.
pub(super) enum Source {
    Plain(Incoming),
    Compressed(Box<Compressed>),
}

/// A body in gzip.
pub(super) struct Compressed {
    body: Incoming,
    /// The decoder; none while a thread has it, and after the end.
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
    input: Bytes,
    /// Content that was decompressed while the first header was read.
    ready: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl Source {
    /// The content of a body with these headers.
    ///
    /// # Errors
    /// 400 when it is coded in an unknown way, or does not begin as what it says it is.
    pub(super) async fn new(headers: &HeaderMap, body: Incoming, decoders: &Arc<Semaphore>) -> Result<Self, Refused> {
        let coding = header_text(headers, header::CONTENT_ENCODING)
            .unwrap_or_default()
            .trim();
        if coding.is_empty() || coding.eq_ignore_ascii_case("identity") {
            return Ok(Self::Plain(body));
        }
        if !coding.eq_ignore_ascii_case("gzip") {
            let reason = format!("unsupported Content-Encoding: {coding}, supported: [gzip]");
            return Err(Refused(undecodable(&reason), body));
        }
        let Ok(permit) = decoders.clone().acquire_owned().await else {
            return Err(Refused(undecodable("no decoder"), body));
        };
        let mut compressed = Box::new(Compressed {
            body,
            decoder: Some(MultiGzDecoder::new(Vec::new())),
            input: Bytes::new(),
            ready: Bytes::new(),
            _permit: permit,
        });
        match compressed.begin().await {
            Ok(()) => Ok(Self::Compressed(compressed)),
            Err(failure) => Err(Refused(failure, compressed.body)),
        }
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// 400 when what is compressed is broken, 500 when the connection is.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self {
            Self::Plain(body) => next_data(body).await,
            Self::Compressed(compressed) => compressed.next().await,
        }
    }

    /// Reads on for a while after an error, or behind the end of a form: a client that is still sending may never look
    /// at an answer otherwise.
    pub(super) async fn drain(self) {
        match self {
            Self::Plain(body) => read_on(body).await,
            Self::Compressed(compressed) => read_on(compressed.body).await,
        }
    }
}

/// Why there is no content, and the body that is still to be read.
pub(super) struct Refused(pub(super) Failure, pub(super) Incoming);

impl Refused {
    /// Reads the rest of the body as [`Source::drain`] does, and returns the reason.
    pub(super) async fn drain(self) -> Failure {
        read_on(self.1).await;
        self.0
    }
}

async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, Failure> {
    while let Some(frame) = body.frame().await {
        let reading = |error: hyper::Error| {
            let message = format!("error reading request body: {error}");
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, message)
        };
        if let Ok(data) = frame.map_err(reading)?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

fn undecodable(reason: &str) -> Failure {
    let message = format!("error decompressing request body: {reason}");
    Failure::new(StatusCode::BAD_REQUEST, message)
}

impl Compressed {
    /// Reads the first header, so that nothing is written for what is not gzip at all.
    async fn begin(&mut self) -> Result<(), Failure> {
        let bad = |reason: &str| undecodable(&format!("failed to create gzip reader: {reason}"));
        let mut seen = false;
        loop {
            let Some(data) = next_data(&mut self.body).await? else {
                return Err(bad(if seen { "unexpected EOF" } else { "EOF" }));
            };
            seen |= !data.is_empty();
            self.input = data;
            match self.decompress().await? {
                (ready, Ok(())) => self.ready = ready,
                (_, Err(_)) if !self.has_begun() => return Err(bad("gzip: invalid header")),
                (_, Err(error)) => return Err(undecodable(&error.to_string())),
            }
            // A first part that is over already has given something.
            if self.has_begun() || !self.ready.is_empty() {
                return Ok(());
            }
        }
    }

    fn has_begun(&self) -> bool {
        let decoder = self.decoder.as_ref();
        decoder.is_some_and(|decoder| decoder.header().is_some())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            if !self.ready.is_empty() {
                return Ok(Some(std::mem::take(&mut self.ready)));
            }
            if self.input.is_empty() {
                match next_data(&mut self.body).await? {
                    Some(data) => self.input = data,
                    None => return self.finish().await,
                }
            }
            let (ready, result) = self.decompress().await?;
            result.map_err(|error| undecodable(&error.to_string()))?;
            self.ready = ready;
        }
    }

    /// Decompresses a piece of what was read. The decoder's own error is within, because it may have to be put
    /// otherwise.
    async fn decompress(&mut self) -> Result<(Bytes, io::Result<()>), Failure> {
        let Some(mut decoder) = self.decoder.take() else {
            return Ok((Bytes::new(), Err(io::ErrorKind::UnexpectedEof.into())));
        };
        let mut input = std::mem::take(&mut self.input);
        let work = move || {
            let result = gzip::decompress(&mut decoder, &mut input, PIECE);
            let ready = Bytes::from(std::mem::take(decoder.get_mut()));
            Ok((decoder, input, ready, result))
        };
        let (decoder, input, ready, result) = blocking(work).await?;
        self.decoder = Some(decoder);
        self.input = input;
        Ok((ready, result))
    }

    /// What is left at the end of the body, once it is known to be whole.
    async fn finish(&mut self) -> Result<Option<Bytes>, Failure> {
        let Some(decoder) = self.decoder.take() else {
            return Ok(None);
        };
        let work = move || {
            decoder
                .finish()
                .map_err(|_| undecodable("unexpected EOF or invalid checksum"))
        };
        let left = blocking(work).await?;
        Ok(if left.is_empty() { None } else { Some(Bytes::from(left)) })
    }
}
