//! Images of registries.
//!
//! Layers are downloaded to files, several at a time, and unpacked in order when their digest is known to be right. So
//! nothing unchecked is unpacked, and an interrupted download goes on where it ended.

mod cloud;
mod dns;
mod reference;
mod repository;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use jiff::Timestamp;
use protocol::image::{ImageReport, LayerReport, Progress, PullJob};
use registry::{Client, RequestSettings, Retries};
use rustix::io::Errno;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use self::reference::Reference;
use self::repository::{Blob, Registry};
use crate::layers::{Config, Layers, WorkDir};
use crate::limits::STACK;
use crate::manifest::{self, Digest, Image, Manifest};
use crate::progress::Log;

/// Maximum number of layers that are downloaded at the same time.
const PARALLEL_MAX: usize = 8;
/// How often it is said how much of the layers was downloaded.
const STATE: Duration = Duration::from_secs(1);

/// Runs a job of `image-pull`.
pub(crate) fn run(job: &PullJob, now: Timestamp, log: Log<'_>) -> Result<Progress> {
    let reference = Reference::parse(&job.reference)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .thread_stack_size(STACK)
        .enable_all()
        .build()
        .context("start the async runtime")?;
    let done = runtime.block_on(Box::pin(pull(job, &reference, now, log)));
    done.map_err(|error| {
        let full = error.chain().any(|cause| {
            let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            io == Some(std::io::ErrorKind::StorageFull) || cause.downcast_ref::<Errno>() == Some(&Errno::NOSPC)
        });
        let error = if full {
            error.context("too large for the disk")
        } else {
            error
        };
        error.context(format!("image {reference}"))
    })
}

async fn pull(job: &PullJob, reference: &Reference, now: Timestamp, log: Log<'_>) -> Result<Progress> {
    let arch = manifest::architecture(job.arch.as_deref());
    let (registry, digest, image) = find(job, reference, &arch, now, log).await?;
    if job.resolve {
        return Ok(Progress::Resolved {
            digest: digest.to_string(),
        });
    }
    let blob = |descriptor: &manifest::Descriptor| -> Result<Blob> {
        Ok(Blob {
            digest: descriptor.digest()?,
            size: descriptor.size,
        })
    };
    let config = Config::parse(&registry.config(&blob(&image.config)?).await?)?;
    config.check(&arch)?;
    let blobs = image.layers.iter().map(blob).collect::<Result<Vec<Blob>>>()?;
    let size = blobs.iter().try_fold(0_u64, |sum, blob| sum.checked_add(blob.size));
    let size = size.filter(|size| *size <= job.limits.bytes);
    let size = size.with_context(|| format!("too large: its layers have more than {} bytes", job.limits.bytes))?;
    log(&line(format!(
        "{reference}: {} layers, {size} bytes, {digest}",
        blobs.len()
    )))?;
    let report = ImageReport {
        digest: Some(digest.to_string()),
        layers: blobs
            .iter()
            .map(|blob| LayerReport {
                digest: blob.digest.to_string(),
                bytes: blob.size,
            })
            .collect(),
        ..config.report()
    };
    let layers = unpack(job, registry, blobs, log).await?;
    Ok(Progress::Unpacked(layers.report(report)))
}

fn line(message: String) -> Progress {
    Progress::Log { message }
}

/// Asks the mirrors, and then the registry of the image, for the manifest.
async fn find(
    job: &PullJob,
    reference: &Reference,
    arch: &str,
    now: Timestamp,
    log: Log<'_>,
) -> Result<(Arc<Registry>, Digest, Image)> {
    let transfer = &job.transfer;
    let client = Client::new(&RequestSettings {
        authorities: &job.authorities,
        insecure: &job.insecure,
        request_timeout: Duration::from_millis(transfer.request_timeout_ms),
        stall_timeout: Duration::from_millis(transfer.stall_timeout_ms),
        lookup: |host| Box::pin(async move { dns::lookup(&host).await }),
    })?;
    let retries = Retries {
        attempts: transfer.attempts.max(1),
        backoff: Duration::from_millis(transfer.backoff_ms),
    };
    let make = |host: &str, login| Registry::new(client.clone(), host, reference.clone(), login, retries);
    for mirror in job.mirrors.get(&reference.registry).into_iter().flatten() {
        let registry = make(mirror, None).with_context(|| format!("mirror {mirror}"))?;
        match resolve(&registry, reference, arch).await {
            Ok((digest, image)) => return Ok((Arc::new(registry), digest, image)),
            Err(error) => log(&line(format!("mirror {mirror}: {error:#}")))?,
        }
    }
    let known = job.logins.iter().find(|(host, _)| reference.is_of(host));
    let credentials = job.credentials.as_ref().or(known.map(|(_, credentials)| credentials));
    let login = match credentials {
        Some(credentials) => Some(cloud::login(&client, credentials, &reference.registry, transfer, now).await?),
        None => None,
    };
    let registry = make(&reference.registry, login)?;
    let (digest, image) = resolve(&registry, reference, arch).await?;
    Ok((Arc::new(registry), digest, image))
}

