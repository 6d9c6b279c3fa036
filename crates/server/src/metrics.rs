//! Metrics for the operator, in the format of Prometheus.
//!
//! Labels have few values, all defined by this program: no id, no path, no text of a client. Counters are incremented
//! where the event happens; current values (sandboxes, capacity) are read when the metrics are scraped. The metrics are
//! served on an address of their own and never on that of the API.

mod copies;
mod egress;
mod pool;
mod repositories;
mod series;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use protocol::node::{DiskStops, EgressCounters, HostCapacity, Stage, Throttles};

pub(crate) use self::copies::CopyCounts;
use self::copies::CopySeries;
use self::egress::EgressSeries;
use self::pool::PoolSeries;
use self::repositories::RepositorySeries;
use self::series::{Counts, FloatGauge, Labels, float, series, with_unit};
use crate::outcome::{
    AttemptOutcome, CopyOutcome, CreateOutcome, EndReason, PauseReason, PoolEnd, PoolUse, ResumeReason, SpanOutcome,
};
use crate::repositories::RepositoryError;
use crate::settings::CapacitySettings;
use crate::tls::Validity;

/// Histogram buckets of durations, in seconds: from a database read to a create on a host that swaps.
const DURATIONS: [f64; 13] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
];
/// Status classes, indexed by the first digit minus one.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
/// The status of rate-limited requests.
const TOO_MANY_REQUESTS: u16 = 429;
/// Bytes of a MiB.
const MIB: i64 = 1024 * 1024;

