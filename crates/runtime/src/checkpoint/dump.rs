//! Writing a checkpoint: the process that brings a sandbox to rest, runs CRIU, and ends the sandbox or lets it go on.
//!
//! ```text
//!   platform                          this process                    CRIU
//!   Dump  ──────────────────────────▶ stop the workload
//!   close its network  ◀───────────── Stopped
//!   Write ──────────────────────────▶ the agent becomes quiet, stop it
//!                                     start  ───────────────────────▶ write
//!   write out, rename  ◀───────────── Done  ◀──────────────────────── post-dump
//!   EndDumped ──────────────────────▶ end the processes
//! ```
//!
//! A sandbox that is only copied keeps its network and its connections. Its disk is copied where others are written out, and
//! with `LetGoOn` in the place of `EndDumped` it goes on.
//!
//! It is a process of this program in the mounts of the host. When the platform ends meanwhile, or gives up at any point
//! before `EndDumped`, the sandbox goes on at once, with the `/proc` files of which this process holds the kernel's side; it
//! does not have to wait for the next platform. CRIU is not killed then, because it may be in the middle of what it does in a
//! process: it is made to fail ([`Criu::stop`]), and lets go of the processes itself.
//!
//! A sandbox that stood still before, because it is paused in memory, does not go on: its agent alone runs for a moment, to
//! give up what leads out, and to take it back if there is no checkpoint in the end. The workload is frozen meanwhile by its own
//! group. CRIU freezes what was frozen before it lets go; where it was killed, this process does.
//!
//! Once the checkpoint has got its name, the sandbox is what was written, and nothing that was in it may run again: what it did
//! would be done twice, and on a disk that the checkpoint does not belong to. So from the moment when the checkpoint is complete the
//! freezer holds the processes, in case that CRIU is killed, and they are killed by their groups and not by CRIU.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use super::about::{About, Run};
use super::criu::{Criu, CriuEvent, CriuRun};
use super::host::HostFeatures;
use super::jail::{self, Jail};
use super::rpc::{CriuSettings, Task};
use super::save::{AtRest, Subject};
use super::{facts, ghosts, mounts, sys as calls};
use crate::cgroup::Tree;
use crate::driver::WriteError;
use crate::figures::Figures;
use crate::netns::SocketMaker;
use crate::slot::Name;
use crate::sys::{self, attr};
use crate::wire::{self, Dump, Reply, Request};

/// How long CRIU may take to let go of all processes. It takes milliseconds; the bound is for a disk that blocks it.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// Writes one checkpoint.
///
/// # Errors
/// Those of the socket. Others are replies.
pub(crate) fn serve(socket: &OwnedFd, tree: &Tree) -> io::Result<()> {
    super::sys::notice_children();
    sys::keep_capabilities_over_setuid(true)?;
    wire::send_message(socket, &Reply::Ready, &[])?;
    let Some((Request::Dump(dump), fds)) = wire::receive_message::<Request>(socket)? else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let [agent] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidInput)?;
    let name = Name::parse(&dump.name).ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let net = rustix::fs::open(format!("/proc/{}/ns/net", dump.pid), flags, Mode::empty())?;
    let subject = Subject {
        tree,
        name: &name,
        pid: dump.pid,
        agent: agent.as_fd(),
        net: net.as_fd(),
        sockets: &SocketMaker::new()?,
    };
    let mut at_rest = AtRest::default();
    let reply = match write(&dump, &subject, &mut at_rest, socket) {
        Ok(()) if dump.goes_on => match subject.go_on(&at_rest) {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Failed(error.to_string()),
        },
        Ok(()) => Reply::Done,
        Err(error) => {
            let went_on = if dump.stays {
                subject.stay(&at_rest)
            } else {
                subject.go_on(&at_rest)
            };
            match (error, went_on) {
                (WriteError::Refused(why) | WriteError::Passing(why), Ok(())) => Reply::Refused(why),
                (WriteError::Failed(error), Ok(())) => Reply::Failed(error.to_string()),
                (WriteError::Refused(why) | WriteError::Passing(why), Err(error)) => {
                    Reply::Failed(format!("{why}; then: {error}"))
                }
                (WriteError::Failed(why), Err(error)) => Reply::Failed(format!("{why}; then: {error}")),
            }
        }
    };
    wire::send_message(socket, &reply, &[])
}

