//! What the kernel counts for the workload, out of the view of its control group in `/sys/fs/cgroup`.

use std::fs;

use rustix::time::ClockId;

/// A view of one moment. What cannot be read counts as nothing used, and as the host's total.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Counters {
    /// Bytes that may be used.
    pub(super) total: u64,
    /// Bytes charged, page cache included.
    pub(super) charged: u64,
    pub(super) memory: Memory,
    pub(super) user_us: u64,
    pub(super) system_us: u64,
    /// Microseconds since the sandbox began, and the Unix second at which that was.
    pub(super) up_us: u64,
    pub(super) began: i64,
    /// Numbers of the processors that the sandbox shows.
    pub(super) processors: Vec<u32>,
}

/// Parts of what is charged, in bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) anonymous: u64,
    /// Page cache, files in memory included.
    pub(super) file: u64,
    /// Files in memory.
    pub(super) shared: u64,
    pub(super) mapped: u64,
    pub(super) dirty: u64,
    pub(super) writeback: u64,
    pub(super) active_anonymous: u64,
    pub(super) inactive_anonymous: u64,
    pub(super) active_file: u64,
    pub(super) inactive_file: u64,
    pub(super) unevictable: u64,
    pub(super) slab_reclaimable: u64,
    pub(super) slab_unreclaimable: u64,
    pub(super) kernel_stack: u64,
    pub(super) page_tables: u64,
    /// Faults, and those of them that waited for a disk: numbers, not bytes.
    pub(super) faults: u64,
    pub(super) major_faults: u64,
}

impl Counters {
    pub(super) fn read() -> Self {
        let now = |clock| {
            let now = rustix::time::clock_gettime(clock);
            i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
        };
        let (wall, up) = (now(ClockId::Realtime), now(ClockId::Boottime));
        let host = || {
            let host = rustix::system::sysinfo();
            host.totalram.saturating_mul(host.mem_unit.into())
        };
        let cpu = text("cpu.stat")
            .or_else(|| text("unified/cpu.stat"))
            .unwrap_or_default();
        let (total, charged, memory) = match text("memory.stat") {
            Some(stat) => (number("memory.max"), number("memory.current"), Memory::of_v2(&stat)),
            None => (
                number("memory/memory.limit_in_bytes"),
                number("memory/memory.usage_in_bytes"),
                Memory::of_v1(&text("memory/memory.stat").unwrap_or_default()),
            ),
        };
        let total = total.unwrap_or(u64::MAX).min(host());
        Self {
            total,
            charged: charged.unwrap_or(0).min(total),
            memory,
            user_us: field(&cpu, "user_usec"),
            system_us: field(&cpu, "system_usec"),
            up_us: u64::try_from(up / 1000).unwrap_or(0),
            began: i64::try_from((wall - up).div_euclid(1_000_000_000)).unwrap_or(0),
            processors: processors(
                &fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_else(|_| "0".to_owned()),
            ),
        }
    }

    pub(super) fn used_us(&self) -> u64 {
        self.user_us + self.system_us
    }
}

impl Memory {
    fn of_v2(stat: &str) -> Self {
        let of = |name| field(stat, name);
        Self {
            anonymous: of("anon"),
            file: of("file"),
            shared: of("shmem"),
            mapped: of("file_mapped"),
            dirty: of("file_dirty"),
            writeback: of("file_writeback"),
            active_anonymous: of("active_anon"),
            inactive_anonymous: of("inactive_anon"),
            active_file: of("active_file"),
            inactive_file: of("inactive_file"),
            unevictable: of("unevictable"),
            slab_reclaimable: of("slab_reclaimable"),
            slab_unreclaimable: of("slab_unreclaimable"),
            kernel_stack: of("kernel_stack"),
            page_tables: of("pagetables"),
            faults: of("pgfault"),
            major_faults: of("pgmajfault"),
        }
    }

    /// Version 1 does not report what the kernel itself uses for a group.
    fn of_v1(stat: &str) -> Self {
        let of = |name| field(stat, name);
        Self {
            anonymous: of("total_rss"),
            file: of("total_cache"),
            shared: of("total_shmem"),
            mapped: of("total_mapped_file"),
            dirty: of("total_dirty"),
            writeback: of("total_writeback"),
            active_anonymous: of("total_active_anon"),
            inactive_anonymous: of("total_inactive_anon"),
            active_file: of("total_active_file"),
            inactive_file: of("total_inactive_file"),
            unevictable: of("total_unevictable"),
            faults: of("total_pgfault"),
            major_faults: of("total_pgmajfault"),
            ..Self::default()
        }
    }
}

fn text(file: &str) -> Option<String> {
    fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()
}

fn number(file: &str) -> Option<u64> {
    text(file)?.trim().parse().ok()
}

/// The number behind a word at the beginning of a line.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// Numbers in a list such as `0-2,5`.
fn processors(list: &str) -> Vec<u32> {
    let run = |run: &str| -> Option<std::ops::RangeInclusive<u32>> {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(run).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_versions() {
        let v2 = Memory::of_v2("anon 1\nfile 2\nfile_mapped 3\nshmem 4\nslab_reclaimable 5\npagetables 6\n");
        assert_eq!((v2.anonymous, v2.file, v2.mapped, v2.shared), (1, 2, 3, 4));
        assert_eq!((v2.slab_reclaimable, v2.page_tables), (5, 6));
        let v1 = Memory::of_v1("cache 9\nrss 9\ntotal_cache 1\ntotal_rss 2\ntotal_shmem 3\n");
        assert_eq!((v1.file, v1.anonymous, v1.shared), (1, 2, 3));
        assert_eq!(Memory::of_v1("total_rss x\n"), Memory::default());
    }

    #[test]
    fn lists_of_processors() {
        assert_eq!(processors("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(processors("1"), [1]);
        assert!(processors("x").is_empty());
    }

    #[test]
    fn this_machine_can_be_read() {
        let counters = Counters::read();
        assert!(counters.total > 0 && counters.charged <= counters.total);
        assert!(counters.up_us > 0 && !counters.processors.is_empty());
    }
}
