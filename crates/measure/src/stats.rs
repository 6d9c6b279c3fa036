//! Statistics over all samples, none discarded.

use std::time::Duration;

use serde::Serialize;

/// Times of one kind of request, in milliseconds. Percentiles are by nearest rank: each is a time that was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distribution {
    /// Number of requests that succeeded.
    pub n: usize,
    /// Half of the measurements took at most this long.
    pub p50_ms: f64,
    /// Nine of ten were at most this slow.
    pub p90_ms: f64,
    /// 99 of 100 were at most this slow.
    pub p99_ms: f64,
    /// Duration of the slowest measurement.
    pub max_ms: f64,
    /// Average duration.
    pub mean_ms: f64,
}

impl Distribution {
    /// The distribution of some times; none if there are no times.
    #[must_use]
    pub fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let max = *times.last()?;
        let total: Duration = times.iter().sum();
        Some(Self {
            n: times.len(),
            p50_ms: ms(nearest_rank(&times, 50)),
            p90_ms: ms(nearest_rank(&times, 90)),
            p99_ms: ms(nearest_rank(&times, 99)),
            max_ms: ms(max),
            mean_ms: ms(total) / times.len() as f64,
        })
    }
}

/// The smallest time that at least `percent` of 100 are not above. `sorted` is not empty.
fn nearest_rank(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

/// Milliseconds, rounded to a microsecond.
fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of 1, 2, … n milliseconds, in an order that is not theirs.
    fn up_to(n: u64) -> Vec<Duration> {
        (1..=n).rev().map(Duration::from_millis).collect()
    }

    #[test]
    fn percentiles_are_measured_values() {
        for (n, p50, p90, p99) in [
            (1, 1.0, 1.0, 1.0),
            (2, 1.0, 2.0, 2.0),
            (3, 2.0, 3.0, 3.0),
            (9, 5.0, 9.0, 9.0),
            (10, 5.0, 9.0, 10.0),
            (99, 50.0, 90.0, 99.0),
            (100, 50.0, 90.0, 99.0),
            (101, 51.0, 91.0, 100.0),
            (1000, 500.0, 900.0, 990.0),
        ] {
            let found = Distribution::of(up_to(n)).unwrap();
            assert_eq!((found.p50_ms, found.p90_ms, found.p99_ms), (p50, p90, p99), "{n}");
            assert_eq!(found.max_ms, n as f64);
            assert_eq!(found.mean_ms, (n + 1) as f64 / 2.0);
        }
        assert_eq!(Distribution::of(Vec::new()), None);
    }

    #[test]
    fn the_slowest_is_not_trimmed() {
        let mut times = up_to(99);
        times.push(Duration::from_secs(60));
        let found = Distribution::of(times).unwrap();
        assert_eq!((found.p99_ms, found.max_ms), (99.0, 60_000.0));
    }
}
