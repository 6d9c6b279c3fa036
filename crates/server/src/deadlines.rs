//! The deadlines of sandboxes, and waiting for the next one.
//!
//! The set is in memory and follows the rows; nothing polls the database. The wait is short even when the next
//! deadline is far away, because deadlines are wall-clock times and the wall clock may be set.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use model::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::{Clock, SECOND_US};

/// Longest wait without reading the clock.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Longest retry interval for clients when the host is full, in seconds. Sandboxes may be killed long before their
/// deadlines, so a longer interval would mean nothing.
const CAPACITY_RETRY_MAX_S: i64 = 30;

/// The deadlines of all sandboxes, in order.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    set: Mutex<DeadlineSet>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct DeadlineSet {
    ordered: BTreeSet<(i64, SandboxId)>,
    by_id: HashMap<SandboxId, i64>,
}

impl DeadlineSet {
    fn remove(&mut self, id: &SandboxId) {
        if let Some(end_us) = self.by_id.remove(id) {
            self.ordered.remove(&(end_us, id.clone()));
        }
    }
}

impl Deadlines {
    /// Sets or moves a deadline, in microseconds since the Unix epoch.
    pub(crate) fn set(&self, id: &SandboxId, end_us: i64) {
        let mut set = self.set.lock();
        set.remove(id);
        set.by_id.insert(id.clone(), end_us);
        set.ordered.insert((end_us, id.clone()));
        let first = set.ordered.first().is_some_and(|(first_us, _)| *first_us >= end_us);
        drop(set);
        // Only a deadline that comes first can shorten the wait.
        if first {
            self.changed.notify_one();
        }
    }

    /// Removes a deadline.
    pub(crate) fn remove(&self, id: &SandboxId) {
        self.set.lock().remove(id);
    }

    /// The first deadline, in microseconds since the Unix epoch.
    fn first_us(&self) -> Option<i64> {
        self.set.lock().ordered.first().map(|(end_us, _)| *end_us)
    }

    /// Seconds after which a full host may have capacity again: when the next sandbox reaches its deadline, or earlier.
    pub(crate) fn capacity_retry_s(&self, clock: &Clock) -> u32 {
        let wait_s = self.first_us().map_or(CAPACITY_RETRY_MAX_S, |first_us| {
            let wait_us = (first_us - clock.now_us()).max(0);
            (wait_us / SECOND_US + 1).min(CAPACITY_RETRY_MAX_S)
        });
        u32::try_from(wait_s).unwrap_or(1)
    }

    /// Removes and returns every sandbox whose deadline has passed; waits until there is one.
    pub(crate) async fn due(&self, clock: &Clock) -> Vec<SandboxId> {
        loop {
            let change = self.changed.notified();
            let now_us = clock.now_us();
            let wait = {
                let mut set = self.set.lock();
                let mut due = Vec::new();
                while let Some((end_us, id)) = set.ordered.first().cloned()
                    && end_us <= now_us
                {
                    set.remove(&id);
                    due.push(id);
                }
                if !due.is_empty() {
                    return due;
                }
                set.ordered.first().map(|(end_us, _)| end_us - now_us)
            };
            match wait {
                None => change.await,
                Some(wait_us) => {
                    let wait = Duration::from_micros(wait_us.unsigned_abs()).min(LONGEST_WAIT);
                    // The next iteration checks the set, whether the wait was interrupted or timed out.
                    let _ = tokio::time::timeout(wait, change).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;

    fn id(text: &str) -> SandboxId {
        text.parse().expect("an id")
    }

    /// A clock that moves with tokio's, which a test pauses.
    fn tokio_clock() -> Clock {
        let start = Instant::now();
        Clock::new(move || i64::try_from(start.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    #[tokio::test(start_paused = true)]
    async fn deadlines_come_in_order_and_on_time() {
        let clock = tokio_clock();
        let deadlines = Deadlines::default();
        deadlines.set(&id("late"), 10_000_000);
        deadlines.set(&id("early"), 2_000_000);
        deadlines.set(&id("gone"), 1_000_000);
        deadlines.remove(&id("gone"));
        for (want, at_us) in [("early", 2_000_000), ("late", 10_000_000)] {
            assert_eq!(deadlines.due(&clock).await, [id(want)]);
            let late_us = clock.now_us() - at_us;
            assert!((0..250_000).contains(&late_us), "{want} came {late_us} us late");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_deadlines_come_in_order_and_on_time() {
        let clock = tokio_clock();
        let deadlines = Deadlines::default();
        // 7919 is prime, so that the deadlines are unordered and all different.
        let deadline_us = |n: i64| 1_000_000 + n * 7919 % 1000 * 60_000;
        for n in 0..1000 {
            deadlines.set(&id(&format!("s{n}")), deadline_us(n));
        }
        let (mut count, mut last_us) = (0, 0);
        while count < 1000 {
            for due in deadlines.due(&clock).await {
                let end_us = deadline_us(due.as_str()[1..].parse().expect("a number"));
                assert!(end_us > last_us, "in order");
                let late_us = clock.now_us() - end_us;
                assert!((0..250_000).contains(&late_us), "{due} came {late_us} us late");
                (count, last_us) = (count + 1, end_us);
            }
        }
        assert_eq!(deadlines.first_us(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_latest_value_of_a_moved_deadline_counts() {
        let clock = tokio_clock();
        let deadlines = Deadlines::default();
        deadlines.set(&id("a"), 1_000_000);
        deadlines.set(&id("a"), 5_000_000);
        deadlines.set(&id("b"), 60_000_000);
        deadlines.set(&id("b"), 5_000_000);
        assert_eq!(deadlines.due(&clock).await, [id("a"), id("b")]);
        assert_eq!(clock.now_us() / 1_000_000, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn an_earlier_deadline_shortens_the_wait() {
        let clock = tokio_clock();
        let deadlines = Arc::new(Deadlines::default());
        let waiting = {
            let (deadlines, clock) = (Arc::clone(&deadlines), clock.clone());
            tokio::spawn(async move { deadlines.due(&clock).await })
        };
        tokio::task::yield_now().await;
        deadlines.set(&id("now"), 0);
        assert_eq!(waiting.await.expect("no panic"), [id("now")]);
        assert_eq!(clock.now_us() / 1_000_000, 0);
    }
}
