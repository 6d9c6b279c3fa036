//! Reading a file at a place, as much as is wanted or is there.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;

/// Reads until the buffer is full or the file ends; how many bytes that were.
pub(super) fn fill_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Up to `limit` bytes, fewer only at the end.
pub(super) fn read_at(file: &File, offset: u64, limit: usize) -> io::Result<Bytes> {
    let mut buffer = vec![0; limit];
    let filled = fill_at(file, offset, &mut buffer)?;
    buffer.truncate(filled);
    if filled < limit / 2 {
        buffer.shrink_to_fit();
    }
    Ok(Bytes::from(buffer))
}
