//! Making series and registering them in one step, so that none is counted that is not exported.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};

/// The one label of a series.
pub(super) type Labels = [(&'static str, &'static str); 1];

/// A current value that is not a whole number, or may be unknown.
pub(super) type FloatGauge = Gauge<f64, AtomicU64>;

/// Registers a series that begins at its default.
pub(super) fn series<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Registers a series whose values have a unit, which its name gets as a suffix.
pub(super) fn with_unit<M: Metric + Clone>(
    registry: &mut Registry,
    name: &str,
    unit: Unit,
    help: &str,
    metric: M,
) -> M {
    registry.register_with_unit(name, help, unit, metric.clone());
    metric
}

/// Counters of one name, by the value of one label.
#[derive(Debug)]
pub(super) struct Counts {
    label: &'static str,
    family: Family<Labels, Counter>,
}

impl Counts {
    /// Registers counters. Those of these values are exported from the first scrape on, so that rates have a first value.
    pub(super) fn register(
        registry: &mut Registry,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = &'static str>,
    ) -> Self {
        let family: Family<Labels, Counter> = series(registry, name, help);
        for value in values {
            family.get_or_create_owned(&[(label, value)]);
        }
        Self { label, family }
    }

    /// Adds to the counter of a value.
    pub(super) fn add(&self, value: &'static str, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.family.get_or_create(&[(self.label, value)]).inc_by(count);
    }

    /// The counter of a value, so far.
    pub(super) fn so_far(&self, value: &'static str) -> u64 {
        self.family.get_or_create(&[(self.label, value)]).get()
    }
}

/// The number of bytes or microseconds as a value.
#[expect(
    clippy::cast_precision_loss,
    reason = "53 bits of a number of bytes are more than enough"
)]
pub(super) fn float(number: u64) -> f64 {
    number as f64
}
