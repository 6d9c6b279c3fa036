//! `GET /metrics`: what the sandbox uses of what it may use.
//!
//! The kernel's totals in `/proc` are the whole host's, and the sandbox's control group is out of reach in here. So:
//!
//! - Limits are those that the host gave with `/init`, or the host's own when it gave none.
//! - Processor time is summed over the processes. Each counts itself and the children it reaped, and orphans are reaped
//!   by us, so no time is lost; what dies unreaped under a parent that ignores its children is the exception.
//! - Memory is the anonymous memory of the processes, and what is in the usual places for files in memory. Pages that
//!   forked processes still share count once for each: exact shares (`smaps_rollup`) take a walk over all page tables,
//!   milliseconds per gigabyte, with the process's own lock held. The sum is capped at the limit. Shared anonymous
//!   mappings are missing, as is the page cache, which has no owner here and is reported as zero.
//! - The disk is the root's file system: a quota shows where that file system reports it.
//!
//! All is read on one blocking thread at a time, `/proc` by the directory that was there when the agent started: root
//! of the sandbox may mount something else over it.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use rustix::fs::{CWD, Dir, Mode, OFlags};
use serde::Serialize;
use tokio::time::Instant;

use crate::settings::AgentSettings;
use crate::transport::http::{self as answers, Body};

/// Clock ticks of a second in `/proc`, on every architecture that we run on.
const TICKS: f64 = 100.0;
/// Shorter intervals only measure the length of a tick; within one, the last figure is reported again.
const INTERVAL: Duration = Duration::from_millis(100);
/// How long a call waits for the one before it. More than this, and something in the sandbox holds it up.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most that is read of a file. A `status` has about 1.5 KiB.
const FILE_LIMIT: u64 = 16 * 1024;
const MIB: u64 = 1024 * 1024;
const TMPFS: u64 = 0x0102_1994;

/// The metrics service, and what it keeps between two calls.
pub(crate) struct Metrics {
    settings: Rc<RefCell<AgentSettings>>,
    proc: Arc<OwnedFd>,
    turn: tokio::sync::Mutex<()>,
    /// When, and how many ticks had been used by then.
    last: Cell<(Instant, u64)>,
    percentage: Cell<f64>,
}

/// The body of the answer. Sizes are bytes, except where the name says otherwise.
#[derive(Serialize)]
struct Report {
    /// Unix seconds.
    ts: i64,
    cpu_count: u32,
    /// Since the call before, or since the start: 100 is all processors.
    cpu_used_pct: f64,
    #[serde(rename = "mem_total_mib")]
    memory_total_mib: u64,
    #[serde(rename = "mem_used_mib")]
    memory_used_mib: u64,
    #[serde(rename = "mem_total")]
    memory_total_bytes: u64,
    #[serde(rename = "mem_used")]
    memory_used_bytes: u64,
    #[serde(rename = "mem_cache")]
    memory_cache_bytes: u64,
    #[serde(rename = "disk_used")]
    disk_used_bytes: u64,
    #[serde(rename = "disk_total")]
    disk_total_bytes: u64,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    ticks: u64,
    memory_used_bytes: u64,
    memory_total_bytes: u64,
    disk_used_bytes: u64,
    disk_total_bytes: u64,
}

