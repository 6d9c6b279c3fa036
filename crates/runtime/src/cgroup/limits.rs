//! Limits of a sandbox's groups.

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;

use model::resources::Resources;

use crate::files::write_at;

/// Limits of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) memory: u64,
    pub(super) pids: u64,
    /// Processor time per [`CPU_PERIOD_US`].
    pub(super) cpu_us: u64,
}

/// Sets the limits of a group of one controller.
pub(super) type Hold = fn(&Limits, BorrowedFd<'_>) -> io::Result<()>;

impl Limits {
    /// Sets the limits of version 1, in the order of [`super::backend::CONTROLLERS`].
    pub(super) const HOLD_V1: [Hold; 3] = [Self::hold_memory_v1, Self::hold_pids, Self::hold_cpu_v1];

    /// Limits of a sandbox's workload.
    pub(super) fn of(resources: &Resources) -> Self {
        Self {
            memory: u64::from(resources.memory_mb) << 20,
            pids: resources.pids.into(),
            cpu_us: u64::from(resources.cpu_count) * CPU_PERIOD_US,
        }
    }

    /// Limits of a sandbox's workload and its agent together.
    pub(super) fn with_margin(self) -> Self {
        Self {
            memory: self.memory + MARGIN.memory,
            pids: self.pids + MARGIN.pids,
            cpu_us: self.cpu_us + MARGIN.cpu_us,
        }
    }

    pub(super) fn hold_v2(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        write_at(group, "memory.max", &self.memory.to_string())?;
        // Swap would let a sandbox use more than its memory; the file is absent where there is no swap.
        optional(write_at(group, "memory.swap.max", "0"))?;
        self.hold_pids(group)?;
        write_at(group, "cpu.max", &format!("{} {CPU_PERIOD_US}", self.cpu_us))
    }

    /// The processor time of the workload that belongs to that of the whole sandbox, which is whole cores and a margin.
    pub(super) fn cpu_of_work(whole_us: u64) -> u64 {
        whole_us - whole_us % CPU_PERIOD_US
    }

    fn hold_memory_v1(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        let memory = self.memory.to_string();
        write_at(group, "memory.limit_in_bytes", &memory)?;
        optional(write_at(group, "memory.memsw.limit_in_bytes", &memory))?;
        // Version 1 counts socket buffers separately from memory, and the host has only one limit for all of them.
        let sockets = (self.memory / SOCKET_MEMORY_SHARE).to_string();
        optional(write_at(group, "memory.kmem.tcp.limit_in_bytes", &sockets))
    }

    fn hold_pids(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        write_at(group, "pids.max", &self.pids.to_string())
    }

    fn hold_cpu_v1(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        write_at(group, "cpu.cfs_period_us", &CPU_PERIOD_US.to_string())?;
        write_at(group, "cpu.cfs_quota_us", &self.cpu_us.to_string())
    }
}

/// What a sandbox may use beyond its limits, for its agent: the workload's own group is limited without it. Memory for
/// some clients at a time and for data being written until it is on disk; the agent's threads; and a fifth of a core,
/// with which the agent responds while the workload uses its whole share.
const MARGIN: Limits = Limits {
    memory: 64 << 20,
    pids: 16,
    cpu_us: CPU_PERIOD_US / 5,
};

/// Part of a sandbox's memory that its TCP buffers may take where they are counted separately.
const SOCKET_MEMORY_SHARE: u64 = 4;

/// The kernel's default period for CPU quotas, in microseconds.
pub(super) const CPU_PERIOD_US: u64 = 100_000;

/// Maximum number of processes of all sandboxes together: the host's limit minus an eighth, and at least 1,024,
/// reserved for the host itself. The lower of the two kernel-wide limits applies: on large machines that is often the
/// one on threads.
pub(super) fn pids_of_all_sandboxes() -> io::Result<u64> {
    let bound = |name: &str| -> io::Result<u64> {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{name}"))?;
        text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    };
    let most = bound("pid_max")?.min(bound("threads-max")?);
    Ok(most.saturating_sub((most / 8).max(1024)).max(64))
}

/// Relative processor time of a sandbox, and of one that is still being started.
///
/// Next to sandboxes that create processes without end, a sandbox of equal weight waits up to a second for a processor
/// until it has started: hundreds of short-lived processes shift the average by which the scheduler places a group that
/// has just become runnable. With this weight it hardly waits (`SPECIFICATION.md` has the figures). No program of the
/// sandbox runs before it is like any other again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    Starting,
    Normal,
}

impl Weight {
    /// For `cpu.weight` of version 2, whose default is 100 and whose maximum is 10,000.
    pub(super) const fn v2(self) -> &'static str {
        match self {
            Self::Starting => "5000",
            Self::Normal => "100",
        }
    }

    /// For `cpu.shares` of version 1, whose default is 1024.
    pub(super) const fn v1(self) -> &'static str {
        match self {
            Self::Starting => "51200",
            Self::Normal => "1024",
        }
    }
}

fn optional(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
