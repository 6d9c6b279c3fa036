//! Streams compressed with zstd. Frames are independent and short, so memory is bounded on both sides.

use std::io::{self, BufRead, Read, Write};

use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

/// Data of one frame, in bytes.
const FRAME: usize = 4 << 20;
/// Maximum window. That of frames written here is smaller.
const WINDOW_MAX: u64 = 8 << 20;

/// Compresses what is written.
pub(super) struct Encoder<W> {
    to: W,
    frame: Vec<u8>,
}

impl<W: Write> Encoder<W> {
    pub(super) fn new(to: W) -> Self {
        Self {
            to,
            frame: Vec::with_capacity(FRAME),
        }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if !self.frame.is_empty() {
            let compressed = compress_to_vec(self.frame.as_slice(), CompressionLevel::Fastest);
            self.frame.clear();
            self.to.write_all(&compressed)?;
        }
        Ok(())
    }

    /// Writes the last frame.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.end_frame()?;
        Ok(self.to)
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = data.len().min(FRAME - self.frame.len());
        self.frame.extend_from_slice(&data[..count]);
        if self.frame.len() == FRAME {
            self.end_frame()?;
        }
        Ok(count)
    }

    /// What is not yet a frame stays: only [`Self::finish`] ends a frame early.
    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Reads frames, one after the other.
pub(super) struct Decoder<R> {
    from: R,
    decoder: FrameDecoder,
    is_inside: bool,
}

impl<R: BufRead> Decoder<R> {
    pub(super) fn new(from: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_MAX);
        Self {
            from,
            decoder,
            is_inside: false,
        }
    }
}

impl<R: BufRead> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_inside {
                if self.from.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.decoder.reset(&mut self.from).map_err(|error| invalid(&error))?;
                self.is_inside = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.from, strategy);
                decoded.map_err(|error| invalid(&error))?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            self.is_inside = false;
        }
    }
}

fn invalid(error: &FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("zstd: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        // Half of it cannot be compressed.
        (0..length)
            .map(|at| if at / 5000 % 2 == 0 { next() } else { 7 })
            .collect()
    }

    #[test]
    fn what_was_compressed_is_read_again() {
        for length in [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME + 77] {
            let data = sample(length);
            let mut encoder = Encoder::new(Vec::new());
            encoder.write_all(&data).unwrap();
            let compressed = encoder.finish().unwrap();
            assert!(
                compressed.len() <= length / 10 * 6 + 1000,
                "{length}: {}",
                compressed.len()
            );
            let mut read = Vec::new();
            Decoder::new(compressed.as_slice()).read_to_end(&mut read).unwrap();
            assert!(read == data, "{length}");
            if length > 0 {
                let cut = &compressed[..compressed.len() - 1];
                Decoder::new(cut).read_to_end(&mut read).unwrap_err();
            }
        }
    }

    #[test]
    fn what_is_not_zstd_is_refused() {
        // The third begins a frame with a window of 3.75 TiB.
        for data in [
            &b"hello"[..],
            &[0x28, 0xb5],
            &[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff, 0x01, 0, 0],
        ] {
            let read = Decoder::new(data).read(&mut [0; 16]);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData, "{data:?}");
        }
    }
}
