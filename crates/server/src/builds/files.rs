//! Archives that clients upload for builds: in the data directory of the node, by team and hash.
//!
//! The hash is the client's and says nothing about the content. An archive is written to a file of its own first, so
//! that a build never reads one that is incomplete, and an upload that was cut leaves nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use model::id::TeamId;
use store::builds::FileRow;
use store::error::StoreError;
use store::nodes::NodeRows;

use crate::chain::Chain;
use crate::clock::Clock;
use crate::keys::random_hex;
use crate::node::NodeHandle;
use crate::settings::{BuildSettings, CapacitySettings};

/// The beginning of the name of a file that is being written.
const PARTIAL: &str = ".partial-";

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
}

/// The archives of the node.
#[derive(Debug)]
pub(crate) struct BuildFiles {
    directory: Option<PathBuf>,
    rows: NodeRows,
    node: NodeHandle,
    clock: Clock,
    file_bytes: u64,
    team_bytes: u64,
}

/// An archive that is being uploaded. It is removed when this is dropped, unless it was kept.
#[derive(Debug)]
pub(crate) struct Upload {
    file: Option<File>,
    path: PathBuf,
    bytes: u64,
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }
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
    pub(crate) fn open(settings: &BuildSettings, (rows, node, clock): (NodeRows, NodeHandle, Clock)) -> Self {
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
            node,
            clock,
            file_bytes: settings.file_bytes,
            team_bytes: settings.team_files_bytes,
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

    /// The archive of a team with that hash. It counts as used now.
    pub(crate) async fn find(&self, team: &TeamId, hash: &str) -> Option<PathBuf> {
        let path = self.path(team, hash)?;
        match self.rows.template_file_find(team, hash, self.clock.now_us()).await {
            Ok(Some(_)) => path.is_file().then_some(path),
            Ok(None) => None,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot look for an uploaded file");
                None
            }
        }
    }

    /// Begins an upload of `announced` bytes, if the client said so.
    pub(crate) async fn begin(&self, team: &TeamId, hash: &str, announced: Option<u64>) -> Result<Upload, FileError> {
        let path = self.path(team, hash).ok_or(FileError::Off)?;
        self.check_size(announced.unwrap_or(0))?;
        let limit = self.team_bytes;
        let used = u64::try_from(self.rows.template_file_total(team).await?).unwrap_or(0);
        if used.saturating_add(announced.unwrap_or(0)) > limit {
            return Err(FileError::TeamFull { limit });
        }
        let floor = u64::from(CapacitySettings::DISK_FLOOR_MB) << 20;
        let free = self
            .node
            .capacity()
            .await
            .map_or(u64::MAX, |host| host.disk_available_bytes);
        if free < floor.saturating_add(announced.unwrap_or(0)) {
            return Err(FileError::DiskFull);
        }
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
                path: partial,
                bytes: 0,
            })
        });
        Ok(opened.await.unwrap_or_else(|error| Err(io::Error::other(error)))?)
    }

    fn check_size(&self, bytes: u64) -> Result<(), FileError> {
        match bytes > self.file_bytes {
            true => Err(FileError::TooLarge { limit: self.file_bytes }),
            false => Ok(()),
        }
    }

    /// Writes the next piece.
    pub(crate) async fn write(&self, mut upload: Upload, piece: Bytes) -> Result<Upload, FileError> {
        let bytes = upload
            .bytes
            .saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        self.check_size(bytes)?;
        let written = tokio::task::spawn_blocking(move || {
            if let Some(file) = &mut upload.file {
                file.write_all(&piece)?;
            }
            upload.bytes = bytes;
            Ok::<_, io::Error>(upload)
        });
        Ok(written.await.unwrap_or_else(|error| Err(io::Error::other(error)))?)
    }

    /// Keeps an archive that is complete, in place of an earlier one.
    pub(crate) async fn keep(&self, team: &TeamId, hash: &str, mut upload: Upload) -> Result<(), FileError> {
        let path = self.path(team, hash).ok_or(FileError::Off)?;
        let bytes = upload.bytes;
        let kept = tokio::task::spawn_blocking(move || {
            if let Some(file) = upload.file.take() {
                file.sync_data()?;
            }
            fs::rename(&upload.path, &path)?;
            // It has another name now, so there is nothing to remove.
            upload.path.clear();
            Ok::<_, io::Error>(())
        });
        kept.await.unwrap_or_else(|error| Err(io::Error::other(error)))?;
        let row = FileRow {
            team_id: team.clone(),
            hash: hash.to_owned(),
            bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        };
        Ok(self.rows.template_file_put(&row, self.clock.now_us()).await?)
    }

    /// Removes archives that were not used since a time.
    pub(crate) async fn purge(&self, unused_since_us: i64) -> Result<usize, StoreError> {
        let mut removed = 0;
        while let Some(row) = self.rows.template_file_take_unused(unused_since_us).await? {
            if let Some(path) = self.path(&row.team_id, &row.hash) {
                // A file without a row is not found, and replaced by the next upload.
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
