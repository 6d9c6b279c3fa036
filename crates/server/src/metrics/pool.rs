//! Metrics of the warm pool.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::outcome::{PoolEnd, PoolUse};

type Labels = [(&'static str, &'static str); 1];

#[derive(Debug)]
pub(super) struct PoolSeries {
    sandboxes: Family<Labels, Gauge>,
    uses: Family<Labels, Counter>,
    starts: Family<Labels, Counter>,
    ends: Family<Labels, Counter>,
}

impl PoolSeries {
    /// Exported from the first scrape on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let sandboxes = Family::<Labels, Gauge>::default();
        registry.register(
            "pool_sandboxes",
            "Sandboxes of the warm pool, by state",
            sandboxes.clone(),
        );
        let uses = Family::<Labels, Counter>::default();
        registry.register(
            "pool_requests",
            "Create requests for a template that the warm pool has, by whether they got a sandbox of it",
            uses.clone(),
        );
        let starts = Family::<Labels, Counter>::default();
        registry.register(
            "pool_starts",
            "Sandboxes that were started for the warm pool, by outcome",
            starts.clone(),
        );
        let ends = Family::<Labels, Counter>::default();
        registry.register(
            "pool_ends",
            "Sandboxes of the warm pool that ended before a request got them, by reason",
            ends.clone(),
        );
        for value in PoolUse::ALL {
            uses.get_or_create_owned(&[("outcome", value.as_str())]);
        }
        for is_ready in [true, false] {
            starts.get_or_create_owned(&[("outcome", outcome(is_ready))]);
        }
        for why in PoolEnd::ALL {
            ends.get_or_create_owned(&[("reason", why.as_str())]);
        }
        Self {
            sandboxes,
            uses,
            starts,
            ends,
        }
    }

    pub(super) fn set(&self, counts: [(&'static str, usize); 2]) {
        for (state, count) in counts {
            let gauge = self.sandboxes.get_or_create(&[("state", state)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn count_use(&self, value: PoolUse) {
        self.uses.get_or_create(&[("outcome", value.as_str())]).inc();
    }

    pub(super) fn count_start(&self, is_ready: bool) {
        self.starts.get_or_create(&[("outcome", outcome(is_ready))]).inc();
    }

    pub(super) fn count_end(&self, why: PoolEnd) {
        self.ends.get_or_create(&[("reason", why.as_str())]).inc();
    }
}

fn outcome(is_ready: bool) -> &'static str {
    if is_ready { "ready" } else { "failed" }
}
