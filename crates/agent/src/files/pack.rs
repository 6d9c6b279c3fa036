//! A file in gzip, made while it is sent.
//!
//! Reading and packing are one step on a blocking thread, and the next step runs while the network takes what the last
//! one made. Only so many files are packed at once: a packer keeps far more memory than a file that is sent as it is.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::Transfer;
use super::download::{fill_at, read_at};
use crate::gzip::{self, Gzip};

/// Files that are packed at a time. Each costs about 350 KiB for the packer's tables and window, and its chunks.
pub(super) const AT_ONCE: usize = 32;

/// Below this, in bytes, an answer is one packet either way.
const SMALL: u64 = 1024;
/// Places of a file that are looked at, from its beginning to its end.
const PLACES: u64 = 8;
/// Bytes of each.
const PLACE: usize = 4096;

/// Whether a file of that size is worth packing: a quarter of it must go, as far as a few places can tell. What changes
/// in between is dealt with while packing. `first` is the file's beginning.
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
    let (mut length, mut packed) = (0, 0);
    for sample in samples {
        length += sample.len();
        packed += gzip::sampled_length(&sample)?;
    }
    Ok(packed <= length / 4 * 3)
}

/// See the module.
pub(super) struct Packed {
    next: Option<JoinHandle<Step>>,
    transfer: Transfer,
    _permit: OwnedSemaphorePermit,
}

/// The packer, unless it is done, and what it made.
type Step = io::Result<(Option<Box<Packer>>, Bytes)>;

struct Packer {
    file: Arc<File>,
    offset: u64,
    end: u64,
    /// The beginning of the file, which is there already.
    first: Bytes,
    buffer: Vec<u8>,
    gzip: Gzip,
}

impl Packed {
    /// The file up to `end`, or to its end if that comes earlier; `first` is its beginning.
    pub(super) fn new(
        file: Arc<File>,
        first: Bytes,
        end: u64,
        transfer: Transfer,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let packer = Packer {
            file,
            offset: 0,
            end,
            first,
            buffer: Vec::new(),
            gzip: Gzip::new(),
        };
        let mut packed = Self {
            next: None,
            transfer,
            _permit: permit,
        };
        packed.step(Box::new(packer));
        packed
    }

    fn step(&mut self, packer: Box<Packer>) {
        let limit = self.transfer.chunk();
        self.next = Some(tokio::task::spawn_blocking(move || packer.step(limit)));
    }
}

impl Packer {
    fn step(mut self: Box<Self>, limit: usize) -> Step {
        let first = std::mem::take(&mut self.first);
        let mut data = &first[..];
        if data.is_empty() {
            self.buffer.resize(limit, 0);
            let length = usize::try_from(self.end - self.offset).unwrap_or(limit).min(limit);
            let filled = fill_at(&self.file, self.offset, &mut self.buffer[..length])?;
            data = &self.buffer[..filled];
        }
        let mut packed = Vec::new();
        if data.is_empty() {
            self.gzip.finish(&mut packed)?;
            return Ok((None, packed.into()));
        }
        self.offset += data.len() as u64;
        self.gzip.write(data, &mut packed)?;
        Ok((Some(self), packed.into()))
    }
}

impl Stream for Packed {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let Some(next) = &mut this.next else {
                return Poll::Ready(None);
            };
            let step = ready!(Pin::new(next).poll(ctx)).unwrap_or_else(|crash| Err(io::Error::other(crash)));
            this.next = None;
            let (packer, packed) = match step {
                Ok(step) => step,
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            if let Some(packer) = packer {
                this.step(packer);
            }
            // What packs well is kept back for a while.
            if !packed.is_empty() {
                return Poll::Ready(Some(Ok(packed)));
            }
        }
    }
}
