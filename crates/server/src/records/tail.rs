//! The newest samples of one sandbox, until they are written.

use model::id::{SandboxId, TeamId};
use protocol::node::{NetworkBytes, SandboxSample};
use store::records::MetricChunk;

use super::encoding::{self, Sample};
use crate::clock::SECOND_US;

/// Samples per row: five minutes of them.
pub(super) const CHUNK_SAMPLES: usize = 60;
/// How long after its start the first CPU sample of a sandbox is the average since the start. A sandbox found later
/// needs two readings for its first sample.
const FIRST_WITHIN_US: i64 = 10 * SECOND_US;

/// The newest samples of one sandbox.
#[derive(Debug)]
pub(super) struct Tail {
    cpu_count: u32,
    started_us: Option<i64>,
    /// Whether it had used processor time before the present run began.
    has_paused: bool,
    /// Time and CPU time of the last reading.
    before: Option<(i64, u64)>,
    network: NetworkTotal,
    samples: Vec<Sample>,
    last: Option<Sample>,
    /// Number of samples of the current row.
    full_at: usize,
}

impl Tail {
    pub(super) fn new(id: &SandboxId, cpu_count: u32) -> Self {
        // The first row of each sandbox has another length, so that the rows of sandboxes adopted together are not all
        // written together.
        let spread = id.as_str().bytes().fold(0_usize, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(usize::from(byte))
        });
        Self {
            cpu_count,
            started_us: None,
            has_paused: false,
            before: None,
            network: NetworkTotal::default(),
            samples: Vec::new(),
            last: None,
            full_at: 1 + spread % CHUNK_SAMPLES,
        }
    }

    /// Starts sampling; the sandbox runs since `started_us`.
    pub(super) fn start(&mut self, started_us: i64) {
        self.started_us = Some(started_us);
    }

    /// Has the sandbox go on with what it had received and sent in a sample of an earlier run of the platform.
    pub(super) fn recall(&mut self, before: &Sample) {
        self.network.recalled = Some(*before);
    }

    /// Stops sampling until the sandbox is started again: it is paused. `network` is what it had received and sent.
    pub(super) fn pause(&mut self, network: Option<NetworkBytes>) {
        if let Some(network) = network {
            self.network.count(network);
        }
        self.started_us = None;
        self.has_paused = true;
        self.before = None;
    }

    /// Whether the sandbox runs and has no sample yet.
    pub(super) fn needs_first_sample(&self) -> bool {
        self.started_us.is_some() && self.last.is_none()
    }

    /// Time of the last reading, in microseconds since the Unix epoch.
    pub(super) fn last_reading_us(&self) -> Option<i64> {
        self.before.map(|(at_us, _)| at_us)
    }

    /// Adds a reading of the node. Returns `true` when a row is complete.
    pub(super) fn push(&mut self, reading: &SandboxSample) -> bool {
        let Some(started_us) = self.started_us else {
            return false;
        };
        let [received_bytes, sent_bytes] = self.network.count(reading.network);
        let is_first_run = !self.has_paused;
        let first = || {
            (is_first_run && (0..=FIRST_WITHIN_US).contains(&(reading.at_us - started_us))).then_some((started_us, 0))
        };
        let before = self.before.or_else(first);
        self.before = Some((reading.at_us, reading.cpu_time_us));
        // There is no sample for an interval that is empty, or negative because a clock was set.
        let Some((before_us, cpu_before_us)) = before.filter(|(before_us, _)| *before_us < reading.at_us) else {
            return false;
        };
        let sample = Sample {
            // With the precision of the encoding, so that it is the same sample whether it is read from here or from a
            // row.
            at_us: reading.at_us.div_euclid(1000) * 1000,
            cpu_count: self.cpu_count,
            cpu_used_centi: used_centi(
                reading.cpu_time_us.saturating_sub(cpu_before_us),
                reading.at_us - before_us,
                self.cpu_count,
            ),
            memory_used_bytes: reading.memory_used_bytes,
            memory_total_bytes: reading.memory_total_bytes,
            memory_cache_bytes: reading.memory_cache_bytes,
            disk_used_bytes: reading.disk_used_bytes,
            disk_total_bytes: reading.disk_total_bytes,
            received_bytes,
            sent_bytes,
        };
        self.samples.push(sample);
        self.last = Some(sample);
        self.samples.len() >= self.full_at
    }

    /// The samples that are not written yet.
    pub(super) fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The newest sample.
    pub(super) fn last(&self) -> Option<Sample> {
        self.last
    }

    /// Removes the samples and returns them as a row; `None` if there are none.
    pub(super) fn cut(&mut self, team: &TeamId, id: &SandboxId) -> Option<MetricChunk> {
        self.full_at = CHUNK_SAMPLES;
        let samples = std::mem::take(&mut self.samples);
        let from_us = samples.iter().map(|sample| sample.at_us).min()?;
        let to_us = samples.iter().map(|sample| sample.at_us).max()?;
        Some(MetricChunk {
            team_id: team.clone(),
            sandbox_id: id.clone(),
            from_us,
            to_us,
            samples: encoding::encode(&samples),
        })
    }
}

