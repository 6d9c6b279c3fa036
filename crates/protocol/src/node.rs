//! The interface between the server and the node. Requests are plain data; the trait is implemented by the node itself
//! on a single host, and by a client for it in a cluster.
//!
//! The server decides which sandboxes should exist; the node runs them on its host and reports those that ended.
//! Nothing here assumes that the host can see a sandbox's processes or files.
//!
//! Requests and responses own their data and can be encoded, so that a node may be a process on another machine. The
//! exception is a stream into a sandbox ([`SandboxStream`]), which is carried as bytes.

mod counters;
mod deadlines;
mod error;
mod events;
mod guards;
mod log;
mod stream;
mod traffic;

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

pub use model::capacity::{HostCapacity, HostLoad, HostReport, NoCapacity, PermitRequest};
use model::id::{BuildId, DiskId, LayerId, SandboxId, TemplateId};
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use model::resources::Resources;
use model::secret::Secret;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

pub use self::counters::{DnsCounters, EgressConnections, EgressCounters};
pub use self::deadlines::{Expired, ExpiredSandbox, NodeDeadline, Overdue};
pub use self::error::{DialError, Failure, NodeError};
pub use self::events::{LiveSandbox, NodeEvent, NodeEvents, Snapshot};
pub use self::guards::{DiskStops, Throttles};
pub use self::log::{Logger, SandboxLog};
pub use self::stream::{ByteSource, ByteStream, LayerStream, SandboxStream};
pub use self::traffic::{NetworkBytes, Traffic};
use crate::agent::Init;
use crate::parcel::ChunkId;
use crate::template_file::BaseVersion;

/// A boxed future that borrows from its call.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where the file system of a sandbox comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Image {
    /// The built-in `base`: a root created by the node over the host's own `/usr`.
    Base,
    /// Stored layers.
    Layers {
        /// Whether the layers lie above `base`. Otherwise they are all of the file system, above an empty one that has
        /// only the directories at which the platform mounts something.
        base: bool,
        /// The layers, lowest first; [`Image::LAYERS_MAX`] at most.
        layers: Vec<LayerId>,
    },
    /// `base` with an empty directory `/mnt`, into which the sandbox unpacks an image. What [`NodeApi::commit`] stores
    /// of it is this directory alone, as the lowest layer of a file system without `base`.
    Import,
    /// `base` with two file systems between which the sandbox copies: `to` at `/mnt` and `from` at `/media`. What
    /// [`NodeApi::commit`] stores is what was written below `/mnt`, as the next layer of `to`.
    Copy {
        /// The file system that receives the files.
        to: LayerStack,
        /// The file system that the files are read from.
        from: LayerStack,
    },
}

/// A file system of stored layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerStack {
    /// Whether the layers lie above `base`.
    pub base: bool,
    /// The layers, lowest first; [`Image::LAYERS_MAX`] at most.
    pub layers: Vec<LayerId>,
}

impl Image {
    /// Maximum number of layers of an image. The kernel would take a few more, and `base` itself has two.
    pub const LAYERS_MAX: usize = 12;
}

/// A layer that was stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The layer.
    pub layer: LayerId,
    /// Space that the layer takes on the node, in bytes.
    pub bytes: u64,
}

/// A copy of the disk of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedDisk {
    /// Id of the copy.
    pub disk: DiskId,
    /// The file system that the disk of the copy lies above.
    pub image: Image,
    /// How long the processes of the sandbox were stopped.
    pub stopped: Duration,
    /// Whether the processes were copied as well.
    pub memory: CopiedMemory,
}

/// Whether a copy has the memory and processes of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopiedMemory {
    /// No memory was requested.
    Unwanted,
    /// The copy has the memory and processes of its sandbox.
    Copied,
    /// The copy has no memory, for this reason, which is shown to the client.
    Missing(String),
}

/// What was made of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommittedCopy {
    /// The layer with its files.
    pub layer: Committed,
    /// Space that the memory of the snapshot takes, in bytes; none where no memory is kept.
    pub memory_bytes: Option<u64>,
}

/// Memory of a snapshot on a node: a copy of a sandbox, from which others can be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// The build of the snapshot.
    pub build: BuildId,
    /// Space that the memory takes on the node, in bytes.
    pub bytes: u64,
}

