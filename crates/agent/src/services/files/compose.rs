//! `POST /files/compose`: one file out of several, which are gone afterwards.
//!
//! The new file is made beside its destination and put there by renaming, so that no process sees half of it. Copying
//! goes in steps, between which other transfers get the threads, and stops when the client is gone; what was begun is
//! removed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use http::{Request, StatusCode};
use hyper::body::Incoming;
use serde::Deserialize;

use super::access::find_user;
use super::failure::{Failure, blocking};
use super::upload::Written;
use crate::caller::Accounts;
use crate::directories;
use crate::space::{self, Wanted};
use crate::transport::messages::MessageMemory;
use crate::users::User;

/// Bytes that are copied before other transfers get a turn.
const STEP: u64 = 8 * 1024 * 1024;

#[derive(Deserialize)]
struct Order {
    #[serde(default, deserialize_with = "protocol::connect::json::or_default")]
    source_paths: Vec<String>,
    #[serde(default, deserialize_with = "protocol::connect::json::or_default")]
    destination: String,
    #[serde(default)]
    username: Option<String>,
}

/// A file to copy: as the client wrote it, and where it is.
#[derive(Clone)]
struct Source {
    shown: String,
    path: PathBuf,
}

/// A file that is being made. It is removed unless it was put in its place.
struct Draft {
    path: PathBuf,
    placed: bool,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.placed {
            let path = std::mem::take(&mut self.path);
            // Freeing gigabytes takes its time.
            tokio::task::spawn_blocking(move || fs::remove_file(path));
        }
    }
}

/// Makes the file that a request asks for.
pub(super) async fn compose(
    accounts: &Accounts,
    memory: &MessageMemory,
    request: Request<Incoming>,
) -> Result<Written, Failure> {
    let bad = |message: String| Failure::new(StatusCode::BAD_REQUEST, message);
    let unreadable = |reason: &str| bad(format!("invalid request body: {reason}"));
    let message = memory.read(request.into_body()).await;
    let message = message.map_err(|error| unreadable(&error.message))?;
    // A derived reader would also take an array for a struct.
    if message.bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(unreadable("not a JSON object"));
    }
    let order: Order = serde_json::from_slice(&message.bytes).map_err(|error| unreadable(&error.to_string()))?;
    if order.source_paths.is_empty() {
        return Err(bad("source_paths must not be empty".to_owned()));
    }
    if order.destination.is_empty() {
        return Err(bad("destination is required".to_owned()));
    }
    let user = find_user(accounts, order.username.as_deref())?;
    let resolve = |path: &str| {
        let resolved = accounts.resolve(&user, path);
        resolved.map_err(|error| bad(format!("error resolving path: {error}")))
    };
    let destination = resolve(&order.destination)?;
    let mut sources = Vec::with_capacity(order.source_paths.len());
    for shown in order.source_paths {
        let path = resolve(&shown)?;
        if path == destination {
            let message = format!("source path \"{shown}\" cannot be the same as destination");
            return Err(bad(message));
        }
        sources.push(Source { shown, path });
    }

    let (mut draft, mut file, sources) = {
        let destination = destination.clone();
        blocking(move || {
            sources.iter().try_for_each(|source| open(source).map(drop))?;
            let (draft, file) = begin(&destination, &user)?;
            Ok((draft, file, sources))
        })
        .await?
    };
    for source in &sources {
        let mut content = {
            let source = source.clone();
            Some(blocking(move || open(&source)).await?)
        };
        while let Some(from) = content.take() {
            let at = draft.path.clone();
            let (from, to, more) = blocking(move || copy(from, file, &at)).await?;
            file = to;
            content = more.then_some(from);
        }
    }
    let written = Written::file(&destination);
    let path = draft.path.clone();
    blocking(move || place(&path, &destination, &sources)).await?;
    draft.placed = true;
    Ok(written)
}

/// Opens a source, which must be a regular file.
fn open(source: &Source) -> Result<File, Failure> {
    let shown = &source.shown;
    let irregular = || {
        let message = format!("source path is not a regular file: {shown}");
        Failure::new(StatusCode::BAD_REQUEST, message)
    };
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(StatusCode::NOT_FOUND, format!("source file not found: {shown}")),
        _ => Failure::internal(&format!("error opening source file '{shown}'"), &error),
    };
    if !fs::metadata(&source.path).map_err(failed)?.is_file() {
        return Err(irregular());
    }
    // Whatever is there by now, opening it must not wait.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&source.path)
        .map_err(failed)?;
    if file.metadata().map_err(failed)?.is_file() {
        Ok(file)
    } else {
        Err(irregular())
    }
}

/// Makes the new file beside its destination.
fn begin(destination: &Path, user: &User) -> Result<(Draft, File), Failure> {
    if let Some(parent) = destination.parent() {
        directories::ensure(parent, user).map_err(|error| failure("error ensuring directories", parent, &error))?;
    }
    let mut path = destination.as_os_str().to_owned();
    path.push(format!(".e2b-compose.{}.tmp", random_id()?));
    let path = PathBuf::from(path);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o666)
        .open(&path)
        .map_err(|error| failure("error creating destination file", &path, &error))?;
    let draft = Draft { path, placed: false };
    fchown(&file, Some(user.uid), Some(user.gid))
        .map_err(|error| failure("error changing file ownership", &draft.path, &error))?;
    Ok((draft, file))
}

/// An id in the usual form of random ones.
fn random_id() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Failure::internal("error naming destination file", &error.into()))?;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    Ok(format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    ))
}

/// Copies one step to the file of a draft. The files are handed back, and whether there is more.
fn copy(from: File, to: File, draft: &Path) -> Result<(File, File, bool), Failure> {
    let copied = io::copy(&mut (&from).take(STEP), &mut &to);
    let copied = copied.map_err(|error| failure("error writing file", draft, &error))?;
    Ok((from, to, copied == STEP))
}

/// Puts the new file where it belongs and removes what it was made of.
fn place(draft: &Path, destination: &Path, sources: &[Source]) -> Result<(), Failure> {
    fs::rename(draft, destination).map_err(|error| failure("error renaming file", destination, &error))?;
    let identity = |path: &Path| {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let new = identity(destination);
    for source in sources {
        // The destination may have been a source under another spelling of its path.
        if new.is_none() || identity(&source.path) == new {
            continue;
        }
        match fs::remove_file(&source.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failure(
                    &format!("error removing source file '{}'", source.shown),
                    &source.path,
                    &error,
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn failure(what: &str, path: &Path, error: &io::Error) -> Failure {
    let wanted = if path.exists() { Wanted::Bytes } else { Wanted::Entry };
    match space::shortage(error, path, wanted) {
        Some(shortage) => Failure::new(StatusCode::INSUFFICIENT_STORAGE, shortage),
        None => Failure::internal(what, error),
    }
}
