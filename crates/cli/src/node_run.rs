//! `ringfence node`: the sandboxes of this host, for a server on this machine or on another.
//!
//! The node connects to its server and is called over that connection. It has no database, no keys of teams, and listens on no
//! port. While the server is away, sandboxes go on. A server that has not taken this node over yet does so as after a
//! restart of the platform: the node lets go of its sandboxes, which keep running, and adopts those that the server wants.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use link::{Capabilities, Hello, LinkError};
use node::Node;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::data_dir::DataDir;
use crate::node_files::{self, Joined};
use crate::parts::egress_of;
use crate::runtimes::{self, BLOCKING_BOUND};
use crate::signals::Signals;
use crate::{doctor, harden, node_identity, output, version};

/// How long what the server has called for may go on before the node lets go of its sandboxes.
const CALLS_BOUND: Duration = Duration::from_secs(60);
/// Shortest and longest pause before another attempt to connect.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Pause after a refusal that lasts until an operator does something.
const REFUSED: Duration = Duration::from_secs(15);
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
    let runtime = runtimes::serving()?;
    let traffic = runtimes::egress()?;
    let ended = runtime.block_on(serve(settings, &dir, joined, traffic.handle().clone()));
    traffic.shutdown_timeout(BLOCKING_BOUND);
    runtime.shutdown_timeout(BLOCKING_BOUND);
    ended
}

async fn serve(settings: &Config, dir: &DataDir, joined: Joined, traffic: Handle) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let node = start(settings, &traffic).await?;
    if !node.is_limited() {
        tracing::warn!("sandboxes run without limits of cpu, memory and processes: any of them can use up this host");
    }
    let id = joined.credentials.node()?;
    output::text(&format!(
        "ringfence node {id} is started, for the server at {}\n",
        joined.server
    ))?;
    let hello = Hello {
        capabilities: Capabilities {
            writes_processes: node.writes_processes(),
            is_limited: node.is_limited(),
        },
        ..link::hello(node_identity::host_name(), version::text().to_owned())
    };
    let mut serving = Serving {
        settings,
        dir,
        hello,
        joined,
        traffic,
        node: Some(node),
        calls: TaskTracker::new(),
    };
    tokio::select! {
        failed = serving.connections() => return failed.map(|()| ExitCode::FAILURE),
        name = signals.next() => tracing::info!("{name}: draining; sandboxes keep running"),
    }
    let release = async {
        if let Some(node) = &serving.node {
            node.release().await;
        }
    };
    Ok(runtimes::drain(release, &mut signals, ExitCode::SUCCESS).await)
}

async fn start(settings: &Config, traffic: &Handle) -> Result<Arc<Node>> {
    Node::start(node::NodeSettings {
        egress: egress_of(settings)?,
        traffic: Some(traffic.clone()),
        ..settings.node.clone()
    })
    .await
    .context("prepare the host for sandboxes")
}

/// A node, and how it reaches its server.
struct Serving<'a> {
    settings: &'a Config,
    dir: &'a DataDir,
    joined: Joined,
    hello: Hello,
    traffic: Handle,
    /// None only while it is started again.
    node: Option<Arc<Node>>,
    /// What the server has called for.
    calls: TaskTracker,
}

impl Serving<'_> {
    /// Connects again and again. Returns only if the node cannot be started again.
    async fn connections(&mut self) -> Result<()> {
        let mut pause = RETRY.0;
        loop {
            self.renew().await;
            match link::connect(&self.joined.server, &self.joined.credentials, &self.hello).await {
                Ok((welcome, connection)) => {
                    pause = RETRY.0;
                    if self.hello.session.as_ref() != Some(&welcome.session) {
                        if self.hello.session.is_some() {
                            self.let_go().await?;
                        }
                        self.hello.session = Some(welcome.session);
                    }
                    tracing::info!(server = %self.joined.server, version = welcome.version, "connected to the server");
                    let node = self.node.clone().context("the node was not started again")?;
                    let error = tokio::select! {
                        error = link::serve(node, connection, &self.calls) => error,
                        // The server is told by the end of the connection, and the next one has the new certificate.
                        () = until_due(&self.joined) => std::io::Error::other("the certificate is renewed"),
                    };
                    tracing::warn!("the connection to the server has ended, connecting again: {error}");
                }
                Err(error) if error.is_lasting() => {
                    let error = anyhow::Error::from(error);
                    tracing::error!("sandboxes go on without a server, trying again in {REFUSED:?}: {error:#}");
                    pause = REFUSED;
                }
                Err(error) => {
                    if pause == RETRY.0 {
                        let error = anyhow::Error::from(error);
                        tracing::warn!("sandboxes go on without a server, trying again: {error:#}");
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).clamp(RETRY.0, RETRY.1);
        }
    }

    /// Renews the certificate if it ends soon. One that cannot be renewed now is used for as long as it lasts.
    async fn renew(&mut self) {
        if !self.joined.credentials.is_due(now()) {
            return;
        }
        let renewed: Result<(), LinkError> = async {
            self.joined.credentials = link::renew(&self.joined.server, &self.joined.credentials).await?;
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
        self.calls.close();
        if tokio::time::timeout(CALLS_BOUND, self.calls.wait()).await.is_err() {
            tracing::warn!(
                "calls of the server before have not ended after {CALLS_BOUND:?}: they go on, and no one waits for them"
            );
        }
        self.calls = TaskTracker::new();
        if let Some(node) = self.node.take() {
            // Dropped before the next one is started, which waits for what this one has of the host.
            node.release().await;
        }
        self.node = Some(start(self.settings, &self.traffic).await?);
        Ok(())
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
