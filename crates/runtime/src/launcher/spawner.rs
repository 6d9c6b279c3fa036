//! Starts a spawner in a running sandbox by way of three processes, without exposing anything of the host.
//!
//! ```text
//!   launcher ─clone─▶ helper            cloned into the workload's group, still among the host's processes
//!                     closes all that is the host's, enters every namespace, becomes the sandbox's root;
//!                     for the first spawner it creates the cgroup namespace, which the agent enters, and waits until
//!                     the mounts are complete; for others it connects to the agent
//!                     ─clone─▶ first    in the sandbox's pid namespace, with a parent outside
//!                              ─clone─▶ second   left by its parent, a child of the agent
//!                                       confines itself, executes the spawner
//! ```
//!
//! A process cannot enter a pid namespace itself, only its children are created there. So the helper enters all other
//! namespaces before it clones a child: what appears inside has the sandbox's network, mounts and ids, no descriptors
//! except its sockets to the launcher and to the agent, and memory that no process inside may read.
//!
//! The root of a cgroup namespace is the group of the process that creates it, so the helper does that in the workload's.
//! Agent and workload share it: a checkpoint can contain only one. From then on root
//! inside can stop or kill it, but not before the launcher has a pidfd of it, and nothing here waits longer than a step
//! may take.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags};

use super::child::{ChildWait, Unfinished, has_ended, pair, reported, run_child};
use super::steps::During;
use crate::cgroup::open::{Entry, OpenTree};
use crate::setup::{self, Failure};
use crate::slot::Name;
use crate::sys::{self, Cloned};
use crate::wire::{self, Reply, Request};

/// Message with the pidfd of a process's child.
const CLONED: &[u8] = b"cloned";
/// Message of the first process instead: that child becomes the spawner. The two messages come from two processes, in
/// any order.
const LAST: &[u8] = b"last";
/// Message with the cgroup namespace, and the answer to it.
const NAMESPACE: &[u8] = b"namespace";
const ENTER: &[u8] = b"enter";
/// Number of processes: helper, first and second.
const PROCESSES: usize = 3;
/// Maximum wait for each of them in a running sandbox. Together they take a millisecond; a sandbox that uses up its
/// processor time delays them, and one whose root stops them makes the attempt fail.
const STEP: Duration = Duration::from_secs(1);
/// How long the helper waits for the first process, which is killed with it. Longer than the longest step.
const HELPER_STAYS: Duration = Duration::from_secs(20);

/// A spawner being started, killed on drop unless finished.
#[derive(Debug)]
pub(super) struct StartingSpawner {
    report: OwnedFd,
    processes: Unfinished,
    /// Index of the process that becomes the spawner, once known.
    last: Option<usize>,
}

/// Begins to start a spawner in the namespaces of the sandbox whose agent this is, in its workload's cgroup.
///
/// Its processes may have so many files open, unless they ask for more.
///
/// # Errors
/// When no process can be cloned, or the cgroup is full.
pub(super) fn begin(
    agent: BorrowedFd<'_>,
    work: &Entry,
    spawner: Option<OwnedFd>,
    open_files: u32,
) -> io::Result<StartingSpawner> {
    let (report, theirs) = pair(SocketType::SEQPACKET)?;
    match sys::clone3(0, work.birth.as_ref().map(AsFd::as_fd)).during("clone the helper")? {
        Cloned::Parent { pidfd, .. } => Ok(StartingSpawner {
            report,
            processes: Unfinished::new(pidfd),
            last: None,
        }),
        Cloned::Child => run_child(&theirs, |socket| help(socket, agent, work, open_files, spawner)),
    }
}

