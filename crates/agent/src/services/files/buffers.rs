//! The buffers of one download, used again and again: the pages of a fresh one cost the kernel as much as the copy into
//! them does.
//!
//! A buffer comes back when the last reader of its bytes is gone, on whichever thread that is. There are never more
//! than are under way at once, and those that come back behind their transfer are dropped.

use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;

use super::reading::fill_at;

/// Buffers that are kept for the next read: one is being read into while another is being sent.
const KEPT: usize = 2;

/// Where the buffers of one download come back.
#[derive(Debug)]
pub(super) struct Buffers {
    back: SyncSender<Vec<u8>>,
    returned: Receiver<Vec<u8>>,
}

/// A buffer to read into, of a fixed length.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    filled: usize,
    back: SyncSender<Vec<u8>>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        let (back, returned) = sync_channel(KEPT);
        Self { back, returned }
    }

    /// Takes a buffer of this many bytes.
    pub(super) fn take(&self, length: usize) -> Buffer {
        // The length changes with the number of transfers; what no longer fits is not kept.
        let bytes = self.returned.try_iter().find(|bytes| bytes.len() == length);
        Buffer {
            bytes: bytes.unwrap_or_else(|| vec![0; length]),
            filled: 0,
            back: self.back.clone(),
        }
    }
}

impl Buffer {
    /// Reads up to `limit` bytes from there, fewer only at the end of the file.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn read(mut self, file: &File, offset: u64, limit: usize) -> io::Result<Bytes> {
        let limit = limit.min(self.bytes.len());
        self.filled = fill_at(file, offset, &mut self.bytes[..limit])?;
        Ok(Bytes::from_owner(self))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The transfer is over, or enough are kept: then it goes.
        let _ = self.back.try_send(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn buffers_come_back_when_nobody_reads_them() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"0123456789", 0).unwrap();
        let buffers = Buffers::new();
        let first = buffers.take(8).read(&file, 0, 8).unwrap();
        let slice = first.slice(2..4);
        let at = first.as_ptr();
        drop(first);
        // While a part of it is still wanted, the next one is another.
        let second = buffers.take(8).read(&file, 8, 8).unwrap();
        assert_eq!((&slice[..], &second[..]), (&b"23"[..], &b"89"[..]));
        drop(slice);
        let third = buffers.take(8).read(&file, 4, 3).unwrap();
        assert_eq!((&third[..], third.as_ptr()), (&b"456"[..], at));
        drop((second, third));
        let longer = buffers.take(9).read(&file, 0, 100).unwrap();
        assert_eq!(&longer[..], b"012345678");
        drop(buffers);
        drop(longer);
    }
}
