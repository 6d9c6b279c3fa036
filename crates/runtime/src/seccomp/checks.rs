//! The system calls whose arguments the filter looks at.
//!
//! Whatever the filter refuses, its answer is one that a kernel gives for the same arguments. Programs find out by it what
//! there is: they call with arguments that no kernel accepts and expect the error for invalid ones, and they have a way to do
//! without only where the error is one that they know. So where the kernel would have refused the arguments before it looked
//! at what the filter is about, it does so itself, or the filter answers the same.
//!
//! | Call | Refused | Answer | The kernel that answers this |
//! |---|---|---|---|
//! | `mmap` | anonymous huge pages | ENOMEM | has none free. A size, kind or length that no kernel accepts: EINVAL |
//! | `memfd_create` | huge pages | ENOMEM | the same. Unknown flags: EINVAL; a size that it does not have: ENODEV |
//! | `shmget` | a new segment of huge pages | ENOMEM | the same. An invalid size: EINVAL |
//! | `clone` | namespaces | EPERM | any, without privileges. Flags that exclude each other: EINVAL |
//! | `unshare` | the same | EPERM | the same. Unknown flags: EINVAL |
//! | `clone3` | everything | ENOSYS | before 5.3 |
//! | `socket`, `socketpair` | families | EAFNOSUPPORT | was built without them. Unknown flags and types: EINVAL |
//! | | protocols of INET and NETLINK | EPROTONOSUPPORT | the same. Beyond the last protocol: EINVAL |
//! | | types of INET and NETLINK | ESOCKTNOSUPPORT | the same |
//! | `setsockopt`, `getsockopt` | options | ENOPROTOOPT | does not have them. A negative length: EINVAL |
//! | | packet filters | EPERM | the socket's filter is locked (`SO_LOCK_FILTER`) |
//! | `ioctl` | bridges, VLANs | ENOPKG | was built without them |
//! | | `TIOCSETD` | EPERM | with `dev.tty.ldisc_autoload = 0` |
//! | `prctl`, `seccomp` | filters | EINVAL | was built without them |
//! | `sched_set*`, `setpriority`, `ioprio_set` | for the agent | EPERM | any, for a process of another user |
//! | `perf_event_open` | everything | EACCES | with `kernel.perf_event_paranoid` above 1. Unknown flags: EINVAL |
//! | `clock_settime` | everything | EPERM | any, without privileges. Clocks that nobody sets: EINVAL |
//! | `personality` | all but harmless bits | EPERM | none: no kernel refuses one, but container runtimes do |
//! | asynchronous I/O, io_uring, NUMA policies, keys, fanotify, quotas, `modify_ldt`, I/O ports, `memfd_secret` | everything | ENOSYS | was built without them |
//! | calls for mounts since 5.2, calls that no kernel has any more, calls newer than `calls` | everything | ENOSYS | is older, or newer |
//! | `calls::PRIVILEGED` | everything | EPERM | any, without privileges |
//!
//! What remains different: the filter sees numbers, not what is in memory or behind a descriptor. So EBADF, ENOTSOCK, EFAULT and
//! ENOENT come after its answers and not before them, `adjtimex` cannot be told from its reading form, and `setsockopt` knows
//! no type of socket. The suite `escape` compares its answers for invalid arguments with those of the host's kernel.

use libc::{c_int, c_long};

use super::steps::Answer::{Allow, Errno};
use super::steps::Step::{self, Load, Mask, Return};
use super::steps::{cover, decide};
use super::{data, options};

