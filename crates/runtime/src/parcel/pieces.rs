//! Cutting files into pieces of what is not zero.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use protocol::parcel::CHUNK;
use rustix::fs::SeekFrom;

use crate::disk::seek;

/// Zeroes are left out in multiples of this, in bytes: the block of a file system.
pub(crate) const BLOCK: usize = 4096;
/// A block of zeroes.
pub(crate) static ZEROES: [u8; BLOCK] = [0; BLOCK];

/// Calls `found` with each piece of a file of this length and where it begins. A piece lies between two multiples of [`CHUNK`],
/// and begins and ends with a block that is not zero.
///
/// # Errors
/// When the file cannot be read, or is shorter, and those of `found`.
pub(crate) fn each(file: &File, length: u64, found: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < length
        && let Some(data) = seek(file, SeekFrom::Data(at))?
    {
        let begin = data / CHUNK as u64 * CHUNK as u64;
        let size = usize::try_from(length.saturating_sub(begin)).map_or(CHUNK, |left| left.min(CHUNK));
        let window = &mut buffer[..size];
        file.read_exact_at(window, begin)?;
        if let Some((from, to)) = used(window) {
            found(begin + from as u64, &window[from..to])?;
        }
        at = begin + CHUNK as u64;
    }
    Ok(())
}

/// Where the first block that is not zero begins, and where the last one ends.
fn used(window: &[u8]) -> Option<(usize, usize)> {
    let is_used = |block: &[u8]| *block != ZEROES[..block.len()];
    let first = window.chunks(BLOCK).position(is_used)?;
    let last = window.chunks(BLOCK).rposition(is_used)?;
    Some((first * BLOCK, ((last + 1) * BLOCK).min(window.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(file: &File) -> Vec<(u64, Vec<u8>)> {
        let mut found = Vec::new();
        let length = file.metadata().unwrap().len();
        each(file, length, &mut |at, piece| {
            found.push((at, piece.to_vec()));
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn holes_and_zeroes_are_left_out_and_the_rest_is_complete() {
        const MIB: u64 = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * MIB + 100).unwrap();
        file.write_all_at(&[1; 5000], 10).unwrap();
        // Across two pieces.
        file.write_all_at(&[2; 8192], 3 * MIB - 4096).unwrap();
        // Written zeroes.
        file.write_all_at(&[0; 8192], 5 * MIB).unwrap();
        file.write_all_at(&[3; 50], 8 * MIB + 50).unwrap();
        let found = pieces(&file);
        let places: Vec<(u64, usize)> = found.iter().map(|(at, piece)| (*at, piece.len())).collect();
        assert_eq!(
            places,
            [(0, 8192), (3 * MIB - 4096, 4096), (3 * MIB, 4096), (8 * MIB, 100)]
        );
        let copy = tempfile::tempfile().unwrap();
        copy.set_len(8 * MIB + 100).unwrap();
        for (at, piece) in found {
            copy.write_all_at(&piece, at).unwrap();
        }
        let content = |file: &File| {
            let mut content = vec![0; 8 * (1 << 20) + 100];
            file.read_exact_at(&mut content, 0).unwrap();
            content
        };
        assert!(content(&file) == content(&copy));
    }

    #[test]
    fn one_block_that_changes_changes_one_piece() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![7; 4 << 20], 0).unwrap();
        let before = pieces(&file);
        file.write_all_at(&[8; 10], (2 << 20) + 5).unwrap();
        let after = pieces(&file);
        let changed = before.iter().zip(&after).filter(|(one, other)| one != other).count();
        assert_eq!((before.len(), after.len(), changed), (4, 4, 1));
        let empty = tempfile::tempfile().unwrap();
        assert_eq!(pieces(&empty), []);
    }
}
