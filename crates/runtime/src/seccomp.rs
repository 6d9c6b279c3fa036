//! The system calls that code in a sandbox may make.
//!
//! An allow-list: what is not named is refused. It runs for the agent, the spawner and everything they start, and
//! cannot be taken off. The kernel is the boundary of the container driver, so the list is what ordinary programs
//! need and no more:
//!
//! - `clone3` answers ENOSYS, because its flags lie in memory that a filter cannot see; every libc then falls back to
//!   `clone`, whose flags are checked: no new namespace of any kind.
//! - `io_uring_*` answer ENOSYS, so that runtimes which probe for it go on without.
//! - sockets: UNIX, INET, INET6, and of NETLINK only route and sock_diag. Other families answer EAFNOSUPPORT.
//! - i386 and x32 calls answer ENOSYS: the numbers would mean other calls.
//! - calls newer than this list answer ENOSYS, older ones that are not on it EPERM, as container runtimes do.
//!
//! `no_new_privs` stays off on purpose: `sudo` must work inside, where it only leads to the sandbox's own root.

use libc::{c_long, sock_filter};

/// What the filter answers.
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

/// Namespaces that `clone`, `unshare` may not make, by their flags. `CLONE_NEWTIME` shares its bit with the exit
/// signal mask of `clone` and is only seen by `unshare`, which is not on the list at all.
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

/// Calls that need no look at their arguments.
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
    libc::SYS_getsockopt,
    libc::SYS_get_thread_area,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_io_cancel,
    libc::SYS_ioctl,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    IO_PGETEVENTS,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
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
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mmap,
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
    libc::SYS_prctl,
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
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_seccomp,
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
    libc::SYS_setpriority,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setrlimit,
    libc::SYS_set_robust_list,
    libc::SYS_setsid,
    libc::SYS_setsockopt,
    libc::SYS_set_thread_area,
    libc::SYS_set_tid_address,
    libc::SYS_setuid,
    libc::SYS_setxattr,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_shmget,
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

/// Calls that a runtime probes for and does without.
const ABSENT: &[c_long] = &[
    libc::SYS_clone3,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCH_X86_64: u32 = 0xC000_003E;
/// Bit that marks a call of the x32 table.
const X32_BIT: u32 = 0x4000_0000;

/// Offsets into `struct seccomp_data`.
mod data {
    pub(super) const NUMBER: u32 = 0;
    pub(super) const ARCH: u32 = 4;

    /// Offset of the low half of an argument. The high half is not looked at: every argument that is checked is an
    /// `int` to the kernel.
    pub(super) const fn argument(index: u32) -> u32 {
        16 + index * 8
    }
}

/// One instruction, or a place to jump to.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Loads a word of the call's data into the accumulator.
    Load(u32),
    /// Goes on when the accumulator equals the value, else skips `n` steps.
    IfEqualElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator equals the value.
    SkipIfEqual(u32, u8),
    /// Goes on when the accumulator is at least the value, else skips `n` steps.
    IfAtLeastElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator is at least the value.
    SkipIfAtLeast(u32, u8),
    /// Goes on when the accumulator shares a bit with the value, else skips `n` steps.
    IfAnyBitElseSkip(u32, u8),
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

/// The runs of consecutive numbers in a set of calls: a third of the instructions of one comparison each, which the
/// kernel translates and keeps twice per sandbox.
fn runs(calls: &[c_long]) -> Vec<(u32, u32)> {
    let mut numbers: Vec<u32> = calls.iter().map(|call| number(*call)).collect();
    numbers.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if number <= *last + 1 => *last = number,
            _ => runs.push((number, number)),
        }
    }
    runs
}

