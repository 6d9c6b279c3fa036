//! Freezing: the processes of a group of version 2 are stopped where they are.
//!
//! A frozen process can be killed, unlike with the freezer of version 1, and is stopped in user mode or in an
//! interruptible wait, so it holds no lock of the kernel.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::files::{named, write};

/// How long processes may take to be stopped. It takes less than a millisecond unless the kernel blocks one.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it is tried where all have to be stopped: as long as before a copy. A process cannot be stopped while it waits for a
/// disk, which takes seconds on a busy host.
const FREEZE_ALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The freezer of one group and those below it.
#[derive(Debug)]
pub(crate) struct Freezer(PathBuf);

impl Freezer {
    pub(super) fn new(group: PathBuf) -> Self {
        Self(group)
    }

    /// Whether groups below this one can be frozen.
    pub(super) fn is_supported(tree: &Path) -> bool {
        tree.join("cgroup.freeze").exists()
    }

    /// Stops all processes, and waits until they are stopped, for [`FREEZE_TIMEOUT`] at most.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        write(&self.0.join("cgroup.freeze"), "1")?;
        let path = self.0.join("cgroup.events");
        let deadline = Instant::now() + FREEZE_TIMEOUT;
        let mut events = File::open(&path).map_err(|error| named(&path, &error))?;
        loop {
            let mut text = String::new();
            events.read_to_string(&mut text).map_err(|error| named(&path, &error))?;
            let left = deadline.saturating_duration_since(Instant::now());
            if text.lines().any(|line| line == "frozen 1") || left.is_zero() {
                return Ok(());
            }
            // The kernel signals a change of the file since it was read.
            let mut poll = [PollFd::from_borrowed_fd(events.as_fd(), PollFlags::PRI)];
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            rustix::event::poll(&mut poll, Some(&timeout))?;
            events.rewind()?;
        }
    }

    /// As [`Self::freeze`], and fails when they are not all stopped after [`FREEZE_ALL_TIMEOUT`]. A process that the kernel
    /// wakes for a moment does not count as stopped meanwhile.
    ///
    /// # Errors
    /// When a process could not be stopped, or the group is gone.
    pub(crate) fn freeze_all(&self) -> io::Result<()> {
        let deadline = Instant::now() + FREEZE_ALL_TIMEOUT;
        loop {
            self.freeze()?;
            if self.is_at_rest()? {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let why = "a process could not be stopped, most likely because it waits for a disk";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }

    /// Whether a process is stopped in the middle of `vfork`, where it waits for its child to execute a program. All are
    /// stopped. Only such a process sleeps without being interruptible then.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn has_vfork(&self) -> io::Result<bool> {
        let path = self.0.join("cgroup.threads");
        let threads = std::fs::read_to_string(&path).map_err(|error| named(&path, &error))?;
        Ok(threads.lines().any(|thread| {
            let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
            // The name, in parentheses, may contain anything.
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
        }))
    }

    /// Whether every process has stopped: nothing that one had begun is under way in the kernel.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn is_at_rest(&self) -> io::Result<bool> {
        let path = self.0.join("cgroup.events");
        let text = std::fs::read_to_string(&path).map_err(|error| named(&path, &error))?;
        Ok(text.lines().any(|line| line == "frozen 1"))
    }

    /// Whether the processes are stopped, or about to be.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn is_frozen(&self) -> io::Result<bool> {
        let path = self.0.join("cgroup.freeze");
        let text = std::fs::read_to_string(&path).map_err(|error| named(&path, &error))?;
        Ok(text.trim_end() == "1")
    }

    /// Stops all processes as soon as they can be, without waiting. One that a tracer holds is stopped when it lets go.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn hold(&self) -> io::Result<()> {
        write(&self.0.join("cgroup.freeze"), "1")
    }

    /// The group that the freezer stops.
    pub(crate) fn group(&self) -> &Path {
        &self.0
    }

    /// Lets those processes continue that are not frozen by a group below.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn thaw_this(&self) -> io::Result<()> {
        write(&self.0.join("cgroup.freeze"), "0")
    }

    /// Lets all processes continue, also those of the workload's own group, which is frozen while a checkpoint is written and
    /// after a restore.
    ///
    /// # Errors
    /// When the group is gone.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        match write(&self.0.join("work/cgroup.freeze"), "0") {
            // Earlier versions had no such group.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.thaw_this()
    }
}
