//! The spawner: a small process in the workload's cgroup that makes the workload's processes.
//!
//! A process is born in the cgroup of its maker, so what starts one for the workload has to be in there. The agent
//! does not: it must survive what the workload's limits do to the workload. The spawner is single-threaded, does one
//! request at a time and keeps nothing between them; when the kernel kills it for memory, the host starts another.
//!
//! The socket carries one packet per request and one per answer. A request's text (arguments and environment may be
//! megabytes) is in a memory file that the packet carries beside the three descriptors of stdin, stdout and stderr.

pub(crate) mod request;
mod sys;

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use protocol::agent::SPAWNER_FD;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};

use crate::sys::{ChildStack, CloneError, IGNORED, Stage, adopt_fd, ignore_signals, keep_heap_small};
use request::{Outcome, Request};

/// The signals that it ignores, a bit for each number.
#[cfg(target_arch = "x86_64")]
const IGNORED_BITS: u32 = {
    let (mut bits, mut index) = (0, 0);
    while index < IGNORED.len() {
        bits |= 1 << IGNORED[index];
        index += 1;
    }
    bits
};

/// Runs the spawner until the agent closes the socket, which is [`SPAWNER_FD`].
///
/// In the binary of the platform this begins with the first request: until then the spawner waits in `sys`, which has done
/// the first steps already.
///
/// The host made that connection, before this process was in the sandbox: the agent takes none from inside. Its parent
/// is pid 1, and so is that of all it starts.
pub fn run() -> ExitCode {
    keep_heap_small();
    ignore_signals();
    // Root inside the sandbox may not trace us and so neither borrow our descriptors.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    // The host starts us with another real user id, so that we are not dumpable from the first moment on.
    let root = rustix::process::Uid::ROOT;
    let _ = rustix::thread::set_thread_res_uid(root, root, root);
    match adopt_fd(SPAWNER_FD).and_then(|socket| serve(&socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    let mut stack = ChildStack::new();
    while let Some(descriptors) = receive(socket)? {
        let outcome = match spawn(descriptors, &mut stack) {
            Ok(outcome) => outcome,
            Err(error) => Outcome::failed(request::Failure::Process, &error),
        };
        let answer = outcome.to_bytes();
        rustix::net::send(socket, &answer, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// The descriptors of the next request; `None` once the agent is gone.
fn receive(socket: &OwnedFd) -> io::Result<Option<Vec<OwnedFd>>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(request::DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        // Not by waiting in recvmsg: a signal that kills us there still takes a request that arrived after it out of the
        // queue. What is in the queue at our end, the agent knows to be undone.
        let mut readable = [PollFd::new(socket, PollFlags::IN)];
        match rustix::event::poll(&mut readable, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            other => break other?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::with_capacity(request::DESCRIPTORS);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // Out of descriptors here: the request is answered as failed, without its parts.
        descriptors.clear();
    }
    Ok(Some(descriptors))
}

fn spawn(descriptors: Vec<OwnedFd>, stack: &mut ChildStack) -> io::Result<Outcome> {
    let [text, stdin, stdout, stderr] =
        <[OwnedFd; request::DESCRIPTORS]>::try_from(descriptors).map_err(|_| io::Error::from(Errno::MFILE))?;
    let mut bytes = Vec::new();
    std::fs::File::from(text).read_to_end(&mut bytes)?;
    let request = Request::from_bytes(&bytes).ok_or_else(|| io::Error::from(Errno::INVAL))?;
    drop(bytes);
    let child = request.into_child([above_stdio(stdin)?, above_stdio(stdout)?, above_stdio(stderr)?])?;
    Ok(match child.clone_into_parent(stack) {
        Ok(pid) => Outcome::started(pid),
        Err(CloneError::Clone(error)) => Outcome::failed(request::Failure::Process, &error),
        Err(CloneError::Setup(Stage::Terminal, error)) => Outcome::failed(request::Failure::Terminal, &error),
        Err(CloneError::Setup(Stage::User, error)) => Outcome::failed(request::Failure::User, &error),
        Err(CloneError::Setup(Stage::Directory, error)) => Outcome::failed(request::Failure::Directory, &error),
    })
}

/// Duplicates a descriptor to a number above 2, so that placing stdin, stdout and stderr one by one overwrites no
/// source.
fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    if fd.as_raw_fd() > 2 {
        return Ok(fd);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
}

/// Sends a request with its descriptors; the agent's half of [`receive`].
///
/// # Errors
/// Those of the memory file and of sendmsg.
pub(crate) fn send(socket: impl AsFd, request: &Request, stdio: [&OwnedFd; 3]) -> rustix::io::Result<()> {
    let text = rustix::fs::memfd_create("spawn", rustix::fs::MemfdFlags::CLOEXEC)?;
    let bytes = request.to_bytes();
    let mut written = 0;
    while written < bytes.len() {
        written += rustix::io::pwrite(&text, &bytes[written..], written as u64)?;
    }
    let descriptors = [text.as_fd(), stdio[0].as_fd(), stdio[1].as_fd(), stdio[2].as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(request::DESCRIPTORS))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    control.push(rustix::net::SendAncillaryMessage::ScmRights(&descriptors));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&[0])], &mut control, flags)?;
    Ok(())
}
