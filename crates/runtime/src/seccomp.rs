//! The system-call filter of sandboxes.
//!
//! An allow-list: calls that are not on it are rejected. It applies to the agent, the spawner and everything they
//! start, and cannot be removed. The kernel is the security boundary of the container driver, so the list has what
//! ordinary programs need and no more:
//!
//! - `clone3` returns ENOSYS, because its flags are in memory that a filter cannot read; every libc then falls back to
//!   `clone`, whose flags are checked: no new namespaces of any kind.
//! - `io_uring_*` return ENOSYS, so that runtimes which probe for it continue without it.
//! - resources with one host-wide limit are rejected as if the kernel were built without them: asynchronous I/O
//!   (`io_setup` counts against `fs.aio-max-nr`), huge pages, and programs for the kernel's packet filter, whose
//!   machine code counts against `net.core.bpf_jit_limit`; when that is exhausted, no sandbox can be started.
//! - socket options: an allow-list of its own, in `options`, because many take memory that no control group is charged for.
//! - sockets: UNIX, INET, INET6, and of NETLINK only route and sock_diag. Other families return EAFNOSUPPORT, and
//!   protocols other than TCP, UDP and ICMP EPROTONOSUPPORT: the kernel would load modules for some, and not all report
//!   how much memory they hold.
//! - requests (`ioctl`) for which the kernel loads a module by itself: line disciplines of terminals, bridges and VLANs.
//! - `sched_setattr` returns ENOSYS, because the slice length is in memory that a filter cannot read: long slices,
//!   which no limit of processor time prevents, stall other sandboxes. `sched_setscheduler` covers the rest.
//! - the workload cannot change the scheduling of process 1, the agent.
//! - i386 and x32 calls return ENOSYS: their numbers mean other calls.
//! - allowed although they look dangerous, because each only gives what a process can have otherwise: `name_to_handle_at`
//!   (`open_by_handle_at`, which would use the result, is refused), `pidfd_getfd` and `process_madvise` (require the right
//!   to trace the process, which nobody has over the agent; allocators use the latter on their own memory), and raw sockets
//!   of INET (root only, like `ping`; what they receive is measured and bounded, see `sockets`).
//! - calls newer than this list return ENOSYS, older ones that are not on it EPERM, as container runtimes do.
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

/// Namespaces that `clone` and `unshare` may not create, by their flags. `CLONE_NEWTIME` shares its bit with the exit
/// signal mask of `clone` and only matters for `unshare`, which is not on the list at all.
const NAMESPACE_FLAGS: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET)
    .cast_unsigned();

/// The highest call number this list was written against (`mseal`); anything above is newer than it.
const NEWEST: c_long = 462;

/// Calls that are allowed with any arguments.
const ALLOWED: &[c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_arch_prctl,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_chdir,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_chroot,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_creat,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_epoll_create,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_eventfd2,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_flock,
    libc::SYS_fork,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_futimesat,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getdents,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpeername,
    libc::SYS_getpgid,
    libc::SYS_getpgrp,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrlimit,
    libc::SYS_get_robust_list,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_getsockname,
    libc::SYS_get_thread_area,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_ioprio_get,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_lchown,
    libc::SYS_lgetxattr,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lseek,
    libc::SYS_lsetxattr,
    libc::SYS_lstat,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mprotect,
    libc::SYS_mq_getsetattr,
    libc::SYS_mq_notify,
    libc::SYS_mq_open,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_unlink,
    libc::SYS_mremap,
    libc::SYS_msgctl,
    libc::SYS_msgget,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
    libc::SYS_name_to_handle_at,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pause,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe,
    libc::SYS_pipe2,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_prlimit64,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pselect6,
    libc::SYS_ptrace,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_remap_file_pages,
    libc::SYS_removexattr,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rmdir,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_sched_yield,
    libc::SYS_select,
    libc::SYS_semctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_sendfile,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setitimer,
    libc::SYS_setpgid,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setrlimit,
    libc::SYS_set_robust_list,
    libc::SYS_setsid,
    libc::SYS_set_thread_area,
    libc::SYS_set_tid_address,
    libc::SYS_setuid,
    libc::SYS_setxattr,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd,
    libc::SYS_signalfd4,
    libc::SYS_splice,
    libc::SYS_stat,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_sync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_sysinfo,
    libc::SYS_tee,
    libc::SYS_tgkill,
    libc::SYS_time,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_times,
    libc::SYS_tkill,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_utime,
    libc::SYS_utimensat,
    libc::SYS_utimes,
    libc::SYS_vfork,
    libc::SYS_vmsplice,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_write,
    libc::SYS_writev,
    FUTEX_WAKE,
    FUTEX_WAIT,
    FUTEX_REQUEUE,
    MAP_SHADOW_STACK,
    MSEAL,
];

