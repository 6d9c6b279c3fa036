//! Restoring a backup to a data directory that does not exist yet.
//!
//! Until everything is there and on disk, the directory has a file that says so in place of the lock file. Without that
//! one, no command takes it for a data directory, so one that was restored in part is never started.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use model::id::LayerId;
use node::Node;
use protocol::node::{LayerStream, NodeApi as _};

use super::copy;
use super::create::archive_of;
use super::manifest::{CONFIGURATION, DATA, DATABASE, Database, FileEntry, Manifest, damaged};
use crate::config::Config;
use crate::data_dir::{DataDir, LOCK_FILE, RESTORING};
use crate::{doctor, down, output, runtimes};

/// Maximum size of a layer, unpacked, in bytes. The host's disk is the limit before that.
const LAYER_MAX: u64 = 256 << 30;

/// Restores a backup.
///
/// # Errors
/// When the backup is damaged, incomplete or of another format, the data directory exists, or something cannot be written.
pub(super) fn run(config: &Config, from: &Path) -> Result<ExitCode> {
    doctor::require_root()?;
    let manifest = Manifest::read(from)?;
    let database = database(config, &manifest)?;
    let target = Target::create(&config.data_dir)?;
    restore_layers(from, &manifest, &target)?;
    for file in &manifest.files {
        let to = match file.path.strip_prefix(DATA) {
            Ok(path) => target.path.join(path),
            Err(_) if file.path == Path::new(DATABASE) => match &database {
                Some(path) => path.clone(),
                None => continue,
            },
            // Layers, and what is for reference.
            Err(_) => continue,
        };
        restore(file, from, &to)?;
    }
    target.finish()?;
    report(config, from, &manifest)?;
    Ok(ExitCode::SUCCESS)
}

/// Where the database is restored to, if it is in the backup.
fn database(config: &Config, manifest: &Manifest) -> Result<Option<PathBuf>> {
    match (manifest.database, config.database_url.file()) {
        (Database::Postgresql, None) => Ok(None),
        (Database::Postgresql, Some(_)) => bail!(
            "the database of this backup is on PostgreSQL: restore it there first, and set database_url to its address"
        ),
        (Database::Included, None) => bail!(
            "the backup has the database, and database_url names a server: restore without database_url, as the backup was \
             made"
        ),
        // The whole directory is checked.
        (Database::Included, Some(path)) if path.starts_with(&config.data_dir) => Ok(Some(path)),
        (Database::Included, Some(path)) => {
            // SQLite would apply what an earlier database has left in its log.
            for suffix in ["", "-wal", "-shm", "-journal"] {
                let mut file = path.clone().into_os_string();
                file.push(suffix);
                if fs::symlink_metadata(&file).is_ok() {
                    bail!(
                        "the database file {} exists already: move it away",
                        Path::new(&file).display()
                    );
                }
            }
            Ok(Some(path))
        }
    }
}

/// A data directory that is being restored. Unless it is finished, what was written to it is removed.
struct Target {
    path: PathBuf,
    /// Whether the directory was created here.
    is_new: bool,
    is_finished: bool,
}

impl Target {
    fn create(path: &Path) -> Result<Self> {
        let is_new = match fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(parent) = path.parent() {
                    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
                }
                let made = DirBuilder::new().mode(0o700).create(path);
                made.with_context(|| format!("create the data directory {}", path.display()))?;
                true
            }
            Err(error) => return Err(error).with_context(|| format!("read the data directory {}", path.display())),
            Ok(entries) => {
                for entry in entries {
                    // A disk of its own for the data begins with this directory.
                    if entry?.file_name() != "lost+found" {
                        bail!(refusal(path));
                    }
                }
                // Checks the owner, and makes it private.
                DataDir::check_empty(path)?;
                false
            }
        };
        let target = Self {
            path: path.to_owned(),
            is_new,
            is_finished: false,
        };
        let mut options = OpenOptions::new();
        let marker = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path.join(RESTORING));
        marker.with_context(|| format!("write to {}", path.display()))?;
        Ok(target)
    }

    fn finish(mut self) -> Result<()> {
        let directory = File::open(&self.path)?;
        rustix::fs::syncfs(&directory).context("write the data directory to disk")?;
        // From here on it is a data directory.
        fs::rename(self.path.join(RESTORING), self.path.join(LOCK_FILE))?;
        self.is_finished = true;
        directory.sync_all().context("write the data directory to disk")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let removed = if self.is_new {
            fs::remove_dir_all(&self.path)
        } else {
            remove_content(&self.path)
        };
        if let Err(error) = removed {
            tracing::warn!(
                "cannot remove what was restored to {}: {error}; remove it by hand",
                self.path.display()
            );
        }
    }
}