type StageLabels = [(&'static str, String); 1];
type RequestLabels = [(&'static str, Arc<str>); 3];
type Histograms<S> = Family<S, Histogram, fn() -> Histogram>;

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
    creates: Counts,
    create_stages: Histograms<StageLabels>,
    sandboxes: Family<Labels, Gauge>,
    paused_disk: Gauge,
    ends: Counts,
    pauses: Counts,
    resumes: Counts,
    webhook_attempts: Counts,
    expiry_lateness: Histogram,
    /// By status class; found once, because there are many.
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
    throttled: Gauge,
    throttles: Counter,
    repositories: RepositorySeries,
    pool: PoolSeries,
    egress: EgressSeries,
    copies: CopySeries,
    certificate_expiry: FloatGauge,
    spans: Counts,
}

/// Values that are read when the metrics are scraped.
#[derive(Debug, Clone)]
pub(crate) struct MetricsSnapshot {
    /// Sandboxes, by their state.
    pub(crate) sandboxes: Vec<(&'static str, usize)>,
    /// Space that paused sandboxes take on disks, in bytes.
    pub(crate) paused_disk_bytes: u64,
    /// Paused sandboxes, by what there is of their copy.
    pub(crate) copies: CopyCounts,
    /// Sandboxes of the warm pool, by their state.
    pub(crate) pooled: [(&'static str, usize); 2],
    /// Open connections to sandboxes.
    pub(crate) connections: usize,
    /// Client connections.
    pub(crate) clients: ConnectionCounts,
    /// Log entries dropped since the start.
    pub(crate) log_entries_lost: u64,
    /// What the host has left, if the node could read it.
    pub(crate) capacity: Option<HostCapacity>,
    /// What the egress gateway counted; if the node does not respond, the values of the last scrape remain.
    pub(crate) egress: Option<EgressCounters>,
    /// The validity of the certificate, if there is one.
    pub(crate) certificate: Option<Validity>,
}

/// Numbers of client connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ConnectionCounts {
    /// Connections that are open now.
    pub(crate) open: usize,
    /// Refused since the start.
    pub(crate) refused: u64,
    /// Connections that were evicted for others since the start.
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

    /// Counts an answered request to the API. `operation` is the id of the operation, if the request has one.
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

    /// Counts a create request.
    pub(crate) fn create(&self, outcome: CreateOutcome) {
        self.series.creates.add(outcome.as_str(), 1);
    }

    /// Observes the durations of the stages of a successful create.
    pub(crate) fn create_stages(&self, stages: &[Stage]) {
        for Stage { name, took } in stages {
            self.series
                .create_stages
                .get_or_create(&[("stage", name.to_string())])
                .observe(took.as_secs_f64());
        }
    }

    /// Counts the end of a sandbox.
    pub(crate) fn end(&self, reason: EndReason) {
        self.series.ends.add(reason.as_str(), 1);
    }

    /// Counts a sandbox that was paused.
    pub(crate) fn pause(&self, reason: PauseReason) {
        self.series.pauses.add(reason.as_str(), 1);
    }

    /// Counts a sandbox that was resumed.
    pub(crate) fn resume(&self, reason: ResumeReason) {
        self.series.resumes.add(reason.as_str(), 1);
    }

    /// Counts an attempt to send an event to a webhook.
    pub(crate) fn webhook_attempt(&self, outcome: AttemptOutcome) {
        self.series.webhook_attempts.add(outcome.as_str(), 1);
    }

    /// Observes how late a sandbox was ended after its deadline, in microseconds.
    pub(crate) fn expired(&self, late_us: i64) {
        let late = Duration::from_micros(late_us.max(0).unsigned_abs());
        self.series.expiry_lateness.observe(late.as_secs_f64());
    }

    /// Counts an answered request to a sandbox.
    pub(crate) fn proxy_request(&self, status: u16) {
        self.series.proxied[class(status)].inc();
    }

    /// Takes over the node's counts of its measures against a full disk.
    pub(crate) fn disk_stops(&self, disk: DiskStops) {
        let series = &self.series;
        series.disk_stopped.set(disk.stopped.into());
        series.disk_stops.inner().store(disk.stops, Ordering::Relaxed);
        series.disk_ends.inner().store(disk.ends, Ordering::Relaxed);
    }

    /// Takes over the node's counts of sandboxes whose processor time is limited.
    pub(crate) fn throttles(&self, throttles: Throttles) {
        self.series.throttled.set(throttles.throttled.into());
        let total = self.series.throttles.inner();
        total.store(throttles.throttles, Ordering::Relaxed);
    }

    /// Counts the repositories of a create request: how many it has, and how many of them were made with a copy.
    pub(crate) fn repositories(&self, count: usize, prepared: &Result<usize, RepositoryError>) {
        self.series.repositories.count(count, prepared);
    }

    /// Counts what the warm pool had for a create request.
    pub(crate) fn pool_use(&self, value: PoolUse) {
        self.series.pool.count_use(value);
    }

    /// Counts a start of a sandbox for the warm pool.
    pub(crate) fn pool_start(&self, is_ready: bool) {
        self.series.pool.count_start(is_ready);
    }

    /// Counts the end of a pooled sandbox that no request got.
    pub(crate) fn pool_end(&self, why: PoolEnd) {
        self.series.pool.count_end(why);
    }

    /// Counts an attempt to copy a paused sandbox to the blob store, which ended at `now_us`.
    pub(crate) fn copy_upload(&self, outcome: CopyOutcome, now_us: i64) {
        self.series.copies.upload(outcome, now_us);
    }

    /// Counts an attempt to have a node keep a copy.
    pub(crate) fn copy_download(&self, outcome: CopyOutcome) {
        self.series.copies.download(outcome);
    }

    /// Counts bytes of copies that were stored in the blob store.
    pub(crate) fn copy_uploaded(&self, bytes: u64) {
        self.series.copies.uploaded(bytes);
    }

    /// Counts bytes of copies that were fetched from the blob store.
    pub(crate) fn copy_downloaded(&self, bytes: u64) {
        self.series.copies.downloaded(bytes);
    }

    /// Counts spans, by what became of them.
    pub(crate) fn spans(&self, outcome: SpanOutcome, count: usize) {
        self.series.spans.add(outcome.as_str(), count);
    }

    /// How many spans have had that outcome since the start.
    pub(crate) fn spans_so_far(&self, outcome: SpanOutcome) -> u64 {
        self.series.spans.so_far(outcome.as_str())
    }

    /// Counts a database error.
    pub(crate) fn store_error(&self) {
        self.series.store_errors.inc();
    }

    /// All metrics as text, in the `OpenMetrics` 1.0 format.
    ///
    /// # Errors
    /// Never in practice: writing to a string does not fail.
    pub(crate) fn text(&self, snapshot: &MetricsSnapshot) -> Result<String, std::fmt::Error> {
        let series = &self.series;
        for (state, count) in &snapshot.sandboxes {
            let gauge = series.sandboxes.get_or_create(&[("state", *state)]);
            gauge.set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
        series
            .paused_disk
            .set(i64::try_from(snapshot.paused_disk_bytes).unwrap_or(i64::MAX));
        series.copies.set(snapshot.copies);
        series.pool.set(snapshot.pooled);
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
        if let Some(egress) = &snapshot.egress {
            series.egress.set(egress);
        }
        let expiry = snapshot.certificate.map(|validity| validity.not_after.as_second());
        // Seconds until the year 9999 are exact.
        #[expect(clippy::cast_precision_loss, reason = "38 bits fit")]
        series.certificate_expiry.set(expiry.map_or(f64::NAN, |at| at as f64));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Series {
    fn register(registry: &mut Registry) -> Self {
        Self {
            requests: with_unit(
                registry,
                "api_request_duration",
                Unit::Seconds,
                "Duration of requests to the API, by operation, method and status class",
                Family::new_with_constructor(durations as fn() -> Histogram),
            ),
            requests_limited: series(
                registry,
                "api_requests_limited",
                "Requests to the API that were answered 429",
            ),
            creates: Counts::register(
                registry,
                "creates",
                "Create requests, by outcome",
                "outcome",
                CreateOutcome::ALL.map(CreateOutcome::as_str),
            ),
            create_stages: with_unit(
                registry,
                "create_stage_duration",
                Unit::Seconds,
                "Time that successful create requests spent in each stage, and in total",
                Family::new_with_constructor(durations as fn() -> Histogram),
            ),
            sandboxes: series(registry, "sandboxes", "Sandboxes, by state"),
            paused_disk: series(
                registry,
                "paused_disk_bytes",
                "Space that paused sandboxes take on the disks of the host, in bytes",
            ),
            ends: Counts::register(
                registry,
                "sandbox_ends",
                "Sandboxes that ended, by reason",
                "reason",
                EndReason::ALL.map(EndReason::as_str),
            ),
            pauses: Counts::register(
                registry,
                "sandbox_pauses",
                "Sandboxes that were paused, by reason",
                "reason",
                PauseReason::ALL.map(PauseReason::as_str),
            ),
            resumes: Counts::register(
                registry,
                "sandbox_resumes",
                "Sandboxes that were resumed, by reason",
                "reason",
                ResumeReason::ALL.map(ResumeReason::as_str),
            ),
            webhook_attempts: Counts::register(
                registry,
                "webhook_attempts",
                "Attempts to send an event to a webhook, by outcome",
                "outcome",
                AttemptOutcome::ALL.map(AttemptOutcome::as_str),
            ),
            expiry_lateness: with_unit(
                registry,
                "expiry_lateness",
                Unit::Seconds,
                "Time from the deadline of a sandbox until it was ended completely",
                durations(),
            ),
            proxied: {
                let family: Family<Labels, Counter> =
                    series(registry, "proxy_requests", "Requests to sandboxes, by status class");
                CLASSES.map(|class| family.get_or_create_owned(&[("status", class)]))
            },
            connections: series(registry, "proxy_connections", "Open connections to sandboxes"),
            client_connections: series(registry, "client_connections", "Open connections of clients"),
            connections_refused: series(
                registry,
                "client_connections_refused",
                "Connections that were refused because the connection limit was reached",
            ),
            connections_evicted: series(
                registry,
                "client_connections_evicted",
                "Idle connections that were closed in favor of new ones",
            ),
            store_errors: series(
                registry,
                "store_errors",
                "Requests and background tasks that failed because of the database",
            ),
            log_entries_lost: series(
                registry,
                "log_entries_lost",
                "Log entries and lifecycle events of sandboxes that were dropped because the database was too slow",
            ),
            memory_available: with_unit(
                registry,
                "host_memory_available",
                Unit::Bytes,
                "Available memory of the host; NaN if unknown",
                FloatGauge::default(),
            ),
            disk_available: with_unit(
                registry,
                "host_disk_available",
                Unit::Bytes,
                "Available space on the file system of the sandbox disks; NaN if unknown",
                FloatGauge::default(),
            ),
            disk_stopped: series(
                registry,
                "sandboxes_disk_stopped",
                "Sandboxes whose writes are suspended because the disk of the host is nearly full",
            ),
            disk_stops: series(
                registry,
                "sandbox_disk_stops",
                "How often the writes of a sandbox were suspended because the disk of the host was nearly full",
            ),
            disk_ends: series(
                registry,
                "sandbox_disk_ends",
                "Sandboxes that were ended because they kept taking space on a nearly full disk",
            ),
            throttled: series(
                registry,
                "sandboxes_throttled",
                "Sandboxes whose processor time is limited because they create many processes",
            ),
            throttles: series(
                registry,
                "sandbox_throttles",
                "How often the processor time of a sandbox was limited because it created many processes",
            ),
            certificate_expiry: with_unit(
                registry,
                "tls_certificate_expiry_timestamp",
                Unit::Seconds,
                "When the certificate that clients get expires, in seconds since 1970; NaN without HTTPS",
                FloatGauge::default(),
            ),
            repositories: RepositorySeries::register(registry),
            pool: PoolSeries::register(registry),
            egress: EgressSeries::register(registry),
            copies: CopySeries::register(registry),
            spans: Counts::register(
                registry,
                "trace_spans",
                "Spans of traces, by what became of them: those that were not exported are lost",
                "outcome",
                SpanOutcome::ALL.map(SpanOutcome::as_str),
            ),
        }
    }
}

/// Registers configured values, for comparison with measured ones.
fn register_settings(registry: &mut Registry, capacity: &CapacitySettings) {
    let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the running program", build);
    for (name, help, floor_mb) in [
        (
            "capacity_memory_floor",
            "Memory floor: create requests leave this much available",
            capacity.memory_floor_mb,
        ),
        (
            "capacity_disk_floor",
            "Disk floor: create requests leave this much space free",
            capacity.disk_floor_mb,
        ),
    ] {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::from(floor_mb) * MIB);
        registry.register_with_unit(name, help, Unit::Bytes, gauge);
    }
    let max = FloatGauge::default();
    max.set(capacity.max_sandboxes.map_or(f64::INFINITY, f64::from));
    registry.register("capacity_max_sandboxes", "Sandbox limit of the host", max);
}

/// The index of a status in [`CLASSES`]. Invalid statuses count as errors of the platform.
fn class(status: u16) -> usize {
    usize::from(status / 100).saturating_sub(1).min(CLASSES.len() - 1)
}
