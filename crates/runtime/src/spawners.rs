//! Ending the spawners that a sandbox has left behind.
//!
//! An agent gives up a spawner that does not answer, and one that was stopped would stay for good: it holds memory and
//! a place among the sandbox's processes, and woken up it would act on a request that was answered as failed. The
//! agent cannot tell which of its children that is; the host can, by the program they run.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::container::has_ended;

/// Kills every child of this agent that is a spawner or was to become one, stopped or not.
///
/// Pids of children are looked at through a pidfd, so that a signal never reaches a later process of the same number.
/// The agent's own is trusted as long as its pidfd says that it lives.
///
/// # Errors
/// When the agent is gone, or its children cannot be read.
pub(crate) fn end_all(agent: i32, pidfd: BorrowedFd<'_>) -> io::Result<()> {
    let file = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let program = file(fs::metadata(format!("/proc/{agent}/exe"))?);
    // What one runs that has not got as far as its program: the sandbox's processes cannot run that file.
    let unfinished = file(fs::metadata("/proc/self/exe")?);
    let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children"))?;
    if has_ended(pidfd)? {
        return Err(io::ErrorKind::NotFound.into());
    }
    for child in children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()) {
        let Some(pidfd) =
            Pid::from_raw(child).and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            continue;
        };
        // It ended meanwhile, or is another's by now, when either cannot be read.
        let Ok(of_child) = fs::metadata(format!("/proc/{child}/exe")) else {
            continue;
        };
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        let is_spawner = line.split(|byte| *byte == 0).nth(1) == Some(b"spawner");
        let of_child = file(of_child);
        if of_child == unfinished || (is_spawner && of_child == program) {
            let _ = rustix::process::pidfd_send_signal(pidfd.as_fd(), Signal::KILL);
        }
    }
    Ok(())
}
