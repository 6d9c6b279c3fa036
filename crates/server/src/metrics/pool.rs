//! Metrics of the warm pool.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::series::{Counts, Labels, series};
use crate::outcome::{PoolEnd, PoolUse};

#[derive(Debug)]
pub(super) struct PoolSeries {
    sandboxes: Family<Labels, Gauge>,
    uses: Counts,
    starts: Counts,
    ends: Counts,
}

impl PoolSeries {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            sandboxes: series(registry, "pool_sandboxes", "Sandboxes of the warm pool, by state"),
            uses: Counts::register(
                registry,
                "pool_requests",
                "Create requests for a template that the warm pool has, by whether they got a sandbox of it",
                "outcome",
                PoolUse::ALL.map(PoolUse::as_str),
            ),
            starts: Counts::register(
                registry,
                "pool_starts",
                "Sandboxes that were started for the warm pool, by outcome",
                "outcome",
                [true, false].map(outcome),
            ),
            ends: Counts::register(
                registry,
                "pool_ends",
                "Sandboxes of the warm pool that ended before a request got them, by reason",
                "reason",
                PoolEnd::ALL.map(PoolEnd::as_str),
            ),
        }
    }

    pub(super) fn set(&self, counts: [(&'static str, usize); 2]) {
        for (state, count) in counts {
            let gauge = self.sandboxes.get_or_create(&[("state", state)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn count_use(&self, value: PoolUse) {
        self.uses.add(value.as_str(), 1);
    }

    pub(super) fn count_start(&self, is_ready: bool) {
        self.starts.add(outcome(is_ready), 1);
    }

    pub(super) fn count_end(&self, why: PoolEnd) {
        self.ends.add(why.as_str(), 1);
    }
}

fn outcome(is_ready: bool) -> &'static str {
    if is_ready { "ready" } else { "failed" }
}
