//! The system calls that have no safe wrapper, one function each. All `unsafe` of the host side is in this file and, for
//! programs in the kernel, in `bpf/sys.rs`.
//!
//! Everything here is called from the launcher, which has one thread, or from a child that the launcher cloned: that
//! makes running ordinary code after `clone3` sound, and makes it safe to change per-process state (namespaces, user
//! ids) temporarily. [`in_namespace`] is the one exception and restores or aborts.

#![expect(unsafe_code, reason = "raw system calls; each block says why it is sound")]

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use libc::{c_int, c_long, c_ulong, c_void, pid_t, uid_t};

pub(crate) fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Has the kernel write a part of the memory of a process to swap. Returns once that is done, as far as it can be.
pub(crate) fn page_out(process: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    let part = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(usize::try_from(start).map_err(io::Error::other)?),
        iov_len: usize::try_from(length).map_err(io::Error::other)?,
    };
    // SAFETY: the kernel reads one `iovec`. The address is one of the other process, and nothing here is accessed by it; the
    // advice changes where its pages are and not what they contain.
    let advised = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            &raw const part,
            1usize,
            libc::MADV_PAGEOUT,
            0u32,
        )
    };
    check(advised).map(drop)
}

/// Removes a variable from the environment, and its value from the memory that `/proc/<pid>/environ` shows.
pub(crate) fn forget_variable(name: &CStr) {
    // SAFETY: the caller has one thread, so nothing else reads or changes the environment. `getenv` returns a pointer into
    // it, which is writable memory of this process up to its NUL, and `unsetenv` only removes that pointer.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        if !value.is_null() {
            libc::explicit_bzero(value.cast(), libc::strlen(value));
        }
        libc::unsetenv(name.as_ptr());
    }
}

/// Sets a variable of the environment unless there is one of that name.
pub(crate) fn set_variable_if_absent(name: &CStr, value: &CStr) {
    // SAFETY: the caller has one thread, so nothing else reads or changes the environment. Both texts end with a NUL and are
    // copied. It fails without memory, or for a name with `=`; then the variable stays absent.
    unsafe {
        libc::setenv(name.as_ptr(), value.as_ptr(), 0);
    }
}

/// Result of `clone3`.
#[derive(Debug)]
pub(crate) enum Cloned {
    /// In the parent: the child's pid and a pidfd of it.
    Parent { pid: pid_t, pidfd: OwnedFd },
    /// In the child.
    Child,
}

/// `clone3(2)` with a pidfd, signalling SIGCHLD at the end. `cgroup` is the cgroup v2 directory the child is born in.
pub(crate) fn clone3(flags: c_int, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Cloned> {
    let mut pidfd: RawFd = -1;
    let mut flags = u64::from(flags.cast_unsigned()) | u64::from(libc::CLONE_PIDFD.cast_unsigned());
    if cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    // SAFETY: an all-zero clone_args is valid; it means "nothing of this kind".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    args.pidfd = std::ptr::from_mut(&mut pidfd) as u64;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    args.cgroup = cgroup.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned()));
    // SAFETY: `args` outlives the call and has the size given. Without CLONE_VM the child gets a copy of this
    // address space. No lock in it can be held by another thread: this process has one thread, or the child only exits.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    // SAFETY: in the parent a successful clone3 with CLONE_PIDFD has stored a new descriptor without another owner.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Cloned::Parent {
        pid: pid_t::try_from(pid).unwrap_or(pid_t::MAX),
        pidfd,
    })
}

/// `CLONE_INTO_CGROUP`, which does not fit the `c_int` of the other flags.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `CLONE_*` flags of every namespace of a sandbox.
pub(crate) const NAMESPACES: c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Sets the real, effective and saved user and group ids of the calling thread.
pub(crate) fn set_ids(real: uid_t, effective: uid_t, saved: uid_t) -> io::Result<()> {
    // SAFETY: these calls change credentials only. The raw system calls act on one thread, unlike libc's wrappers,
    // which is what is wanted. Groups go first: they need the privilege that the user id may take away.
    unsafe {
        check(libc::syscall(libc::SYS_setresgid, real, effective, saved))?;
        check(libc::syscall(libc::SYS_setresuid, real, effective, saved))?;
    }
    Ok(())
}

