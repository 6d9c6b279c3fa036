//! Resource usage of a sandbox, measured on the host: reports of the agent are not used.
//!
//! - Processor time and memory are those of the sandbox's own control group: the workload's, and what the agent uses
//!   for clients. Processor time comes from the v2 group, which counts it with and without the cpu controller, so both
//!   back ends read it from one place.
//! - The total is the workload's limit. What the agent may use beyond it is not available to the sandbox and is cut
//!   off: usage is never reported as larger than the total.
//! - Memory is split into what only the processes can free and the page cache of files on disk. Files in memory are
//!   cache to the kernel, but it cannot drop them, so they count as used here.
//! - Disk usage is what `df` reports inside. The size of the file would also count freed blocks until the kernel gives them back.
//!
//! Without control groups there is nothing to read, and that is an error rather than a guess.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::cgroup::Tree;
use crate::cgroup::meters::Sum;
use crate::process::has_ended;
use crate::slot::Name;

/// Resource usage of a sandbox at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of the sandbox since its start, on all cores together, in microseconds.
    pub cpu_time_us: u64,
    /// Memory of the sandbox without [`Self::memory_cache_bytes`].
    pub memory_used_bytes: u64,
    /// Page cache of files on disk.
    pub memory_cache_bytes: u64,
    /// Memory limit of the workload, and of both together.
    pub memory_total_bytes: u64,
    /// Space used on the disk, in bytes.
    pub disk_used_bytes: u64,
    /// Size of the disk for files, in bytes.
    pub disk_total_bytes: u64,
}

/// Free capacity of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Memory that could be used without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Free space on the file system of the data directory, in bytes.
    pub disk_available_bytes: u64,
}

/// How large and how busy a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Memory of the host, in bytes.
    pub memory_bytes: u64,
    /// Cores that this process may use.
    pub cores: u32,
    /// Share of the last ten seconds in which something waited for processors or memory, in per cent; 0 where the kernel
    /// does not measure it.
    pub pressure: u8,
}

/// Maximum size of a control file, in bytes. `memory.stat` has about 2 KiB.
const CONTROL_FILE_MAX: usize = 8 * 1024;

/// The files in which the kernel counts the usage of one sandbox, kept open: opening them would take most of the time
/// of a reading. They do not prevent removing the groups.
#[derive(Debug)]
pub(crate) struct Meter {
    cpu: File,
    work_cpu: File,
    processes: File,
    memory_charged: File,
    memory_stat: File,
    memory_kills: File,
    /// Where socket memory is charged separately.
    sockets: Option<File>,
    memory_total_bytes: u64,
    cache_field: &'static str,
    shared_field: &'static str,
}

/// Memory that a sandbox is charged for, in bytes: one file is opened for it.
///
/// # Errors
/// As those of [`Meter::open`].
pub(crate) fn charged(tree: &Tree, name: &Name) -> io::Result<u64> {
    let meters = tree.meters(name).ok_or(io::ErrorKind::Unsupported)?;
    number(&std::fs::read_to_string(&meters.memory_charged)?)
}

impl Meter {
    /// The meter of the sandbox of this name.
    pub(crate) fn open(tree: &Tree, name: &Name) -> io::Result<Self> {
        let meters = tree.meters(name).ok_or(io::ErrorKind::Unsupported)?;
        // No limit, which is not a number in v2, counts as a very large one.
        let limit = std::fs::read_to_string(&meters.memory_limit)?;
        Ok(Self {
            cpu: File::open(&meters.cpu)?,
            work_cpu: File::open(&meters.work_cpu)?,
            processes: File::open(&meters.processes)?,
            memory_charged: File::open(&meters.memory_charged)?,
            memory_stat: File::open(&meters.memory_stat)?,
            memory_kills: File::open(&meters.memory_kills)?,
            // Absent where the kernel does not count sockets at all.
            sockets: meters.sockets.and_then(|path| File::open(path).ok()),
            memory_total_bytes: number(&limit).unwrap_or(u64::MAX),
            cache_field: meters.cache_field,
            shared_field: meters.shared_field,
        })
    }

    /// Reads the usage of the sandbox whose agent is `pid`, with pidfd `agent`.
    pub(crate) fn read(&self, pid: i32, agent: BorrowedFd<'_>) -> io::Result<Usage> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        let charged = number(read_into(&self.memory_charged, &mut buffer)?)?;
        let stat = read_into(&self.memory_stat, &mut buffer)?;
        let value = |name| field(stat, name).ok_or(io::ErrorKind::InvalidData);
        let cache = value(self.cache_field)?.saturating_sub(value(self.shared_field)?);
        let (memory_used_bytes, memory_cache_bytes) = split(charged, cache, self.memory_total_bytes);
        let cpu_time_us = time(&self.cpu)?;
        let disk = statfs_of(pid)?;
        // The agent is still running, so its pid was not reused while the disk was queried.
        if has_ended(agent)? {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Usage {
            cpu_time_us,
            memory_used_bytes,
            memory_cache_bytes,
            memory_total_bytes: self.memory_total_bytes,
            disk_used_bytes: disk.used_bytes,
            disk_total_bytes: disk.total_bytes,
        })
    }

