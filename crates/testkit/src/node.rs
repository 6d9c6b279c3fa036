//! A fake node: it keeps a list of sandboxes, whose ports are servers of the test, with configurable behaviour.

mod admission;
mod behave;
mod behaviour;
mod deadlines;
mod forks;
mod memories;
mod parcels;
mod pauses;
mod permits;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use parking_lot::Mutex;
use protocol::node::{
    Adopted, AdoptedState, ClaimSandbox, Committed, CommittedCopy, CopiedDisk, DialError, DiskStops, EgressCounters,
    ExpiredSandbox, ForkSandbox, FrozenSandbox, HostCapacity, HostReport, Image, LayerInfo, LayerStream, LiveSandbox,
    MemoryInfo, NoCapacity, NodeApi, NodeDeadline, NodeError, NodeEvent, NodeEvents, NodeFuture, PackMemory,
    PackSandbox, PauseSandbox, PausedSandbox, PermitRequest, ResumeSandbox, ResumedSandbox, SandboxLog, SandboxSample,
    SandboxStream, Snapshot, Stage, StartSandbox, StartedSandbox, UnpackMemory, UnpackSandbox, UnpackedSandbox, Wanted,
    WantedState,
};
use protocol::template_file::BaseVersion;
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

pub use self::behaviour::Behaviour;
pub use self::deadlines::FakeDeadlines;
pub use self::permits::FakePermits;

/// The message of a failing node. Clients must never see it.
pub const SECRET: &str = "a secret of the operator";

/// How many sandboxes of one owner a busy node restores at the same time.
pub const OWNER_LIMIT: usize = 2;

