//! What an operator watches: counts and durations, for Prometheus.
//!
//! Labels have few values, all of them this program's own words: no id, no path, nothing that a client chose. What is
//! counted is counted where it happens; what is there at a moment (sandboxes, room) is looked up when it is asked for.
//! The text is served on an address of its own and never on that of the API.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use protocol::node::{DiskStops, HostCapacity, Stage};

use crate::outcome::{CreateOutcome, EndReason};
use crate::settings::CapacitySettings;

/// Buckets of durations, in seconds: from a read of the database to a create on a host that swaps.
const DURATIONS: [f64; 13] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
];
/// Classes of statuses, by their first digit less one.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
/// The status for asking too often.
const TOO_MANY_REQUESTS: u16 = 429;
/// Bytes of a MiB.
const MIB: i64 = 1024 * 1024;

type Labels = [(&'static str, &'static str); 1];
type StageLabels = [(&'static str, String); 1];
type RequestLabels = [(&'static str, Arc<str>); 3];
type Histograms<S> = Family<S, Histogram, fn() -> Histogram>;
type FloatGauge = Gauge<f64, AtomicU64>;

/// All metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    series: Series,
}

#[derive(Debug)]
struct Series {
    requests: Histograms<RequestLabels>,
    requests_limited: Counter,
    creates: Family<Labels, Counter>,
    create_stages: Histograms<StageLabels>,
    sandboxes: Family<Labels, Gauge>,
    ends: Family<Labels, Counter>,
    expiry_lateness: Histogram,
    /// By class of status.
    proxied: [Counter; CLASSES.len()],
    connections: Gauge,
    client_connections: Gauge,
    connections_refused: Counter,
    connections_evicted: Counter,
    store_errors: Counter,
    log_entries_lost: Counter,
    memory_available: FloatGauge,
    disk_available: FloatGauge,
    disk_stopped: Gauge,
    disk_stops: Counter,
    disk_ends: Counter,
}

/// What is looked up when the metrics are asked for.
#[derive(Debug, Clone)]
pub(crate) struct MetricsSnapshot {
    /// Sandboxes, by their state.
    pub(crate) sandboxes: Vec<(&'static str, usize)>,
    /// Open connections to sandboxes.
    pub(crate) connections: usize,
    /// Connections of clients.
    pub(crate) clients: ConnectionCounts,
    /// Entries of sandboxes' logs that were ever dropped.
    pub(crate) log_entries_lost: u64,
    /// What the host has left, if it can tell.
    pub(crate) capacity: Option<HostCapacity>,
}

/// How many connections there are and were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ConnectionCounts {
    /// Open now.
    pub(crate) open: usize,
    /// Ever refused.
    pub(crate) refused: u64,
    /// Ever closed to make room.
    pub(crate) evicted: u64,
}

fn durations() -> Histogram {
    Histogram::new(DURATIONS)
}

impl Metrics {
    pub(crate) fn new(capacity: &CapacitySettings) -> Self {
        let mut registry = Registry::with_prefix("ringfence");
        let series = Series::register(&mut registry);
        register_settings(&mut registry, capacity);
        Self { registry, series }
    }

    /// A request to the API was answered. `operation` is the operation's id, or none where there is none.
    pub(crate) fn request(&self, operation: Option<&Arc<str>>, method: &'static str, status: u16, took: Duration) {
        let labels = [
            ("operation", operation.map_or_else(|| Arc::from("none"), Arc::clone)),
            ("method", Arc::from(method)),
            ("status", Arc::from(CLASSES[class(status)])),
        ];
        self.series.requests.get_or_create(&labels).observe(took.as_secs_f64());
        if status == TOO_MANY_REQUESTS {
            self.series.requests_limited.inc();
        }
    }

    /// A create ended.
    pub(crate) fn create(&self, outcome: CreateOutcome) {
        self.series
            .creates
            .get_or_create(&[("outcome", outcome.as_str())])
            .inc();
    }

    /// What the stages of a successful create took.
    pub(crate) fn create_stages(&self, stages: &[Stage]) {
        for Stage { name, took } in stages {
            self.series
                .create_stages
                .get_or_create(&[("stage", name.to_string())])
                .observe(took.as_secs_f64());
        }
    }

    /// A sandbox ended.
    pub(crate) fn end(&self, reason: EndReason) {
        self.series.ends.get_or_create(&[("reason", reason.as_str())]).inc();
    }

    /// A sandbox was ended that many microseconds after its deadline.
    pub(crate) fn expired(&self, late_us: i64) {
        let late = Duration::from_micros(late_us.max(0).unsigned_abs());
        self.series.expiry_lateness.observe(late.as_secs_f64());
    }

    /// A request to a sandbox was answered.
    pub(crate) fn proxy_request(&self, status: u16) {
        self.series.proxied[class(status)].inc();
    }

    /// The node told what it does to keep the host's disk from being filled.
    pub(crate) fn disk_stops(&self, disk: DiskStops) {
        let series = &self.series;
        series.disk_stopped.set(disk.stopped.into());
        series.disk_stops.inner().store(disk.stops, Ordering::Relaxed);
        series.disk_ends.inner().store(disk.ends, Ordering::Relaxed);
    }

    /// The database failed.
    pub(crate) fn store_error(&self) {
        self.series.store_errors.inc();
    }

    /// Everything as text, in the format of `OpenMetrics` 1.0.
    ///
    /// # Errors
    /// Never in practice: writing into a text does not fail.
    pub(crate) fn text(&self, snapshot: &MetricsSnapshot) -> Result<String, std::fmt::Error> {
        let series = &self.series;
        for (state, count) in &snapshot.sandboxes {
            let gauge = series.sandboxes.get_or_create(&[("state", *state)]);
            gauge.set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
        series
            .connections
            .set(i64::try_from(snapshot.connections).unwrap_or(i64::MAX));
        let clients = &snapshot.clients;
        series
            .client_connections
            .set(i64::try_from(clients.open).unwrap_or(i64::MAX));
        for (counter, count) in [
            (&series.connections_refused, clients.refused),
            (&series.connections_evicted, clients.evicted),
        ] {
            counter.inner().store(count, Ordering::Relaxed);
        }
        let lost = series.log_entries_lost.inner();
        lost.store(snapshot.log_entries_lost, Ordering::Relaxed);
        let available = |bytes: fn(&HostCapacity) -> u64| {
            snapshot
                .capacity
                .as_ref()
                .map_or(f64::NAN, |capacity| float(bytes(capacity)))
        };
        series
            .memory_available
            .set(available(|capacity| capacity.memory_available_bytes));
        series
            .disk_available
            .set(available(|capacity| capacity.disk_available_bytes));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Series {
    fn register(registry: &mut Registry) -> Self {
        let requests: Histograms<RequestLabels> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "api_request_duration",
            "Time to answer requests to the API, by operation, method and class of status",
            Unit::Seconds,
            requests.clone(),
        );
        let requests_limited = Counter::default();
        registry.register(
            "api_requests_limited",
            "Requests to the API that were answered 429",
            requests_limited.clone(),
        );
        let creates = Family::<Labels, Counter>::default();
        registry.register("creates", "Creates of sandboxes, by outcome", creates.clone());
        let create_stages: Histograms<StageLabels> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "create_stage_duration",
            "Time that successful creates spent in each stage, and in total",
            Unit::Seconds,
            create_stages.clone(),
        );
        let sandboxes = Family::<Labels, Gauge>::default();
        registry.register("sandboxes", "Sandboxes, by state", sandboxes.clone());
        let ends = Family::<Labels, Counter>::default();
        registry.register("sandbox_ends", "Sandboxes that ended, by reason", ends.clone());
        let expiry_lateness = durations();
        registry.register_with_unit(
            "expiry_lateness",
            "Time from a sandbox's deadline until nothing of it ran any more",
            Unit::Seconds,
            expiry_lateness.clone(),
        );
        let proxied = Family::<Labels, Counter>::default();
        registry.register(
            "proxy_requests",
            "Requests to sandboxes, by class of status",
            proxied.clone(),
        );
        let connections = Gauge::default();
        registry.register(
            "proxy_connections",
            "Open connections to sandboxes",
            connections.clone(),
        );
        let client_connections = Gauge::default();
        registry.register(
            "client_connections",
            "Open connections of clients",
            client_connections.clone(),
        );
        let (connections_refused, connections_evicted) = (Counter::default(), Counter::default());
        registry.register(
            "client_connections_refused",
            "Connections that were refused because as many as may be were in use",
            connections_refused.clone(),
        );
        registry.register(
            "client_connections_evicted",
            "Idle connections that were closed to make room for others",
            connections_evicted.clone(),
        );
        let store_errors = Counter::default();
        registry.register(
            "store_errors",
            "Requests and background work that the database failed",
            store_errors.clone(),
        );
        let log_entries_lost = Counter::default();
        registry.register(
            "log_entries_lost",
            "Entries of sandboxes' logs that were dropped because the database was behind",
            log_entries_lost.clone(),
        );
        let (memory_available, disk_available) = (FloatGauge::default(), FloatGauge::default());
        registry.register_with_unit(
            "host_memory_available",
            "Memory that the host has left; NaN when it cannot tell",
            Unit::Bytes,
            memory_available.clone(),
        );
        registry.register_with_unit(
            "host_disk_available",
            "Space left where the disks of sandboxes lie; NaN when the host cannot tell",
            Unit::Bytes,
            disk_available.clone(),
        );
        let disk_stopped = Gauge::default();
        registry.register(
            "sandboxes_disk_stopped",
            "Sandboxes that may write nothing new, because the host's disk is nearly full",
            disk_stopped.clone(),
        );
        let disk_stops = Counter::default();
        registry.register(
            "sandbox_disk_stops",
            "How often a sandbox was stopped from writing because the host's disk was nearly full",
            disk_stops.clone(),
        );
        let disk_ends = Counter::default();
        registry.register(
            "sandbox_disk_ends",
            "Sandboxes that were ended because they went on taking space of a disk that was nearly full",
            disk_ends.clone(),
        );
        // There from the first scrape on, so that a rate over them has a beginning.
        for outcome in CreateOutcome::ALL {
            creates.get_or_create_owned(&[("outcome", outcome.as_str())]);
        }
        for reason in EndReason::ALL {
            ends.get_or_create_owned(&[("reason", reason.as_str())]);
        }
        Self {
            requests,
            requests_limited,
            creates,
            create_stages,
            sandboxes,
            ends,
            expiry_lateness,
            proxied: CLASSES.map(|class| proxied.get_or_create_owned(&[("status", class)])),
            connections,
            client_connections,
            connections_refused,
            connections_evicted,
            store_errors,
            log_entries_lost,
            memory_available,
            disk_available,
            disk_stopped,
            disk_stops,
            disk_ends,
        }
    }
}

/// What is configured, to be compared with what is.
fn register_settings(registry: &mut Registry, capacity: &CapacitySettings) {
    let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "The program that runs", build);
    for (name, help, floor_mb) in [
        (
            "capacity_memory_floor",
            "Memory that creates leave available",
            capacity.memory_floor_mb,
        ),
        (
            "capacity_disk_floor",
            "Space that creates leave free",
            capacity.disk_floor_mb,
        ),
    ] {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::from(floor_mb) * MIB);
        registry.register_with_unit(name, help, Unit::Bytes, gauge);
    }
    let max = FloatGauge::default();
    max.set(capacity.max_sandboxes.map_or(f64::INFINITY, f64::from));
    registry.register("capacity_max_sandboxes", "Most sandboxes at once", max);
}

/// Where a status is in [`CLASSES`]. What is none is the platform's fault.
fn class(status: u16) -> usize {
    usize::from(status / 100).saturating_sub(1).min(CLASSES.len() - 1)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "53 bits of a number of bytes are more than enough"
)]
fn float(bytes: u64) -> f64 {
    bytes as f64
}
