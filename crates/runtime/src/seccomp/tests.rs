use super::calls::{ALLOWED, ALLOWED_HERE, PRIVILEGED};
use super::*;

/// Bit that marks a call of the x32 table.
const X32_BIT: u32 = 0x4000_0000;

/// Result of the filter for a call: a small interpreter of the instructions that [`Step`] produces.
fn answer<const N: usize>(arch: u32, number: u32, arguments: [u32; N]) -> u32 {
    let program = &*PROGRAM;
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
                    // The halves of an argument.
                    offset if offset % 8 != 0 => 0,
                    offset => arguments
                        .get(usize::try_from((offset - 16) / 8).unwrap())
                        .copied()
                        .unwrap_or(0),
                };
            }
            code if code == libc::BPF_JMP | libc::BPF_JEQ => at += skip(accumulator == step.k),
            code if code == libc::BPF_JMP | libc::BPF_JGE => at += skip(accumulator >= step.k),
            code if code == libc::BPF_JMP | libc::BPF_JSET => at += skip(accumulator & step.k != 0),
            code if code == libc::BPF_JMP | libc::BPF_JA => at += usize::try_from(step.k).unwrap(),
            code if code == libc::BPF_ALU | libc::BPF_AND => accumulator &= step.k,
            code if code == libc::BPF_RET => return step.k,
            code => panic!("instruction {code:#x}"),
        }
        at += 1;
    }
}

fn check<const N: usize>(call: c_long, arguments: [i32; N], want: Answer) {
    let arguments = arguments.map(i32::cast_unsigned);
    assert_eq!(
        answer(ARCHITECTURE, number(call), arguments),
        want.code(),
        "call {call} {arguments:?}"
    );
}

#[test]
fn every_call_number_has_the_result_of_its_list() {
    let checked: Vec<c_long> = checks::all().into_iter().map(|(call, _)| call).collect();
    for call in (0..1000).filter(|call| !checked.contains(call)) {
        let want = match call {
            _ if ALLOWED.contains(&call) || ALLOWED_HERE.contains(&call) => Answer::Allow,
            _ if PRIVILEGED.contains(&call) => Answer::Errno(libc::EPERM),
            _ => Answer::Errno(libc::ENOSYS),
        };
        check(call, [0; 3], want);
    }
    // A call is on exactly one list.
    let mut all: Vec<c_long> = [ALLOWED, ALLOWED_HERE, PRIVILEGED, &checked].concat();
    all.sort_unstable();
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
}

#[test]
fn calls_have_the_documented_results() {
    use Answer::{Allow, Errno};
    for &call in ALLOWED.iter().chain(ALLOWED_HERE) {
        check(call, [0; 3], Allow);
    }
    for call in [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_setns,
        libc::SYS_bpf,
        libc::SYS_userfaultfd,
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
        libc::SYS_swapon,
        libc::SYS_acct,
    ] {
        check(call, [0; 3], Errno(libc::EPERM));
    }
    check(libc::SYS_perf_event_open, [0; 3], Errno(libc::EACCES));
    for call in [
        libc::SYS_clone3,
        libc::SYS_io_setup,
        libc::SYS_io_submit,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_sched_setattr,
        libc::SYS_keyctl,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_open_tree,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
        libc::SYS_get_mempolicy,
        libc::SYS_set_mempolicy,
        libc::SYS_mbind,
        libc::SYS_move_pages,
        libc::SYS_migrate_pages,
        libc::SYS_quotactl,
        libc::SYS_quotactl_fd,
        libc::SYS_fanotify_init,
        libc::SYS_fanotify_mark,
        libc::SYS_memfd_secret,
        // Of no kernel, statmount, listmount, lsm_get_self_attr, open_tree_attr, and what comes next.
        335,
        400,
        457,
        458,
        459,
        467,
        500,
    ] {
        check(call, [0; 3], Errno(libc::ENOSYS));
    }
    // Of this architecture alone.
    #[cfg(target_arch = "x86_64")]
    for call in [
        libc::SYS_iopl,
        libc::SYS_ioperm,
        libc::SYS_modify_ldt,
        libc::SYS__sysctl,
        libc::SYS_uselib,
        libc::SYS_ustat,
        libc::SYS_sysfs,
    ] {
        check(call, [0; 3], Errno(libc::ENOSYS));
    }
}

