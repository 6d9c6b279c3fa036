//! Making a backup.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::Method;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use model::id::{BuildId, LayerId, NodeId};
use model::lifecycle::{Kept, State};
use runtime::backup::{files_of_kept, files_of_memory, walk};
use runtime::files::if_there;
use serde_json::Value;
use store::Store;
use store::nodes::NodeRows;
use store::sandboxes::SandboxRow;

use super::copy::{self, Copied};
use super::manifest::{CONFIGURATION, DATA, DATABASE, Database, FileEntry, LAYERS, LeftOut, MANIFEST, Manifest};
use crate::config::Config;
use crate::data_dir::{DataDir, MASTER_FILE};
use crate::database::open_store;
use crate::master_key::{self, KeySource};
use crate::one_thread;
use crate::operator::exchange;
use crate::output;
use crate::output::mib;
use crate::signals::Signals;
use crate::{credentials, node_files, node_identity};

/// Directories of the data directory that are copied as they are: certificates, files that were uploaded for builds, and the
/// programs with which processes are restored. Their files are replaced and never changed.
const DIRECTORIES: [&str; 3] = ["tls", "builds", "agents"];
/// How long ago a template may have been deleted that a copy of a database server names, in microseconds. Layers stay for ten
/// minutes, and are not all read in the first moment.
const DELETED_US: i64 = 9 * 60 * 1_000_000;
/// Prefix of the names of files that are not complete.
const UNFINISHED: &str = ".";
/// Name of a program that is not complete.
const UNFINISHED_AGENT: &str = "agents/new";

/// The time at which the backup is made, for people who look into it.
#[expect(clippy::disallowed_methods, reason = "the command begins here")]
fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

/// Makes a backup of a platform that runs.
///
/// # Errors
/// When none runs, something cannot be read or written, or templates lack layers and `skip_missing` is not set.
pub(super) fn run(config: &Config, file: Option<PathBuf>, to: &Path, skip_missing: bool) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    if dir.path().join(node_files::SERVER).exists() {
        bail!(
            "{} is the data directory of a server, and its node has the layers and the paused sandboxes: such a platform cannot be \
             backed up by this command yet",
            dir.path().display()
        );
    }
    let runtime = one_thread::runtime()?;
    let made = runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let mut backup = Backup {
            config,
            dir: &dir,
            target: Target::create(to)?,
            skip_missing,
            data: 0,
            manifest: Manifest::new(now().to_string()),
        };
        let held = exchange(&dir, Method::POST, "/backup", Empty::<Bytes>::new(), async |hold| {
            tokio::select! {
                lost = until_lost(hold) => Err(lost),
                made = Box::pin(backup.make(file)) => made,
            }
        });
        tokio::select! {
            made = held => made?,
            name = signals.next() => bail!("{name}: the backup was not finished, and is removed"),
        }
        let Backup {
            target, manifest, data, ..
        } = backup;
        target.finish(&manifest)?;
        anyhow::Ok((manifest, data))
    });
    // A file that is still being copied after an interruption is not waited for.
    runtime.shutdown_background();
    let (manifest, data) = made?;
    report(config, to, &manifest, data)?;
    Ok(ExitCode::SUCCESS)
}

/// Resolves when the platform holds nothing any more.
async fn until_lost(mut hold: Incoming) -> anyhow::Error {
    while let Some(Ok(_)) = hold.frame().await {}
    anyhow!("the platform was stopped while the backup was made: start it again")
}

fn report(config: &Config, to: &Path, manifest: &Manifest, data: u64) -> Result<()> {
    output::line(&format!(
        "wrote {}: {} layers, {} paused sandboxes, {}",
        to.display(),
        manifest.layers.len(),
        manifest.sandboxes.len(),
        mib(data)
    ))?;
    for lost in &manifest.missing {
        output::line(&format!("not in the backup: {lost}"))?;
    }
    for LeftOut { id, why } in &manifest.left_out {
        output::line(&format!("not in the backup: sandbox {id}, which {why}"))?;
    }
    if manifest.database == Database::Postgresql {
        output::line("not in the backup: the database, which is on PostgreSQL; back it up with pg_dump")?;
    }
    match &config.master_key {
        KeySource::DataDir if manifest.has_master_key => Ok(()),
        KeySource::DataDir => output::line(
            "not in the backup: the master key, which is not in the data directory: copy it from where the configuration of the platform has it",
        ),
        KeySource::File(path) => output::line(&format!("not in the backup: the master key, {}", path.display())),
        KeySource::Environment(_) => {
            output::line("not in the backup: the master key, which comes from the environment")
        }
    }
}

/// The directory of a backup under the name that it has until it is complete. It is removed unless it is finished.
struct Target {
    partial: PathBuf,
    to: PathBuf,
    is_finished: bool,
}