/// Writes the checkpoint, and ends the processes unless they go on. When this fails, all of them are there still, stopped or
/// as CRIU has left them.
fn write(dump: &Dump, subject: &Subject<'_>, at_rest: &mut AtRest, socket: &OwnedFd) -> Result<(), WriteError> {
    subject.stop_workload()?;
    wire::send_message(socket, &Reply::Stopped, &[])?;
    match wire::receive_message::<Request>(socket)? {
        Some((Request::Write, _)) => {}
        _ => return Err(given_up().into()),
    }
    subject.rest(at_rest, dump.goes_on)?;
    let of_agent = |file: &str| PathBuf::from(format!("/proc/{}/{file}", dump.pid));
    std::fs::DirBuilder::new().mode(0o700).create(&dump.checkpoint)?;
    let points = mounts::points(&std::fs::read_to_string(of_agent("mountinfo"))?);
    let about = About {
        host: HostFeatures::with(&dump.program.version),
        agent: dump.program_of_agent.clone(),
        mounts: points.clone(),
        run: Run::of(&subject.name.id, dump.pid, &points)?,
    };
    about.write(&dump.checkpoint)?;
    let mut settings = CriuSettings::new();
    settings.set("network-lock", "skip")?;
    settings.set("cgroup-dump-controller", "none")?;
    settings.set("freeze-cgroup", jail::FREEZER)?;
    settings.set("ghost-limit", &dump.deleted_files.to_string())?;
    settings.add("skip-in-flight");
    if dump.goes_on {
        settings.add("leave-running");
    }
    mounts::settings_of_dump(&points, &mut settings)?;
    let freezer = subject.tree.freezer(subject.name)?;
    // One that probes the kernel first needs its packet filter for that.
    let knows_kernel = facts::are_of(&dump.facts, &dump.program.path);
    let prepare = || {
        let jail = Jail::new(&dump.program.files, dump.base_id)?;
        facts::give(&dump.facts, &jail)?;
        let harmless = attr::NOSUID | attr::NODEV | attr::NOEXEC;
        jail.show(&dump.checkpoint, jail::CHECKPOINT, harmless)?;
        jail.show(freezer.group(), jail::FREEZER, harmless)?;
        jail.enter()?;
        calls::ignore_file_size_signal();
        // The name of the host belongs to the sandbox, and a user that is not root could not restore it.
        sys::setns(subject.agent, libc::CLONE_NEWUTS)
    };
    let run = CriuRun {
        program: &dump.program.path,
        task: Task::Dump { pid: dump.pid },
        settings: &settings,
        base: dump.base_id,
        birth: None,
        asks_filters: !knows_kernel,
    };
    let mut criu = Criu::start(&run, prepare)?;
    let written = follow(&mut criu, dump, subject, socket);
    if matches!(&written, Err(Unwritten::Running(_) | Unwritten::Refused(_))) && !criu.stop(STOP_TIMEOUT) {
        // Killed then, which it survives only outside of processes.
        return Err(io::Error::new(io::ErrorKind::TimedOut, "CRIU did not give up").into());
    }
    written.map_err(|unwritten| match unwritten {
        Unwritten::Running(error) => error.into(),
        Unwritten::Refused(why) => WriteError::Refused(why),
        Unwritten::Ended(error) => error,
    })
}

/// Why there is no checkpoint.
#[derive(Debug)]
enum Unwritten {
    /// CRIU has ended.
    Ended(WriteError),
    /// CRIU still runs.
    Running(io::Error),
    /// CRIU still runs. It has written a checkpoint that could not be restored.
    Refused(String),
}

impl From<io::Error> for Unwritten {
    fn from(error: io::Error) -> Self {
        Self::Running(error)
    }
}

/// Follows a run of CRIU until the checkpoint is complete, and the processes have ended or go on.
fn follow(criu: &mut Criu, dump: &Dump, subject: &Subject<'_>, socket: &OwnedFd) -> Result<(), Unwritten> {
    loop {
        match next_of_dump(criu, socket)? {
            CriuEvent::Step { action, .. } => {
                if action == "post-dump" {
                    // Only CRIU holds them now, and when it is killed, they must not go on beside a checkpoint that counts.
                    subject.tree.freezer(subject.name)?.hold()?;
                    if let Some(why) = obstacle(&dump.checkpoint, subject)? {
                        return Err(Unwritten::Refused(why));
                    }
                    open_to_readers(&dump.checkpoint)?;
                    wire::send_message(socket, &Reply::Done, &[])?;
                    let answer = wire::receive_message::<Request>(socket);
                    if dump.goes_on {
                        // CRIU removes the names that it gave to deleted files, whatever became of the copy.
                        let ended = finish(criu);
                        return match (answer?, ended?) {
                            (Some((Request::LetGoOn, _)), 0) => Ok(()),
                            (Some((Request::LetGoOn, _)), status) => Err(io::Error::other(format!(
                                "CRIU exited with status {status} after the checkpoint was complete"
                            ))
                            .into()),
                            _ => Err(given_up().into()),
                        };
                    }
                    let is_complete = match answer? {
                        Some((Request::EndDumped, _)) => true,
                        // The platform has ended. With its name the checkpoint counts, even though nobody has said so.
                        None => !dump.checkpoint.exists(),
                        Some(_) => false,
                    };
                    if !is_complete {
                        return Err(given_up().into());
                    }
                    // Not by CRIU, which may have been killed. There is no way back, and nothing of it may run again.
                    subject.tree.kill(subject.name);
                    return Ok(());
                }
                criu.go()?;
            }
            CriuEvent::Ended(status) => {
                let why = criu.why();
                return Err(Unwritten::Ended(if why.is_empty() {
                    WriteError::Failed(io::Error::other(format!("CRIU exited with status {status}")))
                } else {
                    WriteError::Refused(why)
                }));
            }
        }
    }
}

