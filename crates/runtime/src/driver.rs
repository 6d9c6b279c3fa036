//! The interface between a node and the isolation of its sandboxes.
//!
//! Nothing above it may assume that the host sees a sandbox's processes or files: a sandbox is started from a request,
//! and then it can be dialed, measured, given a new spawner, watched for its end and killed, and nothing else. How
//! sandboxes are isolated (namespaces, id ranges, control groups, loop devices) is internal to the driver. What a
//! driver cannot do is declared in its [`Capabilities`].

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::resources::Resources;
use protocol::node::{Committed, LayerInfo, MemoryInfo, SandboxStream};

use crate::cancel::Cancel;
use crate::egress::EgressSockets;
use crate::growth::Disk;
use crate::page_out::PagedOut;
use crate::rootfs::Rootfs;
use crate::sockets::Uncharged;
use crate::usage::{Capacity, HostPulse, HostUncharged, Usage};

/// One way to isolate sandboxes.
pub trait Driver: Debug + Send + Sync {
    /// What the driver can do on this host. Constant while it is open.
    fn capabilities(&self) -> Capabilities;

    /// Starts a sandbox and returns once its agent was executed. Blocks for milliseconds.
    ///
    /// # Errors
    /// [`StartError`] says what has to be cleaned up.
    fn start(&self, request: &StartRequest) -> Result<Started, StartError>;

    /// Every sandbox of this data directory of which something exists, running or not.
    ///
    /// # Errors
    /// When the host cannot be searched.
    fn find(&self) -> io::Result<Vec<Found>>;

    /// Removes what a sandbox that has ended left, except its disk. `false` when processes are still running in it:
    /// they were killed, try again. Until it returns `true`, no other sandbox can have this id.
    fn clean(&self, id: &SandboxId) -> bool;

    /// Removes a disk, if it exists. A running sandbox keeps its disk until it ends.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn remove_disk(&self, disk: &DiskId) -> io::Result<()>;

    /// Removes every disk that is neither in `keep` nor the memory of a snapshot, with what is kept beside it.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    fn sweep_disks(&self, keep: &[DiskId]) -> io::Result<()>;

    /// Notes that the disk of a sandbox is kept when its processes end, in a way that survives a restart of the host, until
    /// [`Driver::forget`]. May be repeated.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn keep(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()>;

    /// Waits until the kept disk of a sandbox that has ended is written out, so that it survives a power cut, and notes
    /// that. Returns the space that it takes on the host, in bytes. Blocks for as long as that takes, or until
    /// `is_cancelled`.
    ///
    /// # Errors
    /// When the disk stays in use, or cannot be written out.
    fn save(&self, id: &SandboxId, disk: &DiskId, is_cancelled: &dyn Fn() -> bool) -> io::Result<u64>;

    /// Every disk that is kept, of sandboxes with and without processes.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    fn kept(&self) -> io::Result<Vec<KeptDisk>>;

    /// Ends what [`Driver::keep`] began. The disk itself remains.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn forget(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()>;

    /// Whether there is a complete image of the processes of a sandbox beside its kept disk.
    fn has_image(&self, id: &SandboxId, disk: &DiskId) -> bool;

    /// Removes the image of the processes of a sandbox, if there is one. To be called before they continue: their disk is
    /// another one then.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn forget_image(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()>;

