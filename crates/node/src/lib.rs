//! One host: what should run on it against what does.
//!
//! The server says what should exist; this crate makes it so through a [`runtime::driver::Driver`]. Each sandbox has
//! one task that owns it from the moment its agent has answered until nothing of it is left; calls only look it up
//! and ask. It knows no team, no key, no row.
//!
//! Crash-only: there is nothing to save at the end and nothing to repair at the start. [`Node::reconcile`] looks at
//! what the kernel says is there and makes it match.

mod control;
mod dial;
mod events;
mod journal;
mod owner;
mod slots;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::{
    DialError, HostRoom, NodeApi, NodeError, NodeFuture, SandboxExit, SandboxLog, SandboxSample, SandboxStream,
    StartSandbox, StartedSandbox,
};
use runtime::container::{self, Container};
use runtime::driver::{Driver, Found};
use runtime::netns::SocketMaker;
use runtime::slot::Name;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::journal::{Journal, now_us};
use crate::owner::Owned;
use crate::slots::Slots;

/// Ends that wait to be taken by the server. A full queue only makes the tasks of ended sandboxes wait.
const EXITS: usize = 256;

/// How the node of a data directory is set up.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where images, skeletons and records lie.
    pub data_dir: PathBuf,
    /// Processes that make sandboxes side by side.
    pub launchers: usize,
    /// Run without limits when the host has no usable cgroups.
    pub unlimited: bool,
    /// Disk sizes, in MiB, that are made ready at the start.
    pub disks_mb: Vec<u32>,
}

/// A host.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    container: Arc<Container>,
    exits: Mutex<Option<mpsc::Receiver<SandboxExit>>>,
    logs: Mutex<Option<mpsc::Receiver<SandboxLog>>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// What the node and the tasks of its sandboxes share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) maker: SocketMaker,
    pub(crate) sandboxes: Mutex<HashMap<SandboxId, Arc<Owned>>>,
    pub(crate) slots: Mutex<Slots>,
    pub(crate) exits: mpsc::Sender<SandboxExit>,
    pub(crate) logs: mpsc::Sender<SandboxLog>,
}

impl Node {
    /// Prepares the host. Sandboxes of an earlier run are not touched before [`NodeApi::reconcile`].
    ///
    /// # Errors
    /// With what the host lacks.
    pub async fn start(settings: Settings) -> io::Result<Arc<Self>> {
        let settings = container::Settings {
            data_dir: settings.data_dir,
            launchers: settings.launchers,
            unlimited: settings.unlimited,
            disks_mb: settings.disks_mb,
        };
        let container = blocking(move || Container::open(&settings)).await??;
        let (exits, receiver) = mpsc::channel(EXITS);
        let (logs, logs_receiver) = mpsc::channel(journal::WAITING);
        let driver: Arc<dyn Driver> = container.clone();
        let shared = Shared {
            driver,
            maker: SocketMaker::new()?,
            sandboxes: Mutex::default(),
            slots: Mutex::default(),
            exits,
            logs,
        };
        Ok(Arc::new(Self {
            shared: Arc::new(shared),
            container,
            exits: Mutex::new(Some(receiver)),
            logs: Mutex::new(Some(logs_receiver)),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }))
    }

