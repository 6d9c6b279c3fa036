//! The protocol between the driver and its launchers: one JSON message per packet, with descriptors attached.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use model::id::{DiskId, LayerId};
use model::resources::Resources;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::Tree;
use crate::checkpoint::program::Program;
use crate::rootfs::{OVERLAYS_MAX, Rootfs, Source};
use crate::settings::DriverSettings;

/// What a disk reads in a second, at least, while other sandboxes use it, in bytes.
const SLOWEST_DISK: u64 = 16 << 20;

/// First message to a launcher.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) settings: DriverSettings,
    pub(crate) tree: Tree,
    pub(crate) work: Work,
}

/// Task of a launcher. Requests that a sandbox can delay have a launcher of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// [`Request::Start`] of sandboxes that are not restored, one after the other.
    Sandboxes,
    /// [`Request::Start`] of sandboxes that are restored, one after the other.
    Restores,
    /// [`Request::Respawn`], in parallel.
    Spawners,
    /// One [`Request::Commit`].
    Commit,
    /// One [`Request::Rebase`].
    Rebase,
    /// One [`Request::Dump`].
    Dump,
    /// One [`Request::FindFacts`].
    Facts,
    /// One [`Request::Pack`] or [`Request::Unpack`].
    Archive,
}

/// Argument of a launcher that executes a copy of its program in memory first.
pub(crate) const COPIED: &str = "copied";

impl Work {
    /// The argument of a launcher with this task, if it has one. Those that clone the agents of new sandboxes execute a copy.
    pub(crate) fn argument(self) -> Option<&'static str> {
        (self == Self::Sandboxes).then_some(COPIED)
    }
}

/// Request to a launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Answered with [`Reply::Started`] and the descriptors pidfd, network namespace, boot connection. Attached are the
    /// entries of the registry for its ids.
    Start {
        name: String,
        /// First id on the host of the sandbox.
        base_id: u32,
        rootfs: Rootfs,
        resources: Resources,
        /// Whether its disk exists. Otherwise it is created.
        on_kept_disk: bool,
        /// The checkpoint, if they are restored. Its disk exists then, and instead of the boot
        /// connection the kernel's side of the `/proc` files is attached, if there are any.
        processes: Option<Checkpoint>,
    },
    /// Gives a sandbox a new spawner. Attached are the pidfd of its agent and a socket, on which [`Reply::Done`] is
    /// sent; closing its other end aborts the attempt.
    Respawn { name: String },
    /// Copies uppers of a disk, which no sandbox has any more, to a directory that does not exist yet. Answered with
    /// [`Reply::Committed`], [`Reply::Refused`] or [`Reply::Full`].
    Commit(Commit),
    /// Prepares a disk, which no sandbox has, for layers that replaced those below it. Answered with [`Reply::Done`].
    Rebase { disk: DiskId },
    /// Stops the workload of a sandbox, of which a checkpoint is to be written. Attached is the pidfd of its agent. Answered
    /// with [`Reply::Stopped`].
    Dump(Dump),
    /// Has CRIU probe the kernel, and writes the result to a file. Answered with [`Reply::Done`].
    FindFacts { program: Program, file: PathBuf },
    /// Writes the checkpoint. Answered with [`Reply::Done`], or with [`Reply::Refused`] when the sandbox goes on.
    Write,
    /// Lets the sandbox go on, of which a checkpoint was written.
    GiveUp,
    /// Ends the processes of which a checkpoint was written.
    EndDumped,
    /// Lets a sandbox go on that was copied. Answered with [`Reply::Done`] once it has.
    LetGoOn,
    /// Writes a stored layer as an archive to the attached descriptor. Answered with [`Reply::Done`] or
    /// [`Reply::Refused`].
    Pack { layer: LayerId },
    /// Makes a layer of an archive, read from the attached descriptor, in a directory that does not exist yet. Answered
    /// like [`Request::Commit`].
    Unpack(Unpack),
}

impl Request {
    /// The request with descriptors.
    pub(crate) fn with<'a>(&'a self, fds: &'a [BorrowedFd<'a>]) -> Message<'a> {
        Message { request: self, fds }
    }

    /// The request alone.
    pub(crate) fn alone(&self) -> Message<'_> {
        self.with(&[])
    }

    /// Whether processes are restored.
    pub(crate) fn restores(&self) -> bool {
        matches!(self, Self::Start { processes: Some(_), .. })
    }

    /// Time that it may take beyond what requests may take otherwise.
    pub(crate) fn extra_time(&self) -> Duration {
        match self {
            Self::Start {
                processes: Some(checkpoint),
                ..
            } => checkpoint.time_to_read(),
            _ => Duration::ZERO,
        }
    }
}

