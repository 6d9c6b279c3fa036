//! A server, from start to drain.
//!
//! It listens from the beginning and answers 503 until it has taken over existing sandboxes; `/health` reports which.
//! When it is stopped it accepts nothing new, finishes API requests within a time limit, cuts sandbox streams without
//! waiting for them, and leaves every sandbox running for the next start.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use parking_lot::Mutex;
use protocol::node::{NodeApi, NodeError};
use proxy::ingress::Ingress;
use store::Store;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::AdmissionControl;
use crate::api;
use crate::api::state::{ApiState, SandboxAccess, Services};
use crate::authentication::Authenticator;
use crate::builds::{BuildServices, Builds};
use crate::creation::SandboxCreation;
use crate::dashboard::{Dashboard, DashboardServices};
use crate::deadlines::Deadlines;
use crate::health::Health;
use crate::injections::Injections;
use crate::keys::TokenSeed;
use crate::layers::StoredLayers;
use crate::lease::NodeLease;
use crate::listen::connections::Connections;
use crate::listen::forwarding::Forwarding;
use crate::listen::from_others::FromOthers;
use crate::listen::lanes::Lanes;
use crate::listen::{Gateway, GatewayServices, Phase, Routers};
use crate::mcp::McpService;
use crate::members::NodeMembers;
use crate::metrics::Metrics;
use crate::node::NodeHandle;
use crate::nodes::Nodes;
use crate::nodes::all::AllNodes;
use crate::nodes::keeper::{NodeCan, NodeKeeper};
use crate::nodes::placement::Placement;
use crate::operator::metrics::MetricSources;
use crate::operator::{self, Operator, OperatorSocket};
use crate::others::OtherServers;
pub use crate::others::OthersError;
use crate::parcels::Parcels;
use crate::readers::Readers;
use crate::records::Records;
use crate::repositories::{Repositories, RepositoryServices};
pub use crate::sandboxes::adopt::AdoptError;
use crate::sandboxes::idempotency::Claims;
use crate::sandboxes::policy::Policies;
use crate::sandboxes::registry::Registry;
use crate::sandboxes::tracked::Tracked;
use crate::sandboxes::unrecorded::Recording;
use crate::sandboxes::work::Work;
use crate::sandboxes::{Defaults, Sandboxes};
use crate::secrets::Secrets;
use crate::sessions::NodeSessions;
use crate::settings::ServerSettings;
use crate::signature::Signatures;
use crate::space;
use crate::telemetry::{Exporters, Telemetry};
use crate::webhooks::Webhooks;
use crate::webhooks::deliver::{Deliverer, DelivererServices};
use crate::webhooks::receiver::ReceiverRules;

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
    /// Work that requests started and that outlives them.
    work: TaskTracker,
    /// The sandboxes that are kept on disk when the server is stopped, where the operator wants that.
    keep_at_shutdown: Option<Arc<Sandboxes>>,
    connections: TaskTracker,
    streams: TaskTracker,
    background: TaskTracker,
    records: TaskTracker,
    stop: CancellationToken,
    /// Stops the tasks of the records, after everything else has stopped.
    records_stop: CancellationToken,
    abort: CancellationToken,
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
            is_apart: false,
        };
        let served = keeper.session(rows, node, can, CancellationToken::new(), &TaskTracker::new());
        let taken = async {
            let events = served.handle.subscribe().await.map_err(StartError::Subscribe)?;
            background.admission.check_names().await.map_err(AdoptError::from)?;
            keeper.take_over(&served).await?;
            keeper.end_orphans(false).await.map_err(AdoptError::from)?;
            // Only now is it known which create requests succeeded.
            background.claims.settle_all().await.map_err(AdoptError::from)?;
            Ok::<_, StartError>(events)
        };
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
                let tasks = (server.streams.clone(), server.abort.clone());
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
            let forwarding = Forwarding::new(others, &connections, &server.streams, &server.abort);
            server.gateway.forward_with(forwarding);
            let from_others = FromOthers::new(
                Arc::clone(&server.gateway),
                server.connections.clone(),
                server.stop.clone(),
                server.abort.clone(),
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
        server.records.spawn(Arc::clone(&background.records).write(written));
        server.accept(listener, &background.accepting_on)?;
        Ok((server, background))
    }

    /// Makes all services of a server and connects them to each other. None of them does anything yet.
    fn assemble(lease: NodeLease, settings: ServerSettings, stop: CancellationToken) -> (Self, Background) {
        let abort = CancellationToken::new();
        let rows = lease.rows().clone();
        let store = rows.store().clone();
        let (streams, work) = (TaskTracker::new(), TaskTracker::new());
        let (background_tasks, records_tasks) = (TaskTracker::new(), TaskTracker::new());
        let records_stop = CancellationToken::new();
        let registry = Arc::new(Registry::default());
        let placement = Placement::new(settings.chance.clone(), settings.clock.clone());
        let nodes = Arc::new(Nodes::new(placement));
        let node: Arc<dyn NodeApi> = Arc::new(AllNodes::new(Arc::clone(&nodes), Arc::clone(&registry)));
        let ServerSettings {
            domain,
            token_seed,
            limits,
            capacity,
            always_secure,
            resources,
            records,
            clock,
            chance: _,
            connections,
            traffic,
            mcp,
            dashboard,
            tls,
            sealer,
            providers,
            signing,
            egress,
            repositories,
            builds,
            pool,
            blobs,
            pause,
            webhooks: hooks,
            telemetry,
            servers: _,
        } = settings;
        let parcels = blobs.as_ref().filter(|_| pause.copies).map(|blobs| {
            let (owner, rate) = (lease.owner().clone(), pause.copy_mib_per_s);
            Arc::new(Parcels::new(Arc::clone(&blobs.store), sealer.clone(), owner, rate))
        });
        let stored = blobs.map(|blobs| {
            let (node, clock, work) = (Arc::clone(&node), clock.clone(), work.clone());
            Arc::new(StoredLayers::new(blobs, store.clone(), node, clock, work))
        });
        let handle = NodeHandle::new(Arc::clone(&node), stored);
        let longest_s = limits.longest_lifetime_s();
        let tokens = TokenSeed::new(token_seed);
        let metrics = Arc::new(Metrics::new(&capacity));
        let telemetry = telemetry.map(|settings| Telemetry::new(settings, rows.node(), &metrics, clock.clone()));
        let (telemetry, exporters) = telemetry.unzip();
        let records = Arc::new(Records::new(
            store.clone(),
            records,
            clock.clone(),
            rows.node(),
            telemetry.clone(),
        ));
        let deadlines = Arc::new(Deadlines::default());
        let admission = Arc::new(AdmissionControl::new(
            store.clone(),
            handle.clone(),
            limits,
            capacity,
            Arc::clone(&deadlines),
            clock.clone(),
        ));
        let secrets = Arc::new(Secrets::new(store.clone(), sealer.clone(), clock.clone()));
        let receivers = Arc::new(ReceiverRules::new(&hooks));
        let webhooks = Webhooks::new(
            store.clone(),
            sealer.clone(),
            clock.clone(),
            Arc::clone(&receivers),
            hooks.per_team,
        );
        let deliverer = Arc::new(Deliverer::new(
            DelivererServices {
                store: store.clone(),
                node: rows.node().clone(),
                sealer: sealer.clone(),
                clock: clock.clone(),
                records: Arc::clone(&records),
                metrics: Arc::clone(&metrics),
            },
            receivers,
            hooks,
        ));
        let injections = Arc::new(Injections::new(store.clone(), sealer.clone(), providers));
        let signatures = Arc::new(Signatures::new(store.clone(), sealer.clone(), clock.clone(), signing));
        let claims = Arc::new(Claims::new(rows.clone(), clock.clone(), work.clone()));
        let builds = Arc::new(Builds::new(
            builds,
            BuildServices {
                rows: rows.clone(),
                node: handle.clone(),
                tokens: tokens.clone(),
                sealer: sealer.clone(),
                admission: Arc::clone(&admission),
                nodes: Arc::clone(&nodes),
                resources,
                clock: clock.clone(),
                work: work.clone(),
                telemetry: telemetry.clone(),
            },
        ));
        let means = RepositoryServices {
            node: handle.clone(),
            admission: Arc::clone(&admission),
            tokens: tokens.clone(),
            clock: clock.clone(),
            work: work.clone(),
        };
        let tracked = Arc::new(Tracked {
            registry: Arc::clone(&registry),
            deadlines,
            records: Arc::clone(&records),
            metrics: Arc::clone(&metrics),
        });
        let work_on_sandboxes = Arc::new(Work::new(work.clone(), stop.clone()));
        let recording = Recording::new(store.clone(), Arc::clone(&tracked), Arc::clone(&work_on_sandboxes));
        let sandboxes = Arc::new(Sandboxes {
            store: store.clone(),
            home: rows.node().clone(),
            nodes: Arc::clone(&nodes),
            recording: Arc::new(recording),
            tracked,
            defaults: Defaults {
                resources,
                always_secure,
                pause,
            },
            policies: Policies {
                sealer,
                rules: egress,
                admission: Arc::clone(&admission),
                injections: Arc::clone(&injections),
                tokens: tokens.clone(),
                secrets: Arc::clone(&secrets),
            },
            repositories: Repositories::new(repositories, means),
            parcels,
            clock: clock.clone(),
            work: work_on_sandboxes,
        });
        let keeper = NodeKeeper {
            store: store.clone(),
            nodes: Arc::clone(&nodes),
            sandboxes: Arc::clone(&sandboxes),
            admission: Arc::clone(&admission),
            handle: handle.clone(),
            pool,
            tokens: tokens.clone(),
            metrics: Arc::clone(&metrics),
            clock: clock.clone(),
            work: work.clone(),
            background: background_tasks.clone(),
            records: records_tasks.clone(),
            stop: stop.clone(),
            records_stop: records_stop.clone(),
            writing: Mutex::default(),
        };
        let authenticator = Arc::new(Authenticator::new(store.clone(), clock.clone(), work.clone()));
        let dashboard = Arc::new(Dashboard::new(
            dashboard,
            DashboardServices {
                store: store.clone(),
                clock: clock.clone(),
                authenticator: Arc::clone(&authenticator),
                sandboxes: Arc::clone(&sandboxes),
                domain: domain.clone(),
            },
        ));
        let readers = Arc::new(Readers::new());
        let api = ApiState::new(Services {
            store: store.clone(),
            authenticator: Arc::clone(&authenticator),
            clock,
            access: Arc::new(SandboxAccess {
                domain,
                tokens: tokens.clone(),
            }),
            tokens,
            injections,
            signatures: Arc::clone(&signatures),
            sandboxes: Arc::clone(&sandboxes),
            registry: Arc::clone(&registry),
            secrets,
            creation: SandboxCreation {
                sandboxes: Arc::clone(&sandboxes),
                claims: Arc::clone(&claims),
            },
            builds: Arc::clone(&builds),
            admission: Arc::clone(&admission),
            records: Arc::clone(&records),
            metrics: Arc::clone(&metrics),
            mcp: Arc::new(McpService::new(mcp, Arc::clone(&readers))),
            readers,
            health: Arc::new(Health::new(store.clone())),
            webhooks: Arc::new(webhooks),
        });
        let ingress = Ingress::new(Arc::clone(&node), streams.clone(), abort.clone())
            .limited(connections.into_sandboxes, connections.per_sandbox);
        let lanes = Lanes::new(traffic);
        let accepting_on = lanes.accepting();
        let connections = Connections::new(connections, lanes);
        let services = GatewayServices {
            store: store.clone(),
            sandboxes: Arc::clone(&sandboxes),
            registry: Arc::clone(&registry),
            metrics: Arc::clone(&metrics),
            dashboard: Arc::clone(&dashboard),
            authenticator,
            signatures,
            connections: Arc::clone(&connections),
            tls: tls.clone(),
        };
        let (api, address) = api::router(api, longest_s, telemetry);
        let metric_sources = MetricSources {
            tls,
            metrics,
            registry: Arc::clone(&registry),
            nodes: Arc::clone(&nodes),
            records: Arc::clone(&records),
            admission: Arc::clone(&admission),
            node: handle,
            connections,
            streams: streams.clone(),
        };
        let operator = Operator {
            store: store.clone(),
            sandboxes: Arc::clone(&sandboxes),
            builds: Arc::clone(&builds),
            registry,
            records: Arc::clone(&records),
            dashboard,
            streams: operator::Streams::new(streams.clone()),
            metrics: metric_sources.clone(),
            members: Arc::default(),
        };
        let routers = Routers {
            api,
            operator: operator::router(operator.clone()),
        };
        let gateway = Arc::new(Gateway::new(services, routers, address, ingress));
        let server = Self {
            lease,
            keeper: Arc::new(keeper),
            operator,
            metric_sources,
            gateway,
            work,
            keep_at_shutdown: pause.at_shutdown.then(|| Arc::clone(&sandboxes)),
            connections: TaskTracker::new(),
            streams,
            background: background_tasks,
            records: records_tasks,
            stop,
            records_stop,
            abort,
        };
        let background = Background {
            accepting_on,
            store,
            node,
            sandboxes,
            admission,
            claims,
            builds,
            records,
            deliverer,
            exporters,
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
            self.connections.clone(),
            self.stop.clone(),
            self.abort.clone(),
        );
        self.connections.spawn_on(accepting, on);
        Ok(())
    }

    /// Shuts down a server that could not take over the sandboxes of an earlier start.
    async fn abandon(self) {
        self.stop.cancel();
        self.abort.cancel();
        self.keeper.writing.lock().take();
        for tasks in [&self.connections, &self.background, &self.records] {
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
        let (tasks, stop) = (&self.background, &self.stop);
        let (lost, stop_of_all) = (self.lease.lost(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = stop_of_all.cancelled() => {}
                // Any change after this point would have to be undone by the server that now has the lease.
                () = lost.cancelled() => stop_of_all.cancel(),
            }
        });
        tasks.spawn(Arc::clone(&sandboxes).enforce_deadlines(stop.clone()));
        tasks.spawn(sandboxes.follow_rules(stop.clone()));
        tasks.spawn(claims.purge(stop.clone()));
        tasks.spawn(builds.serve(tasks.clone(), stop.clone()));
        if let Some(exporters) = exporters {
            // Stopped with the records, because everything else may have made spans.
            let exporting = exporters.run(self.metric_sources.clone(), self.records_stop.clone());
            self.records.spawn(exporting);
        }
        tasks.spawn(Arc::clone(&records).purge(stop.clone()));
        tasks.spawn(records.sample(node, stop.clone()));
        tasks.spawn(space::reserve(store, stop.clone()));
        tasks.spawn(deliverer.deliver(tasks.clone(), stop.clone()));
    }

    /// Serves the metrics at `/metrics` of another listener, until the server is stopped.
    pub fn serve_metrics(&self, listener: TcpListener) {
        self.background.spawn(operator::metrics::serve(
            listener,
            self.metric_sources.clone(),
            self.background.clone(),
            self.stop.clone(),
        ));
    }

    /// Serves the operator API on a Unix socket, until the server is stopped.
    pub fn serve_operator(&self, socket: OperatorSocket) {
        self.serve_routes(socket, operator::router(self.operator.clone()));
    }

    fn serve_routes(&self, socket: OperatorSocket, routes: Router) {
        self.background.spawn(operator::serve(
            socket,
            routes,
            self.background.clone(),
            self.stop.clone(),
        ));
    }

    /// Resolves when the server is stopped, or stops because another server has taken the lease of its node.
    pub fn stopping(&self) -> impl Future<Output = ()> + Send + use<> {
        self.stop.clone().cancelled_owned()
    }

    /// Waits until the server is stopped, and then until it has drained. Sandboxes keep running.
    pub async fn drained(self) {
        self.stop.cancelled().await;
        self.gateway.enter(Phase::Draining);
        let begun = async {
            self.gateway.requests.close();
            self.gateway.requests.wait().await;
            if let Some(sandboxes) = &self.keep_at_shutdown {
                sandboxes.keep_all().await;
            }
            self.work.close();
            self.work.wait().await;
        };
        let bound = match self.keep_at_shutdown {
            Some(_) => PAUSE_BOUND,
            None => DRAIN_BOUND,
        };
        if tokio::time::timeout(bound, begun).await.is_err() {
            tracing::warn!("requests unfinished after {bound:?}: the next start undoes their changes");
        }
        self.connections.close();
        // Connections without a stream close by themselves once their responses are sent.
        let _ = tokio::time::timeout(FLUSH_BOUND, self.connections.wait()).await;
        self.abort.cancel();
        for tasks in [&self.connections, &self.streams, &self.background] {
            tasks.close();
            tasks.wait().await;
        }
        // Last, because all of these may have written log entries.
        self.records_stop.cancel();
        self.keeper.writing.lock().take();
        self.records.close();
        self.records.wait().await;
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
