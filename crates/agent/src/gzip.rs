//! A gzip stream that stores what does not shrink, and the way back.
//!
//! Compressing noise takes ten times as long as copying it and saves nothing, so the stream goes block by block: as
//! long as blocks shrink they are compressed, and from the first one that does not they are stored as they are, until a
//! look at the beginning of a later one says that compressing pays again. It stays one member, because several are more
//! than many clients can read.
//!
//! Invariant: between two blocks of different kinds the output ends at a whole byte and the encoder has forgotten what
//! came before, so no block refers to bytes behind a stored one.

use std::io::{self, Write};

use bytes::{Buf, Bytes};
use flate2::write::MultiGzDecoder;
use flate2::{Compress, Compression, Crc, FlushCompress, Status};

/// Bytes of a block: what a stored one can hold.
const BLOCK: usize = 65_535;
/// Bytes of a block that are compressed to see whether it shrinks. A quarter of what the encoder looks back.
const LOOK: usize = 8 * 1024;
/// Blocks that are stored without a look, at most: what shrinks again is noticed after a megabyte.
const BLIND: u32 = 16;
/// Identification, deflate, no flags, no time, fastest level, unknown system.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];

/// A gzip encoder.
#[derive(Debug)]
pub(crate) struct Gzip {
    encoder: Compress,
    sum: Crc,
    mode: Mode,
    begun: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Compress,
    /// The next `blind` blocks are skipped, and twice as many after the next sample.
    Store {
        blind: u32,
        next: u32,
    },
}

impl Mode {
    /// Mode in which a sample of the next block decides.
    const LOOK: Self = Self::Store { blind: 0, next: 1 };
}

impl Gzip {
    pub(crate) fn new() -> Self {
        Self {
            encoder: encoder(),
            sum: Crc::new(),
            mode: Mode::LOOK,
            begun: false,
        }
    }

    /// Adds data; what the stream has for it so far is appended to `out`.
    ///
    /// # Errors
    /// None that the encoder is known to have.
    pub(crate) fn write(&mut self, data: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        self.begin(out);
        self.sum.update(data);
        data.chunks(BLOCK).try_for_each(|block| self.block(block, out))
    }

    /// Appends the end of the stream.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn finish(mut self, out: &mut Vec<u8>) -> io::Result<()> {
        self.begin(out);
        match self.mode {
            Mode::Compress => while run(&mut self.encoder, &[], FlushCompress::Finish, out)? != Status::StreamEnd {},
            Mode::Store { .. } => store(&[], true, out),
        }
        out.extend_from_slice(&self.sum.sum().to_le_bytes());
        out.extend_from_slice(&self.sum.amount().to_le_bytes());
        Ok(())
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !self.begun {
            self.begun = true;
            out.extend_from_slice(&HEADER);
        }
    }

    fn block(&mut self, block: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        if let Mode::Store { blind, next } = self.mode {
            if blind > 0 {
                self.mode = Mode::Store { blind: blind - 1, next };
                store(block, false, out);
                return Ok(());
            }
            let look = &block[..block.len().min(LOOK)];
            let shrunk = compressed_length(&mut self.encoder, look)?;
            self.encoder.reset();
            if !shrinks(look.len(), shrunk) {
                let blind = next.min(BLIND);
                self.mode = Mode::Store { blind, next: blind * 2 };
                store(block, false, out);
                return Ok(());
            }
            self.mode = Mode::Compress;
        }
        let before = out.len();
        compress(&mut self.encoder, block, out)?;
        // The encoder holds some of it back, which evens out from block to block.
        if block.len() >= LOOK && !shrinks(block.len(), out.len() - before) {
            flush(&mut self.encoder, out)?;
            self.encoder.reset();
            self.mode = Mode::LOOK;
        }
        Ok(())
    }
}

/// How long a text is when it is compressed on its own, in bytes.
///
/// # Errors
/// As [`Gzip::write`].
pub(crate) fn sampled_length(sample: &[u8]) -> io::Result<usize> {
    compressed_length(&mut encoder(), sample)
}

fn encoder() -> Compress {
    // The fastest level: a network that is worth compressing for is still slower.
    Compress::new(Compression::fast(), false)
}

fn compressed_length(encoder: &mut Compress, text: &[u8]) -> io::Result<usize> {
    let mut out = Vec::with_capacity(text.len() + 64);
    compress(encoder, text, &mut out)?;
    flush(encoder, &mut out)?;
    Ok(out.len())
}

/// Whether a block of this length is worth compressing: an eighth must go.
fn shrinks(length: usize, compressed: usize) -> bool {
    compressed <= length - length / 8
}

fn compress(encoder: &mut Compress, mut data: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    while !data.is_empty() {
        let before = encoder.total_in();
        run(encoder, data, FlushCompress::None, out)?;
        let taken = usize::try_from(encoder.total_in() - before).unwrap_or(data.len());
        data = &data[taken..];
    }
    Ok(())
}

/// Flushes the encoder, up to a whole byte.
fn flush(encoder: &mut Compress, out: &mut Vec<u8>) -> io::Result<()> {
    loop {
        run(encoder, &[], FlushCompress::Sync, out)?;
        // Room that is left over says that there was no more.
        if out.len() < out.capacity() {
            return Ok(());
        }
    }
}

fn run(encoder: &mut Compress, data: &[u8], flush: FlushCompress, out: &mut Vec<u8>) -> io::Result<Status> {
    const ROOM: usize = 16 * 1024;
    if out.capacity() - out.len() < ROOM {
        out.reserve(ROOM);
    }
    encoder.compress_vec(data, out, flush).map_err(io::Error::other)
}

