//! Small file operations, most of them relative to open directories.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};

/// The outcome of an operation on something that may not be there; none if it is not.
///
/// # Errors
/// When the operation failed for another reason.
pub fn if_there<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Opens a directory as the base of relative paths.
pub(crate) fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        CWD,
        path,
        OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Opens a directory below another.
pub(crate) fn open_dir_at(dir: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        dir,
        path,
        OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Opens an existing file below a directory for writing.
pub(crate) fn open_for_writing(dir: BorrowedFd<'_>, path: &str) -> io::Result<File> {
    Ok(rustix::fs::openat(dir, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Reads a small file below a directory.
pub(crate) fn read_at(dir: BorrowedFd<'_>, path: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let read = rustix::fs::openat(dir, path, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| io::read_to_string(File::from(file)));
    read.map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

/// Writes `text` into an existing file below a directory, in one call, as control files require.
pub(crate) fn write_at(dir: BorrowedFd<'_>, path: &str, text: &str) -> io::Result<()> {
    open_for_writing(dir, path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}
