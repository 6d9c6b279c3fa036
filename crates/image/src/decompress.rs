//! Streams that may be compressed: gzip and zstd are told by their first bytes.

use std::io::{self, BufRead, BufReader, Read};

use anyhow::{Result, bail};
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};

const BUFFER: usize = 128 << 10;
/// Maximum window of zstd: what `zstd --long` uses, and the limit of Docker.
const WINDOW_MAX: u64 = 128 << 20;

/// Begins to read a stream, decompressed.
pub(crate) fn open<R: Read + Send + 'static>(source: R) -> Result<Box<dyn Read + Send>> {
    let mut source = BufReader::with_capacity(
        BUFFER,
        Restart {
            first: Vec::new(),
            read: 0,
            source,
        },
    );
    // A pipe or socket may give fewer bytes at first than the longest mark has.
    let mark = first_bytes(&mut source)?;
    Ok(match mark.as_slice() {
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(source))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(Zstd::new(source)),
        // A skippable frame: some programs begin with one.
        [first, 0x2a, 0x4d, 0x18, ..] if first & 0xf0 == 0x50 => Box::new(Zstd::new(source)),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => bail!("compressed with xz; only gzip and zstd are supported"),
        [b'B', b'Z', b'h', ..] => bail!("compressed with bzip2; only gzip and zstd are supported"),
        _ => Box::new(source),
    })
}

/// The first bytes of a stream, which it gives again when it is read.
fn first_bytes<R: Read>(source: &mut BufReader<Restart<R>>) -> io::Result<Vec<u8>> {
    let inner = source.get_mut();
    let mut first = [0; 6];
    let mut filled = 0;
    while filled < first.len() {
        match inner.source.read(&mut first[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    inner.first = first[..filled].to_vec();
    Ok(inner.first.clone())
}

/// Bytes that were read already, and then the source.
struct Restart<R> {
    first: Vec<u8>,
    read: usize,
    source: R,
}

impl<R: Read> Read for Restart<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.first[self.read..];
        if rest.is_empty() {
            return self.source.read(buffer);
        }
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.read += count;
        Ok(count)
    }
}

/// A decoder of zstd frames, one after the other.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_MAX);
        Self {
            source,
            decoder,
            inside: false,
        }
    }

    /// Begins the next frame; none at the end.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.inside = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut (&mut self.source).take(length), &mut io::sink())? != length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(invalid(&error)),
            }
        }
    }

    /// Ends a frame: its checksum must be right.
    fn end(&mut self) -> io::Result<()> {
        self.inside = false;
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "zstd: wrong checksum"));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside && !self.begin()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let strategy = ruzstd::decoding::BlockDecodingStrategy::UptoBlocks(1);
                self.decoder
                    .decode_blocks(&mut self.source, strategy)
                    .map_err(|error| invalid(&error))?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            self.end()?;
        }
    }
}

fn invalid(error: &FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("zstd: {error}"))
}
