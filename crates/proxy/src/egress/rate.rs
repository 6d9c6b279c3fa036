//! Limits over time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Events per second in the long run, and at once.
#[derive(Debug)]
pub(super) struct Rate {
    interval: Duration,
    burst: u32,
    /// When all events so far would have come at the long-term rate.
    paid: Mutex<Option<Instant>>,
}

impl Rate {
    /// Creates a rate limit; each of the two numbers is at least 1.
    pub(super) fn new(per_second: u32, burst: u32) -> Self {
        Self {
            interval: Duration::from_secs(1) / per_second.max(1),
            burst: burst.max(1),
            paid: Mutex::new(None),
        }
    }

    /// Whether another event is within the limit. Counts it if so.
    pub(super) fn admit(&self) -> bool {
        let now = Instant::now();
        let mut paid = self.paid.lock();
        let from = paid.map_or(now, |paid| paid.max(now));
        if from.duration_since(now) > self.interval * (self.burst - 1) {
            return false;
        }
        *paid = Some(from + self.interval);
        true
    }

    /// How long it takes until another event is within the limit. Counts it then, unless that is longer than given.
    pub(super) fn book(&self, within: Duration) -> Option<Duration> {
        let now = Instant::now();
        let mut paid = self.paid.lock();
        let from = paid.map_or(now, |paid| paid.max(now));
        let ahead = self.interval * (self.burst - 1);
        let wait = from.duration_since(now).saturating_sub(ahead);
        if wait > within {
            return None;
        }
        *paid = Some(from + self.interval);
        Some(wait)
    }
}

impl Rate {
    /// Counts events, and waits until they are within the limit.
    pub(super) async fn pay(&self, events: u32) {
        let until = {
            let now = Instant::now();
            let mut paid = self.paid.lock();
            let end = paid.map_or(now, |paid| paid.max(now)) + self.interval * events;
            *paid = Some(end);
            end.checked_sub(self.interval * self.burst).unwrap_or(now)
        };
        tokio::time::sleep_until(until).await;
    }
}

/// A rate limit that counts the events beyond it.
#[derive(Debug)]
pub(super) struct CountedRate {
    rate: Rate,
    beyond: AtomicU64,
}

impl CountedRate {
    /// Creates a rate limit, like [`Rate::new`].
    pub(super) fn new(per_second: u32, burst: u32) -> Self {
        Self {
            rate: Rate::new(per_second, burst),
            beyond: AtomicU64::new(0),
        }
    }

    /// Counts an event; if it is within the limit, returns how many were not since the last one that was. Counts it in
    /// any case.
    pub(super) fn admit(&self) -> Option<u64> {
        if self.rate.admit() {
            return Some(self.beyond.swap(0, Ordering::Relaxed));
        }
        self.beyond.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// The bandwidth of a sandbox, in each direction.
#[derive(Debug)]
pub(super) struct Bandwidth {
    /// Time per mebibyte; none without a limit.
    per_mib: Option<Duration>,
    directions: [Mutex<Option<Instant>>; 2],
}

/// A direction of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the sandbox.
    Out,
    /// To the sandbox.
    In,
}

/// How far data may be ahead of its time.
const AHEAD: Duration = Duration::from_millis(50);

impl Bandwidth {
    /// A limit in Mbit/s; 0 is none.
    pub(super) fn new(mbit: u32) -> Self {
        let per_mib = (mbit > 0).then(|| Duration::from_secs_f64(f64::from(8 << 20) / (f64::from(mbit) * 1e6)));
        Self {
            per_mib,
            directions: [Mutex::new(None), Mutex::new(None)],
        }
    }

    /// Counts bytes that were moved, and waits until their time.
    pub(super) async fn pay(&self, direction: Direction, bytes: usize) {
        let Some(per_mib) = self.per_mib else { return };
        let until = self.count(per_mib, direction, bytes);
        tokio::time::sleep_until(until.checked_sub(AHEAD).unwrap_or(until)).await;
    }

    /// Counts bytes that were moved, and says when more may be; at once without a limit.
    pub(super) fn due(&self, direction: Direction, bytes: usize) -> Option<Instant> {
        let until = self.count(self.per_mib?, direction, bytes);
        Some(until.checked_sub(AHEAD).unwrap_or(until))
    }

    /// Whether a datagram is within the limit. Counts it if so.
    pub(super) fn admit(&self, direction: Direction, bytes: usize) -> bool {
        let Some(per_mib) = self.per_mib else { return true };
        let is_behind = self.directions[usize::from(direction == Direction::In)]
            .lock()
            .is_some_and(|paid| paid > Instant::now() + AHEAD);
        if !is_behind {
            self.count(per_mib, direction, bytes);
        }
        !is_behind
    }

    fn count(&self, per_mib: Duration, direction: Direction, bytes: usize) -> Instant {
        let now = Instant::now();
        let mut paid = self.directions[usize::from(direction == Direction::In)].lock();
        let from = paid.map_or(now, |paid| paid.max(now));
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let until = from + per_mib.mul_f64(f64::from(bytes) / f64::from(1 << 20));
        *paid = Some(until);
        until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_admitted_and_then_the_rate() {
        let rate = Rate::new(10, 3);
        let admitted = || (0..10).take_while(|_| rate.admit()).count();
        assert_eq!(admitted(), 3);
        tokio::time::advance(Duration::from_millis(101)).await;
        assert_eq!(admitted(), 1);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(admitted(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_booked_comes_at_the_rate_and_not_too_late() {
        let rate = Rate::new(10, 3);
        let booked = || rate.book(Duration::from_millis(250)).map(|wait| wait.as_millis());
        assert_eq!(
            std::array::from_fn(|_| booked()),
            [Some(0), Some(0), Some(0), Some(100), Some(200), None, None]
        );
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(
            [booked(), booked()],
            [Some(200), None],
            "what was refused does not count"
        );
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(std::array::from_fn(|_| booked()), [0, 0, 0, 100].map(Some));
    }

    #[tokio::test(start_paused = true)]
    async fn events_beyond_the_rate_are_counted_once() {
        let rate = CountedRate::new(10, 2);
        let admitted: Vec<_> = (0..5).map(|_| rate.admit()).collect();
        assert_eq!(admitted, [Some(0), Some(0), None, None, None]);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!([rate.admit(), rate.admit(), rate.admit()], [Some(3), Some(0), None]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_pays_waits_only_beyond_the_burst() {
        let rate = Rate::new(100, 50);
        let begun = Instant::now();
        rate.pay(20).await;
        rate.pay(30).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        for _ in 0..100 {
            rate.pay(1).await;
        }
        let took = begun.elapsed();
        assert!(
            (Duration::from_millis(990)..Duration::from_millis(1010)).contains(&took),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn bandwidth_is_shared_and_each_direction_counts_for_itself() {
        let limit = Bandwidth::new(8);
        let begun = Instant::now();
        for _ in 0..10 {
            limit.pay(Direction::Out, 100_000).await;
        }
        let took = begun.elapsed();
        assert!(
            (Duration::from_millis(940)..Duration::from_millis(1010)).contains(&took),
            "{took:?}"
        );
        assert!(limit.admit(Direction::In, 1_000_000), "the other direction is unused");
        assert!(!limit.admit(Direction::In, 1));
        let unlimited = Bandwidth::new(0);
        unlimited.pay(Direction::In, usize::MAX).await;
        assert!(unlimited.admit(Direction::In, usize::MAX));
    }
}