/// A layer on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Id of the layer.
    pub id: LayerId,
    /// Space that the layer takes on the node, in bytes.
    pub bytes: u64,
}

/// Everything the node needs to start a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StartSandbox {
    /// Id of the sandbox, chosen by the server.
    pub id: SandboxId,
    /// The template that the sandbox is started from.
    pub template: TemplateId,
    /// Its file system.
    pub image: Image,
    /// Its resource limits.
    pub resources: Resources,
    /// The identity that its agent gets.
    pub init: Init,
    /// Network policy of the sandbox.
    pub egress: EgressPolicy,
    /// The snapshot whose processes the sandbox continues with, if the node has them and they fit the host. Otherwise
    /// it is started from its image, and its log says why.
    #[serde(default)]
    pub memory: Option<BuildId>,
    /// Opaque name of the owner of the sandbox. A node restores a limited number of sandboxes of one owner at the same
    /// time ([`NodeError::Busy`]); sandboxes without a name count as those of one owner.
    #[serde(default)]
    pub owner: Option<String>,
    /// Its deadline, for a node that keeps deadlines; none for a sandbox without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<NodeDeadline>,
    /// The permit that the node takes for the sandbox before anything of it is begun, where it was not asked for by
    /// [`NodeApi::permit`]. Only nodes that say so do it. A refusal is [`NodeError::Capacity`], with the reason as [`NoCapacity`]
    /// says it, and nothing was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitRequest>,
}

/// A sandbox that was started and whose agent has responded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedSandbox {
    /// Level of the agent protocol that the sandbox's agent reports.
    pub agent_version: String,
    /// How long each stage took, in order, for `Server-Timing`.
    pub stages: Vec<Stage>,
    /// Whether the sandbox continues with the processes of a snapshot.
    #[serde(default)]
    pub is_restored: bool,
}

/// The identity that a sandbox gets which was started in advance ([`NodeApi::freeze`]).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimSandbox {
    /// Id of the sandbox: the one that it was started with.
    pub id: SandboxId,
    /// The identity that its agent gets.
    pub init: Init,
    /// Network policy of the sandbox from now on.
    pub egress: EgressPolicy,
    /// Its deadline, for a node that keeps deadlines; none for a sandbox without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<NodeDeadline>,
}

/// A sandbox that was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenSandbox {
    /// Memory that its processes take, in bytes; 0 where it cannot be measured.
    pub memory_bytes: u64,
}

/// A sandbox to pause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// What the node keeps of the sandbox: its memory, its processes on disk, or its disk alone.
    pub keep: Kept,
    /// Whether its processes, which are kept in memory, are written to disk by another pause that follows.
    #[serde(default)]
    pub is_written_next: bool,
}

/// A sandbox that was paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PausedSandbox {
    /// What the node keeps of the sandbox.
    pub kept: Kept,
    /// Memory of the host that it takes while it is paused, in bytes; 0 where it cannot be measured.
    pub memory_bytes: u64,
    /// Space that it takes on the disk of the host, in bytes; 0 where it cannot be measured.
    pub disk_bytes: u64,
    /// What it had received and sent when it was paused; none if it had no processes any more.
    #[serde(default)]
    pub network: Option<NetworkBytes>,
}

/// A paused sandbox to resume.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResumeSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// What the node has kept of the sandbox.
    pub kept: Kept,
    /// Network policy of the sandbox from now on.
    pub egress: EgressPolicy,
    /// What a start of its processes needs; none where they are kept in memory.
    pub boot: Option<Boot>,
    /// Its deadline, for a node that keeps deadlines; none for a sandbox without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<NodeDeadline>,
}

/// A paused sandbox of which a parcel is made ([`crate::parcel`]).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PackSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The parcel, which no other one of the sandbox is called.
    pub parcel: String,
    /// The key of the sandbox's parcels: 64 hexadecimal digits. It is in no event, log or error.
    pub key: Secret,
    /// The chunks that need not be sent.
    pub known: Vec<ChunkId>,
}

/// A parcel of which a paused sandbox is made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnpackSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The parcel.
    pub parcel: String,
    /// The key of the sandbox's parcels, as in [`PackSandbox::key`].
    pub key: Secret,
    /// Whether it is to go on with its processes.
    pub with_processes: bool,
}

