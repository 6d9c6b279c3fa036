//! Archives of files of this machine, in a file without a name.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use formats::tar::{self, BLOCK, Header, NUMBER_END, TEXT_MAX, add_record, padding};
use rustix::fs::{CWD, Mode, OFlags};
use sha2::{Digest as _, Sha256};

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
            path: name.as_bytes(),
            mode: metadata.mode() & 0o7777,
            mtime: u64::try_from(metadata.mtime()).unwrap_or(0).min(NUMBER_END - 1),
            kind: b'0',
            ..Header::default()
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
        Ok(self.file.write_all(&[0; BLOCK][..padding(size)])?)
    }

    /// Everything but the time of a change is part of the hash.
    fn header(&mut self, header: &Header<'_>) -> Result<()> {
        for part in [header.path, header.link] {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
        self.hash.update(header.mode.to_le_bytes());
        self.hash.update(header.size.to_le_bytes());
        self.hash.update([header.kind]);
        tar::write_records(&mut self.file, &records_of(header))?;
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
        Ok((file, hex::encode(self.hash.finalize())))
    }
}

/// What does not fit into the block of a header.
fn records_of(header: &Header<'_>) -> Vec<u8> {
    let mut records = Vec::new();
    if header.path.len() > TEXT_MAX {
        add_record(&mut records, b"path", header.path);
    }
    if header.link.len() > TEXT_MAX {
        add_record(&mut records, b"linkpath", header.link);
    }
    if header.size >= NUMBER_END {
        add_record(&mut records, b"size", header.size.to_string().as_bytes());
    }
    records
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
        let records = records_of(&Header {
            path: &[b'n'; 101],
            kind: b'0',
            ..Header::default()
        });
        assert_eq!(records.len(), 111);
        assert!(records.starts_with(b"111 path=nnn"));
    }
}
