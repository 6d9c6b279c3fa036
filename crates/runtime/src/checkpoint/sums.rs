//! Checksums of a checkpoint: a damaged one is refused before anything is started from it, instead of failing somewhere in
//! the middle, or restoring processes with damaged memory.
//!
//! CRC-32 finds what disks and interrupted copies do to files. It does not find what a program with access to the data
//! directory does on purpose; root alone has that access.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::sys;
use crate::cancel::Cancel;

/// File in the directory of a checkpoint with the checksums of the others. Written last.
const FILE: &str = "sums.json";
/// Earlier versions wrote logs while a checkpoint was read.
const LOGS: &str = "log";
/// Size of a read, in bytes.
const BUFFER: usize = 256 * 1024;
/// How much of a file the disk gets to write at a time, in bytes. A disk that has all of it at once keeps everybody else
/// waiting meanwhile, the database with every request that changes something: for up to 80 ms with 200 MB, on a disk that
/// writes 1.5 GB in a second.
const STRETCH: u64 = 8 << 20;
/// Pages whose content is compared before a restore, in bytes: it takes about as long as starting a process that does so meanwhile.
const FEW_PAGES: u64 = 4 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    crc32: u32,
}

/// Writes out the files of a checkpoint, and notes their checksums. Everything survives a power cut when this returns. Once it
/// is cancelled, the disk gets the rest of a stretch at most.
///
/// # Errors
/// When a file cannot be read or written, and when it is cancelled.
pub(crate) fn write(checkpoint: &Path, cancel: &Cancel) -> io::Result<()> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(checkpoint)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let file = File::open(entry.path())?;
            if !is_log(&entry.path()) {
                let mut written = 0;
                let sum = sum(&file, |bytes| {
                    cancel.check()?;
                    if bytes >= written + STRETCH {
                        // The one before, whose checksum has been computed since it was begun.
                        sys::wait_for_write_out(&file, written.saturating_sub(STRETCH)..written)?;
                        sys::begin_write_out(&file, written..bytes)?;
                        written = bytes;
                    }
                    Ok(())
                })?;
                sums.insert(entry.file_name().to_string_lossy().into_owned(), sum);
            }
            cancel.check()?;
            file.sync_all()?;
        }
    }
    let path = checkpoint.join(FILE);
    fs::write(&path, serde_json::to_vec(&sums)?)?;
    File::open(path)?.sync_all()?;
    File::open(checkpoint)?.sync_all()
}

/// Compares a checkpoint with its checksums, but for the content of many pages, which [`check_pages`] compares: that takes
/// about as long as it takes to restore them, and can be done at the same time. What CRIU is told by the other files is known to
/// be right then, and pages are only copied.
///
/// # Errors
/// When it is damaged, with what is. When it is not there.
pub(crate) fn check_but_pages(checkpoint: &Path) -> io::Result<Compared> {
    let are_many = bytes_of_pages(checkpoint)? > FEW_PAGES;
    let mut compared = compare(checkpoint, |name| !are_many || !is_pages(name))?;
    compared.pages_remain = are_many;
    Ok(compared)
}

/// Compares the pages of a checkpoint with their checksums.
///
/// # Errors
/// As [`check_but_pages`].
pub(crate) fn check_pages(checkpoint: &Path) -> io::Result<()> {
    compare(checkpoint, is_pages).map(drop)
}

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compared {
    /// Size of the checkpoint, in bytes.
    pub(crate) bytes: u64,
    /// Whether only the length of its pages was compared.
    pub(crate) pages_remain: bool,
}

/// Compares the files of a checkpoint with what was noted about them: the length of each, and the content of those that are
/// wanted.
fn compare(checkpoint: &Path, is_wanted: impl Fn(&str) -> bool) -> io::Result<Compared> {
    let damaged =
        |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("the checkpoint is damaged: {what}"));
    let sums = fs::read(checkpoint.join(FILE))?;
    let sums: BTreeMap<String, Sum> =
        serde_json::from_slice(&sums).map_err(|error| damaged(format!("{FILE}: {error}")))?;
    let mut bytes = 0;
    for (name, want) in sums {
        let file = match File::open(checkpoint.join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(damaged(format!("{name} is missing"))),
            file => file?,
        };
        let length = file.metadata()?.len();
        if length != want.bytes {
            return Err(damaged(format!("{name} has {length} bytes instead of {}", want.bytes)));
        }
        if is_wanted(&name) && sum(&file, |_| Ok(()))? != want {
            return Err(damaged(format!("the checksum of {name} is wrong")));
        }
        bytes += length;
    }
    Ok(Compared {
        bytes,
        pages_remain: false,
    })
}

