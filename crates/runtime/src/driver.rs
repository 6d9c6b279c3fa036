//! The seam between a node and whatever isolates its sandboxes.
//!
//! Nothing above it may assume that the host sees a sandbox's processes or files: a sandbox is started from a request,
//! and from then on it can be dialed, measured, given a new spawner, watched for its end and killed, and that is all.
//! How sandboxes are kept apart (namespaces, ranges of ids, control groups, loop devices) is the driver's own business.
//! What a driver cannot do it says by its [`Capabilities`].

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::{DiskId, SandboxId};
use model::resources::Resources;
use protocol::node::SandboxStream;

use crate::growth::Disk;
use crate::rootfs::Rootfs;
use crate::usage::{Capacity, Usage};

/// One way to isolate sandboxes.
pub trait Driver: Debug + Send + Sync {
    /// What it can do on this host. Does not change while it is open.
    fn capabilities(&self) -> Capabilities;

    /// Makes a sandbox and returns once its agent was executed. Blocks for milliseconds.
    ///
    /// # Errors
    /// [`StartError`] says what there is to clean up.
    fn start(&self, request: &StartRequest) -> Result<Started, StartError>;

    /// Every sandbox of this data directory that left something, and the living among them.
    ///
    /// # Errors
    /// When the host cannot be searched.
    fn find(&self) -> io::Result<Vec<Found>>;

    /// Removes what a sandbox that does not run any more left, except its disk. `false` when something still runs in
    /// it: what is left was killed, try again. Until it returns `true`, no other sandbox can have this id.
    fn clean(&self, id: &SandboxId) -> bool;

    /// Removes a disk, if it is there. What a sandbox that runs has of it stays until the sandbox ends.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn remove_disk(&self, disk: &DiskId) -> io::Result<()>;

    /// Removes every disk that is not in `keep`.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    fn sweep_disks(&self, keep: &[DiskId]) -> io::Result<()>;

    /// What is free on the host for more sandboxes.
    ///
    /// # Errors
    /// When the host cannot be asked.
    fn capacity(&self) -> io::Result<Capacity>;

    /// Space on the file system of the data directory, in bytes. Takes a microsecond.
    ///
    /// # Errors
    /// When the host cannot be asked.
    fn disk_available(&self) -> io::Result<u64>;

    /// Memory of the host, page cache aside, that no sandbox is charged with. Takes some 100 µs.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Unsupported`] without [`Capabilities::uncharged_memory`].
    fn uncharged_bytes(&self) -> io::Result<u64>;

    /// Takes back what the driver itself changed on the host. For the very end, when no sandbox is left: nothing can be
    /// started after.
    fn dismantle(&self);
}

/// What a driver can do on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Sandboxes that can be started side by side; more requests only wait for each other.
    pub concurrent_starts: usize,
    /// Memory, processes and processor time of a sandbox are held to its [`Resources`].
    pub limits: bool,
    /// The size of a disk is a limit, and [`Sandbox::allow_disk`] can lower it while the sandbox runs.
    pub disk_limits: bool,
    /// Memory that no sandbox is charged with is counted, for the host and for each sandbox.
    pub uncharged_memory: bool,
    /// A sandbox can be paused and resumed.
    pub pause: bool,
    /// Listeners can be opened inside a sandbox's network, for a gateway that decides what leaves it.
    pub egress_listeners: bool,
}

/// What is to be started.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// The sandbox.
    pub id: SandboxId,
    /// Its file system.
    pub rootfs: Rootfs,
    /// The disk on which the uppers of its file system lie. It is made, and must not exist.
    pub disk: DiskId,
    /// What it may use, the size of its disk included.
    pub resources: Resources,
    // What it may reach (the network policy) belongs here.
}

/// Why a sandbox was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// This host runs as many sandboxes as it can. Nothing was begun.
    #[error("every slot of this host is in use")]
    Full,
    /// There is a sandbox with this id, or something is left of one. Nothing was begun.
    #[error("sandbox {0} exists already")]
    Exists(SandboxId),
    /// A step failed. Nothing runs any more; [`Driver::clean`] and [`Driver::remove_disk`] have work to do.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// A sandbox that an earlier platform left.
#[derive(Debug)]
pub struct Found {
    /// Which one.
    pub id: SandboxId,
    /// Its disk.
    pub disk: DiskId,
    /// The sandbox, if its agent lives.
    pub alive: Option<Arc<dyn Sandbox>>,
}

/// A sandbox that was just made.
#[derive(Debug)]
pub struct Started {
    /// The sandbox.
    pub sandbox: Arc<dyn Sandbox>,
    /// The agent's control connection: a connected stream socket on which it serves HTTP/1.1.
    pub boot: OwnedFd,
    /// How long each stage took, in order.
    pub stages: Vec<(&'static str, Duration)>,
}

/// The outcome of [`Sandbox::dial`].
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = io::Result<SandboxStream>> + Send + 'a>>;

/// A sandbox that runs, or did until a moment ago.
pub trait Sandbox: Debug + Send + Sync {
    /// A descriptor that polls readable once no process of the sandbox runs any more.
    fn ended(&self) -> BorrowedFd<'_>;

    /// Connects to a TCP port inside, on whichever of the sandbox's own addresses a server listens there, localhost
    /// included. Small writes to the stream leave at once. To be polled by a tokio runtime.
    ///
    /// Fails when nothing listens, or the sandbox is gone.
    fn dial(&self, port: u16) -> DialFuture<'_>;

    /// A connection to the agent's control channel, after making sure that the agent is who listens: a connected,
    /// non-blocking stream socket.
    ///
    /// # Errors
    /// When the agent does not listen, or somebody else does.
    fn control(&self) -> io::Result<OwnedFd>;

    /// Gives the sandbox a new spawner in place of the one it has, which is killed if it is there still: it was given
    /// up because it does not answer. Blocks for milliseconds, or seconds when root of the sandbox is in the way.
    ///
    /// # Errors
    /// With the step that failed.
    fn respawn(&self) -> io::Result<()>;

    /// What the sandbox uses at this moment. Takes tens of microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`io::ErrorKind::Unsupported`] where the host does not count.
    fn usage(&self) -> io::Result<Usage>;

    /// How many processes of the workload the kernel has killed so far because the sandbox had used up its memory.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn memory_kills(&self) -> io::Result<u64>;

    /// The state of the sandbox's disk. Takes some microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn disk(&self) -> io::Result<Disk>;

    /// Lets the sandbox's disk, as it was read before, grow by no more than `allowance` bytes, or as far as it goes when
    /// none is given. Beyond that the sandbox is told that there is no space left.
    ///
    /// # Errors
    /// When the sandbox is gone or without [`Capabilities::disk_limits`]; with [`io::ErrorKind::WouldBlock`] when it is
    /// too early to try again.
    fn allow_disk(&self, disk: &Disk, allowance: Option<u64>) -> io::Result<()>;

    /// Memory of the host that the sandbox holds and nothing charges and nothing else bounds. What cannot hold more than
    /// `enough` need not be looked at closely: that takes milliseconds, the rest some 100 µs.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn uncharged_bytes(&self, enough: u64) -> io::Result<u64>;

    /// Kills every process of the sandbox and does not wait: [`Sandbox::ended`] tells when none is left. That takes
    /// milliseconds, or for ever where the kernel waits for something on behalf of one of them.
    fn kill(&self);
}
