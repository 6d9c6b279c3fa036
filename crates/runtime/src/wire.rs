//! What the driver and its launcher say to each other: one JSON message per packet, with descriptors beside.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use model::resources::Resources;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::Tree;
use crate::rootfs::{OVERLAYS_MAX, Rootfs};

/// First message to a launcher.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) data_dir: PathBuf,
    pub(crate) tree: Tree,
    /// First id on the host of slot 0.
    pub(crate) first_id: u32,
    /// Whether disks are taken from the host as a whole.
    pub(crate) reserve_disks: bool,
    pub(crate) work: Work,
}

/// What a launcher is for. What sandboxes can hold up has one of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// [`Request::Start`], one after the other.
    Sandboxes,
    /// [`Request::Respawn`], side by side.
    Spawners,
}

/// What a launcher is asked to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Answered with [`Reply::Started`] and the descriptors pidfd, network namespace, boot connection.
    Start {
        name: String,
        rootfs: Rootfs,
        resources: Resources,
    },
    /// Gives a sandbox a new spawner. With the message come the pidfd of its agent and a socket, on which it is answered
    /// with [`Reply::Done`]; closing the other end of that ends the attempt.
    Respawn { name: String },
}

/// What a launcher answers.
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
    /// Nothing is left of the attempt but its groups and its image, which the driver removes.
    Failed(String),
}

/// Longest message, in bytes.
const MESSAGE_MAX: usize = 16 * 1024;
/// Most descriptors beside one message: the overlays of a sandbox and its figures, which are two.
const FDS_MAX: usize = OVERLAYS_MAX + 2;

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
    let mut bytes = vec![0; MESSAGE_MAX];
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

/// [`send`] of a message.
pub(crate) fn send_message(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket.as_fd(), &serde_json::to_vec(message)?, fds)
}

/// [`receive`] of a message.
pub(crate) fn receive_message<T: for<'de> Deserialize<'de>>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((bytes, fds)) = receive(socket.as_fd())? else {
        return Ok(None);
    };
    Ok(Some((serde_json::from_slice(&bytes)?, fds)))
}
