//! Threads with a working directory or descriptors of their own, which a checkpoint cannot contain.
//!
//! Threads of a process share both unless a program asks for something else (`clone` without `CLONE_FS` or `CLONE_FILES`,
//! `unshare`). CRIU notes those of the process alone: a restored thread would have them, and read and write other files than
//! before, without an error anywhere.

use std::fs;
use std::io;
use std::path::Path;

use super::sys;

/// What a thread may have of its own, as `kcmp` names it (linux/kcmp.h).
const KINDS: [(i32, &str); 2] = [(2, "open files"), (3, "a working directory")];

/// Why the processes of this group, which are stopped, cannot be written, if a thread is the reason.
///
/// # Errors
/// When the group is gone.
pub(super) fn obstacle(group: &Path) -> io::Result<Option<String>> {
    let processes = fs::read_to_string(group.join("cgroup.procs"))?;
    let mut processes = processes.lines().filter_map(|line| line.parse().ok());
    let found = processes.find_map(own_of_thread);
    Ok(found.map(|what| format!("a thread has {what} of its own, which CRIU would not restore")))
}

/// What a thread of a process has of its own.
fn own_of_thread(pid: i32) -> Option<&'static str> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let threads = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let others: Vec<i32> = threads.filter(|thread| *thread != pid).collect();
    // One that has ended has nothing any more. If it is the first of its process, CRIU says so itself.
    if others.is_empty() || has_ended(pid, pid) {
        return None;
    }
    let differs = |thread: i32, kind: i32| sys::differs(pid, thread, kind) && !has_ended(pid, thread);
    let own = |thread: &i32| {
        KINDS
            .iter()
            .find(|(kind, _)| differs(*thread, *kind))
            .map(|(_, what)| *what)
    };
    others.iter().find_map(own)
}

fn has_ended(pid: i32, thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain anything.
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn what_a_thread_has_of_its_own_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let found = |pid: u32| {
            fs::write(directory.path().join("cgroup.procs"), format!("{pid}\n")).unwrap();
            obstacle(directory.path()).unwrap()
        };
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(found(child.id()), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found(child.id()), None);
        let (ready, is_ready) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            crate::sys::unshare(libc::CLONE_FS).unwrap();
            ready.send(()).unwrap();
            let _ = is_done.recv();
        });
        is_ready.recv().unwrap();
        let why = found(std::process::id()).unwrap();
        assert!(why.starts_with("a thread has "), "{why}");
        drop(done);
        thread.join().unwrap();
        obstacle(&directory.path().join("gone")).unwrap_err();
    }
}