/// Length of the files of a checkpoint that have pages, in bytes.
fn bytes_of_pages(checkpoint: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(checkpoint)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_pages) {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

/// Whether a file of a checkpoint has the content of memory, and nothing else.
fn is_pages(name: &str) -> bool {
    name.starts_with("pages-")
}

/// The space that the files of a checkpoint take on the disk, in bytes; 0 if there is none.
pub(crate) fn space(checkpoint: &Path) -> io::Result<u64> {
    let entries = match fs::read_dir(checkpoint) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut bytes = 0;
    for entry in entries {
        let blocks = std::os::unix::fs::MetadataExt::blocks(&entry?.metadata()?);
        bytes += blocks.saturating_mul(512);
    }
    Ok(bytes)
}

fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == LOGS)
}

/// `after` is called with the number of bytes after each read, and its error ends this.
fn sum(mut file: &File, mut after: impl FnMut(u64) -> io::Result<()>) -> io::Result<Sum> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; BUFFER];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            length => {
                hasher.update(&buffer[..length]);
                bytes += length as u64;
                after(bytes)?;
            }
        }
    }
    let crc32 = hasher.finalize();
    Ok(Sum { bytes, crc32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some stretches, and a part of one.
    const LENGTH: usize = (25 << 20) + 1;

    /// Compares all of a checkpoint, and returns its size in bytes.
    fn check(checkpoint: &Path) -> io::Result<u64> {
        let compared = check_but_pages(checkpoint)?;
        check_pages(checkpoint)?;
        Ok(compared.bytes)
    }

    #[test]
    fn damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = dir.path();
        let pages = checkpoint.join("pages-1.img");
        fs::write(&pages, vec![7; LENGTH]).unwrap();
        fs::write(checkpoint.join("about.json"), "{}").unwrap();
        assert_eq!(check(checkpoint).unwrap_err().kind(), io::ErrorKind::NotFound);
        write(checkpoint, &Cancel::new().unwrap()).unwrap();
        assert_eq!(check(checkpoint).unwrap(), LENGTH as u64 + 2);
        assert!(space(checkpoint).unwrap() >= LENGTH as u64);
        // What is written while it is read does not count.
        fs::write(checkpoint.join("restore.log"), "text").unwrap();
        check(checkpoint).unwrap();

        let why = || check(checkpoint).unwrap_err().to_string();
        let mut flipped = vec![7; LENGTH];
        flipped[BUFFER] ^= 1;
        fs::write(&pages, &flipped).unwrap();
        assert!(why().contains("the checksum of pages-1.img is wrong"), "{}", why());
        fs::write(&pages, &flipped[1..]).unwrap();
        assert!(why().contains("pages-1.img has"), "{}", why());
        fs::remove_file(&pages).unwrap();
        assert!(why().contains("pages-1.img is missing"), "{}", why());
        fs::write(checkpoint.join(FILE), "{").unwrap();
        assert!(why().contains("sums.json"), "{}", why());
        assert_eq!(space(&checkpoint.join("nowhere")).unwrap(), 0);
    }

    #[test]
    fn many_pages_are_compared_apart() {
        for (length, pages_remain) in [(LENGTH, true), (1 << 20, false)] {
            let dir = tempfile::tempdir().unwrap();
            let checkpoint = dir.path();
            let [pages, core] = ["pages-1.img", "core-1.img"].map(|name| checkpoint.join(name));
            fs::write(&pages, vec![7; length]).unwrap();
            fs::write(&core, "a message").unwrap();
            write(checkpoint, &Cancel::new().unwrap()).unwrap();
            let bytes = length as u64 + 9;
            let whole = Compared { bytes, pages_remain };
            assert_eq!(check_but_pages(checkpoint).unwrap(), whole);
            check_pages(checkpoint).unwrap();

            let mut flipped = vec![7; length];
            flipped[length / 2] ^= 1;
            fs::write(&pages, &flipped).unwrap();
            assert_eq!(check_but_pages(checkpoint).is_ok(), pages_remain);
            let error = check_pages(checkpoint).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(
                error.to_string().contains("the checksum of pages-1.img is wrong"),
                "{error}"
            );

            // Their length is compared in any case, and what CRIU reads of the rest is whole before it starts.
            fs::write(&pages, vec![7; length - 1]).unwrap();
            assert!(check_but_pages(checkpoint).is_err());
            fs::write(&pages, vec![7; length]).unwrap();
            fs::write(&core, "a massage").unwrap();
            let error = check_but_pages(checkpoint).unwrap_err();
            assert!(error.to_string().contains("core-1.img"), "{error}");
            check_pages(checkpoint).unwrap();
            fs::write(&core, "a message").unwrap();
            fs::remove_file(&pages).unwrap();
            assert!(
                check_but_pages(checkpoint)
                    .unwrap_err()
                    .to_string()
                    .contains("pages-1.img is missing")
            );
            assert!(check_pages(checkpoint).is_err());
        }
    }

    #[test]
    fn what_is_cancelled_has_no_checksums() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pages-1.img"), vec![7; LENGTH]).unwrap();
        let cancel = Cancel::new().unwrap();
        cancel.request();
        let error = write(dir.path(), &cancel).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(check(dir.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
