//! Transfers of files, and what bounds their memory.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::Semaphore;

/// The most bytes that are read or written in one step. Each time costs a switch between two threads.
const CHUNK: usize = 256 * 1024;
/// Bytes that one chunk of every transfer may come to together. A transfer holds two or three of them.
const CHUNKS: usize = 8 * 1024 * 1024;
/// Downloads that are compressed at a time. Each costs about 350 KiB for the encoder's tables and window, and its
/// chunks.
const ENCODERS: usize = 32;
/// Uploads that are decompressed at a time; the next one waits. Each costs about 200 KiB: window, buffers, a piece.
const DECODERS: usize = 64;

/// What bounds the memory of all transfers: transfers that stand still must not add up.
#[derive(Debug, Clone)]
pub(super) struct Transfers {
    /// How many there are, by which their memory is shared out.
    count: Rc<Cell<usize>>,
    /// Permits to compress a download.
    pub(super) encoders: Arc<Semaphore>,
    /// Permits to decompress an upload.
    pub(super) decoders: Arc<Semaphore>,
}

impl Default for Transfers {
    fn default() -> Self {
        Self {
            count: Rc::default(),
            encoders: Arc::new(Semaphore::new(ENCODERS)),
            decoders: Arc::new(Semaphore::new(DECODERS)),
        }
    }
}

/// One transfer.
#[derive(Debug)]
pub(super) struct Transfer(Rc<Cell<usize>>);

impl Transfers {
    pub(super) fn begin(&self) -> Transfer {
        self.count.set(self.count.get() + 1);
        Transfer(self.count.clone())
    }
}

impl Transfer {
    /// Bytes of its next chunk.
    pub(super) fn chunk(&self) -> usize {
        (CHUNKS / self.0.get()).clamp(8 * 1024, CHUNK)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