/// Sets the real, effective and saved user ids of the calling thread.
pub(crate) fn set_ids_of_user(real: uid_t, effective: uid_t, saved: uid_t) -> io::Result<()> {
    // SAFETY: changes credentials only.
    check(unsafe { libc::syscall(libc::SYS_setresuid, real, effective, saved) }).map(drop)
}

/// Drops all supplementary groups.
pub(crate) fn clear_groups() -> io::Result<()> {
    // SAFETY: a null list of length zero is valid.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<libc::gid_t>()) }).map(drop)
}

/// Keeps capabilities over changes of the user id (`NO_SETUID_FIXUP`), without locking that.
pub(crate) fn keep_capabilities_over_setuid(on: bool) -> io::Result<()> {
    /// `SECBIT_NO_SETUID_FIXUP` of linux/securebits.h.
    const NO_SETUID_FIXUP: c_ulong = 1 << 2;
    prctl(libc::PR_SET_SECUREBITS, if on { NO_SETUID_FIXUP } else { 0 })
}

/// A `prctl` of one argument that takes no pointer.
pub(crate) fn prctl(option: c_int, argument: c_ulong) -> io::Result<()> {
    // SAFETY: callers in this crate pass options whose argument is a number.
    check(unsafe { libc::syscall(libc::SYS_prctl, option, argument, 0usize, 0usize, 0usize) }).map(drop)
}

/// Bytes of a page.
pub(crate) fn page_size() -> u64 {
    // SAFETY: takes a number and touches no memory of ours.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Restricts access to this process, and to what it clones, to the host's root: its memory, descriptors and
/// directories. Executing another program ends that.
pub(crate) fn hide_memory() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

/// Sets the permitted and effective capability sets to `set`, and clears the inheritable set: a program whose file
/// capabilities include an inherited one would gain it.
pub(crate) fn set_capabilities(set: u64) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }
    #[repr(C)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    /// `_LINUX_CAPABILITY_VERSION_3`: two 32-bit words per set.
    const VERSION: u32 = 0x2008_0522;
    let header = Header {
        version: VERSION,
        pid: 0,
    };
    let word = |shift: u32| u32::try_from((set >> shift) & u64::from(u32::MAX)).unwrap_or(0);
    let data = [
        Data {
            effective: word(0),
            permitted: word(0),
            inheritable: 0,
        },
        Data {
            effective: word(32),
            permitted: word(32),
            inheritable: 0,
        },
    ];
    // SAFETY: both structures have the layout the kernel wants and outlive the call.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) }).map(drop)
}

/// Puts the calling process into a new, empty session keyring, so that no key of the host is reachable.
pub(crate) fn join_new_session_keyring() -> io::Result<()> {
    /// `KEYCTL_JOIN_SESSION_KEYRING`.
    const JOIN: c_int = 1;
    // SAFETY: a null name asks for an anonymous keyring.
    check(unsafe { libc::syscall(libc::SYS_keyctl, JOIN, std::ptr::null::<c_void>()) }).map(drop)
}

/// Attributes of `mount_setattr(2)` and `fsmount(2)`.
pub(crate) mod attr {
    pub(crate) const RDONLY: u64 = 0x1;
    pub(crate) const NOSUID: u64 = 0x2;
    pub(crate) const NODEV: u64 = 0x4;
    pub(crate) const NOEXEC: u64 = 0x8;
    pub(crate) const IDMAP: u64 = 0x0010_0000;
}

/// Sets attributes on a mount; with [`attr::IDMAP`], `userns` defines how ids are mapped.
pub(crate) fn mount_setattr(
    mount: BorrowedFd<'_>,
    recursive: bool,
    set: u64,
    userns: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        userns_fd: u64,
    }
    let attr = MountAttr {
        set,
        clear: 0,
        propagation: 0,
        userns_fd: userns.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned())),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a NUL-terminated empty string and the attributes have the size given.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// `pivot_root(".", ".")` and a lazy unmount of the old root: the current directory becomes the root, and the old tree
