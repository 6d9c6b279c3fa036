//! The seam between the server and the node: requests are plain data, and the same trait is implemented by the node
//! itself on one box and by a client for it in a cluster.
//!
//! The server keeps what should exist; the node makes it so on its host and reports what ended. Nothing here assumes
//! that the host can see a sandbox's processes or files.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use model::id::{SandboxId, TemplateId};
use model::log::Level;
use model::resources::Resources;
use tokio::sync::{mpsc, watch};

use crate::agent::Init;

/// A boxed future that borrows from its call.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A byte stream to a port inside a sandbox. On one box it is a socket made in the sandbox's network namespace.
pub type SandboxStream = tokio::net::TcpStream;

/// Where the file system of a sandbox comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// The built-in `base`: a skeleton made by the node over the host's own `/usr`.
    Base,
}

/// Everything the node needs to start a sandbox.
#[derive(Debug, Clone)]
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
#[derive(Debug, Clone)]
pub struct StartedSandbox {
    /// Level of the agent protocol that the sandbox's agent reports.
    pub agent_version: String,
    /// How long each stage took, in order, for `Server-Timing`.
    pub stages: Vec<(&'static str, Duration)>,
}

/// Why the node could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No such sandbox on this node.
    #[error("sandbox {0} is not on this node")]
    NotFound(SandboxId),
    /// The host has no room; another try later may work.
    #[error("the host has no room: {0}")]
    Capacity(String),
    /// The host refused or failed; the text is for the operator's log, never for a client.
    #[error("{0}")]
    Failed(String),
}

/// Why a stream into a sandbox could not be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// The sandbox is unknown, ended or ending.
    #[error("the sandbox was not found")]
    Gone,
    /// It runs, and nothing accepts connections on the port.
    #[error("the port is not open")]
    PortClosed,
}

/// A sandbox that ended without being asked to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxExit {
    /// Which one.
    pub id: SandboxId,
}

/// Something that happened in a sandbox, for its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxLog {
    /// Which one.
    pub id: SandboxId,
    /// When, in microseconds since 1970, by the host's clock.
    pub at_us: i64,
    /// How much it matters.
    pub level: Level,
    /// Which part of the platform tells: `sandbox` is the host, `process` and `agent` are the agent inside, whose
    /// word is not to be trusted.
    pub logger: &'static str,
    /// One sentence for people. Bounded by the node, whoever wrote it.
    pub message: String,
    /// The same for programs. Keys and values are bounded by the node.
    pub fields: BTreeMap<String, String>,
}

/// What a sandbox uses at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// Free room of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostRoom {
    /// Memory that new sandboxes could use without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Free space on the file system that holds the sandboxes' disks, in bytes.
    pub disk_available_bytes: u64,
}

/// One host that runs sandboxes.
pub trait NodeApi: Send + Sync + 'static {
    /// Starts a sandbox and returns once its agent has taken `init`. On an error nothing of it is left.
    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>>;

    /// Ends a sandbox: its open streams are cut, its processes are killed, and when this returns none of them runs.
    /// What is left on disk is removed soon after. [`NodeError::NotFound`] when there is none.
    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>>;

    /// Opens a stream to a TCP port inside a sandbox.
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>>;

    /// `None` when the sandbox is not here; otherwise a receiver that turns `true` the moment the sandbox begins to
    /// end, before its processes are killed, so that streams can be cut rather than ended.
    fn ending(&self, id: &SandboxId) -> Option<watch::Receiver<bool>>;

    /// Makes the host match `wanted` after a restart: adopts what still runs and is wanted, removes everything else,
    /// and returns the ids that were adopted.
    fn reconcile(&self, wanted: Vec<SandboxId>) -> NodeFuture<'_, Result<Vec<SandboxId>, NodeError>>;

    /// Where unasked-for ends are reported. Yields the one receiver at the first call and `None` after.
    fn exits(&self) -> Option<mpsc::Receiver<SandboxExit>>;

    /// Where entries for sandboxes' logs arrive. Yields the one receiver at the first call and `None` after. Bounded:
    /// when it is full, entries are dropped, and a later entry of the same sandbox says how many.
    fn logs(&self) -> Option<mpsc::Receiver<SandboxLog>>;

    /// A sample of every sandbox that runs here. One that cannot be read is left out: it is ending, or the host has no
    /// control groups to ask.
    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>>;

    /// The room that is left on the host.
    fn room(&self) -> NodeFuture<'_, Result<HostRoom, NodeError>>;
}