impl Metrics {
    /// # Errors
    /// Those of opening `/proc`.
    pub(crate) fn new(settings: Rc<RefCell<AgentSettings>>) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            settings,
            proc: Arc::new(rustix::fs::open("/proc", flags, Mode::empty())?),
            turn: tokio::sync::Mutex::new(()),
            last: Cell::new((Instant::now(), 0)),
            percentage: Cell::new(0.0),
        })
    }

    fn percentage(&self, ticks: u64, cpu_count: u32) -> f64 {
        let (since, before) = self.last.get();
        let now = Instant::now();
        let elapsed = now - since;
        if elapsed >= INTERVAL {
            #[expect(clippy::cast_precision_loss, reason = "a figure of two decimals")]
            let seconds = ticks.saturating_sub(before) as f64 / TICKS;
            let percentage = seconds / elapsed.as_secs_f64() / f64::from(cpu_count) * 100.0;
            self.last.set((now, ticks));
            self.percentage.set((percentage.min(100.0) * 100.0).round() / 100.0);
        }
        self.percentage.get()
    }

    /// Serves the route.
    pub(crate) async fn serve(&self) -> Response<Body> {
        let work = async {
            let _turn = self.turn.lock().await;
            let proc = self.proc.clone();
            tokio::task::spawn_blocking(move || usage(&proc)).await
        };
        let Ok(Ok(Ok(usage))) = tokio::time::timeout(PATIENCE, work).await else {
            let mut response = Response::new(Body::Empty);
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            return response;
        };
        let (cpu_count, memory_mb) = {
            let settings = self.settings.borrow();
            (settings.cpu_count, settings.memory_mb)
        };
        let cpu_count = cpu_count.unwrap_or_else(|| {
            let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            u32::try_from(count).unwrap_or(1)
        });
        let memory_total_bytes = memory_mb.map_or(usage.memory_total_bytes, |memory| u64::from(memory) * MIB);
        let memory_used_bytes = usage.memory_used_bytes.min(memory_total_bytes);
        answers::json(
            StatusCode::OK,
            &Report {
                ts: crate::clock::now_s(),
                cpu_count,
                cpu_used_pct: self.percentage(usage.ticks, cpu_count),
                memory_total_mib: memory_total_bytes / MIB,
                memory_used_mib: memory_used_bytes / MIB,
                memory_total_bytes,
                memory_used_bytes,
                memory_cache_bytes: 0,
                disk_used_bytes: usage.disk_used_bytes,
                disk_total_bytes: usage.disk_total_bytes,
            },
        )
    }
}

fn usage(proc: &OwnedFd) -> io::Result<Usage> {
    let mut usage = Usage {
        memory_used_bytes: files_in_memory(),
        memory_total_bytes: field(&read(proc, "meminfo")?, "MemTotal:") * 1024,
        ..Usage::default()
    };
    for entry in Dir::read_from(proc)? {
        let entry = entry?;
        let Ok(pid) = entry.file_name().to_str() else { continue };
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        // A process may be gone by now.
        if let (Ok(stat), Ok(status)) = (read(proc, &format!("{pid}/stat")), read(proc, &format!("{pid}/status"))) {
            usage.ticks += ticks(&stat);
            usage.memory_used_bytes += field(&status, "RssAnon:") * 1024;
        }
    }
    let root = rustix::fs::statvfs("/")?;
    usage.disk_total_bytes = root.f_blocks * root.f_frsize;
    usage.disk_used_bytes = root.f_blocks.saturating_sub(root.f_bavail) * root.f_frsize;
    Ok(usage)
}

fn read(proc: &OwnedFd, path: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(proc, path, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    file.take(FILE_LIMIT).read_to_end(&mut bytes)?;
    // A process names itself as it likes.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Ticks in the text of a `stat`: its own and its reaped children's, in user and kernel mode.
fn ticks(stat: &str) -> u64 {
    // The name is in brackets and may have any in itself, so what follows the last one counts.
    let Some((_, fields)) = stat.rsplit_once(')') else {
        return 0;
    };
    let times = fields.split_ascii_whitespace().skip(11).take(4);
    // Children's are signed in the kernel's text.
    times.filter_map(|time| time.parse::<u64>().ok()).sum()
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let number = value.and_then(|value| value.split_ascii_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Bytes in file systems that are memory, each counted once.
fn files_in_memory() -> u64 {
    let mut seen = Vec::new();
    let mut total = 0;
    for path in ["/dev/shm", "/run", "/tmp"] {
        let (Ok(system), Ok(directory)) = (
            rustix::fs::statfs(path),
            rustix::fs::statat(CWD, path, rustix::fs::AtFlags::empty()),
        ) else {
            continue;
        };
        if u64::try_from(system.f_type) == Ok(TMPFS) && !seen.contains(&directory.st_dev) {
            seen.push(directory.st_dev);
            let block = u64::try_from(system.f_bsize).unwrap_or(0);
            total += system.f_blocks.saturating_sub(system.f_bfree) * block;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_the_kernel() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194304 100 0 0 0 11 22 33 44 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), 110);
        for broken in ["", "7 (a", "7 (a) S", "7 (a) S 1 2 3 4 5 6 7 8 9 10 x y"] {
            assert_eq!(ticks(broken), 0, "{broken}");
        }
        let status = "Name:\tRssAnon: 9\nVmRSS:\t  10 kB\nRssAnon:\t     128 kB\n";
        assert_eq!(field(status, "RssAnon:"), 128);
        assert_eq!(field(status, "RssShmem:"), 0);
    }
}
