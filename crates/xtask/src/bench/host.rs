//! Processes of the host: finds those that are agents and measures their memory.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// The unit of processor times in `/proc`.
const TICK: Duration = Duration::from_millis(10);

/// A process of this machine, by its pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Process(pub(super) u32);

/// Memory of a process, in KiB.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Memory {
    /// Resident memory, including shared pages.
    pub(super) resident: u64,
    /// Private memory, including clean pages of the program.
    pub(super) private: u64,
    /// Private dirty memory: the cost of the process beside others with the same program.
    pub(super) dirty: u64,
    /// Anonymous memory.
    pub(super) anonymous: u64,
}

impl Memory {
    fn max(self, other: Self) -> Self {
        Self {
            resident: self.resident.max(other.resident),
            private: self.private.max(other.private),
            dirty: self.dirty.max(other.dirty),
            anonymous: self.anonymous.max(other.anonymous),
        }
    }

    /// A row of a table.
    pub(super) fn row(self, what: &str) -> Vec<String> {
        let mb = |kib: u64| format!("{:.2}", kib as f64 * 1024.0 / 1e6);
        let columns = [self.private, self.dirty, self.anonymous, self.resident].map(mb);
        [what.to_owned()].into_iter().chain(columns).collect()
    }
}

/// The columns of [`Memory::row`].
pub(super) const HEADER: [&str; 5] = ["MB", "private", "of it dirty", "anonymous", "resident"];

impl Process {
    /// The processor time that it and its children have used.
    ///
    /// # Errors
    /// When the process is gone.
    pub(super) fn processor_time(self) -> Result<Duration> {
        let own = ticks(self.0).with_context(|| format!("read the processor time of process {}", self.0))?;
        let children = processes()
            .filter_map(|process| ticks(process.0))
            .filter(|(_, parent)| *parent == self.0);
        let all: u64 = own.0 + children.map(|(ticks, _)| ticks).sum::<u64>();
        Ok(TICK * u32::try_from(all)?)
    }

    /// Its memory now.
    ///
    /// # Errors
    /// When the process is gone, or access is denied.
    pub(super) fn memory(self) -> Result<Memory> {
        let path = format!("/proc/{}/smaps_rollup", self.0);
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let field = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
            number.unwrap_or(0)
        };
        Ok(Memory {
            resident: field("Rss:"),
            private: field("Private_Clean:") + field("Private_Dirty:"),
            dirty: field("Private_Dirty:"),
            anonymous: field("Anonymous:"),
        })
    }

    /// Its pid namespace.
    pub(super) fn namespace(self) -> Option<std::path::PathBuf> {
        fs::read_link(format!("/proc/{}/ns/pid", self.0)).ok()
    }

    pub(super) fn command_line(self) -> Vec<u8> {
        fs::read(format!("/proc/{}/cmdline", self.0)).unwrap_or_default()
    }

    /// Its pid in the innermost namespace, and the number of nested pid namespaces.
    fn inner(self) -> Option<(u32, usize)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        let numbers: Vec<&str> = status
            .lines()
            .find_map(|line| line.strip_prefix("NSpid:"))?
            .split_whitespace()
            .collect();
        Some((numbers.last()?.parse().ok()?, numbers.len()))
    }
}

/// The processor time of a process, in ticks, and its parent.
fn ticks(pid: u32) -> Option<(u64, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and brackets.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((number(11)? + number(12)?, fields.get(1)?.parse().ok()?))
}

pub(super) fn processes() -> impl Iterator<Item = Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Process))
}

/// Lists the agents of all sandboxes on this machine: first processes of namespaces within ours.
pub(super) fn agents() -> Vec<Process> {
    processes()
        .filter(|process| process.inner().is_some_and(|(number, depth)| number == 1 && depth > 1))
        .collect()
}

/// The process that listens at a TCP port.
pub(super) fn listener(port: u16) -> Option<Process> {
    let wanted = format!(":{port:04X}");
    let mut inodes = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A is LISTEN.
            if let [_, local, _, "0A", _, _, _, _, _, inode, ..] = fields[..]
                && local.ends_with(&wanted)
            {
                inodes.push(format!("socket:[{inode}]"));
            }
        }
    }
    processes().find(|process| {
        let files = fs::read_dir(format!("/proc/{}/fd", process.0));
        files.into_iter().flatten().flatten().any(|file| {
            let target = fs::read_link(file.path()).unwrap_or_default();
            inodes.iter().any(|inode| target.as_os_str() == inode.as_str())
        })
    })
}

/// Samples the memory of processes on a separate thread and keeps the maximum of each.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<HashMap<Process, Memory>>,
}

impl Watch {
    const EVERY: Duration = Duration::from_millis(20);

    pub(super) fn start(processes: Vec<Process>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most: HashMap<Process, Memory> = HashMap::new();
            while !stopped.load(Ordering::Relaxed) {
                for process in &processes {
                    if let Ok(memory) = process.memory() {
                        let entry = most.entry(*process).or_default();
                        *entry = entry.max(memory);
                    }
                }
                std::thread::sleep(Self::EVERY);
            }
            most
        });
        Self { stop, thread }
    }

    /// The maximum of each process, in no particular order.
    ///
    /// # Errors
    /// When the thread panicked.
    pub(super) fn stop(self) -> Result<HashMap<Process, Memory>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .ok()
            .context("the thread that watches memory panicked")
    }
}
