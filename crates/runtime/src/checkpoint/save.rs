//! Bringing a sandbox to rest, so that it can be written, and letting it go on.

use std::fs;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use protocol::agent::quiet;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

use super::threads;
use crate::cgroup::Tree;
use crate::driver::WriteError;
use crate::netns::SocketMaker;
use crate::process::has_ended;
use crate::slot::Name;
use crate::spawners;

/// How long an agent may take to answer. It takes a millisecond, and a little longer than its own time limit when it fails.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const QUEUE_PAUSE: Duration = Duration::from_millis(1);
/// How long processes may be in the middle of `vfork` before that counts as what one does on purpose, and how long the
/// workload goes on at most between two attempts to stop it elsewhere.
const VFORK_TIMEOUT: Duration = Duration::from_secs(2);
const VFORK_PAUSE_MAX: Duration = Duration::from_millis(20);
/// Longest answer of an agent.
const ANSWER_MAX: usize = 256;
/// Device number of `/dev/fuse`.
const FUSE: (u32, u32) = (10, 229);

/// A sandbox whose processes run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) name: &'a Name,
    pub(crate) pid: i32,
    pub(crate) agent: BorrowedFd<'a>,
    pub(crate) net: BorrowedFd<'a>,
    pub(crate) sockets: &'a SocketMaker,
}

/// What a sandbox at rest gets back when it goes on.
#[derive(Debug, Default)]
pub(crate) struct AtRest {
    /// The kernel's side of its `/proc` files, if it has them.
    figures: Option<OwnedFd>,
}

