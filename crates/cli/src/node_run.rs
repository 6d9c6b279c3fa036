//! `ringfence node`: the sandboxes of this host, for a server on this machine or on another.
//!
//! The node connects to its server and is called over that connection. With several servers on one database it is connected to
//! one of them at a time, closes that connection before it opens another one, and goes to the next server when one does not
//! answer. It has no database, no keys of teams, and listens on no port. While the server is away, sandboxes go on, until they are
//! overdue: then the node ends or pauses them by itself, and has the next connection begin a new session.
//! A server that has not taken this node over yet does so as after a restart of the platform: the node lets go of its sandboxes,
//! which keep running, and adopts those that the server wants.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use link::{Address, Calls, Capabilities, Hello, LinkError, Socket, Welcome};
use node::{Deadlines, Node};
use tokio::runtime::Handle;
use tokio_rustls::client::TlsStream;

use crate::config::Config;
use crate::data_dir::DataDir;
use crate::node_files::{self, Joined};
use crate::parts::egress_of;
use crate::runtimes::{self, BLOCKING_BOUND};
use crate::secret::random;
use crate::server_order::{Ended, ServerOrder};
use crate::signals::Signals;
use crate::{doctor, harden, node_identity, output, version};

/// How long what the server has called for may go on before the node lets go of its sandboxes.
const CALLS_BOUND: Duration = Duration::from_secs(60);
/// How long a server may take to answer where there are others.
const CONNECT_BOUND: Duration = Duration::from_secs(4);
/// Where the deadlines of sandboxes are noted, in the data directory.
const DEADLINES: &str = "deadlines";
/// How often a node that stays connected looks whether its certificate ends soon.
const RENEWAL_CHECK: Duration = Duration::from_secs(6 * 60 * 60);

/// Runs the node until a signal ends it.
///
/// # Errors
/// When it cannot start; with everything that the host lacks, if it is the host.
pub(crate) fn run(settings: &Config) -> Result<ExitCode> {
    let dir = DataDir::prepare(&settings.data_dir)?;
    node_files::require(&dir, node_files::Role::Node)?;
    let joined = node_files::joined(&dir)?.with_context(|| {
        format!(
            "{} has not joined a server: make a token with `ringfence node token` on the server, and run `ringfence node \
             join` here",
            dir.path().display()
        )
    })?;
    doctor::require_host(settings)?;
    harden::harden()?;
    let _lock = dir.lock()?;
    // The connection to the server, with all streams into sandboxes, has this thread for itself.
    let (link, runtime, traffic) = (runtimes::link()?, runtimes::serving()?, runtimes::egress()?);
    let handles = Handles {
        node: runtime.handle().clone(),
        traffic: traffic.handle().clone(),
    };
    let ended = link.block_on(serve(settings, &dir, joined, handles));
    link.shutdown_timeout(BLOCKING_BOUND);
    traffic.shutdown_timeout(BLOCKING_BOUND);
    runtime.shutdown_timeout(BLOCKING_BOUND);
    ended
}

/// The runtimes of a node besides that of its connection.
#[derive(Clone)]
struct Handles {
    /// Where all is done that the server calls for.
    node: Handle,
    /// Where connections of sandboxes to the outside are relayed.
    traffic: Handle,
}

async fn serve(settings: &Config, dir: &DataDir, joined: Joined, handles: Handles) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let deadlines = Deadlines::open(&dir.path().join(DEADLINES)).context("open the deadlines of sandboxes")?;
    let node = start(settings, &handles, &deadlines).await?;
    if !node.is_limited() {
        tracing::warn!("sandboxes run without limits of cpu, memory and processes: any of them can use up this host");
    }
    let id = joined.credentials.node()?;
    let addresses = match settings.nodes_servers.as_slice() {
        [] => joined.servers.clone(),
        configured => configured.to_vec(),
    };
    let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    output::text(&format!(
        "ringfence node {id} is started, for the server at {}\n",
        shown.join(" or ")
    ))?;
    let servers = ServerOrder::new(addresses, &random::<16>()?);
    let hello = Hello {
        capabilities: Capabilities {
            writes_processes: node.writes_processes(),
            is_limited: node.is_limited(),
            keeps_deadlines: true,
            makes_parcels: true,
            copies_memories: true,
            admits_with_start: true,
        },
        ..link::hello(node_identity::host_name(), version::text().to_owned())
    };
    let mut serving = Serving {
        settings,
        dir,
        hello,
        joined,
        servers,
        calls: Calls::on(handles.node.clone()),
        handles,
        deadlines,
        node: Some(node),
    };
    tokio::select! {
        failed = serving.connections() => return failed.map(|()| ExitCode::FAILURE),
        name = signals.next() => tracing::info!("{name}: draining; sandboxes keep running"),
    }
    let release = async {
        if let Some(node) = serving.node.take() {
            serving.release(node).await;
        }
    };
    Ok(runtimes::drain(release, &mut signals, ExitCode::SUCCESS).await)
}

async fn start(settings: &Config, handles: &Handles, deadlines: &Arc<Deadlines>) -> Result<Arc<Node>> {
    let starting = Node::start(node::NodeSettings {
        egress: egress_of(settings)?,
        traffic: Some(handles.traffic.clone()),
        deadlines: Some(Arc::clone(deadlines)),
        ..settings.node.clone()
    });
    let started = handles.node.spawn(starting).await?;
    started.context("prepare the host for sandboxes")
}

