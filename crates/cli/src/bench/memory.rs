//! Memory of the host by the counters of the kernel.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;

/// Time between two samples.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);
/// Memory counts as settled when this many samples in a row …
const SAMPLES: usize = 4;
/// … differ by no more than this, in KiB.
const NOISE_KB: u64 = 2048;
/// A host where other work goes on never settles; then the last sample counts.
const SAMPLES_MAX: usize = 60;

/// Memory that programs can still get, caches that can be given up included, in KiB.
///
/// # Errors
/// When `/proc/meminfo` cannot be read.
pub(crate) fn available_kb() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    field_kb(&text, "MemAvailable").context("/proc/meminfo has no MemAvailable")
}

/// Memory of the host, in KiB.
///
/// # Errors
/// When `/proc/meminfo` cannot be read.
pub(crate) fn total_kb() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    field_kb(&text, "MemTotal").context("/proc/meminfo has no MemTotal")
}

fn field_kb(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Waits until the available memory has settled, and returns it in KiB.
///
/// # Errors
/// When `/proc/meminfo` cannot be read.
pub(crate) async fn settled_kb(cancelled: &CancellationToken) -> Result<u64> {
    let mut recent = Vec::new();
    for _ in 0..SAMPLES_MAX {
        recent.push(available_kb()?);
        if recent.len() > SAMPLES {
            recent.remove(0);
        }
        let spread = recent.iter().max().zip(recent.iter().min()).map(|(max, min)| max - min);
        if recent.len() == SAMPLES && spread.is_some_and(|spread| spread <= NOISE_KB) {
            break;
        }
        if cancelled
            .run_until_cancelled(tokio::time::sleep(SAMPLE_EVERY))
            .await
            .is_none()
        {
            break;
        }
    }
    available_kb()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       24683752 kB\nMemAvailable:   22000000 kB\nHugePages_Total:       0\n";
        assert_eq!(field_kb(text, "MemAvailable"), Some(22_000_000));
        assert_eq!(field_kb(text, "Mem"), None);
        assert_eq!(field_kb(text, "HugePages_Total"), None);
        assert!(available_kb().unwrap() <= total_kb().unwrap());
    }
}
