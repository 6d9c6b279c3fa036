//! `GET /files`: a file, or one range of it, or all of it compressed if that pays.

use std::fs::{File, Metadata, OpenOptions};
use std::future::Future;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use tokio::task::JoinHandle;

use super::buffers::Buffers;
use super::compressed::{self, Compressed};
use super::failure::{Failure, blocking};
use super::reading::read_at;
use super::transfers::{Transfer, Transfers};
use super::{coding, media_type};
use crate::transport::encoding::Coding;
use crate::transport::http::{Body, header_text};

/// Responds with the file at `path`, or the part of it that the headers request.
pub(super) async fn send(path: PathBuf, headers: &HeaderMap, transfers: &Transfers) -> Result<Response<Body>, Failure> {
    let name = path.clone();
    let transfer = transfers.begin();
    let coding = coding::choose(headers);
    let Opened {
        file,
        metadata,
        size,
        first,
        coding,
    } = {
        let limit = transfer.chunk();
        blocking(move || open(&path, coding, limit)).await?
    };
    // A file of the kernel that is longer than one chunk.
    let sizeless = size == 0 && !first.is_empty();
    if let Coding::Gzip { only } = coding {
        match transfers.encoders.clone().try_acquire_owned() {
            Ok(permit) => {
                let end = if sizeless { u64::MAX } else { size };
                return Ok(compressed(&name, Compressed::new(file, first, end, transfer, permit)));
            }
            Err(_) if only => {
                let message = "too many compressed downloads at once";
                return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, message));
            }
            // The client takes either, and as it is it costs less.
            Err(_) => {}
        }
    }
    let modified = Timestamp::from_second(metadata.mtime())
        .ok()
        .filter(|modified| modified.as_second() > 0);
    let modified = modified.and_then(|modified| DateTimePrinter::new().timestamp_to_rfc9110_string(&modified).ok());

    let mut response = Response::new(Body::Empty);
    let answer = response.headers_mut();
    name_it(answer, &name);
    answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(Ok(modified)) = modified.as_deref().map(HeaderValue::from_str) {
        answer.insert(header::LAST_MODIFIED, modified);
    }
    if unchanged_since(headers, modified.as_deref()) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    answer.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(media_type::of(&name, &first)),
    );
    let range = match header_text(headers, header::RANGE) {
        // A range of a file that has changed since the client saw it would not fit what the client has.
        Some(range)
            if header_text(headers, header::IF_RANGE).is_none_or(|known| modified.as_deref() == Some(known)) =>
        {
            parse_range(range, size)
        }
        _ => Range::Whole,
    };
    let number = |text: String| HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("bytes"));
    match range {
        Range::Whole if sizeless => {
            let stream = Chunks {
                file,
                offset: first.len() as u64,
                end: u64::MAX,
                growing: true,
                next: None,
                first,
                transfer,
                buffers: Buffers::new(),
            };
            *response.body_mut() = Body::Stream {
                stream: Box::pin(stream),
                length: None,
            };
        }
        Range::Whole => *response.body_mut() = body(file, first, 0, size, transfer),
        Range::Part { start, end } => {
            answer.insert(
                header::CONTENT_RANGE,
                number(format!("bytes {start}-{}/{size}", end - 1)),
            );
            let skip = usize::try_from(start).unwrap_or(usize::MAX).min(first.len());
            let keep = usize::try_from(end).unwrap_or(usize::MAX).min(first.len());
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            *response.body_mut() = body(file, first.slice(skip..keep), start, end, transfer);
        }
        Range::Unsatisfiable => {
            answer.insert(header::CONTENT_RANGE, number(format!("bytes */{size}")));
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
        }
    }
    Ok(response)
}

/// The headers of every answer with a file.
fn name_it(headers: &mut HeaderMap, path: &Path) {
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if let Ok(disposition) = HeaderValue::from_str(&media_type::disposition(path)) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
}