/// The fake node. The fields that a test may change are public.
#[derive(Debug)]
pub struct FakeNode {
    /// Behaviour of a start.
    pub start: Mutex<Behaviour>,
    /// Behaviour of an end.
    pub kill: Mutex<Behaviour>,
    /// Behaviour of a freeze.
    pub freeze: Mutex<Behaviour>,
    /// Behaviour of a claim.
    pub claim: Mutex<Behaviour>,
    /// The frozen sandboxes.
    pub frozen: Mutex<HashSet<SandboxId>>,
    /// The requests of all claims that succeeded so far.
    pub claimed: Mutex<Vec<ClaimSandbox>>,
    /// Behaviour of a pause.
    pub pause: Mutex<Behaviour>,
    /// Behaviour of a pause that keeps the disk alone.
    pub pause_to_disk: Mutex<Behaviour>,
    /// Behaviour of a pause that writes processes to disk.
    pub write: Mutex<Behaviour>,
    /// Whether such a pause keeps the processes in memory instead, as one of processes that cannot be written.
    pub keeps_checkpoints_in_memory: Mutex<bool>,
    /// Behaviour of a resume.
    pub resume: Mutex<Behaviour>,
    /// Number of calls to resume a sandbox.
    pub resumes: AtomicUsize,
    /// The paused sandboxes.
    pub paused: Mutex<HashSet<SandboxId>>,
    /// The sandboxes without processes, of which the disk is kept.
    pub kept: Mutex<HashSet<SandboxId>>,
    /// Sandboxes whose disk a reconcile does not find.
    pub lost: Mutex<HashSet<SandboxId>>,
    /// Space that a kept disk takes, in bytes.
    pub kept_bytes: AtomicU64,
    /// The requests of all resumes that started a sandbox anew.
    pub booted: Mutex<Vec<ResumeSandbox>>,
    /// The memory of a frozen sandbox, in bytes.
    pub frozen_bytes: AtomicU64,
    /// Behaviour of a commit. On a failure the sandbox ends, too.
    pub commit: Mutex<Behaviour>,
    /// Behaviour of a fork.
    pub fork: Mutex<Behaviour>,
    /// How many of the sandboxes of a fork start; the others fail with [`FakeNode::forks_fail`].
    pub forks_started: AtomicUsize,
    /// Behaviour of the start of those that do not start.
    pub forks_fail: Mutex<Behaviour>,
    /// The requests of all forks that did not fail as a whole.
    pub forked: Mutex<Vec<ForkSandbox>>,
    /// Behaviour of a copy of a disk.
    pub copy: Mutex<Behaviour>,
    /// The copies of disks that have not been committed, and their sandboxes.
    pub copies: Mutex<HashMap<DiskId, SandboxId>>,
    /// Whether the node says that it makes copies for the blob store.
    pub makes_parcels: AtomicBool,
    /// Whether processes are copied with disks.
    pub copies_memory: AtomicBool,
    /// The copies of disks that have processes, and the images that they lie above.
    pub copied_memory: Mutex<HashMap<DiskId, Image>>,
    /// The memory of snapshots, and the images that they lie above. A start from one that is missing is one from files.
    pub memories: Mutex<HashMap<BuildId, Image>>,
    /// Behaviour of the removal of a layer.
    pub remove_layer: Mutex<Behaviour>,
    /// Version of `base` that the node reports.
    pub base: Mutex<BaseVersion>,
    /// The layers and their sizes in bytes.
    pub layers: Mutex<BTreeMap<LayerId, u64>>,
    /// The commits so far, the failed ones included: the sandbox, and whether layers were merged.
    pub commits: Mutex<Vec<(SandboxId, bool)>>,
    /// Space that the next layers take, in bytes.
    pub layer_bytes: AtomicU64,
    /// Behaviour of a change of the network policy.
    pub set_egress: Mutex<Behaviour>,
    /// Behaviour of a reconcile.
    pub reconcile: Mutex<Behaviour>,
    /// Releases one waiting call.
    pub go: Notify,
    /// Notified when a call begins to wait.
    pub waiting: Notify,
    /// The requests of all starts so far.
    pub started: Mutex<Vec<StartSandbox>>,
    /// The id of the last sandbox that was to be started, whether or not it has been.
    pub starting: Mutex<Option<SandboxId>>,
    /// Number of calls to end a sandbox.
    pub kills: AtomicUsize,
    /// When each sandbox was ended.
    pub killed_at: Mutex<HashMap<SandboxId, SystemTime>>,
    /// The running sandboxes.
    pub running: Mutex<HashSet<SandboxId>>,
    /// The network policies of the sandboxes that were started or adopted, also of those that ended.
    pub egress: Mutex<HashMap<SandboxId, EgressPolicy>>,
    /// Sandboxes that a reconcile finds running.
    pub adoptable: Mutex<HashSet<SandboxId>>,
    /// Whether a reconcile finds all wanted sandboxes running.
    pub adopts_all: AtomicBool,
    /// The request of the last reconcile.
    pub wanted: Mutex<Vec<Wanted>>,
    /// The version that agents report.
    pub agent_version: Mutex<String>,
    /// The server behind every port that is not in `ports`.
    pub origin: Mutex<Option<SocketAddr>>,
    /// The servers behind specific ports, the same in all sandboxes.
    pub ports: Mutex<HashMap<u16, SocketAddr>>,
    /// Number of dials.
    pub dials: AtomicUsize,
    /// Number of dials that find the port closed before one succeeds.
    pub closed_for: AtomicUsize,
    /// The usage of sandboxes; those that do not run are left out of the response.
    pub samples: Mutex<Vec<SandboxSample>>,
    /// The capacity that the host has left; none when it is unknown.
    pub room: Mutex<Option<HostCapacity>>,
    /// The reported counters of sandboxes stopped to keep the host's disk from filling up.
    pub disk_stops: Mutex<DiskStops>,
    /// What the egress gateway counted; none when it is unknown.
    pub egress_counters: Mutex<Option<EgressCounters>>,
    /// The permits, the clock by which they end, and the load.
    pub permits: FakePermits,
    /// The deadlines that the node keeps, and what it has done about them.
    pub deadlines: FakeDeadlines,
    events: Mutex<Option<mpsc::Sender<NodeEvent>>>,
}

