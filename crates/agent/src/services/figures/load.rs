//! The load averages, of which the kernel keeps none for a group.
//!
//! Nothing is sampled while there are no readers, so what happened between two looks has to be estimated at the second.
//! The processor time that was used is counted exactly: it is the mean number of tasks that ran. How many more waited
//! to run is known for the moment alone; they are taken to have waited for as large a part of the time as the
//! processors were busy. The averages then decay over one, five and fifteen minutes, as the kernel's do.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::Path;

use super::counters::Counters;

/// What was counted a shorter time ago than this is reported again: the kernel counts every five seconds.
const FRESH_US: u64 = 500_000;
/// The most tasks that are examined; the numbers of others follow from theirs.
const LOOKED_AT: u32 = 1024;
/// Tasks that are examined before other tasks of the agent get their turn.
const AT_ONCE: u32 = 16;
/// Seconds over which the averages are taken.
const SPANS: [f64; 3] = [60.0, 300.0, 900.0];

/// Tasks by what they do. A thread is a task.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tasks {
    pub(super) running: u32,
    pub(super) blocked: u32,
    pub(super) all: u32,
    /// The highest number of a process.
    pub(super) last_pid: u32,
}

/// What `/proc/loadavg` shows.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(super) struct Averages {
    pub(super) loads: [f64; 3],
    pub(super) tasks: Tasks,
}

/// What is kept between two looks.
#[derive(Debug, Default)]
pub(super) struct Load {
    averages: RefCell<Averages>,
    /// When the last look was, and how much processor time had been used by then, in microseconds.
    last: Cell<(u64, u64)>,
}

impl Load {
    pub(super) async fn sample(&self, counters: &Counters) -> Averages {
        let (then, used) = self.last.get();
        let elapsed = counters.up_us.saturating_sub(then);
        if then == 0 || elapsed >= FRESH_US {
            let tasks = tasks().await;
            self.last.set((counters.up_us, counters.used_us()));
            let used = counters.used_us().saturating_sub(used);
            let mut averages = self.averages.borrow_mut();
            averages.tasks = tasks;
            averages.loads = decayed(averages.loads, elapsed, used, tasks, counters.processors.len());
        }
        *self.averages.borrow()
    }
}

/// The averages after some time in which so much processor time was used, both in microseconds.
#[expect(clippy::cast_precision_loss, reason = "figures of two decimals")]
fn decayed(loads: [f64; 3], elapsed: u64, used: u64, tasks: Tasks, processors: usize) -> [f64; 3] {
    if elapsed == 0 {
        return loads;
    }
    let ran = used as f64 / elapsed as f64;
    let wanted = f64::from(tasks.running + tasks.blocked);
    let busy = (ran / wanted.clamp(1.0, processors.max(1) as f64)).min(1.0);
    let mean = ran.max(wanted * busy);
    let seconds = elapsed as f64 / 1e6;
    let mut spans = SPANS.iter();
    loads.map(|load| {
        let kept = spans.next().map_or(0.0, |span| (-seconds / span).exp());
        load * kept + mean * (1.0 - kept)
    })
}

/// Looks at the sandbox's tasks, this program's apart.
async fn tasks() -> Tasks {
    let mut tasks = Tasks::default();
    let mut looked_at = 0;
    for pid in numbers(Path::new("/proc")) {
        tasks.last_pid = tasks.last_pid.max(pid);
        if pid == std::process::id() {
            continue;
        }
        if looked_at >= LOOKED_AT {
            tasks.all += 1;
            continue;
        }
        let threads = format!("/proc/{pid}/task");
        for thread in numbers(Path::new(&threads)) {
            tasks.all += 1;
            looked_at += 1;
            if looked_at > LOOKED_AT {
                continue;
            }
            // It may be gone by now.
            match fs::read(format!("{threads}/{thread}/stat"))
                .ok()
                .and_then(|stat| state(&stat))
            {
                Some(b'R') => tasks.running += 1,
                Some(b'D') => tasks.blocked += 1,
                _ => {}
            }
            if looked_at.is_multiple_of(AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
    }
    if tasks.all > LOOKED_AT {
        let scaled = |count: u32| u64::from(count) * u64::from(tasks.all) / u64::from(LOOKED_AT);
        tasks.running = u32::try_from(scaled(tasks.running)).unwrap_or(u32::MAX);
        tasks.blocked = u32::try_from(scaled(tasks.blocked)).unwrap_or(u32::MAX);
    }
    tasks
}

/// Names in a directory that are numbers.
fn numbers(directory: &Path) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The letter behind the name in the text of a `stat`; a process names itself as it likes.
fn state(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(running: u32) -> Tasks {
        Tasks {
            running,
            ..Tasks::default()
        }
    }

    const MINUTE: u64 = 60_000_000;

    #[test]
    fn busy_processors_count_with_all_that_wait_for_them() {
        let near = |loads: [f64; 3], want: f64| (loads[0] - want).abs() < 0.01;
        // One of one processor for an hour, with four that want it.
        let busy = decayed([0.0; 3], 60 * MINUTE, 60 * MINUTE, running(4), 1);
        assert!(near(busy, 4.0) && busy[2] > 3.9, "{busy:?}");
        // A tenth of the time.
        assert!(near(decayed([0.0; 3], 60 * MINUTE, 6 * MINUTE, running(4), 1), 0.4));
        // Two of four processors, none waiting now.
        assert!(near(decayed([0.0; 3], 60 * MINUTE, 120 * MINUTE, running(0), 4), 2.0));
    }

    #[test]
    fn averages_decay_over_their_spans() {
        let idle = decayed([1.0; 3], MINUTE, 0, running(0), 2);
        for (load, span) in idle.into_iter().zip(SPANS) {
            assert!((load - (-60.0 / span).exp()).abs() < 1e-9);
        }
        assert_eq!(decayed([1.0; 3], 0, 5, running(9), 2), [1.0; 3]);
    }

    #[test]
    fn states_are_behind_the_name() {
        assert_eq!(state(b"7 (a) R) S 1 7"), Some(b'S'));
        assert_eq!(state(b"7 (a"), None);
        assert_eq!(state(b"7 (a)"), None);
    }

    #[tokio::test]
    async fn tasks_of_this_machine() {
        let tasks = tasks().await;
        assert!(tasks.all > 0 && tasks.last_pid > 0, "{tasks:?}");
    }
}
