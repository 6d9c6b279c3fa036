//! `ringfence server`: the platform without a node of its own, which a node on this machine or on another connects to.
//!
//! The server object lives as long as a session with the node ([`link::Hub`]): when the node was restarted, a new one takes its
//! sandboxes over, as after a restart of the server. Connections of clients wait meanwhile or are answered 503; the port stays
//! bound. A node that only loses its connection keeps its session.

use std::net::TcpListener as StdListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use link::{Hub, Port, Session};
use server::clock::Clock;
use server::lease::{NodeIdentity, NodeLease};
use server::members::NodeMembers;
use server::operator::OperatorSocket;
use server::server::{AdoptError, Server, StartError};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::connection_threads::ConnectionThreads;
use crate::data_dir::DataDir;
use crate::parts::{Parts, bind};
use crate::signals::Signals;
use crate::{harden, node_files, node_identity, output, version};

/// How long blocking work may hold up the end.
const BLOCKING_BOUND: Duration = Duration::from_secs(5);
/// How long a drain may take. The server bounds its own by less.
const DRAIN_BOUND: Duration = Duration::from_secs(30);
/// Pause before sandboxes are taken over again, after the node went away meanwhile.
const TAKEOVER_PAUSE: Duration = Duration::from_millis(200);

/// Runs the server until a signal ends it.
///
/// # Errors
/// When it cannot start.
pub(crate) fn run(settings: &Config) -> Result<ExitCode> {
    harden::harden()?;
    let dir = DataDir::prepare(&settings.data_dir)?;
    node_files::require(&dir, node_files::Role::Server)?;
    let lock = dir.lock()?;
    let authority = Arc::new(node_files::authority(&dir)?);
    let identity = node_identity::load(&dir, &lock, settings.has_own_database())?;
    if settings.pause.at_shutdown {
        tracing::warn!("pause.at_shutdown does nothing here: when this server stops, sandboxes go on on their node");
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
        let (nodes, nodes_bound) = bind(settings.nodes_listen, "--nodes-listen").await?;
        let hub = Arc::new(Hub::default());
        let clock = Clock::system();
        let members = NodeMembers::new(parts.store.clone(), clock, Arc::clone(&authority), Arc::clone(&hub));
        let serving = Serving {
            settings,
            dir: &dir,
            identity,
            members: Arc::new(members),
            hub,
            connections: connections.handles(),
            stop,
        };
        let port = Port {
            authority,
            members: serving.members.clone(),
            hub: Arc::clone(&serving.hub),
            now: || SystemTime::from(crate::clock::now()),
            version: version::text().to_owned(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(port.serve(nodes, serving.stop.clone()));
        tracing::info!(listen = %parts.listener.1, nodes = %nodes_bound, data_dir = %dir.path().display(), "listening");
        output::text(&format!(
            "ringfence server listens at {} and for nodes at https://{nodes_bound} - a token for a node: ringfence node token\n",
            parts.addresses.api_url
        ))?;
        let code = serving.sessions(parts, &mut signals).await;
        serving.stop.cancel();
        while tasks.join_next().await.is_some() {}
        code
    });
    connections.stop();
    runtime.shutdown_timeout(BLOCKING_BOUND);
    served
}

/// What all sessions have in common.
struct Serving<'a> {
    settings: &'a Config,
    dir: &'a DataDir,
    identity: NodeIdentity,
    members: Arc<NodeMembers>,
    hub: Arc<Hub>,
    connections: Vec<Handle>,
    stop: CancellationToken,
}

/// Why a session has ended.
enum Ended {
    /// The server is to end, with this code.
    Finally(ExitCode),
    /// The next one begins.
    Next,
}

