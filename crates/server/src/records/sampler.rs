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
            let early = cheap && self.is_awaited();
            if !(full || early) {
                continue;
            }
            let begun = Instant::now();
            if full {
                last_full = Some(begun);
                self.forget_ended();
            }
            match node.samples().await {
                Ok(seen) => self.take_in(&seen, full),
                Err(error) => tracing::warn!(error = %Chain(&error), "take samples of what sandboxes use"),
            }
            cheap = begun.elapsed() < CHEAP_ROUND;
        }
    }

    /// Whether there is a sandbox that nothing was told of yet.
    fn is_awaited(&self) -> bool {
        self.known.lock().values().any(|known| known.tail.is_awaited())
    }

    fn take_in(&self, seen: &[SandboxSample], full: bool) {
        let closest_us = i64::try_from(self.settings.metric_interval.as_micros() / 2).unwrap_or(i64::MAX);
        let mut known = self.known.lock();
        for seen in seen {
            let Some(known) = known.get_mut(&seen.id).filter(|known| known.ended.is_none()) else {
                continue;
            };
            let tail = &mut known.tail;
            // A sandbox that had its first round a moment ago keeps the distance.
            let too_close = tail
                .looked_us()
                .is_some_and(|looked_us| (0..closest_us).contains(&(seen.at_us - looked_us)));
            if !tail.is_awaited() && (!full || too_close) {
                continue;
            }
            if tail.push(seen)
                && let Some(chunk) = tail.cut(&known.team, &seen.id)
            {
                self.queue.put(Item::Chunk(chunk));
            }
        }
    }

    /// Everything that is not written yet, as rows.
    pub(super) fn cut_tails(&self) -> Vec<MetricChunk> {
        let mut known = self.known.lock();
        known
            .iter_mut()
            .filter_map(|(id, known)| known.tail.cut(&known.team, id))
            .collect()
    }
}