/// A paused sandbox that was made of a parcel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpackedSandbox {
    /// What the node keeps of the sandbox.
    pub kept: Kept,
    /// Space that it takes on the disk of the host, in bytes.
    pub disk_bytes: u64,
    /// Why its processes are not kept, if they were wanted and cannot be restored on this host. For the client.
    #[serde(default)]
    pub without_processes: Option<String>,
}

/// The memory of a snapshot of which a parcel is made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PackMemory {
    /// The build of the snapshot.
    pub build: BuildId,
    /// The parcel, as in [`PackSandbox::parcel`].
    pub parcel: String,
    /// The key of the parcels of the memory, as in [`PackSandbox::key`].
    pub key: Secret,
    /// The chunks that need not be sent.
    pub known: Vec<ChunkId>,
}

/// A parcel of which the memory of a snapshot is made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnpackMemory {
    /// The build of the snapshot.
    pub build: BuildId,
    /// The parcel.
    pub parcel: String,
    /// The key of the parcels of the memory, as in [`PackSandbox::key`].
    pub key: Secret,
}

/// What the node needs to start a sandbox whose processes are not in memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Boot {
    /// The template that the sandbox was created from.
    pub template: TemplateId,
    /// Its resource limits.
    pub resources: Resources,
    /// The identity that its agent gets.
    pub init: Init,
    /// Opaque name of the owner of the sandbox, as in [`StartSandbox::owner`].
    #[serde(default)]
    pub owner: Option<String>,
}

/// A sandbox that was resumed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumedSandbox {
    /// Level of the agent protocol that its agent reports, if it was started anew.
    pub agent_version: Option<String>,
    /// How long each stage took, in order, for `Server-Timing`.
    pub stages: Vec<Stage>,
}

/// A sandbox to fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ForkSandbox {
    /// Id of the sandbox, which goes on.
    pub id: SandboxId,
    /// The sandboxes that are started from its copy.
    pub children: Vec<ForkedSandbox>,
}

/// A sandbox that is started from the copy of another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ForkedSandbox {
    /// Its id, chosen by the server.
    pub id: SandboxId,
    /// Identity and limits of the new sandbox, which replace those of the one that was copied.
    pub boot: Boot,
    /// Network policy of the sandbox.
    pub egress: EgressPolicy,
    /// Its deadline, for a node that keeps deadlines; none for a sandbox without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<NodeDeadline>,
}

/// One stage of a start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Name, from a small fixed set.
    pub name: Cow<'static, str>,
    /// Duration of the stage.
    pub took: Duration,
}

impl Stage {
    /// Creates a stage with a static name.
    #[must_use]
    pub const fn new(name: &'static str, took: Duration) -> Self {
        Self {
            name: Cow::Borrowed(name),
            took,
        }
    }
}

/// Resource usage of a sandbox at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSample {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Time, in microseconds since 1970, by the host's clock.
    pub at_us: i64,
    /// Processor time that the workload has used since the sandbox started, on all cores together, in microseconds.
    pub cpu_time_us: u64,
    /// Memory of the workload that only its processes can free, in bytes: everything charged to it except
    /// [`Self::memory_cache_bytes`]. Includes files in memory (`/dev/shm`), which the kernel cannot drop.
    pub memory_used_bytes: u64,
    /// Page cache of files on disk, in bytes, which the kernel drops under memory pressure.
    pub memory_cache_bytes: u64,
    /// Limit of used memory and page cache together, in bytes.
    pub memory_total_bytes: u64,
    /// Space used on the sandbox's own disk, in bytes, as `df` inside reports it.
    pub disk_used_bytes: u64,
    /// Size of the sandbox's own disk for files, in bytes, as `df` inside reports it.
    pub disk_total_bytes: u64,
    /// What it received and sent.
    #[serde(default)]
    pub network: NetworkBytes,
}

/// A sandbox that should exist on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The desired state.
    pub state: WantedState,
    /// Network policy of the sandbox from its adoption on.
    pub egress: EgressPolicy,
    /// Its deadline, for a node that keeps deadlines; none for a sandbox without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<NodeDeadline>,
}

