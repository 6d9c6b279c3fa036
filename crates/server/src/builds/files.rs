//! Archives that clients upload for builds: in the data directory of the node, by team and hash.
//!
//! The hash is the client's and says nothing about the content. An archive is written to a file of its own first, so
//! that a build never reads one that is incomplete, and an upload that was cut leaves nothing.
//!
//! Space is reserved before it is written, in steps: for the team, whose archives and uploads together have a limit, and
//! on the host. With a blob store, an archive is stored there before anything says that it is present, and what is in
//! the data directory is a copy. So the limits hold however many uploads run at the same time and whether or not they announce a size,
//! and one that announces much and sends nothing takes no space from others.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobs::checked::{Appending, CHECKSUM};
use blobs::{BlobError, Blobs, Name};
use bytes::Bytes;
use model::id::TeamId;
use parking_lot::Mutex;
use store::builds::FileRow;
use store::error::StoreError;
use store::nodes::NodeRows;
use tokio::io::AsyncWriteExt as _;

use crate::admission::AdmissionControl;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::keys::random_hex;
use crate::layers::StoredLayers;
use crate::settings::BuildSettings;

/// The beginning of the name of a file that is being written.
const PARTIAL: &str = ".partial-";
/// Maximum space that an upload reserves at a time, in bytes.
const STEP: u64 = 1 << 20;

/// Why an archive was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot write an uploaded file")]
    Io(#[from] io::Error),
    #[error("the archive is larger than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the archives of the team are larger than {limit} bytes")]
    TeamFull { limit: u64 },
    #[error("the disk of the host is almost full")]
    DiskFull,
    #[error("the platform keeps no archives")]
    Off,
    #[error("the blob store of the platform does not work: try again, or ask its operator")]
    Blobs(#[from] BlobError),
    #[error("the archive in the blob store is damaged: upload it again")]
    Damaged,
}

/// The archives of the node.
#[derive(Debug)]
pub(crate) struct BuildFiles {
    directory: Option<PathBuf>,
    rows: NodeRows,
    admission: Arc<AdmissionControl>,
    /// The blob store, if there is one.
    stored: Option<Arc<StoredLayers>>,
    clock: Clock,
    file_bytes: u64,
    team_bytes: u64,
    uploads: Arc<Mutex<Uploads>>,
    /// Held while a file and its row change together.
    changes: tokio::sync::Mutex<()>,
    /// Held while a file is fetched from the blob store, so that it is fetched once.
    fetches: tokio::sync::Mutex<()>,
}

/// Space that uploads in progress have reserved, in bytes.
#[derive(Debug, Default)]
struct Uploads {
    /// Bytes by team: those written, and those that may be written.
    reserved: HashMap<TeamId, u64>,
    /// What was not written yet, of all teams.
    unwritten: u64,
}

/// Space that an upload has reserved, released when this is dropped.
#[derive(Debug)]
struct Space {
    uploads: Arc<Mutex<Uploads>>,
    team: TeamId,
    /// The size that the client announced, if any.
    announced: Option<u64>,
    reserved: u64,
    written: u64,
}

impl Space {
    /// What was announced and is not reserved yet.
    fn rest(&self) -> Option<u64> {
        self.announced.map(|announced| announced.saturating_sub(self.reserved))
    }

    /// Reserves another step; returns what the team has reserved then.
    fn grow(&mut self) -> u64 {
        let step = self.rest().map_or(STEP, |rest| rest.min(STEP));
        let mut uploads = self.uploads.lock();
        self.reserved = self.reserved.saturating_add(step);
        uploads.unwritten = uploads.unwritten.saturating_add(step);
        let of_team = uploads.reserved.entry(self.team.clone()).or_default();
        *of_team = of_team.saturating_add(step);
        *of_team
    }

    /// Notes that bytes were written.
    fn note_written(&mut self, bytes: u64) {
        self.written = self.written.saturating_add(bytes);
        let mut uploads = self.uploads.lock();
        uploads.unwritten = uploads.unwritten.saturating_sub(bytes);
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let mut uploads = self.uploads.lock();
        uploads.unwritten = uploads
            .unwritten
            .saturating_sub(self.reserved.saturating_sub(self.written));
        if let Some(of_team) = uploads.reserved.get_mut(&self.team) {
            *of_team = of_team.saturating_sub(self.reserved);
            if *of_team == 0 {
                uploads.reserved.remove(&self.team);
            }
        }
    }
}

/// Space for a file of the blob store, which counts as not written yet until this is dropped.
#[derive(Debug)]
struct Unwritten<'a> {
    uploads: &'a Mutex<Uploads>,
    bytes: u64,
}