/// Decompresses until the decoder has made some `limit` bytes, or all of the input is used.
///
/// # Errors
/// Those of what is not gzip.
pub(crate) fn decompress(decoder: &mut MultiGzDecoder<Vec<u8>>, input: &mut Bytes, limit: usize) -> io::Result<()> {
    while !input.is_empty() && decoder.get_ref().len() < limit {
        let before = decoder.get_ref().len();
        let taken = decoder.write(input)?;
        // It never was seen to happen, and would not end.
        if taken == 0 && decoder.get_ref().len() == before {
            return Err(io::ErrorKind::InvalidData.into());
        }
        input.advance(taken);
    }
    Ok(())
}

/// Appends a stored block.
fn store(block: &[u8], last: bool, out: &mut Vec<u8>) {
    // A block is never longer than its length can say.
    let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
    out.push(u8::from(last));
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&(!length).to_le_bytes());
    out.extend_from_slice(block);
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;
    use proptest::prelude::*;

    use super::*;

    fn compressed(pieces: &[Vec<u8>]) -> Vec<u8> {
        let mut gzip = Gzip::new();
        let mut out = Vec::new();
        for piece in pieces {
            gzip.write(piece, &mut out).unwrap();
        }
        gzip.finish(&mut out).unwrap();
        out
    }

    fn decompressed(bytes: &[u8]) -> Vec<u8> {
        // Of one member: with several, what follows the first would be missing.
        let mut reader = GzDecoder::new(bytes);
        let mut out = Vec::new();
        reader.read_to_end(&mut out).unwrap();
        assert!(reader.into_inner().is_empty());
        out
    }

    fn noise(length: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..length).map(|_| next()).collect()
    }

    #[test]
    fn what_shrinks_is_compressed_and_what_does_not_is_stored() {
        let text = |length: usize| {
            b"a line of text\n"
                .iter()
                .copied()
                .cycle()
                .take(length)
                .collect::<Vec<_>>()
        };
        let mut lengths = Vec::new();
        for (content, at_most) in [
            (Vec::new(), 32),
            (b"x".to_vec(), 32),
            (text(2_000_000), 40_000),
            (noise(2_000_000, 1), 2_000_500),
            ([text(1_000_000), noise(1_000_000, 2)].concat(), 1_080_000),
            // It takes a megabyte at most until compressing begins again.
            ([noise(1_000_000, 3), text(4_000_000)].concat(), 1_000_000 + 20 * BLOCK),
            ([noise(100_000, 4), text(100_000)].concat().repeat(10), 1_700_000),
        ] {
            for piece in [1000, 256 * 1024, 5_000_000] {
                let pieces: Vec<Vec<u8>> = content.chunks(piece).map(<[u8]>::to_vec).collect();
                let compressed = compressed(&pieces);
                assert!(decompressed(&compressed) == content);
                assert!(
                    piece < BLOCK || compressed.len() <= at_most,
                    "{} {at_most}",
                    compressed.len()
                );
                lengths.push(compressed.len());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn decompressing_goes_on_to_the_end_or_an_error(
            members in prop::collection::vec((0..70_000_usize, any::<u64>(), any::<bool>()), 0..3),
            change in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
            cut in prop::option::of(any::<prop::sample::Index>()),
            tail in prop::collection::vec(any::<u8>(), 0..3),
            piece in 1..9000_usize,
        ) {
            let mut bytes = Vec::new();
            for (length, seed, same) in members {
                let content = if same { vec![seed.to_le_bytes()[0]; length] } else { noise(length / 8, seed) };
                bytes.extend_from_slice(&compressed(&[content]));
            }
            if let Some((at, to)) = change && !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = to;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len() + 1));
            }
            bytes.extend_from_slice(&tail);
            let mut expect = Vec::new();
            let expected = flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_end(&mut expect);

            let mut decoder = MultiGzDecoder::new(Vec::new());
            let mut found = Vec::new();
            let mut result = Ok(());
            for piece in bytes.chunks(piece) {
                let mut piece = Bytes::copy_from_slice(piece);
                while result.is_ok() && !piece.is_empty() {
                    result = decompress(&mut decoder, &mut piece, 10_000);
                    // A step of the decoder makes 32 KiB.
                    prop_assert!(decoder.get_ref().len() <= 10_000 + 32 * 1024);
                    found.append(decoder.get_mut());
                }
            }
            let ended = result.and_then(|()| decoder.finish().map(|mut last| found.append(&mut last)));
            // Nothing at all is for the caller to refuse, and both give what they can before an error.
            if !bytes.is_empty() && expected.is_ok() {
                prop_assert!(ended.is_ok(), "{:?}", ended);
                prop_assert!(found == expect);
            }
            if expected.is_err() && !bytes.is_empty() {
                prop_assert!(ended.is_err(), "{:?}", expected);
            }
        }

        /// Whatever comes in whichever pieces, the same comes out.
        #[test]
        fn any_content_survives(pieces in prop::collection::vec(
            (0..150_000_usize, any::<u64>(), 0..4_u8).prop_map(|(length, seed, kind)| match kind {
                0 => noise(length, seed),
                1 => vec![seed.to_le_bytes()[0]; length],
                2 => noise(length, seed).iter().map(|byte| b'a' + byte % 20).collect(),
                // Repeats at a distance that the encoder sees, across blocks that may be stored.
                _ => noise(1 + length % 20_000, seed).repeat(5),
            }), 0..4)) {
            prop_assert!(decompressed(&compressed(&pieces)) == pieces.concat());
        }
    }
}
