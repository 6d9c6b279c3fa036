//! Every raw system call of the agent, behind safe functions.
//!
//! The one that needs care is [`Child::clone_into_parent`]: the new process shares its maker's memory until it
//! executes, so everything it touches is prepared before and it only makes system calls.
#![expect(unsafe_code, reason = "the only module of this crate that may")]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_char, c_int, c_void};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Keeps the heap of an idle process small: one arena, and memory from 128 KiB on goes back to the kernel when freed.
pub(crate) fn keep_heap_small() {
    const THRESHOLD: c_int = 128 * 1024;
    // SAFETY: mallopt only sets parameters of the allocator; no memory is passed.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, THRESHOLD);
        libc::mallopt(libc::M_TRIM_THRESHOLD, THRESHOLD);
    }
}

/// The signals that [`ignore_signals`] ignores.
pub(crate) const IGNORED: [c_int; 7] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGPIPE,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Ignores the signals by which a process of the sandbox could end this one by accident (`kill -1`), or a closed
/// pipe could.
pub(crate) fn ignore_signals() {
    for signal in IGNORED {
        // SAFETY: SIG_IGN installs no handler code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Gives this thread, and those it starts, a saved group id that its other group ids are not.
///
/// The kernel lets a process set the resource limits of another one whose user and group ids, saved ones included, are
/// all the same as its own; root in the sandbox would otherwise take our descriptors or our processor time away. No
/// program can be the like of us now, because it cannot have two group ids where one is compared.
pub(crate) fn stand_apart() {
    const NOGROUP: libc::gid_t = 65_534;
    const UNCHANGED: libc::gid_t = libc::gid_t::MAX;
    // SAFETY: changes the saved group id only. Outside a sandbox it may be forbidden; then we stay as we are.
    unsafe { libc::syscall(libc::SYS_setresgid, UNCHANGED, UNCHANGED, NOGROUP) };
}

/// Takes ownership of an inherited file descriptor and marks it close-on-exec.
///
/// # Errors
/// EBADF when nothing is open under that number.
pub(crate) fn adopt_fd(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD takes no pointer; a closed number is answered with EBADF.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the number is open, and the entry points of this crate adopt each inherited number once, before
    // anything else opens files.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Registers an open file with the event loop.
///
/// # Errors
/// Those of registering it.
pub(crate) fn watch(file: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open file for as long as the registration lives, which owns it.
    Ok(unsafe { AsyncFd::register_with_interest(file, interest) }?)
}

/// Pid and uid of a unix socket's peer as seen from here; pid 0 is a process outside this pid namespace.
///
/// # Errors
/// Those of getsockopt.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(i32, u32)> {
    let mut credentials = libc::ucred {
        pid: -1,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    #[expect(clippy::cast_possible_truncation, reason = "a structure of a few bytes")]
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals, and the length says how much may be written.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast::<c_void>(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok((credentials.pid, credentials.uid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes that were written to a unix socket and that its peer has not read, with the kernel's overhead for them.
///
/// # Errors
/// Those of ioctl.
pub(crate) fn unread_by_peer(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut unread: c_int = 0;
    // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int to a live local.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) } {
        0 => Ok(u32::try_from(unread).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reaps one dead child: its pid and its raw wait status. `None` when none is dead.
pub(crate) fn reap_one() -> Option<(u32, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: the status is a live local.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        match u32::try_from(pid) {
            Ok(0) => return None,
            Ok(pid) => return Some((pid, status)),
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// Kills every process that this one may signal: as pid 1, all others of its pid namespace.
pub(crate) fn kill_all_others() {
    // SAFETY: takes numbers only; -1 leaves out the caller and, in a pid namespace, what is outside of it.
    unsafe { libc::kill(-1, libc::SIGKILL) };
}

/// Step between clone and exec that a child failed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Terminal,
    User,
    Directory,
}

const STAGES: [Stage; 3] = [Stage::Terminal, Stage::User, Stage::Directory];

/// Why there is no child.
#[derive(Debug)]
pub(crate) enum CloneError {
    /// No process could be made.
    Clone(io::Error),
    /// The process was created, and gave up before executing.
    Setup(Stage, io::Error),
}

/// All that a new process needs, prepared so that it has nothing to allocate.
#[derive(Debug)]
pub(crate) struct Child {
    /// Files to try, in order.
    pub(crate) candidates: Vec<CString>,
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) cwd: CString,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    /// Whether stdin is a terminal to become the controlling one of a new session.
    pub(crate) terminal: bool,
    pub(crate) stdio: [OwnedFd; 3],
}

/// A stack for new processes. 64 KiB is sixteen times what the deepest call of [`child_main`] needs.
#[derive(Debug)]
pub(crate) struct ChildStack(Box<[u128]>);

impl ChildStack {
    pub(crate) fn new() -> Self {
        Self(vec![0; 4096].into_boxed_slice())
    }
}

/// What [`child_main`] works with: pointers into the prepared [`Child`].
struct Prepared {
    candidates: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    /// `/bin/sh`, a place for the file, the arguments: for scripts without an interpreter line.
    shell_argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: *const c_char,
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
    terminal: bool,
    stdio: [RawFd; 3],
    name: *const c_char,
    name_length: usize,
    /// 1 + index into [`STAGES`] once the child gave up.
    failed_stage: AtomicI32,
    failed_errno: AtomicI32,
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

impl Child {
    /// Makes the process, as a child of this process's parent, and returns its pid once it executed.
    ///
    /// A file that cannot be executed is not an error here: the new process says so on its stderr and exits with 127
    /// (nothing there) or 126, as a shell would.
    ///
    /// # Errors
    /// [`CloneError`].
    pub(crate) fn clone_into_parent(&self, stack: &mut ChildStack) -> Result<u32, CloneError> {
        const SHELL: &CStr = c"/bin/sh";
        let argv = pointers(&self.argv);
        let mut shell_argv = vec![SHELL.as_ptr(), ptr::null()];
        shell_argv.extend(argv.iter().skip(1));
        let name = self.argv.first().map_or(c"", CString::as_c_str);
        let mut prepared = Prepared {
            candidates: pointers(&self.candidates),
            argv,
            shell_argv,
            env: pointers(&self.env),
            cwd: self.cwd.as_ptr(),
            uid: self.uid,
            gid: self.gid,
            groups: self.groups.as_ptr(),
            group_count: self.groups.len(),
            terminal: self.terminal,
            stdio: [
                self.stdio[0].as_raw_fd(),
                self.stdio[1].as_raw_fd(),
                self.stdio[2].as_raw_fd(),
            ],
            name: name.as_ptr(),
            name_length: name.to_bytes().len(),
            failed_stage: AtomicI32::new(0),
            failed_errno: AtomicI32::new(0),
        };
        // CLONE_PARENT hands the process to pid 1, which reaps it. CLONE_VM and CLONE_VFORK make it as cheap as
        // posix_spawn: no page table is copied, and we sleep until it executed or exited.
        let flags = libc::CLONE_PARENT | libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the stack pointer is the aligned end of memory that lives through the call; because of CLONE_VFORK
        // the child is done with it, and with `prepared`, when clone returns. The glibc function uses the clone
        // system call, not clone3. The child shares no Rust value but `prepared` and allocates nothing.
        let pid = unsafe {
            libc::clone(
                child_main,
                stack.0.as_mut_ptr_range().end.cast::<c_void>(),
                flags,
                (&raw mut prepared).cast::<c_void>(),
            )
        };
        let Ok(pid) = u32::try_from(pid) else {
            return Err(CloneError::Clone(io::Error::last_os_error()));
        };
        let stage = usize::try_from(prepared.failed_stage.load(Ordering::Acquire)).unwrap_or(0);
        match stage.checked_sub(1).and_then(|index| STAGES.get(index)) {
            None => Ok(pid),
            Some(stage) => {
                let errno = prepared.failed_errno.load(Ordering::Acquire);
                Err(CloneError::Setup(*stage, io::Error::from_raw_os_error(errno)))
            }
        }
    }
}

fn errno() -> c_int {
    // SAFETY: the location is this thread's and always valid.
    unsafe { *libc::__errno_location() }
}

/// The new process. Only system calls, and glibc functions that are nothing else.
extern "C" fn child_main(argument: *mut c_void) -> c_int {
    // SAFETY: the argument is the `Prepared` of `clone_into_parent`, which sleeps until this process is done with it.
    let prepared = unsafe { &mut *argument.cast::<Prepared>() };
    let stage = match set_up(prepared) {
        Ok(()) => {
            let error = execute(prepared);
            complain(prepared, error);
            let code = if matches!(error, libc::ENOENT | libc::ENOTDIR) {
                127
            } else {
                126
            };
            // SAFETY: _exit does not return and runs no handlers.
            unsafe { libc::_exit(code) }
        }
        Err(stage) => stage,
    };
    prepared.failed_errno.store(errno(), Ordering::Release);
    prepared.failed_stage.store(stage as c_int + 1, Ordering::Release);
    // SAFETY: as above.
    unsafe { libc::_exit(127) }
}

fn set_up(prepared: &Prepared) -> Result<(), Stage> {
    fn ok(result: c_int, stage: Stage) -> Result<(), Stage> {
        if result == -1 { Err(stage) } else { Ok(()) }
    }
    // SAFETY: system calls on numbers, and on pointers into the prepared child, which outlives this process's use of
    // it. Raw setgroups, setgid and setuid: glibc's own would signal the threads of the maker.
    unsafe {
        if prepared.terminal {
            ok(libc::setsid(), Stage::Terminal)?;
        }
        // Received descriptors are numbered above 2, so no copy overwrites a source.
        for (target, source) in (0..).zip(prepared.stdio) {
            ok(libc::dup2(source, target), Stage::Terminal)?;
        }
        if prepared.terminal {
            ok(libc::ioctl(0, libc::TIOCSCTTY, 0), Stage::Terminal)?;
        }
        // Raw, because glibc keeps two signals to itself, which a container manager may have left ignored. All zero is
        // the kernel's action "default" with no flags; 8 is the size of its signal sets.
        let default_action = [0_u64; 4];
        for signal in 1..=64 {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default_action.as_ptr(),
                ptr::null_mut::<c_void>(),
                8,
            );
        }
        let none: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::umask(0o022);
        let to_int = |result: libc::c_long| if result == -1 { -1 } else { 0 };
        let groups = libc::syscall(libc::SYS_setgroups, prepared.group_count, prepared.groups);
        ok(to_int(groups), Stage::User)?;
        ok(to_int(libc::syscall(libc::SYS_setgid, prepared.gid)), Stage::User)?;
        ok(to_int(libc::syscall(libc::SYS_setuid, prepared.uid)), Stage::User)?;
        ok(libc::chdir(prepared.cwd), Stage::Directory)?;
        // Where the call is missing, every descriptor is close-on-exec anyway.
        libc::syscall(libc::SYS_close_range, 3, c_int::MAX, 0);
    }
    Ok(())
}

/// Tries the candidates as execvp would, and returns why none was executed.
fn execute(prepared: &mut Prepared) -> c_int {
    let mut reason = libc::ENOENT;
    for index in 0..prepared.candidates.len().saturating_sub(1) {
        let file = prepared.candidates[index];
        // SAFETY: null-terminated arrays of null-terminated strings that the sleeping maker owns.
        unsafe { libc::execve(file, prepared.argv.as_ptr(), prepared.env.as_ptr()) };
        match errno() {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => reason = libc::EACCES,
            libc::ENOEXEC => {
                prepared.shell_argv[1] = file;
                // SAFETY: as above.
                unsafe {
                    libc::execve(
                        prepared.shell_argv[0],
                        prepared.shell_argv.as_ptr(),
                        prepared.env.as_ptr(),
                    );
                }
                return libc::ENOEXEC;
            }
            error => return error,
        }
    }
    reason
}

/// Writes to stderr why the program did not start.
fn complain(prepared: &Prepared, error: c_int) {
    let why = match error {
        libc::ENOENT | libc::ENOTDIR => ": No such file or directory\n",
        libc::EACCES => ": Permission denied\n",
        libc::E2BIG => ": Argument list too long\n",
        libc::ENOMEM => ": Cannot allocate memory\n",
        libc::ELOOP => ": Too many levels of symbolic links\n",
        libc::ENAMETOOLONG => ": File name too long\n",
        libc::EISDIR => ": Is a directory\n",
        _ => ": Exec format error\n",
    };
    let parts = [
        libc::iovec {
            iov_base: prepared.name.cast_mut().cast::<c_void>(),
            iov_len: prepared.name_length,
        },
        libc::iovec {
            iov_base: why.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: why.len(),
        },
    ];
    // SAFETY: two buffers with their lengths; a result would not be used.
    unsafe { libc::writev(2, parts.as_ptr(), 2) };
}