    /// Copies a copy of a sandbox ([`Sandbox::fork`]) from which nothing was started yet, for another one. The two share
    /// the image of the processes. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// With [`io::ErrorKind::StorageFull`] when the host has no space for it. [`Driver::forget`] and [`Driver::remove_disk`]
    /// remove what is left.
    fn copy_fork(&self, from: &Fork, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()>;

    /// The file system of a disk.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    fn rootfs_of(&self, disk: &DiskId) -> io::Result<Rootfs>;

    /// Makes a copy of a sandbox ([`Sandbox::fork`]) from which nothing was started yet the memory of a snapshot: from then on
    /// it belongs to no sandbox, survives a power cut, and stays until [`Driver::remove_memory`]. Returns the space that it
    /// takes, in bytes.
    ///
    /// # Errors
    /// When it cannot be written out. [`Driver::forget`] and [`Driver::remove_disk`] remove what is left.
    fn keep_memory(&self, build: &BuildId, copy: &Fork) -> io::Result<u64>;

    /// The memory of every snapshot.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    fn memories(&self) -> io::Result<Vec<MemoryInfo>>;

    /// Copies the memory of a snapshot for a sandbox, which is started from it as from a copy of another one
    /// ([`Sandbox::fork`]). The files of the image are shared, and only read.
    ///
    /// # Errors
    /// With [`StartError::Unrestorable`] when it is not there, is damaged, or does not fit the host; in any case
    /// [`Driver::forget`] and [`Driver::remove_disk`] remove what is left.
    fn copy_memory(&self, build: &BuildId, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<(), StartError>;

    /// Removes the memory of a snapshot, if there is one.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn remove_memory(&self, build: &BuildId) -> io::Result<()>;

    /// Stores what a sandbox that has ended wrote as a layer, or what is on a copy of a disk ([`Sandbox::copy_disk`]). The disk
    /// remains. Blocks for as long as it takes to copy, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`CommitError`] says whether the sandbox, the host or the platform is the reason. Nothing is left of the attempt.
    fn commit(&self, request: &CommitRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Committed, CommitError>;

    /// The stored layers, in the order of their ids.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    fn layers(&self) -> io::Result<Vec<LayerInfo>>;

    /// Removes a layer, if it exists. Sandboxes that were started from it keep it.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    fn remove_layer(&self, layer: &LayerId) -> io::Result<()>;

    /// Writes a layer as an archive to a pipe or file. Blocks until all is written, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`ArchiveError`] says why. What was written then is incomplete.
    fn pack_layer(&self, layer: &LayerId, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), ArchiveError>;

    /// Makes a layer of an archive, which is untrusted: nothing but the files of that layer can come of it. Returns the
    /// size of the layer. One that exists is kept. Blocks for as long as it takes to read, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`ArchiveError`] says why. Nothing is left of the attempt.
    fn unpack_layer(
        &self,
        request: &UnpackRequest,
        from: OwnedFd,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, ArchiveError>;

    /// Free capacity of the host.
    ///
    /// # Errors
    /// When the host cannot be queried.
    fn capacity(&self) -> io::Result<Capacity>;

    /// Free space on the file system of the data directory, in bytes. Takes a microsecond.
    ///
    /// # Errors
    /// When the host cannot be queried.
    fn disk_available(&self) -> io::Result<u64>;

    /// Memory that the kernel of the host takes for itself and that no sandbox is charged for. Takes about 100 µs.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Unsupported`] without [`Capabilities::uncharged_memory`].
    fn uncharged(&self) -> io::Result<HostUncharged>;

    /// What can be seen of the host in some microseconds.
    fn pulse(&self) -> HostPulse;

    /// How many processes and threads sandboxes have created together, of those that were asked for
    /// [`Sandbox::processes_created`]. Takes a microsecond.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Unsupported`] without [`Capabilities::process_counter`].
    fn processes_created(&self) -> io::Result<u64>;

    /// Reverts what the driver itself changed on the host. Called last, when no sandbox is left: nothing can be started
    /// afterwards.
    fn dismantle(&self);
}

/// Objects of the kernel that a sandbox has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Objects {
    /// Sockets of all kinds, also those that are not bound.
    pub sockets: u64,
    /// Open files of all processes of the workload; one that several have counts for each.
    pub files: u64,
}

impl Objects {
    /// All of them. A socket that is open counts twice.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sockets.saturating_add(self.files)
    }
}

/// What a driver can do on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Sandboxes that can be started in parallel; further requests have to wait.
    pub concurrent_starts: usize,
    /// Sandboxes that can be restored in parallel ([`StartRequest::restore`]), beside those that are started.
    pub concurrent_restores: usize,
    /// Memory, processes and processor time of a sandbox are limited to its [`Resources`].
    pub limits: bool,
    /// The size of a disk is a limit, and [`Sandbox::allow_disk`] can lower it while the sandbox runs.
    pub disk_limits: bool,
    /// Memory that no sandbox is charged for is measured, for the host and for each sandbox.
    pub uncharged_memory: bool,
    /// The processes that sandboxes create are counted ([`Sandbox::processes_created`]).
    pub process_counter: bool,
    /// The processes of a sandbox can be stopped where they are ([`Sandbox::freeze`]).
    pub freeze: bool,
    /// Images of processes can be written and restored.
    pub images: bool,
    /// Layers can be stored, and sandboxes started from them.
    pub layers: bool,
    /// A gateway can be given what sandboxes send to the outside ([`Sandbox::egress`]).
    pub egress: bool,
}

/// The sandbox to start.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// The sandbox.
    pub id: SandboxId,
    /// The disk that contains the uppers of its file system.
    pub disk: StartDisk,
    /// Its resource limits, including the size of a new disk.
    pub resources: Resources,
    /// Whether its processes are restored from their image ([`Sandbox::write_processes`]), on a kept disk. They stay frozen
    /// but for the agent until [`Sandbox::thaw`]; a spawner has to be made afterwards. The image remains.
    pub restore: bool,
}

