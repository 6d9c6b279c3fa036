//! Format of a backup: a directory whose file `manifest.json` names everything in it, and is written last.
//!
//! ```text
//!   manifest.json          what is in the backup, with checksums
//!   database.sqlite        the database, unless it is on a server of its own
//!   configuration.toml     the configuration file, for reference
//!   data/…                 files of the data directory, under their names there
//!   layers/<id>.tar.zst    the layers of templates, as archives
//! ```
//!
//! A backup is written under another name and renamed once it is complete and on disk, so that what has the name of a backup
//! and a manifest is whole.

use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use runtime::files::if_there;
use serde::{Deserialize, Serialize};

use super::copy::Copied;

/// The format that this program writes, and the newest that it reads.
const FORMAT: u32 = 1;
/// Name of the manifest.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Name of the copy of the database.
pub(crate) const DATABASE: &str = "database.sqlite";
/// Name of the copy of the configuration file.
pub(crate) const CONFIGURATION: &str = "configuration.toml";
/// Directory with the files of the data directory.
pub(crate) const DATA: &str = "data";
/// Directory with the archives of layers.
pub(crate) const LAYERS: &str = "layers";
/// Largest manifest that is read, in bytes.
const MANIFEST_MAX: u64 = 256 << 20;

/// A manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The version of the format.
    pub(crate) format: u32,
    /// The version of the program that made the backup.
    pub(crate) version: String,
    /// When the backup was begun, RFC 3339: the database is as it was then.
    pub(crate) created_at: String,
    /// Where the database is.
    pub(crate) database: Database,
    /// Whether the master key is in the backup.
    pub(crate) has_master_key: bool,
    /// Files of the backup.
    pub(crate) files: Vec<FileEntry>,
    /// Layers in the backup, by id.
    pub(crate) layers: Vec<String>,
    /// Paused sandboxes in the backup, by id.
    pub(crate) sandboxes: Vec<String>,
    /// Sandboxes that are missing from the backup.
    pub(crate) left_out: Vec<LeftOut>,
    /// What templates need and the platform had lost.
    pub(crate) missing: Vec<String>,
}

/// Where the database of a backup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Database {
    /// In the backup.
    Included,
    /// On a PostgreSQL server, whose backups are its own.
    Postgresql,
}

/// A sandbox that is not in a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftOut {
    /// Id of the sandbox.
    pub(crate) id: String,
    /// Why the sandbox was left out.
    pub(crate) why: String,
}

/// A file of a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    /// Below the backup.
    pub(crate) path: PathBuf,
    /// Its size with holes, in bytes.
    pub(crate) size: u64,
    /// Checksum of the file; see [`super::copy`].
    pub(crate) sum: String,
    /// Mode and owner of the file in the data directory. In the backup only its owner may.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl FileEntry {
    pub(crate) fn new(path: PathBuf, copied: Copied) -> Self {
        Self {
            path,
            size: copied.size,
            sum: copied.sum,
            mode: copied.mode,
            uid: copied.uid,
            gid: copied.gid,
        }
    }

    /// Whether what was read is this file.
    pub(crate) fn is(&self, read: &Copied) -> bool {
        self.size == read.size && self.sum == read.sum
    }
}

/// What is said about a file whose content is not what the manifest says.
pub(crate) fn damaged(file: &FileEntry) -> String {
    format!("{} of the backup is damaged: its checksum differs", file.path.display())
}

impl Manifest {
    /// One without content.
    pub(crate) fn new(created_at: String) -> Self {
        Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            created_at,
            database: Database::Postgresql,
            has_master_key: false,
            files: Vec::new(),
            layers: Vec::new(),
            sandboxes: Vec::new(),
            left_out: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Reads the manifest of a backup.
    ///
    /// # Errors
    /// When the directory is no backup, not a complete one, or one of a later format.
    pub(crate) fn read(backup: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let path = backup.join(MANIFEST);
        let metadata = if_there(fs::metadata(&path)).with_context(|| format!("read {}", path.display()))?;
        let Some(metadata) = metadata else {
            bail!("{} is not a complete backup: it has no {MANIFEST}", backup.display());
        };
        if metadata.len() > MANIFEST_MAX {
            bail!("{} is too large for a manifest", path.display());
        }
        let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let damaged = || format!("{} is damaged", path.display());
        let Format { format } = serde_json::from_slice(&text).with_context(damaged)?;
        if format != FORMAT {
            bail!(
                "{} has format {format}, and this version of ringfence reads format {FORMAT}: use the version that made \
                 the backup, or a later one",
                backup.display()
            );
        }
        let manifest: Self = serde_json::from_slice(&text).with_context(damaged)?;
        for file in &manifest.files {
            let is_plain = |part| matches!(part, Component::Normal(_));
            if !file.path.components().all(is_plain) || file.path.as_os_str().is_empty() {
                bail!("{}: invalid path {}", path.display(), file.path.display());
            }
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(dir: &Path, change: impl FnOnce(&mut Manifest)) -> Result<Manifest> {
        let mut manifest = Manifest::new("2026-01-01T00:00:00Z".to_owned());
        let copied = Copied {
            size: 3,
            data: 3,
            sum: "00".to_owned(),
            mode: 0o600,
            uid: 0,
            gid: 0,
        };
        manifest.files.push(FileEntry::new("data/node.json".into(), copied));
        change(&mut manifest);
        fs::write(dir.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
        Manifest::read(dir)
    }

    #[test]
    fn only_whole_backups_of_a_known_format_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |found: Result<Manifest>| format!("{:#}", found.unwrap_err());
        assert!(refused(Manifest::read(dir.path())).contains("not a complete backup"));
        assert_eq!(written(dir.path(), |_| {}).unwrap().files.len(), 1);
        let later = refused(written(dir.path(), |manifest| manifest.format = 2));
        assert!(later.contains("has format 2"), "{later}");
        for path in ["../secret", "/etc/passwd", "", "data/../../secret"] {
            let invalid = written(dir.path(), |manifest| manifest.files[0].path = path.into());
            assert!(refused(invalid).contains("invalid path"), "{path}");
        }
        fs::write(dir.path().join(MANIFEST), "{\"format\": 1, \"fi").unwrap();
        assert!(refused(Manifest::read(dir.path())).contains("is damaged"));
    }
}