/// is no longer reachable.
pub(crate) fn pivot_to_current_directory() -> io::Result<()> {
    // SAFETY: constant NUL-terminated paths.
    unsafe {
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
        check(libc::syscall(libc::SYS_umount2, c".".as_ptr(), libc::MNT_DETACH))?;
    }
    std::env::set_current_dir("/")
}

/// `setns(2)`: `namespaces` is a namespace, or with several flags a pidfd.
pub(crate) fn setns(namespaces: BorrowedFd<'_>, flags: c_int) -> io::Result<()> {
    // SAFETY: takes a descriptor and flags only.
    check(unsafe { libc::syscall(libc::SYS_setns, namespaces.as_raw_fd(), flags) }).map(drop)
}

/// `unshare(2)`.
pub(crate) fn unshare(flags: c_int) -> io::Result<()> {
    // SAFETY: takes flags only.
    check(unsafe { libc::syscall(libc::SYS_unshare, flags) }).map(drop)
}

/// Marks every descriptor from `first` on to be closed at exec.
pub(crate) fn close_from_at_exec(first: RawFd) -> io::Result<()> {
    // SAFETY: changes a flag of descriptors only.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) }).map(drop)
}

/// Closes every descriptor but those in `keep`. For a cloned child, which never returns to the code that owns them.
pub(crate) fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut first = 0u32;
    for last in keep.into_iter().chain([u32::MAX]) {
        if last > first {
            let to = if last == u32::MAX { last } else { last - 1 };
            // SAFETY: the owners of these descriptors are values of the parent's code, which the child left for good.
            check(unsafe { libc::syscall(libc::SYS_close_range, first, to, 0) })?;
        }
        first = last.saturating_add(1);
    }
    Ok(())
}

/// Makes `fd` the descriptor `target`, which stays open at exec.
pub(crate) fn place_fd(fd: RawFd, target: RawFd) -> io::Result<()> {
    // SAFETY: the target is a fixed number reserved for this; whatever was there is meant to be replaced.
    check(c_long::from(unsafe { libc::dup2(fd, target) })).map(drop)
}

/// A duplicate of `fd` that is not below `lowest`.
pub(crate) fn raise_fd(fd: RawFd, lowest: RawFd) -> io::Result<RawFd> {
    // SAFETY: F_DUPFD takes a number.
    let raised = check(c_long::from(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest) }))?;
    Ok(RawFd::try_from(raised).unwrap_or(-1))
}

/// Takes over a descriptor that was left open for this process when it was executed. It gets another number.
pub(crate) fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    let moved = raise_fd(fd, fd + 1)?;
    // SAFETY: the old number has no owner in this process. The new one was just made, and nothing else owns it.
    unsafe {
        libc::close(fd);
        Ok(OwnedFd::from_raw_fd(moved))
    }
}

/// Replaces this process, with an empty environment. Returns only the error.
pub(crate) fn exec(path: &CStr, arguments: &[&CStr]) -> io::Error {
    let mut argv: Vec<*const libc::c_char> = arguments.iter().map(|a| a.as_ptr()).collect();
    argv.push(std::ptr::null());
    let envp = [std::ptr::null::<libc::c_char>()];
    // SAFETY: both arrays end with a null pointer and everything they point to outlives the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error()
}