/// Opens the mount namespace of a process.
fn mounts_of(pidfd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = info
        .lines()
        .find_map(|line| line.strip_prefix("Pid:"))
        .unwrap_or_default();
    let path = format!("/proc/{}/ns/mnt", pid.trim());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

impl StartingSpawner {
    /// The cgroup namespace of the sandbox, which the helper of the first spawner creates.
    ///
    /// # Errors
    /// With the step that failed or took too long.
    pub(super) fn namespace(&self, wait: ChildWait<'_>) -> io::Result<OwnedFd> {
        match wait.receive(self.report.as_fd())? {
            Some((message, mut namespaces)) if message == NAMESPACE && namespaces.len() == 1 => {
                Ok(namespaces.swap_remove(0))
            }
            other => Err(reported(other)),
        }
    }

    /// Lets the helper of the first spawner continue, once the mounts of the sandbox are complete.
    ///
    /// # Errors
    /// When it has ended.
    pub(super) fn enter(&self) -> io::Result<()> {
        wire::send(self.report.as_fd(), ENTER, &[])
    }

    /// Waits until the spawner runs.
    ///
    /// # Errors
    /// With the step that failed or took too long, or when root inside killed it first. Nothing of it is running then.
    pub(super) fn finish(mut self, wait: ChildWait<'_>) -> io::Result<()> {
        loop {
            match wait.receive(self.report.as_fd())? {
                Some((message, children)) if message == CLONED => self.processes.add(children),
                Some((message, children)) if message == LAST => {
                    self.last = Some(self.processes.processes().len());
                    self.processes.add(children);
                }
                Some(failed) => return Err(reported(Some(failed))),
                None => break,
            }
        }
        // All processes have closed the socket.
        let processes = self.processes.processes();
        match self.last.and_then(|last| processes.get(last)) {
            Some(last) if !has_ended(last.as_fd(), Duration::ZERO) => {
                self.processes.finish();
                Ok(())
            }
            Some(_) => Err(io::Error::other("the process exited immediately")),
            None => Err(io::Error::other(format!(
                "intermediate process {} of {PROCESSES} exited without a report",
                processes.len()
            ))),
        }
    }
}

/// Runs in the helper, among the processes of the host.
fn help(
    socket: BorrowedFd<'_>,
    agent: BorrowedFd<'_>,
    work: &Entry,
    open_files: u32,
    spawner: Option<OwnedFd>,
) -> Result<Infallible, Failure> {
    let fail = |what: &'static str| move |error: io::Error| setup::failure(what, error);
    work.join().map_err(fail("join the cgroup"))?;
    let spawner_fd = spawner.as_ref().map(AsRawFd::as_raw_fd);
    let keep = |more: [Option<i32>; 2]| {
        let kept = [Some(socket.as_raw_fd()), spawner_fd].into_iter().chain(more);
        let kept: Vec<i32> = kept.flatten().collect();
        sys::close_all_but(&kept).map_err(fail("close the launcher's descriptors"))
    };
    let mounts = match spawner {
        Some(_) => Some(mounts_of(agent).map_err(fail("open the mounts"))?),
        None => None,
    };
    let agent_fd = agent;
    let agent = agent.as_raw_fd();
    let mounts_fd = mounts.as_ref().map(AsRawFd::as_raw_fd);
    keep([Some(agent), mounts_fd])?;
    // This includes the pid namespace, which applies to children of this process.
    let kinds = match mounts {
        Some(_) => namespaces() & !libc::CLONE_NEWNS,
        None => namespaces(),
    };
    sys::setns(agent_fd, kinds).map_err(fail("enter the namespaces"))?;
    keep([mounts_fd, None])?;
    sys::set_ids(0, 0, 0).map_err(fail("become root of the sandbox"))?;
    sys::clear_groups().map_err(fail("drop groups"))?;
    // Changing ids may have reset it. The memory is a copy of the launcher's.
    sys::hide_memory().map_err(fail("disable access to the memory"))?;
    if let Some(mounts) = mounts {
        sys::unshare(libc::CLONE_NEWCGROUP).map_err(fail("create the cgroup namespace"))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let own = rustix::fs::open("/proc/thread-self/ns/cgroup", flags, Mode::empty());
        let own = own.map_err(|error| fail("open the cgroup namespace")(error.into()))?;
        wire::send(socket, NAMESPACE, &[own.as_fd()]).map_err(fail("report"))?;
        drop(own);
        match wire::receive(socket).map_err(fail("wait for the mounts"))? {
            Some((message, _)) if message == ENTER => {}
            _ => sys::exit_now(1),
        }
        sys::setns(mounts.as_fd(), libc::CLONE_NEWNS).map_err(fail("enter the mounts"))?;
        // Before its number is closed.
        drop(mounts);
        keep([None, None])?;
    }
    let spawner = match spawner {
        Some(socket) => socket,
        None => connect_to_agent().map_err(fail("connect to the agent"))?,
    };
    match sys::clone3(0, None).map_err(fail("clone"))? {
        Cloned::Parent { pidfd, .. } => {
            wire::send(socket, CLONED, &[pidfd.as_fd()]).map_err(fail("report"))?;
            let _ = has_ended(pidfd.as_fd(), HELPER_STAYS);
            sys::exit_now(0)
        }
        Cloned::Child => {
            // Killing the helper also ends this process when its pidfd was not received.
            sys::prctl(libc::PR_SET_PDEATHSIG, u64::from(libc::SIGKILL.cast_unsigned()))
                .map_err(fail("follow the helper"))?;
            let first = rustix::process::getpid();
            match sys::clone3(0, None).map_err(fail("clone again"))? {
                Cloned::Parent { pidfd, .. } => {
                    wire::send(socket, LAST, &[pidfd.as_fd()]).map_err(fail("report"))?;
                    sys::exit_now(0)
                }
                Cloned::Child => {
                    let in_time = left_by(first).map_err(fail("wait for the agent to take over"))?;
                    if !in_time {
                        return Err(fail("wait for the agent to take over")(io::ErrorKind::TimedOut.into()));
                    }
                    setup::become_spawner(spawner, open_files)
                }
            }
        }
    }
}

/// All namespaces of a sandbox. Kernels without time namespaces reject their flag.
fn namespaces() -> i32 {
    match std::fs::exists("/proc/self/ns/time") {
        Ok(true) => sys::NAMESPACES | libc::CLONE_NEWTIME,
        _ => sys::NAMESPACES,
    }
}

/// The spawner's end of a new connection to the agent. Created here because the agent accepts it only from a process of
/// the host: it identifies this connection by its peer.
fn connect_to_agent() -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new_abstract_name(protocol::agent::SPAWNER_SOCKET.as_bytes())?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Waits until the parent of this process has exited and the agent has adopted it, so that the spawner never starts
/// processes under another parent.
fn left_by(parent: Pid) -> io::Result<bool> {
    let gone = || rustix::process::getppid() != Some(parent);
    if gone() {
        return Ok(true);
    }
    match rustix::process::pidfd_open(parent, PidfdFlags::empty()) {
        Ok(parent) => Ok(has_ended(parent.as_fd(), HELPER_STAYS)),
        Err(_) if gone() => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Gives new spawners to sandboxes that have lost theirs, until the platform closes the socket. Each attempt is a
/// process of its own, so that a sandbox that delays one does not affect others.
pub(super) fn serve(socket: &OwnedFd, tree: &OpenTree, open_files: u32) -> io::Result<()> {
    wire::send_message(socket, &Reply::Ready, &[])?;
    while let Some((request, fds)) = wire::receive_message::<Request>(socket)? {
        let Request::Respawn { name } = request else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let [agent, answer] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidInput)?;
        let conducted = Name::parse(&name)
            .ok_or(io::ErrorKind::InvalidInput.into())
            .and_then(|name| tree.open_work(&name).during("open the cgroup"))
            .and_then(|work| match sys::clone3(0, None).during("clone")? {
                Cloned::Parent { .. } => Ok(()),
                Cloned::Child => conduct(&agent, &work, &answer, open_files),
            });
        if let Err(error) = conducted {
            let _ = wire::send_message(&answer, &Reply::Failed(error.to_string()), &[]);
        }
    }
    Ok(())
}

/// Runs one attempt. Keeps standard output, which holds the lock of the launchers.
fn conduct(agent: &OwnedFd, work: &Entry, answer: &OwnedFd, open_files: u32) -> ! {
    let mut kept = vec![0, 1, 2, agent.as_raw_fd(), answer.as_raw_fd()];
    kept.extend(work.descriptors());
    let outcome = sys::close_all_but(&kept)
        .and_then(|()| begin(agent.as_fd(), work, None, open_files))
        .and_then(|starting| {
            starting.finish(ChildWait {
                asked_by: answer.as_fd(),
                step: STEP,
            })
        });
    let reply = match outcome {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Failed(error.to_string()),
    };
    let _ = wire::send_message(answer, &reply, &[]);
    sys::exit_now(0)
}
