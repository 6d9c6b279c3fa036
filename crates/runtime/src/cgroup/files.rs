//! Files of control groups, with errors that name them.

use std::fs;
use std::io;
use std::path::Path;

pub(super) fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text).map_err(|e| named(path, &e))
}

/// The error, with the name of the file or group.
pub(super) fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
