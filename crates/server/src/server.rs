//! A server from start to drain.
//!
//! It listens from the first moment and answers 503 until it has taken over what it found; `/health` says which. When
//! told to stop it accepts nothing new, finishes API requests within a bound, cuts sandbox streams without waiting for
//! them, and leaves every sandbox running for the next start.

use std::sync::Arc;
use std::time::Duration;

use protocol::node::NodeApi;
use proxy::ingress::Ingress;
use store::Store;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api;
use crate::api::auth::Uses;
use crate::capacity::Capacity;
use crate::expiry::Deadlines;
use crate::idempotency::ClaimTable;
pub use crate::lifecycle::AdoptError;
use crate::lifecycle::{NodeHandle, Platform};
use crate::listen::{Phase, Site};
use crate::live::LiveTable;
use crate::metrics::Metrics;
use crate::quota::Quotas;
use crate::records::Records;
use crate::settings::Settings;

/// How long API requests, and what they began, may take to finish once the server is told to stop.
const DRAIN_BOUND: Duration = Duration::from_secs(10);
/// How long answers may take to leave once they are complete.
const FLUSH_BOUND: Duration = Duration::from_millis(250);

/// Why a server could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It could not take over what it found.
    #[error("take over the sandboxes of an earlier start")]
    Adopt(#[from] AdoptError),
    /// Somebody else already receives the ends of this node's sandboxes.
    #[error("the node serves another server already")]
    NodeTaken,
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    platform: Arc<Platform>,
    site: Arc<Site>,
    connections: TaskTracker,
    streams: TaskTracker,
    background: TaskTracker,
    records: TaskTracker,
    stop: CancellationToken,
    /// Ends the records, once nothing happens any more.
    records_stop: CancellationToken,
    abort: CancellationToken,
}

impl Server {
    /// Starts a server on a bound listener and returns once sandboxes can be created. It drains when `stop` is
    /// cancelled; [`Server::drained`] waits for that.
    ///
    /// # Errors
    /// When it cannot take over the sandboxes of an earlier start. Nothing of the server is left then.
    pub async fn start(
        listener: TcpListener,
        store: Store,
        node: Arc<dyn NodeApi>,
        settings: Settings,
        stop: CancellationToken,
    ) -> Result<Self, StartError> {
        let exits = node.exits().ok_or(StartError::NodeTaken)?;
        let logs = node.logs().ok_or(StartError::NodeTaken)?;
        // The caller's token is not cancelled when the start fails.
        let stop = stop.child_token();
        let abort = CancellationToken::new();
        let streams = TaskTracker::new();
        let records = Arc::new(Records::new(settings.records.clone(), settings.clock.clone()));
        let platform = Arc::new(Platform {
            store,
            records: Arc::clone(&records),
            node: NodeHandle(Arc::clone(&node)),
            quotas: Quotas::new(settings.limits.clone()),
            capacity: Capacity::new(settings.capacity),
            metrics: Metrics::new(&settings.capacity),
            settings,
            live: LiveTable::default(),
            claims: ClaimTable::default(),
            deadlines: Deadlines::default(),
            uses: Uses::default(),
            work: TaskTracker::new(),
        });
        let site = Arc::new(Site::new(
            Arc::clone(&platform),
            api::router(Arc::clone(&platform)),
            Ingress::new(Arc::clone(&node), streams.clone(), abort.clone()),
            platform.settings.tls.clone(),
        ));
        let server = Self {
            platform,
            site,
            connections: TaskTracker::new(),
            streams,
            background: TaskTracker::new(),
            records: TaskTracker::new(),
            stop,
            records_stop: CancellationToken::new(),
            abort,
        };
        let written = CancellationToken::new();
        let writing = written.clone().drop_guard();
        server
            .records
            .spawn(Arc::clone(&records).write(server.platform.store.clone(), written));
        server.connections.spawn(crate::listen::accept(
            listener,
            Arc::clone(&server.site),
            server.connections.clone(),
            (server.stop.clone(), server.abort.clone()),
        ));

        match server.platform.adopt().await {
            Ok(count) => tracing::info!(sandboxes = count, "took over the sandboxes of an earlier start"),
            Err(error) => {
                server.stop.cancel();
                server.abort.cancel();
                drop(writing);
                for tasks in [&server.connections, &server.records] {
                    tasks.close();
                    tasks.wait().await;
                }
                return Err(error.into());
            }
        }
        let platform = &server.platform;
        let stop = &server.stop;
        server
            .background
            .spawn(Arc::clone(platform).enforce_deadlines(stop.clone()));
        server
            .background
            .spawn(Arc::clone(platform).follow_exits(exits, stop.clone()));
        server.background.spawn(Arc::clone(platform).purge_claims(stop.clone()));
        let store = &platform.store;
        // Only now, because entries of sandboxes that are not known yet would be dropped.
        server
            .records
            .spawn(Arc::clone(&records).follow_node(logs, server.records_stop.clone(), writing));
        server
            .background
            .spawn(Arc::clone(&records).purge(store.clone(), stop.clone()));
        server.background.spawn(records.sample(node, stop.clone()));
        server.site.enter(Phase::Ready);
        Ok(server)
    }

    /// Serves the metrics at `/metrics` of another listener, until the server is told to stop.
    pub fn serve_metrics(&self, listener: TcpListener) {
        self.background.spawn(crate::metrics::serve::serve(
            listener,
            Arc::clone(&self.platform),
            self.streams.clone(),
            self.background.clone(),
            self.stop.clone(),
        ));
    }

    /// Waits until the server was told to stop, and then until it has drained. Sandboxes keep running.
    pub async fn drained(self) {
        self.stop.cancelled().await;
        self.site.enter(Phase::Draining);
        let begun = async {
            self.site.requests.close();
            self.site.requests.wait().await;
            self.platform.work.close();
            self.platform.work.wait().await;
        };
        if tokio::time::timeout(DRAIN_BOUND, begun).await.is_err() {
            tracing::warn!("requests still ran after {DRAIN_BOUND:?}; what they began is undone at the next start");
        }
        self.connections.close();
        // Connections without a stream end by themselves once their answers have left.
        let _ = tokio::time::timeout(FLUSH_BOUND, self.connections.wait()).await;
        self.abort.cancel();
        for tasks in [&self.connections, &self.streams, &self.background] {
            tasks.close();
            tasks.wait().await;
        }
        // Last, because all of these may have had something to say.
        self.records_stop.cancel();
        self.records.close();
        self.records.wait().await;
    }
}