fn obstacle(checkpoint: &Path, subject: &Subject<'_>) -> io::Result<Option<String>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path: &Path| rustix::fs::open(path, flags, Mode::empty());
    let root = open(Path::new(&format!("/proc/{}/root", subject.pid)))?;
    ghosts::obstacle(open(checkpoint)?.as_fd(), root.as_fd())
}

/// Lets CRIU end by itself, also when the platform has ended, and returns its status.
fn finish(criu: &mut Criu) -> io::Result<i32> {
    criu.go()?;
    loop {
        match criu.event()? {
            Some(CriuEvent::Ended(status)) => return Ok(status),
            Some(CriuEvent::Step { .. }) => criu.go()?,
            None => {
                let mut fds = criu.sources().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                match rustix::event::poll(&mut fds, None) {
                    Err(rustix::io::Errno::INTR) => {}
                    polled => {
                        polled?;
                    }
                }
            }
        }
    }
}

fn given_up() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the platform has given it up")
}

/// CRIU reads checkpoints also where it has no privileges on the host any more, with other ids than it wrote them with. Nobody
/// else reaches them: the directory above belongs to root alone.
fn open_to_readers(checkpoint: &Path) -> io::Result<()> {
    let set = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    for entry in std::fs::read_dir(checkpoint)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "img") {
            set(&path, 0o644)?;
        }
    }
    set(checkpoint, 0o711)
}

/// The next event of a dump, unless the platform gives up or ends before: then its socket is closed, or has a request.
///
/// # Errors
/// When it has.
fn next_of_dump(criu: &mut Criu, socket: &OwnedFd) -> io::Result<CriuEvent> {
    let event = loop {
        if let Some(event) = next_event(criu, socket.as_fd(), PollFlags::IN, None, None).transpose() {
            break event;
        }
    };
    if let Err(error) = &event
        && error.kind() == io::ErrorKind::ConnectionAborted
    {
        // A request that is left unread would make the reply unreadable.
        let _ = wire::receive_message::<Request>(socket);
    }
    event
}

/// The next event of a restore, unless the socket of the request is closed before; `None` when there is none for this long.
///
/// Meanwhile requests to the file system of `/proc` files are answered.
///
/// # Errors
/// When the socket is closed.
pub(crate) fn next(
    criu: &mut Criu,
    socket: BorrowedFd<'_>,
    figures: Option<&Figures>,
    within: Duration,
) -> io::Result<Option<CriuEvent>> {
    let within = Timespec::try_from(within).map_err(io::Error::other)?;
    next_event(criu, socket, PollFlags::empty(), figures, Some(&within))
}

fn next_event(
    criu: &mut Criu,
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    figures: Option<&Figures>,
    within: Option<&Timespec>,
) -> io::Result<Option<CriuEvent>> {
    loop {
        if let Some(event) = criu.event()? {
            return Ok(Some(event));
        }
        let [connection, process] = criu.sources();
        let mut fds = vec![
            PollFd::from_borrowed_fd(connection, PollFlags::IN),
            PollFd::from_borrowed_fd(process, PollFlags::IN),
            PollFd::from_borrowed_fd(socket, flags),
        ];
        fds.extend(figures.map(|figures| PollFd::new(&figures.kernel, PollFlags::IN)));
        match rustix::event::poll(&mut fds, within) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return Ok(None),
            polled => {
                polled?;
                if !fds[2].revents().is_empty() {
                    return Err(given_up());
                }
                let asked = fds.get(3).is_some_and(|fd| !fd.revents().is_empty());
                if let Some(figures) = figures.filter(|_| asked) {
                    figures.answer()?;
                }
            }
        }
    }
}

/// A pidfd of a process that is known by its number only.
pub(crate) fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}
