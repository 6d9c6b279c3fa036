//! The system calls of the tests: a process in new namespaces, and processes that join them.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "constants and structures of the kernel, which are small"
)]
#![expect(unsafe_code, reason = "namespaces are entered between clone and exec")]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use libc::{c_char, c_int, c_ulong};

/// What the agent's process needs; everything is made before the clone, after which nothing is allocated.
pub(crate) struct Plan<'a> {
    pub(crate) program: &'a CStr,
    /// Mounted over `/etc/passwd` and `/etc/group`.
    pub(crate) passwd: &'a CStr,
    pub(crate) group: &'a CStr,
    pub(crate) boot: &'a OwnedFd,
    pub(crate) to_spawner: &'a OwnedFd,
    pub(crate) spawner: &'a OwnedFd,
}

/// Starts an agent as pid 1 of new namespaces, with a spawner as its child. Returns the agent's pid.
pub(crate) fn start(plan: &Plan<'_>) -> io::Result<i32> {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::SIGCHLD;
    // SAFETY: without CLONE_VM this is fork; the child has a copy of everything and only makes system calls.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags as c_ulong, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: we are the child; this does not return.
            unsafe {
                become_agent(plan);
                libc::_exit(99)
            }
        }
        pid => Ok(i32::try_from(pid).unwrap()),
    }
}

unsafe fn become_agent(plan: &Plan<'_>) {
    let mount = |source: &CStr, target: &CStr, kind: &CStr, flags: c_ulong| {
        // SAFETY: strings that end in NUL.
        let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) };
        if done == -1 {
            // SAFETY: the child ends.
            unsafe { libc::_exit(98) };
        }
    };
    // SAFETY: system calls of a single-threaded child on its own copies.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        mount(c"none", c"/", c"none", libc::MS_PRIVATE | libc::MS_REC);
        mount(c"proc", c"/proc", c"proc", 0);
        mount(c"tmpfs", c"/run", c"tmpfs", 0);
        // The agent writes its trust store: into memory, and not into this machine's.
        overlay(
            c"/etc",
            c"/run/etc",
            c"/run/etc.work",
            c"lowerdir=/etc,upperdir=/run/etc,workdir=/run/etc.work",
        );
        overlay(
            c"/usr",
            c"/run/usr",
            c"/run/usr.work",
            c"lowerdir=/usr,upperdir=/run/usr,workdir=/run/usr.work",
        );
        mount(plan.passwd, c"/etc/passwd", c"none", libc::MS_BIND);
        mount(plan.group, c"/etc/group", c"none", libc::MS_BIND);
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as c_char;
        request.ifr_name[1] = b'o' as c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_LOOPBACK) as i16;
        libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request);
        libc::close(socket);
        libc::chdir(c"/".as_ptr());
        // Numbers far above those in use, so that no copy overwrites a source.
        let boot = libc::fcntl(plan.boot.as_raw_fd(), libc::F_DUPFD, 700);
        let to_spawner = libc::fcntl(plan.to_spawner.as_raw_fd(), libc::F_DUPFD, 700);
        let spawner = libc::fcntl(plan.spawner.as_raw_fd(), libc::F_DUPFD, 700);
        // Not fork(): its handlers would wait for locks that other threads held when we were cloned.
        if libc::syscall(libc::SYS_clone, libc::SIGCHLD as c_ulong, 0, 0, 0, 0) == 0 {
            libc::close(3);
            execute(plan.program, c"spawner", &[(spawner, 4)]);
        }
        execute(plan.program, c"agent", &[(boot, 3), (to_spawner, 4)]);
    }
}

/// Mounts an overlay over a directory, which begins as a copy of it.
unsafe fn overlay(directory: &CStr, upper: &CStr, work: &CStr, options: &CStr) {
    // SAFETY: strings that end in NUL; the child ends when it fails.
    unsafe {
        libc::mkdir(upper.as_ptr(), 0o755);
        libc::mkdir(work.as_ptr(), 0o755);
        let kind = c"overlay".as_ptr();
        if libc::mount(kind, directory.as_ptr(), kind, 0, options.as_ptr().cast()) == -1 {
            libc::_exit(95);
        }
    }
}

/// Executes the agent's program with these descriptors under these numbers and no others above 2.
unsafe fn execute(program: &CStr, role: &CStr, fds: &[(RawFd, RawFd)]) -> ! {
    // SAFETY: as the caller.
    unsafe {
        for (source, target) in fds {
            libc::dup2(*source, *target);
        }
        libc::syscall(libc::SYS_close_range, 5, c_int::MAX, 0);
        let argv = [program.as_ptr(), role.as_ptr(), ptr::null()];
        let env = [ptr::null()];
        libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr());
        libc::_exit(97)
    }
}