/// A node, and how it reaches its server.
struct Serving<'a> {
    settings: &'a Config,
    dir: &'a DataDir,
    joined: Joined,
    /// The servers that it connects to.
    servers: ServerOrder,
    hello: Hello,
    handles: Handles,
    /// The deadlines of its sandboxes, for when no server is there.
    deadlines: Arc<Deadlines>,
    /// None only while it is started again.
    node: Option<Arc<Node>>,
    /// What the server has called for.
    calls: Calls,
}

impl Serving<'_> {
    /// Connects again and again. Returns only if the node cannot be started again.
    async fn connections(&mut self) -> Result<()> {
        let mut is_told = false;
        loop {
            self.renew().await;
            if self.deadlines.has_acted() {
                // The sandboxes are not as that session knows them.
                self.hello.session = None;
            }
            let server = self.servers.current().clone();
            let ended = match self.connect(&server).await {
                Ok((welcome, connection)) => {
                    is_told = false;
                    // From here on, nothing is ended or paused at its deadline but by the server.
                    let goes_on = self.hello.session.as_ref() == Some(&welcome.session);
                    let has_acted = self.deadlines.hold(goes_on);
                    if goes_on {
                        if has_acted {
                            tracing::info!(%server, "connecting again: sandboxes were ended or paused at their deadlines meanwhile");
                            self.deadlines.lose();
                            continue;
                        }
                    } else {
                        if self.hello.session.is_some() || has_acted {
                            self.let_go().await?;
                        }
                        self.hello.session = Some(welcome.session);
                    }
                    tracing::info!(%server, version = welcome.version, "connected to the server");
                    let node = self.node.clone().context("the node was not started again")?;
                    let since = Instant::now();
                    let error = tokio::select! {
                        error = link::serve(node, connection, &self.calls) => error,
                        // The server is told by the end of the connection, and the next one has the new certificate.
                        () = until_due(&self.joined) => std::io::Error::other("the certificate is renewed"),
                    };
                    self.deadlines.lose();
                    tracing::warn!(%server, "the connection to the server has ended, connecting again: {error}");
                    Ended::of_connection(error.kind(), since.elapsed())
                }
                Err(error) => {
                    let ended = match &error {
                        error if error.is_lasting() => Ended::Refused,
                        LinkError::Refused(_) => Ended::NotReady,
                        LinkError::Connect { .. } | LinkError::Trust(_) => Ended::Unreached,
                    };
                    let error = anyhow::Error::from(error);
                    if ended == Ended::Refused {
                        tracing::error!("sandboxes go on without a server, trying again later: {error:#}");
                    } else if !is_told {
                        is_told = true;
                        tracing::warn!("sandboxes go on without a server, trying again: {error:#}");
                    }
                    ended
                }
            };
            tokio::time::sleep(self.servers.ended(ended)).await;
        }
    }

    /// Connects to a server. The connection before is closed by now.
    async fn connect(&self, server: &Address) -> Result<(Welcome, TlsStream<Socket>), LinkError> {
        let connecting = link::connect(server, &self.joined.credentials, &self.hello);
        if self.servers.count() == 1 {
            return connecting.await;
        }
        let connected = tokio::time::timeout(CONNECT_BOUND, connecting).await;
        connected.unwrap_or_else(|elapsed| {
            Err(LinkError::Connect {
                address: server.clone(),
                error: elapsed.into(),
            })
        })
    }

    /// Renews the certificate if it ends soon. One that cannot be renewed now is used for as long as it lasts.
    async fn renew(&mut self) {
        if !self.joined.credentials.is_due(now()) {
            return;
        }
        let renewed: Result<(), LinkError> = async {
            self.joined.credentials = link::renew(self.servers.current(), &self.joined.credentials).await?;
            Ok(())
        }
        .await;
        let kept = match renewed {
            Ok(()) => node_files::keep(self.dir, &self.joined).map(|_| ()),
            Err(error) => Err(error.into()),
        };
        match kept {
            Ok(()) => tracing::info!("the certificate of this node was renewed"),
            Err(error) => tracing::error!("cannot renew the certificate of this node: {error:#}"),
        }
    }

    /// Lets go of all sandboxes, for a server that is about to take them over.
    async fn let_go(&mut self) -> Result<()> {
        tracing::info!("another session of the server begins: letting go of all sandboxes, which keep running");
        if tokio::time::timeout(CALLS_BOUND, self.calls.ended()).await.is_err() {
            tracing::warn!(
                "calls of the server before have not ended after {CALLS_BOUND:?}: they go on, and no one waits for them"
            );
        }
        self.calls = Calls::on(self.handles.node.clone());
        if let Some(node) = self.node.take() {
            // Dropped before the next one is started, which waits for what this one has of the host.
            self.release(node).await;
        }
        self.deadlines.let_go();
        self.node = Some(start(self.settings, &self.handles, &self.deadlines).await?);
        Ok(())
    }

    /// Has a node let go of its sandboxes, and drops it.
    async fn release(&self, node: Arc<Node>) {
        if let Err(error) = self.handles.node.spawn(async move { node.release().await }).await {
            tracing::error!("the node did not let go of its sandboxes: {error}");
        }
    }
}

async fn until_due(joined: &Joined) {
    while !joined.credentials.is_due(now()) {
        tokio::time::sleep(RENEWAL_CHECK).await;
    }
    // An attempt to renew has just failed, or it is time for one: not at once again.
    tokio::time::sleep(RENEWAL_CHECK).await;
}

fn now() -> SystemTime {
    SystemTime::from(crate::clock::now())
}
