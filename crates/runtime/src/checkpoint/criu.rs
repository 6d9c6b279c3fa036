//! One run of CRIU.
//!
//! It runs in a root of its own ([`jail`]), as the first user of the sandbox's id range, with few of the capabilities of the
//! host's root. As that user it owns the user namespace of the sandbox, and with it has every capability over what is in
//! there: processes, mounts, network. What it does to the host itself needs one of [`FOR_ALL`], or of those for some runs.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions};

use super::rpc::{CriuSettings, Task};
use super::sys as calls;
use super::vetted::PATH;
use super::{jail, preload, rpc};
use crate::kernel;
use crate::setup::ABOVE_PLACES;
use crate::sys::{self, Cloned};
use crate::wire;

/// Capabilities over the host that every run keeps, by their numbers in linux/capability.h, with what CRIU needs them for.
const FOR_ALL: [u32; 7] = [
    6,  // CAP_SETGID: to write the map of group ids
    7,  // CAP_SETUID: to write the map of user ids
    12, // CAP_NET_ADMIN: sizes of buffers of sockets, before Linux 5.17 (`SO_SNDBUFFORCE`)
    18, // CAP_SYS_CHROOT: to enter the mounts of the sandbox
    21, // CAP_SYS_ADMIN: the same, flags of file systems, and filters of system calls that are suspended
    24, // CAP_SYS_RESOURCE: limits and scores of processes that are higher than its own, where the host has it
    40, // CAP_CHECKPOINT_RESTORE: files in memory of processes, and pids
];
/// What a run that writes a checkpoint keeps as well.
const FOR_DUMPS: [u32; 2] = [
    1, // CAP_DAC_OVERRIDE: to link a file whose name was removed, in a directory of any user inside
    2, // CAP_DAC_READ_SEARCH: to see the open files of processes of any user inside
];
/// What a restore keeps as well where CRIU removes names in the sandbox afterwards, which may be in directories of any user
/// inside: `CAP_DAC_OVERRIDE`.
const FOR_NAMES: [u32; 1] = [1];
/// `CAP_DAC_READ_SEARCH`, which opening a watched file by its handle asks for before Linux 6.11, also in a sandbox.
const HANDLES: u32 = 2;
const HANDLES_FREE: (u32, u32) = (6, 11);
/// Descriptor of the library that is loaded before CRIU's own.
const PRELOAD: i32 = 3;
const PRELOADED: &CStr = c"LD_PRELOAD=/proc/self/fd/3";
/// Descriptors of its connection to this process, of the file with its settings, and of its log.
const CONNECTION: i32 = preload::FILTERS + 1;
const SETTINGS: i32 = CONNECTION + 1;
const LOG: i32 = SETTINGS + 1;
/// Maximum number of bytes of a log, or of standard error, that is read for an error.
const LOG_MAX: u64 = 64 * 1024;
/// Pause between two looks at the programs that a run has started and that has to fail.
const STOP_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// A run of CRIU, killed on drop with the processes that it has started for itself.
///
/// It leads a process group of its own. Some of its children stop themselves, so that it can inspect them, and would stay
/// so for good after its end. The kernel ends those as well when this process is killed: a group that nobody is left to
/// control, and that has stopped processes, gets `SIGHUP`.
#[derive(Debug)]
pub(crate) struct Criu {
    process: OwnedFd,
    /// The pid remains that of CRIU until drop, which waits for the process.
    pid: Pid,
    has_succeeded: bool,
    /// Its user.
    base: u32,
    connection: OwnedFd,
    /// Whether it has closed its end, as it does when it ends.
    is_closed: bool,
    /// Its log, and what it and the programs that it starts wrote to standard error.
    log: OwnedFd,
    errors: OwnedFd,
    /// The other end of the socket that answers in the place of the packet filter.
    _filters: Option<OwnedFd>,
}

/// What a run is started with.
#[derive(Debug)]
pub(crate) struct CriuRun<'a> {
    pub(crate) program: &'a Path,
    pub(crate) task: Task,
    pub(crate) settings: &'a CriuSettings,
    /// User id that it runs with.
    pub(crate) base: u32,
    /// Control group that it starts in, instead of that of this process.
    pub(crate) birth: Option<BorrowedFd<'a>>,
    /// Whether it may ask the packet filter of the kernel. If not, it gets an empty answer without that.
    pub(crate) asks_filters: bool,
}