impl FakeNode {
    /// A node where every call succeeds and no sandbox runs.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            start: Mutex::new(Behaviour::Works),
            kill: Mutex::new(Behaviour::Works),
            freeze: Mutex::new(Behaviour::Works),
            claim: Mutex::new(Behaviour::Works),
            frozen: Mutex::default(),
            claimed: Mutex::default(),
            pause: Mutex::new(Behaviour::Works),
            pause_to_disk: Mutex::new(Behaviour::Works),
            write: Mutex::new(Behaviour::Unsupported),
            keeps_checkpoints_in_memory: Mutex::new(false),
            resume: Mutex::new(Behaviour::Works),
            resumes: AtomicUsize::new(0),
            paused: Mutex::default(),
            kept: Mutex::default(),
            lost: Mutex::default(),
            kept_bytes: AtomicU64::new(64 << 20),
            booted: Mutex::default(),
            frozen_bytes: AtomicU64::new(1 << 20),
            commit: Mutex::new(Behaviour::Works),
            fork: Mutex::new(Behaviour::Works),
            forks_started: AtomicUsize::new(usize::MAX),
            forks_fail: Mutex::new(Behaviour::Fails),
            forked: Mutex::default(),
            copy: Mutex::new(Behaviour::Works),
            copies: Mutex::default(),
            makes_parcels: AtomicBool::new(false),
            copies_memory: AtomicBool::new(false),
            copied_memory: Mutex::default(),
            memories: Mutex::default(),
            remove_layer: Mutex::new(Behaviour::Works),
            base: Mutex::new(BaseVersion {
                system: "debian-12-x86_64".to_owned(),
                packages: "1".to_owned(),
            }),
            layers: Mutex::default(),
            layer_bytes: AtomicU64::new(4096),
            commits: Mutex::default(),
            set_egress: Mutex::new(Behaviour::Works),
            reconcile: Mutex::new(Behaviour::Works),
            go: Notify::new(),
            waiting: Notify::new(),
            started: Mutex::default(),
            starting: Mutex::default(),
            kills: AtomicUsize::new(0),
            killed_at: Mutex::default(),
            running: Mutex::default(),
            egress: Mutex::default(),
            adoptable: Mutex::default(),
            adopts_all: AtomicBool::new(false),
            wanted: Mutex::default(),
            agent_version: Mutex::new(protocol::agent::VERSION.to_owned()),
            origin: Mutex::default(),
            ports: Mutex::default(),
            dials: AtomicUsize::new(0),
            closed_for: AtomicUsize::new(0),
            samples: Mutex::default(),
            room: Mutex::new(Some(HostCapacity {
                memory_available_bytes: 64 << 30,
                disk_available_bytes: 1 << 40,
            })),
            disk_stops: Mutex::default(),
            egress_counters: Mutex::new(Some(EgressCounters::default())),
            permits: FakePermits::default(),
            deadlines: FakeDeadlines::default(),
            events: Mutex::default(),
        })
    }

    /// The ids of the running sandboxes, in no order.
    pub fn ids(&self) -> HashSet<String> {
        self.running.lock().iter().map(ToString::to_string).collect()
    }

    /// Ends a sandbox as if it had exited by itself, and returns once the subscriber has processed the event.
    ///
    /// # Panics
    /// When there is no subscriber.
    pub async fn exit(&self, id: &SandboxId) {
        self.running.lock().remove(id);
        self.frozen.lock().remove(id);
        self.paused.lock().remove(id);
        self.report(NodeEvent::Ending(id.clone())).await;
        self.report(NodeEvent::Exited(id.clone())).await;
    }

    /// Writes into the log of a sandbox, and returns once the subscriber has processed the entry.
    ///
    /// # Panics
    /// When there is no subscriber.
    pub async fn log(&self, entry: SandboxLog) {
        self.report(NodeEvent::Log(entry)).await;
    }

    /// Reports an event, and returns once the subscriber has processed it.
    ///
    /// # Panics
    /// When there is no subscriber.
    pub async fn report(&self, event: NodeEvent) {
        let events = self.events.lock().clone().expect("a subscriber");
        events.send(event).await.expect("a subscriber");
        // Received only after the event before it was processed.
        let marker = NodeEvent::DiskStops(*self.disk_stops.lock());
        events.send(marker).await.expect("a subscriber");
        while events.capacity() < events.max_capacity() {
            tokio::task::yield_now().await;
        }
    }

    /// Ends the current subscription, as a node does that has lost the report of an end.
    pub fn end_subscription(&self) {
        self.events.lock().take();
    }
}

impl FakeNode {
    async fn make_layer(&self, of: &SandboxId, merge: bool) -> Result<Committed, NodeError> {
        let number = {
            let mut commits = self.commits.lock();
            commits.push((of.clone(), merge));
            commits.len()
        };
        let behaviour = *self.commit.lock();
        self.behave(behaviour).await?;
        let committed = Committed {
            layer: Self::layer(number),
            bytes: self.layer_bytes.load(Ordering::SeqCst),
        };
        self.layers.lock().insert(committed.layer.clone(), committed.bytes);
        if behaviour == Behaviour::PanicsAfterwards {
            panic!("the fake node panics as configured");
        }
        Ok(committed)
    }
}

