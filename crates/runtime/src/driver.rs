//! The interface between a node and the isolation of its sandboxes.
//!
//! Nothing above it may assume that the host sees a sandbox's processes or files: a sandbox is started from a request,
//! and then it can be dialed, given a new spawner, watched for its end and killed. All else an isolation may lack: its
//! [`Capabilities`] say what it has, and the traits answer [`Unsupported`] for the rest. How sandboxes are isolated
//! (namespaces, id ranges, control groups, loop devices) is internal to the driver. What is the same for any isolation,
//! disks and layers above all, is no part of this interface but of the [`Storage`] that a driver is opened on.

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::{DiskId, LayerId, SandboxId};
use model::resources::Resources;
use protocol::node::SandboxStream;

use crate::cancel::Cancel;
use crate::egress::EgressSockets;
use crate::growth::Disk;
use crate::page_out::PagedOut;
use crate::rootfs::Rootfs;
use crate::sockets::Uncharged;
use crate::storage::Storage;
use crate::stored::{CopyRequest, Fork, LayerError};
use crate::usage::{self, Capacity, HostPulse, HostUncharged, Usage};

/// The answer of an isolation that lacks something. As an [`io::Error`] it is of the kind [`io::ErrorKind::Unsupported`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sandboxes with this isolation {0}")]
pub struct Unsupported(pub &'static str);

impl From<Unsupported> for io::Error {
    fn from(lacking: Unsupported) -> Self {
        Self::new(io::ErrorKind::Unsupported, lacking)
    }
}

/// One way to isolate sandboxes. The methods without a body are what a new one has to implement first.
pub trait Driver: Debug + Send + Sync {
    /// What the driver can do on this host. Constant while it is open.
    fn capabilities(&self) -> Capabilities;

    /// The storage with the disks of its sandboxes.
    fn storage(&self) -> &Storage;

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

    /// Reverts what the driver itself changed on the host. Called last, when no sandbox is left: nothing can be started
    /// afterwards.
    fn dismantle(&self);

    /// Why a complete checkpoint ([`Sandbox::fork`]) cannot be restored here, as a text for the client; none if
    /// it can be.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    fn obstacle(&self, checkpoint: &Path) -> io::Result<Option<String>> {
        let _ = checkpoint;
        Ok(Some(Unsupported("cannot be restored with their processes").to_string()))
    }

    /// Free capacity of the host.
    ///
    /// # Errors
    /// When the host cannot be queried.
    fn capacity(&self) -> io::Result<Capacity> {
        self.storage().capacity()
    }

    /// Memory that the kernel of the host takes for itself and that no sandbox is charged for. Takes about 100 µs.
    ///
    /// # Errors
    /// With [`Unsupported`] without [`Capabilities::uncharged_memory`].
    fn uncharged(&self) -> io::Result<HostUncharged> {
        Err(Unsupported("are charged for all memory, or for none").into())
    }

    /// What can be seen of the host in some microseconds.
    fn pulse(&self) -> HostPulse {
        usage::pulse()
    }

    /// How many processes and threads sandboxes have created together, of those that were asked for
    /// [`Sandbox::processes_created`]. Takes a microsecond.
    ///
    /// # Errors
    /// With [`Unsupported`] without [`Capabilities::process_counter`].
    fn processes_created(&self) -> io::Result<u64> {
        Err(Unsupported("do not count the processes that they create").into())
    }
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
    /// The number of all objects. A socket that is open counts twice.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sockets.saturating_add(self.files)
    }
}

/// What a driver can do on this host: by default start one sandbox at a time, and nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    /// Checkpoints can be written and restored.
    pub checkpoints: bool,
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
    /// Whether its processes are restored from their checkpoint ([`Sandbox::write_processes`]), on a kept disk. They stay frozen
    /// but for the agent until [`Sandbox::thaw`]; a spawner has to be made afterwards. The checkpoint remains.
    pub restore: bool,
}