/// A request, and the descriptors that are attached to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) request: &'a Request,
    pub(crate) fds: &'a [BorrowedFd<'a>],
}

/// The layer to make of a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Commit {
    pub(crate) disk: DiskId,
    pub(crate) sources: Vec<Source>,
    /// Name of the directory, among the layers.
    pub(crate) unfinished: String,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub(crate) keep_free_bytes: u64,
    /// Whether names are left out that were made for a copy of processes.
    pub(crate) has_processes: bool,
}

/// The layer to make of an archive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Unpack {
    pub(crate) layer: LayerId,
    /// Name of the directory, among the layers.
    pub(crate) unfinished: String,
    /// Maximum size of the layer, in bytes.
    pub(crate) bytes: u64,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub(crate) keep_free_bytes: u64,
}

/// The checkpoint to restore.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// CRIU.
    pub(crate) program: Program,
    /// The directory of the checkpoint.
    pub(crate) directory: PathBuf,
    /// Size of the checkpoint, in bytes.
    pub(crate) bytes: u64,
    /// Whether the content of its pages was not compared with their checksums yet.
    pub(crate) pages_remain: bool,
}

impl Checkpoint {
    /// How long a restore may take beyond what a start may take: the time to read the checkpoint from a slow disk.
    pub(crate) fn time_to_read(&self) -> Duration {
        Duration::from_secs(self.bytes / SLOWEST_DISK)
    }
}

/// The checkpoint to write: of which sandbox, and where.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Dump {
    /// CRIU.
    pub(crate) program: Program,
    /// Name of the sandbox's groups.
    pub(crate) name: String,
    /// Pid of the agent on the host.
    pub(crate) pid: i32,
    /// Hash of the agent's program, which is kept.
    pub(crate) program_of_agent: String,
    /// First id of the sandbox's range.
    pub(crate) base_id: u32,
    /// The directory that is made for the checkpoint. The platform renames it when it is complete.
    pub(crate) checkpoint: PathBuf,
    /// What CRIU knows about the kernel, if the file exists.
    pub(crate) facts: PathBuf,
    /// Whether the sandbox goes on once the checkpoint is complete, and keeps its connections.
    pub(crate) goes_on: bool,
    /// Whether the sandbox stands still, and stays so if no checkpoint is made of it.
    pub(crate) stays: bool,
    /// Maximum size of a file that no name leads to any more and that goes into the checkpoint, in bytes.
    pub(crate) deleted_files: u64,
}

/// Reply of a launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The launcher is ready.
    Ready,
    /// The agent runs; microseconds of each stage.
    Started {
        pid: i32,
        stages: Vec<(String, u64)>,
    },
    Done,
    /// The workload is stopped.
    Stopped,
    /// The directory is complete, and written out.
    Committed {
        layer: LayerId,
        bytes: u64,
    },
    /// The files cannot be a layer.
    Refused(String),
    /// The pages of the checkpoint are damaged, as was found while they were restored. Nothing of it has run; what is left is the
    /// same as when it had failed.
    Damaged(String),
    /// There is no space for the layer.
    Full(String),
    /// All that is left of the attempt are its groups and its checkpoint, which the driver removes.
    Failed(String),
}

/// Maximum message size, in bytes.
const MESSAGE_MAX: usize = 16 * 1024;
/// Maximum number of descriptors attached to one message: the overlays of a sandbox, its fixtures, and the two of its
/// `/proc` files.
const FDS_MAX: usize = OVERLAYS_MAX + 3;

/// Sends one packet with descriptors.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one packet; `None` when the peer is gone.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    // Not the largest message: the pages for that would be copied or cleared in every process that a launcher clones.
    let length = loop {
        match rustix::net::recv(socket, &mut [0; 1][..], RecvFlags::PEEK | RecvFlags::TRUNC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) | Ok((_, 0)) => return Ok(None),
            other => break other?.1,
        }
    };
    let mut bytes = vec![0; length.min(MESSAGE_MAX)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some((bytes, fds)))
}

/// Encodes and sends a message.
pub(crate) fn send_message(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket.as_fd(), &serde_json::to_vec(message)?, fds)
}

/// Receives and decodes a message.
pub(crate) fn receive_message<T: for<'de> Deserialize<'de>>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((bytes, fds)) = receive(socket.as_fd())? else {
        return Ok(None);
    };
    Ok(Some((serde_json::from_slice(&bytes)?, fds)))
}