impl Target {
    fn create(to: &Path) -> Result<Self> {
        let name = to.file_name().and_then(|name| name.to_str());
        let name = name.with_context(|| format!("{} is not the name of a new directory", to.display()))?;
        if fs::symlink_metadata(to).is_ok() {
            bail!(
                "{} exists already: a backup is written to a new directory",
                to.display()
            );
        }
        let partial = to.with_file_name(format!("{name}.partial"));
        match DirBuilder::new().mode(0o700).create(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => bail!(
                "{} exists: another backup is being made there, or one was interrupted; remove it",
                partial.display()
            ),
            made => made.with_context(|| format!("create {}", partial.display()))?,
        }
        Ok(Self {
            // SQLite gets a whole path, and this one exists.
            partial: partial.canonicalize()?,
            to: to.to_owned(),
            is_finished: false,
        })
    }

    /// Makes the directories above a file.
    fn prepare(&self, path: &Path) -> io::Result<PathBuf> {
        let path = self.partial.join(path);
        if let Some(parent) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        Ok(path)
    }

    /// Writes the manifest, and gives the backup its name once everything is on disk.
    fn finish(mut self, manifest: &Manifest) -> Result<()> {
        let path = self.partial.join(MANIFEST);
        let mut file = new_file(&path)?;
        file.write_all(&serde_json::to_vec_pretty(manifest)?)
            .with_context(|| format!("write {}", path.display()))?;
        rustix::fs::syncfs(&file).context("write the backup to disk")?;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(rustix::fs::CWD, &self.partial, rustix::fs::CWD, &self.to, flags)
            .with_context(|| format!("rename the backup to {}", self.to.display()))?;
        self.is_finished = true;
        if let Some(parent) = self.partial.parent() {
            File::open(parent)?.sync_all()?;
        }
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.is_finished
            && let Err(error) = fs::remove_dir_all(&self.partial)
        {
            tracing::warn!(
                "cannot remove the incomplete backup {}: {error}; remove it by hand",
                self.partial.display()
            );
        }
    }
}

fn new_file(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    file.with_context(|| format!("create {}", path.display()))
}

/// A backup that is being made.
struct Backup<'a> {
    config: &'a Config,
    dir: &'a DataDir,
    target: Target,
    skip_missing: bool,
    /// What was written, without holes, in bytes.
    data: u64,
    manifest: Manifest,
}