/// The disk of a sandbox to start.
#[derive(Debug, Clone)]
pub enum StartDisk {
    /// The disk is created, and must not exist.
    New {
        /// The disk.
        disk: DiskId,
        /// The file system of the sandbox.
        rootfs: Rootfs,
    },
    /// A kept one ([`Storage::keep`]), on which the file system is the one that it was created for, as it was left. After an
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
    /// The checkpoint cannot be restored, for a reason that is for the client. Nothing was started.
    #[error("{0}")]
    Unrestorable(String),
    /// The checkpoint is damaged, as was found while it was restored, with what is, for the client. Nothing of it has run;
    /// [`Driver::clean`] has to be called.
    #[error("{0}")]
    Damaged(String),
    /// A step failed. Nothing is running any more; [`Driver::clean`] has to be called, and for a new disk
    /// [`Storage::remove_disk`].
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

/// The file systems of a sandbox, held beyond its last process.
#[derive(Debug)]
pub struct HeldMounts {
    /// Memory and disk space that there may be of the sandbox until they are unmounted, in bytes: no less than there is.
    pub bytes: u64,
    /// The descriptor that holds them.
    #[expect(dead_code, reason = "it is closed")]
    pub(crate) mounts: OwnedFd,
}

/// Future of [`Sandbox::dial`].
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = io::Result<SandboxStream>> + Send + 'a>>;

/// A running or recently ended sandbox. The methods without a body are what a new isolation has to implement first.
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
    fn settle(&self) -> io::Result<()> {
        Ok(())
    }

    /// Current resource usage. Takes tens of microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox has ended, and with [`Unsupported`] where the host has no counters.
    fn usage(&self) -> io::Result<Usage> {
        Err(Unsupported("are not measured").into())
    }