/// Resets every signal to its default action and unblocks all of them.
pub(crate) fn reset_signals() {
    // SAFETY: SIG_DFL is a valid handler for every signal; the calls that the kernel refuses (SIGKILL, SIGSTOP)
    // do nothing. The set is initialised before it is used.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Lets the kernel reap children automatically.
pub(crate) fn ignore_children() {
    // SAFETY: SIG_IGN is a valid handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Schedules the calling thread with the default policy, this nice value and slices of this length. With
/// `reset_on_fork` the threads and processes that it starts have the defaults again.
pub(crate) fn set_schedule(nice: i32, slice: Duration, reset_on_fork: bool) -> io::Result<()> {
    /// `struct sched_attr` of linux/sched/types.h, in its first version.
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime_ns: u64,
        deadline_ns: u64,
        period_ns: u64,
    }
    let attributes = Attributes {
        size: u32::try_from(size_of::<Attributes>()).map_err(io::Error::other)?,
        policy: libc::SCHED_OTHER.cast_unsigned(),
        flags: if reset_on_fork { SCHED_FLAG_RESET_ON_FORK } else { 0 },
        nice,
        priority: 0,
        runtime_ns: u64::try_from(slice.as_nanos()).map_err(io::Error::other)?,
        deadline_ns: 0,
        period_ns: 0,
    };
    // SAFETY: `attributes` has the size that it states, and is only read.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) }).map(drop)
}

/// `SCHED_FLAG_RESET_ON_FORK` of linux/sched.h.
const SCHED_FLAG_RESET_ON_FORK: u64 = 1;

/// Sets a resource limit, capped at the current hard limit. Never raises a hard limit, which would require
/// CAP_SYS_RESOURCE.
pub(crate) fn limit(resource: libc::__rlimit_resource_t, soft: u64, hard: u64) -> io::Result<()> {
    let mut have = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `have` is valid for writing, then for reading.
    unsafe {
        check(c_long::from(libc::getrlimit(resource, &raw mut have)))?;
        let hard = hard.min(have.rlim_max);
        let want = libc::rlimit {
            rlim_cur: soft.min(hard),
            rlim_max: hard,
        };
        check(c_long::from(libc::setrlimit(resource, &raw const want))).map(drop)
    }
}

/// Installs a seccomp filter on this process and its future children. Needs CAP_SYS_ADMIN in the user namespace,
/// because `no_new_privs` stays off.
pub(crate) fn install_seccomp(program: &[libc::sock_filter]) -> io::Result<()> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which outlives the call; it does not write to it.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0usize,
            &raw const fprog,
        )
    })
    .map(drop)
}

/// `LOOP_CTL_GET_FREE`: the number of an unused loop device, made when there is none.
pub(crate) fn loop_get_free(control: BorrowedFd<'_>) -> io::Result<u32> {
    const LOOP_CTL_GET_FREE: c_ulong = 0x4C82;
    // SAFETY: this request takes no argument.
    let number = check(c_long::from(unsafe {
        libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE)
    }))?;
    u32::try_from(number).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// `LOOP_CONFIGURE`: binds `file` to the loop device, to be released with its last user.
pub(crate) fn loop_configure(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    const LOOP_CONFIGURE: c_ulong = 0x4C0A;
    /// `LO_FLAGS_AUTOCLEAR`: the binding ends when the last user closes the device, however it ended.
    const AUTOCLEAR: u32 = 4;
    #[repr(C)]
    struct Info64 {
        device: u64,
        inode: u64,
        rdevice: u64,
        offset: u64,
        sizelimit: u64,
        number: u32,
        encrypt_type: u32,
        encrypt_key_size: u32,
        flags: u32,
        file_name: [u8; 64],
        crypt_name: [u8; 64],
        encrypt_key: [u8; 32],
        init: [u64; 2],
    }
    #[repr(C)]
    struct Config {
        fd: u32,
        block_size: u32,
        info: Info64,
        reserved: [u64; 8],
    }
    // SAFETY: all-zero is a valid loop_config.
    let mut config: Config = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd().cast_unsigned();
    // The file system on it has 4 KiB blocks; larger sectors lead to fewer, whole-page requests.
    config.block_size = 4096;
    config.info.flags = AUTOCLEAR;
    // SAFETY: `config` has the layout of struct loop_config and outlives the call.
    check(c_long::from(unsafe {
        libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config)
    }))
    .map(drop)
}

/// Runs `work` with this thread in the network namespace `target` and switches back to `home`.
///
/// A socket keeps the namespace it was created in, so this is how the host creates sockets inside a sandbox. If
/// switching back fails, the process is aborted: a thread of the platform that stays in a sandbox's network would
/// expose that network to its next task. `work` must not panic or yield.
pub(crate) fn in_namespace<T>(
    target: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    setns(target, libc::CLONE_NEWNET)?;
    let result = work();
    if setns(home, libc::CLONE_NEWNET).is_err() {
        std::process::abort();
    }
    result
}