    /// Whether the host holds the limits of sandboxes.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.container.is_limited()
    }

    /// Lets go of every sandbox without touching it, so that the next start can adopt it.
    pub async fn release(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Ends every sandbox of this data directory and removes what they and the platform left on the host.
    ///
    /// # Errors
    /// When something cannot be found or removed.
    pub async fn remove_everything(&self) -> Result<(), NodeError> {
        self.reconcile(Vec::new()).await?;
        self.release().await;
        let container = Arc::clone(&self.container);
        blocking(move || container.dismantle()).await.map_err(failed)
    }

    async fn start_sandbox(&self, request: StartSandbox) -> Result<StartedSandbox, NodeError> {
        let shared = Arc::clone(&self.shared);
        if shared.sandboxes.lock().contains_key(&request.id) {
            return Err(NodeError::Failed(format!("sandbox {} exists already", request.id)));
        }
        let slot = shared
            .slots
            .lock()
            .take()
            .ok_or_else(|| NodeError::Capacity("every slot of this host is in use".to_owned()))?;
        let name = Name {
            id: request.id.clone(),
            slot,
        };
        let stop = self.stop.clone();
        let tasks = self.tasks.clone();
        // A task of its own: a caller that goes away must not leave half a sandbox.
        let start = self.tasks.spawn(async move {
            match owner::start(&shared, &name, &request).await {
                Ok((owned, control, started)) => {
                    shared.sandboxes.lock().insert(name.id.clone(), Arc::clone(&owned));
                    tasks.spawn(owner::own(Arc::clone(&shared), owned, Some(control), stop));
                    Ok(started)
                }
                Err(error) => {
                    owner::clean(&shared, &name).await;
                    Err(error)
                }
            }
        });
        start.await.map_err(failed)?
    }

    async fn adopt_all(&self, wanted: Vec<SandboxId>) -> Result<Vec<SandboxId>, NodeError> {
        let driver = Arc::clone(&self.shared.driver);
        let found = blocking(move || driver.find()).await.map_err(failed)?.map_err(failed)?;
        let wanted: std::collections::HashSet<SandboxId> = wanted.into_iter().collect();
        let (keep, remove): (Vec<Found>, Vec<Found>) = found
            .into_iter()
            .partition(|found| found.alive.is_some() && wanted.contains(&found.name.id));
        let names: Vec<Name> = keep.iter().map(|found| found.name.clone()).collect();
        {
            let mut slots = self.shared.slots.lock();
            for found in keep.iter().chain(&remove) {
                slots.occupy(found.name.slot);
            }
        }
        for found in remove {
            tracing::info!(sandbox.id = %found.name.id, "removing a sandbox that nobody wants");
            if let Some(sandbox) = found.alive {
                blocking(move || sandbox.kill()).await.map_err(failed)?;
            }
            owner::clean(&self.shared, &found.name).await;
        }
        for Found { name, alive } in keep {
            let Some(sandbox) = alive else { continue };
            let journal = Journal::new(name.id.clone(), self.shared.logs.clone());
            let adopted = ("event_type", "sandbox_adopted".to_owned());
            journal.host(
                Level::Info,
                "the platform was restarted; the sandbox went on",
                [adopted],
            );
            let owned = Arc::new(Owned::adopted(name.clone(), sandbox, journal));
            self.shared.sandboxes.lock().insert(name.id, Arc::clone(&owned));
            self.tasks
                .spawn(owner::own(Arc::clone(&self.shared), owned, None, self.stop.clone()));
        }
        let driver = Arc::clone(&self.shared.driver);
        let kept = names.clone();
        blocking(move || driver.sweep(&kept))
            .await
            .map_err(failed)?
            .map_err(failed)?;
        Ok(names.into_iter().map(|name| name.id).collect())
    }

    async fn measure(&self) -> Result<Vec<SandboxSample>, NodeError> {
        let owned: Vec<Arc<Owned>> = self.shared.sandboxes.lock().values().cloned().collect();
        let sweep = move || {
            let samples = owned.iter().filter(|owned| !owned.is_ending()).filter_map(|owned| {
                owned.note_memory_kills();
                let at_us = now_us();
                let usage = owned.sandbox().usage().ok()?;
                Some(SandboxSample {
                    id: owned.id().clone(),
                    at_us,
                    cpu_time_us: usage.cpu_time_us,
                    memory_used_bytes: usage.memory_used_bytes,
                    memory_cache_bytes: usage.memory_cache_bytes,
                    memory_total_bytes: usage.memory_total_bytes,
                    disk_used_bytes: usage.disk_used_bytes,
                    disk_total_bytes: usage.disk_total_bytes,
                })
            });
            samples.collect()
        };
        blocking(sweep).await.map_err(failed)
    }

    async fn measure_host(&self) -> Result<HostRoom, NodeError> {
        let driver = Arc::clone(&self.shared.driver);
        let room = blocking(move || driver.room()).await.map_err(failed)?.map_err(failed)?;
        Ok(HostRoom {
            memory_available_bytes: room.memory_available_bytes,
            disk_available_bytes: room.disk_available_bytes,
        })
    }

    fn owned(&self, id: &SandboxId) -> Option<Arc<Owned>> {
        self.shared.sandboxes.lock().get(id).cloned()
    }
}

impl NodeApi for Node {
    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(self.start_sandbox(request))
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            let owned = self.owned(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
            owned.kill().await;
            Ok(())
        })
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            let owned = self
                .owned(id)
                .filter(|owned| !owned.is_ending())
                .ok_or(DialError::Gone)?;
            dial::dial(&self.shared.maker, owned.sandbox(), port)
                .await
                .map_err(|error| if owned.is_ending() { DialError::Gone } else { error })
        })
    }

    fn ending(&self, id: &SandboxId) -> Option<watch::Receiver<bool>> {
        Some(self.owned(id)?.ending())
    }

    fn reconcile(&self, wanted: Vec<SandboxId>) -> NodeFuture<'_, Result<Vec<SandboxId>, NodeError>> {
        Box::pin(self.adopt_all(wanted))
    }

    fn exits(&self) -> Option<mpsc::Receiver<SandboxExit>> {
        self.exits.lock().take()
    }

    fn logs(&self) -> Option<mpsc::Receiver<SandboxLog>> {
        self.logs.lock().take()
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(self.measure())
    }

    fn room(&self) -> NodeFuture<'_, Result<HostRoom, NodeError>> {
        Box::pin(self.measure_host())
    }
}

/// Runs something that blocks for milliseconds off the event loop.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

pub(crate) fn failed(error: impl std::fmt::Display) -> NodeError {
    NodeError::Failed(error.to_string())
}

/// How long an agent may take to answer before its sandbox counts as broken. It answers within milliseconds; the
/// bound is for a host that is out of memory or of time.
pub(crate) const AGENT_TIMEOUT: Duration = Duration::from_secs(15);
