//! The seam between the server and the node: requests are plain data, and the same trait is implemented by the node
//! itself on one box and by a client for it in a cluster.
//!
//! The server keeps what should exist; the node makes it so on its host and reports what ended. Nothing here assumes
//! that the host can see a sandbox's processes or files.
//!
//! Requests and answers own their data and can be encoded, so that a node may be a process on another machine. What
//! cannot be encoded is a stream into a sandbox ([`SandboxStream`]), which is bytes and is carried as such.

mod error;
mod events;
mod stream;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use model::id::{SandboxId, TemplateId};
use model::log::Level;
use model::resources::Resources;
use serde::{Deserialize, Serialize};

pub use self::error::{DialError, Failure, NodeError};
pub use self::events::{LiveSandbox, NodeEvent, NodeEvents, Snapshot};
pub use self::stream::{ByteStream, SandboxStream};
use crate::agent::Init;

/// A boxed future that borrows from its call.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where the file system of a sandbox comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Image {
    /// The built-in `base`: a skeleton made by the node over the host's own `/usr`.
    Base,
}

/// Everything the node needs to start a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StartSandbox {
    /// Its id, chosen by the server.
    pub id: SandboxId,
    /// The template it is started from.
    pub template: TemplateId,
    /// Its file system.
    pub image: Image,
    /// What it may use.
    pub resources: Resources,
    /// What its agent is told.
    pub init: Init,
}

/// A sandbox whose agent answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedSandbox {
    /// Level of the agent protocol that the sandbox's agent reports.
    pub agent_version: String,
    /// How long each stage took, in order, for `Server-Timing`.
    pub stages: Vec<Stage>,
}

/// One stage of a start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name, one of a few words of the platform's own.
    pub name: Cow<'static, str>,
    /// How long it took.
    pub took: Duration,
}

impl Stage {
    /// A stage with a name of this program.
    #[must_use]
    pub const fn new(name: &'static str, took: Duration) -> Self {
        Self {
            name: Cow::Borrowed(name),
            took,
        }
    }
}

/// The part of the platform that writes an entry into a sandbox's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logger {
    /// The host.
    Sandbox,
    /// The agent inside the sandbox, about its processes. Its word is not to be trusted.
    Process,
}

impl Logger {
    /// The word for it in the log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Process => "process",
        }
    }
}

/// Something that happened in a sandbox, for its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLog {
    /// Which one.
    pub id: SandboxId,
    /// When, in microseconds since 1970, by the host's clock.
    pub at_us: i64,
    /// How much it matters.
    pub level: Level,
    /// Which part of the platform tells.
    pub logger: Logger,
    /// One sentence for people. Bounded by the node, whoever wrote it.
    pub message: String,
    /// The same for programs. Keys and values are bounded by the node.
    pub fields: BTreeMap<String, String>,
}

/// What a sandbox uses at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSample {
    /// Which one.
    pub id: SandboxId,
    /// When, in microseconds since 1970, by the host's clock.
    pub at_us: i64,
    /// Processor time that the workload has used since the sandbox started, on all cores together, in microseconds.
    pub cpu_time_us: u64,
    /// Memory of the workload that only its processes can give back, in bytes: everything charged to it but
    /// [`Self::memory_cache_bytes`]. Files in memory (`/dev/shm`) are in here, for the kernel cannot drop them.
    pub memory_used_bytes: u64,
    /// Page cache of files on disk, in bytes, which the kernel drops when the memory is wanted.
    pub memory_cache_bytes: u64,
    /// Most that both may come to, in bytes.
    pub memory_total_bytes: u64,
    /// What is written on the sandbox's own disk, in bytes, as `df` inside tells.
    pub disk_used_bytes: u64,
    /// Size of that disk for files, in bytes, as `df` inside tells.
    pub disk_total_bytes: u64,
}

/// A sandbox that should exist on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Which one.
    pub id: SandboxId,
    /// In which state.
    pub state: WantedState,
}

/// In which state a sandbox should exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WantedState {
    /// It runs. When it does not run any more, nothing of it is wanted.
    Running,
    /// Nothing of it runs, and its disk is kept.
    Paused,
    /// It was on its way between the two: it is adopted if it runs, and its disk is kept if it does not.
    RunningOrPaused,
}

/// Free room of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCapacity {
    /// Memory that new sandboxes could use without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Free space on the file system that holds the sandboxes' disks, in bytes.
    pub disk_available_bytes: u64,
}

/// What a host did to keep its disk from being filled by sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DiskStops {
    /// Sandboxes that may write nothing new at this moment.
    pub stopped: u32,
    /// How often a sandbox was stopped from writing, since the start of the node.
    pub stops: u64,
    /// How many sandboxes were ended because they went on taking space, since the start of the node.
    pub ends: u64,
}

/// One host that runs sandboxes.
pub trait NodeApi: Send + Sync + 'static {
    /// Starts a sandbox and returns once its agent has taken `init`. On an error nothing of it is left.
    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>>;

    /// Ends a sandbox: its processes are killed, and when this returns none of them runs. Who asks has cut the open
    /// streams before, because a stream whose other end was killed looks as if it had ended.
    /// What is left on disk is removed soon after. [`NodeError::NotFound`] when there is none.
    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>>;

    /// Opens a stream to a TCP port inside a sandbox.
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>>;

    /// Makes the host match `wanted` after a restart: adopts what still runs and is to run, ends everything else,
    /// removes every disk but those of sandboxes that are wanted, and returns the ids that were adopted.
    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<SandboxId>, NodeError>>;

    /// Begins a stream of what the node reports. It may be called again, which ends the stream before; the module of
    /// [`NodeEvents`] says what is kept in between.
    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>>;

    /// A sample of every sandbox that runs here. One that cannot be read is left out: it is ending, or the host has no
    /// control groups to ask.
    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>>;

    /// The room that is left on the host.
    fn capacity(&self) -> NodeFuture<'_, Result<HostCapacity, NodeError>>;
}
