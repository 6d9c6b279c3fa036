//! `ringfence server`: the platform without nodes of its own, which connect to it from this machine or others.
//!
//! It answers clients whether or not nodes are connected: each is taken over when it connects, see [`server::sessions`].

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use link::{Hub, Port};
use server::clock::Clock;
use server::lease::{NodeIdentity, NodeLease};
use server::members::NodeMembers;
use server::operator::OperatorSocket;
use server::server::Server;
use server::sessions::NodeSessions;
use server::settings::ServersSettings;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::connection_threads::ConnectionThreads;
use crate::data_dir::DataDir;
use crate::parts::{Parts, bind};
use crate::signals::Signals;
use crate::{database, harden, node_files, node_identity, output, version};

/// How long blocking work may hold up the end.
const BLOCKING_BOUND: Duration = Duration::from_secs(5);
/// How long a drain may take. The server bounds its own by less.
const DRAIN_BOUND: Duration = Duration::from_secs(30);

/// Runs the server until a signal ends it.
///
/// # Errors
/// When it cannot start.
pub(crate) fn run(settings: &Config) -> Result<ExitCode> {
    harden::harden()?;
    let dir = DataDir::prepare(&settings.data_dir)?;
    node_files::require(&dir, node_files::Role::Server)?;
    database::require_current(settings)?;
    let lock = dir.lock()?;
    node_files::mark_server(&dir)?;
    let identity = node_identity::load(&dir, &lock, settings.has_own_database())?;
    if settings.pause.at_shutdown {
        tracing::warn!("pause.at_shutdown does nothing here: when this server stops, sandboxes go on on their nodes");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the async runtime")?;
    let connections = ConnectionThreads::start(BLOCKING_BOUND).context("start the threads of connections")?;
    let served = runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let stop = CancellationToken::new();
        let parts = Parts::prepare(settings, &dir, &stop).await?;
        let authority = Arc::new(parts.authority(&dir).await?);
        let (nodes, nodes_bound) = bind(settings.nodes_listen, "--nodes-listen").await?;
        let hub = Arc::new(Hub::default());
        let clock = Clock::system();
        let members = NodeMembers::new(parts.store.clone(), clock, Arc::clone(&authority), Arc::clone(&hub));
        let members = Arc::new(members);
        let servers = ServersSettings {
            name: identity.name.clone(),
            address: settings.nodes_address.clone(),
            can_share: parts.store.can_be_shared(),
            authority: Arc::clone(&authority),
            now: now_of_certificates,
        };
        let port = Port {
            id: identity.id.clone(),
            authority,
            members: members.clone(),
            hub,
            now: now_of_certificates,
            version: version::text().to_owned(),
            // Beside connections of clients, whose requests wake at most one other thread on their way to a node then.
            lanes: connections.handles(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(port.serve(nodes, stop.clone()));
        tracing::info!(listen = %parts.listener.1, nodes = %nodes_bound, data_dir = %dir.path().display(), "listening");
        output::text(&format!(
            "ringfence server listens at {} and for nodes at https://{nodes_bound} - a token for a node: ringfence node token\n",
            parts.addresses.api_url
        ))?;
        let serving = Serving {
            settings,
            dir: &dir,
            identity,
            members,
            servers,
            connections: connections.handles(),
        };
        let code = Box::pin(serving.serve(parts, stop.clone(), &mut signals)).await;
        stop.cancel();
        while tasks.join_next().await.is_some() {}
        code
    });
    connections.stop();
    runtime.shutdown_timeout(BLOCKING_BOUND);
    served
}

/// What a server is made of.
struct Serving<'a> {
    settings: &'a Config,
    dir: &'a DataDir,
    identity: NodeIdentity,
    members: Arc<NodeMembers>,
    servers: ServersSettings,
    connections: Vec<Handle>,
}

fn now_of_certificates() -> SystemTime {
    SystemTime::from(crate::clock::now())
}

impl Serving<'_> {
    async fn serve(self, parts: Parts, stop: CancellationToken, signals: &mut Signals) -> Result<ExitCode> {
        let store = parts.store.clone();
        // Its connections to nodes outlast it, because what it has begun needs them.
        let draining = stop.child_token();
        let (server, sessions) = tokio::select! {
            started = self.start(parts, draining.clone()) => started?,
            name = signals.next() => {
                tracing::info!("{name} while the server was starting; sandboxes keep running");
                store.close().await;
                return Ok(ExitCode::SUCCESS);
            }
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(sessions.serve());
        let code = tokio::select! {
            name = signals.next() => {
                tracing::info!("{name}: draining; sandboxes keep running");
                ExitCode::SUCCESS
            }
            // Nobody told it to, so it lost its lease; it has said so.
            () = server.stopping() => ExitCode::FAILURE,
        };
        draining.cancel();
        let drained = async {
            server.drained().await;
            while tasks.join_next().await.is_some() {}
            store.close().await;
        };
        tokio::select! {
            drained = tokio::time::timeout(DRAIN_BOUND, drained) => match drained {
                Ok(()) => {
                    tracing::info!("drained");
                    Ok(code)
                }
                Err(_) => {
                    tracing::error!("still not drained after {DRAIN_BOUND:?}: ending without waiting longer");
                    Ok(ExitCode::FAILURE)
                }
            },
            name = signals.next() => {
                tracing::warn!("{name}: ending without waiting for requests");
                Ok(ExitCode::FAILURE)
            }
        }
    }

    async fn start(&self, parts: Parts, stop: CancellationToken) -> Result<(Server, NodeSessions)> {
        let lease = NodeLease::take(&parts.store, self.identity.clone(), Clock::system())
            .await
            .context("take the lease of this server")?;
        let socket = OperatorSocket::bind(self.dir.path()).context("listen on the operator's socket")?;
        // Each node says itself whether it can write processes to disk.
        let mut settings = parts.server(self.settings, self.dir, self.connections.clone(), true);
        settings.pause.at_shutdown = false;
        settings.servers = Some(self.servers.clone());
        let Parts { listener, metrics, .. } = parts;
        let operator = (socket, Arc::clone(&self.members));
        let (server, sessions) = Server::start_without_node(listener.0, operator, lease, settings, stop)
            .await
            .context("start the server")?;
        if let Some((listener, bound)) = metrics {
            server.serve_metrics(listener);
            tracing::debug!(listen = %bound, "metrics are served");
        }
        Ok((server, sessions))
    }
}
