//! Rate limits: a token bucket that refills evenly.
//!
//! A bucket of `n` holds `n` permits when it is full and takes one period to get from empty to full. So a burst may
//! have `n` requests, and no more than `n` follow in every period after that. The only state is the time at which the
//! bucket will be full again. The clock is the wall clock, which may be set: when it is set back, a bucket is empty at
//! worst, and never for longer than one period.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::SECOND_US;
use crate::settings::BUCKET_MAX;

/// A token bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    size: u32,
    /// Time in which one permit is refilled, in microseconds.
    interval_us: i64,
    full_at_us: Mutex<i64>,
}

/// The fill level of a bucket. Seconds are rounded up, so that a client does not retry too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    /// Permits of a full bucket.
    pub(crate) limit: u32,
    /// Permits in the bucket now.
    pub(crate) remaining: u32,
    /// Seconds until the bucket is full.
    pub(crate) full_in_s: u32,
    /// Seconds until there is a permit.
    pub(crate) next_in_s: u32,
}

/// The level that a client is told, passed from where a permit is taken to where the client is answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct RateSlot(Arc<Mutex<Option<Level>>>);

impl RateSlot {
    /// Takes a permit and stores the level; the last one counts, which is that of the narrower limit.
    ///
    /// # Errors
    /// When the bucket is empty.
    pub(crate) fn take(&self, bucket: &Bucket, now_us: i64) -> Result<(), Level> {
        let taken = bucket.take(now_us);
        *self.0.lock() = Some(taken.unwrap_or_else(|level| level));
        taken.map(|_| ())
    }

    /// The level that was stored last.
    pub(crate) fn level(&self) -> Option<Level> {
        *self.0.lock()
    }
}

impl Bucket {
    /// A full bucket of `size` permits, at least 1 and at most [`BUCKET_MAX`], that refills within `period_s`.
    pub(crate) fn new(size: u32, period_s: u32) -> Self {
        let size = size.clamp(1, BUCKET_MAX);
        Self {
            size,
            interval_us: i64::from(period_s.max(1)) * SECOND_US / i64::from(size),
            full_at_us: Mutex::new(i64::MIN),
        }
    }

    /// Takes a permit. Returns the level afterwards in both cases.
    ///
    /// # Errors
    /// When the bucket is empty.
    pub(crate) fn take(&self, now_us: i64) -> Result<Level, Level> {
        let window_us = self.interval_us * i64::from(self.size);
        let mut full_at_us = self.full_at_us.lock();
        let owed_us = full_at_us.saturating_sub(now_us).clamp(0, window_us);
        if owed_us + self.interval_us > window_us {
            *full_at_us = now_us + owed_us;
            return Err(self.level(owed_us));
        }
        let owed_us = owed_us + self.interval_us;
        *full_at_us = now_us + owed_us;
        Ok(self.level(owed_us))
    }

    fn level(&self, owed_us: i64) -> Level {
        let window_us = self.interval_us * i64::from(self.size);
        let seconds = |us: i64| u32::try_from(us.max(0).unsigned_abs().div_ceil(SECOND_US.unsigned_abs()));
        Level {
            limit: self.size,
            remaining: u32::try_from((window_us - owed_us) / self.interval_us).unwrap_or(0),
            full_in_s: seconds(owed_us).unwrap_or(u32::MAX),
            next_in_s: seconds(owed_us + self.interval_us - window_us).unwrap_or(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_785_000_000_000_000;

    #[test]
    fn a_full_bucket_allows_a_burst_and_refills_evenly() {
        let bucket = Bucket::new(4, 60);
        for remaining in [3, 2, 1, 0] {
            let level = bucket.take(NOW).expect("a permit");
            assert_eq!((level.limit, level.remaining), (4, remaining));
            assert_eq!(level.full_in_s, 15 * (4 - remaining));
        }
        let empty = bucket.take(NOW).expect_err("none left");
        assert_eq!((empty.remaining, empty.full_in_s, empty.next_in_s), (0, 60, 15));
        // A refused request takes nothing, and one microsecond before the next permit is too early.
        let early = bucket.take(NOW + 15 * SECOND_US - 1).expect_err("too early");
        assert_eq!(early.next_in_s, 1);
        let next = bucket.take(NOW + 15 * SECOND_US).expect("the next");
        assert_eq!((next.remaining, next.full_in_s), (0, 60));
        bucket.take(NOW + 15 * SECOND_US).expect_err("only one came");
        // After any pause, the bucket holds no more than its size.
        let rested = bucket.take(NOW + 3600 * SECOND_US).expect("a permit");
        assert_eq!(rested.remaining, 3);
    }

    #[test]
    fn a_clock_that_is_set_back_blocks_for_one_period_at_most() {
        let bucket = Bucket::new(2, 1);
        assert!(bucket.take(NOW).is_ok() && bucket.take(NOW).is_ok());
        let back = NOW - 3600 * SECOND_US;
        let empty = bucket.take(back).expect_err("still empty");
        assert_eq!((empty.full_in_s, empty.next_in_s), (1, 1));
        assert!(bucket.take(back + SECOND_US / 2).is_ok());
    }

    #[test]
    fn extreme_bucket_sizes_are_exact() {
        let largest = Bucket::new(u32::MAX, 1);
        assert_eq!(largest.take(NOW).expect("a permit").remaining, BUCKET_MAX - 1);
        let smallest = Bucket::new(0, 60);
        assert_eq!(smallest.take(NOW).expect("a permit").remaining, 0);
        assert_eq!(smallest.take(NOW).expect_err("none").next_in_s, 60);
        // A size that does not divide the period.
        let odd = Bucket::new(7, 1);
        assert_eq!((0..20).filter(|_| odd.take(NOW).is_ok()).count(), 7);
    }
}