/// The disk of a sandbox to start.
#[derive(Debug, Clone)]
pub enum StartDisk {
    /// It is created, and must not exist.
    New {
        /// The disk.
        disk: DiskId,
        /// The file system of the sandbox.
        rootfs: Rootfs,
    },
    /// A kept one ([`Driver::keep`]), on which the file system is the one that it was created for, as it was left. After an
    /// error it is as before.
    Kept(DiskId),
}

impl StartDisk {
    /// The disk.
    #[must_use]
    pub fn id(&self) -> &DiskId {
        match self {
            Self::New { disk, .. } | Self::Kept(disk) => disk,
        }
    }
}

/// A disk that outlives the processes of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptDisk {
    /// The sandbox.
    pub id: SandboxId,
    /// The disk.
    pub disk: DiskId,
    /// Whether it is complete and nothing has used it since: [`Driver::save`] was the last that was done with it.
    pub is_saved: bool,
}

/// The sandbox of which a layer is made.
#[derive(Debug, Clone)]
pub struct CommitRequest {
    /// Its disk.
    pub disk: DiskId,
    /// Whether the layer contains the layers below as well.
    pub merge: bool,
    /// Whether the disk was copied together with processes: then it has names that were made only for the copy
    /// (`link_remap.` and a number), of files that had none any more, and the layer has not.
    pub has_processes: bool,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// The disk of a sandbox to copy.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// The copy, which must not exist.
    pub to: DiskId,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// A copy of a sandbox.
#[derive(Debug, Clone)]
pub struct Fork {
    /// The sandbox that is to be started from it.
    pub id: SandboxId,
    /// Its disk, which must not exist.
    pub disk: DiskId,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// Why a sandbox did not become a layer, or its disk was not copied.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// A file cannot be stored. The text is for the user; names in it are escaped.
    #[error("{0}")]
    Refused(String),
    /// The host has no space for the layer.
    #[error("{0}")]
    Full(String),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// A layer to make of an archive.
#[derive(Debug, Clone)]
pub struct UnpackRequest {
    /// Its id, which its files must have as their hash.
    pub layer: LayerId,
    /// Maximum size of the layer, in bytes, where each file counts 4 KiB more than its data.
    pub bytes: u64,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// Why a layer did not become an archive, or an archive not a layer.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The layer is not stored.
    #[error("layer {0} is not stored")]
    NoLayer(LayerId),
    /// The archive is not one of the layer, or the layer cannot be one. Names of files in the text are escaped.
    #[error("{0}")]
    Refused(String),
    /// The host has no space for the layer.
    #[error("{0}")]
    Full(String),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Error of a start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// All slots of this host are in use. Nothing was started.
    #[error("every slot of this host is in use")]
    Full,
    /// A sandbox with this id exists, or remains of one do. Nothing was started.
    #[error("sandbox {0} exists already")]
    Exists(SandboxId),
    /// A layer of its file system is not stored. Nothing was started.
    #[error("layer {0} is not stored")]
    NoLayer(LayerId),
    /// The image of its processes cannot be restored, for a reason that is for the client. Nothing was started.
    #[error("{0}")]
    Unrestorable(String),
    /// A step failed. Nothing is running any more; [`Driver::clean`] has to be called, and for a new disk
    /// [`Driver::remove_disk`].
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// A sandbox that an earlier platform started.
#[derive(Debug)]
pub struct Found {
    /// Its id.
    pub id: SandboxId,
    /// Its disk.
    pub disk: DiskId,
    /// The sandbox, if its agent is running.
    pub alive: Option<Arc<dyn Sandbox>>,
}

/// A sandbox that was just started.
#[derive(Debug)]
pub struct Started {
    /// The sandbox.
    pub sandbox: Arc<dyn Sandbox>,
    /// The agent's control connection: a connected stream socket on which it serves HTTP/1.1.
    pub boot: OwnedFd,
    /// How long each stage took, in order.
    pub stages: Vec<(&'static str, Duration)>,
}

/// Why the processes of a sandbox were not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Something in the sandbox cannot be written.
    #[error("{0}")]
    Refused(String),
    /// A process ended just when it was about to be written. The next attempt may succeed.
    #[error("{0}")]
    Passing(String),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Future of [`Sandbox::dial`].
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = io::Result<SandboxStream>> + Send + 'a>>;

/// A running or recently ended sandbox.
pub trait Sandbox: Debug + Send + Sync {
    /// A descriptor that becomes readable once no process of the sandbox is left.
    fn ended(&self) -> BorrowedFd<'_>;