fn remove_content(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            fs::remove_file(entry.path())?;
        } else if entry.file_name() != "lost+found" {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Why a directory that is not empty is refused as the target of a restore.
fn refusal(path: &Path) -> String {
    let shown = path.display();
    if path.join(RESTORING).exists() {
        return format!("{shown} has a restore that was interrupted: remove it, and restore again");
    }
    match DataDir::existing(path).and_then(|dir| dir.lock()) {
        Err(error) if path.join(LOCK_FILE).exists() => format!("{error:#}: a backup is restored to a new directory"),
        Ok(_) => format!(
            "{shown} is a data directory already: end its sandboxes with `ringfence down`, and move it away or name \
             another directory with --data-dir"
        ),
        Err(_) => format!("{shown} is not empty: a backup is restored to a new directory"),
    }
}

/// Copies a file of the backup, and checks that it is what was backed up.
fn restore(file: &FileEntry, from: &Path, to: &Path) -> Result<()> {
    let during = || format!("restore {}", file.path.display());
    if let Some(parent) = to.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.with_context(during)?;
    }
    let copied = copy::copy(&from.join(&file.path), to).with_context(during)?;
    if !file.is(&copied) {
        // Also where it is not below the data directory.
        let _ = fs::remove_file(to);
        bail!(damaged(file));
    }
    copy::set_access(to, file.mode, (file.uid, file.gid)).with_context(during)
}

/// Unpacks the archives of layers. The node does that, in the way in which it takes those of strangers: what comes of
/// an archive is the layer with its id, or nothing.
fn restore_layers(from: &Path, manifest: &Manifest, target: &Target) -> Result<()> {
    if manifest.layers.is_empty() {
        return Ok(());
    }
    let runtime = runtimes::small()?;
    runtime.block_on(async {
        let node = Node::start(down::without_sandboxes(&target.path))
            .await
            .context("prepare the host for unpacking layers")?;
        let mut unpacked = Ok(());
        for id in &manifest.layers {
            unpacked = unpack(&node, from, id)
                .await
                .with_context(|| format!("restore layer {id}"));
            if unpacked.is_err() {
                break;
            }
        }
        // Before there are disks, which this would remove.
        node.remove_everything().await.context("clean up the host")?;
        unpacked
    })
}

async fn unpack(node: &Node, from: &Path, id: &str) -> Result<()> {
    let layer: LayerId = id.parse().context("invalid id")?;
    let path = from.join(archive_of(&layer));
    let archive = tokio::fs::File::open(&path).await;
    let archive = archive.with_context(|| format!("open {}", path.display()))?;
    node.import_layer(&layer, LAYER_MAX, LayerStream::new(archive)).await?;
    Ok(())
}

fn report(config: &Config, from: &Path, manifest: &Manifest) -> Result<()> {
    output::line(&format!(
        "restored the backup of {} to {}: {} layers, {} paused sandboxes",
        manifest.created_at,
        config.data_dir.display(),
        manifest.layers.len(),
        manifest.sandboxes.len()
    ))?;
    if !manifest.has_master_key {
        output::line("the master key is not in the backup: configure the one that the platform had before the start")?;
    }
    if manifest.files.iter().any(|file| file.path == Path::new(CONFIGURATION)) {
        let path = from.join(CONFIGURATION);
        output::line(&format!(
            "the configuration that the platform had is {}",
            path.display()
        ))?;
    }
    Ok(())
}
