//! `ringfence template push` and `pull`, and `ringfence gc`: through the operator socket, because layers belong to the
//! node. It is this command that connects to registries, and not the platform, so it reaches what its operator reaches.

pub(crate) mod login;
mod oci;
mod pieces;
mod reference;
mod repository;

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use bytes::{Bytes, BytesMut};
use formats::percent;
use formats::tar::{BLOCK, padding};
use http::Method;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::body::Incoming;
use protocol::template_file::{MANIFEST, Manifest, header, layer_name};
use registry::Access;
use serde_json::Value;
use server::operator::{OperatorCollection, OperatorTemplate};
use tokio::io::AsyncReadExt as _;

use self::pieces::{Piece, Pieces};
use self::reference::{Reference, SCHEME};
use self::repository::{Artifacts, Trust};
use crate::args::{RegistryArgs, TransferCommand};
use crate::config::Config;
use crate::config::builds::registry_authorities;
use crate::data_dir::DataDir;
use crate::one_thread;
use crate::operator::{ask, decode, exchange, read};
use crate::output::mib;
use crate::output::{self, Format};

/// Size of a piece of a file on its way to the platform, in bytes.
const PIECE: usize = 128 << 10;

fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    one_thread::runtime()?.block_on(work)
}

/// Runs `template push` and `pull`.
///
/// # Errors
/// When no platform runs on the data directory, or the request fails.
pub(crate) fn run(config: &Config, command: &TransferCommand) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    match command {
        TransferCommand::Push {
            name,
            to,
            team,
            registry,
        } => match artifact(to)? {
            Some(to) => {
                let registry = open(config, registry, &to, Access::Push)?;
                block_on(oci::push(&dir, team, name, &to, &registry))?;
            }
            None => block_on(push(&dir, team, name, to))?,
        },
        TransferCommand::Pull {
            name,
            from,
            team,
            any_base,
            registry,
        } => {
            // Both orders are natural, and names of templates have no slashes after a colon.
            let (name, from) = match (name.starts_with(SCHEME), from.to_str()) {
                (true, Some(swapped)) => (swapped, Path::new(name)),
                _ => (name.as_str(), from.as_path()),
            };
            let to = Target {
                team,
                name,
                any_base: *any_base,
            };
            match artifact(from)? {
                Some(from) => {
                    let registry = open(config, registry, &from, Access::Pull)?;
                    block_on(pull_artifact(&dir, to, &from, &registry))?;
                }
                None => block_on(pull(&dir, to, from))?,
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The artifact that an argument names, if it is not a path.
fn artifact(argument: &Path) -> Result<Option<Reference>> {
    match argument.to_str().filter(|text| text.starts_with(SCHEME)) {
        Some(text) => Reference::parse(text).map(Some),
        None => Ok(None),
    }
}

/// The registry of an artifact, with the trust that it has for builds.
fn open(config: &Config, args: &RegistryArgs, of: &Reference, access: Access) -> Result<Artifacts> {
    let login = login::find(args, &of.host)?;
    let authorities = registry_authorities(&config.registry_ca_files)?;
    let trust = Trust {
        insecure: &config.builds.insecure_registries,
        authorities: &authorities,
    };
    Artifacts::new(of, &trust, login, access)
}

/// Runs `gc`.
///
/// # Errors
/// When no platform runs on the data directory, or the request fails.
pub(crate) fn collect(config: &Config, dry_run: bool, cache: bool, format: Format) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    let path = format!("/collections?dry_run={dry_run}&cache={cache}");
    let collected: OperatorCollection = block_on(ask(&dir, Method::POST, &path))?;
    if format == Format::Json {
        output::json(&collected)?;
        return Ok(ExitCode::SUCCESS);
    }
    let verb = if dry_run { "would remove" } else { "removed" };
    let total = collected.layers.iter().map(|layer| layer.bytes).sum();
    for layer in &collected.layers {
        output::line(&format!("{verb} {} {}", layer.id, mib(layer.bytes)))?;
    }
    output::line(&format!("{verb} {} layers, {}", collected.layers.len(), mib(total)))?;
    if cache {
        let (results, files) = (collected.results, collected.files);
        output::line(&format!(
            "removed {results} results of steps and {files} uploaded files"
        ))?;
    }
    if !collected.teams.is_empty() {
        let rows = collected.teams.into_iter().map(|space| {
            vec![
                space.team,
                mib(space.template_bytes),
                mib(space.cache_bytes),
                mib(space.file_bytes),
            ]
        });
        output::table(&["TEAM", "TEMPLATES", "CACHE", "FILES"], rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A new file that is removed unless it is completed.
struct Unfinished {
    file: File,
    path: PathBuf,
    is_complete: bool,
}

impl Unfinished {
    fn create(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("create {}", path.display()))?;
        let is_complete = false;
        let path = path.to_owned();
        Ok(Self {
            file,
            path,
            is_complete,
        })
    }

    fn finish(mut self) -> Result<()> {
        self.file.write_all(&[0; 2 * BLOCK])?;
        self.file.sync_all()?;
        self.is_complete = true;
        Ok(())
    }

    /// Writes a body as a file of the archive. Its size is known, and its header written, when it is complete.
    async fn add(&mut self, name: &str, mut body: Incoming) -> Result<()> {
        let start = self.file.stream_position()?;
        self.file.write_all(&[0; BLOCK])?;
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.context("the platform cut the layer: its log has the reason")?;
            if let Ok(data) = frame.into_data() {
                self.file.write_all(&data)?;
                size += data.len() as u64;
            }
        }
        self.file.write_all(&[0; BLOCK][..padding(size)])?;
        let end = self.file.stream_position()?;
        self.file.seek(SeekFrom::Start(start))?;
        self.file.write_all(&header(name, size))?;
        self.file.seek(SeekFrom::Start(end))?;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = fs::remove_file(&self.path);
        }
    }
}

async fn push(dir: &DataDir, team: &str, name: &str, path: &Path) -> Result<()> {
    let query = format!(
        "/template?team={}&name={}",
        percent::encode(team),
        percent::encode(name)
    );
    let manifest: Manifest<Value> = ask(dir, Method::GET, &query).await?;
    if manifest.layers.is_empty() {
        bail!("template {name} has no layers of its own: there is nothing to push");
    }
    let mut file = Unfinished::create(path)?;
    let text = serde_json::to_vec_pretty(&manifest)?;
    file.file.write_all(&header(MANIFEST, text.len() as u64))?;
    file.file.write_all(&text)?;
    file.file.write_all(&[0; BLOCK][..padding(text.len() as u64)])?;
    for layer in &manifest.layers {
        let query = format!("/layers/{}", layer.id);
        let name = layer_name(&layer.id);
        let added = exchange(dir, Method::GET, &query, Empty::<Bytes>::new(), async |body| {
            file.add(&name, body).await
        });
        added.await.with_context(|| format!("layer {}", layer.id))?;
    }
    file.finish().with_context(|| format!("write {}", path.display()))?;
    let size = fs::metadata(path)?.len();
    output::line(&format!(
        "wrote {} with {} layers, {}",
        path.display(),
        manifest.layers.len(),
        mib(size)
    ))
}

/// The template that is pulled.
#[derive(Debug, Clone, Copy)]
struct Target<'a> {
    team: &'a str,
    name: &'a str,
    /// Whether the `base` on which it was built may be another one than that of this host.
    any_base: bool,
}

/// Makes a template of what `send` sends.
async fn import(dir: &DataDir, to: Target<'_>, send: impl AsyncFnOnce(&Pieces) -> Result<()>) -> Result<()> {
    let Target { team, name, any_base } = to;
    let (sender, mut receiver) = tokio::sync::mpsc::channel::<Piece>(2);
    let stream = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
    let send = async move {
        let pieces = Pieces(sender);
        let sent = send(&pieces).await;
        if let Err(error) = &sent {
            pieces.fail(error).await;
        }
        sent
    };
    let query = format!(
        "/template?team={}&name={}&any_base={any_base}",
        percent::encode(team),
        percent::encode(name)
    );
    let exchanged = exchange(dir, Method::POST, &query, StreamBody::new(stream), read);
    let (body, sent) = tokio::join!(exchanged, send);
    sent?;
    let template: OperatorTemplate = decode(&body?)?;
    if let Some(warning) = template.warning {
        output::error(&anyhow!("warning: {warning}"));
    }
    output::line(&format!(
        "template {} has build {}",
        template.template_id, template.build_id
    ))
}

async fn pull(dir: &DataDir, to: Target<'_>, path: &Path) -> Result<()> {
    let opened = tokio::fs::File::open(path).await;
    let mut file = opened.with_context(|| format!("open {}", path.display()))?;
    let send = async move |to: &Pieces| {
        loop {
            let mut piece = BytesMut::with_capacity(PIECE);
            let read = file.read_buf(&mut piece).await;
            let read = read.with_context(|| format!("read {}", path.display()))?;
            if read == 0 || !to.give(piece.freeze()).await {
                return Ok(());
            }
        }
    };
    import(dir, to, send).await
}

async fn pull_artifact(dir: &DataDir, to: Target<'_>, from: &Reference, registry: &Artifacts) -> Result<()> {
    let found = oci::find(from, registry).await.with_context(|| from.to_string())?;
    let send = async move |to: &Pieces| {
        let sent = oci::send(found, registry, to).await;
        sent.with_context(|| from.to_string())
    };
    import(dir, to, send).await
}
