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
//! - no i386 and x32 calls: their numbers mean other calls.
//! - allowed although they look dangerous, because each only gives what a process can have otherwise: `name_to_handle_at`
//!   (`open_by_handle_at`, which would use the result, is refused), `pidfd_getfd` and `process_madvise` (require the right
//!   to trace the process, which nobody has over the agent; allocators use the latter on their own memory), and raw sockets
//!   of INET (root only, like `ping`; what they receive is measured and bounded, see `sockets`).
//!
//! What is refused has an error that a kernel gives for the same arguments; `checks` has the table of all of them and says
//! where that is not possible. A call that is on no list is absent: ENOSYS, for which programs have a way to do without.
//!
//! `no_new_privs` stays off on purpose: `sudo` must work inside, where it only leads to the sandbox's own root.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use libc::{c_long, sock_filter};

/// Result of the filter for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Allow,
    Errno(i32),
}

impl Answer {
    fn code(self) -> u32 {
        match self {
            Self::Allow => libc::SECCOMP_RET_ALLOW,
            Self::Errno(errno) => libc::SECCOMP_RET_ERRNO | (errno.cast_unsigned() & libc::SECCOMP_RET_DATA),
        }
    }
}

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCH_X86_64: u32 = 0xC000_003E;

/// Offsets into `struct seccomp_data`.
mod data {
    pub(super) const NUMBER: u32 = 0;
    pub(super) const ARCH: u32 = 4;

    /// Offset of the low half of an argument. The high half is ignored: every argument that is checked is an `int` to
    /// the kernel, but for lengths.
    pub(super) const fn argument(index: u32) -> u32 {
        16 + index * 8
    }

    /// Offset of the high half of an argument.
    pub(super) const fn high(index: u32) -> u32 {
        argument(index) + 4
    }
}

/// One instruction, or a jump target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Loads a word of the call's data into the accumulator.
    Load(u32),
    /// Continues when the accumulator equals the value, otherwise skips `n` steps.
    IfEqualElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator equals the value.
    SkipIfEqual(u32, u8),
    /// Continues when the accumulator is at least the value, otherwise skips `n` steps.
    IfAtLeastElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator is at least the value.
    SkipIfAtLeast(u32, u8),
    /// Continues when the accumulator shares a bit with the value, otherwise skips `n` steps.
    IfAnyBitElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator shares a bit with the value.
    SkipIfAnyBit(u32, u8),
    /// Skips `n` steps.
    Skip(u32),
    /// Keeps only these bits of the accumulator.
    Mask(u32),
    /// Ends the filter.
    Return(Answer),
}

impl Step {
    fn instruction(self) -> sock_filter {
        let jump = |code: u32, k: u32, jt: u8, jf: u8| filter(libc::BPF_JMP | code | libc::BPF_K, jt, jf, k);
        match self {
            Self::Load(offset) => filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset),
            Self::IfEqualElseSkip(value, n) => jump(libc::BPF_JEQ, value, 0, n),
            Self::SkipIfEqual(value, n) => jump(libc::BPF_JEQ, value, n, 0),
            Self::IfAtLeastElseSkip(value, n) => jump(libc::BPF_JGE, value, 0, n),
            Self::SkipIfAtLeast(value, n) => jump(libc::BPF_JGE, value, n, 0),
            Self::IfAnyBitElseSkip(value, n) => jump(libc::BPF_JSET, value, 0, n),
            Self::SkipIfAnyBit(value, n) => jump(libc::BPF_JSET, value, n, 0),
            Self::Skip(n) => filter(libc::BPF_JMP | libc::BPF_JA, 0, 0, n),
            Self::Mask(bits) => filter(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, bits),
            Self::Return(answer) => filter(libc::BPF_RET | libc::BPF_K, 0, 0, answer.code()),
        }
    }
}

fn filter(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: u16::try_from(code).unwrap_or(0),
        jt,
        jf,
        k,
    }
}

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
    for &call in calls::ALLOWED {
        checks.insert(number(call), vec![Return(Allow)]);
    }
    for &call in calls::PRIVILEGED {
        checks.insert(number(call), vec![Return(Errno(libc::EPERM))]);
    }
    let ranges = cover(checks, &absent);
    let mut steps = vec![
        Load(data::ARCH),
        SkipIfEqual(ARCH_X86_64, 1),
        Return(Errno(libc::ENOSYS)),
        Load(data::NUMBER),
    ];
    steps.extend(decide(&ranges));
    steps.into_iter().map(Step::instruction).collect()
}

/// The ranges of all values, each with its first value and what follows: `checks` for those in it, `otherwise` for the
/// rest.
fn cover(checks: BTreeMap<u32, Vec<Step>>, otherwise: &[Step]) -> Vec<(u32, Vec<Step>)> {
    let mut ranges: Vec<(u32, Vec<Step>)> = Vec::new();
    let mut add = |first, then: Vec<Step>| {
        if ranges.last().is_none_or(|(_, before)| *before != then) {
            ranges.push((first, then));
        }
    };
    let mut next = Some(0);
    for (value, then) in checks {
        if let Some(first) = next.filter(|first| *first < value) {
            add(first, otherwise.to_vec());
        }
        add(value, then);
        next = value.checked_add(1);
    }
    if let Some(first) = next {
        add(first, otherwise.to_vec());
    }
    ranges
}

/// Binary search for the range of a call's number, followed by its steps. The kernel runs the filter once for each
/// existing call when it is installed, which happens twice for a sandbox, so a linear search would cost each start a
/// quarter of a millisecond.
fn decide(ranges: &[(u32, Vec<Step>)]) -> Vec<Step> {
    let (below, from) = ranges.split_at(ranges.len() / 2);
    let Some((first, then)) = from.first() else {
        return Vec::new();
    };
    if below.is_empty() {
        return then.clone();
    }
    let (below, from) = (decide(below), decide(from));
    let mut steps = match u8::try_from(below.len()) {
        Ok(near) => vec![Step::SkipIfAtLeast(*first, near)],
        Err(_) => vec![
            Step::IfAtLeastElseSkip(*first, 1),
            Step::Skip(u32::try_from(below.len()).unwrap_or(u32::MAX)),
        ],
    };
    steps.extend(below);
    steps.extend(from);
    steps
}

mod calls;
mod checks;
mod options;
#[cfg(test)]
mod tests;
