//! Downsampling: one sample per time bucket, with the maximum of each value.

use super::encoding::Sample;
use crate::clock::SECOND_US;

const MINUTE_S: i64 = 60;
const HOUR_S: i64 = 60 * MINUTE_S;
const HOURS_6_S: i64 = 6 * HOUR_S;
const HOURS_12_S: i64 = 12 * HOUR_S;
const DAY_S: i64 = 24 * HOUR_S;
const WEEK_S: i64 = 7 * DAY_S;

/// The bucket length for a range of that many seconds, in seconds. Clients draw charts of a few hundred points.
pub(crate) fn step_s(range_s: i64) -> i64 {
    match range_s {
        ..HOUR_S => 5,
        HOUR_S..HOURS_6_S => 30,
        HOURS_6_S..HOURS_12_S => MINUTE_S,
        HOURS_12_S..DAY_S => 2 * MINUTE_S,
        DAY_S..WEEK_S => 5 * MINUTE_S,
        WEEK_S.. => 15 * MINUTE_S,
    }
}

/// Downsamples the samples, oldest first, of a requested range of `range_s` seconds. The time of a bucket is that of
/// its last sample, so that none is outside of the range.
pub(crate) fn downsample(samples: &[Sample], range_s: i64) -> Vec<Sample> {
    let step_us = step_s(range_s) * SECOND_US;
    let mut buckets: Vec<Sample> = Vec::new();
    for sample in samples {
        let bucket = |at_us: i64| at_us.div_euclid(step_us);
        match buckets.last_mut() {
            Some(last) if bucket(last.at_us) == bucket(sample.at_us) => *last = maximum(last, sample),
            Some(_) | None => buckets.push(*sample),
        }
    }
    buckets
}

/// The maximum of each value, with the time of `b`.
fn maximum(a: &Sample, b: &Sample) -> Sample {
    Sample {
        at_us: b.at_us,
        cpu_count: a.cpu_count.max(b.cpu_count),
        cpu_used_centi: a.cpu_used_centi.max(b.cpu_used_centi),
        memory_used_bytes: a.memory_used_bytes.max(b.memory_used_bytes),
        memory_total_bytes: a.memory_total_bytes.max(b.memory_total_bytes),
        memory_cache_bytes: a.memory_cache_bytes.max(b.memory_cache_bytes),
        disk_used_bytes: a.disk_used_bytes.max(b.disk_used_bytes),
        disk_total_bytes: a.disk_total_bytes.max(b.disk_total_bytes),
        received_bytes: a.received_bytes.max(b.received_bytes),
        sent_bytes: a.sent_bytes.max(b.sent_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_with_the_range() {
        for (range_s, want) in [
            (0, 5),
            (HOUR_S - 1, 5),
            (HOUR_S, 30),
            (6 * HOUR_S - 1, 30),
            (6 * HOUR_S, 60),
            (12 * HOUR_S - 1, 60),
            (12 * HOUR_S, 120),
            (24 * HOUR_S - 1, 120),
            (24 * HOUR_S, 300),
            (7 * 24 * HOUR_S - 1, 300),
            (7 * 24 * HOUR_S, 900),
            (i64::MAX, 900),
        ] {
            assert_eq!(step_s(range_s), want, "{range_s}");
        }
    }

    #[test]
    fn a_bucket_has_the_maximum_of_each_value() {
        let sample = |at_s: i64, cpu: u32, memory: u64| Sample {
            at_us: at_s * SECOND_US,
            cpu_count: 2,
            cpu_used_centi: cpu,
            memory_used_bytes: memory,
            memory_total_bytes: 100,
            memory_cache_bytes: 100 - memory,
            disk_used_bytes: 1,
            disk_total_bytes: 2,
            received_bytes: at_s.unsigned_abs(),
            sent_bytes: 3,
        };
        let samples = [
            sample(0, 5, 10),
            sample(25, 3, 20),
            sample(29, 4, 15),
            sample(30, 1, 1),
            sample(95, 2, 2),
        ];
        let thinned = downsample(&samples, HOUR_S);
        let want = Sample {
            memory_cache_bytes: 90,
            ..sample(29, 5, 20)
        };
        assert_eq!(thinned, [want, samples[3], samples[4]]);
        assert_eq!(
            downsample(&samples[..3], HOUR_S - 1),
            [samples[0], second_bucket(&samples)]
        );
        assert_eq!(downsample(&[], 0), []);
    }

    /// The second and third sample are in one bucket of five seconds.
    fn second_bucket(samples: &[Sample; 5]) -> Sample {
        maximum(&samples[1], &samples[2])
    }
}
