//! One host: what should run on it against what does.
//!
//! The server says what should exist; this crate makes it so through a [`runtime::driver::Driver`]. Each sandbox has
//! one task that owns it from the moment its agent has answered until nothing of it is left; calls only look it up
//! and ask. It knows no team, no key, no row.
//!
//! Crash-only: there is nothing to save at the end and nothing to repair at the start. [`Node::reconcile`] looks at
//! what the kernel says is there and makes it match.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start tasks of their own"))]

mod control;
mod events;
mod guard;
mod hogs;
mod journal;
mod owner;
mod reports;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::{
    DialError, Failure, HostCapacity, LiveSandbox, NodeApi, NodeError, NodeEvents, NodeFuture, SandboxSample,
    SandboxStream, Snapshot, StartSandbox, StartedSandbox, Wanted, WantedState,
};
use runtime::container::{self, ContainerDriver};
use runtime::driver::{Driver, Found};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::guard::Guard;
use crate::journal::{Journal, now_us};
use crate::owner::Owned;
use crate::reports::Reports;

/// How long a start may wait for the ends of unwanted sandboxes. They take milliseconds together; what takes
/// longer goes on beside the platform.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(15);

/// How the node of a data directory is set up.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Where images, skeletons and records lie.
    pub data_dir: PathBuf,
    /// Processes that make sandboxes side by side.
    pub launchers: usize,
    /// Run without limits when the host has no usable cgroups.
    pub unlimited: bool,
    /// Disk sizes, in MiB, that are made ready at the start.
    pub disks_mb: Vec<u32>,
    /// Take the whole disk of a sandbox from the host when it starts, instead of block by block.
    pub reserve_disks: bool,
    /// Make the template `base`. Without it no sandbox can be started, only ended.
    pub base: bool,
    /// Space on the file system of the data directory that sandboxes leave free, in MiB.
    pub disk_floor_mb: u32,
}

/// A host.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    guard: Mutex<Option<Guard>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// What happens to a sandbox once its processes have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterEnd {
    /// Everything of it is removed.
    Clean,
    /// Its disk is kept, and the record of which one that is.
    KeepDisk,
}

/// What the node and the tasks of its sandboxes share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) sandboxes: Mutex<HashMap<SandboxId, Arc<Owned>>>,
    pub(crate) reports: Arc<Reports>,
    /// A permit for each start that the driver makes side by side.
    pub(crate) starts: Semaphore,
    pub(crate) respawns: Semaphore,
    pub(crate) stop: CancellationToken,
    pub(crate) disk: guard::Counts,
}

impl Node {
    /// Prepares the host for sandboxes in containers. Those of an earlier run are not touched before
    /// [`NodeApi::reconcile`].
    ///
    /// # Errors
    /// With what the host lacks.
    pub async fn start(settings: NodeSettings) -> io::Result<Arc<Self>> {
        let disk_floor_mb = settings.disk_floor_mb;
        let settings = container::DriverSettings {
            data_dir: settings.data_dir,
            launchers: settings.launchers,
            unlimited: settings.unlimited,
            disks_mb: settings.disks_mb,
            reserve_disks: settings.reserve_disks,
            base: settings.base,
        };
        let container = blocking(move || ContainerDriver::open(&settings)).await??;
        Self::with_driver(container, disk_floor_mb)
    }