impl<'a> Unwritten<'a> {
    fn reserve(uploads: &'a Mutex<Uploads>, bytes: u64) -> Self {
        let mut all = uploads.lock();
        all.unwritten = all.unwritten.saturating_add(bytes);
        Self { uploads, bytes }
    }
}

impl Drop for Unwritten<'_> {
    fn drop(&mut self) {
        let mut all = self.uploads.lock();
        all.unwritten = all.unwritten.saturating_sub(self.bytes);
    }
}

/// A file that is removed when this is dropped, unless its path is empty.
#[derive(Debug)]
struct Partial {
    path: PathBuf,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An archive that is being uploaded.
#[derive(Debug)]
pub(crate) struct Upload {
    file: Option<File>,
    partial: Partial,
    space: Space,
}

/// Whether a text is the hash of files: 64 lower-case hexadecimal digits. So it is a safe name of a file.
pub(crate) fn is_hash(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

impl BuildFiles {
    /// Opens the archives, and removes uploads that were cut by a restart.
    pub(crate) fn open(
        settings: &BuildSettings,
        rows: NodeRows,
        admission: Arc<AdmissionControl>,
        clock: Clock,
        stored: Option<Arc<StoredLayers>>,
    ) -> Self {
        let directory = settings.directory.as_ref().map(|directory| directory.join("files"));
        let directory = directory.and_then(|directory| match make_directory(&directory) {
            Ok(()) => Some(directory),
            Err(error) => {
                tracing::error!("cannot keep files for builds, so no template can copy any: {error}");
                None
            }
        });
        if let Some(directory) = &directory {
            remove_partial(directory);
        }
        Self {
            directory,
            rows,
            admission,
            stored,
            clock,
            file_bytes: settings.file_bytes,
            team_bytes: settings.team_files_bytes,
            uploads: Arc::default(),
            changes: tokio::sync::Mutex::default(),
            fetches: tokio::sync::Mutex::default(),
        }
    }

    fn path(&self, team: &TeamId, hash: &str) -> Option<PathBuf> {
        let directory = self.directory.as_ref().filter(|_| is_hash(hash))?;
        Some(directory.join(team.as_str()).join(format!("{hash}.tar")))
    }

    /// Whether the archives can be kept.
    pub(crate) fn is_on(&self) -> bool {
        self.directory.is_some()
    }

    /// Whether a team has an archive with that hash. It counts as used now.
    pub(crate) async fn is_present(&self, team: &TeamId, hash: &str) -> bool {
        let Some(path) = self.path(team, hash) else {
            return false;
        };
        match self.rows.template_file_find(team, hash, self.clock.now_us()).await {
            Ok(Some(_)) if path.is_file() => true,
            Ok(Some(_)) => self.is_stored(team, hash).await,
            Ok(None) => false,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot look for an uploaded file");
                false
            }
        }
    }

    async fn is_stored(&self, team: &TeamId, hash: &str) -> bool {
        let Some(stored) = &self.stored else {
            return false;
        };
        let name = Name::File(team.clone(), hash.to_owned());
        matches!(stored.blobs.head(&name).await, Ok(Some(_)))
    }

    /// The archive of a team with that hash, which is fetched from the blob store unless it is on the node. It counts as
    /// used now.
    pub(crate) async fn find(&self, team: &TeamId, hash: &str) -> Result<Option<PathBuf>, FileError> {
        let Some(path) = self.path(team, hash) else {
            return Ok(None);
        };
        let row = self.rows.template_file_find(team, hash, self.clock.now_us()).await?;
        if row.is_none() || path.is_file() {
            return Ok(row.map(|_| path));
        }
        let Some(stored) = &self.stored else {
            return Ok(None);
        };
        let _fetches = self.fetches.lock().await;
        if path.is_file() {
            return Ok(Some(path));
        }
        let name = Name::File(team.clone(), hash.to_owned());
        match self.fetch(&stored.blobs, &name, &path).await {
            Err(FileError::Blobs(BlobError::NotFound(_))) => Ok(None),
            fetched => fetched.map(|()| Some(path)),
        }
    }

    async fn fetch(&self, blobs: &Blobs, name: &Name, path: &Path) -> Result<(), FileError> {
        let (size, object) = blobs.get(name).await?;
        self.check_size(size.saturating_sub(CHECKSUM))?;
        let _space = Unwritten::reserve(&self.uploads, size);
        self.check_free(0).await?;
        let partial = path.with_file_name(format!("{PARTIAL}{}", random_hex().map_err(io::Error::other)?));
        let mut upload = Partial { path: partial };
        make_directory(path.parent().unwrap_or(path))?;
        let mut file = tokio::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&upload.path)
            .await?;
        match blobs::checked::copy(object, size, &mut file).await {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::error!(object = %name, "an object of the blob store does not match its checksum, so it is not used: whoever needs it has to upload it again");
                return Err(FileError::Damaged);
            }
            Err(error) => return Err(error.into()),
        }
        file.flush().await?;
        file.sync_data().await?;
        tokio::fs::rename(&upload.path, path).await?;
        // It has another name now, so there is nothing to remove.
        upload.path.clear();
        tracing::info!(object = %name, bytes = size, "fetched uploaded files from the blob store");
        Ok(())
    }

    /// Checks that the host has space for what was announced, and for `rest` more.
    async fn check_free(&self, rest: u64) -> Result<(), FileError> {
        let unwritten = self.uploads.lock().unwritten;
        let spare = self.admission.spare_disk_bytes().await.unwrap_or(u64::MAX);
        if spare < unwritten.saturating_add(rest) {
            Err(FileError::DiskFull)
        } else {
            Ok(())
        }
    }

    /// Begins an upload of `announced` bytes, if the client said so.
    pub(crate) async fn begin(&self, team: &TeamId, hash: &str, announced: Option<u64>) -> Result<Upload, FileError> {
        let path = self.path(team, hash).ok_or(FileError::Off)?;
        self.check_size(announced.unwrap_or(0))?;
        let mut space = Space {
            uploads: Arc::clone(&self.uploads),
            team: team.clone(),
            announced,
            reserved: 0,
            written: 0,
        };
        self.reserve(&mut space).await?;
        let name = format!("{PARTIAL}{}", random_hex().map_err(io::Error::other)?);
        let partial = path.with_file_name(name);
        let opened = tokio::task::spawn_blocking(move || {
            if let Some(team) = partial.parent() {
                make_directory(team)?;
            }
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&partial)?;
            Ok::<_, io::Error>(Upload {
                file: Some(file),
                partial: Partial { path: partial },
                space,
            })
        });
        Ok(opened.await.unwrap_or_else(|error| Err(io::Error::other(error)))?)
    }

    fn check_size(&self, bytes: u64) -> Result<(), FileError> {
        if bytes > self.file_bytes {
            Err(FileError::TooLarge { limit: self.file_bytes })
        } else {
            Ok(())
        }
    }

    /// Reserves another step, and checks that there is space for it and for what else was announced.
    async fn reserve(&self, space: &mut Space) -> Result<(), FileError> {
        let of_team = space.grow();
        let rest = space.rest().unwrap_or(0);
        let limit = self.team_bytes;
        let kept = self.rows.template_file_total(&space.team).await?;
        if kept.saturating_add(of_team).saturating_add(rest) > limit {
            return Err(FileError::TeamFull { limit });
        }
        self.check_free(rest).await
    }

    /// Writes the next piece.
    pub(crate) async fn write(&self, mut upload: Upload, piece: Bytes) -> Result<Upload, FileError> {
        let size = u64::try_from(piece.len()).unwrap_or(u64::MAX);
        let bytes = upload.space.written.saturating_add(size);
        self.check_size(bytes)?;
        while bytes > upload.space.reserved {
            if upload.space.rest() == Some(0) {
                return Err(FileError::Io(io::Error::other("more was sent than announced")));
            }
            self.reserve(&mut upload.space).await?;
        }
        let written = tokio::task::spawn_blocking(move || {
            if let Some(file) = &mut upload.file {
                file.write_all(&piece)?;
            }
            upload.space.note_written(size);
            Ok::<_, io::Error>(upload)
        });
        Ok(written.await.unwrap_or_else(|error| Err(io::Error::other(error)))?)
    }

    /// Keeps an archive that is complete, in place of an earlier one.
    pub(crate) async fn keep(&self, team: &TeamId, hash: &str, mut upload: Upload) -> Result<(), FileError> {
        let path = self.path(team, hash).ok_or(FileError::Off)?;
        let synced = tokio::task::spawn_blocking(move || {
            if let Some(file) = upload.file.take() {
                file.sync_data()?;
            }
            Ok::<_, io::Error>(upload)
        });
        let mut upload = synced.await.unwrap_or_else(|error| Err(io::Error::other(error)))?;
        // Before anything says that there is such a file.
        if let Some(stored) = &self.stored {
            let name = Name::File(team.clone(), hash.to_owned());
            let mut removal = stored.last_removal(&name).await?;
            loop {
                let file = tokio::fs::File::open(&upload.partial.path).await?;
                stored.blobs.put(&name, Appending::new(file)).await?;
                if !stored.was_removed(&name, &mut removal).await? {
                    break;
                }
            }
        }
        let row = FileRow {
            team_id: team.clone(),
            hash: hash.to_owned(),
            bytes: i64::try_from(upload.space.written).unwrap_or(i64::MAX),
        };
        let _changes = self.changes.lock().await;
        // The row first: one without a file is not found and is removed in time, and a file without a row would stay.
        self.rows.template_file_put(&row, self.clock.now_us()).await?;
        let kept = tokio::task::spawn_blocking(move || {
            fs::rename(&upload.partial.path, &path)?;
            // It has another name now, so there is nothing to remove.
            upload.partial.path.clear();
            Ok::<_, io::Error>(())
        });
        Ok(kept.await.unwrap_or_else(|error| Err(io::Error::other(error)))?)
    }

    /// Removes archives that were not used since a time.
    pub(crate) async fn purge(&self, unused_since_us: i64) -> Result<usize, StoreError> {
        let mut removed = 0;
        let _changes = self.changes.lock().await;
        while let Some(row) = self.rows.template_file_take_unused(unused_since_us).await? {
            if let Some(path) = self.path(&row.team_id, &row.hash) {
                // A file without a row is not found, and replaced by the next upload with its name.
                let _ = tokio::task::spawn_blocking(move || fs::remove_file(path)).await;
            }
            removed += 1;
        }
        Ok(removed)
    }
}

fn remove_partial(directory: &Path) {
    let teams = fs::read_dir(directory).into_iter().flatten().flatten();
    for file in teams.flat_map(|team| fs::read_dir(team.path()).into_iter().flatten().flatten()) {
        if file.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
            let _ = fs::remove_file(file.path());
        }
    }
}
