//! Taking samples of what sandboxes use.
//!
//! Every few seconds the node is asked about all sandboxes at once. A new sandbox does not wait for that: a client that
//! asks for metrics right after a create would find none. It gets a round of its own about a second after its start, as
//! long as rounds are cheap.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::node::{NodeApi, SandboxSample};
use store::records::MetricChunk;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{Item, Records};
use crate::chain::Chain;

/// A round that takes longer is not repeated for the sake of new sandboxes.
const CHEAP_ROUND: Duration = Duration::from_millis(20);

impl Records {
    /// Takes samples until `stop` is cancelled.
    pub(crate) async fn sample(self: Arc<Self>, node: Arc<dyn NodeApi>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.settings.metric_first);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A round that is due within half a tick is due: a tick later it would be late by almost a tick.
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
                Err(error) => tracing::warn!(error = %Chain(&error), "take samples of what sandboxes use"),
            }
            cheap = begun.elapsed() < CHEAP_ROUND;
        }
    }

    /// Whether there is a sandbox that nothing was told of yet.
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
            // A sandbox that had its first round a moment ago keeps the distance.
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

    /// Everything that is not written yet, as rows.
    pub(super) fn cut_tails(&self) -> Vec<MetricChunk> {
        let mut tracked = self.tracked.lock();
        tracked
            .iter_mut()
            .filter_map(|(id, tracked)| tracked.tail.cut(&tracked.team, id))
            .collect()
    }
}