/// What a sandbox has received and sent, over all counters of the node, which begins a new one with each start of its processes
/// and of the platform.
#[derive(Debug, Default)]
struct NetworkTotal {
    /// By counters before the present one: received, then sent.
    before: [u64; 2],
    /// The last reading of the present counter.
    counter: NetworkBytes,
    /// A sample that is to be continued with the next reading.
    recalled: Option<Sample>,
}

impl NetworkTotal {
    /// Adds a reading; returns the total: received, then sent.
    fn count(&mut self, reading: NetworkBytes) -> [u64; 2] {
        let now = [reading.received, reading.sent];
        if reading.since_us != self.counter.since_us {
            self.before = self.total();
        }
        self.counter = reading;
        if let Some(recalled) = self.recalled.take() {
            let told = [recalled.received_bytes, recalled.sent_bytes];
            for (before, (told, now)) in self.before.iter_mut().zip(told.into_iter().zip(now)) {
                // A counter that began before that sample has some of it, and the total never falls.
                let is_new = reading.since_us > recalled.at_us;
                *before = before.saturating_add(if is_new { told } else { told.saturating_sub(now) });
            }
        }
        self.total()
    }

    fn total(&self) -> [u64; 2] {
        let [received, sent] = self.before;
        [
            received.saturating_add(self.counter.received),
            sent.saturating_add(self.counter.sent),
        ]
    }
}