impl Backup<'_> {
    async fn make(&mut self, file: Option<PathBuf>) -> Result<()> {
        let node = node_identity::node_of(self.dir)?;
        let store = self.open_database(&node).await?;
        let path = self.target.partial.join(DATABASE);
        let is_included = store.copy_to(&path).await.context("copy the database")?;
        let snapshot = if is_included {
            Store::open(&format!("sqlite:{}", path.display()))
                .await
                .context("open the copy of the database")?
        } else {
            store.clone()
        };
        let rows = if is_included {
            let rows = snapshot.of_node_in_copy(node).await;
            rows.context("take the lease of this node in the copy")?
        } else {
            // Of the database itself nothing is changed.
            snapshot.of_node(node, 0)
        };
        self.copy_own_files(file).await?;
        self.copy_sandboxes(&rows, &store).await?;
        self.copy_memories(&rows).await?;
        // A copy that was made of a server before may name templates that are deleted since.
        let deleted_us = if is_included {
            i64::MAX
        } else {
            now().as_microsecond() - DELETED_US
        };
        self.copy_layers(&rows, deleted_us).await?;
        if is_included {
            self.forget_cached_layers(&rows).await?;
        }
        snapshot.close().await;
        if is_included {
            self.manifest.database = Database::Included;
            let copied = blocking(move || copy::check(&path))
                .await
                .context("read the copy of the database")?;
            self.add(DATABASE.into(), copied);
        }
        store.close().await;
        Ok(())
    }

    /// Opens the database of the platform that runs. The configuration of this command may name another one.
    async fn open_database(&self, node: &NodeId) -> Result<Store> {
        let path = self.config.database_url.file();
        let is_there = path.as_ref().is_none_or(|path| path.exists());
        let store = if is_there {
            open_store(self.config).await?
        } else {
            bail!(foreign(self.dir.path()))
        };
        let lease = store.node_by_id(node).await?.and_then(|row| row.lease);
        if lease.is_none_or(|lease| lease.until_us <= now().as_microsecond()) {
            bail!(foreign(self.dir.path()));
        }
        Ok(store)
    }

    fn lose_memory(&mut self, build: &BuildId) {
        let lost = format!("the processes of snapshot {build}, which the host has lost");
        self.manifest.missing.push(lost);
    }

    fn add(&mut self, path: PathBuf, copied: Copied) {
        self.data += copied.data;
        self.manifest.files.push(FileEntry::new(path, copied));
    }

    /// Copies a file to a path below the backup.
    async fn copy(&self, from: &Path, to: &Path) -> io::Result<FileEntry> {
        let target = self.target.prepare(to)?;
        let source = from.to_owned();
        let copied = blocking(move || copy::copy(&source, &target)).await?;
        Ok(FileEntry::new(to.to_owned(), copied))
    }

    /// Copies a file of the data directory.
    async fn copy_data(&mut self, path: &Path) -> io::Result<()> {
        let to = Path::new(DATA).join(path);
        let target = self.target.prepare(&to)?;
        let source = self.dir.path().join(path);
        let copied = blocking(move || copy::copy(&source, &target)).await?;
        self.add(to, copied);
        Ok(())
    }

    /// Keys, certificates, uploaded files and the configuration.
    async fn copy_own_files(&mut self, configuration: Option<PathBuf>) -> Result<()> {
        let names = [credentials::FILE, credentials::TLS_FILE, node_identity::FILE];
        let mut files: Vec<PathBuf> = names.map(PathBuf::from).to_vec();
        files.extend(master_key::files().map(PathBuf::from));
        for directory in DIRECTORIES {
            let walked = walk(self.dir.path(), &self.dir.path().join(directory), &mut files);
            if_there(walked).with_context(|| format!("read {directory}"))?;
        }
        let is_unfinished = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(UNFINISHED)) || path == Path::new(UNFINISHED_AGENT)
        };
        files.retain(|path| !is_unfinished(path));
        for path in files {
            // It is not there in every configuration, or a certificate was renewed meanwhile.
            if_there(self.copy_data(&path).await).with_context(|| format!("copy {}", path.display()))?;
        }
        let key = Path::new(DATA).join(MASTER_FILE);
        self.manifest.has_master_key =
            self.config.master_key == KeySource::DataDir && self.manifest.files.iter().any(|file| file.path == key);
        if let Some(path) = configuration {
            let copied = self.copy(&path, Path::new(CONFIGURATION)).await;
            let copied = copied.with_context(|| format!("copy {}", path.display()))?;
            self.manifest.files.push(copied);
        }
        Ok(())
    }

    /// Copies the sandboxes that are paused on disk. `store` is the database as it goes on.
    async fn copy_sandboxes(&mut self, rows: &NodeRows, store: &Store) -> Result<()> {
        for row in rows.sandbox_list_live().await? {
            let why = match (row.state, row.kept) {
                (State::Paused, Some(Kept::Memory)) => Some("is paused in memory"),
                (State::Paused, _) => {
                    if self.copy_sandbox(&row, store).await? {
                        None
                    } else {
                        Some("was resumed or ended while the backup was made")
                    }
                }
                (State::Running, _) => Some("runs"),
                _ => Some("was being started, paused, resumed or ended"),
            };
            let id = row.id.to_string();
            match why {
                None => self.manifest.sandboxes.push(id),
                Some(why) => {
                    let why = why.to_owned();
                    self.manifest.left_out.push(LeftOut { id, why });
                }
            }
        }
        Ok(())
    }

    /// Copies a sandbox unless it changes meanwhile.
    async fn copy_sandbox(&mut self, row: &SandboxRow, store: &Store) -> Result<bool> {
        let during = || format!("copy the disk of sandbox {}", row.id);
        let (data_dir, id) = (self.dir.path().to_owned(), row.id.clone());
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let files = match blocking(move || files_of_kept(&data_dir, &id)).await {
            Ok(Some(files)) => files,
            Ok(None) => return Ok(false),
            Err(error) if is_gone(&error) => return Ok(false),
            Err(error) => return Err(error).with_context(during),
        };
        let before = (self.manifest.files.len(), self.data);
        let mut is_whole = true;
        for path in files {
            match self.copy_data(&path).await {
                Err(error) if is_gone(&error) => is_whole = false,
                copied => copied.with_context(during)?,
            }
        }
        let now = store.sandbox_by_id(&row.id).await?;
        let is_same = now.is_some_and(|now| now.version == row.version && now.state == State::Paused);
        if is_whole && is_same {
            return Ok(true);
        }
        self.data = before.1;
        for file in self.manifest.files.drain(before.0..) {
            let path = self.target.partial.join(file.path);
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
        Ok(false)
    }

    /// Copies the processes of snapshots that have them.
    async fn copy_memories(&mut self, rows: &NodeRows) -> Result<()> {
        for (_, spec) in rows.layer_references_by_team().await? {
            let spec: Value = serde_json::from_str(&spec).context("invalid spec of a build")?;
            let Some(build) = spec["memory"]["build"].as_str() else {
                continue;
            };
            let build: BuildId = build.parse().context("invalid spec of a build")?;
            let data_dir = self.dir.path().to_owned();
            let of = build.clone();
            match blocking(move || files_of_memory(&data_dir, &of)).await {
                Ok(Some(files)) => {
                    for path in files {
                        let copied = self.copy_data(&path).await;
                        copied.with_context(|| format!("copy {}", path.display()))?;
                    }
                }
                // Sandboxes of it start from its files then, as they do now.
                Ok(None) => self.lose_memory(&build),
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.skip_missing => self.lose_memory(&build),
                Err(error) => return Err(error).with_context(|| format!("read the memory of snapshot {build}")),
            }
        }
        Ok(())
    }

    /// The layers of templates, as archives. Those count as well that were deleted after that time.
    async fn copy_layers(&mut self, rows: &NodeRows, deleted_us: i64) -> Result<()> {
        let mut layers = BTreeSet::new();
        for json in rows.layer_references(deleted_us).await? {
            layers_in(
                &serde_json::from_str(&json).context("invalid spec of a build")?,
                &mut layers,
            );
        }
        for layer in layers {
            let is_here = self.dir.path().join(LAYERS).join(layer.as_str()).is_dir();
            let failed = if is_here {
                self.copy_layer(&layer).await.err()
            } else if self.config.blobs.is_some() {
                // The bucket has it.
                continue;
            } else {
                Some(anyhow!("the host has lost it"))
            };
            let Some(error) = failed else {
                self.manifest.layers.push(layer.to_string());
                continue;
            };
            if !self.skip_missing {
                return Err(error).with_context(|| {
                    format!(
                        "layer {layer}, which a template needs, cannot be copied; delete the template (`ringfence \
                         template list` shows its status as error), or leave the layer out with --skip-missing"
                    )
                });
            }
            self.manifest.missing.push(format!("layer {layer}: {error:#}"));
        }
        Ok(())
    }

    async fn copy_layer(&mut self, layer: &LayerId) -> Result<()> {
        let path = archive_of(layer);
        let target = self.target.prepare(&path)?;
        let route = format!("/layers/{layer}");
        let copied = exchange(
            self.dir,
            Method::GET,
            &route,
            Empty::<Bytes>::new(),
            async |mut body| {
                let mut file = new_file(&target)?;
                while let Some(frame) = body.frame().await {
                    let frame = frame.context("the platform cut the layer: its log has the reason")?;
                    if let Ok(data) = frame.into_data() {
                        file.write_all(&data)?;
                    }
                }
                Ok(())
            },
        );
        if let Err(error) = copied.await {
            let _ = fs::remove_file(&target);
            return Err(error);
        }
        let copied = blocking(move || copy::check(&target)).await?;
        self.add(path, copied);
        Ok(())
    }

    /// Removes step results from the copy of the database whose layers only the cache has: those are not copied, and
    /// the steps run again.
    async fn forget_cached_layers(&self, rows: &NodeRows) -> Result<()> {
        for layer in rows.layer_cache_layers().await? {
            if self.manifest.layers.binary_search(&layer).is_err() {
                let layer: LayerId = layer.parse().context("invalid layer of the build cache")?;
                rows.layer_cache_forget(&layer).await?;
            }
        }
        Ok(())
    }
}