/// Kills a process that [`start`] made and reaps it.
pub(crate) fn end(pid: i32) {
    // SAFETY: the pid is our child and not reaped yet.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, ptr::null_mut(), 0);
    }
}

/// Kills a process by its pid as seen from here.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: only a number; the tests pass pids inside their own sandboxes.
    unsafe { libc::kill(pid, signal) };
}

/// Moves the calling thread into a network namespace. The thread must end afterwards.
pub(crate) fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: only a descriptor.
    match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn namespaces(pid: i32) -> [File; 3] {
    ["net", "mnt", "pid"].map(|kind| File::open(format!("/proc/{pid}/ns/{kind}")).unwrap())
}

/// Starts a spawner in the agent's namespaces, as a host does that lost the first one: it connects before it is in the
/// pid namespace, and leaves the spawner to the agent.
pub(crate) fn start_spawner(agent: i32, program: &CStr) {
    let (address, length) = abstract_address(protocol::agent::SPAWNER_SOCKET);
    let connect = || {
        // SAFETY: system calls of a single-threaded child on its own copies.
        unsafe {
            let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            if libc::connect(socket, (&raw const address).cast(), length) == -1 {
                libc::_exit(94);
            }
            socket
        }
    };
    let status = run_inside_after(&namespaces(agent), connect, |socket| {
        // SAFETY: as above.
        unsafe {
            let first = libc::getpid();
            if libc::fork() == 0 {
                while libc::getppid() == first {
                    libc::sched_yield();
                }
                execute(program, c"spawner", &[(socket, 4)]);
            }
        }
        0
    });
    assert_eq!(status, 0, "start a spawner");
}

/// Mounts a file system in memory inside the agent's namespaces.
pub(crate) fn mount_memory(agent: i32, target: &CStr, options: &CStr) {
    let status = run_inside(&namespaces(agent), || {
        // SAFETY: strings that end in NUL.
        unsafe {
            libc::mount(
                c"tmpfs".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                options.as_ptr().cast::<libc::c_void>(),
            )
        }
    });
    assert_eq!(status, 0, "mount");
}

/// Whether a process inside the agent's namespaces, with this user id, is served at an abstract unix socket: it sends
/// `hello` and is sent something.
pub(crate) fn is_served_inside(agent: i32, uid: u32, name: &str, kind: c_int, hello: &[u8]) -> bool {
    let namespaces = namespaces(agent);
    let (address, length) = abstract_address(name);
    let status = run_inside(&namespaces, || {
        let mut answer = [0_u8; 16];
        // SAFETY: system calls of a single-threaded child on its own copies.
        unsafe {
            libc::setuid(uid);
            let socket = libc::socket(libc::AF_UNIX, kind, 0);
            if libc::connect(socket, (&raw const address).cast(), length) == -1 {
                return 2;
            }
            libc::send(socket, hello.as_ptr().cast(), hello.len(), libc::MSG_NOSIGNAL);
            i32::from(libc::recv(socket, answer.as_mut_ptr().cast(), answer.len(), 0) <= 0)
        }
    });
    assert!(status == 0 || status == 1, "the socket was not there: {status}");
    status == 0
}

/// The address of an abstract unix socket.
fn abstract_address(name: &str) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: zero is a valid address of no family.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    for (target, byte) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *target = byte as c_char;
    }
    let length = size_of::<libc::sa_family_t>() + 1 + name.len();
    (address, length as libc::socklen_t)
}

/// Runs `work` in a process inside the namespaces and returns its exit code.
fn run_inside(namespaces: &[File; 3], work: impl FnOnce() -> i32) -> i32 {
    run_inside_after(namespaces, || (), |()| work())
}

/// As [`run_inside`], with what `before` made in a process that is in all the namespaces but the pid namespace.
fn run_inside_after<T>(namespaces: &[File; 3], before: impl FnOnce() -> T, work: impl FnOnce(T) -> i32) -> i32 {
    let fds = namespaces.each_ref().map(AsRawFd::as_raw_fd);
    // SAFETY: fork in a threaded process; the children only make system calls on what they inherited.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            for fd in fds {
                if libc::setns(fd, 0) == -1 {
                    libc::_exit(96);
                }
            }
            let made = before();
            // Only a child of ours is in the pid namespace.
            let inside = libc::fork();
            if inside == 0 {
                libc::_exit(work(made));
            }
            let mut status = 0;
            libc::waitpid(inside, &raw mut status, 0);
            libc::_exit(libc::WEXITSTATUS(status));
        }
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        libc::WEXITSTATUS(status)
    }
}

/// Whether this process may make namespaces.
pub(crate) fn is_root() -> bool {
    // SAFETY: takes and touches nothing.
    unsafe { libc::geteuid() == 0 }
}

/// A path as a C string for system calls.
pub(crate) fn c_path(path: &std::path::Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}