#[test]
fn clone_and_unshare_make_no_namespaces() {
    use Answer::{Allow, Errno};
    let (clone, unshare) = (libc::SYS_clone, libc::SYS_unshare);
    check(clone, [libc::SIGCHLD], Allow);
    check(
        clone,
        [libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND],
        Allow,
    );
    for flags in [0, libc::CLONE_FS, libc::CLONE_FILES | libc::CLONE_SYSVSEM] {
        check(unshare, [flags], Allow);
    }
    let namespaces = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
    ];
    for flag in namespaces {
        check(clone, [flag | libc::SIGCHLD], Errno(libc::EPERM));
        check(unshare, [flag], Errno(libc::EPERM));
        check(unshare, [flag | libc::CLONE_FS], Errno(libc::EPERM));
        // Whatever the other bits are.
        for bit in 0..32 {
            for call in [clone, unshare] {
                let arguments = [(flag | 1 << bit).cast_unsigned()];
                assert_ne!(answer(ARCHITECTURE, number(call), arguments), Allow.code());
            }
        }
    }
    check(unshare, [libc::CLONE_NEWTIME], Errno(libc::EPERM));
    for flags in [1, libc::CLONE_PTRACE, libc::CLONE_NEWUSER | 1, -1] {
        check(unshare, [flags], Errno(libc::EINVAL));
    }
    for flags in [
        libc::CLONE_NEWNS | libc::CLONE_FS,
        libc::CLONE_NEWUSER | libc::CLONE_FS,
        libc::CLONE_NEWUSER | libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD,
        libc::CLONE_NEWNET | libc::CLONE_SIGHAND,
        libc::CLONE_NEWNET | libc::CLONE_THREAD,
        libc::CLONE_NEWNET | libc::CLONE_PIDFD | libc::CLONE_PARENT_SETTID,
        -1,
    ] {
        check(clone, [flags], Errno(libc::EINVAL));
    }
}

