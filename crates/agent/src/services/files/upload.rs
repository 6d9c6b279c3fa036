//! `POST /files`: one raw file, or the files of a form.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, chown, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use serde::Serialize;
use tokio::task::JoinHandle;

use super::failure::{Failure, blocking};
use super::metadata;
use super::multipart::{FormEvent, Malformed, Reader};
use super::source::Source;
use super::transfers::{Transfer, Transfers};
use crate::attributes::Subject;
use crate::caller::Accounts;
use crate::directories;
use crate::space::{self, Wanted};
use crate::transport::http::{self as answers, Body, header_text};
use crate::users::User;

/// A file that was written, as it is in the answer.
#[derive(Serialize)]
pub(super) struct Written {
    path: String,
    name: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    /// A file without metadata.
    pub(super) fn file(path: &Path) -> Self {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Self {
            path: path.to_string_lossy().into_owned(),
            name: name.unwrap_or_default(),
            r#type: "file",
            metadata: BTreeMap::new(),
        }
    }
}

/// The settings of one upload: its user, and what is attached to its files.
struct Upload<'a> {
    accounts: &'a Accounts,
    transfers: &'a Transfers,
    user: User,
    metadata: Arc<BTreeMap<String, String>>,
    /// The length that the client announced, for the message about a full disk.
    announced: Option<String>,
}

/// Writes the file or the files in a request.
pub(super) async fn receive(
    accounts: &Accounts,
    transfers: &Transfers,
    user: User,
    path: Option<&str>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Failure> {
    let (head, body) = request.into_parts();
    let mut source = match Source::new(&head.headers, body, &transfers.decoders).await {
        Ok(source) => source,
        Err(refused) => return Err(refused.drain().await),
    };
    let result = match Upload::new(accounts, transfers, user, &head.headers, &source) {
        Ok(upload) => upload.receive(path, &head.headers, &mut source).await,
        Err(failure) => Err(failure),
    };
    // What follows a form is read as well, so that the connection can be used again.
    source.drain().await;
    Ok(answers::json(StatusCode::OK, &result?))
}

impl<'a> Upload<'a> {
    /// An upload whose request has these headers.
    fn new(
        accounts: &'a Accounts,
        transfers: &'a Transfers,
        user: User,
        headers: &HeaderMap,
        source: &Source,
    ) -> Result<Self, Failure> {
        let metadata = metadata::of_headers(headers).map_err(|reason| bad(format!("invalid metadata: {reason}")))?;
        Ok(Self {
            accounts,
            transfers,
            user,
            metadata: Arc::new(metadata),
            // Of what is compressed, the length says nothing about the file.
            announced: match source {
                Source::Plain(_) => header_text(headers, header::CONTENT_LENGTH).map(str::to_owned),
                Source::Compressed(_) => None,
            },
        })
    }

    /// Writes what the content type says: one file, or those of a form.
    async fn receive(
        &self,
        path: Option<&str>,
        headers: &HeaderMap,
        source: &mut Source,
    ) -> Result<Vec<Written>, Failure> {
        let content_type = header_text(headers, header::CONTENT_TYPE).unwrap_or_default();
        let essence = content_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        if essence == "application/octet-stream" {
            let Some(path) = path.filter(|path| !path.is_empty()) else {
                return Err(bad("path query parameter is required for raw body upload".to_owned()));
            };
            return Ok(vec![self.raw(path, source).await?]);
        }
        if essence.starts_with("multipart/") {
            return self.form(path, content_type, source).await;
        }
        Err(bad(format!(
            "unsupported content type: {content_type}, expected multipart/form-data or application/octet-stream"
        )))
    }

    async fn raw(&self, path: &str, source: &mut Source) -> Result<Written, Failure> {
        let mut target = self.open(self.resolve(path)?).await?;
        while let Some(data) = source.next().await? {
            self.write(&mut target, data).await?;
        }
        self.finish(target).await
    }

    async fn form(&self, path: Option<&str>, content_type: &str, source: &mut Source) -> Result<Vec<Written>, Failure> {
        let malformed =
            |what: &str, error: Malformed| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{what}: {error}"));
        let mut reader = Reader::new(content_type).map_err(|error| malformed("error parsing multipart form", error))?;
        let mut seen = Vec::new();
        let mut written = Vec::new();
        let mut target: Option<Target> = None;
        loop {
            match reader.next().map_err(|error| malformed("error reading form", error))? {
                None => match source.next().await? {
                    Some(data) => reader.push(data),
                    None => return Err(malformed("error reading form", Malformed::Truncated)),
                },
                Some(FormEvent::Part(head)) if head.name == "file" => {
                    let path = self.resolve(path.or(head.file_name.as_deref()).unwrap_or_default())?;
                    if seen.contains(&path) {
                        let message = format!(
                            "you cannot upload multiple files to the same path '{}' in one upload request, only the \
                             first specified file was uploaded",
                            path.display()
                        );
                        return Err(Failure::new(StatusCode::BAD_REQUEST, message));
                    }
                    seen.push(path.clone());
                    target = Some(self.open(path).await?);
                }
                Some(FormEvent::Part(_)) => {}
                Some(FormEvent::Data(data)) => {
                    if let Some(target) = &mut target {
                        self.write(target, data).await?;
                    }
                }
                Some(FormEvent::PartEnd) => {
                    if let Some(target) = target.take() {
                        written.push(self.finish(target).await?);
                    }
                }
                Some(FormEvent::End) => break,
            }
        }
        Ok(written)
    }

    fn resolve(&self, path: &str) -> Result<PathBuf, Failure> {
        self.accounts
            .resolve(&self.user, path)
            .map_err(|error| Failure::new(StatusCode::BAD_REQUEST, format!("error resolving path: {error}")))
    }

    async fn open(&self, path: PathBuf) -> Result<Target, Failure> {
        let user = self.user.clone();
        let (file, path) = blocking(move || Ok((open(&path, &user)?, path))).await?;
        Ok(Target::new(file, path, self.transfers.begin()))
    }

    async fn finish(&self, target: Target) -> Result<Written, Failure> {
        let path = target.path.clone();
        let finished = target.finish().await;
        let (file, path) = finished.map_err(|error| self.write_failure(&path, &error))?;
        let metadata = self.metadata.clone();
        let metadata = blocking(move || {
            metadata::replace(&file, &metadata).map_err(|error| {
                let message = format!("not enough space for file metadata: {error}");
                Failure::new(StatusCode::INSUFFICIENT_STORAGE, message)
            })?;
            Ok(Subject::Open(&file).metadata())
        })
        .await?;
        Ok(Written {
            metadata,
            ..Written::file(&path)
        })
    }

    async fn write(&self, target: &mut Target, data: Bytes) -> Result<(), Failure> {
        let written = target.write(data).await;
        written.map_err(|error| self.write_failure(&target.path, &error))
    }

    fn write_failure(&self, path: &Path, error: &io::Error) -> Failure {
        let Some(shortage) = space::shortage(error, path, Wanted::Bytes) else {
            return Failure::internal("error writing file", error);
        };
        let attempted = self
            .announced
            .as_ref()
            .map(|bytes| format!("attempted to write {bytes} bytes: "));
        let message = format!("{}{shortage}", attempted.unwrap_or_default());
        Failure::new(StatusCode::INSUFFICIENT_STORAGE, message)
    }
}

fn bad(message: String) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, message)
}