fn foreign(data_dir: &Path) -> String {
    format!(
        "the database that database_url names is not that of the platform that runs in {}: name the configuration of the \
         platform with --config or RINGFENCE_CONFIG",
        data_dir.display()
    )
}

/// The archive of a layer in a backup.
pub(super) fn archive_of(layer: &LayerId) -> PathBuf {
    Path::new(LAYERS).join(format!("{layer}.tar.zst"))
}

/// Finds the layers of the images that a JSON value has. Hashes in environments and in recipes look like layers and are
/// none.
fn layers_in(value: &Value, found: &mut BTreeSet<LayerId>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| layers_in(item, found)),
        Value::Object(map) => {
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("layers", Value::Array(layers)) => {
                        let layers = layers.iter().filter_map(Value::as_str);
                        found.extend(layers.filter_map(|layer| layer.parse::<LayerId>().ok()));
                    }
                    _ => layers_in(value, found),
                }
            }
        }
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_layers_of_images_are_layers() {
        let [first, second, third, other] = ["a", "b", "c", "d"].map(|digit| digit.repeat(64));
        let value = serde_json::json!({
            "image": {"layers": {"base": true, "layers": [first, second]}},
            "copy": {"to": {"base": false, "layers": [third]}, "from": {"base": true, "layers": []}},
            "env": {"PYTHON_SHA256": other, "layers": other},
            "steps": [{"files_hash": other, "args": [other]}],
        });
        let mut found = BTreeSet::new();
        layers_in(&value, &mut found);
        let found: Vec<&str> = found.iter().map(LayerId::as_str).collect();
        assert_eq!(found, [first, second, third]);
    }
}
