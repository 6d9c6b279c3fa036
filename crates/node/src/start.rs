//! Starting sandboxes: on a new disk, on a kept one, or with processes that are restored from a checkpoint.
//!
//! A sandbox has started once its agent has the identity and its network is connected. Until then nobody else knows it, so a
//! failure ends it here.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{BuildId, DiskId, SandboxId, TemplateId};
use model::log::Level;
use model::network::EgressPolicy;
use model::resources::Resources;
use protocol::agent::Init;
use protocol::node::{Failure, Image, NodeError, Stage, StartedSandbox};
use proxy::egress::authority_certificate;
use runtime::driver::{Driver, Sandbox, StartDisk, StartError, StartRequest, Started};
use runtime::rootfs::Rootfs;
use runtime::storage::Storage;
use tokio_util::task::TaskTracker;

use crate::control::Control;
use crate::egress;
use crate::handle::{Network, SandboxHandle, authority_of};
use crate::log_writer::LogWriter;
use crate::restores::Turn;
use crate::shared::Shared;
use crate::supervisor::{clean, end};
use crate::work::{blocking, failed};

/// How long a failed create request waits for cleanup before it is answered.
const FAILED_START_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a failed restore waits for cleanup: the sandbox is started from its files next, with the same id.
const FAILED_RESTORE_TIMEOUT: Duration = Duration::from_secs(10);

/// A sandbox to start.
#[derive(Debug)]
pub(crate) struct Begin<'a> {
    pub(crate) id: &'a SandboxId,
    pub(crate) template: &'a TemplateId,
    pub(crate) disk: StartDisk,
    /// The turn to restore its processes from a checkpoint, if they are restored.
    pub(crate) restore: Option<Turn>,
    /// The sandbox of which it is a copy.
    pub(crate) forked_from: Option<&'a SandboxId>,
    /// The snapshot of which it is a copy.
    pub(crate) snapshot: Option<&'a BuildId>,
    pub(crate) resources: Resources,
    pub(crate) init: &'a Init,
    pub(crate) egress: &'a EgressPolicy,
}

/// The new disk of a sandbox with this image.
pub(crate) fn new_disk(image: &Image) -> Result<StartDisk, NodeError> {
    Ok(StartDisk::New {
        disk: random_disk().map_err(failed)?,
        rootfs: rootfs(image)?,
    })
}

/// Starts a sandbox and gives its agent the identity. On an error nothing of it runs, and what is left is removed here
/// or soon after, except a disk that was kept.
pub(crate) async fn start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    begin: Begin<'_>,
) -> Result<(Arc<SandboxHandle>, Control, StartedSandbox), NodeError> {
    let driver = Arc::clone(&shared.driver);
    let (id, disk, resources) = (begin.id.clone(), begin.disk.id().clone(), begin.resources);
    let new_disk = matches!(begin.disk, StartDisk::New { .. }).then(|| disk.clone());
    let clean_timeout = match begin.snapshot {
        Some(_) => FAILED_RESTORE_TIMEOUT,
        None => FAILED_START_TIMEOUT,
    };
    let message = match &begin.disk {
        StartDisk::New { .. } => "sandbox started",
        StartDisk::Kept(_) if begin.forked_from.is_some() => "sandbox started as a fork of another one",
        StartDisk::Kept(_) if begin.snapshot.is_some() => "sandbox started with the processes of its snapshot",
        StartDisk::Kept(_) if begin.restore.is_some() => "sandbox resumed with its processes",
        StartDisk::Kept(_) => "sandbox started anew on its disk",
    };
    let restore = begin.restore.is_some();
    let start_request = StartRequest {
        id: id.clone(),
        disk: begin.disk,
        resources,
        restore,
    };
    // Waits here, where waiting occupies no thread: blocking threads are few and shared. One that is restored has its turn.
    let permit = if restore {
        None
    } else {
        Some(shared.starts.acquire().await.map_err(failed)?)
    };
    let start_request = Arc::new(start_request);
    let mut started = start_by(&driver, &start_request).await;
    if matches!(started, Err(StartError::Full)) {
        // Ended sandboxes have their slots until they are taken down.
        shared.teardowns.settled().await;
        started = start_by(&driver, &start_request).await;
    }
    drop((permit, begin.restore));
    let started = match started {
        Ok(started) => started,
        Err(StartError::Full) => return Err(NodeError::Capacity(StartError::Full.to_string())),
        Err(error @ StartError::Exists(_)) => return Err(failed(error)),
        Err(StartError::NoLayer(layer)) => return Err(NodeError::NoLayer(layer)),
        Err(StartError::Unrestorable(why)) => return Err(NodeError::Refused(why)),
        Err(StartError::Damaged(why)) => {
            clean_failed_start(shared, tasks, id, new_disk, clean_timeout).await;
            return Err(NodeError::Refused(why));
        }
        Err(StartError::Failed(error)) => {
            clean_failed_start(shared, tasks, id, new_disk, clean_timeout).await;
            return Err(failed(error));
        }
    };
    let before_init = Instant::now();
    let init = async {
        let mut control = Control::open(started.boot).await?;
        let identity = init_of(shared, begin.init, begin.egress)?;
        let version = control.init(&identity).await?;
        started.sandbox.settle()?;
        io::Result::Ok((control, version))
    };
    // While the agent is set up, in a thread because of some system calls.
    let attach = {
        let (shared, id, sandbox) = (Arc::clone(shared), id.clone(), Arc::clone(&started.sandbox));
        let policy = begin.egress.clone();
        blocking(move || {
            let mut network = Network::unconnected();
            network.attachment = egress::attach(&shared, &id, &*sandbox, policy, &network.traffic)?;
            io::Result::Ok(network)
        })
    };
    let attach = async {
        attach
            .await?
            .map_err(|error| io::Error::new(error.kind(), format!("network: {error}")))
    };
    let begun = async {
        let begun = tokio::try_join!(init, attach)?;
        if restore {
            // The workload continues last, when the network and the agent are as they should be.
            let (driver, id, disk) = (Arc::clone(&shared.driver), id.clone(), disk.clone());
            let sandbox = Arc::clone(&started.sandbox);
            blocking(move || let_continue(driver.storage(), &id, &disk, &*sandbox)).await??;
        }
        io::Result::Ok(begun)
    };
    match begun.await {
        Ok(((control, agent_version), network)) => {
            let stages = started.stages.into_iter().map(|(name, took)| Stage::new(name, took));
            let init_stage = Stage::new("init", before_init.elapsed());
            let stages = stages.chain([init_stage]).collect();
            let log = LogWriter::new(id.clone(), Arc::clone(&shared.journal));
            let mut fields = vec![
                ("event_type", "sandbox_start".to_owned()),
                ("template_id", begin.template.to_string()),
                ("cpu_count", resources.cpu_count.to_string()),
                ("memory_mb", resources.memory_mb.to_string()),
                ("disk_mb", resources.disk_mb.to_string()),
            ];
            fields.extend(begin.forked_from.map(|parent| ("parent_id", parent.to_string())));
            fields.extend(begin.snapshot.map(|build| ("build_id", build.to_string())));
            log.host(Level::Info, message, fields);
            let handle = Arc::new(SandboxHandle::fresh(
                id,
                disk,
                started.sandbox,
                network,
                authority_of(begin.egress).cloned(),
                log,
            ));
            let started = StartedSandbox {
                agent_version,
                stages,
                is_restored: false,
            };
            Ok((handle, control, started))
        }
        Err(error) => {
            end(&id, &started.sandbox).await;
            clean_failed_start(shared, tasks, id, new_disk, clean_timeout).await;
            Err(NodeError::Failed(Failure::during("the agent did not respond", &error)))
        }
    }
}