    /// Reads the processor time of the workload.
    pub(crate) fn work_time(&self) -> io::Result<Duration> {
        time(&self.work_cpu).map(Duration::from_micros)
    }

    /// Reads the number of processes and threads of the workload.
    pub(crate) fn processes(&self) -> io::Result<u64> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        number(read_into(&self.processes, &mut buffer)?)
    }

    /// Reads how many processes of the workload were killed for lack of memory.
    pub(crate) fn memory_kills(&self) -> io::Result<u64> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        let text = read_into(&self.memory_kills, &mut buffer)?;
        field(text, "oom_kill").ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Reads how much memory the sandbox is charged for its sockets.
    pub(crate) fn sockets(&self) -> io::Result<u64> {
        let mut buffer = [0; CONTROL_FILE_MAX];
        match &self.sockets {
            Some(file) => number(read_into(file, &mut buffer)?),
            None => Ok(field(read_into(&self.memory_stat, &mut buffer)?, "sock").unwrap_or(0)),
        }
    }
}

/// Splits charged memory into used and cache, which together do not exceed the total.
fn split(charged: u64, cache: u64, total: u64) -> (u64, u64) {
    // The counters are not read at the same time, so the cache may exceed the charges.
    let used = charged.saturating_sub(cache).min(total);
    (used, cache.min(charged).min(total - used))
}

/// Reads the free capacity of the host and of the file system of `data_dir`.
///
/// # Errors
/// When one of them cannot be read.
pub(crate) fn capacity(data_dir: &Path) -> io::Result<Capacity> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let available_kb = field(&text, "MemAvailable:").ok_or(io::ErrorKind::InvalidData)?;
    Ok(Capacity {
        memory_available_bytes: available_kb * 1024,
        disk_available_bytes: disk_available(data_dir)?,
    })
}

/// Reads how large and how busy the host is.
///
/// # Errors
/// When its memory cannot be read.
pub fn load() -> io::Result<Load> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let total_kb = field(&text, "MemTotal:").ok_or(io::ErrorKind::InvalidData)?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let pressures = ["/proc/pressure/cpu", "/proc/pressure/memory"]
        .into_iter()
        .filter_map(|path| pressure(&std::fs::read_to_string(path).ok()?));
    Ok(Load {
        memory_bytes: total_kb.saturating_mul(1024),
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        pressure: pressures.max().unwrap_or(0),
    })
}

/// The share of the last ten seconds in which something waited, in whole per cent, of a file in `/proc/pressure`.
fn pressure(text: &str) -> Option<u8> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let share = some.split(' ').find_map(|value| value.strip_prefix("avg10="))?;
    let whole: u8 = share.split('.').next()?.parse().ok()?;
    Some(whole.min(100))
}

/// Reads the free space on the file system of `data_dir`, in bytes.
pub(crate) fn disk_available(data_dir: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(data_dir)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Memory that the kernel takes for itself and that no sandbox is charged for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostUncharged {
    /// Memory of the kernel in all, in bytes: what is neither free, nor page cache, nor memory of processes.
    pub kernel_bytes: u64,
    /// Objects that the kernel cannot free by itself, in bytes. Programs of the host seldom make many.
    pub object_bytes: u64,
}

/// Reads what the host has lost to its kernel beyond what sandboxes are charged for. Memory of the host's own processes does
/// not count, so that what they do is not mistaken for a loss.
pub(crate) fn uncharged(sum: &Sum) -> io::Result<HostUncharged> {
    let host = std::fs::read_to_string("/proc/meminfo")?;
    let of_host = |name: &str| field(&host, name).map(|kib| kib * 1024);
    let required = |name: &str| of_host(name).ok_or(io::Error::from(io::ErrorKind::InvalidData));
    let known = [
        "MemFree:",
        "Buffers:",
        "Cached:",
        "SwapCached:",
        "AnonPages:",
        "Hugetlb:",
    ];
    let known: u64 = known.into_iter().filter_map(of_host).sum();
    let kernel = required("MemTotal:")?.saturating_sub(known);
    let objects = required("SUnreclaim:")?;
    let text = std::fs::read_to_string(&sum.kernel)?;
    let (charged, charged_objects) = match &sum.sockets {
        // Version 1 does not tell them apart, so the second one is too large.
        Some(sockets) => {
            let kernel = number(&text)?;
            let sockets = std::fs::read_to_string(sockets).map_or(Ok(0), |text| number(&text))?;
            (kernel + sockets, kernel)
        }
        None => {
            let value = |name| field(&text, name).ok_or(io::Error::from(io::ErrorKind::InvalidData));
            (value("kernel")? + value("sock")?, value("slab_unreclaimable")?)
        }
    };
    Ok(HostUncharged {
        kernel_bytes: kernel.saturating_sub(charged),
        object_bytes: objects.saturating_sub(charged_objects),
    })
}

/// What changes first when something takes memory of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostPulse {
    /// Free memory, in bytes.
    pub free_bytes: u64,
    /// Open files of all processes, to within some dozen for each processor. Every socket is one.
    pub open_files: u64,
}

