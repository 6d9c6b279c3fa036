//! Sandboxes as rows: their order, and their cells as text that is as wide as it has characters.

use std::cmp::Ordering;

use jiff::Timestamp;
use server::operator::{OperatorSandbox, OperatorUsage};

use crate::args::TopOrder;
use crate::output::mib;

/// The columns.
pub(super) const HEADER: [&str; 10] = [
    "ID", "STATE", "CPU", "MEMORY", "DISK", "RECEIVED", "SENT", "AGE", "TEMPLATE", "TEAM",
];
/// The columns that a narrow screen has no place for.
pub(super) const NETWORK: std::ops::Range<usize> = 5..7;
/// Scripts up to here have letters that are one column wide.
const NARROW_MAX: char = '\u{1100}';
const SECOND_US: i64 = 1_000_000;

/// Sorts: amounts with the largest first, names in their order, and equal ones by id.
pub(super) fn sort(sandboxes: &mut [OperatorSandbox], order: TopOrder, is_reversed: bool) {
    let compare = |a: &OperatorSandbox, b: &OperatorSandbox| -> Ordering {
        match order {
            TopOrder::Cpu => cpu(b).total_cmp(&cpu(a)),
            TopOrder::Memory => memory(b).cmp(&memory(a)),
            TopOrder::Disk => disk(b).cmp(&disk(a)),
            TopOrder::Network => network(b).cmp(&network(a)),
            TopOrder::Age => a.started_at.cmp(&b.started_at),
            TopOrder::State => a.state.cmp(&b.state),
            TopOrder::Template => a.template.cmp(&b.template),
            TopOrder::Team => a.team.cmp(&b.team),
        }
    };
    sandboxes.sort_by(|a, b| {
        let ordering = compare(a, b);
        let ordering = if is_reversed { ordering.reverse() } else { ordering };
        ordering.then_with(|| a.id.cmp(&b.id))
    });
}

/// Percent of one core; less than nothing if it was not measured.
fn cpu(sandbox: &OperatorSandbox) -> f64 {
    let percent = sandbox.usage.as_ref().map(|usage| usage.cpu_percent);
    percent.map_or(-1.0, |percent| percent * f64::from(sandbox.cpu_count))
}

/// Memory with page cache, in bytes.
fn memory(sandbox: &OperatorSandbox) -> Option<u64> {
    let all = |usage: &OperatorUsage| usage.memory_used_bytes.saturating_add(usage.memory_cache_bytes);
    sandbox.usage.as_ref().map(all)
}

/// Disk, in bytes: of one that is paused, all that it takes of the host's.
fn disk(sandbox: &OperatorSandbox) -> Option<u64> {
    let used = sandbox.usage.as_ref().map(|usage| usage.disk_used_bytes);
    sandbox.kept_bytes.or(used)
}

/// What went both ways since it was created, in bytes.
fn network(sandbox: &OperatorSandbox) -> Option<u64> {
    let both = |usage: &OperatorUsage| usage.received_bytes.saturating_add(usage.sent_bytes);
    sandbox.usage.as_ref().map(both)
}

/// All sandboxes in one line.
pub(super) fn summary(sandboxes: &[OperatorSandbox]) -> String {
    let running = sandboxes.iter().filter(|sandbox| sandbox.state == "running").count();
    let paused = sandboxes.iter().filter(|sandbox| sandbox.state == "paused").count();
    let cores: f64 = sandboxes.iter().map(|sandbox| cpu(sandbox).max(0.0)).sum::<f64>() / 100.0;
    let memory: u64 = sandboxes.iter().filter_map(memory).fold(0, u64::saturating_add);
    let disk: u64 = sandboxes.iter().filter_map(disk).fold(0, u64::saturating_add);
    format!(
        "{} sandboxes: {running} running, {paused} paused; {cores:.1} cores, memory {}, disk {}",
        sandboxes.len(),
        mib(memory),
        mib(disk)
    )
}

/// The cells of all sandboxes.
pub(super) fn all(sandboxes: &[OperatorSandbox], now_us: i64) -> impl Iterator<Item = Vec<String>> {
    sandboxes.iter().map(move |sandbox| cells(sandbox, now_us))
}