    /// Connects to a TCP port inside, on any of the sandbox's own addresses where a server listens, localhost included.
    /// Small writes to the stream are sent immediately. Must be polled by a tokio runtime.
    ///
    /// Fails when nothing listens, or the sandbox has ended.
    fn dial(&self, port: u16) -> DialFuture<'_>;

    /// Connects to the agent's control channel, after verifying that the agent is the listener. Returns a connected,
    /// non-blocking stream socket.
    ///
    /// # Errors
    /// When the agent does not listen, or another process does.
    fn control(&self) -> io::Result<OwnedFd>;

    /// Gives the sandbox a new spawner and kills the old one if it still exists: it was replaced because it does not
    /// respond. Blocks for milliseconds, or seconds when root of the sandbox interferes.
    ///
    /// # Errors
    /// With the step that failed.
    fn respawn(&self) -> io::Result<()>;

    /// Ends the preference on the processors that a sandbox has while it is started. To be called once its agent has
    /// responded, before any program is started in it, and for a sandbox of an earlier platform.
    ///
    /// # Errors
    /// When its limits cannot be changed.
    fn settle(&self) -> io::Result<()>;

    /// Current resource usage. Takes tens of microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox has ended, and with [`io::ErrorKind::Unsupported`] where the host has no counters.
    fn usage(&self) -> io::Result<Usage>;

    /// Processor time of the workload since its start, on all cores together. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn work_time(&self) -> io::Result<Duration>;

    /// How many processes and threads the workload has now. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn processes(&self) -> io::Result<u64>;

    /// How many processes and threads the workload has created since this was called first. Takes a microsecond.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`io::ErrorKind::Unsupported`] without [`Capabilities::process_counter`].
    fn processes_created(&self) -> io::Result<u64>;

    /// Limits the processor time of the workload to this many thousandths of a core, or with `None` to what its
    /// resources allow. Lasts until it is changed, also when the platform ends.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`io::ErrorKind::Unsupported`] without [`Capabilities::limits`].
    fn limit_cpu(&self, milli_cores: Option<u32>) -> io::Result<()>;

    /// How many processes of the workload the kernel has killed so far because the sandbox ran out of memory.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn memory_kills(&self) -> io::Result<u64>;

    /// Writes out the sandbox's disk, so that what its programs have written survives a power cut. Blocks for as long as
    /// that takes.
    ///
    /// # Errors
    /// When the sandbox is gone, or the host cannot store what it has written.
    fn sync(&self) -> io::Result<()>;

    /// The state of the sandbox's disk. Takes some microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn disk(&self) -> io::Result<Disk>;

    /// Limits the growth of the sandbox's disk, as it was read before, to `allowance` bytes, or removes the limit with
    /// `None`. Beyond it writes in the sandbox fail for lack of space.
    ///
    /// # Errors
    /// When the sandbox is gone or without [`Capabilities::disk_limits`]; with [`io::ErrorKind::WouldBlock`] when it is
    /// too early to try again.
    fn allow_disk(&self, disk: &Disk, allowance: Option<u64>) -> io::Result<()>;

    /// Memory of the host that the sandbox holds and that is neither charged nor limited. A sandbox that cannot hold
    /// more than `enough` is not measured closely: that takes milliseconds, the rest about 100 µs.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn uncharged(&self, enough: u64) -> io::Result<Uncharged>;

    /// Counts objects of the kernel that the sandbox has. Takes some microseconds for each of its processes.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn objects(&self) -> io::Result<Objects>;