impl NodeApi for FakeNode {
    fn permit(&self, request: PermitRequest) -> NodeFuture<'_, Result<Result<(), NoCapacity>, NodeError>> {
        Box::pin(std::future::ready(Ok(self.permit_for(&request))))
    }

    fn give_back(&self, id: &SandboxId, number: u64) {
        self.permits.give_back(id, number);
    }

    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(async move {
            let _begun = self.begin_with(&request.id, request.permit.as_ref())?;
            *self.starting.lock() = Some(request.id.clone());
            let behaviour = *self.start.lock();
            self.behave(behaviour).await?;
            let stacks: &[&[LayerId]] = match &request.image {
                Image::Base | Image::Import => &[],
                Image::Layers { layers, .. } => &[layers],
                Image::Copy { to, from } => &[&to.layers, &from.layers],
            };
            for layer in stacks.iter().copied().flatten() {
                if !self.layers.lock().contains_key(layer) {
                    return Err(NodeError::NoLayer(layer.clone()));
                }
            }
            let id = request.id.clone();
            self.running.lock().insert(id.clone());
            self.egress.lock().insert(id.clone(), request.egress.clone());
            let is_restored = self.has_memory(&request);
            self.started.lock().push(request);
            match behaviour {
                Behaviour::ExitsEarly => self.exit(&id).await,
                Behaviour::PanicsAfterwards => panic!("the fake node panics as configured"),
                _ => {}
            }
            Ok(StartedSandbox {
                is_restored,
                agent_version: self.agent_version.lock().clone(),
                stages: vec![
                    Stage::new("spawn", Duration::from_micros(1500)),
                    Stage::new("init", Duration::from_micros(500)),
                ],
            })
        })
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            self.kills.fetch_add(1, Ordering::SeqCst);
            let behaviour = *self.kill.lock();
            self.behave(behaviour).await?;
            let was_kept = self.kept.lock().remove(id);
            if !self.running.lock().remove(id) && !was_kept {
                return Err(NodeError::NotFound(id.clone()));
            }
            self.frozen.lock().remove(id);
            self.paused.lock().remove(id);
            self.killed_at.lock().insert(id.clone(), SystemTime::now());
            Ok(())
        })
    }

    fn freeze<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<FrozenSandbox, NodeError>> {
        Box::pin(async move {
            let behaviour = *self.freeze.lock();
            self.behave(behaviour).await?;
            if !self.running.lock().contains(id) {
                return Err(NodeError::NotFound(id.clone()));
            }
            self.frozen.lock().insert(id.clone());
            Ok(FrozenSandbox {
                memory_bytes: self.frozen_bytes.load(Ordering::SeqCst),
            })
        })
    }

    fn claim(&self, request: ClaimSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(async move {
            let behaviour = *self.claim.lock();
            self.behave(behaviour).await?;
            let id = request.id.clone();
            if !self.running.lock().contains(&id) {
                return Err(NodeError::NotFound(id));
            }
            if !self.frozen.lock().remove(&id) {
                return Err(NodeError::failed("the sandbox is not frozen"));
            }
            self.egress.lock().insert(id.clone(), request.egress.clone());
            self.claimed.lock().push(request);
            match behaviour {
                Behaviour::ExitsEarly => self.exit(&id).await,
                Behaviour::PanicsAfterwards => panic!("the fake node panics as configured"),
                _ => {}
            }
            Ok(StartedSandbox {
                is_restored: false,
                agent_version: self.agent_version.lock().clone(),
                stages: vec![Stage::new("claim", Duration::from_micros(500))],
            })
        })
    }

    fn pause(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> NodeFuture<'_, Result<PausedSandbox, NodeError>> {
        Box::pin(self.pause_one(request, cancel))
    }

    fn resume(&self, request: ResumeSandbox) -> NodeFuture<'_, Result<ResumedSandbox, NodeError>> {
        Box::pin(async move {
            self.resumes.fetch_add(1, Ordering::SeqCst);
            if request.kept == Kept::Checkpoint && *self.write.lock() == Behaviour::Unsupported {
                return Err(NodeError::Unsupported(SECRET.to_owned()));
            }
            let behaviour = *self.resume.lock();
            self.behave(behaviour).await?;
            let id = request.id.clone();
            let boots = request.kept != Kept::Memory && !self.running.lock().contains(&id);
            let _begun = if boots { Some(self.begin(&id)?) } else { None };
            if boots {
                if request.boot.is_none() {
                    return Err(NodeError::failed("no boot"));
                }
                if !self.kept.lock().remove(&id) {
                    return Err(NodeError::NotFound(id));
                }
                self.running.lock().insert(id.clone());
            } else if !self.running.lock().contains(&id) {
                return Err(NodeError::NotFound(id));
            }
            self.paused.lock().remove(&id);
            self.egress.lock().insert(id.clone(), request.egress.clone());
            if boots {
                self.booted.lock().push(request);
            }
            match behaviour {
                Behaviour::ExitsEarly => self.exit(&id).await,
                Behaviour::PanicsAfterwards => panic!("the fake node panics as configured"),
                _ => {}
            }
            Ok(ResumedSandbox {
                agent_version: boots.then(|| self.agent_version.lock().clone()),
                stages: vec![Stage::new("init", Duration::from_micros(500))],
            })
        })
    }

    fn commit<'a>(&'a self, id: &'a SandboxId, merge: bool) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(async move {
            if !self.running.lock().remove(id) {
                return Err(NodeError::NotFound(id.clone()));
            }
            self.killed_at.lock().insert(id.clone(), SystemTime::now());
            self.make_layer(id, merge).await
        })
    }

    fn fork(&self, request: ForkSandbox) -> NodeFuture<'_, Result<Vec<Result<StartedSandbox, NodeError>>, NodeError>> {
        Box::pin(self.fork_all(request))
    }

    fn copy_disk<'a>(&'a self, id: &'a SandboxId, memory: bool) -> NodeFuture<'a, Result<CopiedDisk, NodeError>> {
        Box::pin(self.copy_of(id, memory))
    }

    fn commit_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        merge: bool,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<CommittedCopy, NodeError>> {
        Box::pin(self.commit_of(disk, merge, memory))
    }

    fn keep_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<Option<u64>, NodeError>> {
        Box::pin(std::future::ready(self.keep_of(disk, memory)))
    }

    fn memories(&self) -> NodeFuture<'_, Result<Vec<MemoryInfo>, NodeError>> {
        Box::pin(std::future::ready(Ok(self.memory_info())))
    }

    fn remove_memory<'a>(&'a self, build: &'a BuildId) -> NodeFuture<'a, Result<(), NodeError>> {
        self.memories.lock().remove(build);
        Box::pin(std::future::ready(Ok(())))
    }

    fn layers(&self) -> NodeFuture<'_, Result<Vec<LayerInfo>, NodeError>> {
        Box::pin(std::future::ready(Ok(self.layer_info())))
    }

    fn remove_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            let behaviour = *self.remove_layer.lock();
            self.behave(behaviour).await?;
            self.layers.lock().remove(id);
            Ok(())
        })
    }

    fn export_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<LayerStream, NodeError>> {
        Box::pin(async move {
            if self.layers.lock().contains_key(id) {
                Ok(LayerStream::new(io::Cursor::new(Self::archive(id))))
            } else {
                Err(NodeError::NoLayer(id.clone()))
            }
        })
    }

    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(self.import(id, bytes, archive))
    }

    fn pack_sandbox(&self, request: PackSandbox) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(std::future::ready(self.pack(&request)))
    }

    fn unpack_sandbox(
        &self,
        request: UnpackSandbox,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<UnpackedSandbox, NodeError>> {
        Box::pin(self.unpack(request, parcel))
    }

    fn pack_memory(&self, request: PackMemory) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(std::future::ready(self.pack_memory_of(&request)))
    }

    fn unpack_memory(
        &self,
        request: UnpackMemory,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<MemoryInfo, NodeError>> {
        Box::pin(self.unpack_memory_of(request, parcel))
    }

    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>> {
        Box::pin(async move { Ok(self.base.lock().clone()) })
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            self.dials.fetch_add(1, Ordering::SeqCst);
            let is_stopped = self.frozen.lock().contains(id) || self.paused.lock().contains(id);
            if is_stopped || !self.running.lock().contains(id) {
                return Err(DialError::Gone);
            }
            let closed = self
                .closed_for
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if closed.is_ok() {
                return Err(DialError::PortClosed);
            }
            let address = self.ports.lock().get(&port).copied().or(*self.origin.lock());
            let address = address.ok_or(DialError::PortClosed)?;
            let stream = TcpStream::connect(address).await.map_err(|_| DialError::PortClosed)?;
            stream.set_nodelay(true).map_err(|_| DialError::PortClosed)?;
            Ok(stream.into())
        })
    }

    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            let behaviour = *self.set_egress.lock();
            self.behave(behaviour).await?;
            if !self.running.lock().contains(id) {
                return Err(NodeError::NotFound(id.clone()));
            }
            self.egress.lock().insert(id.clone(), policy);
            match behaviour {
                Behaviour::ExitsEarly => self.exit(id).await,
                Behaviour::PanicsAfterwards => panic!("the fake node panics as configured"),
                _ => {}
            }
            Ok(())
        })
    }

    fn set_deadline<'a>(&'a self, id: &'a SandboxId, deadline: NodeDeadline) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.note_deadline(id, deadline))
    }

    fn expired(&self) -> NodeFuture<'_, Result<Vec<ExpiredSandbox>, NodeError>> {
        Box::pin(std::future::ready(Ok(self.deadlines.expired.lock().clone())))
    }

    fn forget_expired(&self, ids: Vec<SandboxId>) -> NodeFuture<'_, Result<(), NodeError>> {
        self.deadlines
            .expired
            .lock()
            .retain(|expired| !ids.contains(&expired.id));
        Box::pin(std::future::ready(Ok(())))
    }

    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>> {
        Box::pin(async move {
            self.wanted.lock().clone_from(&wanted);
            let behaviour = *self.reconcile.lock();
            self.behave(behaviour).await?;
            let adopts_all = self.adopts_all.load(Ordering::SeqCst);
            let (adoptable, lost) = (self.adoptable.lock(), self.lost.lock());
            let (mut paused, mut kept) = (self.paused.lock(), self.kept.lock());
            let mut adopted = Vec::new();
            for wanted in wanted {
                let id = wanted.id;
                let is_alive = adopts_all || adoptable.contains(&id);
                let state = match wanted.state {
                    WantedState::Running if is_alive => AdoptedState::Running,
                    WantedState::Paused(Kept::Memory) if is_alive => AdoptedState::Paused(Kept::Memory),
                    WantedState::RunningOrPaused(Kept::Memory) if adoptable.contains(&id) && paused.contains(&id) => {
                        AdoptedState::Paused(Kept::Memory)
                    }
                    WantedState::RunningOrPaused(_) if adoptable.contains(&id) => AdoptedState::Running,
                    WantedState::Paused(keep @ (Kept::Checkpoint | Kept::Filesystem))
                    | WantedState::RunningOrPaused(keep @ (Kept::Checkpoint | Kept::Filesystem))
                        if !lost.contains(&id) =>
                    {
                        AdoptedState::Paused(keep)
                    }
                    WantedState::RunningOrPaused(_) if is_alive => AdoptedState::Running,
                    _ => continue,
                };
                match state {
                    AdoptedState::Running => drop(paused.remove(&id)),
                    AdoptedState::Paused(Kept::Memory) => drop(paused.insert(id.clone())),
                    AdoptedState::Paused(_) => drop(kept.insert(id.clone())),
                }
                if !kept.contains(&id) {
                    self.running.lock().insert(id.clone());
                    self.egress.lock().insert(id.clone(), wanted.egress);
                }
                adopted.push(Adopted { id, state });
            }
            Ok(adopted)
        })
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async move {
            let (sender, events) = mpsc::channel(1024);
            let (running, kept) = (self.running.lock(), self.kept.lock());
            let snapshot = Snapshot {
                sandboxes: running
                    .iter()
                    .chain(kept.iter())
                    .map(|id| LiveSandbox {
                        id: id.clone(),
                        is_ending: false,
                    })
                    .collect(),
                disk_stops: *self.disk_stops.lock(),
                ..Snapshot::default()
            };
            let sent = sender.try_send(NodeEvent::Snapshot(snapshot));
            sent.map_err(|error| NodeError::failed(error.to_string()))?;
            *self.events.lock() = Some(sender);
            Ok(events.into())
        })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(async move {
            let running = self.running.lock();
            let samples = self.samples.lock();
            let paused = self.paused.lock();
            let is_measured = |id: &SandboxId| running.contains(id) && !paused.contains(id);
            let samples = samples.iter().filter(|sample| is_measured(&sample.id));
            Ok(samples.cloned().collect())
        })
    }

    fn capacity(&self) -> NodeFuture<'_, Result<HostReport, NodeError>> {
        Box::pin(async move { self.say() })
    }

    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>> {
        Box::pin(async move { (*self.egress_counters.lock()).ok_or_else(|| NodeError::failed("counters unknown")) })
    }
}
