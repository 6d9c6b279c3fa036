//! The system-call filter of sandboxes.
//!
//! An allow-list: calls that are not on it are rejected. It applies to the agent, the spawner and everything they
//! start, and cannot be removed. The kernel is the security boundary of the container driver, so the list has what
//! ordinary programs need and no more:
//!
//! - no new namespaces of any kind. The flags of `clone3` are in memory that a filter cannot read, so it is absent; every
//!   libc then falls back to `clone`, whose flags are checked.
//! - no io_uring; runtimes that probe for it continue without it.
//! - no resources with one host-wide limit, as if the kernel were built without them: asynchronous I/O
//!   (`io_setup` counts against `fs.aio-max-nr`), huge pages, and programs for the kernel's packet filter, whose
//!   machine code counts against `net.core.bpf_jit_limit`; when that is exhausted, no sandbox can be started.
//! - socket options: an allow-list of its own, in `options`, because many take memory that no control group is charged for.
//! - sockets: UNIX, INET, INET6, and of NETLINK only route and sock_diag. For other families, types and protocols the kernel
//!   would load modules, and not all report how much memory they hold.
//! - no requests (`ioctl`) for which the kernel loads a module by itself: line disciplines of terminals, bridges and VLANs.
//! - no `sched_setattr`, because the slice length is in memory that a filter cannot read: long slices,
//!   which no limit of processor time prevents, stall other sandboxes. `sched_setscheduler` covers the rest.
//! - the workload cannot change the scheduling of process 1, the agent.
//! - no calls of 32-bit programs (i386, x32, 32-bit ARM): their numbers mean other calls.
//! - allowed although they look dangerous, because each only gives what a process can have otherwise: `name_to_handle_at`
//!   (`open_by_handle_at`, which would use the result, is refused), `pidfd_getfd` and `process_madvise` (require the right
//!   to trace the process, which nobody has over the agent; allocators use the latter on their own memory), and raw sockets
//!   of INET (root only, like `ping`; what they receive is measured and bounded, see `sockets`).
//!
//! What is refused has an error that a kernel gives for the same arguments; `checks` has the table of all of them and says
//! where that is not possible. A call that is on no list is absent: ENOSYS, for which programs have a way to do without.
//!
//! `no_new_privs` stays off on purpose: `sudo` must work inside, where it only leads to the sandbox's own root.

mod calls;
mod checks;
mod data;
mod options;
mod steps;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use libc::{c_long, sock_filter};

use self::steps::{Answer, Step, cover, decide};

/// The architecture whose numbers the lists have, as the kernel names it: `AUDIT_ARCH_X86_64` of linux/audit.h.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
/// The architecture whose numbers the lists have, as the kernel names it: `AUDIT_ARCH_AARCH64` of linux/audit.h.
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "the filter of system calls needs ARCHITECTURE here, and ALLOWED_HERE in calls.rs, for this architecture"
);

fn number(call: c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

/// The filter program. A launcher builds it before its first sandbox, so that no child has to.
pub(crate) static PROGRAM: LazyLock<Vec<sock_filter>> = LazyLock::new(program);

/// Builds the filter.
///
/// Calls that are always allowed cost nothing on current kernels, which cache them in a bitmap (5.11+). The others are
/// found in nine comparisons or fewer.
fn program() -> Vec<sock_filter> {
    use Answer::{Allow, Errno};
    use Step::{Load, Return, SkipIfEqual};
    let absent = vec![Return(Errno(libc::ENOSYS))];
    let mut checks: BTreeMap<u32, Vec<Step>> = BTreeMap::new();
    for (call, steps) in checks::all() {
        checks.insert(number(call), steps);
    }
    for &call in calls::ALLOWED.iter().chain(calls::ALLOWED_HERE) {
        checks.insert(number(call), vec![Return(Allow)]);
    }
    for &call in calls::PRIVILEGED {
        checks.insert(number(call), vec![Return(Errno(libc::EPERM))]);
    }
    let ranges = cover(checks, &absent);
    let mut steps = vec![
        Load(data::ARCH),
        SkipIfEqual(ARCHITECTURE, 1),
        Return(Errno(libc::ENOSYS)),
        Load(data::NUMBER),
    ];
    steps.extend(decide(&ranges));
    steps.into_iter().map(Step::instruction).collect()
}

#[cfg(test)]
mod tests;
