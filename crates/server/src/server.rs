//! A server, from start to drain.
//!
//! It listens from the beginning and answers 503 until it has taken over existing sandboxes; `/health` reports which.
//! When it is stopped it accepts nothing new, finishes API requests within a time limit, cuts sandbox streams without
//! waiting for them, and leaves every sandbox running for the next start.

mod running;
mod served;
mod stored;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use protocol::node::{NodeApi, NodeError};
use store::Store;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::running::Running;
use self::served::Served;
use self::stored::Stored;
use self::tasks::Tasks;
use crate::admission::AdmissionControl;
use crate::builds::Builds;
use crate::lease::NodeLease;
use crate::listen::forwarding::Forwarding;
use crate::listen::from_others::FromOthers;
use crate::listen::{Gateway, Phase};
use crate::members::NodeMembers;
use crate::nodes::keeper::{NodeCan, NodeKeeper};
use crate::operator::metrics::MetricSources;
use crate::operator::{self, Operator, OperatorSocket};
use crate::others::OtherServers;
pub use crate::others::OthersError;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
pub use crate::sandboxes::adopt::AdoptError;
use crate::sandboxes::fork::peers::ForkPeers;
use crate::sandboxes::idempotency::Claims;
use crate::sessions::NodeSessions;
use crate::settings::ServerSettings;
use crate::space;
use crate::telemetry::Exporters;
use crate::webhooks::deliver::Deliverer;

/// How long API requests and the work that they started may take to finish once the server is stopped.
const DRAIN_BOUND: Duration = Duration::from_secs(10);
/// [`DRAIN_BOUND`] where sandboxes are kept on disk: service managers wait for 90 s by default.
const PAUSE_BOUND: Duration = Duration::from_secs(75);
/// How long completed responses may take to be sent.
const FLUSH_BOUND: Duration = Duration::from_millis(250);