/// CPU time used, in hundredths of a percent of the CPU time of `cpu_count` cores.
fn used_centi(used_us: u64, span_us: i64, cpu_count: u32) -> u32 {
    let most = u128::from(span_us.unsigned_abs()) * u128::from(cpu_count.max(1));
    let centi = (u128::from(used_us) * 10_000 + most / 2) / most.max(1);
    u32::try_from(centi.min(10_000)).expect("no more than 10,000")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        "iabc".parse().expect("an id")
    }

    fn reading(at_us: i64, cpu_time_us: u64) -> SandboxSample {
        SandboxSample {
            id: id(),
            at_us,
            cpu_time_us,
            memory_used_bytes: 1,
            memory_cache_bytes: 2,
            memory_total_bytes: 3,
            disk_used_bytes: 4,
            disk_total_bytes: 5,
            network: NetworkBytes::default(),
        }
    }

    fn used(tail: &Tail) -> Vec<u32> {
        tail.samples().iter().map(|sample| sample.cpu_used_centi).collect()
    }

    #[test]
    fn cpu_is_a_share_of_all_cores() {
        for (used_us, span_us, cores, want) in [
            (0, 5_000_000, 2, 0),
            (5_000_000, 5_000_000, 1, 10_000),
            (5_000_000, 5_000_000, 2, 5_000),
            (10_000_000, 5_000_000, 2, 10_000),
            // The clocks are not read at the same time, so a little more than everything may be measured.
            (10_100_000, 5_000_000, 2, 10_000),
            (1_234_567, 10_000_000, 1, 1_235),
            (u64::MAX, 1, 1, 10_000),
            (1, 1, 0, 10_000),
        ] {
            assert_eq!(used_centi(used_us, span_us, cores), want, "{used_us} {span_us} {cores}");
        }
    }

    #[test]
    fn the_first_sample_of_a_new_sandbox_is_an_average_since_its_start() {
        let mut tail = Tail::new(&id(), 1);
        // Readings before it runs are ignored.
        assert!(!tail.push(&reading(0, 0)));
        assert!(tail.samples().is_empty() && !tail.needs_first_sample());
        tail.start(1_000_000);
        assert!(tail.needs_first_sample());
        tail.push(&reading(2_000_000, 250_000));
        tail.push(&reading(7_000_000, 250_000));
        tail.push(&reading(12_000_000, 5_250_000));
        assert_eq!(used(&tail), [2_500, 0, 10_000]);
        assert!(!tail.needs_first_sample());
    }

    #[test]
    fn an_adopted_sandbox_needs_two_readings() {
        let mut tail = Tail::new(&id(), 1);
        tail.start(0);
        tail.push(&reading(FIRST_WITHIN_US + 1, 9_000_000));
        assert!(tail.samples().is_empty() && tail.needs_first_sample());
        tail.push(&reading(FIRST_WITHIN_US + 1_000_001, 9_100_000));
        assert_eq!(used(&tail), [1_000]);
    }

    #[test]
    fn a_clock_that_was_set_back_costs_one_sample() {
        let mut tail = Tail::new(&id(), 1);
        tail.start(0);
        for (at_us, cpu_us) in [(1_000_000, 0), (900_000, 0), (900_000, 0), (1_900_000, 500_000)] {
            tail.push(&reading(at_us, cpu_us));
        }
        assert_eq!(used(&tail), [0, 5_000]);
        let team = "00000000-0000-4000-8000-000000000001".parse().expect("an id");
        let chunk = tail.cut(&team, &id()).expect("samples");
        assert_eq!((chunk.from_us, chunk.to_us), (1_000_000, 1_900_000));
        assert_eq!(tail.cut(&team, &id()), None);
        assert!(tail.last().is_some());
    }

    #[test]
    fn what_was_received_and_sent_outlives_each_counter() {
        let counter = |since_us, received, sent| NetworkBytes {
            since_us,
            received,
            sent,
        };
        let mut total = NetworkTotal::default();
        assert_eq!(total.count(counter(1, 10, 1)), [10, 1]);
        assert_eq!(total.count(counter(1, 15, 1)), [15, 1]);
        // Processes that were started again, which have received more than those before at the first reading.
        assert_eq!(total.count(counter(9, 100, 7)), [115, 8]);
        assert_eq!(total.count(counter(9, 101, 7)), [116, 8]);
        // The next run of the platform knows what was told.
        let told = |at_us| Sample {
            at_us,
            received_bytes: 116,
            sent_bytes: 8,
            ..sampled()
        };
        for (at_us, want) in [(19, [120, 9]), (20, [116, 8])] {
            let mut total = NetworkTotal {
                recalled: Some(told(at_us)),
                ..NetworkTotal::default()
            };
            assert_eq!(total.count(counter(20, 4, 1)), want);
            assert_eq!(total.count(counter(20, 5, 1)), [want[0] + 1, want[1]]);
        }
        // A node that went on while the server was restarted.
        let mut total = NetworkTotal {
            recalled: Some(told(30)),
            ..NetworkTotal::default()
        };
        assert_eq!(total.count(counter(20, 200, 3)), [200, 8]);
    }

    #[test]
    fn the_last_bytes_before_a_pause_are_counted() {
        let mut tail = Tail::new(&id(), 1);
        tail.start(1_000_000);
        let reading = |at_us, since_us, received| SandboxSample {
            network: NetworkBytes {
                since_us,
                received,
                sent: 0,
            },
            ..reading(at_us, 0)
        };
        tail.push(&reading(2_000_000, 5, 10));
        tail.pause(Some(NetworkBytes {
            since_us: 5,
            received: 30,
            sent: 0,
        }));
        tail.start(3_000_000);
        tail.push(&reading(4_000_000, 6, 1));
        tail.push(&reading(5_000_000, 6, 2));
        let received: Vec<u64> = tail.samples().iter().map(|sample| sample.received_bytes).collect();
        assert_eq!(received, [10, 32]);
    }

    /// Any sample.
    fn sampled() -> Sample {
        let mut tail = Tail::new(&id(), 1);
        tail.start(0);
        tail.push(&reading(1_000_000, 0));
        tail.last().expect("a sample")
    }

    #[test]
    fn rows_have_their_full_length() {
        let team = "00000000-0000-4000-8000-000000000001".parse().expect("an id");
        let mut tail = Tail::new(&id(), 1);
        tail.start(0);
        let mut at_us = 0;
        let mut lengths = Vec::new();
        for _ in 0..CHUNK_SAMPLES * 3 {
            at_us += 5_000_000;
            if tail.push(&reading(at_us, 0)) {
                lengths.push(tail.samples().len());
                tail.cut(&team, &id());
            }
        }
        assert!((1..=CHUNK_SAMPLES).contains(&lengths[0]));
        assert!(
            lengths[1..].iter().all(|length| *length == CHUNK_SAMPLES),
            "{lengths:?}"
        );
    }
}
