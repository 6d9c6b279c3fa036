//! A file that is compressed with gzip while it is sent.
//!
//! Reading and compressing are one step on a blocking thread, and the next step runs while the network takes what the
//! last one made. Only so many files are compressed at once: an encoder keeps far more memory than a file that is sent
//! as it is.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::reading::{fill_at, read_at};
use super::transfers::Transfer;
use crate::gzip::{self, Gzip};

/// Below this, in bytes, an answer is one packet either way.
const SMALL: u64 = 1024;
/// Places of a file that are looked at, from its beginning to its end.
const PLACES: u64 = 8;
/// Bytes of each.
const PLACE: usize = 4096;

/// Whether a file of this size is worth compressing: a quarter of it must go, as far as a few places can tell. What
/// changes in between is dealt with while compressing. `first` is the file's beginning.
///
/// # Errors
/// Those of reading.
pub(super) fn pays(file: &File, first: &Bytes, size: u64) -> io::Result<bool> {
    if size.max(first.len() as u64) < SMALL {
        return Ok(false);
    }
    let samples = if size <= first.len() as u64 {
        // All there is, or, in a file of the kernel, all that is known.
        vec![first.slice(..first.len().min(PLACE * 8))]
    } else {
        let step = (size - PLACE as u64) / (PLACES - 1);
        (0..PLACES)
            .map(|place| read_at(file, place * step, PLACE))
            .collect::<io::Result<_>>()?
    };
    let (mut length, mut compressed) = (0, 0);
    for sample in samples {
        length += sample.len();
        compressed += gzip::sampled_length(&sample)?;
    }
    Ok(compressed <= length / 4 * 3)
}

/// The compressed content of a file, as a stream.
pub(super) struct Compressed {
    next: Option<JoinHandle<Step>>,
    transfer: Transfer,
    _permit: OwnedSemaphorePermit,
}

/// The encoder, unless it is done, and what it made.
type Step = io::Result<(Option<Box<Encoder>>, Bytes)>;

struct Encoder {
    file: Arc<File>,
    offset: u64,
    end: u64,
    /// The beginning of the file, which is there already.
    first: Bytes,
    buffer: Vec<u8>,
    gzip: Gzip,
}

impl Compressed {
    /// The file up to `end`, or to its end if that comes earlier; `first` is its beginning.
    pub(super) fn new(
        file: Arc<File>,
        first: Bytes,
        end: u64,
        transfer: Transfer,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let encoder = Encoder {
            file,
            offset: 0,
            end,
            first,
            buffer: Vec::new(),
            gzip: Gzip::new(),
        };
        let mut compressed = Self {
            next: None,
            transfer,
            _permit: permit,
        };
        compressed.step(Box::new(encoder));
        compressed
    }

    fn step(&mut self, encoder: Box<Encoder>) {
        let limit = self.transfer.chunk();
        self.next = Some(tokio::task::spawn_blocking(move || encoder.step(limit)));
    }
}

impl Encoder {
    fn step(mut self: Box<Self>, limit: usize) -> Step {
        let first = std::mem::take(&mut self.first);
        let mut data = &first[..];
        if data.is_empty() {
            self.buffer.resize(limit, 0);
            let length = usize::try_from(self.end - self.offset).unwrap_or(limit).min(limit);
            let filled = fill_at(&self.file, self.offset, &mut self.buffer[..length])?;
            data = &self.buffer[..filled];
        }
        let mut compressed = Vec::new();
        if data.is_empty() {
            self.gzip.finish(&mut compressed)?;
            return Ok((None, compressed.into()));
        }
        self.offset += data.len() as u64;
        self.gzip.write(data, &mut compressed)?;
        Ok((Some(self), compressed.into()))
    }
}

impl Stream for Compressed {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let Some(next) = &mut this.next else {
                return Poll::Ready(None);
            };
            let step = ready!(Pin::new(next).poll(ctx)).unwrap_or_else(|crash| Err(io::Error::other(crash)));
            this.next = None;
            let (encoder, compressed) = match step {
                Ok(step) => step,
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            if let Some(encoder) = encoder {
                this.step(encoder);
            }
            // What compresses well is kept back for a while.
            if !compressed.is_empty() {
                return Poll::Ready(Some(Ok(compressed)));
            }
        }
    }
}
