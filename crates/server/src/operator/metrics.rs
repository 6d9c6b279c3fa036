//! `GET /metrics`, on an address of its own.
//!
//! It needs no credential: the metrics contain no secrets, and the operator decides who can reach the address. Clients
//! of the API cannot reach it through the API's port.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, StatusCode, header};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::accept;
use crate::admission::AdmissionControl;
use crate::listen::connections::Connections;
use crate::metrics::{CopyCounts, Metrics, MetricsSnapshot};
use crate::node::NodeHandle;
use crate::nodes::Nodes;
use crate::parcels::Parcels;
use crate::records::Records;
use crate::sandboxes::registry::Registry;
use crate::telemetry::ReadMetrics;
use crate::tls::Tls;

/// Media type of the metrics, as scrapers request it.
const CONTENT_TYPE: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
/// How long a connection may be idle: longer than any usual scrape interval.
const IDLE: Duration = Duration::from_secs(120);

/// Sources of the metrics.
#[derive(Debug, Clone)]
pub(crate) struct MetricSources {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) nodes: Arc<Nodes>,
    /// Copies of paused sandboxes; none where none are made.
    pub(crate) parcels: Option<Arc<Parcels>>,
    pub(crate) records: Arc<Records>,
    pub(crate) admission: Arc<AdmissionControl>,
    pub(crate) node: NodeHandle,
    /// Client connections.
    pub(crate) connections: Arc<Connections>,
    /// Tasks of the connections to sandboxes, which are counted.
    pub(crate) streams: TaskTracker,
    /// The certificate, if there is one.
    pub(crate) tls: Option<Tls>,
}

/// Serves until `stop` is cancelled.
pub(crate) async fn serve(listener: TcpListener, sources: MetricSources, tasks: TaskTracker, stop: CancellationToken) {
    let router = Router::new()
        .route("/metrics", get(read_metrics))
        .fallback(|| async { (StatusCode::NOT_FOUND, "metrics are at /metrics") })
        .method_not_allowed_fallback(|| async { (StatusCode::METHOD_NOT_ALLOWED, "metrics are read with GET") })
        .with_state(sources);
    accept::serve(listener, router, IDLE, tasks, stop).await;
}

impl ReadMetrics for MetricSources {
    async fn text(&self) -> Result<String, std::fmt::Error> {
        let snapshot = MetricsSnapshot {
            sandboxes: self.registry.count_by_state(),
            paused_disk_bytes: self.registry.paused_disk_bytes(),
            copies: match &self.parcels {
                Some(parcels) => parcels.counts(&self.registry.paused_with_copies()),
                None => CopyCounts::default(),
            },
            pooled: self.nodes.pool_counts(),
            connections: self.streams.len(),
            clients: self.connections.counts(),
            log_entries_lost: self.records.entries_lost(),
            capacity: self.admission.host_capacity().await,
            egress: self.node.egress_counters().await.ok(),
            certificate: self.tls.as_ref().and_then(Tls::validity),
        };
        self.metrics.text(&snapshot)
    }
}

pub(super) async fn read_metrics(State(sources): State<MetricSources>) -> Response {
    match sources.text().await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot write the metrics");
            (StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written").into_response()
        }
    }
}