    /// Opens sockets to which everything is delivered that the sandbox sends to other addresses than its own. Without
    /// them it reaches nothing. To be called once at a time.
    ///
    /// # Errors
    /// When the sandbox has ended, and with [`io::ErrorKind::Unsupported`] without [`Capabilities::egress`].
    fn egress(&self) -> io::Result<EgressSockets>;

    /// Stops every process of the sandbox where it is, its agent included, until [`Sandbox::thaw`] or its end. Waits
    /// until they are stopped, for a second at most: a process that the kernel blocks uses no processor time either.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`io::ErrorKind::Unsupported`] without [`Capabilities::freeze`].
    fn freeze(&self) -> io::Result<()>;

    /// The same, for processes that are about to be written ([`Sandbox::write_processes`]): none is in the middle of `vfork`,
    /// if it leaves that in time.
    ///
    /// # Errors
    /// As [`Sandbox::freeze`].
    fn freeze_to_write(&self) -> io::Result<()>;

    /// Whether [`Sandbox::freeze`] was the last of the two, by this platform or an earlier one. What the kernel does is the
    /// record of it.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn is_frozen(&self) -> io::Result<bool>;

    /// Writes an image of the processes of a sandbox, whose disk is kept ([`Driver::keep`]). All processes are at rest
    /// meanwhile, and connections to the agent are closed. `stopped` is called when the workload is. When the image is
    /// complete and written out, `complete` is called, which writes out the disk; then the processes are ended, by this or by
    /// the caller. When something fails, `complete` included, they go on, but for the spawner, which has to be made anew.
    /// Blocks for as long as it takes. Once `cancel` is requested, the processes go on within milliseconds, unless `complete`
    /// was called before. Processes that were stopped before ([`Sandbox::freeze_to_write`]) stay so instead of going on.
    ///
    /// # Errors
    /// [`WriteError`] says whether the sandbox is the reason.
    fn write_processes(
        &self,
        stopped: &mut dyn FnMut(),
        complete: &mut dyn FnMut() -> io::Result<()>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), WriteError>;

    /// Copies a running sandbox, with its processes and its disk, as it is at one moment. Every process is stopped meanwhile
    /// and continues before this returns, also after an error; then the spawner has to be made anew. Connections to the
    /// agent's port and to the outside stay as they are. From the copy another sandbox is started, as on a kept disk with
    /// an image ([`StartRequest::restore`]); until then it belongs to none, and does not survive the platform. Returns how
    /// long the processes were stopped. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`WriteError`] says whether the sandbox is the reason; with [`io::ErrorKind::StorageFull`] when the host has no space
    /// for the copy. [`Driver::forget`] and [`Driver::remove_disk`] remove what is left.
    fn fork(&self, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteError>;

    /// Copies the sandbox's disk to a new one, as it is at one moment: every process is stopped meanwhile, and continues
    /// before this returns, also after an error. The copy belongs to no sandbox. [`Driver::commit`] makes a layer of it,
    /// [`Driver::remove_disk`] removes it, and so does [`Driver::sweep_disks`]. Returns how long the processes were
    /// stopped. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`CommitError`] says whether the host is the reason, and there is no copy. With [`io::ErrorKind::Unsupported`] without
    /// [`Capabilities::freeze`].
    fn copy_disk(&self, request: &CopyRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, CommitError>;

    /// Has the agent accept connections again, after a platform has ended while it wrote an image. Otherwise nothing changes.
    ///
    /// # Errors
    /// When the agent does not respond.
    fn wake(&self) -> io::Result<()>;

    /// Moves the memory of a frozen sandbox to the host's swap, until `goes_on` is false. `None` when the host has no swap.
    /// Blocks for as long as it takes, some tenths of a second for 200 MB.
    ///
    /// # Errors
    /// When the kernel does not allow it, or the sandbox is gone.
    fn page_out(&self, goes_on: &dyn Fn() -> bool) -> io::Result<Option<PagedOut>>;

    /// Lets the processes of a frozen sandbox continue. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::freeze`].
    fn thaw(&self) -> io::Result<()>;

    /// Kills every process of the sandbox, frozen or not, and does not wait: [`Sandbox::ended`] signals the end. That takes
    /// milliseconds, or never happens where the kernel blocks one of the processes.
    fn kill(&self);
}
