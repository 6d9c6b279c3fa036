//! How the threads of the platform share processors with what runs in sandboxes.
//!
//! A create request is a relay of a dozen short steps in several processes, and so is each command. The kernel lets a
//! thread that wakes up wait until the running one has used up its slice, 3 ms by default, so beside sandboxes that
//! compute without a pause every step of the relay costs that much. A thread with shorter slices has the earlier
//! deadline and preempts (since Linux 6.12; before, slices have one length). It gets no larger share: the scheduler
//! makes it wait afterwards for what it used beyond its fair one.
//!
//! Programs of sandboxes get neither: their slices are the default, and the system-call filter keeps them from setting
//! others.

use std::io;
use std::time::Duration;

use crate::sys;

/// The shortest slice that the kernel accepts.
const SLICE: Duration = Duration::from_micros(100);
/// The weight of a launcher among its neighbours in the cgroup of all sandboxes, each of which counts as one thread of
/// nice 0 for every processor. Their number must not decide how long a create takes.
const LAUNCHER_NICE: i32 = -15;

/// For the calling thread of the platform and the threads that it starts.
///
/// # Errors
/// When the kernel refuses.
pub fn platform() -> io::Result<()> {
    sys::set_schedule(0, SLICE, false)
}

/// For a launcher.
pub(crate) fn launcher() -> io::Result<()> {
    sys::set_schedule(LAUNCHER_NICE, SLICE, false).or_else(|_| sys::set_schedule(0, SLICE, false))
}

/// For the agent and the spawner of a sandbox. What they start is scheduled like any program.
pub(crate) fn of_sandbox() -> io::Result<()> {
    sys::set_schedule(0, SLICE, true)
}