#[test]
fn only_common_socket_families_are_allowed() {
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
        // The kernel makes a packet socket of this.
        check(call, [libc::AF_INET, 10, 0x300], Errno(libc::EAFNOSUPPORT));
        check(call, [libc::AF_INET6, 10, 0], Errno(libc::ESOCKTNOSUPPORT));
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_NETLINK, libc::AF_VSOCK] {
            check(call, [family, libc::SOCK_STREAM | 0x10, 0], Errno(libc::EINVAL));
        }
        for family in [libc::AF_INET, libc::AF_NETLINK, libc::AF_VSOCK] {
            check(call, [family, 11, 0], Errno(libc::EINVAL));
        }
        check(call, [46, 11, 0], Errno(libc::EAFNOSUPPORT));
        check(
            call,
            [libc::AF_NETLINK, libc::SOCK_STREAM, libc::NETLINK_ROUTE],
            Errno(libc::ESOCKTNOSUPPORT),
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
fn protocols_that_would_load_a_module_are_rejected() {
    use Answer::{Allow, Errno};
    let families = [
        (libc::AF_INET, libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6),
        (libc::AF_INET6, libc::IPPROTO_ICMPV6, libc::IPPROTO_ICMP),
    ];
    for (family, echo, other_echo) in families {
        for (kind, protocol) in [
            (libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP),
            (libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, libc::IPPROTO_UDP),
            (libc::SOCK_DGRAM, echo),
            (libc::SOCK_DGRAM, 0),
            (libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_SCTP),
        ] {
            check(libc::SYS_socket, [family, kind, protocol], Allow);
        }
        // Both are known, and not together.
        for (kind, protocol) in [
            (libc::SOCK_STREAM, libc::IPPROTO_UDP),
            (libc::SOCK_STREAM, echo),
            (libc::SOCK_DGRAM, libc::IPPROTO_TCP),
            (libc::SOCK_DGRAM, other_echo),
        ] {
            check(libc::SYS_socket, [family, kind, protocol], Errno(libc::EPROTONOSUPPORT));
        }
        for protocol in [
            libc::IPPROTO_SCTP,
            libc::IPPROTO_DCCP,
            libc::IPPROTO_UDPLITE,
            libc::IPPROTO_MPTCP,
            115,
            256,
        ] {
            check(
                libc::SYS_socket,
                [family, libc::SOCK_STREAM, protocol],
                Errno(libc::EPROTONOSUPPORT),
            );
            check(
                libc::SYS_socket,
                [family, libc::SOCK_SEQPACKET, protocol],
                Errno(libc::ESOCKTNOSUPPORT),
            );
        }
        // DCCP, whose module the kernel also loads for protocol 0.
        check(libc::SYS_socket, [family, 6, 0], Errno(libc::ESOCKTNOSUPPORT));
        for protocol in [263, i32::MAX, -1] {
            check(
                libc::SYS_socket,
                [family, libc::SOCK_STREAM, protocol],
                Errno(libc::EINVAL),
            );
        }
    }
}

#[test]
fn resources_with_host_wide_limits_are_rejected() {
    use Answer::{Allow, Errno};
    check(
        libc::SYS_mmap,
        [0, 4096, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS],
        Allow,
    );
    let huge = libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let private = libc::MAP_PRIVATE | huge;
    for (length, flags, want) in [
        (1 << 21, private, libc::ENOMEM),
        (1 << 21, private | 21 << 26, libc::ENOMEM),
        (1 << 30, libc::MAP_SHARED | huge | 30 << 26, libc::ENOMEM),
        (1 << 21, libc::MAP_SHARED_VALIDATE | huge, libc::ENOMEM),
        (1 << 21, private | 22 << 26, libc::EINVAL),
        (1 << 21, huge, libc::EINVAL),
        (0, private, libc::EINVAL),
        (1 << 21, -1, libc::EINVAL),
    ] {
        check(libc::SYS_mmap, [0, length, 3, flags], Errno(want));
    }
    // The kernel refuses that of each file that can be open.
    check(
        libc::SYS_mmap,
        [0, 4096, 3, libc::MAP_PRIVATE | libc::MAP_HUGETLB],
        Allow,
    );
    for (flags, want) in [
        (0, Allow),
        (3, Allow),
        // All that the kernel does not know, it refuses itself.
        (!4, Allow),
        (4, Errno(libc::ENOMEM)),
        (5, Errno(libc::ENOMEM)),
        (4 | 8, Errno(libc::ENOMEM)),
        (4 | 21 << 26, Errno(libc::ENOMEM)),
        (4 | 20 << 26, Errno(libc::ENODEV)),
        (4 | 0x20, Errno(libc::EINVAL)),
        (4 | 8 | 0x10, Errno(libc::EINVAL)),
        // Chromium asks with this whether there is such a call.
        (-1, Errno(libc::EINVAL)),
    ] {
        check(libc::SYS_memfd_create, [0, flags], want);
    }
    for (key, size, flags, want) in [
        (0, 4096, 0o1600, Allow),
        (0, 1 << 21, 0o5600, Errno(libc::ENOMEM)),
        (0, 1 << 21, 0o4600, Errno(libc::ENOMEM)),
        (7, 1 << 21, 0o5600, Errno(libc::ENOMEM)),
        // Only finds one.
        (7, 1 << 21, 0o4600, Allow),
        (0, 0, 0o5600, Errno(libc::EINVAL)),
        (0, 1 << 21, 0o5600 | 5 << 26, Errno(libc::EINVAL)),
    ] {
        check(libc::SYS_shmget, [key, size, flags], want);
    }
    for option in [26, 50, 51, 52] {
        check(libc::SYS_setsockopt, [3, libc::SOL_SOCKET, option], Errno(libc::EPERM));
    }
    check(libc::SYS_prctl, [libc::PR_SET_NAME, 2], Allow);
    check(libc::SYS_prctl, [libc::PR_SET_SECCOMP, 1], Allow);
    check(libc::SYS_prctl, [libc::PR_SET_SECCOMP, 2], Errno(libc::EINVAL));
    check(libc::SYS_seccomp, [1, 0], Errno(libc::EINVAL));
    check(libc::SYS_seccomp, [2, 0], Allow);
}

#[test]
fn every_socket_option_has_the_result_of_its_list() {
    use Answer::{Allow, Errno};
    for level in (-1..600).chain([i32::MAX, i32::MIN]) {
        let allowed = options::ALLOWED.iter().find(|(other, _)| *other == level);
        for option in (-1..300).chain([i32::MAX, i32::MIN]) {
            let want = match allowed {
                Some((_, allowed)) if allowed.contains(&option) => Allow,
                Some((libc::SOL_SOCKET, _)) if options::FILTERS.contains(&option) => Errno(libc::EPERM),
                _ => Errno(libc::ENOPROTOOPT),
            };
            // Only the low half of an argument is the kernel's.
            check(libc::SYS_setsockopt, [3, level, option], want);
        }
    }
}

#[test]
fn options_that_take_uncharged_memory_are_absent() {
    let (ip, ipv6, tcp) = (libc::IPPROTO_IP, libc::IPPROTO_IPV6, libc::IPPROTO_TCP);
    let table: &[(i32, &[i32])] = &[
        // TCP_MD5SIG, REPAIR, SAVE_SYN, ULP, MD5SIG_EXT, FASTOPEN_KEY, TX_DELAY, AO, CONGESTION
        (tcp, &[14, 19, 20, 21, 22, 27, 29, 31, 32, 33, 37, 38, 39, 40, 43, 13]),
        // Options, router alerts, transparent sockets, IPsec, memberships, source filters, tables of packet filters.
        (
            ip,
            &[
                4, 5, 16, 17, 19, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 64, 65, 200,
            ],
        ),
        // The same, and anycast, flow labels, extension headers.
        (
            ipv6,
            &[
                6, 9, 20, 22, 27, 32, 34, 35, 42, 43, 44, 46, 48, 54, 55, 57, 59, 64, 65, 75, 128, 200,
            ],
        ),
        // SO_ZEROCOPY, TXTIME, RESERVE_MEM
        (libc::SOL_SOCKET, &[60, 61, 73]),
        // UDP_ENCAP, TLS, MPTCP, packet sockets
        (libc::IPPROTO_UDP, &[100]),
        (282, &[1, 2]),
        (284, &[1]),
        (263, &[1, 5, 13]),
    ];
    for (level, options) in table {
        for option in *options {
            let want = Answer::Errno(libc::ENOPROTOOPT);
            check(libc::SYS_setsockopt, [3, *level, *option], want);
        }
    }
    check(libc::SYS_getsockopt, [3, tcp, 35], Answer::Errno(libc::ENOPROTOOPT));
    check(libc::SYS_getsockopt, [3, tcp, libc::TCP_INFO], Answer::Allow);
    check(libc::SYS_getsockopt, [3, libc::SOL_SOCKET, 35], Answer::Allow);
}

#[test]
fn requests_that_load_a_module_are_rejected() {
    for request in checks::MODULE_REQUESTS {
        check(libc::SYS_ioctl, [3, request.cast_signed()], Answer::Errno(libc::ENOPKG));
    }
    let discipline = checks::TIOCSETD.cast_signed();
    check(libc::SYS_ioctl, [3, discipline], Answer::Errno(libc::EPERM));
    for request in [
        libc::TCGETS,
        libc::TIOCGWINSZ,
        libc::TIOCSCTTY,
        libc::FIONBIO,
        libc::FIONREAD,
    ] {
        let request = i32::try_from(request).unwrap();
        check(libc::SYS_ioctl, [3, request], Answer::Allow);
    }
}

#[test]
fn the_agents_scheduling_cannot_be_changed() {
    use Answer::{Allow, Errno};
    for call in [
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setscheduler,
    ] {
        check(call, [0], Allow);
        check(call, [2], Allow);
        check(call, [1], Errno(libc::EPERM));
    }
    for (call, process, group, user) in [(libc::SYS_setpriority, 0, 1, 2), (libc::SYS_ioprio_set, 1, 2, 3)] {
        check(call, [process, 0], Allow);
        check(call, [process, 17], Allow);
        check(call, [group, 0], Allow);
        for [which, who] in [[process, 1], [group, 1], [user, 0], [user, 1000]] {
            check(call, [which, who], Errno(libc::EPERM));
        }
        for [which, who] in [[process - 1, 1], [user + 1, 1], [-1, 0]] {
            check(call, [which, who], Errno(libc::EINVAL));
        }
    }
}

#[test]
fn personalities_that_weaken_a_process_are_rejected() {
    use Answer::{Allow, Errno};
    for persona in [0, 0x8, 0x2_0000, 0x4_0000, 0x4_0008, -1] {
        check(libc::SYS_personality, [persona, 0, 0], Allow);
    }
    check(libc::SYS_personality, [0x0040_0000, 0, 0], Errno(libc::EPERM)); // READ_IMPLIES_EXEC
    check(libc::SYS_personality, [0x0044_0000, 0, 0], Errno(libc::EPERM));
}

#[test]
fn invalid_arguments_have_the_error_of_the_kernel() {
    use Answer::Errno;
    check(
        libc::SYS_setsockopt,
        [3, libc::SOL_SOCKET, 1, 0, -1],
        Errno(libc::EINVAL),
    );
    check(
        libc::SYS_setsockopt,
        [3, libc::IPPROTO_TCP, 9999, 0, 4],
        Errno(libc::ENOPROTOOPT),
    );
    check(libc::SYS_clock_settime, [libc::CLOCK_MONOTONIC], Errno(libc::EINVAL));
    check(libc::SYS_clock_settime, [-1], Errno(libc::EINVAL));
    check(libc::SYS_perf_event_open, [0, 0, 0, 0, 0x10], Errno(libc::EINVAL));
    check(libc::SYS_perf_event_open, [0, 0, 0, 0, 8], Errno(libc::EACCES));
}

#[test]
fn calls_of_other_tables_are_rejected() {
    const ARCH_I386: u32 = 0x4000_0003;
    assert_eq!(answer(ARCH_I386, 1, [0; 3]), Answer::Errno(libc::ENOSYS).code());
    assert_eq!(
        answer(ARCHITECTURE, X32_BIT | 1, [0; 3]),
        Answer::Errno(libc::ENOSYS).code()
    );
    assert_eq!(
        answer(ARCHITECTURE, u32::MAX, [0; 3]),
        Answer::Errno(libc::ENOSYS).code()
    );
}

#[test]
fn the_program_fits_the_kernel_limit() {
    assert!(program().len() < 4096); // BPF_MAXINSNS
    for (call, steps) in checks::all() {
        assert!(steps.len() < 512, "{call}");
        // A jump that would be too long has no length.
        let has_length = |step: &Step| match step {
            Step::IfEqualElseSkip(_, n)
            | Step::SkipIfEqual(_, n)
            | Step::IfAtLeastElseSkip(_, n)
            | Step::SkipIfAtLeast(_, n)
            | Step::IfAnyBitElseSkip(_, n)
            | Step::SkipIfAnyBit(_, n) => *n > 0,
            _ => true,
        };
        assert!(steps.iter().all(has_length), "{call}");
    }
}
