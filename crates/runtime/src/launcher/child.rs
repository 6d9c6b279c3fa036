//! The launcher's handle of a child: a packet socket on which it reports, and a pidfd to kill it by.
//!
//! Every wait here has a deadline and is aborted when the platform ends: a child may be stopped or starved by its
//! sandbox, and a launcher whose platform is gone must exit so that the next platform can start.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};

use crate::{setup, sys, wire};

/// How long to wait for a killed process to end. It takes milliseconds unless it is blocked in the kernel, most likely
/// on disk I/O.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long, and on whose behalf, to wait for a child's report.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChildWait<'a> {
    /// The socket of the request. Its other end closes with the platform.
    pub(super) asked_by: BorrowedFd<'a>,
    /// Maximum wait for one report.
    pub(super) step: Duration,
}

impl ChildWait<'_> {
    /// The next packet from a child; `None` when every process with its socket has exited or executed a program.
    ///
    /// # Errors
    /// When it takes too long, or the platform has ended meanwhile.
    pub(super) fn receive(&self, child: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let deadline = Instant::now() + self.step;
        while !self.wait(child, None, deadline)? {}
        match wire::receive(child)? {
            // The kernel reports the end first where the child has left something unread.
            None => wire::receive(child),
            message => Ok(message),
        }
    }

    /// Calls `serve` whenever there is something to read on `asked`, until there is something to read from the child.
    ///
    /// # Errors
    /// As [`Self::receive`], and those of `serve`.
    pub(super) fn serve(
        &self,
        child: BorrowedFd<'_>,
        asked: BorrowedFd<'_>,
        serve: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let deadline = Instant::now() + self.step;
        while !self.wait(child, Some(asked), deadline)? {
            serve()?;
        }
        Ok(())
    }

    /// Waits for one of the two, and returns whether it is the child that has data.
    fn wait(&self, child: BorrowedFd<'_>, asked: Option<BorrowedFd<'_>>, deadline: Instant) -> io::Result<bool> {
        loop {
            // No events are requested on the second: closing its other end is reported anyway.
            let mut fds = vec![
                PollFd::from_borrowed_fd(child, PollFlags::IN),
                PollFd::from_borrowed_fd(self.asked_by, PollFlags::empty()),
            ];
            fds.extend(asked.map(|asked| PollFd::from_borrowed_fd(asked, PollFlags::IN)));
            match rustix::event::poll(&mut fds, Some(&until(deadline))) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "a step exceeded its time limit",
                    ));
                }
                Ok(_) if !fds[0].revents().is_empty() => return Ok(true),
                Ok(_) if !fds[1].revents().is_empty() => {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the platform ended"));
                }
                Ok(_) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a child's socket closes, as exec does it.
    ///
    /// # Errors
    /// As [`Self::receive`], and with what the child reports.
    pub(super) fn finished(&self, child: BorrowedFd<'_>) -> io::Result<()> {
        match self.receive(child)? {
            None => Ok(()),
            message => Err(reported(message)),
        }
    }
}

fn until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    Timespec {
        tv_sec: left.as_secs().cast_signed(),
        tv_nsec: left.subsec_nanos().into(),
    }
}

/// Waits until a process has ended. Returns whether it did before the deadline.
pub(super) fn has_ended(process: BorrowedFd<'_>, within: Duration) -> bool {
    is_ready(process, within)
}

/// Whether a child has sent a report that was not received, or has closed its end.
pub(super) fn has_report(child: BorrowedFd<'_>) -> bool {
    is_ready(child, Duration::ZERO)
}

fn is_ready(fd: BorrowedFd<'_>, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match rustix::event::poll(&mut poll, Some(&until(deadline))) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Processes that have not executed their program yet, killed on drop unless finished.
#[derive(Debug)]
pub(super) struct Unfinished(Vec<OwnedFd>);

impl Unfinished {
    pub(super) fn new(process: OwnedFd) -> Self {
        Self(vec![process])
    }

    pub(super) fn add(&mut self, processes: Vec<OwnedFd>) {
        self.0.extend(processes);
    }

    /// The processes so far, in the order in which they were added.
    pub(super) fn processes(&self) -> &[OwnedFd] {
        &self.0
    }

    /// The first process.
    pub(super) fn first(&self) -> BorrowedFd<'_> {
        self.0
            .first()
            .map(AsFd::as_fd)
            .expect("created with one, and emptied only by finish, which consumes self")
    }

    /// The programs were executed: keep the processes.
    pub(super) fn finish(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        for process in &self.0 {
            let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
        for process in &self.0 {
            let _ = has_ended(process.as_fd(), END_TIMEOUT);
        }
    }
}

/// Runs `work` in a cloned child, which reports its failure on `socket` and exits.
pub(super) fn run_child(
    socket: &OwnedFd,
    work: impl FnOnce(BorrowedFd<'_>) -> Result<Infallible, setup::Failure>,
) -> ! {
    let report = match rustix::io::fcntl_dupfd_cloexec(socket, setup::ABOVE_PLACES) {
        Ok(report) => report,
        Err(_) => sys::exit_now(1),
    };
    let Err(failure) = work(report.as_fd());
    let _ = wire::send(report.as_fd(), failure.to_string().as_bytes(), &[]);
    sys::exit_now(1)
}

/// Has this process killed when its parent ends, which has this pid: one that waits for something in the sandbox would stay.
pub(super) fn end_with(parent: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() == Some(parent) {
        Ok(())
    } else {
        // It has ended before.
        sys::exit_now(1)
    }
}

pub(super) fn reported(message: Option<(Vec<u8>, Vec<OwnedFd>)>) -> io::Error {
    match message {
        Some((text, _)) => io::Error::other(String::from_utf8_lossy(&text).into_owned()),
        None => io::Error::other("the child exited without a report"),
    }
}

pub(super) fn pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
