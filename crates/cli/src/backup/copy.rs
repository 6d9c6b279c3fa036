//! Copying files with their holes, and their checksums.
//!
//! The checksum of a file is the SHA-256 of its blocks of 64 KiB that are not all zero, each after its offset, and of its
//! size. So it says the same of a disk image with holes and of one whose holes were filled on the way, and holes need not
//! be read.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom};
use sha2::{Digest, Sha256};

/// Size of the blocks that a checksum is made of, and in which holes are kept.
const BLOCK: u64 = 64 << 10;
/// How much is read at a time. A multiple of a block.
const AT_ONCE: usize = 1 << 20;

/// A file that was copied or read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Its size with holes, in bytes.
    pub(crate) size: u64,
    /// What its blocks take that are not all zero, in bytes.
    pub(crate) data: u64,
    /// The checksum.
    pub(crate) sum: String,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

fn open(path: &Path) -> io::Result<(File, std::fs::Metadata)> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() {
        Ok((file, metadata))
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

/// Copies a file to a new one that only its owner may read.
///
/// # Errors
/// When one of the two cannot be read or written, or the new one exists.
pub(crate) fn copy(from: &Path, to: &Path) -> io::Result<Copied> {
    // First, so that nothing is left where there is nothing to copy.
    let (source, metadata) = open(from)?;
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    let mut write = |block: &[u8], at| target.write_all_at(block, at);
    let copied = read(&source, &metadata, &mut write).and_then(|copied| {
        target.set_len(copied.size)?;
        Ok(copied)
    });
    if copied.is_err() {
        let _ = std::fs::remove_file(to);
    }
    copied
}

/// Sets owner and mode of a copy.
///
/// # Errors
/// When the system refuses.
pub(crate) fn set_access(path: &Path, mode: u32, owner: (u32, u32)) -> io::Result<()> {
    std::os::unix::fs::chown(path, Some(owner.0), Some(owner.1))?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Reads a file for its checksum.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn check(path: &Path) -> io::Result<Copied> {
    let (file, metadata) = open(path)?;
    read(&file, &metadata, &mut |_, _| Ok(()))
}

fn read(
    file: &File,
    metadata: &std::fs::Metadata,
    write: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
) -> io::Result<Copied> {
    let (size, mut data) = (metadata.len(), 0);
    let mut sum = Sha256::new();
    let mut buffer = vec![0; AT_ONCE];
    let mut at = 0;
    while let Some(start) = next_data(file, at)? {
        at = start - start % BLOCK;
        let length = fill(file, &mut buffer, at)?;
        if length == 0 {
            break;
        }
        let blocks = buffer[..length].chunks(usize::try_from(BLOCK).map_err(io::Error::other)?);
        for (block, offset) in blocks.zip((at..).step_by(usize::try_from(BLOCK).map_err(io::Error::other)?)) {
            if block.iter().any(|byte| *byte != 0) {
                sum.update(offset.to_le_bytes());
                sum.update(block);
                write(block, offset)?;
                data += block.len() as u64;
            }
        }
        at += length as u64;
    }
    sum.update(size.to_le_bytes());
    Ok(Copied {
        size,
        data,
        sum: hex::encode(sum.finalize()),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
    })
}

/// Where the next data begins; none if there is none.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read_at(&mut buffer[length..], at + length as u64) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_content_and_no_more_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let source = File::create(&from).unwrap();
        source.set_len(1 << 30).unwrap();
        for at in [0, (5 << 20) + 1, (900 << 20) + 17] {
            source.write_all_at(&[7; 12_345], at).unwrap();
        }
        // Zeros that have been written.
        source.write_all_at(&vec![0; 8 << 20], 100 << 20).unwrap();
        let copied = copy(&from, &to).unwrap();
        assert_eq!(copied.size, 1 << 30);
        let target = File::open(&to).unwrap();
        assert_eq!(target.metadata().unwrap().len(), 1 << 30);
        assert!(target.metadata().unwrap().blocks() * 512 <= 4 * BLOCK);
        for at in [0, (5 << 20) + 1, (900 << 20) + 17] {
            let mut found = vec![1; 12_346];
            target.read_exact_at(&mut found, at).unwrap();
            assert!(found[..12_345].iter().all(|byte| *byte == 7) && found[12_345] == 0);
        }
        assert_eq!(check(&to).unwrap().sum, copied.sum);
        // It says the same when the holes are filled.
        let whole = dir.path().join("whole");
        std::fs::write(&whole, std::fs::read(&to).unwrap()).unwrap();
        assert_eq!(check(&whole).unwrap().sum, copied.sum);
        assert_eq!(copy(&from, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_checksum_notices_each_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut seen = std::collections::BTreeSet::new();
        let block = usize::try_from(BLOCK).unwrap();
        let contents = [
            vec![],
            vec![0],
            vec![0; block],
            vec![1],
            vec![1, 0],
            [vec![0; block], vec![1]].concat(),
            [vec![1], vec![0; block]].concat(),
        ];
        for content in &contents {
            std::fs::write(&path, content).unwrap();
            let found = check(&path).unwrap();
            assert_eq!(found.size, content.len() as u64);
            seen.insert(found.sum);
        }
        assert_eq!(seen.len(), contents.len());
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(check(&dir.path().join("link")).is_err());
        assert!(check(dir.path()).is_err());
    }
}
