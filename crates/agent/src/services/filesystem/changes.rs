//! Making directories, and moving entries.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use protocol::connect::{Code, Error};

use crate::directories::ensure;
use crate::space::{self, Wanted};
use crate::users::User;

/// Makes a directory and what it needs above, as the user's.
///
/// # Errors
/// `already_exists`; `invalid_argument` when another kind of entry is there; `internal`.
pub(super) fn make(path: &Path, user: &User) -> Result<(), Error> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            let message = format!("directory already exists: {}", path.display());
            Err(Error::new(Code::AlreadyExists, message))
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {}", path.display());
            Err(Error::new(Code::InvalidArgument, message))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            ensure(path, user).map_err(|error| not_made("error creating directory", path, &error))
        }
        Err(error) => Err(internal("error getting file info", &error)),
    }
}

/// Gives `source` the name `destination`, over a file that has it, and makes the directories that it needs.
///
/// # Errors
/// `not_found` without a source; `internal`.
pub(super) fn rename(source: &Path, destination: &Path, user: &User) -> Result<(), Error> {
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::NotFound => Error::new(Code::NotFound, format!("source file not found: {error}")),
        _ => not_made("error renaming", destination, &error),
    };
    // Asked first, so that no directories are made for nothing.
    fs::symlink_metadata(source).map_err(failed)?;
    if let Some(parent) = destination.parent() {
        ensure(parent, user).map_err(|error| not_made("error creating directory", parent, &error))?;
    }
    fs::rename(source, destination).map_err(failed)
}

/// The error of an entry that could not be made at a path. What room there is none for is said in words: the system has
/// one text for bytes and inodes alike.
fn not_made(what: &str, path: &Path, error: &io::Error) -> Error {
    match space::shortage(error, path, Wanted::Entry) {
        Some(shortage) => Error::new(Code::Internal, format!("{what}: {shortage}")),
        None => internal(what, error),
    }
}

fn internal(what: &str, error: &io::Error) -> Error {
    Error::new(Code::Internal, format!("{what}: {error}"))
}
