//! The sampler: reads the usage of sandboxes.
//!
//! Every few seconds the usage of all sandboxes is read from the node in one call. A new sandbox does not wait for
//! that: a client that asks for metrics right after a create would get none. It causes an extra round about a second
//! after its start, as long as rounds are cheap.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::node::{NodeApi, SandboxSample};
use store::records::MetricChunk;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{Item, Records};
use crate::chain::Chain;

/// After a round that took longer, there are no extra rounds for new sandboxes.
const CHEAP_ROUND: Duration = Duration::from_millis(20);

impl Records {
    /// Takes samples until `stop` is cancelled.
    pub(crate) async fn sample(self: Arc<Self>, node: Arc<dyn NodeApi>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.settings.metric_first);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A round that is due within half a tick starts now: a tick later it would be late by almost a tick.
        let due = self
            .settings
            .metric_interval
            .saturating_sub(self.settings.metric_first / 2);
        let mut last_full: Option<Instant> = None;
        let mut cheap = true;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            self.write_usage(false);
            let full = last_full.is_none_or(|last| last.elapsed() >= due);
            let early = cheap && self.has_unsampled_sandbox();
            if !(full || early) {
                continue;
            }
            let begun = Instant::now();
            if full {
                last_full = Some(begun);
                self.forget_ended();
            }
            match node.samples().await {
                Ok(readings) => self.record_readings(&readings, full),
                Err(error) => tracing::warn!(error = %Chain(&error), "cannot read the usage of sandboxes"),
            }
            cheap = begun.elapsed() < CHEAP_ROUND;
        }
    }

    /// Whether there is a sandbox without a sample.
    fn has_unsampled_sandbox(&self) -> bool {
        self.tracked
            .lock()
            .values()
            .any(|tracked| tracked.tail.needs_first_sample())
    }

    fn record_readings(&self, readings: &[SandboxSample], full: bool) {
        let closest_us = i64::try_from(self.settings.metric_interval.as_micros() / 2).unwrap_or(i64::MAX);
        let mut tracked = self.tracked.lock();
        for reading in readings {
            let Some(tracked) = tracked.get_mut(&reading.id).filter(|tracked| tracked.ended.is_none()) else {
                continue;
            };
            let tail = &mut tracked.tail;
            // A sandbox that had its extra round just before this one skips it.
            let too_close = tail
                .last_reading_us()
                .is_some_and(|last_reading_us| (0..closest_us).contains(&(reading.at_us - last_reading_us)));
            if !tail.needs_first_sample() && (!full || too_close) {
                continue;
            }
            if tail.push(reading)
                && let Some(chunk) = tail.cut(&tracked.team, &reading.id)
            {
                self.queue.put(Item::Chunk(chunk));
            }
        }
    }

    /// All samples that are not written yet, as rows.
    pub(super) fn cut_tails(&self) -> Vec<MetricChunk> {
        let mut tracked = self.tracked.lock();
        tracked
            .iter_mut()
            .filter_map(|(id, tracked)| tracked.tail.cut(&tracked.team, id))
            .collect()
    }
}