/// The manifest for an architecture, through the indexes above it.
async fn resolve(registry: &Registry, reference: &Reference, arch: &str) -> Result<(Digest, Image)> {
    let mut target = reference.target();
    for _ in 0..=manifest::DEPTH_MAX {
        let (bytes, digest) = registry.manifest(&target).await?;
        match Manifest::parse(&bytes)? {
            Manifest::Image(image) => return Ok((digest, image)),
            Manifest::Index(index) => target = index.select(arch, None)?.to_string(),
        }
    }
    bail!("more than {} levels of indexes", manifest::DEPTH_MAX);
}

/// A layer that is being downloaded, to a file.
type Running = (Blob, PathBuf, oneshot::Receiver<Result<()>>);

/// How much of the layers was downloaded.
struct Downloads {
    /// Number of layers of the image.
    count: usize,
    /// Number of each layer, its size, and the bytes of it that were received.
    received: Vec<(usize, u64, Arc<AtomicU64>)>,
    /// What was said last.
    said: String,
}

impl Downloads {
    /// Waits, and says from time to time how much was downloaded, if that has changed.
    async fn watch<F: Future + Unpin>(&mut self, mut wait: F, log: Log<'_>) -> Result<F::Output> {
        loop {
            match tokio::time::timeout(STATE, &mut wait).await {
                Ok(done) => return Ok(done),
                Err(_) => self.say(log)?,
            }
        }
    }

    /// Reports the progress of the downloads, in a line of which clients make progress bars.
    fn say(&mut self, log: Log<'_>) -> Result<()> {
        let count = self.count;
        let shown = self.received.iter().map(|(number, size, received)| {
            let received = received.load(Ordering::Relaxed);
            format!("{number}/{count} {received} of {size} bytes")
        });
        let message = format!("downloading layers: {}", shown.collect::<Vec<_>>().join(", "));
        // Those that are complete are said once as complete.
        self.received
            .retain(|(_, size, received)| received.load(Ordering::Relaxed) < *size);
        if message == self.said || message.ends_with(": ") {
            return Ok(());
        }
        self.said.clone_from(&message);
        log(&Progress::State { message })
    }
}

/// Downloads ahead and unpacks in order.
async fn unpack(job: &PullJob, registry: Arc<Registry>, blobs: Vec<Blob>, log: Log<'_>) -> Result<Layers> {
    let work = WorkDir::make(&job.work, "pull")?;
    let mut layers = Layers::new(&job.target, job.limits)?;
    let parallel = job.transfer.parallel.clamp(1, PARALLEL_MAX);
    let count = blobs.len();
    let mut waiting = blobs.into_iter().enumerate();
    let mut tasks = JoinSet::new();
    let mut running: VecDeque<Running> = VecDeque::new();
    let mut downloads = Downloads {
        count,
        received: Vec::new(),
        said: String::new(),
    };
    for number in 1..=count {
        while running.len() < parallel
            && let Some((index, blob)) = waiting.next()
        {
            let path = work.path().join(index.to_string());
            let (done, result) = oneshot::channel();
            let (registry, target, wanted) = (Arc::clone(&registry), path.clone(), blob.clone());
            let received = Arc::new(AtomicU64::new(0));
            downloads.received.push((index + 1, blob.size, Arc::clone(&received)));
            tasks.spawn(async move {
                // The receiver is gone if another layer failed.
                let _ = done.send(registry.download(&wanted, &target, &received).await);
            });
            running.push_back((blob, path, result));
        }
        let (blob, path, result) = running.pop_front().context("no layer")?;
        downloads
            .watch(result, log)
            .await?
            .unwrap_or_else(|_| Err(anyhow!("the download of layer {} ended", blob.digest)))?;
        let unpacked = path.clone();
        let task = tokio::task::spawn_blocking(move || {
            let done = layers.apply(&unpacked);
            (layers, done)
        });
        let (back, done) = downloads
            .watch(task, log)
            .await?
            .map_err(|error| Error::new(error).context("unpack a layer"))?;
        done.with_context(|| format!("layer {}", blob.digest))?;
        layers = back;
        std::fs::remove_file(&path).context("delete a layer")?;
        log(&line(format!("layer {number}/{count} unpacked: {} bytes", blob.size)))?;
    }
    ensure!(waiting.next().is_none(), "layers are left");
    Ok(layers)
}
