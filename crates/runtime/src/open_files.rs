//! Open files of a sandbox, and what they take from the host.
//!
//! The kernel charges a sandbox for an open file, but for timers and epoll instances not for what is behind it. There is no
//! limit on all open files of a sandbox together but its memory, and of these it can have twice as much memory uncharged.

use std::fs;
use std::io;
use std::path::Path;

/// What a timer or an epoll instance takes uncharged, in bytes.
const UNCHARGED: u64 = 256;
/// What the links of such files are.
const KINDS: [&str; 2] = ["anon_inode:[timerfd]", "anon_inode:[eventpoll]"];
/// One of so many files is looked at: that takes a microsecond.
const SAMPLE: usize = 16;

/// The processes of a group.
pub(crate) fn processes(group: &Path) -> io::Result<Vec<i32>> {
    let text = fs::read_to_string(group.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Open files of these processes. One that several have counts for each.
pub(crate) fn count(processes: &[i32]) -> u64 {
    processes.iter().map(|process| of_process(*process)).sum()
}

/// The size of the directory is the number of its entries; before Linux 6.2 they have to be counted.
fn of_process(process: i32) -> u64 {
    let directory = format!("/proc/{process}/fd");
    match fs::metadata(&directory).map_or(0, |metadata| metadata.len()) {
        0 => fs::read_dir(&directory).map_or(0, |entries| entries.count() as u64),
        files => files,
    }
}

/// Uncharged memory of the open files of these processes, in bytes, from a sample of them. 0 if it cannot be more than
/// `enough`.
pub(crate) fn uncharged(processes: &[i32], enough: u64) -> u64 {
    if count(processes).saturating_mul(UNCHARGED) <= enough {
        return 0;
    }
    let is_uncharged = |link: &Path| KINDS.iter().any(|kind| link.as_os_str() == *kind);
    let found = processes
        .iter()
        .filter_map(|process| fs::read_dir(format!("/proc/{process}/fd")).ok());
    let found = found.flatten().step_by(SAMPLE).filter(|entry| {
        let link = entry.as_ref().map(|entry| fs::read_link(entry.path()));
        matches!(link, Ok(Ok(link)) if is_uncharged(&link))
    });
    (found.count() as u64)
        .saturating_mul(SAMPLE as u64)
        .saturating_mul(UNCHARGED)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::epoll::{self, CreateFlags};

    use super::*;

    #[test]
    fn epoll_instances_are_estimated_and_pipes_are_not() {
        let itself = [i32::try_from(std::process::id()).unwrap()];
        let before = count(&itself);
        let instances: Vec<OwnedFd> = (0..160).map(|_| epoll::create(CreateFlags::CLOEXEC).unwrap()).collect();
        assert!(count(&itself) >= before + 160);
        let held = uncharged(&itself, 0);
        assert!((150 * UNCHARGED..250 * UNCHARGED).contains(&held), "{held}");
        assert_eq!(uncharged(&itself, u64::MAX), 0);
        drop(instances);
        let _pipes: Vec<_> = (0..80).map(|_| rustix::pipe::pipe().unwrap()).collect();
        assert!(uncharged(&itself, 0) < 100 * UNCHARGED);
        assert_eq!((count(&[-1]), uncharged(&[-1], 0)), (0, 0));
    }
}
