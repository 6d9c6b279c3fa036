//! Kills the spawners that an agent has given up.
//!
//! An agent gives up a spawner that does not respond. One that was stopped would remain forever: it holds memory and
//! counts against the sandbox's process limit, and once continued it would act on a request that was already answered
//! as failed. The agent cannot tell which of its children it is; the host can, by the program they run.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::process::has_ended;

/// Kills every child of this agent that is a spawner or about to become one, stopped or not.
///
/// Children are checked through a pidfd, so that a signal never reaches a later process with the same pid. The agent's
/// own pid is valid as long as its pidfd says that it lives.
///
/// # Errors
/// When the agent is gone, or its children cannot be read.
pub(crate) fn end_all(agent: i32, pidfd: BorrowedFd<'_>) -> io::Result<()> {
    let file = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let program = file(fs::metadata(format!("/proc/{agent}/exe"))?);
    // The program of a process that has not executed the spawner yet: the sandbox's processes cannot run that file.
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
        // When this cannot be read, it ended meanwhile or is no longer a child.
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