/// Turns an integer option of a socket on.
fn set_option(socket: BorrowedFd<'_>, level: c_int, option: c_int) -> io::Result<()> {
    let on: c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<c_int>()).map_err(io::Error::other)?;
    // SAFETY: the value is an int, as its length says, and outlives the call.
    check(c_long::from(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const on).cast::<c_void>(),
            length,
        )
    }))
    .map(drop)
}

/// `IP_TRANSPARENT`: the socket may have any local address.
pub(crate) fn set_transparent(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_IP, libc::IP_TRANSPARENT)
}

/// Lets [`receive_with_destination`] know the destinations of datagrams, on an IPv4 or an IPv6 socket.
pub(crate) fn set_receive_destinations(socket: BorrowedFd<'_>, is_ipv6: bool) -> io::Result<()> {
    set_option(socket, libc::SOL_IP, libc::IP_RECVORIGDSTADDR)?;
    if is_ipv6 {
        set_option(socket, libc::SOL_IPV6, libc::IPV6_RECVORIGDSTADDR)?;
    }
    Ok(())
}

/// `IPV6_HDRINCL`: what is sent begins with its IPv6 header. (For IPv4, protocol `IPPROTO_RAW` implies it.)
pub(crate) fn set_ipv6_header_included(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_IPV6, libc::IPV6_HDRINCL)
}

/// Receives a datagram without waiting. Returns its length, its source and its destination. What does not fit into
/// `buffer` is cut off.
pub(crate) fn receive_with_destination(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<(usize, SocketAddr, SocketAddr)> {
    #[repr(C, align(8))]
    struct Control([u8; 128]);
    let mut control = Control([0; 128]);
    // SAFETY: all-zero is valid for both structures.
    let (mut source, mut header): (libc::sockaddr_in6, libc::msghdr) = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    header.msg_name = (&raw mut source).cast();
    header.msg_namelen = libc::socklen_t::try_from(size_of::<libc::sockaddr_in6>()).map_err(io::Error::other)?;
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = size_of::<Control>();
    // SAFETY: `header` points to buffers of the sizes that it says, which outlive the call.
    let length = check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) } as c_long)?;
    let mut destination = None;
    // SAFETY: the kernel has filled `header` and the control messages in `control`, which is aligned for them.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !message.is_null() {
        // SAFETY: `message` is not null, so it points to a whole control message within `control`. Messages of these
        // two kinds contain an address of their family, which may not be aligned.
        unsafe {
            match ((*message).cmsg_level, (*message).cmsg_type) {
                (libc::SOL_IP, libc::IP_ORIGDSTADDR) => {
                    let address: libc::sockaddr_in =
                        libc::CMSG_DATA(message).cast::<libc::sockaddr_in>().read_unaligned();
                    let ip = Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr));
                    destination = Some(SocketAddr::from((ip, u16::from_be(address.sin_port))));
                }
                (libc::SOL_IPV6, libc::IPV6_ORIGDSTADDR) => {
                    let address: libc::sockaddr_in6 =
                        libc::CMSG_DATA(message).cast::<libc::sockaddr_in6>().read_unaligned();
                    destination = Some(of_v6(&address));
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    let destination = destination.ok_or(io::ErrorKind::InvalidData)?;
    let source = match c_int::from(source.sin6_family) {
        libc::AF_INET6 => of_v6(&source),
        _ => of_v4(&source),
    };
    Ok((usize::try_from(length).unwrap_or(0), source, destination))
}

/// An IPv4 address in the memory of an IPv6 one, as the kernel writes it for an IPv4 socket: port and address follow the
/// family.
fn of_v4(address: &libc::sockaddr_in6) -> SocketAddr {
    let ip = Ipv4Addr::from_bits(u32::from_be(address.sin6_flowinfo));
    SocketAddr::from((ip, u16::from_be(address.sin6_port)))
}

/// An address of an IPv6 socket. IPv4-mapped addresses become IPv4 addresses.
fn of_v6(address: &libc::sockaddr_in6) -> SocketAddr {
    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
    SocketAddr::new(ip.to_canonical(), u16::from_be(address.sin6_port))
}

/// Ends this process immediately, without the cleanup of a normal exit: for children that share their parent's buffers
/// and handlers.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: _exit takes a number and does not return.
    unsafe { libc::_exit(code) }
}