// Calls that the libc crate does not name yet (arch/x86/entry/syscalls/syscall_64.tbl).
const IO_PGETEVENTS: c_long = 333;
const FCHMODAT2: c_long = 452;
const MAP_SHADOW_STACK: c_long = 453;
const FUTEX_WAKE: c_long = 454;
const FUTEX_WAIT: c_long = 455;
const FUTEX_REQUEUE: c_long = 456;
const MSEAL: c_long = 462;

/// Calls that runtimes probe for and can do without.
const ABSENT: &[c_long] = &[
    libc::SYS_clone3,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    IO_PGETEVENTS,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_sched_setattr,
];

/// Requests (`ioctl`) for which the kernel loads a module, whoever asks: `TIOCSETD`, for the line discipline of a number
/// chosen inside; those for bridges (`SIOCGIFBR`, `SIOCSIFBR`, `SIOCBRADDBR`, `SIOCBRDELBR`) and for VLANs (`SIOCGIFVLAN`,
/// `SIOCSIFVLAN`). They return EPERM, as for everybody but administrators of a network.
const MODULE_REQUESTS: [u32; 7] = [0x5423, 0x8940, 0x8941, 0x89a0, 0x89a1, 0x8982, 0x8983];

/// The agent's pid inside.
const AGENT: u32 = 1;
/// `IOPRIO_WHO_USER` of linux/ioprio.h.
const IOPRIO_WHO_USER: u32 = 3;
/// `SOCK_TYPE_MASK` of linux/net.h: the rest of a socket's type are flags.
const SOCKET_TYPE: u32 = 0xf;

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCH_X86_64: u32 = 0xC000_003E;

/// Offsets into `struct seccomp_data`.
mod data {
    pub(super) const NUMBER: u32 = 0;
    pub(super) const ARCH: u32 = 4;

