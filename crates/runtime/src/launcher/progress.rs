//! Whether a run of CRIU goes on, or waits for something that does not come.
//!
//! What CRIU makes again was chosen in the sandbox, and with some of it can be waited for without end: a FIFO at a place
//! where it opens a file, a lock that another process holds. A time limit alone would have to be long, because a restore on
//! a busy host, or of much memory, takes long. So its processes are looked at: one that waits in a sleep that a signal
//! ends, and has done nothing since, makes no progress, however fast the host is. One that wants a processor or waits for a
//! disk is in another state.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::io;
use std::time::Duration;

/// Time between two looks. A restore of a small sandbox is over before the first.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// How many looks in a row have to find that nothing has happened: CRIU has stood still for two seconds and a half then. It
/// sleeps for much less where it has to wait for a process of its own; all else that it waits for is a disk, a processor or
/// the conductor, which are not counted. Looks are counted, and not time, because the conductor may have been stopped with
/// the host.
const QUIET_LOOKS: u32 = 5;

/// The processes of a run.
#[derive(Debug)]
pub(super) struct Progress {
    pid: i32,
    seen: Option<u64>,
    quiet: u32,
}

impl Progress {
    /// Of the process of a run, and those below it.
    pub(super) fn of(pid: i32) -> Self {
        Self {
            pid,
            seen: None,
            quiet: 0,
        }
    }

    /// Begins anew: it was told to go on.
    pub(super) fn again(&mut self) {
        *self = Self::of(self.pid);
    }

    /// Looks at it, and returns whether it has stood still for too long.
    pub(super) fn is_stuck(&mut self) -> bool {
        let mut hash = DefaultHasher::new();
        let now = match look(self.pid, &mut hash) {
            // A process that wants to go on, or that has ended between: it is not asleep.
            Ok(true) | Err(_) => None,
            Ok(false) => Some(hash.finish()),
        };
        self.quiet = if now.is_some() && now == self.seen {
            self.quiet + 1
        } else {
            0
        };
        self.seen = now;
        self.quiet >= QUIET_LOOKS
    }
}

/// Whether one of a process, its threads and those below it can go on or is about to. What they have done so far goes into
/// `done`.
fn look(pid: i32, done: &mut DefaultHasher) -> io::Result<bool> {
    let tasks = format!("/proc/{pid}/task");
    for task in std::fs::read_dir(&tasks)? {
        let task = task?.path();
        let file = |name: &str| std::fs::read_to_string(task.join(name));
        let stat = file("stat")?;
        let (is_awake, counters) = state(&stat).ok_or(io::ErrorKind::InvalidData)?;
        if is_awake {
            return Ok(true);
        }
        (&task, counters).hash(done);
        for child in file("children")?.split_whitespace() {
            if look(child.parse().map_err(io::Error::other)?, done)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Of the line of a task in `/proc`: whether it runs, wants to, or waits for a disk, and what it has done: faults and
/// processor time.
fn state(stat: &str) -> Option<(bool, Vec<&str>)> {
    // The name, which is in parentheses, can have any characters.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let is_awake = matches!(*fields.first()?, "R" | "D");
    Some((is_awake, fields.get(7..15)?.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_state_of_a_task_is_read() {
        let stat = "7 (a) R (b) S 1 7 7 0 -1 4194304 10 11 12 13 14 15 16 17 20 0 1 0 99 5000 100";
        let counters = vec!["10", "11", "12", "13", "14", "15", "16", "17"];
        assert_eq!(state(stat), Some((false, counters.clone())));
        assert_eq!(state(&stat.replace(") S", ") D")), Some((true, counters)));
        assert_eq!(state("7 (a"), None);
        assert_eq!(state("7 (a) R 1"), None);
    }

    /// A shell that runs `script`, killed with those below it when the test ends.
    struct Shell(std::process::Child);

    impl Shell {
        #[expect(clippy::disallowed_methods, reason = "a test starts the process that it looks at")]
        fn run(script: &str) -> Self {
            use std::os::unix::process::CommandExt as _;
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]).stdin(Stdio::null()).process_group(0);
            Self(command.spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            self.0.id().cast_signed()
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            let group = rustix::process::Pid::from_raw(self.pid()).unwrap();
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.0.wait();
        }
    }

    /// How many looks it takes until it is stuck; none if it is not within as many as `most`.
    fn looks_until_stuck(shell: &Shell, most: u32) -> Option<u32> {
        let mut progress = Progress::of(shell.pid());
        (1..=most).find(|_| {
            std::thread::sleep(LOOK / 5);
            progress.is_stuck()
        })
    }

    #[test]
    fn what_waits_for_a_fifo_is_stuck() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        // Below it, as what CRIU starts.
        let shell = Shell::run(&format!("mkfifo {0}; (cat {0}; true) & wait", fifo.display()));
        // On a busy machine it may take a minute to start.
        let looks = looks_until_stuck(&shell, 600).unwrap();
        // It takes a look to begin, and some while it starts.
        assert!(looks > QUIET_LOOKS, "{looks}");
        // Told to go on, it has its time again.
        let mut progress = Progress::of(shell.pid());
        (0..QUIET_LOOKS).for_each(|_| assert!(!progress.is_stuck()));
        progress.again();
        (0..QUIET_LOOKS).for_each(|_| assert!(!progress.is_stuck()));
        assert!(progress.is_stuck());
    }

    #[test]
    fn what_works_is_not_stuck() {
        let shell = Shell::run("(while :; do :; done) & wait");
        assert_eq!(looks_until_stuck(&shell, 2 * QUIET_LOOKS + 2), None);
    }
}