async fn start_by(driver: &Arc<dyn Driver>, request: &Arc<StartRequest>) -> Result<Started, StartError> {
    let (driver, request) = (Arc::clone(driver), Arc::clone(request));
    let started = blocking(move || driver.start(&request)).await;
    started.unwrap_or_else(|panicked| Err(StartError::Failed(panicked)))
}

/// Removes what a failed start left, and waits for that for some time.
async fn clean_failed_start(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    id: SandboxId,
    disk: Option<DiskId>,
    timeout: Duration,
) {
    let shared = Arc::clone(shared);
    let cleaning = tasks.spawn(async move { clean(&shared, &id, disk, None).await });
    let _ = tokio::time::timeout(timeout, cleaning).await;
}

/// Lets the workload of a sandbox continue whose processes were restored.
fn let_continue(storage: &Storage, id: &SandboxId, disk: &DiskId, sandbox: &dyn Sandbox) -> io::Result<()> {
    storage.forget_checkpoint(id, disk)?;
    sandbox.thaw()?;
    if let Err(error) = sandbox.respawn() {
        // It is tried again when the events of the agent are followed.
        tracing::warn!(sandbox.id = %id, "cannot start the spawner of a restored sandbox, it is tried again: {error}");
    }
    Ok(())
}

/// What the agent is told, with the certificate of the sandbox's authority, which programs trust from the start, because
/// rules may come at any time, and with those of the operator. Sandboxes of builds have only the latter.
pub(crate) fn init_of<'a>(shared: &Shared, init: &'a Init, egress: &EgressPolicy) -> io::Result<Cow<'a, Init>> {
    let own = authority_of(egress).map(authority_certificate);
    let own = own.transpose().map_err(io::Error::other)?.unwrap_or_default();
    let bundle = own + &shared.authorities;
    Ok(if bundle.is_empty() {
        Cow::Borrowed(init)
    } else {
        Cow::Owned(Init {
            ca_bundle: Some(bundle),
            ..init.clone()
        })
    })
}

/// A random id for a new disk.
pub(crate) fn random_disk() -> io::Result<DiskId> {
    let mut random = [0; 20];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(DiskId::from_random(&random))
}

/// The rootfs of an image on this host.
fn rootfs(image: &Image) -> Result<Rootfs, NodeError> {
    match image {
        Image::Base => Ok(Rootfs::base()),
        Image::Import => Ok(Rootfs::import()),
        Image::Layers { layers, .. } if layers.len() > Image::LAYERS_MAX => Err(too_deep(layers.len())),
        Image::Copy { to, from } => match to.layers.len().max(from.layers.len()) {
            depth if depth > Image::LAYERS_MAX => Err(too_deep(depth)),
            _ => Ok(Rootfs::copy(to, from)),
        },
        Image::Layers { base: true, layers } => Ok(Rootfs::above_base(layers)),
        Image::Layers { base: false, layers } => Ok(Rootfs::without_base(layers)),
    }
}

fn too_deep(layers: usize) -> NodeError {
    NodeError::failed(format!(
        "an image of {layers} layers: the maximum is {}",
        Image::LAYERS_MAX
    ))
}