/// The filter, ready to install.
///
/// Calls that are always allowed cost nothing on current kernels, which cache them in a bitmap (5.11+); the order
/// here matters only for the rest.
#[must_use]
pub fn program() -> Vec<sock_filter> {
    use Answer::{Allow, Errno};
    use Step::{IfAnyBitElseSkip, IfAtLeastElseSkip, IfEqualElseSkip, Load, Return, SkipIfAtLeast, SkipIfEqual};
    let enosys = Return(Errno(libc::ENOSYS));
    let mut steps = vec![
        Load(data::ARCH),
        SkipIfEqual(ARCH_X86_64, 1),
        enosys,
        Load(data::NUMBER),
        IfAtLeastElseSkip(X32_BIT, 1),
        enosys,
    ];
    for (first, last) in runs(ALLOWED) {
        steps.extend([IfAtLeastElseSkip(first, 2), SkipIfAtLeast(last + 1, 1), Return(Allow)]);
    }
    let mut when = |call: c_long, then: &[Step]| {
        steps.push(IfEqualElseSkip(
            number(call),
            u8::try_from(then.len()).unwrap_or(u8::MAX),
        ));
        steps.extend_from_slice(then);
    };
    for &call in ABSENT {
        when(call, &[enosys]);
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
        let family = |family: libc::c_int| IfEqualElseSkip(family.cast_unsigned(), 1);
        when(
            call,
            &[
                Load(data::argument(0)),
                family(libc::AF_UNIX),
                Return(Allow),
                family(libc::AF_INET),
                Return(Allow),
                family(libc::AF_INET6),
                Return(Allow),
                IfEqualElseSkip(libc::AF_NETLINK.cast_unsigned(), 6),
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
    steps.extend([
        IfAtLeastElseSkip(number(NEWEST) + 1, 1),
        enosys,
        Return(Errno(libc::EPERM)),
    ]);
    steps.into_iter().map(Step::instruction).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a filter answers to a call: a small interpreter of the instructions that [`Step`] makes.
    fn answer(arch: u32, number: u32, arguments: [u32; 3]) -> u32 {
        let program = program();
        let mut accumulator = 0;
        let mut at = 0;
        loop {
            let step = program[at];
            let skip = |yes: bool| usize::from(if yes { step.jt } else { step.jf });
            match u32::from(step.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    accumulator = match step.k {
                        data::NUMBER => number,
                        data::ARCH => arch,
                        offset => arguments[usize::try_from((offset - 16) / 8).unwrap()],
                    };
                }
                code if code == libc::BPF_JMP | libc::BPF_JEQ => at += skip(accumulator == step.k),
                code if code == libc::BPF_JMP | libc::BPF_JGE => at += skip(accumulator >= step.k),
                code if code == libc::BPF_JMP | libc::BPF_JSET => at += skip(accumulator & step.k != 0),
                code if code == libc::BPF_RET => return step.k,
                code => panic!("instruction {code:#x}"),
            }
            at += 1;
        }
    }

    fn check(call: c_long, arguments: [i32; 3], want: Answer) {
        let arguments = arguments.map(i32::cast_unsigned);
        assert_eq!(
            answer(ARCH_X86_64, number(call), arguments),
            want.code(),
            "call {call} {arguments:?}"
        );
    }

    #[test]
    fn calls_get_the_answer_that_the_header_promises() {
        use Answer::{Allow, Errno};
        for &call in ALLOWED {
            check(call, [0; 3], Allow);
        }
        for &call in ABSENT {
            check(call, [0; 3], Errno(libc::ENOSYS));
        }
        for call in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_kexec_load,
            libc::SYS_kexec_file_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_reboot,
            libc::SYS_syslog,
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_clock_adjtime,
            libc::SYS_adjtimex,
            libc::SYS_open_by_handle_at,
            libc::SYS_open_tree,
            libc::SYS_move_mount,
            libc::SYS_fsopen,
            libc::SYS_mount_setattr,
            libc::SYS_swapon,
            libc::SYS_acct,
            libc::SYS_iopl,
            libc::SYS_ioperm,
            libc::SYS_quotactl,
            libc::SYS_fanotify_init,
            libc::SYS_mbind,
            libc::SYS_move_pages,
        ] {
            check(call, [0; 3], Errno(libc::EPERM));
        }
        check(NEWEST + 1, [0; 3], Errno(libc::ENOSYS));
    }

    #[test]
    fn clone_makes_threads_and_processes_but_no_namespaces() {
        use Answer::{Allow, Errno};
        check(libc::SYS_clone, [libc::SIGCHLD, 0, 0], Allow);
        check(
            libc::SYS_clone,
            [libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND, 0, 0],
            Allow,
        );
        for flag in [
            libc::CLONE_NEWUSER,
            libc::CLONE_NEWNS,
            libc::CLONE_NEWPID,
            libc::CLONE_NEWNET,
            libc::CLONE_NEWIPC,
            libc::CLONE_NEWUTS,
            libc::CLONE_NEWCGROUP,
        ] {
            check(libc::SYS_clone, [flag | libc::SIGCHLD, 0, 0], Errno(libc::EPERM));
        }
    }

    #[test]
    fn sockets_are_of_the_families_that_programs_need() {
        use Answer::{Allow, Errno};
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6] {
                check(call, [family, libc::SOCK_STREAM, 0], Allow);
            }
            check(call, [libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE], Allow);
            check(call, [libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_SOCK_DIAG], Allow);
            check(
                call,
                [libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER],
                Errno(libc::EPROTONOSUPPORT),
            );
            check(
                call,
                [libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT],
                Errno(libc::EPROTONOSUPPORT),
            );
            for family in [
                libc::AF_PACKET,
                libc::AF_VSOCK,
                libc::AF_ALG,
                libc::AF_BLUETOOTH,
                libc::AF_XDP,
                0,
                -1,
            ] {
                check(call, [family, libc::SOCK_STREAM, 0], Errno(libc::EAFNOSUPPORT));
            }
        }
    }

    #[test]
    fn personalities_that_weaken_a_process_are_refused() {
        use Answer::{Allow, Errno};
        for persona in [0, 0x8, 0x2_0000, 0x4_0000, -1] {
            check(libc::SYS_personality, [persona, 0, 0], Allow);
        }
        check(libc::SYS_personality, [0x0040_0000, 0, 0], Errno(libc::EPERM)); // READ_IMPLIES_EXEC
    }

    #[test]
    fn foreign_call_tables_are_absent() {
        const ARCH_I386: u32 = 0x4000_0003;
        assert_eq!(answer(ARCH_I386, 1, [0; 3]), Answer::Errno(libc::ENOSYS).code());
        assert_eq!(
            answer(ARCH_X86_64, X32_BIT | 1, [0; 3]),
            Answer::Errno(libc::ENOSYS).code()
        );
        assert_eq!(
            answer(ARCH_X86_64, u32::MAX, [0; 3]),
            Answer::Errno(libc::ENOSYS).code()
        );
    }

    #[test]
    fn the_program_fits_the_kernel_limit() {
        assert!(program().len() < 4096); // BPF_MAXINSNS
    }
}