/// The agent's pid inside.
const AGENT: u32 = 1;
/// `IOPRIO_WHO_PROCESS` and `IOPRIO_WHO_USER` of linux/ioprio.h.
const IOPRIO_WHO_PROCESS: c_int = 1;
const IOPRIO_WHO_USER: c_int = 3;
/// `SOCK_TYPE_MASK` and `SOCK_MAX` of linux/net.h: the rest of a socket's type are flags.
const SOCKET_TYPE: u32 = 0xf;
const SOCKET_TYPES: u32 = 11;
/// `SOCK_PACKET`: with the family INET, the kernel makes a packet socket of it.
const SOCK_PACKET: c_int = 10;
/// `AF_MAX`.
const FAMILIES: u32 = 46;
/// `IPPROTO_MAX`.
const PROTOCOLS: u32 = 263;

/// Namespaces that `clone` and `unshare` may not create, by their flags.
const NAMESPACES: c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;
/// What else `unshare` takes: only what a new thread may have of its own anyway.
const SHARED: c_int = libc::CLONE_FILES
    | libc::CLONE_FS
    | libc::CLONE_SYSVSEM
    | libc::CLONE_THREAD
    | libc::CLONE_SIGHAND
    | libc::CLONE_VM;

/// `MFD_CLOEXEC`, `MFD_ALLOW_SEALING`, `MFD_HUGETLB`, `MFD_NOEXEC_SEAL` and `MFD_EXEC`.
const MEMFD_FLAGS: u32 = 0x1f;
/// Flags of `memfd_create` about executable files, of which the last two exclude each other.
const MEMFD_EXEC: u32 = 0x18;
/// Where `mmap`, `memfd_create` and `shmget` have the size of huge pages, as the power of two.
const HUGE_SHIFT: u32 = 26;
const HUGE_MASK: u32 = 0x3f << HUGE_SHIFT;
/// The default, 2 MiB and 1 GiB.
const HUGE_SIZES: [u32; 3] = [0, 21 << HUGE_SHIFT, 30 << HUGE_SHIFT];

/// `PERF_FLAG_*`.
const PERF_FLAGS: u32 = 0xf;
/// `PER_LINUX32`, `UNAME26` and `ADDR_NO_RANDOMIZE`: only what `uname` says and how addresses are laid out.
const PERSONALITIES: u32 = 0x0008 | 0x0002_0000 | 0x0004_0000;

/// A request (`ioctl`) for which the kernel loads the module of a line discipline of a number chosen inside, whoever asks.
pub(super) const TIOCSETD: u32 = 0x5423;
/// Requests for which the kernel loads the module of bridges (`SIOCGIFBR`, `SIOCSIFBR`, `SIOCBRADDBR`, `SIOCBRDELBR`)
/// or that of VLANs (`SIOCGIFVLAN`, `SIOCSIFVLAN`).
pub(super) const MODULE_REQUESTS: [u32; 6] = [0x8940, 0x8941, 0x89a0, 0x89a1, 0x8982, 0x8983];