/// The failure to create an entry at a path.
fn not_made(what: &str, path: &Path, error: &io::Error) -> Failure {
    match space::shortage(error, path, Wanted::Entry) {
        Some(shortage) => Failure::new(StatusCode::INSUFFICIENT_STORAGE, shortage),
        None => Failure::internal(what, error),
    }
}

/// Opens a file for its new content: the user's, whatever it was before, with its mode kept.
fn open(path: &PathBuf, user: &User) -> Result<File, Failure> {
    if let Some(parent) = path.parent() {
        let ensured = directories::ensure(parent, user);
        ensured.map_err(|error| not_made("error ensuring directories", parent, &error))?;
    }
    let owning = |error| Failure::internal("error changing file ownership", &error);
    let exists = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            let message = format!("path is a directory: {}", path.display());
            return Err(Failure::new(StatusCode::BAD_REQUEST, message));
        }
        Ok(_) => {
            chown(path, Some(user.uid), Some(user.gid)).map_err(owning)?;
            true
        }
        Err(_) => false,
    };
    // A pipe without a reader must not hold a thread.
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o666)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| not_made("error opening file", path, &error))?;
    if !exists {
        fchown(&file, Some(user.uid), Some(user.gid)).map_err(owning)?;
    }
    Ok(file)
}

/// A file that is being written, in large pieces, one of them on its way to the disk while the next one fills.
///
/// What arrives is copied, so that the connection reads into the same memory again and again: the pages of fresh memory
/// cost more than the copy does.
struct Target {
    file: Arc<File>,
    path: PathBuf,
    filling: Vec<u8>,
    /// An empty buffer with the capacity of the last piece.
    spare: Vec<u8>,
    writing: Option<JoinHandle<(Vec<u8>, io::Result<()>)>>,
    transfer: Transfer,
}

impl Target {
    fn new(file: File, path: PathBuf, transfer: Transfer) -> Self {
        Self {
            file: Arc::new(file),
            path,
            filling: Vec::new(),
            spare: Vec::new(),
            writing: None,
            transfer,
        }
    }

    async fn write(&mut self, mut data: Bytes) -> io::Result<()> {
        while !data.is_empty() {
            let limit = self.transfer.chunk();
            let room = limit.saturating_sub(self.filling.len());
            let fits = data.split_to(room.min(data.len()));
            if self.filling.capacity() < self.filling.len() + fits.len() {
                // Small files take little; what is once larger takes all at once.
                let more = if self.filling.is_empty() { fits.len() } else { room };
                self.filling.reserve_exact(more);
            }
            self.filling.extend_from_slice(&fits);
            if self.filling.len() >= limit {
                self.settle().await?;
                self.begin();
            }
        }
        Ok(())
    }

    fn begin(&mut self) {
        let piece = std::mem::replace(&mut self.filling, std::mem::take(&mut self.spare));
        if self.filling.capacity() > self.transfer.chunk() {
            // There are more transfers than there were.
            self.filling = Vec::new();
        }
        let file = self.file.clone();
        self.writing = Some(tokio::task::spawn_blocking(move || {
            let result = (&*file).write_all(&piece);
            (piece, result)
        }));
    }

    async fn settle(&mut self) -> io::Result<()> {
        let Some(writing) = self.writing.take() else {
            return Ok(());
        };
        let (mut piece, result) = writing.await.map_err(io::Error::other)?;
        piece.clear();
        self.spare = piece;
        result
    }

    async fn finish(mut self) -> io::Result<(Arc<File>, PathBuf)> {
        self.settle().await?;
        if !self.filling.is_empty() {
            self.begin();
            self.settle().await?;
        }
        Ok((self.file, self.path))
    }
}
