//! The node: runs the sandboxes of one host.
//!
//! The server decides which sandboxes should exist; this crate starts and ends them through a
//! [`runtime::driver::Driver`]. API calls look up the handle of a sandbox. Those that pause, resume or copy it do so
//! themselves, one at a time, each in its turn (`SandboxHandle::change`). A task supervises each sandbox from its agent's
//! first response until nothing of it is left, and carries out its end. The node knows no teams, keys or database rows.
//!
//! Crash-only: nothing is saved at shutdown and nothing repaired at startup. [`Node::reconcile`] reads what the kernel
//! has, and which disks are kept, and makes it match the desired state.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start tasks of their own"))]

mod archive;
mod begun;
mod claim;
mod commit;
mod condition;
mod control;
mod counters;
mod deadlines;
mod egress;
mod events;
mod fork;
mod guard;
mod handle;
mod journal;
mod log_writer;
mod memory;
mod memory_locks;
mod noted;
mod overdue;
mod parcel;
mod parcel_turns;
mod pause;
mod permits;
mod process_watch;
mod reconcile;
mod restores;
mod shared;
mod socket_memory;
mod start;
mod supervisor;
mod teardown;
mod work;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use model::capacity::Bounds;
use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::network::EgressPolicy;
use parking_lot::Mutex;
use protocol::node::{
    Adopted, ClaimSandbox, Committed, CommittedCopy, CopiedDisk, DialError, EgressCounters, ExpiredSandbox,
    ForkSandbox, FrozenSandbox, HostLoad, HostReport, LayerInfo, LayerStream, LiveSandbox, MemoryInfo, NoCapacity,
    NodeApi, NodeDeadline, NodeError, NodeEvents, NodeFuture, PackMemory, PackSandbox, PauseSandbox, PausedSandbox,
    PermitRequest, ResumeSandbox, ResumedSandbox, SandboxSample, SandboxStream, Snapshot, StartSandbox, StartedSandbox,
    Traffic, UnpackMemory, UnpackSandbox, UnpackedSandbox, Wanted,
};
use protocol::template_file::BaseVersion;
use proxy::egress::{EgressGateway, EgressSettings};
use runtime::driver::Driver;
use runtime::isolation::Isolation;
use runtime::settings::DriverSettings;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::begun::Begun;
use crate::counters::{GuardCounters, ThrottleCounters};
pub use crate::deadlines::Deadlines;
use crate::guard::Guard;
use crate::handle::SandboxHandle;
use crate::journal::Journal;
use crate::log_writer::now_us;
use crate::memory_locks::MemoryLocks;
use crate::parcel_turns::Parcels;
use crate::pause::kept::KeptSandboxes;
use crate::permits::HostPermits;
use crate::restores::Restores;
use crate::shared::Shared;
use crate::start::Begin;
use crate::teardown::Teardowns;
use crate::work::{blocking, failed};

/// How many processes a sandbox may create per second by default.
const PROCESS_RATE: u32 = 2000;

/// Settings of a node, with those of the driver that it opens.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// How sandboxes are isolated.
    pub isolation: Isolation,
    /// Settings of the driver.
    pub driver: DriverSettings,
    /// Free space on the file system of the data directory that is reserved, in MiB.
    pub disk_floor_mb: u32,
    /// What must remain free for a new sandbox, and how many there may be.
    pub capacity: Bounds,
    /// How many processes a sandbox may create per second before its processor time is limited; `None` to limit none.
    pub process_rate: Option<u32>,
    /// What the operator says about connections that leave sandboxes.
    pub egress: EgressSettings,
    /// The runtime on which connections of sandboxes are relayed; by default that of the caller.
    pub traffic: Option<Handle>,
    /// The deadlines that the node keeps itself, for when no server is there; none where it is in the process of its server.
    pub deadlines: Option<Arc<Deadlines>>,
}

impl NodeSettings {
    /// Settings with the platform's defaults for a data directory.
    #[must_use]
    pub fn new(data_dir: PathBuf) -> Self {
        Self {
            isolation: Isolation::default(),
            driver: DriverSettings::new(data_dir),
            disk_floor_mb: 0,
            capacity: Bounds::default(),
            process_rate: Some(PROCESS_RATE),
            egress: EgressSettings::default(),
            traffic: None,
            deadlines: None,
        }
    }
}