/// All calls that are checked, with their steps.
pub(super) fn all() -> Vec<(c_long, Vec<Step>)> {
    let mut all = vec![
        (libc::SYS_mmap, huge_mapping()),
        (libc::SYS_memfd_create, huge_file()),
        (libc::SYS_shmget, huge_segment()),
        (libc::SYS_setsockopt, options::setting()),
        (libc::SYS_getsockopt, options::reading().to_vec()),
        (libc::SYS_ioctl, request()),
        (libc::SYS_clone, clone()),
        (libc::SYS_unshare, unshare()),
        (libc::SYS_socket, socket()),
        (libc::SYS_socketpair, socket()),
        (libc::SYS_personality, personality()),
        (
            libc::SYS_setpriority,
            priority(libc::PRIO_PROCESS.cast_signed(), libc::PRIO_USER.cast_signed()),
        ),
        (libc::SYS_ioprio_set, priority(IOPRIO_WHO_PROCESS, IOPRIO_WHO_USER)),
        (
            libc::SYS_perf_event_open,
            [
                vec![Load(data::argument(4))],
                if_any_bit(!PERF_FLAGS, &[refuse(libc::EINVAL)]),
                vec![refuse(libc::EACCES)],
            ]
            .concat(),
        ),
        (
            libc::SYS_clock_settime,
            [
                vec![Load(data::argument(0))],
                if_equal(libc::CLOCK_REALTIME, &[refuse(libc::EPERM)]),
                vec![refuse(libc::EINVAL)],
            ]
            .concat(),
        ),
        (
            libc::SYS_prctl,
            [
                vec![Load(data::argument(0))],
                unless_equal(libc::PR_SET_SECCOMP, &[Return(Allow)]),
                vec![Load(data::argument(1))],
                if_equal(libc::SECCOMP_MODE_FILTER.cast_signed(), &[refuse(libc::EINVAL)]),
                vec![Return(Allow)],
            ]
            .concat(),
        ),
        (
            libc::SYS_seccomp,
            [
                vec![Load(data::argument(0))],
                if_equal(libc::SECCOMP_SET_MODE_FILTER.cast_signed(), &[refuse(libc::EINVAL)]),
                vec![Return(Allow)],
            ]
            .concat(),
        ),
    ];
    for call in [
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setscheduler,
    ] {
        let steps = [
            vec![Load(data::argument(0))],
            if_equal(AGENT.cast_signed(), &[refuse(libc::EPERM)]),
            vec![Return(Allow)],
        ];
        all.push((call, steps.concat()));
    }
    all
}

fn huge_mapping() -> Vec<Step> {
    const KIND: u32 = 0xf;
    [
        vec![Load(data::argument(3))],
        unless_any_bit(libc::MAP_HUGETLB.cast_unsigned(), &[Return(Allow)]),
        // Of a file: EBADF or EINVAL, because no file of huge pages can be open.
        unless_any_bit(libc::MAP_ANONYMOUS.cast_unsigned(), &[Return(Allow)]),
        vec![Mask(KIND)],
        among(
            &[libc::MAP_SHARED, libc::MAP_PRIVATE, libc::MAP_SHARED_VALIDATE].map(c_int::cast_unsigned),
            libc::EINVAL,
        ),
        huge_size(3, libc::EINVAL),
        unless_empty(1),
    ]
    .concat()
}

fn huge_file() -> Vec<Step> {
    [
        vec![Load(data::argument(1))],
        unless_any_bit(libc::MFD_HUGETLB, &[Return(Allow)]),
        if_any_bit(!(MEMFD_FLAGS | HUGE_MASK), &[refuse(libc::EINVAL)]),
        exclusive(1, MEMFD_EXEC),
        huge_size(1, libc::ENODEV),
        vec![refuse(libc::ENOMEM)],
    ]
    .concat()
}

fn huge_segment() -> Vec<Step> {
    let existing = [
        vec![Load(data::argument(0))],
        unless_equal(libc::IPC_PRIVATE, &[Return(Allow)]),
    ];
    [
        vec![Load(data::argument(2))],
        unless_any_bit(libc::SHM_HUGETLB.cast_unsigned(), &[Return(Allow)]),
        unless_any_bit(libc::IPC_CREAT.cast_unsigned(), &existing.concat()),
        huge_size(2, libc::EINVAL),
        unless_empty(1),
    ]
    .concat()
}

/// Refuses a size of huge pages that the kernel does not have with this error.
fn huge_size(flags: u32, unknown: c_int) -> Vec<Step> {
    [
        vec![Load(data::argument(flags)), Mask(HUGE_MASK)],
        among(&HUGE_SIZES, unknown),
    ]
    .concat()
}

/// Ends with ENOMEM, but with EINVAL where the length in this argument is 0.
fn unless_empty(length: u32) -> Vec<Step> {
    [
        vec![Load(data::argument(length))],
        unless_equal(0, &[refuse(libc::ENOMEM)]),
        vec![Load(data::high(length))],
        unless_equal(0, &[refuse(libc::ENOMEM)]),
        vec![refuse(libc::EINVAL)],
    ]
    .concat()
}

