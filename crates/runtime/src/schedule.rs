//! Scheduling of the platform's threads relative to the processes in sandboxes.
//!
//! A create request consists of a dozen short steps in several processes, and so does each command. The kernel lets a
//! thread that wakes up wait until the running one has used up its slice, 3 ms by default, so next to sandboxes that
//! compute continuously every step costs that much. A thread with shorter slices has the earlier deadline and preempts
//! (since Linux 6.12; before, all slices have the same length). It does not get a larger share: the scheduler makes it
//! wait afterwards for what it used beyond its fair share.
//!
//! Programs in sandboxes get neither: they have default slices, and the system-call filter prevents setting others.

use std::io;
use std::time::Duration;

use crate::sys;

/// Shortest slice that the kernel accepts.
const SLICE: Duration = Duration::from_micros(100);
/// Nice value of a launcher in the cgroup of all sandboxes, each of which counts as one thread of nice 0 for every
/// processor. The number of sandboxes must not decide how long a create request takes.
const LAUNCHER_NICE: i32 = -15;

/// Schedules the calling thread of the platform and the threads that it starts.
///
/// # Errors
/// When the kernel rejects it.
pub fn platform() -> io::Result<()> {
    sys::set_schedule(0, SLICE, false)
}

/// Schedules a launcher.
pub(crate) fn launcher() -> io::Result<()> {
    sys::set_schedule(LAUNCHER_NICE, SLICE, false).or_else(|_| sys::set_schedule(0, SLICE, false))
}

/// Schedules the agent or the spawner of a sandbox. Their children are scheduled like any program.
pub(crate) fn of_sandbox() -> io::Result<()> {
    sys::set_schedule(0, SLICE, true)
}
