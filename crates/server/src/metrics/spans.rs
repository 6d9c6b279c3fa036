//! Metrics of the export of spans.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::outcome::SpanOutcome;

#[derive(Debug)]
pub(super) struct SpanSeries {
    spans: Family<[(&'static str, &'static str); 1], Counter>,
}

impl SpanSeries {
    /// Exported from the first scrape on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let spans = Family::<[(&'static str, &'static str); 1], Counter>::default();
        registry.register(
            "trace_spans",
            "Spans of traces, by what became of them: those that were not exported are lost",
            spans.clone(),
        );
        for outcome in SpanOutcome::ALL {
            spans.get_or_create_owned(&[("outcome", outcome.as_str())]);
        }
        Self { spans }
    }

    pub(super) fn count(&self, outcome: SpanOutcome, count: usize) {
        let counter = self.spans.get_or_create(&[("outcome", outcome.as_str())]);
        counter.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }

    pub(super) fn so_far(&self, outcome: SpanOutcome) -> u64 {
        self.spans.get_or_create(&[("outcome", outcome.as_str())]).get()
    }
}