fn request() -> Vec<Step> {
    let modules = MODULE_REQUESTS.map(|request| (request, vec![refuse(libc::ENOPKG)]));
    let requests = modules.into_iter().chain([(TIOCSETD, vec![refuse(libc::EPERM)])]);
    let mut steps = vec![Load(data::argument(1))];
    steps.extend(decide(&cover(requests.collect(), &[Return(Allow)])));
    steps
}

fn clone() -> Vec<Step> {
    let bits = |flags: c_int| flags.cast_unsigned();
    let invalid = [refuse(libc::EINVAL)];
    [
        vec![Load(data::argument(0))],
        unless_any_bit(bits(NAMESPACES), &[Return(Allow)]),
        if_any_bit(
            bits(libc::CLONE_SIGHAND),
            &unless_any_bit(bits(libc::CLONE_VM), &invalid),
        ),
        if_any_bit(
            bits(libc::CLONE_THREAD),
            &[
                unless_any_bit(bits(libc::CLONE_SIGHAND), &invalid),
                if_any_bit(bits(libc::CLONE_NEWUSER | libc::CLONE_NEWPID), &invalid),
            ]
            .concat(),
        ),
        if_any_bit(
            bits(libc::CLONE_FS),
            &if_any_bit(bits(libc::CLONE_NEWNS | libc::CLONE_NEWUSER), &invalid),
        ),
        if_any_bit(
            bits(libc::CLONE_PIDFD),
            &if_any_bit(bits(libc::CLONE_DETACHED | libc::CLONE_PARENT_SETTID), &invalid),
        ),
        vec![refuse(libc::EPERM)],
    ]
    .concat()
}

fn unshare() -> Vec<Step> {
    let namespaces = (NAMESPACES | libc::CLONE_NEWTIME).cast_unsigned();
    [
        vec![Load(data::argument(0))],
        if_any_bit(!(namespaces | SHARED.cast_unsigned()), &[refuse(libc::EINVAL)]),
        if_any_bit(namespaces, &[refuse(libc::EPERM)]),
        vec![Return(Allow)],
    ]
    .concat()
}

fn socket() -> Vec<Step> {
    let flags = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK).cast_unsigned() | SOCKET_TYPE;
    let kind = || vec![Load(data::argument(1)), Mask(SOCKET_TYPE)];
    let protocols = |of_kernel: &[c_int]| {
        let of_kernel: Vec<u32> = of_kernel.iter().map(|protocol| protocol.cast_unsigned()).collect();
        [
            vec![Load(data::argument(2))],
            among(&of_kernel, libc::EPROTONOSUPPORT),
            vec![Return(Allow)],
        ]
        .concat()
    };
    // For every other pair of a type and a protocol the kernel looks for modules, on behalf of anybody.
    let internet = |echo: c_int| {
        [
            kind(),
            // A raw socket may use any protocol, and no module is loaded for it.
            if_equal(libc::SOCK_RAW, &[Return(Allow)]),
            vec![Load(data::argument(2))],
            if_at_least(PROTOCOLS, &[refuse(libc::EINVAL)]),
            kind(),
            if_equal(libc::SOCK_STREAM, &protocols(&[0, libc::IPPROTO_TCP])),
            among(&[libc::SOCK_DGRAM.cast_unsigned()], libc::ESOCKTNOSUPPORT),
            protocols(&[0, libc::IPPROTO_UDP, echo]),
        ]
        .concat()
    };
    let netlink = [
        kind(),
        among(
            &[libc::SOCK_RAW, libc::SOCK_DGRAM].map(c_int::cast_unsigned),
            libc::ESOCKTNOSUPPORT,
        ),
        vec![Load(data::argument(2))],
        among(
            &[libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG].map(c_int::cast_unsigned),
            libc::EPROTONOSUPPORT,
        ),
        vec![Return(Allow)],
    ]
    .concat();
    [
        vec![Load(data::argument(1))],
        if_any_bit(!flags, &[refuse(libc::EINVAL)]),
        vec![Load(data::argument(0))],
        if_equal(libc::AF_UNIX, &[Return(Allow)]),
        // Negative ones as well.
        if_at_least(FAMILIES, &[refuse(libc::EAFNOSUPPORT)]),
        kind(),
        if_at_least(SOCKET_TYPES, &[refuse(libc::EINVAL)]),
        if_equal(
            SOCK_PACKET,
            &[
                vec![Load(data::argument(0))],
                if_equal(libc::AF_INET, &[refuse(libc::EAFNOSUPPORT)]),
            ]
            .concat(),
        ),
        vec![Load(data::argument(0))],
        if_equal(libc::AF_INET, &internet(libc::IPPROTO_ICMP)),
        if_equal(libc::AF_INET6, &internet(libc::IPPROTO_ICMPV6)),
        if_equal(libc::AF_NETLINK, &netlink),
        vec![refuse(libc::EAFNOSUPPORT)],
    ]
    .concat()
}