/// The node of one host and data directory.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    guard: Mutex<Option<Guard>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Node {
    /// Opens the driver of these settings, which prepares the host. Sandboxes of an earlier run are left alone until
    /// [`NodeApi::reconcile`].
    ///
    /// # Errors
    /// When the host lacks something that sandboxes require.
    pub async fn start(settings: NodeSettings) -> io::Result<Arc<Self>> {
        let NodeSettings {
            isolation,
            driver,
            disk_floor_mb,
            capacity,
            process_rate,
            egress,
            traffic,
            deadlines,
        } = settings;
        let gateway = EgressGateway::new(egress, traffic.unwrap_or_else(Handle::current));
        let driver = blocking(move || isolation.open(&driver)).await??;
        let node = Self::with_driver(driver, disk_floor_mb, capacity, Some(gateway))?;
        if let Some(rate) = process_rate
            && node.shared.driver.capabilities().process_counter
        {
            process_watch::watch(&node.shared, rate)?;
        }
        if let Some(deadlines) = deadlines {
            node.enforce(deadlines);
        }
        Ok(node)
    }

    /// Creates a node with this driver that keeps `disk_floor_mb` MiB free on the host, and gives out permits within `capacity`. Its sandboxes reach the outside
    /// through `egress`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When no thread can be created.
    pub fn with_driver(
        driver: Arc<dyn Driver>,
        disk_floor_mb: u32,
        capacity: Bounds,
        egress: Option<EgressGateway>,
    ) -> io::Result<Arc<Self>> {
        let capabilities = driver.capabilities();
        tracing::debug!(?capabilities, "the driver is ready");
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            driver,
            sandboxes: Mutex::default(),
            permits: HostPermits::new(capacity),
            kept: KeptSandboxes::default(),
            journal: Journal::new(),
            starts: Semaphore::new(capabilities.concurrent_starts.max(1)),
            restores: Restores::new(capabilities.concurrent_restores),
            respawns: Semaphore::new(supervisor::RESPAWNS),
            teardowns: Teardowns::new(),
            commits: Semaphore::new(commit::COMMITS),
            paging: Semaphore::new(1),
            copying: Semaphore::new(commit::COPYING),
            forks: Semaphore::new(fork::FORKS),
            copies: Mutex::default(),
            memories: MemoryLocks::default(),
            parcels: Parcels::default(),
            archives: Arc::new(Semaphore::new(archive::ARCHIVES)),
            checkpoint_bytes: AtomicU64::new(0),
            disk_floor_bytes: (u64::from(disk_floor_mb) << 20).max(guard::FLOOR_MIN),
            stop: stop.clone(),
            deadlines: OnceLock::new(),
            disk: GuardCounters::default(),
            throttles: ThrottleCounters::default(),
            streams: Arc::new(Traffic::new(now_us())),
            authorities: egress
                .as_ref()
                .map(|egress| egress.settings().authorities_pem())
                .unwrap_or_default(),
            egress: egress.filter(|_| capabilities.egress),
        });
        let guard = if capabilities.disk_limits {
            Some(Guard::start(Arc::clone(&shared), u64::from(disk_floor_mb) << 20)?)
        } else {
            None
        };
        if capabilities.uncharged_memory {
            socket_memory::watch(&shared)?;
        }
        Ok(Arc::new(Self {
            shared,
            guard: Mutex::new(guard),
            stop,
            tasks: TaskTracker::new(),
        }))
    }

    /// Keeps deadlines from now on.
    fn enforce(&self, deadlines: Arc<Deadlines>) {
        let kept = Arc::clone(self.shared.deadlines.get_or_init(|| deadlines));
        let (shared, tasks) = (Arc::clone(&self.shared), self.tasks.clone());
        self.tasks.spawn(overdue::enforce(shared, tasks, kept));
    }

    /// Whether the limits of sandboxes are enforced on this host.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.shared.driver.capabilities().limits
    }

    /// Whether the processes of sandboxes can be written to disk on this host.
    #[must_use]
    pub fn writes_processes(&self) -> bool {
        self.shared.driver.capabilities().checkpoints
    }

    /// Stops supervising all sandboxes and leaves them running, so that the next start can adopt them.
    pub async fn release(&self) {
        let guard = self.guard.lock().take();
        // The guard ends within one round; a panic in it must not stop the release.
        let _ = blocking(move || drop(guard)).await;
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        if let Some(egress) = &self.shared.egress {
            egress.stop().await;
        }
    }

    /// Ends every sandbox of this data directory and removes everything that they and the platform left on the host.
    ///
    /// # Errors
    /// When sandboxes cannot be listed, or something cannot be removed.
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
            "processes of sandboxes {} were killed but have not exited, most likely blocked on disk I/O; run this \
             command again once they have exited",
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
        // A task of its own, so that a caller that is dropped does not leave a half-started sandbox.
        let start = self.tasks.spawn(async move {
            let _begun = Begun::start_with(&shared, &request.id, request.permit.as_ref()).await?;
            if let Some(build) = &request.memory
                && let Some(started) = memory::start(&shared, &tasks, &stop, &request, build).await?
            {
                noted::note(&shared, &request.id, request.deadline).await;
                return Ok(started);
            }
            let begin = Begin {
                id: &request.id,
                template: &request.template,
                disk: start::new_disk(&request.image)?,
                restore: None,
                forked_from: None,
                snapshot: None,
                resources: request.resources,
                init: &request.init,
                egress: &request.egress,
            };
            let (handle, control, started) = start::start(&shared, &tasks, begin).await?;
            shared.sandboxes.lock().insert(request.id.clone(), Arc::clone(&handle));
            tasks.spawn(supervisor::supervise(Arc::clone(&shared), handle, Some(control), stop));
            noted::note(&shared, &request.id, request.deadline).await;
            Ok(started)
        });
        start.await.map_err(failed)?
    }

    async fn measure(&self) -> Result<Vec<SandboxSample>, NodeError> {
        let handles: Vec<Arc<SandboxHandle>> = self.shared.sandboxes.lock().values().cloned().collect();
        let sweep = move || {
            let samples = handles
                .iter()
                .filter(|handle| !handle.is_ending() && handle.condition().runs_or_is_copied())
                .filter_map(|handle| {
                    handle.note_memory_kills();
                    let at_us = now_us();
                    let usage = handle.sandbox().usage().ok()?;
                    Some(SandboxSample {
                        id: handle.id().clone(),
                        at_us,
                        cpu_time_us: usage.cpu_time_us,
                        memory_used_bytes: usage.memory_used_bytes,
                        memory_cache_bytes: usage.memory_cache_bytes,
                        memory_total_bytes: usage.memory_total_bytes,
                        disk_used_bytes: usage.disk_used_bytes,
                        disk_total_bytes: usage.disk_total_bytes,
                        network: handle.traffic().read(),
                    })
                });
            samples.collect()
        };
        blocking(sweep).await.map_err(failed)
    }

    async fn report(&self) -> Result<HostReport, NodeError> {
        let left = begun::left(&self.shared).await?;
        let size = blocking(runtime::usage::load).await.map_err(failed)?;
        if let Err(error) = &size {
            tracing::debug!("the load of the host cannot be read: {error}");
        }
        let load = size.ok().map(|size| {
            let Shared { permits, sandboxes, .. } = &*self.shared;
            let (running, starting) = permits.count(sandboxes);
            HostLoad {
                memory_bytes: size.memory_bytes,
                cores: size.cores,
                running,
                starting,
                pressure: size.pressure,
                bounds: permits.bounds(),
            }
        });
        Ok(HostReport { left, load })
    }

    fn handle_of(&self, id: &SandboxId) -> Option<Arc<SandboxHandle>> {
        self.shared.find(id)
    }
}