/// The desired state of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WantedState {
    /// The sandbox runs. If it no longer does, everything of it is removed, unless its disk was saved and it was not
    /// started since: then it is adopted as paused, because the row that says that it runs is older.
    Running,
    /// The sandbox is paused. Kept in memory, it is adopted and its processes stay stopped; if it has none any more,
    /// everything of it is removed, unless they were written to disk after they had been stopped. Otherwise its
    /// processes are ended, and its disk is kept.
    Paused(Kept),
    /// The sandbox is between the two: it is adopted as it is, running or with stopped processes; where only its disk
    /// is to be kept, as running. Without a process, the rule of [`Self::Paused`] applies.
    RunningOrPaused(Kept),
}

/// A sandbox that was adopted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The state that the node found the sandbox in.
    pub state: AdoptedState,
}

/// The state of a sandbox that was adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdoptedState {
    /// The sandbox runs.
    Running,
    /// The sandbox is paused, and this is kept of it.
    Paused(Kept),
}

/// One host that runs sandboxes.
pub trait NodeApi: Send + Sync + 'static {
    /// Asks for a capacity permit for a sandbox that has no processes on this node, before it is started, resumed or made by
    /// a fork. Nothing is begun, whatever the answer, so another node may be asked next. The permit lasts until the sandbox
    /// has processes, until it is given back, or for [`model::capacity::PERMIT_US`].
    fn permit(&self, request: PermitRequest) -> NodeFuture<'_, Result<Result<(), NoCapacity>, NodeError>>;

    /// Gives back the permit with this number of which nothing was begun; any other one stays. It returns at once, and may
    /// be lost on the way: the permit ends by itself then.
    fn give_back(&self, id: &SandboxId, number: u64);

    /// Starts a sandbox and returns once its agent has accepted `init`. On an error nothing of it is left but its permit, for
    /// another attempt. With [`StartSandbox::permit`] it asks for that first, as [`Self::permit`] does.
    /// Without a permit it takes one, and fails with [`NodeError::Capacity`] where the host may have no more sandboxes.
    /// [`NodeError::NoLayer`] when a layer of its image is not on this node; [`NodeError::Busy`] when its turn to be restored
    /// did not come in time.
    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>>;

    /// Ends a sandbox, paused or not: its processes are killed, and none of them is left when this returns. The caller has aborted the
    /// open streams before, because a stream whose other end was killed looks as if it had been closed. What is left on
    /// disk is removed soon after. [`NodeError::NotFound`] when there is no such sandbox.
    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>>;

    /// Stops all processes of a sandbox where they are, until it is claimed or ended. For sandboxes that are started in
    /// advance: a frozen one needs no processor time, and nothing in it responds. Where the host cannot freeze, it goes on
    /// running.
    fn freeze<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<FrozenSandbox, NodeError>>;

    /// Gives a frozen sandbox its identity: its processes continue, its agent gets `init`, and then its network follows
    /// `egress`. Returns once the agent has accepted. After an error the sandbox is in no certain state, and the caller
    /// ends it. [`NodeError::NotFound`] when there is no such sandbox.
    fn claim(&self, request: ClaimSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>>;

    /// Pauses a running sandbox: none of its processes runs when this returns, and its connections to the outside are cut.
    /// The caller has aborted the open streams into it before. After an error it runs as before, but for those
    /// connections. A paused sandbox stays so when this is repeated; of one that is kept in memory, only the disk is kept
    /// if that is requested, and its processes are written to disk if that is: where that fails, or is cancelled, they stay
    /// in memory. [`NodeError::NotFound`] when there is no such sandbox; [`NodeError::Unsupported`] where the
    /// host cannot keep that of any.
    ///
    /// Where only the disk is kept, its processes are ended without notice, and everything that they have written survives
    /// a power cut when this returns.
    ///
    /// Once `cancel` is cancelled, a pause that writes processes to disk lets them go on, or leaves them in memory if they
    /// were stopped before, and answers [`NodeError::Cancelled`]. It may have come too far for that; others go on.
    fn pause(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> NodeFuture<'_, Result<PausedSandbox, NodeError>>;

    /// Resumes a paused sandbox, and its network follows `egress`: its processes continue where they were, or, where only
    /// its disk is kept, it is started anew on that. One that runs already goes on. After an error it is paused as before.
    /// [`NodeError::NotFound`] when there is no such sandbox; [`NodeError::Unsupported`] when this node cannot resume what
    /// was kept of it; [`NodeError::Busy`] when its turn to be restored did not come in time.
    fn resume(&self, request: ResumeSandbox) -> NodeFuture<'_, Result<ResumedSandbox, NodeError>>;

    /// Makes a parcel of what is kept on disk of a paused sandbox. The stream has its records, and ends after that of the
    /// manifest; it is cut if the sandbox is resumed, changed or removed meanwhile, which does not wait for it.
    /// [`NodeError::NotFound`] when there is no such sandbox. Only nodes that say so can do it.
    fn pack_sandbox(&self, request: PackSandbox) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(std::future::ready(Err(no_parcels(&request.id))))
    }

    /// Makes a paused sandbox of a parcel. It is kept and not started when this returns, and survives a power cut. What the stream
    /// has is untrusted: [`NodeError::Refused`] when something is missing, was changed, or belongs to another sandbox or pause,
    /// and nothing is left then. [`NodeError::NoLayer`] when a layer below its files is not on this node;
    /// [`NodeError::Capacity`] when the host has no space. A paused sandbox that the node had under the id is replaced.
    fn unpack_sandbox(
        &self,
        request: UnpackSandbox,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<UnpackedSandbox, NodeError>> {
        drop(parcel);
        Box::pin(std::future::ready(Err(no_parcels(&request.id))))
    }

    /// How long no call has reached the node; none if calls do.
    fn away_for(&self) -> Option<Duration> {
        None
    }

    /// Ends a sandbox and stores what it wrote to its file system as a layer. Its processes are killed like by
    /// [`Self::kill`], so the caller has made programs in it write out what they have, and aborted the open streams. The
    /// sandbox ends also on an error. Sockets are left out.
    ///
    /// With `merge` the layer contains everything that the sandbox has above `base`, or above nothing: what it wrote and
    /// all layers of its image together. Such a layer replaces them.
    ///
    /// A layer with the same content is not stored twice: the id is the same. [`NodeError::Refused`] when the files
    /// cannot be a layer; [`NodeError::Capacity`] when the host has no space for it.
    fn commit<'a>(&'a self, id: &'a SandboxId, merge: bool) -> NodeFuture<'a, Result<Committed, NodeError>>;

    /// Copies a running sandbox with its processes and files as they are at one moment, and starts others from the copy. It
    /// stands still meanwhile and then goes on, whatever happens; its connections stay. Those of the others to the outside
    /// end. The result has one entry for each, in the order of the request, and of those that failed nothing is left.
    /// [`NodeError::NotFound`] when there is no such sandbox; [`NodeError::Refused`] when something in it cannot be copied;
    /// [`NodeError::Capacity`] when the host has no space for the copies, or makes others;
    /// [`NodeError::Unsupported`] where the host cannot copy processes.
    fn fork(&self, request: ForkSandbox) -> NodeFuture<'_, Result<Vec<Result<StartedSandbox, NodeError>>, NodeError>>;

    /// Copies the disk of a running sandbox. Its processes are stopped meanwhile, so that the copy is the disk as it was at
    /// one moment, and then continue, whatever happens. With `memory` its processes are copied as well, if that is possible:
    /// the result says whether they were. The caller gives the copy to [`Self::commit_copy`]
    /// or [`Self::keep_copy`]; one that never is is removed by the next [`Self::reconcile`]. [`NodeError::NotFound`] when there is no such sandbox;
    /// [`NodeError::Capacity`] when the host has no space for the copy, or has as many as it can have;
    /// [`NodeError::Unsupported`] where the host cannot stop processes.
    fn copy_disk<'a>(&'a self, id: &'a SandboxId, memory: bool) -> NodeFuture<'a, Result<CopiedDisk, NodeError>>;

    /// Stores what a copied disk has as a layer, as [`Self::commit`] does with that of a sandbox. With `memory`, a copy that
    /// has processes is kept as the memory of that build, and survives a power cut when this returns. Otherwise it is removed,
    /// also on an error.
    fn commit_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        merge: bool,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<CommittedCopy, NodeError>>;

    /// Keeps a copied disk that has processes as the memory of a build, as [`Self::commit_copy`] does, and stores no layer. Returns
    /// the space that it takes, in bytes. Without `memory`, and where it cannot be kept, the copy is removed, and the result is none.
    /// [`NodeError::Unsupported`] from nodes of the version before, which leave the copy as it is.
    fn keep_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<Option<u64>, NodeError>>;

    /// Lists the memory of snapshots on the node.
    fn memories(&self) -> NodeFuture<'_, Result<Vec<MemoryInfo>, NodeError>>;

    /// Removes the memory of a snapshot, once no start is copying it. Sandboxes that were started from it keep what they have.
    /// Succeeds when there is none.
    fn remove_memory<'a>(&'a self, build: &'a BuildId) -> NodeFuture<'a, Result<(), NodeError>>;

    /// Makes a parcel of the memory of a snapshot. The stream is that of [`Self::pack_sandbox`], and it is cut if the memory is
    /// removed meanwhile, which does not wait for it. [`NodeError::Unavailable`] when the node does not have the memory. Only nodes
    /// that say so can do it.
    fn pack_memory(&self, request: PackMemory) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(std::future::ready(Err(no_parcels(&request.build))))
    }

    /// Keeps the memory of a snapshot that a parcel has, which survives a power cut when this returns. Succeeds at once when the node
    /// has it. The stream is untrusted as in [`Self::unpack_sandbox`], with the same errors; [`NodeError::Unsupported`] when its
    /// processes cannot be restored on this host, with the reason for the client.
    fn unpack_memory(
        &self,
        request: UnpackMemory,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<MemoryInfo, NodeError>> {
        drop(parcel);
        Box::pin(std::future::ready(Err(no_parcels(&request.build))))
    }

    /// Lists the layers on the node, in the order of their ids.
    fn layers(&self) -> NodeFuture<'_, Result<Vec<LayerInfo>, NodeError>>;

    /// Removes a layer. The caller knows that no image refers to it; sandboxes that were started from it keep it until
    /// they end. Succeeds when there is no such layer.
    fn remove_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<(), NodeError>>;

    /// A layer as an archive. [`NodeError::NoLayer`] when the node does not have it.
    fn export_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<LayerStream, NodeError>>;

    /// Makes a layer of an archive of at most `bytes` unpacked. The archive is untrusted: nothing but the layer with that
    /// id can come of it. [`NodeError::Refused`] when it is another one; [`NodeError::Capacity`] when the host has no
    /// space for it. A layer that the node has is kept.
    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>>;

    /// What `base` is on the host.
    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>>;

    /// Opens a stream to a TCP port inside a sandbox.
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>>;

    /// Replaces what a sandbox may reach. When this returns, new connections follow the policy, and open connections that
    /// it does not allow are cut. [`NodeError::NotFound`] when there is no such sandbox.
    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>>;

    /// Makes the host match `wanted` after a restart: adopts sandboxes as [`WantedState`] says, ends all others, removes
    /// every disk except those of wanted sandboxes, and returns those that were adopted. Nothing is asked of a sandbox
    /// that is adopted.
    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>>;

    /// Changes the deadline of a running sandbox, for when no server is there. [`NodeError::NotFound`] when there is no such
    /// sandbox, or the node ends or pauses it at the one before. A node that keeps no deadlines ignores it.
    fn set_deadline<'a>(&'a self, id: &'a SandboxId, deadline: NodeDeadline) -> NodeFuture<'a, Result<(), NodeError>> {
        let _ = (id, deadline);
        Box::pin(std::future::ready(Ok(())))
    }

    /// The sandboxes that the node has ended or paused by itself, because no server was there at their deadlines. To be asked
    /// before [`Self::reconcile`]. They are listed until they are forgotten, or run again.
    fn expired(&self) -> NodeFuture<'_, Result<Vec<ExpiredSandbox>, NodeError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Forgets that the node has ended or paused these by itself: their rows say so. Others are ignored.
    fn forget_expired(&self, ids: Vec<SandboxId>) -> NodeFuture<'_, Result<(), NodeError>> {
        let _ = ids;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Starts a stream of node events. A later call ends the stream before; [`NodeEvents`] describes which events are
    /// kept in between.
    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>>;

    /// A sample of every running sandbox. A sandbox that cannot be measured is left out: it is ending, or the host has
    /// no control groups. So is a paused one.
    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>>;

    /// The free capacity of the host, and its load.
    fn capacity(&self) -> NodeFuture<'_, Result<HostReport, NodeError>>;

    /// What the egress gateway counted; zeros where sandboxes have no network.
    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>>;
}

fn no_parcels(of: &dyn fmt::Display) -> NodeError {
    NodeError::Unsupported(format!("this node makes no copies for the blob store, such as of {of}"))
}