/// The cells of a sandbox.
pub(super) fn cells(sandbox: &OperatorSandbox, now_us: i64) -> Vec<String> {
    let amount = |bytes: Option<u64>| bytes.map_or("-".to_owned(), mib);
    let percent = cpu(sandbox);
    vec![
        text(&sandbox.id),
        text(&crate::sandboxes::state(sandbox)),
        if percent < 0.0 {
            "-".to_owned()
        } else {
            format!("{percent:.0}%")
        },
        amount(memory(sandbox)),
        amount(disk(sandbox)),
        amount(sandbox.usage.as_ref().map(|usage| usage.received_bytes)),
        amount(sandbox.usage.as_ref().map(|usage| usage.sent_bytes)),
        age(&sandbox.started_at, now_us),
        text(&sandbox.template),
        text(&sandbox.team),
    ]
}

/// A name in characters of one column each: all others are escaped.
fn text(name: &str) -> String {
    let mut safe = String::with_capacity(name.len());
    for c in name.chars() {
        if c == ' ' || c.is_ascii_graphic() || (c.is_alphanumeric() && c < NARROW_MAX) {
            safe.push(c);
        } else {
            safe.extend(c.escape_default());
        }
    }
    safe
}

/// The time since a start, in its two largest units.
fn age(started_at: &str, now_us: i64) -> String {
    let Ok(started) = started_at.parse::<Timestamp>() else {
        return "-".to_owned();
    };
    let seconds = now_us.saturating_sub(started.as_microsecond()).max(0) / SECOND_US;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{:02}s", seconds % 60),
        3600..86_400 => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn sandbox(id: &str, team: &str, used: Option<(f64, u64)>) -> OperatorSandbox {
        OperatorSandbox {
            id: id.to_owned(),
            team: team.to_owned(),
            template: "base".to_owned(),
            state: "running".to_owned(),
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            end_at: String::new(),
            cpu_count: 2,
            memory_mb: 512,
            disk_mb: 1024,
            kept: None,
            kept_bytes: None,
            resume_error: None,
            node: None,
            node_name: None,
            server: None,
            is_node_away: false,
            usage: used.map(|(cpu_percent, memory_used_bytes)| OperatorUsage {
                at: String::new(),
                cpu_percent,
                memory_used_bytes,
                memory_cache_bytes: 0,
                disk_used_bytes: 7 << 20,
                received_bytes: memory_used_bytes * 3,
                sent_bytes: 0,
            }),
        }
    }

    #[test]
    fn the_largest_come_first_and_the_unmeasured_last() {
        let mut all = [
            sandbox("b", "x", None),
            sandbox("a", "z", Some((10.0, 1 << 20))),
            sandbox("c", "y", Some((90.0, 0))),
        ];
        let mut ids = |order, is_reversed| {
            sort(&mut all, order, is_reversed);
            all.each_ref().map(|sandbox| sandbox.id.clone()).concat()
        };
        assert_eq!(ids(TopOrder::Cpu, false), "cab");
        assert_eq!(ids(TopOrder::Memory, false), "acb");
        assert_eq!(ids(TopOrder::Network, false), "acb");
        assert_eq!(ids(TopOrder::Team, false), "bca");
        assert_eq!(ids(TopOrder::Team, true), "acb");
        assert_eq!(ids(TopOrder::Age, false), "abc");
    }

    #[test]
    fn names_are_text_of_known_width() {
        let all = cells(&sandbox("i1", "\u{1b}[2Jx\u{202e}\n\u{4e2d}gr\u{f6}\u{df}e", None), 0);
        assert_eq!(all[9], "\\u{1b}[2Jx\\u{202e}\\n\\u{4e2d}gr\u{f6}\u{df}e");
        assert_eq!(all[2..7], ["-"; 5]);
        let measured = cells(&sandbox("i1", "t", Some((1.0, 2 << 20))), 0);
        assert_eq!(measured[NETWORK], ["6.0 MiB", "0.0 MiB"]);
    }

    #[test]
    fn ages_have_two_units() {
        for (seconds, want) in [
            (0, "0s"),
            (61, "1m01s"),
            (7_260, "2h01m"),
            (90_000, "1d01h"),
            (-5, "0s"),
        ] {
            let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            let now_us = now.as_microsecond() + seconds * SECOND_US;
            assert_eq!(age("2026-01-01T00:00:00Z", now_us), want);
        }
        assert_eq!(age("nonsense", 0), "-");
    }
}