impl Subject<'_> {
    /// Stops the workload, so that nothing in it runs while its agent is open to inspection.
    ///
    /// A process in the middle of `vfork` cannot be written: it cannot be inspected until its child has executed a program,
    /// and CRIU stops the child before. So the workload goes on for a moment then.
    ///
    /// # Errors
    /// Refused when a process does not leave `vfork`, or a thread could not be restored. When it cannot be stopped.
    pub(crate) fn stop_workload(&self) -> Result<(), WriteError> {
        let work = self.tree.work_freezer(self.name)?;
        let deadline = Instant::now() + VFORK_TIMEOUT;
        let mut pause = QUEUE_PAUSE;
        loop {
            work.freeze_all()?;
            if !work.has_vfork()? {
                return match threads::obstacle(work.group())? {
                    None => Ok(()),
                    Some(why) => Err(WriteError::Refused(why)),
                };
            }
            if Instant::now() >= deadline {
                let why = "a process has started a child with vfork, and the child has not executed a program";
                return Err(WriteError::Refused(why.to_owned()));
            }
            work.thaw_this()?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(VFORK_PAUSE_MAX);
        }
    }

    /// Has the agent give up what leads out, and stops it, too. The workload is stopped already. What it gave up is in
    /// `at_rest` also when this fails. Connections of clients are kept if it goes on afterwards.
    ///
    /// # Errors
    /// With the step that failed.
    pub(crate) fn rest(&self, at_rest: &mut AtRest, keeps_clients: bool) -> io::Result<()> {
        // All of it may have been stopped before. The workload stays so by its own group.
        self.tree.freezer(self.name)?.thaw_this()?;
        at_rest.figures = self.figures();
        let request = if keeps_clients { quiet::STILL } else { quiet::QUIET };
        self.ask(request, None)?;
        // It has lost its agent, and its socket has an end on the host.
        spawners::end_all(self.pid, self.agent)?;
        self.tree.freezer(self.name)?.freeze_all()?;
        // CRIU thaws one group alone, and works in each process.
        self.tree.work_freezer(self.name)?.thaw_this()
    }

    /// Lets a sandbox go on that was stopped or brought to rest.
    ///
    /// # Errors
    /// When its agent does not respond.
    pub(crate) fn go_on(&self, at_rest: &AtRest) -> io::Result<()> {
        self.tree.work_freezer(self.name)?.freeze()?;
        self.tree.freezer(self.name)?.thaw_this()?;
        let asked = self.ask(quiet::CONTINUE, at_rest.figures.as_ref());
        self.tree.freezer(self.name)?.thaw()?;
        asked
    }

    /// Has the agent of a sandbox that was brought to rest take back what it gave up, and leaves all processes stopped: only
    /// the agent runs meanwhile.
    ///
    /// # Errors
    /// When its agent does not respond. All are stopped nevertheless. When the sandbox has ended.
    pub(crate) fn stay(&self, at_rest: &AtRest) -> io::Result<()> {
        let (work, all) = (self.tree.work_freezer(self.name)?, self.tree.freezer(self.name)?);
        // First, in case that CRIU was killed.
        all.hold()?;
        work.freeze()?;
        all.thaw_this()?;
        let asked = self.ask(quiet::CONTINUE, at_rest.figures.as_ref());
        all.freeze()?;
        work.thaw_this()?;
        asked
    }

    /// Stops all processes, none of them in the middle of `vfork` if it leaves that in time: such a process could not be
    /// written before it goes on.
    ///
    /// # Errors
    /// When the sandbox has ended.
    pub(crate) fn stop(&self) -> io::Result<()> {
        // Where that fails they are stopped as well, and the attempt to write them says why it cannot be done.
        let _ = self.stop_workload();
        self.tree.freezer(self.name)?.freeze()?;
        // Earlier versions had no such group.
        let _ = self.tree.work_freezer(self.name)?.thaw_this();
        Ok(())
    }

    /// Lets the agent of a sandbox that was restored go on, while its workload stays frozen.
    ///
    /// # Errors
    /// When it does not respond.
    pub(crate) fn wake_agent(&self, figures: Option<&OwnedFd>) -> io::Result<()> {
        self.ask(quiet::CONTINUE, figures)
    }

    /// Lets the agent of a copy go on, which closes its ends of the connections of the clients of the sandbox that was copied.
    ///
    /// # Errors
    /// When it does not respond.
    pub(crate) fn wake_copy(&self, figures: Option<&OwnedFd>) -> io::Result<()> {
        self.ask(quiet::CONTINUE_ALONE, figures)
    }

    /// The kernel's side of the `/proc` files, which a checkpoint cannot contain, and without which they could not be read any
    /// more.
    fn figures(&self) -> Option<OwnedFd> {
        let directory = format!("/proc/{}/fd", self.pid);
        fs::read_dir(&directory).ok()?.find_map(|entry| {
            let entry = entry.ok()?;
            let device = fs::metadata(entry.path()).ok()?.rdev();
            let is_fuse = (rustix::fs::major(device), rustix::fs::minor(device)) == FUSE;
            let number = entry.file_name().to_str()?.parse().ok()?;
            is_fuse.then(|| super::sys::descriptor_of(self.agent, number).ok())?
        })
    }

    fn ask(&self, request: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
        let socket = self.sockets.run(self.net, || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            Ok(rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                flags,
                None,
            )?)
        })?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let address = SocketAddrUnix::new_abstract_name(quiet::SOCKET.as_bytes())?;
        loop {
            match rustix::net::connect(&socket, &address) {
                // The workload has filled the queue. It is stopped, and the agent drops what is not the host's.
                Err(rustix::io::Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(QUEUE_PAUSE),
                connected => break connected?,
            }
        }
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        if peer.pid.as_raw_nonzero().get() != self.pid || has_ended(self.agent)? {
            let why = "another process listens on the agent's socket";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        rustix::net::sendmsg(&socket, &[IoSlice::new(request)], &mut ancillary, SendFlags::NOSIGNAL)?;
        let answer = receive(&socket, deadline)?;
        if answer != quiet::DONE {
            let text = String::from_utf8_lossy(&answer).into_owned();
            return Err(io::Error::other(format!("the agent responded: {text}")));
        }
        // The end of the connection: nothing of the host is open in it now.
        if receive(&socket, deadline)?.is_empty() {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }
}

/// The next packet; empty at the end of the connection.
fn receive(socket: &OwnedFd, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; ANSWER_MAX];
    loop {
        match rustix::net::recv(socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((length, _)) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let mut poll = [PollFd::new(socket, PollFlags::IN)];
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        if left.is_zero() || rustix::event::poll(&mut poll, Some(&timeout))? == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the agent does not respond"));
        }
    }
}