fn compressed(path: &Path, content: Compressed) -> Response<Body> {
    let mut response = Response::new(Body::Stream {
        stream: Box::pin(content),
        length: None,
    });
    let headers = response.headers_mut();
    name_it(headers, path);
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    let media_type = media_type::by_extension(path).unwrap_or(media_type::BINARY);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// A file that is about to be sent.
struct Opened {
    file: Arc<File>,
    metadata: Metadata,
    /// Its length in bytes; zero if only reading to its end can tell.
    size: u64,
    /// Its first chunk.
    first: Bytes,
    coding: Coding,
}

/// How long a file is that said it has `stated` bytes before its first chunk was read, of `limit` bytes at most. Programs
/// rewrite files while others read them: what fits into one chunk is sent as it was when it was read, instead of promising
/// a length that it no longer has. Files of the kernel say that they have none.
fn size(stated: u64, first: &Bytes, limit: usize) -> u64 {
    let read = first.len() as u64;
    if first.len() < limit {
        read
    } else if stated == 0 {
        0
    } else {
        stated.max(read)
    }
}

/// Opens a file and reads its first chunk, of `limit` bytes. Nothing is said about the coding before the file is there.
fn open(path: &PathBuf, coding: Result<Coding, Failure>, limit: usize) -> Result<Opened, Failure> {
    let shown = path.display();
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(StatusCode::NOT_FOUND, format!("path '{shown}' does not exist")),
        _ => Failure::internal(&format!("error checking if path exists '{shown}'"), &error),
    })?;
    if metadata.is_dir() {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}' is a directory"),
        ));
    }
    let mut coding = coding?;
    // Whatever is there by now, opening it must not wait: not for the writer of a pipe, not for a device.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| Failure::internal(&format!("error opening file '{shown}'"), &error))?;
    let mut read = || -> io::Result<(Metadata, u64, Bytes)> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Ok((metadata, 0, Bytes::new()));
        }
        let first = read_at(&file, 0, limit)?;
        let size = size(metadata.len(), &first, limit);
        // The libraries of most clients accept gzip without being asked, so accepting it is not asking for it.
        if coding == (Coding::Gzip { only: false }) && !compressed::pays(&file, &first, size)? {
            coding = Coding::Identity;
        }
        Ok((metadata, size, first))
    };
    let (metadata, size, first) =
        read().map_err(|error| Failure::internal(&format!("error reading file '{shown}'"), &error))?;
    if !metadata.is_file() {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            format!("path '{shown}' is not a regular file"),
        ));
    }
    Ok(Opened {
        file: Arc::new(file),
        metadata,
        size,
        first,
        coding,
    })
}

/// Whether the client has this version already.
fn unchanged_since(headers: &HeaderMap, modified: Option<&str>) -> bool {
    // An entity tag would take precedence, and ours has none, so it never matches.
    if headers.contains_key(header::IF_NONE_MATCH) {
        return false;
    }
    let parse = |text: &str| jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok();
    let since = header_text(headers, header::IF_MODIFIED_SINCE).and_then(parse);
    matches!((since, modified.and_then(parse)), (Some(since), Some(modified)) if modified <= since)
}

#[derive(Debug, PartialEq, Eq)]
enum Range {
    Whole,
    /// From `start` to before `end`.
    Part {
        start: u64,
        end: u64,
    },
    Unsatisfiable,
}

/// The range of a header. Several ranges, and what is not a range, are answered with the whole file, as the standard
/// allows.
fn parse_range(header: &str, size: u64) -> Range {
    let Some((first, last)) = header
        .strip_prefix("bytes=")
        .and_then(|range| range.trim().split_once('-'))
    else {
        return Range::Whole;
    };
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(first) || !digits(last) {
        return Range::Whole;
    }
    let (start, end) = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(start), Ok(last)) if last >= start => (start, last.saturating_add(1).min(size)),
        (Ok(start), Err(_)) if last.is_empty() => (start, size),
        (Err(_), Ok(suffix)) if first.is_empty() && suffix > 0 => (size.saturating_sub(suffix), size),
        (Err(_), Ok(0)) if first.is_empty() => return Range::Unsatisfiable,
        _ => return Range::Whole,
    };
    if start >= size {
        Range::Unsatisfiable
    } else {
        Range::Part { start, end }
    }
}

