//! What a sandbox uses, read from the host's side: nothing that the agent says goes in here.
//!
//! - Processor time and memory are those of the workload's control group. Processor time comes from the v2 group,
//!   which counts it with and without the cpu controller, so both back ends have it in one place.
//! - Memory is split into what only the processes can give back and the page cache of files on disk. Files in memory
//!   are cache to the kernel, but it cannot drop them, so they are on the processes' side here.
//! - The disk is asked for the numbers that `df` tells inside. Its image would tell blocks that were freed, too, until
//!   the kernel gets to giving them back.
//!
//! Without control groups there is nothing to read, and that is an error rather than a guess.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cgroup::Tree;
use crate::slot::Name;

/// What a sandbox uses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of the workload since its start, on all cores together, in microseconds.
    pub cpu_time_us: u64,
    /// Memory of the workload without [`Self::memory_cache_bytes`].
    pub memory_used_bytes: u64,
    /// Page cache of files on disk.
    pub memory_cache_bytes: u64,
    /// Most that both may come to.
    pub memory_total_bytes: u64,
    /// What is written on the disk, in bytes.
    pub disk_used_bytes: u64,
    /// Size of the disk for files, in bytes.
    pub disk_total_bytes: u64,
}

/// What is free on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Memory that could be used without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Space on the file system of the data directory, in bytes.
    pub disk_available_bytes: u64,
}

/// Most that is read of a control file, in bytes. `memory.stat` has about 2 KiB.
const CONTROL_FILE_MAX: usize = 8 * 1024;

/// The files in which the kernel counts for one sandbox, kept open: opening them would take most of the time that a
/// reading takes. They do not keep the groups from being removed.
#[derive(Debug)]
pub(crate) struct Meter {
    cpu: File,
    memory_charged: File,
    memory_stat: File,
    memory_kills: File,
    memory_total_bytes: u64,
    cache_field: &'static str,
    shared_field: &'static str,
}

impl Meter {
    /// The meter of the sandbox of this name.
    pub(crate) fn open(tree: &Tree, name: &Name) -> io::Result<Self> {
        let meters = tree.meters(name).ok_or(io::ErrorKind::Unsupported)?;
        // No limit, which is a word in v2, is as good as a very large one.
        let limit = std::fs::read_to_string(&meters.memory_limit)?;
        Ok(Self {
            cpu: File::open(&meters.cpu)?,
            memory_charged: File::open(&meters.memory_charged)?,
            memory_stat: File::open(&meters.memory_stat)?,
            memory_kills: File::open(&meters.memory_kills)?,
            memory_total_bytes: number(&limit).unwrap_or(u64::MAX),
            cache_field: meters.cache_field,
            shared_field: meters.shared_field,
        })
    }

    /// Reads what the sandbox uses, whose agent is `pid` behind `agent`.
    pub(crate) fn read(&self, pid: i32, agent: BorrowedFd<'_>) -> io::Result<Usage> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        let charged = number(read_into(&self.memory_charged, &mut buffer)?)?;
        let stat = read_into(&self.memory_stat, &mut buffer)?;
        let value = |name| field(stat, name).ok_or(io::ErrorKind::InvalidData);
        let cache = value(self.cache_field)?.saturating_sub(value(self.shared_field)?);
        // The counters are not read at one moment.
        let memory_cache_bytes = cache.min(charged);
        let cpu_time_us = field(read_into(&self.cpu, &mut buffer)?, "usage_usec").ok_or(io::ErrorKind::InvalidData)?;
        let (disk_used_bytes, disk_total_bytes) = disk(pid)?;
        // The agent lives still, so its pid was nobody else's while the disk was asked.
        if has_ended(agent)? {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Usage {
            cpu_time_us,
            memory_used_bytes: charged - memory_cache_bytes,
            memory_cache_bytes,
            memory_total_bytes: self.memory_total_bytes,
            disk_used_bytes,
            disk_total_bytes,
        })
    }

    /// Reads how many processes of the workload were killed for want of memory.
    pub(crate) fn memory_kills(&self) -> io::Result<u64> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        let text = read_into(&self.memory_kills, &mut buffer)?;
        field(text, "oom_kill").ok_or(io::ErrorKind::InvalidData.into())
    }
}

/// Reads what is free on the host that holds `data_dir`.
///
/// # Errors
/// When the kernel tells neither.
pub(crate) fn room(data_dir: &Path) -> io::Result<Room> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let available_kb = field(&text, "MemAvailable:").ok_or(io::ErrorKind::InvalidData)?;
    let disk = rustix::fs::statvfs(data_dir)?;
    Ok(Room {
        memory_available_bytes: available_kb * 1024,
        disk_available_bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
    })
}

/// Used and total bytes of the disk below the root of a sandbox. An overlay answers for the disk that its upper lies
/// on, and waits for nothing. Anything but an overlay is no root that this platform made.
fn disk(pid: i32) -> io::Result<(u64, u64)> {
    let disk = rustix::fs::statfs(format!("/proc/{pid}/root"))?;
    if disk.f_type != libc::OVERLAYFS_SUPER_MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let block = u64::try_from(disk.f_bsize).map_err(|_| io::ErrorKind::InvalidData)?;
    let used = disk.f_blocks.saturating_sub(disk.f_bfree);
    Ok((used.saturating_mul(block), disk.f_blocks.saturating_mul(block)))
}

fn has_ended(agent: BorrowedFd<'_>) -> io::Result<bool> {
    let mut poll = [PollFd::from_borrowed_fd(agent.as_fd(), PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(rustix::event::poll(&mut poll, Some(&now))? > 0)
}

/// Reads a control file in one call, as the kernel makes its text for each.
fn read_into<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let length = file.read_at(buffer, 0)?;
    std::str::from_utf8(&buffer[..length]).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The number after a word at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_whole_name() {
        let stat = "file_mapped 1\nfile 20480\nMemAvailable:    7 kB\nbad x\n";
        assert_eq!(field(stat, "file"), Some(20480));
        assert_eq!(field(stat, "MemAvailable:"), Some(7));
        assert_eq!(field(stat, "bad"), None);
        assert_eq!(field(stat, "anon"), None);
    }

    #[test]
    fn this_host_has_room() {
        let dir = tempfile::tempdir().unwrap();
        let room = room(dir.path()).unwrap();
        assert!(room.memory_available_bytes > 1 << 20, "{room:?}");
        assert!(room.disk_available_bytes > 0, "{room:?}");
        assert!(super::room(&dir.path().join("missing")).is_err());
    }
}
