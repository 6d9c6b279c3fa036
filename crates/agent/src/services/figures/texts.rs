//! Texts of the files in `/proc`, in the kernel's own form.

use std::fmt::Write as _;

use super::counters::Counters;
use super::load::{Averages, Tasks};

/// Microseconds of a clock tick, of which user space knows 100 in a second.
const TICK_US: u64 = 10_000;

/// `/proc/meminfo`. What is not counted for a group is left out, or nought where programs expect a line. Counters are
/// not read at one moment, so parts are cut to what is charged in all.
pub(super) fn meminfo(counters: &Counters) -> String {
    let memory = &counters.memory;
    let cached = memory.file.min(counters.charged);
    let slab = memory.slab_reclaimable.min(counters.charged - cached);
    let free = counters.total - counters.charged;
    // As the kernel estimates it: what is free, and what can be made free without writing to swap.
    let files = (memory.active_file + memory.inactive_file).min(cached - memory.shared.min(cached));
    let available = free + files + slab;
    let lines = [
        ("MemTotal", counters.total),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", cached),
        ("SwapCached", 0),
        ("Active", memory.active_anonymous + memory.active_file),
        ("Inactive", memory.inactive_anonymous + memory.inactive_file),
        ("Active(anon)", memory.active_anonymous),
        ("Inactive(anon)", memory.inactive_anonymous),
        ("Active(file)", memory.active_file),
        ("Inactive(file)", memory.inactive_file),
        ("Unevictable", memory.unevictable),
        ("Mlocked", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", memory.dirty),
        ("Writeback", memory.writeback),
        ("AnonPages", memory.anonymous),
        ("Mapped", memory.mapped),
        ("Shmem", memory.shared),
        ("KReclaimable", slab),
        ("Slab", slab + memory.slab_unreclaimable),
        ("SReclaimable", slab),
        ("SUnreclaim", memory.slab_unreclaimable),
        ("KernelStack", memory.kernel_stack),
        ("PageTables", memory.page_tables),
        ("NFS_Unstable", 0),
        ("Bounce", 0),
        ("WritebackTmp", 0),
        ("CommitLimit", counters.total),
        ("Committed_AS", memory.anonymous + memory.shared),
    ];
    let mut text = String::with_capacity(1024);
    for (name, bytes) in lines {
        let _ = writeln!(text, "{:<16}{:>8} kB", format!("{name}:"), bytes / 1024);
    }
    text
}

/// `/proc/vmstat`, with what is known of it: memory in pages, and faults. What went to disks is not counted for a
/// group.
pub(super) fn vmstat(counters: &Counters) -> String {
    const PAGE: u64 = 4096;
    let memory = &counters.memory;
    let lines = [
        ("nr_free_pages", (counters.total - counters.charged) / PAGE),
        ("nr_inactive_anon", memory.inactive_anonymous / PAGE),
        ("nr_active_anon", memory.active_anonymous / PAGE),
        ("nr_inactive_file", memory.inactive_file / PAGE),
        ("nr_active_file", memory.active_file / PAGE),
        ("nr_unevictable", memory.unevictable / PAGE),
        ("nr_anon_pages", memory.anonymous / PAGE),
        ("nr_mapped", memory.mapped / PAGE),
        ("nr_file_pages", memory.file.min(counters.charged) / PAGE),
        ("nr_dirty", memory.dirty / PAGE),
        ("nr_writeback", memory.writeback / PAGE),
        ("nr_shmem", memory.shared / PAGE),
        ("nr_slab_reclaimable", memory.slab_reclaimable / PAGE),
        ("nr_slab_unreclaimable", memory.slab_unreclaimable / PAGE),
        ("pgpgin", 0),
        ("pgpgout", 0),
        ("pswpin", 0),
        ("pswpout", 0),
        ("pgfault", memory.faults),
        ("pgmajfault", memory.major_faults),
    ];
    lines.map(|(name, value)| format!("{name} {value}\n")).concat()
}

/// `/proc/stat`. The time that was used is not known by processor and is shared out evenly. Interrupts and switches are
/// the host's and are reported as zero.
pub(super) fn stat(counters: &Counters, idle_us: u64, tasks: Tasks) -> String {
    let count = counters.processors.len().max(1) as u64;
    let parts = [counters.user_us, counters.system_us, idle_us].map(|us| us / TICK_US);
    let mut text = String::with_capacity(512);
    let [user, system, idle] = parts;
    let _ = writeln!(text, "cpu  {user} 0 {system} {idle} 0 0 0 0 0 0");
    for (index, number) in (0..).zip(&counters.processors) {
        // Those that come first have what does not divide.
        let [user, system, idle] = parts.map(|ticks| (ticks + count - 1 - index) / count);
        let _ = writeln!(text, "cpu{number} {user} 0 {system} {idle} 0 0 0 0 0 0");
    }
    let _ = write!(
        text,
        "intr 0\nctxt 0\nbtime {}\nprocesses {}\nprocs_running {}\nprocs_blocked {}\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n",
        counters.began,
        tasks.last_pid,
        tasks.running.max(1),
        tasks.blocked,
    );
    text
}

/// `/proc/uptime`: seconds since the sandbox began, and those that its processors had nothing to do.
pub(super) fn uptime(counters: &Counters, idle_us: u64) -> String {
    let seconds = |us: u64| (us / 1_000_000, us % 1_000_000 / TICK_US);
    let ((up, up_rest), (idle, idle_rest)) = (seconds(counters.up_us), seconds(idle_us));
    format!("{up}.{up_rest:02} {idle}.{idle_rest:02}\n")
}

/// `/proc/loadavg`.
pub(super) fn loadavg(averages: &Averages) -> String {
    let [one, five, fifteen] = averages.loads;
    let tasks = averages.tasks;
    format!(
        "{one:.2} {five:.2} {fifteen:.2} {}/{} {}\n",
        tasks.running.max(1),
        tasks.all.max(1),
        tasks.last_pid
    )
}

#[cfg(test)]
mod tests {
    use super::super::counters::Memory;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn kilobytes(text: &str, name: &str) -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap().trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    fn counters() -> Counters {
        Counters {
            total: 640 * MIB,
            charged: 340 * MIB,
            memory: Memory {
                anonymous: 200 * MIB,
                file: 120 * MIB,
                shared: 30 * MIB,
                active_file: 40 * MIB,
                inactive_file: 50 * MIB,
                slab_reclaimable: 10 * MIB,
                ..Memory::default()
            },
            user_us: 3_050_000,
            system_us: 1_000_000,
            up_us: 12_345_678,
            began: 1_700_000_000,
            processors: vec![1, 3],
        }
    }

    #[test]
    fn memory_adds_up() {
        let text = meminfo(&counters());
        let of = |name| kilobytes(&text, name);
        assert_eq!(of("MemTotal"), 640 * 1024);
        assert_eq!(of("MemFree"), 300 * 1024);
        assert_eq!(of("MemAvailable"), 400 * 1024);
        assert_eq!(of("Cached"), 120 * 1024);
        assert!(
            text.starts_with("MemTotal:         655360 kB\nMemFree:          307200 kB\n"),
            "{text}"
        );
    }

    #[test]
    fn counters_of_different_moments_take_nothing_below_nought() {
        let mut counters = counters();
        counters.charged = 20 * MIB;
        let text = meminfo(&counters);
        let of = |name| kilobytes(&text, name);
        assert_eq!(of("Cached"), 20 * 1024);
        assert!(of("MemFree") <= of("MemAvailable") && of("MemAvailable") <= of("MemTotal"));
        counters.charged = counters.total;
        counters.memory = Memory::default();
        assert_eq!(kilobytes(&meminfo(&counters), "MemAvailable"), 0);
    }

    #[test]
    fn lines_of_processors_sum_up_to_the_first() {
        let tasks = Tasks {
            running: 2,
            blocked: 1,
            all: 9,
            last_pid: 77,
        };
        let text = stat(&counters(), 20_010_000, tasks);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!([lines[0][0], lines[1][0], lines[2][0]], ["cpu", "cpu1", "cpu3"]);
        let times = |line: usize| lines[line][1..].iter().map(|ticks| ticks.parse::<u64>().unwrap());
        assert_eq!(times(0).len(), 10);
        let summed: Vec<u64> = times(1).zip(times(2)).map(|(one, other)| one + other).collect();
        assert_eq!(times(0).collect::<Vec<_>>(), summed, "{text}");
        assert_eq!(&lines[0][1..5], ["305", "0", "100", "2001"]);
        for line in ["btime 1700000000", "processes 77", "procs_running 2", "procs_blocked 1"] {
            assert!(text.lines().any(|have| have == line), "{text}");
        }
    }

    #[test]
    fn short_texts() {
        assert!(vmstat(&counters()).starts_with("nr_free_pages 76800\n"));
        assert_eq!(uptime(&counters(), 70_000), "12.34 0.07\n");
        let averages = Averages {
            loads: [0.5, 1.0, 12.345],
            tasks: Tasks::default(),
        };
        assert_eq!(loadavg(&averages), "0.50 1.00 12.35 1/1 0\n");
    }
}