/// By process, by group, or for all processes of a user, the agent among root's.
fn priority(process: c_int, user: c_int) -> Vec<Step> {
    let kinds: Vec<u32> = (process..=user).map(c_int::cast_unsigned).collect();
    [
        vec![Load(data::argument(0))],
        among(&kinds, libc::EINVAL),
        if_equal(user, &[refuse(libc::EPERM)]),
        vec![Load(data::argument(1))],
        if_equal(AGENT.cast_signed(), &[refuse(libc::EPERM)]),
        vec![Return(Allow)],
    ]
    .concat()
}

fn personality() -> Vec<Step> {
    [
        vec![Load(data::argument(0))],
        // Only asks.
        if_equal(-1, &[Return(Allow)]),
        if_any_bit(!PERSONALITIES, &[refuse(libc::EPERM)]),
        vec![Return(Allow)],
    ]
    .concat()
}

fn refuse(errno: c_int) -> Step {
    Return(Errno(errno))
}

/// Refuses an argument that has all of these bits.
fn exclusive(argument: u32, bits: u32) -> Vec<Step> {
    [
        vec![Load(data::argument(argument)), Mask(bits)],
        if_equal(bits.cast_signed(), &[refuse(libc::EINVAL)]),
    ]
    .concat()
}

/// Continues when the accumulator is one of these values, and otherwise refuses the call with this error.
fn among(values: &[u32], otherwise: c_int) -> Vec<Step> {
    let skips = values
        .iter()
        .rev()
        .zip(1..)
        .map(|(value, skip)| Step::SkipIfEqual(*value, skip));
    let mut steps: Vec<Step> = skips.collect();
    steps.reverse();
    steps.push(refuse(otherwise));
    steps
}

fn if_equal(value: c_int, then: &[Step]) -> Vec<Step> {
    before(Step::IfEqualElseSkip(value.cast_unsigned(), length(then)), then)
}

fn unless_equal(value: c_int, then: &[Step]) -> Vec<Step> {
    before(Step::SkipIfEqual(value.cast_unsigned(), length(then)), then)
}

fn if_at_least(value: u32, then: &[Step]) -> Vec<Step> {
    before(Step::IfAtLeastElseSkip(value, length(then)), then)
}

fn if_any_bit(bits: u32, then: &[Step]) -> Vec<Step> {
    before(Step::IfAnyBitElseSkip(bits, length(then)), then)
}

fn unless_any_bit(bits: u32, then: &[Step]) -> Vec<Step> {
    before(Step::SkipIfAnyBit(bits, length(then)), then)
}

fn before(condition: Step, then: &[Step]) -> Vec<Step> {
    [&[condition], then].concat()
}

/// A jump that is too long fails the tests, which build the filter.
fn length(then: &[Step]) -> u8 {
    u8::try_from(then.len()).unwrap_or_default()
}
