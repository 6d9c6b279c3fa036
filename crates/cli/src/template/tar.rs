//! Archives of files of this machine, in a file without a name.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, Mode, OFlags};
use sha2::{Digest as _, Sha256};

/// Length of a block, in bytes.
const BLOCK: usize = 512;
/// The largest number in the field of a size.
const SIZE_MAX: u64 = 0o77_777_777_777;

/// A file in the directory for temporary files, which disappears with its last descriptor.
pub(super) fn nameless() -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR)?;
    Ok(file.into())
}

/// An archive that is being written, with a hash of what it contains.
pub(super) struct Archive {
    file: BufWriter<File>,
    hash: Sha256,
}

impl Archive {
    pub(super) fn begin() -> Result<Self> {
        let file = nameless().context("create a temporary file")?;
        Ok(Self {
            file: BufWriter::new(file),
            hash: Sha256::new(),
        })
    }

    /// Adds a file, directory or link under a name. Others, such as sockets, are left out.
    pub(super) fn add(&mut self, path: &Path, name: &str, follow: bool) -> Result<()> {
        let metadata = if follow {
            path.metadata()
        } else {
            path.symlink_metadata()
        };
        let metadata = metadata.with_context(|| format!("read {}", path.display()))?;
        let kind = metadata.file_type();
        let mut header = Header {
            name: name.as_bytes(),
            link: &[],
            mode: metadata.mode() & 0o7777,
            size: 0,
            mtime: u64::try_from(metadata.mtime()).unwrap_or(0),
            kind: b'0',
        };
        if kind.is_dir() {
            header.kind = b'5';
            self.header(&header)
        } else if kind.is_symlink() {
            let target = path.read_link().with_context(|| format!("read {}", path.display()))?;
            header.kind = b'2';
            header.link = target.as_os_str().as_bytes();
            self.header(&header)
        } else if kind.is_file() {
            header.size = metadata.len();
            self.header(&header)?;
            self.content(path, header.size)
        } else {
            Ok(())
        }
    }

    fn content(&mut self, path: &Path, size: u64) -> Result<()> {
        let read = || format!("read {}", path.display());
        let mut file = File::open(path).with_context(read)?.take(size);
        let mut buffer = vec![0; 128 << 10];
        let mut left = size;
        loop {
            let length = file.read(&mut buffer).with_context(read)?;
            if length == 0 {
                break;
            }
            self.hash.update(&buffer[..length]);
            self.file.write_all(&buffer[..length])?;
            left -= length as u64;
        }
        ensure!(left == 0, "{} was changed while it was read", path.display());
        self.pad(size)
    }

    fn pad(&mut self, size: u64) -> Result<()> {
        let rest = usize::try_from(size % BLOCK as u64)?;
        if rest > 0 {
            self.file.write_all(&[0; BLOCK][rest..])?;
        }
        Ok(())
    }

    /// Everything but the time of a change is part of the hash.
    fn header(&mut self, header: &Header<'_>) -> Result<()> {
        for part in [header.name, header.link] {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
        self.hash.update(header.mode.to_le_bytes());
        self.hash.update(header.size.to_le_bytes());
        self.hash.update([header.kind]);
        let records = header.records();
        if !records.is_empty() {
            let extended = Header {
                name: b"pax",
                link: &[],
                mode: 0o644,
                size: records.len() as u64,
                mtime: 0,
                kind: b'x',
            };
            self.file.write_all(&extended.block())?;
            self.file.write_all(&records)?;
            self.pad(records.len() as u64)?;
        }
        self.file.write_all(&header.block())?;
        Ok(())
    }

    /// Ends the archive: the file, from its beginning, and the hash.
    pub(super) fn finish(mut self) -> Result<(File, String)> {
        self.file.write_all(&[0; 2 * BLOCK])?;
        let mut file = match self.file.into_inner() {
            Ok(file) => file,
            Err(error) => bail!("write a temporary file: {}", error.error()),
        };
        file.rewind()?;
        Ok((file, hex(&self.hash.finalize())))
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Header<'a> {
    name: &'a [u8],
    link: &'a [u8],
    mode: u32,
    size: u64,
    mtime: u64,
    kind: u8,
}

impl Header<'_> {
    /// Values that do not fit into the header block, as records.
    fn records(&self) -> Vec<u8> {
        let mut records = Vec::new();
        let mut add = |key: &str, value: &[u8]| {
            // The length counts its own digits.
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while rest + length.to_string().len() != length {
                length = rest + length.to_string().len();
            }
            records.extend_from_slice(format!("{length} {key}=").as_bytes());
            records.extend_from_slice(value);
            records.push(b'\n');
        };
        if self.name.len() > 100 {
            add("path", self.name);
        }
        if self.link.len() > 100 {
            add("linkpath", self.link);
        }
        if self.size > SIZE_MAX {
            add("size", self.size.to_string().as_bytes());
        }
        records
    }

    fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.name[..self.name.len().min(100)]);
        put(100, format!("{:07o}\0", self.mode).as_bytes());
        put(108, b"0000000\x000000000\0");
        let size = if self.size > SIZE_MAX { 0 } else { self.size };
        put(124, format!("{size:011o}\0").as_bytes());
        put(136, format!("{:011o}\0", self.mtime.min(SIZE_MAX)).as_bytes());
        // Counted as blanks in the sum.
        put(148, b"        ");
        put(156, &[self.kind]);
        put(157, &self.link[..self.link.len().min(100)]);
        put(257, b"ustar\x0000");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(dir: &Path, names: &[&str]) -> (Vec<u8>, String) {
        let mut archive = Archive::begin().unwrap();
        for name in names {
            archive.add(&dir.join(name), name, false).unwrap();
        }
        let (mut file, hash) = archive.finish().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        (bytes, hash)
    }

    #[test]
    fn an_archive_has_whole_blocks_and_a_hash_of_its_content() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), "x".repeat(513)).unwrap();
        std::os::unix::fs::symlink("a", dir.path().join("l")).unwrap();
        let (bytes, hash) = archive(dir.path(), &["a", "l"]);
        assert_eq!(bytes.len(), BLOCK * (1 + 2 + 1 + 2));
        assert_eq!(hash.len(), 64);
        let later = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(9);
        File::open(dir.path().join("a")).unwrap().set_modified(later).unwrap();
        assert_eq!(archive(dir.path(), &["a", "l"]).1, hash);
        std::fs::write(dir.path().join("a"), "y".repeat(513)).unwrap();
        assert_ne!(archive(dir.path(), &["a", "l"]).1, hash);
    }

    #[test]
    fn long_names_have_a_record() {
        let header = Header {
            name: &[b'n'; 101],
            link: &[],
            mode: 0,
            size: 0,
            mtime: 0,
            kind: b'0',
        };
        let records = header.records();
        assert_eq!(records.len(), 111);
        assert!(records.starts_with(b"111 path=nnn"));
    }
}
