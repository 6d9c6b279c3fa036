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
/// Files that a process must have to be looked at.
const MANY: u64 = 128;
/// Numbers of files that are looked at in a process, and in one with very many. Each takes a microsecond; a list of all
/// files would take as long for each of them.
const SAMPLE: u64 = 64;
const LARGE_SAMPLE: u64 = 512;
const VERY_MANY: u64 = 16_384;

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
    let of_each = processes.iter().map(|process| estimate(*process));
    of_each.sum::<u64>().saturating_mul(UNCHARGED)
}

/// The number of such files of a process, from a sample of the numbers that its files can have.
fn estimate(process: i32) -> u64 {
    let files = of_process(process);
    if files < MANY {
        return 0;
    }
    // Numbers may have gaps. The table has a place for each.
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let places = status
        .lines()
        .find_map(|line| line.strip_prefix("FDSize:")?.trim().parse().ok());
    let places: u64 = places.unwrap_or(files);
    if places == 0 {
        // It has ended since its files were counted.
        return 0;
    }
    let samples = if files < VERY_MANY { SAMPLE } else { LARGE_SAMPLE }.min(places);
    let found = (0..samples).filter(|sample| {
        let start = places * sample / samples;
        // Anywhere in its part, so that no pattern of numbers is never looked at.
        let within = (places / samples).max(1);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let number = start + (now.tv_nsec.cast_unsigned() / 7) % within;
        fs::read_link(format!("/proc/{process}/fd/{number}"))
            .is_ok_and(|link| KINDS.iter().any(|kind| link.as_os_str() == *kind))
    });
    found.count() as u64 * places / samples
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::epoll::{self, CreateFlags};

    use super::*;
    use crate::alone::is_alone;

    #[test]
    fn epoll_instances_are_estimated_and_pipes_are_not() {
        // What other tests open and close would be counted.
        if !is_alone("open_files::tests::epoll_instances_are_estimated_and_pipes_are_not") {
            return;
        }
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

    /// Until it is waited for, a process that has ended has a status, with no place for files.
    #[test]
    fn a_process_may_end_while_it_is_measured() {
        if !is_alone("open_files::tests::a_process_may_end_while_it_is_measured") {
            return;
        }
        for _ in 0..100 {
            let files = "for number in {1..200}; do exec {file}</dev/null; done; read -r line";
            let mut process = std::process::Command::new("bash")
                .args(["-c", files])
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let pid = i32::try_from(process.id()).unwrap();
            while of_process(pid) < 200 {
                std::thread::yield_now();
            }
            drop(process.stdin.take());
            while of_process(pid) > 0 {
                estimate(pid);
            }
            assert_eq!(estimate(pid), 0);
            process.wait().unwrap();
        }
    }
}