/// Bytes `start` to `end` of a file, of which `first` is there already.
fn body(file: Arc<File>, first: Bytes, start: u64, end: u64, transfer: Transfer) -> Body {
    let length = end - start;
    if first.len() as u64 >= length {
        return Body::Full(first.slice(..usize::try_from(length).unwrap_or(first.len())));
    }
    let offset = start + first.len() as u64;
    let stream = Chunks {
        file,
        offset,
        end,
        growing: false,
        next: None,
        first,
        transfer,
        buffers: Buffers::new(),
    };
    Body::Stream {
        stream: Box::pin(stream),
        length: Some(length),
    }
}

/// A file in chunks; the next one is read while the network takes the last.
struct Chunks {
    file: Arc<File>,
    offset: u64,
    end: u64,
    /// Whether the file ends wherever reading ends. Otherwise an early end is an error, because the length was
    /// promised.
    growing: bool,
    next: Option<JoinHandle<io::Result<Bytes>>>,
    first: Bytes,
    transfer: Transfer,
    buffers: Buffers,
}

impl Chunks {
    fn read_ahead(&mut self) {
        if self.offset < self.end {
            let limit = self.transfer.chunk();
            let length = usize::try_from(self.end - self.offset).unwrap_or(limit).min(limit);
            let (file, offset) = (self.file.clone(), self.offset);
            let buffer = self.buffers.take(limit);
            self.next = Some(tokio::task::spawn_blocking(move || buffer.read(&file, offset, length)));
        }
    }
}

impl Stream for Chunks {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.next.is_none() {
            this.read_ahead();
        }
        if !this.first.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut this.first))));
        }
        let Some(next) = &mut this.next else {
            return Poll::Ready(None);
        };
        let chunk = ready!(Pin::new(next).poll(ctx)).unwrap_or_else(|crash| Err(io::Error::other(crash)));
        this.next = None;
        match chunk {
            Ok(chunk) if chunk.is_empty() => {
                this.end = this.offset;
                if this.growing {
                    Poll::Ready(None)
                } else {
                    Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into())))
                }
            }
            Ok(chunk) => {
                this.offset += chunk.len() as u64;
                this.read_ahead();
                Poll::Ready(Some(Ok(chunk)))
            }
            Err(error) => {
                this.end = this.offset;
                Poll::Ready(Some(Err(error)))
            }
        }
    }
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_as_long_as_what_was_read_of_it() {
        let check = |stated, read, want| assert_eq!(size(stated, &Bytes::from(vec![0; read]), 10), want);
        // Truncated, filled or grown between the two, or of the kernel.
        check(5, 0, 0);
        check(20, 3, 3);
        check(0, 3, 3);
        check(5, 7, 7);
        check(5, 10, 10);
        check(20, 10, 20);
        // Only the end of reading tells.
        check(0, 10, 0);
        check(0, 0, 0);
    }

    #[test]
    fn ranges() {
        let part = |start, end| Range::Part { start, end };
        let check = |header: &str, size: u64, expect: Range| assert_eq!(parse_range(header, size), expect, "{header}");
        check("bytes=0-0", 10, part(0, 1));
        check("bytes=3-", 10, part(3, 10));
        check("bytes=-3", 10, part(7, 10));
        check("bytes=-30", 10, part(0, 10));
        check("bytes=5-99", 10, part(5, 10));
        check("bytes=10-", 10, Range::Unsatisfiable);
        check("bytes=-0", 10, Range::Unsatisfiable);
        check("bytes=0-", 0, Range::Unsatisfiable);
        for whole in [
            "bytes=",
            "bytes=-",
            "bytes=5-4",
            "bytes=0-1,3-4",
            "lines=0-1",
            "bytes=+1-2",
            "bytes=a-b",
        ] {
            check(whole, 10, Range::Whole);
        }
        check("bytes=0-18446744073709551615", 10, part(0, 10));
    }
}