impl Serving<'_> {
    async fn sessions(&self, mut parts: Parts, signals: &mut Signals) -> Result<ExitCode> {
        let (listener, _) = &parts.listener;
        let listener = duplicate(listener)?;
        // Before a node has said what it can do, more is expected of it rather than less.
        let mut writes_processes = true;
        loop {
            let session = self.hub.begin();
            match self
                .session(&mut parts, &listener, &session, &mut writes_processes, signals)
                .await?
            {
                Ended::Finally(code) => {
                    parts.store.close().await;
                    return Ok(code);
                }
                Ended::Next => {}
            }
        }
    }

    async fn session(
        &self,
        parts: &mut Parts,
        listener: &StdListener,
        session: &Session,
        writes_processes: &mut bool,
        signals: &mut Signals,
    ) -> Result<Ended> {
        let stop = self.stop.child_token();
        let started = tokio::select! {
            started = self.start(parts, listener, session, *writes_processes, stop.clone()) => started?,
            name = signals.next() => {
                // A start that is cut anywhere is finished by the next one.
                tracing::info!("{name} before the node was taken over; sandboxes keep running");
                return Ok(Ended::Finally(ExitCode::SUCCESS));
            }
        };
        let Some(server) = started else {
            tokio::time::sleep(TAKEOVER_PAUSE).await;
            return Ok(Ended::Next);
        };
        let can = self
            .hub
            .connected()
            .map(|connected| connected.capabilities.writes_processes);
        let is_as_expected = can.is_none_or(|can| can == *writes_processes);
        *writes_processes = can.unwrap_or(*writes_processes);
        let ended = if is_as_expected {
            tracing::info!("ready: the node was taken over");
            tokio::select! {
                name = signals.next() => {
                    tracing::info!("{name}: draining; sandboxes keep running");
                    Ended::Finally(ExitCode::SUCCESS)
                }
                // Nobody told it to, so it lost its lease; it has said so.
                () = server.stopping() => Ended::Finally(ExitCode::FAILURE),
                () = session.over.cancelled() => {
                    tracing::info!("the node was restarted: taking its sandboxes over again");
                    Ended::Next
                }
            }
        } else {
            Ended::Next
        };
        stop.cancel();
        tokio::select! {
            drained = tokio::time::timeout(DRAIN_BOUND, server.drained()) => match drained {
                Ok(()) => Ok(ended),
                Err(_) => {
                    tracing::error!("still not drained after {DRAIN_BOUND:?}: ending without waiting longer");
                    Ok(Ended::Finally(ExitCode::FAILURE))
                }
            },
            name = signals.next() => {
                tracing::warn!("{name}: ending without waiting for requests");
                Ok(Ended::Finally(ExitCode::FAILURE))
            }
        }
    }

    /// Starts a server for a session; none if the node went away before it was taken over.
    async fn start(
        &self,
        parts: &mut Parts,
        listener: &StdListener,
        session: &Session,
        writes_processes: bool,
        stop: CancellationToken,
    ) -> Result<Option<Server>> {
        let lease = NodeLease::take(&parts.store, self.identity.clone(), Clock::system())
            .await
            .context("take the lease of this server")?;
        let listener = listener.try_clone().context("use the listener again")?;
        let listener = TcpListener::from_std(listener).context("use the listener again")?;
        let socket = OperatorSocket::bind(self.dir.path()).context("listen on the operator's socket")?;
        let mut settings = parts.server(self.settings, self.dir, self.connections.clone(), writes_processes);
        settings.pause.at_shutdown = false;
        let operator = Some((socket, Arc::clone(&self.members)));
        let started = Server::start_with(listener, operator, lease, session.node.clone(), settings, stop).await;
        match started {
            Ok(server) => {
                if let Some((listener, bound)) = &parts.metrics {
                    let listener = TcpListener::from_std(duplicate(listener)?).context("use the listener again")?;
                    server.serve_metrics(listener);
                    tracing::debug!(listen = %bound, "metrics are served");
                }
                Ok(Some(server))
            }
            Err(error @ (StartError::Subscribe(_) | StartError::Adopt(AdoptError::Node(_)))) => {
                let error = anyhow::Error::from(error);
                tracing::warn!("the node was not taken over, trying again: {error:#}");
                Ok(None)
            }
            Err(error) => Err(error).context("start the server"),
        }
    }
}

/// Another handle of a listener, which outlives a server that uses the first.
fn duplicate(listener: &TcpListener) -> Result<StdListener> {
    let owned = rustix::io::fcntl_dupfd_cloexec(listener, 0).context("use the listener again")?;
    Ok(StdListener::from(owned))
}