/// Reads the figures of the host that change fast. What cannot be read is 0.
pub(crate) fn pulse() -> HostPulse {
    let host = rustix::system::sysinfo();
    let files = std::fs::read_to_string("/proc/sys/fs/file-nr").unwrap_or_default();
    HostPulse {
        free_bytes: host.freeram.saturating_mul(host.mem_unit.into()),
        open_files: files
            .split_ascii_whitespace()
            .next()
            .map_or(0, |files| number(files).unwrap_or(0)),
    }
}

/// Statistics of the file system on a sandbox's disk, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskStats {
    pub(crate) total_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) free_bytes: u64,
    /// Free space that may be used.
    pub(crate) allowed_bytes: u64,
}

/// Queries the disk below the root of the sandbox whose agent has this pid. An overlay returns the statistics of the
/// disk with its upper, and waits for nothing. A root that is not an overlay was not created by this platform.
pub(crate) fn statfs_of(pid: i32) -> io::Result<DiskStats> {
    let disk = rustix::fs::statfs(format!("/proc/{pid}/root"))?;
    if disk.f_type != libc::OVERLAYFS_SUPER_MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let block = u64::try_from(disk.f_bsize).map_err(|_| io::ErrorKind::InvalidData)?;
    let bytes = |blocks: u64| blocks.saturating_mul(block);
    Ok(DiskStats {
        total_bytes: bytes(disk.f_blocks),
        used_bytes: bytes(disk.f_blocks.saturating_sub(disk.f_bfree)),
        free_bytes: bytes(disk.f_bfree),
        allowed_bytes: bytes(disk.f_bavail),
    })
}

/// Reads the processor time in `cpu.stat`, in microseconds.
fn time(stat: &File) -> io::Result<u64> {
    let mut buffer = [0; CONTROL_FILE_MAX];
    field(read_into(stat, &mut buffer)?, "usage_usec").ok_or(io::ErrorKind::InvalidData.into())
}

/// Reads a control file in one call, because the kernel generates its text for each.
fn read_into<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let length = file.read_at(buffer, 0)?;
    std::str::from_utf8(&buffer[..length]).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The number in the line that starts with this word.
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
    fn usage_never_exceeds_the_total() {
        assert_eq!(split(100, 30, 1000), (70, 30));
        assert_eq!(split(100, 130, 1000), (0, 100));
        assert_eq!(split(1010, 30, 1000), (980, 20));
        assert_eq!(split(1030, 10, 1000), (1000, 0));
        assert_eq!(split(100, 30, u64::MAX), (70, 30));
    }

    #[test]
    fn pressure_is_that_of_the_last_ten_seconds() {
        let text =
            "some avg10=12.75 avg60=3.00 avg300=1.20 total=77\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=5\n";
        assert_eq!(pressure(text), Some(12));
        assert_eq!(pressure("some avg10=250.00 avg60=1"), Some(100));
        for unreadable in ["", "full avg10=1.00\n", "some avg60=1.00\n", "some avg10=x.00\n"] {
            assert_eq!(pressure(unreadable), None);
        }
    }

    #[test]
    fn this_host_has_a_size() {
        let load = load().unwrap();
        assert!(
            load.memory_bytes > 1 << 20 && load.cores > 0 && load.pressure <= 100,
            "{load:?}"
        );
    }

    #[test]
    fn this_host_has_free_capacity() {
        let dir = tempfile::tempdir().unwrap();
        let free = capacity(dir.path()).unwrap();
        assert!(free.memory_available_bytes > 1 << 20, "{free:?}");
        assert!(free.disk_available_bytes > 0, "{free:?}");
        let pulse = pulse();
        assert!(pulse.free_bytes > 1 << 20 && pulse.open_files > 0, "{pulse:?}");
        assert!(super::capacity(&dir.path().join("missing")).is_err());
    }

    #[test]
    fn charged_memory_is_not_uncharged() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let version_1 = |charged: u64, sockets: u64| Sum {
            kernel: file("charged", &charged.to_string()),
            sockets: Some(file("sockets", &sockets.to_string())),
        };
        let all = uncharged(&version_1(0, 0)).unwrap();
        assert!(all.kernel_bytes > all.object_bytes && all.object_bytes > 0, "{all:?}");
        assert_eq!(
            uncharged(&version_1(u64::MAX / 2, 0)).unwrap(),
            HostUncharged::default()
        );
        assert_eq!(uncharged(&version_1(0, u64::MAX / 2)).unwrap().kernel_bytes, 0);
        let version_2 = |stat: &str| Sum {
            kernel: file("stat", stat),
            sockets: None,
        };
        let charged = "anon 1\nkernel 281474976710656\nsock 0\nslab_unreclaimable 281474976710656\n";
        assert_eq!(uncharged(&version_2(charged)).unwrap(), HostUncharged::default());
        assert!(uncharged(&version_2("anon 1\n")).is_err());
    }
}