    /// A node whose sandboxes are this driver's, which leave `disk_floor_mb` MiB free on the host. To be called within
    /// a tokio runtime.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn with_driver(driver: Arc<dyn Driver>, disk_floor_mb: u32) -> io::Result<Arc<Self>> {
        let capabilities = driver.capabilities();
        tracing::debug!(?capabilities, "the driver is ready");
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            driver,
            sandboxes: Mutex::default(),
            reports: Reports::new(),
            starts: Semaphore::new(capabilities.concurrent_starts.max(1)),
            respawns: Semaphore::new(owner::RESPAWNS),
            stop: stop.clone(),
            disk: guard::Counts::default(),
        });
        let guard = match capabilities.disk_limits {
            true => Some(Guard::start(Arc::clone(&shared), u64::from(disk_floor_mb) << 20)?),
            false => None,
        };
        if capabilities.uncharged_memory {
            hogs::watch(&shared)?;
        }
        Ok(Arc::new(Self {
            shared,
            guard: Mutex::new(guard),
            stop,
            tasks: TaskTracker::new(),
        }))
    }

    /// Whether the host holds the limits of sandboxes.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.shared.driver.capabilities().limits
    }

    /// Lets go of every sandbox without touching it, so that the next start can adopt it.
    pub async fn release(&self) {
        let guard = self.guard.lock().take();
        // It ends within a look, and a panic in it is no reason not to go on.
        let _ = blocking(move || drop(guard)).await;
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
        let driver = Arc::clone(&self.shared.driver);
        let left = blocking(move || {
            let left = driver.find()?;
            if left.is_empty() {
                driver.dismantle();
            }
            io::Result::Ok(left)
        });
        let left = left.await.map_err(failed)?.map_err(failed)?;
        if left.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = left.iter().map(|found| found.id.to_string()).collect();
        Err(NodeError::failed(format!(
            "processes of {} were killed and do not end; the kernel waits for something, a disk most likely: run this \
             again when it is over",
            names.join(", ")
        )))
    }

    async fn start_sandbox(&self, request: StartSandbox) -> Result<StartedSandbox, NodeError> {
        let shared = Arc::clone(&self.shared);
        if shared.sandboxes.lock().contains_key(&request.id) {
            return Err(NodeError::failed(format!("sandbox {} exists already", request.id)));
        }
        let stop = self.stop.clone();
        let tasks = self.tasks.clone();
        // A task of its own: a caller that goes away must not leave half a sandbox.
        let start = self.tasks.spawn(async move {
            let (owned, control, started) = owner::start(&shared, &tasks, &request).await?;
            shared.sandboxes.lock().insert(request.id, Arc::clone(&owned));
            tasks.spawn(owner::supervise(Arc::clone(&shared), owned, Some(control), stop));
            Ok(started)
        });
        start.await.map_err(failed)?
    }

    async fn adopt_all(&self, wanted: Vec<Wanted>) -> Result<Vec<SandboxId>, NodeError> {
        let driver = Arc::clone(&self.shared.driver);
        let found = blocking(move || driver.find()).await.map_err(failed)?.map_err(failed)?;
        let mut wanted: HashMap<SandboxId, WantedState> =
            wanted.into_iter().map(|wanted| (wanted.id, wanted.state)).collect();
        let (mut keep, mut end, mut remove) = (Vec::new(), Vec::new(), Vec::new());
        let mut disks = Vec::new();
        for found in found {
            match wanted.remove(&found.id) {
                Some(WantedState::Running | WantedState::RunningOrPaused) if found.alive.is_some() => {
                    disks.push(found.disk.clone());
                    keep.push(found);
                }
                Some(WantedState::Paused | WantedState::RunningOrPaused) => {
                    disks.push(found.disk.clone());
                    end.push(found);
                }
                Some(WantedState::Running) | None => remove.push(found),
            }
        }
        wanted.retain(|_, state| *state != WantedState::Running);
        let adopted: Vec<SandboxId> = keep.iter().map(|found| found.id.clone()).collect();
        self.end_all(end, AfterEnd::KeepDisk).await;
        self.end_all(remove, AfterEnd::Clean).await;
        for Found { id, disk, alive } in keep {
            let Some(sandbox) = alive else { continue };
            let journal = Journal::new(id.clone(), Arc::clone(&self.shared.reports));
            let event = ("event_type", "sandbox_adopted".to_owned());
            journal.host(Level::Info, "the platform was restarted; the sandbox went on", [event]);
            let owned = Arc::new(Owned::adopted(id.clone(), disk, sandbox, journal));
            self.shared.sandboxes.lock().insert(id, Arc::clone(&owned));
            self.tasks.spawn(owner::supervise(
                Arc::clone(&self.shared),
                owned,
                None,
                self.stop.clone(),
            ));
        }
        if !wanted.is_empty() {
            // What the driver finds says which disk a sandbox has, so any may be that of a paused one which it does not.
            tracing::warn!(
                sandboxes = wanted.len(),
                "disks of paused sandboxes are not known: no disk is removed"
            );
            return Ok(adopted);
        }
        let driver = Arc::clone(&self.shared.driver);
        blocking(move || driver.sweep_disks(&disks))
            .await
            .map_err(failed)?
            .map_err(failed)?;
        Ok(adopted)
    }

    /// Ends sandboxes side by side, and waits for that, but not for ever.
    async fn end_all(&self, sandboxes: Vec<Found>, after: AfterEnd) {
        let removals: Vec<_> = sandboxes
            .into_iter()
            .map(|Found { id, disk, alive }| {
                match after {
                    AfterEnd::Clean => tracing::info!(sandbox.id = %id, "removing an unwanted sandbox"),
                    AfterEnd::KeepDisk => {
                        tracing::info!(sandbox.id = %id, "ending what is left of a paused sandbox")
                    }
                }
                let shared = Arc::clone(&self.shared);
                self.tasks.spawn(async move {
                    if let Some(sandbox) = alive {
                        owner::end(&id, &sandbox).await;
                    }
                    if after == AfterEnd::Clean {
                        owner::clean(&shared, &id, &disk).await;
                    }
                })
            })
            .collect();
        let all = async {
            for removal in removals {
                if let Err(error) = removal.await {
                    tracing::error!("remove a sandbox: {error}");
                }
            }
        };
        if tokio::time::timeout(REMOVAL_TIMEOUT, all).await.is_err() {
            tracing::error!("some unwanted sandboxes do not end; that goes on in the background");
        }
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

    async fn measure_host(&self) -> Result<HostCapacity, NodeError> {
        let driver = Arc::clone(&self.shared.driver);
        let free = blocking(move || driver.capacity())
            .await
            .map_err(failed)?
            .map_err(failed)?;
        Ok(HostCapacity {
            memory_available_bytes: free.memory_available_bytes,
            // What was promised to sandboxes is taken, although it is not written yet.
            disk_available_bytes: free.disk_available_bytes.saturating_sub(self.shared.disk.owed()),
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
            owned.sandbox().dial(port).await.map_err(|error| {
                tracing::debug!(sandbox.id = %id, port, "dial: {error}");
                if owned.is_ending() {
                    DialError::Gone
                } else {
                    DialError::PortClosed
                }
            })
        })
    }

    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<SandboxId>, NodeError>> {
        Box::pin(self.adopt_all(wanted))
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async move {
            Ok(self.shared.reports.subscribe(|| Snapshot {
                sandboxes: self
                    .shared
                    .sandboxes
                    .lock()
                    .values()
                    .map(|owned| LiveSandbox {
                        id: owned.id().clone(),
                        is_ending: owned.is_ending(),
                    })
                    .collect(),
                disk_stops: self.shared.disk.stops(),
            }))
        })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(self.measure())
    }

    fn capacity(&self) -> NodeFuture<'_, Result<HostCapacity, NodeError>> {
        Box::pin(self.measure_host())
    }
}

/// Runs something that blocks for milliseconds off the event loop.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

pub(crate) fn failed(error: impl std::error::Error) -> NodeError {
    NodeError::Failed(Failure::of(&error))
}

/// How long an agent may take to answer before its sandbox counts as broken. It answers within milliseconds; the
/// bound is for a host that is out of memory or of time.
pub(crate) const AGENT_TIMEOUT: Duration = Duration::from_secs(15);