/// What happened in a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CriuEvent {
    /// CRIU has come to a step, and waits for [`Criu::go`].
    Step {
        action: String,
        /// Pid of the first process of the sandbox, on the host; 0 at steps that do not say it.
        init: i32,
    },
    /// CRIU has ended, with this status.
    Ended(i32),
}

impl Criu {
    /// Starts the program with the default signals. `prepare` is called in its process before that, and enters the root
    /// that it runs in.
    ///
    /// # Errors
    /// When no process can be created. What fails after that is in the errors of the run.
    pub(crate) fn start(run: &CriuRun<'_>, prepare: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (connection, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        wire::send(
            connection.as_fd(),
            &rpc::request(run.task, &format!("/proc/self/fd/{SETTINGS}")),
            &[],
        )?;
        let (checkpoint, work) = (jail::CHECKPOINT, jail::WORK);
        let settings = format!(
            "{}images-dir {checkpoint}\nwork-dir {work}\nlog-file /proc/self/fd/{LOG}\n",
            run.settings.text()
        );
        let settings = file_of("settings", settings.as_bytes())?;
        let [log, errors] = ["log", "errors"].map(|name| file_of(name, &[]));
        let (log, errors) = (log?, errors?);
        let library = file_of("geteuid", &preload::library(!run.asks_filters))?;
        let (filters, other_end) = if run.asks_filters {
            (None, None)
        } else {
            preload::filters().map(|(end, other)| (Some(end), Some(other)))?
        };
        let program = CString::new(run.program.as_os_str().as_bytes())?;
        let path = CString::new(format!("PATH={PATH}"))?;
        let kept = capabilities(run.task);
        let number = CString::new(CONNECTION.to_string())?;
        let arguments = [c"criu", c"swrk", &number];
        match sys::clone3(0, run.birth)? {
            Cloned::Parent { pid, pidfd } => Ok(Self {
                process: pidfd,
                pid: Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?,
                has_succeeded: false,
                base: run.base,
                connection,
                is_closed: false,
                log,
                errors,
                _filters: other_end,
            }),
            Cloned::Child => {
                sys::reset_signals();
                let error = prepare()
                    .and_then(|()| place([&errors, &library, &theirs, &settings, &log], filters.as_ref()))
                    .and_then(|()| become_identity(run.base, kept))
                    .map_or_else(
                        |error| error,
                        |()| calls::exec_with(&program, &arguments, &[&path, PRELOADED]),
                    );
                let _ = std::fs::File::from(errors).write_all(error.to_string().as_bytes());
                sys::exit_now(127)
            }
        }
    }

    /// The pid of the process.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// What to poll for input, until [`Self::event`] can be called.
    pub(crate) fn sources(&self) -> [BorrowedFd<'_>; 2] {
        let process = self.process.as_fd();
        if self.is_closed {
            [process, process]
        } else {
            [self.connection.as_fd(), process]
        }
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// When it sends what is no message of CRIU.
    pub(crate) fn event(&mut self) -> io::Result<Option<CriuEvent>> {
        let ready = |fd: BorrowedFd<'_>| -> io::Result<bool> {
            let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            Ok(rustix::event::poll(&mut poll, Some(&rustix::time::Timespec::default()))? > 0)
        };
        while !self.is_closed && ready(self.connection.as_fd())? {
            match wire::receive(self.connection.as_fd())? {
                Some((message, _)) => {
                    if let Some((action, init)) = rpc::step(&message)? {
                        return Ok(Some(CriuEvent::Step { action, init }));
                    }
                }
                None => self.is_closed = true,
            }
        }
        if !ready(self.process.as_fd())? {
            return Ok(None);
        }
        // Its pid is not free before its group is ended.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = rustix::process::waitid(WaitId::PidFd(self.process.as_fd()), options)?;
        let status = status.and_then(|status| status.exit_status()).unwrap_or(-1);
        self.has_succeeded = status == 0;
        Ok(Some(CriuEvent::Ended(status)))
    }

    /// Lets CRIU continue after a step.
    ///
    /// # Errors
    /// When it has ended.
    pub(crate) fn go(&mut self) -> io::Result<()> {
        self.answer(true)
    }

    /// Has CRIU fail at the step at which it waits, where it can still do that. At `post-restore` it ends what it has restored,
    /// of which nothing has run, and removes the names that it gave to deleted files.
    ///
    /// # Errors
    /// When it has ended.
    pub(crate) fn refuse(&mut self) -> io::Result<()> {
        self.answer(false)
    }

    fn answer(&self, goes_on: bool) -> io::Result<()> {
        wire::send(self.connection.as_fd(), &rpc::answer(goes_on), &[])
    }

    /// Makes CRIU fail, so that it lets go of all processes itself: killed in the middle of what it does in a process, it could leave
    /// that damaged. It can write to no file any more, so what it is about fails as on a disk that is full, and the step at
    /// which it waits or arrives is refused. Returns whether it has ended in time.
    ///
    /// Only for a run in which writes beyond the maximum size of files fail.
    pub(crate) fn stop(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        // The step at which it waits, or the next one.
        let _ = self.answer(false);
        while Instant::now() < deadline {
            // Also programs that it starts, such as an archiver.
            self.forbid_files();
            match self.event() {
                Ok(Some(CriuEvent::Ended(_))) => return true,
                Ok(Some(CriuEvent::Step { .. })) => {
                    let _ = self.answer(false);
                }
                Ok(None) => {
                    let mut poll = self.sources().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                    let _ = rustix::event::poll(&mut poll, Some(&STOP_PAUSE));
                }
                Err(_) => return false,
            }
        }
        false
    }

    fn forbid_files(&self) {
        // With its ids, because not every host has the privilege to do it otherwise.
        if sys::set_ids(self.base, self.base, 0).is_ok() {
            forbid_files(self.pid());
        }
        let _ = sys::set_ids(0, 0, 0);
    }

    /// Why it failed: the last errors in its log, and what it wrote to standard error.
    pub(crate) fn why(&self) -> String {
        let mut text = String::new();
        for file in [&self.log, &self.errors] {
            if let Ok(file) = file.try_clone() {
                let mut file = File::from(file);
                let _ = file.rewind();
                let mut bytes = Vec::new();
                let _ = file.take(LOG_MAX).read_to_end(&mut bytes);
                text.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
        reason(&text)
    }
}

impl Drop for Criu {
    fn drop(&mut self) {
        if !self.has_succeeded {
            // Alone first: it may not have got as far as its group.
            let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
        let _ = rustix::process::waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Forbids a process and those below it to write to files.
fn forbid_files(pid: i32) {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let Some(process) = Pid::from_raw(pid) else { return };
    // It may have ended.
    let _ = rustix::process::prlimit(Some(process), Resource::Fsize, none);
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
        .for_each(forbid_files);
}

/// The first error of a log, which is the cause of those that follow.
fn reason(log: &str) -> String {
    const HARMLESS: [&str; 1] = ["Can't setup RLIMIT_NOFILE for self"];
    let errors = log.lines().filter(|line| line.contains("Error ("));
    let mut errors = errors.filter(|line| !HARMLESS.iter().any(|harmless| line.contains(harmless)));
    let line = errors.next().or_else(|| log.lines().last()).unwrap_or_default();
    // `(00.012345)    123: Error (criu/files.c:12): text`
    let text = line.split_once("Error (").and_then(|(_, rest)| rest.split_once("): "));
    text.map_or(line, |(_, text)| text).trim().to_owned()
}

/// Whether the reason of a failure may be gone at once. CRIU says this of a process that it could neither trace nor wait for,
/// because it was just ending, and of one that had just ended and nobody had waited for yet.
pub(crate) fn is_passing(reason: &str) -> bool {
    // At the beginning, because what follows may be chosen inside of the sandbox.
    ["Unseizable non-zombie", "zombie "]
        .iter()
        .any(|begin| reason.starts_with(begin))
}

/// A file in memory with this content.
fn file_of(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    File::from(file.try_clone()?).write_all(content)?;
    Ok(file)
}

/// The capabilities over the host that a run keeps, as a set of bits.
fn capabilities(task: Task) -> u64 {
    let mut kept = FOR_ALL.to_vec();
    match task {
        Task::Dump { .. } => kept.extend(FOR_DUMPS),
        Task::Restore { removes_names } => {
            kept.extend(FOR_NAMES.iter().filter(|_| removes_names));
            kept.extend((kernel::release_numbers(&kernel::release()) < Some(HANDLES_FREE)).then_some(HANDLES));
        }
    }
    kept.iter().fold(0, |set, number| set | 1 << number)
}

fn become_identity(base: u32, kept: u64) -> io::Result<()> {
    rustix::process::setpgid(None, None)?;
    sys::join_new_session_keyring()?;
    sys::clear_groups()?;
    sys::set_ids(base, base, 0)?;
    calls::keep_capabilities_at_exec(kept)?;
    sys::prctl(libc::PR_SET_PDEATHSIG, u64::from(libc::SIGKILL.cast_unsigned()))?;
    sys::prctl(libc::PR_SET_DUMPABLE, 1)
}

fn place([errors, library, connection, settings, log]: [&OwnedFd; 5], filters: Option<&OwnedFd>) -> io::Result<()> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let places = [
        (&null, 0),
        (&null, 1),
        (errors, 2),
        (library, PRELOAD),
        (connection, CONNECTION),
        (settings, SETTINGS),
        (log, LOG),
    ];
    let places = places.into_iter().chain(filters.map(|fd| (fd, preload::FILTERS)));
    let placed: Vec<(i32, i32)> = places
        .map(|(fd, target)| Ok((sys::raise_fd(fd.as_raw_fd(), ABOVE_PLACES)?, target)))
        .collect::<io::Result<_>>()?;
    sys::close_from_at_exec(3)?;
    placed.iter().try_for_each(|(fd, target)| sys::place_fd(*fd, *target))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;

    /// The process with which CRIU probes what the kernel can do stops itself.
    #[test]
    fn a_stopped_child_ends_with_it() {
        if !is_alone("checkpoint::criu::tests::a_stopped_child_ends_with_it") {
            return;
        }
        const PROGRAM: &str = "sh -c 'kill -STOP $$' & echo $! >&2; wait";
        let directory = tempfile::tempdir().unwrap();
        // A file that a shell is told to read by the arguments of CRIU.
        std::fs::write(directory.path().join("swrk"), PROGRAM).unwrap();
        let prepare = || std::env::set_current_dir(directory.path());
        let run = CriuRun {
            program: Path::new("/bin/sh"),
            task: Task::Restore { removes_names: false },
            settings: &CriuSettings::new(),
            base: 0,
            birth: None,
            asks_filters: true,
        };
        let criu = Criu::start(&run, prepare).unwrap();
        let state = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
        };
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !is_so() {
                assert!(std::time::Instant::now() < deadline, "not within 10 s: {what}");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        let written = || criu.why();
        until("it says the pid of its child", &|| written().parse::<u32>().is_ok());
        let child = written();
        until("the child is stopped", &|| state(&child) == Some('T'));
        drop(criu);
        until("the child has ended", &|| matches!(state(&child), None | Some('Z')));
    }

    #[test]
    fn the_first_error_is_the_reason() {
        let log = "(00.00) Warn  (a.c:1): x\n(00.00) Error (criu/util.c:15): rlimit: Can't setup RLIMIT_NOFILE for self: \
                   Operation not permitted\n(00.01)  7: Error (criu/files.c:1): the cause\n(00.02) Error (b.c:1): after\n";
        assert_eq!(reason(log), "the cause");
        assert_eq!(reason("criu: not found\n"), "criu: not found");
        assert_eq!(reason(""), "");
    }

    #[test]
    fn a_process_that_was_ending_is_no_reason_to_give_up() {
        // A line of CRIU 4.2, seen beside other programs.
        let log =
            "(00.011270) Error (compel/src/lib/infect.c:419): Unseizable non-zombie 20934 found, state X, err -1/10\n";
        assert!(is_passing(&reason(log)));
        let ended = "(00.01) Error (criu/seize.c:1): zombie 35541 (comm ) found while seizing\n";
        assert!(is_passing(&reason(ended)));
        let named = "(00.02) Error (criu/files-reg.c:1): Can't dump ghost file /tmp/Unseizable non-zombie of 70 MiB\n";
        assert!(!is_passing(&reason(named)));
    }
}