/// Why a server could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The sandboxes of an earlier start could not be taken over.
    #[error("cannot take over the sandboxes of an earlier start")]
    Adopt(#[from] AdoptError),
    /// The listener cannot be used.
    #[error("cannot listen for connections")]
    Listen(#[source] std::io::Error),
    /// The subscription to node events failed.
    #[error("cannot subscribe to the events of the node")]
    Subscribe(#[source] NodeError),
    /// The server cannot work with the others on its database.
    #[error(transparent)]
    Others(#[from] OthersError),
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    lease: NodeLease,
    keeper: Arc<NodeKeeper>,
    operator: Operator,
    metric_sources: MetricSources,
    gateway: Arc<Gateway>,
    /// The sandboxes that are kept on disk when the server is stopped, where the operator wants that.
    keep_at_shutdown: Option<Arc<Sandboxes>>,
    tasks: Tasks,
}

impl Server {
    /// Starts a server for the node of this lease, on a bound listener, and returns once sandboxes can be created. It
    /// drains when `stop` is cancelled; [`Server::drained`] waits for that.
    ///
    /// # Errors
    /// When the sandboxes of an earlier start cannot be taken over. The server is shut down completely then.
    pub async fn start(
        listener: TcpListener,
        lease: NodeLease,
        node: Arc<dyn NodeApi>,
        settings: ServerSettings,
        stop: CancellationToken,
    ) -> Result<Self, StartError> {
        let (server, background) = Self::prepare(listener, lease, settings, &stop)?;
        let keeper = Arc::clone(&server.keeper);
        let rows = server.lease.rows().clone();
        let can = NodeCan {
            writes_processes: true,
            // It would end with this process, as the server does.
            keeps_deadlines: false,
            makes_parcels: false,
            copies_memories: false,
            // Asking it beforehand takes two locks.
            admits_with_start: false,
            is_apart: false,
        };
        let served = keeper.session(rows, node, can, CancellationToken::new(), &TaskTracker::new());
        let taken = Box::pin(async {
            let events = served.handle.subscribe().await.map_err(StartError::Subscribe)?;
            background.admission.check_names().await.map_err(AdoptError::from)?;
            keeper.take_over(&served).await?;
            keeper.end_orphans(false).await.map_err(AdoptError::from)?;
            // Only now is it known which create requests succeeded.
            background.claims.settle_all().await.map_err(AdoptError::from)?;
            Ok::<_, StartError>(events)
        });
        let events = match taken.await {
            Ok(events) => events,
            Err(error) => {
                server.abandon().await;
                return Err(error);
            }
        };
        server.begin(background);
        keeper.begin(&served, events);
        server.gateway.enter(Phase::Ready);
        Ok(server)
    }

    /// As [`Self::start`], where the nodes are processes of their own, which come and go. Clients are answered whether or not
    /// there is any. Whoever has this runs the sessions of the nodes.
    ///
    /// # Errors
    /// When the database fails, or the listener cannot be used. The server is shut down completely then.
    pub async fn start_without_node(
        listener: TcpListener,
        (socket, members): (OperatorSocket, Arc<NodeMembers>),
        lease: NodeLease,
        mut settings: ServerSettings,
        stop: CancellationToken,
    ) -> Result<(Self, NodeSessions), StartError> {
        let (servers, connections) = (settings.servers.take(), settings.connections.clone());
        let clock = settings.clock.clone();
        let (server, background) = Self::prepare(listener, lease, settings, &stop)?;
        // The first and only time.
        let _ = server.operator.members.set(Arc::clone(&members));
        let keeper = &server.keeper;
        let others = match servers {
            None => None,
            Some(servers) => {
                let (nodes, admission) = (Arc::clone(&keeper.nodes), Arc::clone(&keeper.admission));
                let tasks = (server.tasks.streams.clone(), server.tasks.abort.clone());
                match OtherServers::register(&server.lease, servers, nodes, admission, clock, tasks).await {
                    Ok(others) => others,
                    Err(error) => {
                        server.abandon().await;
                        return Err(error.into());
                    }
                }
            }
        };
        let routes = operator::router(server.operator.clone());
        server.serve_routes(
            socket,
            operator::nodes::around(routes, Arc::clone(&members), Arc::clone(&server.keeper.sandboxes)),
        );
        if let Some(others) = &others {
            let forwarding = Forwarding::new(others, &connections, &server.tasks.streams, &server.tasks.abort);
            let forwarding = Arc::new(forwarding);
            let _ = server.operator.forwarding.set(Arc::clone(&forwarding));
            let peers: Arc<dyn ForkPeers> = Arc::<Forwarding>::clone(&forwarding);
            let _ = background.sandboxes.fork_peers.set(peers);
            server.gateway.forward_with(forwarding);
            background.builds.share_with(Arc::clone(others));
            let from_others = FromOthers::new(
                Arc::clone(&server.gateway),
                server.tasks.connections.clone(),
                server.tasks.stop.clone(),
                server.tasks.abort.clone(),
            );
            members.hub().answer_servers(Arc::new(from_others));
        }
        let owner = server.lease.owner().clone();
        let sessions = NodeSessions::new(Arc::clone(&server.keeper), members, owner, others.clone());
        let prepared = async {
            sessions.expect_all().await?;
            let are_others = others.is_some_and(|others| others.is_several());
            server.keeper.end_orphans(are_others).await?;
            background.admission.check_names().await?;
            // What was interrupted is not announced, so its row says that it does not run, whatever its node has of it.
            background.claims.settle_all().await
        };
        if let Err(error) = prepared.await {
            server.abandon().await;
            return Err(AdoptError::from(error).into());
        }
        server.begin(background);
        server.gateway.enter(Phase::Ready);
        Ok((server, sessions))
    }

    /// Makes a server, and answers 503 from here on.
    fn prepare(
        listener: TcpListener,
        lease: NodeLease,
        settings: ServerSettings,
        stop: &CancellationToken,
    ) -> Result<(Self, Background), StartError> {
        // The caller's token is not cancelled when the start fails.
        let (server, background) = Self::assemble(lease, settings, stop.child_token());
        let written = CancellationToken::new();
        let writing = written.clone().drop_guard();
        *server.keeper.writing.lock() = Some(Arc::new(writing));
        server
            .tasks
            .records
            .spawn(Arc::clone(&background.records).write(written));
        server.accept(listener, &background.accepting_on)?;
        Ok((server, background))
    }

    /// Makes all services of a server, in three parts, each of which needs those before. None of them does anything yet.
    fn assemble(lease: NodeLease, settings: ServerSettings, stop: CancellationToken) -> (Self, Background) {
        let tasks = Tasks::new(stop);
        let keeps = settings.pause.at_shutdown;
        let stored = Stored::new(&lease, &settings, &tasks);
        let running = Running::new(&stored, &settings, &tasks);
        let served = Served::new(&stored, &running, settings, &tasks);
        let server = Self {
            lease,
            keeper: running.keeper,
            operator: served.operator,
            metric_sources: served.metric_sources,
            gateway: served.gateway,
            keep_at_shutdown: keeps.then(|| Arc::clone(&running.sandboxes)),
            tasks,
        };
        let background = Background {
            accepting_on: served.accepting_on,
            store: stored.store,
            node: running.node,
            sandboxes: running.sandboxes,
            admission: running.admission,
            claims: stored.claims,
            builds: running.builds,
            records: stored.records,
            deliverer: stored.deliverer,
            exporters: stored.exporters,
        };
        (server, background)
    }

    /// Accepts connections, which are answered 503 until the sandboxes of an earlier start have been taken over.
    fn accept(&self, listener: TcpListener, on: &Handle) -> Result<(), StartError> {
        let listener = {
            // A socket is polled by the runtime on which it was registered.
            let _entered = on.enter();
            listener
                .into_std()
                .and_then(TcpListener::from_std)
                .map_err(StartError::Listen)?
        };
        let accepting = crate::listen::accept(
            listener,
            Arc::clone(&self.gateway),
            self.tasks.connections.clone(),
            self.tasks.stop.clone(),
            self.tasks.abort.clone(),
        );
        self.tasks.connections.spawn_on(accepting, on);
        Ok(())
    }

    /// Shuts down a server that could not take over the sandboxes of an earlier start.
    async fn abandon(self) {
        self.tasks.stop.cancel();
        self.tasks.abort.cancel();
        self.keeper.writing.lock().take();
        for tasks in [&self.tasks.connections, &self.tasks.background, &self.tasks.records] {
            tasks.close();
            tasks.wait().await;
        }
        self.lease.release().await;
    }

    /// Begins what goes on beside requests until the server is stopped.
    fn begin(&self, background: Background) {
        let Background {
            store,
            node,
            sandboxes,
            claims,
            builds,
            records,
            deliverer,
            exporters,
            ..
        } = background;
        let (tasks, stop) = (&self.tasks.background, &self.tasks.stop);
        let (lost, stop_of_all) = (self.lease.lost(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = stop_of_all.cancelled() => {}
                // Any change after this point would have to be undone by the server that now has the lease.
                () = lost.cancelled() => stop_of_all.cancel(),
            }
        });
        tasks.spawn(Arc::clone(&sandboxes).enforce_deadlines(stop.clone()));
        let interval = Duration::from_secs(builds.settings.collect_interval_s.into());
        tasks.spawn(Arc::clone(&sandboxes).limit_memories_at_intervals(interval, stop.clone()));
        tasks.spawn(sandboxes.follow_rules(stop.clone()));
        tasks.spawn(claims.purge(stop.clone()));
        tasks.spawn(builds.serve(tasks.clone(), stop.clone()));
        if let Some(exporters) = exporters {
            // Stopped with the records, because everything else may have made spans.
            let exporting = exporters.run(self.metric_sources.clone(), self.tasks.records_stop.clone());
            self.tasks.records.spawn(exporting);
        }
        tasks.spawn(Arc::clone(&records).purge(stop.clone()));
        tasks.spawn(records.sample(node, stop.clone()));
        tasks.spawn(space::reserve(store, stop.clone()));
        tasks.spawn(deliverer.deliver(tasks.clone(), stop.clone()));
    }

    /// Serves the metrics at `/metrics` of another listener, until the server is stopped.
    pub fn serve_metrics(&self, listener: TcpListener) {
        self.tasks.background.spawn(operator::metrics::serve(
            listener,
            self.metric_sources.clone(),
            self.tasks.background.clone(),
            self.tasks.stop.clone(),
        ));
    }

    /// Serves the operator API on a Unix socket, until the server is stopped.
    pub fn serve_operator(&self, socket: OperatorSocket) {
        self.serve_routes(socket, operator::router(self.operator.clone()));
    }

    fn serve_routes(&self, socket: OperatorSocket, routes: Router) {
        self.tasks.background.spawn(operator::serve(
            socket,
            routes,
            self.tasks.background.clone(),
            self.tasks.stop.clone(),
        ));
    }

    /// Resolves when the server is stopped, or stops because another server has taken the lease of its node.
    pub fn stopping(&self) -> impl Future<Output = ()> + Send + use<> {
        self.tasks.stop.clone().cancelled_owned()
    }

    /// Waits until the server is stopped, and then until it has drained. Sandboxes keep running.
    pub async fn drained(self) {
        self.tasks.stop.cancelled().await;
        self.gateway.enter(Phase::Draining);
        let begun = async {
            self.gateway.requests.close();
            self.gateway.requests.wait().await;
            if let Some(sandboxes) = &self.keep_at_shutdown {
                sandboxes.keep_all().await;
            }
            self.tasks.work.close();
            self.tasks.work.wait().await;
        };
        let bound = match self.keep_at_shutdown {
            Some(_) => PAUSE_BOUND,
            None => DRAIN_BOUND,
        };
        if tokio::time::timeout(bound, begun).await.is_err() {
            tracing::warn!("requests unfinished after {bound:?}: the next start undoes their changes");
        }
        self.tasks.connections.close();
        // Connections without a stream close by themselves once their responses are sent.
        let _ = tokio::time::timeout(FLUSH_BOUND, self.tasks.connections.wait()).await;
        self.tasks.abort.cancel();
        for tasks in [&self.tasks.connections, &self.tasks.streams, &self.tasks.background] {
            tasks.close();
            tasks.wait().await;
        }
        // Last, because all of these may have written log entries.
        self.tasks.records_stop.cancel();
        self.keeper.writing.lock().take();
        self.tasks.records.close();
        self.tasks.records.wait().await;
        self.lease.release().await;
    }
}

/// The services that do something beside requests, and on what.
struct Background {
    /// The runtime on which connections are accepted.
    accepting_on: Handle,
    store: Store,
    node: Arc<dyn NodeApi>,
    sandboxes: Arc<Sandboxes>,
    admission: Arc<AdmissionControl>,
    claims: Arc<Claims>,
    builds: Arc<Builds>,
    records: Arc<Records>,
    deliverer: Arc<Deliverer>,
    /// What exports spans and metrics, if that is on.
    exporters: Option<Exporters>,
}