    /// Processor time of the workload since its start, on all cores together. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn work_time(&self) -> io::Result<Duration> {
        Err(Unsupported("are not measured").into())
    }

    /// How many processes and threads the workload has now. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn processes(&self) -> io::Result<u64> {
        Err(Unsupported("are not measured").into())
    }

    /// How many processes and threads the workload has created since this was called first. Takes a microsecond.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`Unsupported`] without [`Capabilities::process_counter`].
    fn processes_created(&self) -> io::Result<u64> {
        Err(Unsupported("do not count the processes that they create").into())
    }

    /// Limits the processor time of the workload to this many thousandths of a core, or with `None` to what its
    /// resources allow. Lasts until it is changed, also when the platform ends.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`Unsupported`] without [`Capabilities::limits`].
    fn limit_cpu(&self, milli_cores: Option<u32>) -> io::Result<()> {
        let _ = milli_cores;
        Err(Unsupported("have no limit of processor time that can be changed").into())
    }

    /// How many processes of the workload the kernel has killed so far because the sandbox ran out of memory.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn memory_kills(&self) -> io::Result<u64> {
        Err(Unsupported("are not measured").into())
    }

    /// Writes out the sandbox's disk, so that what its programs have written survives a power cut. Blocks for as long as
    /// that takes.
    ///
    /// # Errors
    /// When the sandbox is gone, or the host cannot store what it has written.
    fn sync(&self) -> io::Result<()> {
        Err(Unsupported("cannot write out their disks").into())
    }

    /// The state of the sandbox's disk. Takes some microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn disk(&self) -> io::Result<Disk> {
        Err(Unsupported("do not show the state of their disks").into())
    }

    /// Limits the growth of the sandbox's disk, as it was read before, to `allowance` bytes, or removes the limit with
    /// `None`. Beyond it writes in the sandbox fail for lack of space.
    ///
    /// # Errors
    /// When the sandbox is gone or without [`Capabilities::disk_limits`]; with [`io::ErrorKind::WouldBlock`] when it is
    /// too early to try again.
    fn allow_disk(&self, disk: &Disk, allowance: Option<u64>) -> io::Result<()> {
        let _ = (disk, allowance);
        Err(Unsupported("have no limit of the growth of their disks").into())
    }

    /// Memory of the host that the sandbox holds and that is neither charged nor limited. A sandbox that cannot hold
    /// more than `enough` is not measured closely: that takes milliseconds, the rest about 100 µs.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn uncharged(&self, enough: u64) -> io::Result<Uncharged> {
        let _ = enough;
        Err(Unsupported("are charged for all memory, or for none").into())
    }

    /// Counts objects of the kernel that the sandbox has. Takes some microseconds for each of its processes.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn objects(&self) -> io::Result<Objects> {
        Err(Unsupported("do not count objects of the kernel").into())
    }

    /// Opens sockets to which everything is delivered that the sandbox sends to other addresses than its own. Without
    /// them it reaches nothing. To be called once at a time.
    ///
    /// # Errors
    /// When the sandbox has ended, and with [`Unsupported`] without [`Capabilities::egress`].
    fn egress(&self) -> io::Result<EgressSockets> {
        Err(Unsupported("have no network").into())
    }

    /// Stops every process of the sandbox where it is, its agent included, until [`Sandbox::thaw`] or its end. Waits
    /// until they are stopped, for a second at most: a process that the kernel blocks uses no processor time either.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`Unsupported`] without [`Capabilities::freeze`].
    fn freeze(&self) -> io::Result<()> {
        Err(Unsupported("cannot be stopped where they are").into())
    }

    /// Stops every process as [`Sandbox::freeze`] does, for processes that are about to be written ([`Sandbox::write_processes`]): none is in the middle of `vfork`,
    /// if it leaves that in time.
    ///
    /// # Errors
    /// As [`Sandbox::freeze`].
    fn freeze_to_write(&self) -> io::Result<()> {
        self.freeze()
    }

    /// Whether [`Sandbox::freeze`] was the last of the two, by this platform or an earlier one. What the kernel does is the
    /// record of it.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn is_frozen(&self) -> io::Result<bool> {
        Ok(false)
    }

    /// Writes a checkpoint of a sandbox whose disk is kept ([`Storage::keep`]). All processes are at rest
    /// meanwhile, and connections to the agent are closed. `stopped` is called when the workload is. When the checkpoint is
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
    ) -> Result<(), WriteError> {
        let _ = (stopped, complete, cancel);
        Err(io::Error::from(Unsupported("cannot be written to disk with their processes")).into())
    }

    /// Copies a running sandbox, with its processes and its disk, as it is at one moment. Every process is stopped meanwhile
    /// and continues before this returns, also after an error; then the spawner has to be made anew. Connections to the
    /// agent's port and to the outside stay as they are. From the copy another sandbox is started, as on a kept disk with
    /// a checkpoint ([`StartRequest::restore`]); until then it belongs to none, and does not survive the platform. Returns how
    /// long the processes were stopped. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`WriteError`] says whether the sandbox is the reason; with [`io::ErrorKind::StorageFull`] when the host has no space
    /// for the copy. [`Storage::forget`] and [`Storage::remove_disk`] remove what is left.
    fn fork(&self, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteError> {
        let _ = (to, is_cancelled);
        Err(io::Error::from(Unsupported("cannot be copied with their processes")).into())
    }

    /// Copies the sandbox's disk to a new one, as it is at one moment: every process is stopped meanwhile, and continues
    /// before this returns, also after an error. The copy belongs to no sandbox. [`Storage::commit`] makes a layer of it,
    /// [`Storage::remove_disk`] removes it, and so does [`Storage::sweep_disks`]. Returns how long the processes were
    /// stopped. Blocks for as long as it takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`LayerError`] says whether the host is the reason, and there is no copy. With [`Unsupported`] without
    /// [`Capabilities::freeze`].
    fn copy_disk(&self, request: &CopyRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, LayerError> {
        let _ = (request, is_cancelled);
        Err(io::Error::from(Unsupported("cannot be copied while they run")).into())
    }

    /// Has the agent accept connections again, after a platform has ended while it wrote a checkpoint. Otherwise nothing changes.
    ///
    /// # Errors
    /// When the agent does not respond.
    fn wake(&self) -> io::Result<()> {
        Ok(())
    }

    /// Moves the memory of a frozen sandbox to the host's swap, until `goes_on` is false. `None` when the host has no swap.
    /// Blocks for as long as it takes, some tenths of a second for 200 MB.
    ///
    /// # Errors
    /// When the kernel does not allow it, or the sandbox is gone.
    fn page_out(&self, goes_on: &dyn Fn() -> bool) -> io::Result<Option<PagedOut>> {
        let _ = goes_on;
        Ok(None)
    }

    /// Lets the processes of a frozen sandbox continue. Takes some microseconds.
    ///
    /// # Errors
    /// As [`Sandbox::freeze`].
    fn thaw(&self) -> io::Result<()> {
        Err(Unsupported("cannot be stopped where they are").into())
    }

    /// Keeps the kernel from unmounting the file systems of the sandbox while its last process exits: [`Sandbox::ended`] then
    /// signals before that. They are unmounted when the result is dropped, which takes milliseconds, and with the platform. Takes tens
    /// of microseconds.
    ///
    /// # Errors
    /// When the sandbox has ended, and with [`Unsupported`] where there is nothing to hold.
    fn hold_mounts(&self) -> io::Result<HeldMounts> {
        Err(Unsupported("have no file systems that are unmounted with them").into())
    }

    /// Kills every process of the sandbox, frozen or not, and does not wait: [`Sandbox::ended`] signals the end. That takes
    /// milliseconds, or never happens where the kernel blocks one of the processes.
    fn kill(&self);
}