    /// Offset of the low half of an argument. The high half is ignored: every argument that is checked is an `int` to
    /// the kernel.
    pub(super) const fn argument(index: u32) -> u32 {
        16 + index * 8
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
/// found in eight comparisons or fewer.
fn program() -> Vec<sock_filter> {
    use Answer::{Allow, Errno};
    use Step::{IfAnyBitElseSkip, IfEqualElseSkip, Load, Mask, Return, SkipIfEqual};
    let mut checks: BTreeMap<u32, Vec<Step>> = BTreeMap::new();
    let mut when = |call: c_long, then: &[Step]| {
        checks.insert(number(call), then.to_vec());
    };
    // Huge pages: charged to a separate controller, which hosts rarely enable.
    for (call, flags, bit) in [
        (libc::SYS_mmap, 3, libc::MAP_HUGETLB),
        (libc::SYS_memfd_create, 1, libc::MFD_HUGETLB.cast_signed()),
        (libc::SYS_shmget, 2, libc::SHM_HUGETLB),
    ] {
        when(
            call,
            &[
                Load(data::argument(flags)),
                IfAnyBitElseSkip(bit.cast_unsigned(), 1),
                Return(Errno(libc::ENOMEM)),
                Return(Allow),
            ],
        );
    }
    when(libc::SYS_setsockopt, &options::setting());
    when(libc::SYS_getsockopt, &options::reading());
    let mut requests: BTreeMap<u32, Vec<Step>> = BTreeMap::new();
    for request in MODULE_REQUESTS {
        requests.insert(request, vec![Return(Errno(libc::EPERM))]);
    }
    let mut request = vec![Load(data::argument(1))];
    request.extend(decide(&cover(requests, &[Return(Allow)])));
    when(libc::SYS_ioctl, &request);
    // The same error as from a kernel without filters, which programs that would confine themselves further handle.
    when(
        libc::SYS_prctl,
        &[
            Load(data::argument(0)),
            IfEqualElseSkip(libc::PR_SET_SECCOMP.cast_unsigned(), 3),
            Load(data::argument(1)),
            IfEqualElseSkip(libc::SECCOMP_MODE_FILTER, 1),
            Return(Errno(libc::EINVAL)),
            Return(Allow),
        ],
    );
    when(
        libc::SYS_seccomp,
        &[
            Load(data::argument(0)),
            IfEqualElseSkip(libc::SECCOMP_SET_MODE_FILTER, 1),
            Return(Errno(libc::EINVAL)),
            Return(Allow),
        ],
    );
    for call in [
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setscheduler,
    ] {
        when(
            call,
            &[
                Load(data::argument(0)),
                IfEqualElseSkip(AGENT, 1),
                Return(Errno(libc::EPERM)),
                Return(Allow),
            ],
        );
    }
    // By process, by group, or for all processes of a user, the agent among root's.
    for (call, user) in [
        (libc::SYS_setpriority, libc::PRIO_USER),
        (libc::SYS_ioprio_set, IOPRIO_WHO_USER),
    ] {
        when(
            call,
            &[
                Load(data::argument(0)),
                SkipIfEqual(user, 2),
                Load(data::argument(1)),
                IfEqualElseSkip(AGENT, 1),
                Return(Errno(libc::EPERM)),
                Return(Allow),
            ],
        );
    }
    when(
        libc::SYS_clone,
        &[
            Load(data::argument(0)),
            IfAnyBitElseSkip(NAMESPACE_FLAGS, 1),
            Return(Errno(libc::EPERM)),
            Return(Allow),
        ],
    );
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        let family = |family: libc::c_int, n: u8| IfEqualElseSkip(family.cast_unsigned(), n);
        let protocol = |protocol: libc::c_int, n: u8| SkipIfEqual(protocol.cast_unsigned(), n);
        when(
            call,
            &[
                Load(data::argument(0)),
                family(libc::AF_UNIX, 1),
                Return(Allow),
                SkipIfEqual(libc::AF_INET.cast_unsigned(), 1),
                family(libc::AF_INET6, 12),
                // A raw socket may use any protocol, and no module is loaded for it.
                Load(data::argument(1)),
                Mask(SOCKET_TYPE),
                IfEqualElseSkip(libc::SOCK_RAW.cast_unsigned(), 1),
                Return(Allow),
                Load(data::argument(2)),
                protocol(0, 5),
                protocol(libc::IPPROTO_TCP, 4),
                protocol(libc::IPPROTO_UDP, 3),
                protocol(libc::IPPROTO_ICMP, 2),
                protocol(libc::IPPROTO_ICMPV6, 1),
                Return(Errno(libc::EPROTONOSUPPORT)),
                Return(Allow),
                family(libc::AF_NETLINK, 6),
                Load(data::argument(2)),
                IfEqualElseSkip(libc::NETLINK_ROUTE.cast_unsigned(), 1),
                Return(Allow),
                IfEqualElseSkip(libc::NETLINK_SOCK_DIAG.cast_unsigned(), 1),
                Return(Allow),
                Return(Errno(libc::EPROTONOSUPPORT)),
                Return(Errno(libc::EAFNOSUPPORT)),
            ],
        );
    }
    // Personalities that only change what `uname` says or how addresses are laid out.
    when(
        libc::SYS_personality,
        &[
            Load(data::argument(0)),
            IfEqualElseSkip(0, 1),
            Return(Allow),
            IfEqualElseSkip(0x0008, 1),
            Return(Allow),
            IfEqualElseSkip(0x0002_0000, 1),
            Return(Allow),
            IfEqualElseSkip(0x0004_0000, 1),
            Return(Allow),
            IfEqualElseSkip(u32::MAX, 1),
            Return(Allow),
            Return(Errno(libc::EPERM)),
        ],
    );
    for &call in ALLOWED {
        when(call, &[Return(Allow)]);
    }
    let enosys = vec![Return(Errno(libc::ENOSYS))];
    for &call in ABSENT {
        when(call, &enosys);
    }
    // Covers every number: calls added to the kernel after this list, and those of x32, are above it.
    for number in 0..=number(NEWEST) {
        let refused = || vec![Return(Errno(libc::EPERM))];
        checks.entry(number).or_insert_with(refused);
    }
    let ranges = cover(checks, &enosys);
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

mod options;
#[cfg(test)]
mod tests;
