//! What is known of the memory of snapshots: which is being read or removed, and which could not be restored lately.
//!
//! One that could not be restored is not tried again for a while: each attempt reads and copies it, and one that hangs takes
//! a turn of its owner.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::backoff;
use model::id::BuildId;
use parking_lot::Mutex;
use tokio::sync::RwLock;

/// How long a failed restore is remembered after it may be tried again.
const REMEMBERED: Duration = Duration::from_secs(10 * 60);
/// Failed restores that are remembered at most. With more snapshots that fail, those of which the pause ends first are
/// forgotten.
const FAILURES_MAX: usize = 4096;

/// The memory of snapshots that is being read or removed.
#[derive(Debug, Default)]
pub(crate) struct MemoryLocks {
    locks: Mutex<HashMap<BuildId, Arc<RwLock<()>>>>,
    failures: Mutex<HashMap<BuildId, FailedRestores>>,
}

/// Restores of a snapshot that have failed in a row.
#[derive(Debug, Clone)]
struct FailedRestores {
    count: u32,
    /// When it may be tried again.
    until: Instant,
    /// Why the last one failed, for clients.
    why: String,
}

impl MemoryLocks {
    /// Held by each start for as long as it copies, and by a removal alone.
    pub(crate) fn of(&self, build: &BuildId) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock();
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(build.clone()).or_default())
    }

    /// Why a snapshot is not tried now, if it has failed lately.
    pub(crate) fn pause_of(&self, build: &BuildId, now: Instant) -> Option<String> {
        let failures = self.failures.lock();
        let failed = failures.get(build)?;
        let left = failed.until.checked_duration_since(now)?;
        (!left.is_zero()).then(|| {
            let seconds = left.as_secs() + 1;
            format!(
                "it has failed lately and is not tried again for {seconds} s: {}",
                failed.why
            )
        })
    }

    pub(crate) fn note_failure(&self, build: &BuildId, now: Instant, why: &str) {
        let mut failures = self.failures.lock();
        failures.retain(|_, failed| now.saturating_duration_since(failed.until) < REMEMBERED);
        let count = failures.get(build).map_or(0, |failed| failed.count).saturating_add(1);
        if count == 1
            && failures.len() >= FAILURES_MAX
            && let Some(first) = failures.iter().min_by_key(|(_, failed)| failed.until)
        {
            let first = first.0.clone();
            failures.remove(&first);
        }
        let failed = FailedRestores {
            count,
            until: now + backoff::pause(count),
            why: why.to_owned(),
        };
        failures.insert(build.clone(), failed);
    }

    pub(crate) fn forget_failures(&self, build: &BuildId) {
        self.failures.lock().remove(build);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(number: usize) -> BuildId {
        format!("11111111-2222-4333-8444-{number:012}").parse().unwrap()
    }

    #[test]
    fn a_snapshot_that_fails_is_left_alone_for_longer_and_longer() {
        let (memories, begun) = (MemoryLocks::default(), Instant::now());
        let after = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        assert_eq!(memories.pause_of(&build(1), begun), None);
        memories.note_failure(&build(1), begun, "it hangs");
        let why = memories.pause_of(&build(1), after(0.9)).unwrap();
        assert!(why.contains("for 1 s: it hangs"), "{why}");
        assert_eq!(memories.pause_of(&build(1), after(1.0)), None);
        assert_eq!(memories.pause_of(&build(2), begun), None);
        memories.note_failure(&build(1), after(1.0), "it hangs again");
        let why = memories.pause_of(&build(1), after(2.9)).unwrap();
        assert!(why.contains("it hangs again"), "{why}");
        assert_eq!(memories.pause_of(&build(1), after(3.0)), None);
        memories.forget_failures(&build(1));
        memories.note_failure(&build(1), after(3.0), "it hangs");
        assert_eq!(memories.pause_of(&build(1), after(4.0)), None);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (memories, begun) = (MemoryLocks::default(), Instant::now());
        for number in 0..FAILURES_MAX + 10 {
            memories.note_failure(&build(number), begun, "it hangs");
            memories.note_failure(&build(number), begun, "it hangs");
        }
        assert_eq!(memories.failures.lock().len(), FAILURES_MAX);
        let later = begun + REMEMBERED + Duration::from_secs(3);
        memories.note_failure(&build(0), later, "it hangs");
        assert_eq!(memories.failures.lock().len(), 1);
        assert_eq!(memories.failures.lock()[&build(0)].count, 1);
    }
}
