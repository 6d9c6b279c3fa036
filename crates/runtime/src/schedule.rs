//! Scheduling of the platform's threads relative to the processes in sandboxes.
//!
//! A create request consists of a dozen short steps in several processes, and so does each command. The kernel lets a
//! thread that wakes up wait until the running one has used up its slice, 3 ms by default, so next to sandboxes that
//! compute continuously every step costs that much. A thread with shorter slices has the earlier deadline and preempts
//! (since Linux 6.12; before, all slices have the same length). It does not get a larger share: the scheduler makes it
//! wait afterwards for what it used beyond its fair share.
//!
//! All have the nice value 0, launchers too. A heavy thread shifts the average by which the scheduler places what joins
//! its run queue, and what has joined then waits until the others have caught up: with a launcher of nice -15 among
//! them, new sandboxes waited up to 290 ms for the processor next to fork bombs. A launcher is outside the cgroup of all
//! sandboxes instead, so that their number does not decide how long a create request takes.
//!
//! Programs in sandboxes have default slices, and the system-call filter prevents setting others.

use std::io;
use std::time::Duration;

use crate::sys;

/// Shortest slice that the kernel accepts.
const SLICE: Duration = Duration::from_micros(100);

/// Schedules the calling thread of the platform or of a launcher, and the threads that it starts.
///
/// # Errors
/// When the kernel rejects it.
pub fn platform() -> io::Result<()> {
    sys::set_schedule(0, SLICE, false)
}

/// Schedules the agent or the spawner of a sandbox. Their children are scheduled like any program.
pub(crate) fn of_sandbox() -> io::Result<()> {
    sys::set_schedule(0, SLICE, true)
}