impl NodeApi for Node {
    fn permit(&self, request: PermitRequest) -> NodeFuture<'_, Result<Result<(), NoCapacity>, NodeError>> {
        Box::pin(async move {
            let Shared { permits, sandboxes, .. } = &*self.shared;
            Ok(permits.give(sandboxes, &request, || begun::left(&self.shared)).await)
        })
    }

    fn give_back(&self, id: &SandboxId, number: u64) {
        self.shared.permits.give_back(id, number);
    }

    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(self.start_sandbox(request))
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            match self.handle_of(id) {
                Some(handle) => handle.kill().await,
                None => pause::remove(&self.shared, &self.tasks, id).await?,
            }
            noted::forget(&self.shared, id).await;
            Ok(())
        })
    }

    fn freeze<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<FrozenSandbox, NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
            claim::freeze(&self.shared, handle).await
        })
    }

    fn claim(&self, request: ClaimSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(&request.id).filter(|handle| !handle.is_ending());
            let handle = handle.ok_or_else(|| NodeError::NotFound(request.id.clone()))?;
            claim::claim(&self.shared, &handle, request).await
        })
    }

    fn pause(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> NodeFuture<'_, Result<PausedSandbox, NodeError>> {
        Box::pin(async move {
            let id = request.id.clone();
            let paused = pause::pause(&self.shared, &self.tasks, request, cancel).await?;
            noted::forget(&self.shared, &id).await;
            Ok(paused)
        })
    }

    fn resume(&self, request: ResumeSandbox) -> NodeFuture<'_, Result<ResumedSandbox, NodeError>> {
        Box::pin(async move {
            let (id, deadline) = (request.id.clone(), request.deadline);
            let resumed = pause::resume::resume(&self.shared, &self.tasks, request).await?;
            noted::note(&self.shared, &id, deadline).await;
            Ok(resumed)
        })
    }

    fn commit<'a>(&'a self, id: &'a SandboxId, merge: bool) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
            // A task of its own: a caller that is dropped leaves no disk behind.
            let committing = commit::commit(Arc::clone(&self.shared), handle, merge);
            self.tasks.spawn(committing).await.map_err(failed)?
        })
    }

    fn fork(&self, request: ForkSandbox) -> NodeFuture<'_, Result<Vec<Result<StartedSandbox, NodeError>>, NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(&request.id);
            let handle = handle.ok_or_else(|| NodeError::NotFound(request.id.clone()))?;
            let (shared, tasks, stop) = (Arc::clone(&self.shared), self.tasks.clone(), self.stop.clone());
            // A task of its own: a caller that is dropped leaves nothing half forked.
            let forking = fork::fork(shared, tasks, stop, handle, request);
            self.tasks.spawn(forking).await.map_err(failed)?
        })
    }

    fn copy_disk<'a>(&'a self, id: &'a SandboxId, memory: bool) -> NodeFuture<'a, Result<CopiedDisk, NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
            let copying = commit::copy(Arc::clone(&self.shared), handle, memory);
            self.tasks.spawn(copying).await.map_err(failed)?
        })
    }

    fn commit_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        merge: bool,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<CommittedCopy, NodeError>> {
        Box::pin(async move {
            let committing = commit::commit_copy(Arc::clone(&self.shared), disk.clone(), memory.cloned(), merge);
            self.tasks.spawn(committing).await.map_err(failed)?
        })
    }

    fn keep_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<Option<u64>, NodeError>> {
        Box::pin(async move {
            let keeping = commit::keep_copy(Arc::clone(&self.shared), disk.clone(), memory.cloned());
            self.tasks.spawn(keeping).await.map_err(failed)?
        })
    }

    fn memories(&self) -> NodeFuture<'_, Result<Vec<MemoryInfo>, NodeError>> {
        Box::pin(memory::list(&self.shared))
    }

    fn remove_memory<'a>(&'a self, build: &'a BuildId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            let removing = memory::remove(Arc::clone(&self.shared), build.clone());
            self.tasks.spawn(removing).await.map_err(failed)?
        })
    }

    fn layers(&self) -> NodeFuture<'_, Result<Vec<LayerInfo>, NodeError>> {
        Box::pin(async move {
            let driver = Arc::clone(&self.shared.driver);
            let layers = blocking(move || driver.storage().layers()).await.map_err(failed)?;
            layers.map_err(failed)
        })
    }

    fn remove_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            // A disk of a sandbox that was just ended still refers to it.
            self.shared.teardowns.settled().await;
            let (driver, layer) = (Arc::clone(&self.shared.driver), id.clone());
            let removed = blocking(move || driver.storage().remove_layer(&layer))
                .await
                .map_err(failed)?;
            removed.map_err(failed)
        })
    }

    fn export_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<LayerStream, NodeError>> {
        Box::pin(archive::export(Arc::clone(&self.shared), id.clone()))
    }

    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(archive::import(&self.shared, id, bytes, archive))
    }

    fn pack_sandbox(&self, request: PackSandbox) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(parcel::pack(&self.shared, &self.tasks, request))
    }

    fn unpack_sandbox(
        &self,
        request: UnpackSandbox,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<UnpackedSandbox, NodeError>> {
        Box::pin(async move {
            // A task of its own: a caller that is dropped leaves nothing half unpacked.
            let unpacking = parcel::unpack(Arc::clone(&self.shared), self.tasks.clone(), request, parcel);
            self.tasks.spawn(unpacking).await.map_err(failed)?
        })
    }

    fn pack_memory(&self, request: PackMemory) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(parcel::pack_memory(&self.shared, &self.tasks, request))
    }

    fn unpack_memory(
        &self,
        request: UnpackMemory,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<MemoryInfo, NodeError>> {
        Box::pin(async move {
            // As above.
            let unpacking = parcel::unpack_memory(Arc::clone(&self.shared), request, parcel);
            self.tasks.spawn(unpacking).await.map_err(failed)?
        })
    }

    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>> {
        Box::pin(async move {
            let version = blocking(runtime::base::version_of_host).await.map_err(failed)?;
            version.map_err(failed)
        })
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            let handle = self
                .handle_of(id)
                // The kernel would accept connections for processes that are stopped. Those of one that is copied take theirs
                // in a moment, and no copy has them.
                .filter(|handle| !handle.is_ending() && handle.condition().runs_or_is_copied())
                .ok_or(DialError::Gone)?;
            let dialed = handle.sandbox().dial(port).await;
            let counted = dialed.map(|stream| {
                let streams = Arc::clone(&self.shared.streams);
                stream.counted(Arc::clone(handle.traffic()), streams)
            });
            counted.map_err(|error| {
                tracing::debug!(sandbox.id = %id, port, "dial: {error}");
                if handle.is_ending() || !handle.condition().runs_or_is_copied() {
                    DialError::Gone
                } else {
                    DialError::PortClosed
                }
            })
        })
    }

    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            let handle = self.handle_of(id).ok_or_else(|| NodeError::NotFound(id.clone()))?;
            handle.set_egress(policy);
            Ok(())
        })
    }

    fn set_deadline<'a>(&'a self, id: &'a SandboxId, deadline: NodeDeadline) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(noted::set(&self.shared, id, deadline))
    }

    fn expired(&self) -> NodeFuture<'_, Result<Vec<ExpiredSandbox>, NodeError>> {
        Box::pin(overdue::expired(&self.shared))
    }

    fn forget_expired(&self, ids: Vec<SandboxId>) -> NodeFuture<'_, Result<(), NodeError>> {
        Box::pin(noted::forget_all(&self.shared, ids))
    }

    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>> {
        Box::pin(reconcile::adopt_all(&self.shared, &self.tasks, wanted))
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async move {
            Ok(self.shared.journal.subscribe(|| {
                // First, because one that is being resumed is one of the kept until it is one of the others; and one that
                // is both is being paused.
                let kept = self.shared.kept.ids();
                let mut live: HashMap<SandboxId, bool> = (self.shared.sandboxes.lock().values())
                    .map(|handle| (handle.id().clone(), handle.is_ending()))
                    .collect();
                let more = self.shared.kept.ids();
                live.extend(kept.into_iter().chain(more).map(|id| (id, false)));
                let mut sandboxes: Vec<LiveSandbox> = live
                    .into_iter()
                    .map(|(id, is_ending)| LiveSandbox { id, is_ending })
                    .collect();
                sandboxes.sort_by(|a, b| a.id.cmp(&b.id));
                Snapshot {
                    sandboxes,
                    disk_stops: self.shared.disk.stops(),
                    throttles: self.shared.throttles.read(),
                }
            }))
        })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(self.measure())
    }

    fn capacity(&self) -> NodeFuture<'_, Result<HostReport, NodeError>> {
        Box::pin(self.report())
    }

    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>> {
        let counters = self.shared.egress.as_ref().map(EgressGateway::counters);
        let streams = self.shared.streams.read();
        let counters = EgressCounters {
            streams_sent: streams.sent,
            streams_received: streams.received,
            ..counters.unwrap_or_default()
        };
        Box::pin(std::future::ready(Ok(counters)))
    }
}
