//! Moving the memory of a sandbox that is stopped to the host's swap, so that the host can use it for others.
//!
//! The kernel is told that nothing of it is needed soon (`MADV_PAGEOUT`), process by process: pages of the processes' own
//! and of memory that they share are written to swap at once. What is in pages of files on disk the kernel drops by itself
//! when it needs the memory. A process that continues gets each page back when it touches it.
//!
//! Then the whole sandbox is reclaimed (`memory.reclaim`, `memory.force_empty`): the kernel keeps what it has written, and
//! files in memory that no process has mapped, until it needs the memory.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags};

use crate::sys;

/// Maximum size of a range in one request, in bytes: between two, it can be called off.
const STEP: u64 = 64 << 20;

/// Memory of a sandbox before and after it was moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedOut {
    /// Memory that the sandbox used before, in bytes.
    pub before_bytes: u64,
    /// Memory that the sandbox uses now, in bytes.
    pub after_bytes: u64,
    /// How long moving the memory took.
    pub took: Duration,
}

/// Whether the host has swap.
pub(crate) fn has_swap() -> bool {
    // The first line is a heading.
    std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().nth(1).is_some())
}

/// Moves the memory of all processes in the groups to swap, which are frozen, as long as `goes_on`.
///
/// # Errors
/// When a group cannot be read, or the kernel does not allow it.
pub(crate) fn page_out(groups: &[&Path], goes_on: &dyn Fn() -> bool) -> io::Result<Duration> {
    let begun = Instant::now();
    for group in groups {
        for pid in pids_in(group)? {
            // An end in between is nothing to report.
            let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            // Now that it is held, its number is that of no other one if it is still there.
            if !pids_in(group)?.contains(&pid) {
                continue;
            }
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()));
            for (start, end) in maps.unwrap_or_default().lines().filter_map(swappable) {
                let mut at = start;
                while at < end {
                    if !goes_on() {
                        return Ok(begun.elapsed());
                    }
                    let length = STEP.min(end - at);
                    match sys::page_out(process.as_fd(), at, length) {
                        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => break,
                        // A part that is locked, or not there any more.
                        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOMEM)) => {}
                        other => other?,
                    }
                    at += length;
                }
            }
        }
    }
    Ok(begun.elapsed())
}

fn pids_in(group: &Path) -> io::Result<Vec<Pid>> {
    let text = std::fs::read_to_string(group.join("cgroup.procs"))?;
    Ok(text
        .lines()
        .filter_map(|line| Pid::from_raw(line.parse().ok()?))
        .collect())
}

/// The range of a line of `/proc/<pid>/maps`, if there may be pages in it that only swap can take: those of no file, those
/// of a file that the process has changed for itself, and those of files in memory that it can write: the agent's program is
/// one that it cannot, which all sandboxes share.
fn swappable(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (range, mode, _offset, _device, inode) = (
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    );
    let name = fields.next().unwrap_or_default();
    let is_own = inode == "0" && !name.starts_with("[v");
    let is_changed = mode.contains('w') && mode.ends_with('p');
    let is_in_memory = mode.contains('w')
        && ["/memfd:", "/dev/shm/", "/SYSV", "/dev/zero"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
    if !(is_own || is_changed || is_in_memory) {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_processes_is_swappable_and_that_of_files_is_not() {
        let lines = "\
5581a0000000-5581a0001000 r--p 00000000 00:1f 42 /usr/bin/python3.11
5581a0002000-5581a0003000 rw-p 00002000 00:1f 42 /usr/bin/python3.11
5581a0fff000-5581a2000000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0010000000-7f0010001000 rw-s 00000000 00:01 1027 /memfd:x (deleted)
7f0010001000-7f0010002000 rw-s 00000000 00:1f 77 /home/user/shared
7f0010002000-7f0010003000 r-xp 00000000 00:01 4 /memfd:agent (deleted)
7ffd00000000-7ffd00004000 r--p 00000000 00:00 0 [vvar]
7ffd00004000-7ffd00006000 r-xp 00000000 00:00 0 [vdso]
nonsense
";
        let found: Vec<_> = lines.lines().filter_map(swappable).collect();
        assert_eq!(
            found,
            [
                (0x5581_a000_2000, 0x5581_a000_3000),
                (0x5581_a0ff_f000, 0x5581_a200_0000),
                (0x7f00_0000_0000, 0x7f00_1000_0000),
                (0x7f00_1000_0000, 0x7f00_1000_1000),
            ]
        );
    }
}
