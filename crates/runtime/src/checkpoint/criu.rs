//! One run of CRIU.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{CWD, FileType, MemfdFlags, Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions};

use super::preload;
use super::sys as calls;
use crate::setup::ABOVE_PLACES;
use crate::sys::{self, Cloned};

/// The program that CRIU starts at each step: at those that matter, it says which it is, and waits for the answer. The first
/// two are only there to be refused: before CRIU writes anything, they are where it can be made to fail ([`Criu::stop`]). It
/// has no descriptors of CRIU's but the log, so both go through named pipes beside it.
///
/// It is a child of CRIU, and nothing ends it with CRIU. So none of its steps may wait for the other end of a pipe to be
/// opened: it opens each for both directions first, which never waits, and with that open the end that it reads from. Once
/// it has closed the former, it sees the end of the pipe when there is nobody else.
const SCRIPT: &str = r#"#!/bin/sh
case $CRTOOLS_SCRIPT_ACTION in
pre-dump | network-lock | post-dump | setup-namespaces | post-restore | pre-resume)
    directory=${0%/*}
    test -p "$directory/answer" && test -p "$directory/step" || exit 1
    exec 4<>"$directory/answer" 3<"$directory/answer" 4>&-
    echo "$CRTOOLS_SCRIPT_ACTION $$ $CRTOOLS_INIT_PID" 1<>"$directory/step"
    read answer <&3
    test "$answer" = go
    ;;
esac
"#;
/// Names in the directory of a run.
const SCRIPT_FILE: &str = "script";
const STEP: &str = "step";
const ANSWER: &str = "answer";
/// Where programs are that CRIU starts: a shell, and `tar` for files in memory.
const PATH: &CStr = c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Descriptor of the library that is loaded before CRIU's own.
const PRELOAD: i32 = 3;
const PRELOADED: &CStr = c"LD_PRELOAD=/proc/self/fd/3";
/// Maximum length of a line that a script writes.
const LINE_MAX: usize = 256;
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
    /// It remains its own until drop, which waits for the process.
    pid: Pid,
    has_succeeded: bool,
    /// Its user.
    base: u32,
    /// The directory of its script.
    directory: PathBuf,
    steps: File,
    answers: Option<File>,
    errors: OwnedFd,
    /// The other end of what answers in the place of the packet filter.
    _filters: Option<OwnedFd>,
    line: Vec<u8>,
}

/// What happened in a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CriuEvent {
    /// It has come to a step, and waits for [`Criu::go`].
    Step {
        action: String,
        /// Pid of the script.
        script: i32,
        /// Pid of the first process of the sandbox, on the host; 0 where it is not known yet.
        init: i32,
    },
    /// It has ended, with this status.
    Ended(i32),
}

impl Criu {
    /// Starts `program` with the default signals, the user id `base`, and with its script in `directory`, which exists. `prepare` is called in its process before that. With
    /// `asks_filters`, what it asks the packet filter of the kernel is answered.
    ///
    /// # Errors
    /// When no process can be created. What fails after that is in the errors of the run.
    pub(crate) fn start(
        program: &Path,
        arguments: &[String],
        directory: &Path,
        base: u32,
        birth: Option<BorrowedFd<'_>>,
        asks_filters: bool,
        prepare: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Self> {
        let script = directory.join(SCRIPT_FILE);
        std::fs::write(&script, SCRIPT)?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        let script_arguments = ["--action-script".to_owned(), script.to_string_lossy().into_owned()];
        let (steps, answers) = (make_pipe(&directory.join(STEP))?, make_pipe(&directory.join(ANSWER))?);
        let errors = rustix::fs::memfd_create("errors", MemfdFlags::CLOEXEC)?;
        let library = rustix::fs::memfd_create("geteuid", MemfdFlags::CLOEXEC)?;
        std::fs::File::from(library.try_clone()?).write_all(&preload::library(!asks_filters))?;
        let (filters, other_end) = match asks_filters {
            true => (None, None),
            false => preload::filters().map(|(end, other)| (Some(end), Some(other)))?,
        };
        let program = CString::new(program.as_os_str().as_bytes())?;
        let arguments = arguments
            .iter()
            .chain(&script_arguments)
            .map(|argument| CString::new(argument.as_bytes()))
            .collect::<Result<Vec<_>, _>>()?;
        let arguments: Vec<&CStr> = [c"criu"]
            .into_iter()
            .chain(arguments.iter().map(CString::as_c_str))
            .collect();
        match sys::clone3(0, birth)? {
            Cloned::Parent { pid, pidfd } => Ok(Self {
                process: pidfd,
                pid: Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?,
                has_succeeded: false,
                base,
                directory: directory.to_owned(),
                steps,
                answers: Some(answers),
                errors,
                _filters: other_end,
                line: Vec::new(),
            }),
            Cloned::Child => {
                sys::reset_signals();
                let error = prepare()
                    .and_then(|()| become_identity(base))
                    .and_then(|()| place(&errors, &library, filters.as_ref()))
                    .map_or_else(
                        |error| error,
                        |()| calls::exec_with(&program, &arguments, &[PATH, PRELOADED]),
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
        [self.steps.as_fd(), self.process.as_fd()]
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// When a script writes something else.
    pub(crate) fn event(&mut self) -> io::Result<Option<CriuEvent>> {
        let ready = |fd: BorrowedFd<'_>| -> io::Result<bool> {
            let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            Ok(rustix::event::poll(&mut poll, Some(&rustix::time::Timespec::default()))? > 0)
        };
        if ready(self.steps.as_fd())? {
            let mut bytes = [0; LINE_MAX];
            let length = self.steps.read(&mut bytes)?;
            self.line.extend(&bytes[..length]);
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                let mut words = line.split_whitespace();
                let action = words.next().unwrap_or_default().to_owned();
                let mut pid = || words.next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
                let (script, init) = (pid(), pid());
                return Ok(Some(CriuEvent::Step { action, script, init }));
            }
            if self.line.len() > LINE_MAX {
                return Err(io::ErrorKind::InvalidData.into());
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

    /// Lets it continue after a step.
    ///
    /// # Errors
    /// When it has ended.
    pub(crate) fn go(&mut self) -> io::Result<()> {
        match &mut self.answers {
            Some(answers) => answers.write_all(b"go\n"),
            None => Ok(()),
        }
    }

    /// Has it fail, and let go of all processes itself: killed in the middle of what it does in a process, it could leave
    /// that damaged. It can write to no file any more, so what it is about fails as on a disk that is full, and the step at
    /// which it waits or arrives is refused. Returns whether it has ended in time.
    ///
    /// Only for a run in which writes beyond the maximum size of files fail.
    pub(crate) fn stop(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        if let Some(answers) = &mut self.answers {
            let _ = answers.write_all(b"no\n");
        }
        while Instant::now() < deadline {
            // Also programs that it starts, such as an archiver.
            self.forbid_files();
            match self.event() {
                Ok(Some(CriuEvent::Ended(_))) => return true,
                // Refused already.
                Ok(Some(CriuEvent::Step { .. })) => {}
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
    pub(crate) fn why(&self, log: &Path) -> String {
        let mut text = String::new();
        if let Ok(file) = std::fs::File::open(log) {
            let _ = file.take(LOG_MAX).read_to_string(&mut text);
        }
        if let Ok(errors) = self.errors.try_clone() {
            let mut errors = std::fs::File::from(errors);
            let _ = errors.rewind();
            let _ = errors.take(LOG_MAX).read_to_string(&mut text);
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
        // A script that waits for an answer sees the end of it.
        self.answers = None;
        for name in [SCRIPT_FILE, STEP, ANSWER] {
            let _ = std::fs::remove_file(self.directory.join(name));
        }
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

/// A named pipe, open for both directions, so that neither end waits for the other or sees its end.
fn make_pipe(path: &Path) -> io::Result<File> {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

fn become_identity(base: u32) -> io::Result<()> {
    rustix::process::setpgid(None, None)?;
    sys::join_new_session_keyring()?;
    sys::clear_groups()?;
    sys::set_ids(base, base, 0)?;
    calls::keep_capabilities_at_exec()?;
    sys::prctl(libc::PR_SET_PDEATHSIG, u64::from(libc::SIGKILL.cast_unsigned()))?;
    sys::prctl(libc::PR_SET_DUMPABLE, 1)
}

fn place(errors: &OwnedFd, library: &OwnedFd, filters: Option<&OwnedFd>) -> io::Result<()> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let raise = |fd: i32| sys::raise_fd(fd, ABOVE_PLACES);
    let mut placed = vec![
        (raise(null.as_raw_fd())?, 0),
        (raise(null.as_raw_fd())?, 1),
        (raise(errors.as_raw_fd())?, 2),
        (raise(library.as_raw_fd())?, PRELOAD),
    ];
    if let Some(filters) = filters {
        placed.push((raise(filters.as_raw_fd())?, preload::FILTERS));
    }
    sys::close_from_at_exec(3)?;
    placed.iter().try_for_each(|(fd, target)| sys::place_fd(*fd, *target))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of a run whose other side is gone, whatever of it is left.
    #[test]
    fn a_script_that_nobody_answers_ends() {
        for pipes in [&[STEP, ANSWER][..], &[STEP], &[]] {
            let directory = tempfile::tempdir().unwrap();
            let script = directory.path().join(SCRIPT_FILE);
            std::fs::write(&script, SCRIPT).unwrap();
            for name in pipes {
                make_pipe(&directory.path().join(name)).unwrap();
            }
            let mut step = std::process::Command::new("timeout");
            step.args(["10", "sh"])
                .arg(&script)
                .env("CRTOOLS_SCRIPT_ACTION", "post-dump");
            let status = step.status().unwrap();
            assert_eq!(status.code(), Some(1), "with {pipes:?}");
        }
    }

    #[test]
    fn a_script_says_its_step_and_waits_for_the_answer() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join(SCRIPT_FILE);
        std::fs::write(&script, SCRIPT).unwrap();
        let [mut steps, mut answers] = [STEP, ANSWER].map(|name| make_pipe(&directory.path().join(name)).unwrap());
        for (answer, expected) in [(&b"go\n"[..], 0), (b"no\n", 1)] {
            let mut step = std::process::Command::new("timeout");
            step.args(["10", "sh"])
                .arg(&script)
                .env("CRTOOLS_SCRIPT_ACTION", "pre-resume")
                .env("CRTOOLS_INIT_PID", "7");
            let mut step = step.spawn().unwrap();
            let mut poll = [PollFd::new(&steps, PollFlags::IN)];
            rustix::event::poll(&mut poll, None).unwrap();
            let mut line = [0; LINE_MAX];
            let length = steps.read(&mut line).unwrap();
            let line = String::from_utf8_lossy(&line[..length]).into_owned();
            assert!(line.starts_with("pre-resume ") && line.ends_with(" 7\n"), "{line:?}");
            answers.write_all(answer).unwrap();
            assert_eq!(step.wait().unwrap().code(), Some(expected));
        }
    }

    /// The process with which CRIU probes what the kernel can do stops itself.
    #[test]
    fn a_stopped_child_ends_with_it() {
        const PROGRAM: &str = "sh -c 'kill -STOP $$' & echo $! >&2; wait";
        let directory = tempfile::tempdir().unwrap();
        let arguments = ["-c", PROGRAM].map(str::to_owned);
        let criu = Criu::start(
            Path::new("/bin/sh"),
            &arguments,
            directory.path(),
            0,
            None,
            true,
            || Ok(()),
        )
        .unwrap();
        let state = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
        };
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while !is_so() {
                assert!(std::time::Instant::now() < deadline, "not within 10 s: {what}");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        let written = || criu.why(Path::new("/nowhere"));
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
}
