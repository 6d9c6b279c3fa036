//! `ringfence up`: the platform in one process, from the first check to the last drained request.
//!
//! The order is that of what can be refused: the host, the data directory, the port, the database, the lease of the
//! node, the node, the server. Whatever fails leaves nothing behind that a second try would trip over.

use std::io::IsTerminal as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use node::Node;
use server::clock::Clock;
use server::lease::{NodeIdentity, NodeLease};
use server::operator::OperatorSocket;
use server::server::Server;
use store::Store;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::connection_threads::ConnectionThreads;
use crate::credentials::{self, Addresses};
use crate::data_dir::DataDir;
use crate::doctor;
use crate::parts::Parts;
use crate::runtimes::{self, BLOCKING_BOUND};
use crate::signals::Signals;
use crate::{database, harden, node_files, node_identity, output, template, up_with};

/// Runs the platform until a signal ends it.
///
/// # Errors
/// When it cannot start; with everything that the host lacks, if it is the host.
pub(crate) fn run(settings: &Config, with: &[String]) -> Result<ExitCode> {
    for name in with {
        template::require_carried(name).context("--with")?;
    }
    doctor::require_host(settings)?;
    harden::harden()?;
    let dir = DataDir::prepare(&settings.data_dir)?;
    node_files::require(&dir, node_files::Role::Platform)?;
    database::require_current(settings)?;
    let lock = dir.lock()?;
    let identity = node_identity::load(&dir, &lock, settings.has_own_database())?;
    let runtime = runtimes::serving()?;
    // Connections and what they carry have threads of their own, so that no traffic, however it is shaped, is in the way
    // of create requests, deadlines and supervision. The kernel shares the cores between them.
    let connections = ConnectionThreads::start(BLOCKING_BOUND).context("start the threads of connections")?;
    let traffic = runtimes::egress()?;
    let ended = runtime.block_on(serve(
        settings,
        &dir,
        identity,
        Runtimes {
            connections: connections.handles(),
            traffic: traffic.handle().clone(),
        },
        with,
    ));
    connections.stop();
    traffic.shutdown_timeout(BLOCKING_BOUND);
    runtime.shutdown_timeout(BLOCKING_BOUND);
    ended
}

/// The runtimes of what must not be in the way of the platform's own work.
struct Runtimes {
    /// The runtimes on which connections of clients are served.
    connections: Vec<Handle>,
    /// The runtime on which connections of sandboxes are relayed.
    traffic: Handle,
}

async fn serve(
    settings: &Config,
    dir: &DataDir,
    identity: NodeIdentity,
    runtimes: Runtimes,
    with: &[String],
) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let started = tokio::select! {
        started = start(settings, dir, identity, runtimes) => started?,
        name = signals.next() => {
            // A start that is cut anywhere is finished by the next one.
            tracing::info!("{name} before it was ready");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let Started {
        store,
        node,
        server,
        stop,
        addresses,
    } = started;
    let file = dir.path().join(credentials::FILE);
    output::text(&if std::io::stdout().is_terminal() {
        welcome(&addresses.api_url, &file, settings.dashboard.is_enabled)
    } else {
        ready(&addresses.api_url, &file)
    })?;

    // A program beside this one, which ends with it.
    let _building = (!with.is_empty()).then(|| up_with::start(dir.path(), with));
    let code = tokio::select! {
        name = signals.next() => {
            tracing::info!("{name}: draining; sandboxes keep running");
            ExitCode::SUCCESS
        }
        // Nobody told it to, so it lost its node; it has said so.
        () = server.stopping() => ExitCode::FAILURE,
    };
    stop.cancel();
    let drained = async {
        server.drained().await;
        node.release().await;
        store.close().await;
    };
    Ok(runtimes::drain(drained, &mut signals, code).await)
}

/// What a program that waits for the platform reads, in one line.
fn ready(url: &str, credentials: &Path) -> String {
    format!(
        "ringfence is ready at {url} - load the credentials with: {}\n",
        loading(credentials)
    )
}

/// What a person at a terminal reads.
fn welcome(url: &str, credentials: &Path, has_dashboard: bool) -> String {
    let dashboard = if has_dashboard {
        format!("\x20 dashboard      {url}/dashboard\n")
    } else {
        String::new()
    };
    format!(
        "\nringfence is ready at {url}\n\n\
         {dashboard}\
         \x20 documentation  {url}/docs\n\
         \x20 keys           {}\n\
         \x20 next           in another terminal: {}\n\
         \x20                then run a first sandbox: {url}/docs/getting-started\n\
         \x20 to stop        Ctrl-C; sandboxes keep running, and the next start adopts them\n\n",
        credentials.display(),
        loading(credentials),
    )
}

fn loading(credentials: &Path) -> String {
    format!("set -a; . '{}'; set +a", credentials.display())
}

/// A platform that is ready.
struct Started {
    store: Store,
    node: Arc<Node>,
    server: Server,
    stop: CancellationToken,
    addresses: Addresses,
}

async fn start(settings: &Config, dir: &DataDir, identity: NodeIdentity, runtimes: Runtimes) -> Result<Started> {
    let stop = CancellationToken::new();
    let parts = Parts::prepare(settings, dir, &stop).await?;
    // Before anything of the node is looked at: another server may be at work on it.
    let lease = NodeLease::take(&parts.store, identity, Clock::system())
        .await
        .context("take the lease of this node")?;
    let node = Node::start(node::NodeSettings {
        egress: parts.egress.clone(),
        traffic: Some(runtimes.traffic),
        ..settings.node.clone()
    })
    .await
    .context("prepare the host for sandboxes")?;
    if !node.is_limited() {
        tracing::warn!("sandboxes run without limits of cpu, memory and processes: any of them can use up this host");
    }

    let mut server_settings = parts.server(settings, dir, runtimes.connections, node.writes_processes());
    // There is no other node that could go on with them.
    server_settings.pause.copies = false;
    let https = parts.has_https();
    let Parts {
        listener: (listener, bound),
        metrics,
        store,
        addresses,
        ..
    } = parts;
    let server = Server::start(listener, lease, node.clone(), server_settings, stop.clone())
        .await
        .context("start the server")?;

    let socket = OperatorSocket::bind(dir.path()).context("listen on the operator's socket")?;
    server.serve_operator(socket);
    if let Some((listener, bound)) = metrics {
        server.serve_metrics(listener);
        tracing::info!(listen = %bound, "metrics are served");
    }
    tracing::info!(listen = %bound, domain = addresses.domain, https, data_dir = %dir.path().display(), "ready");
    Ok(Started {
        store,
        node,
        server,
        stop,
        addresses,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_reads_where_to_go_on_and_no_key() {
        let file = Path::new("/var/lib/ringfence/credentials.env");
        let text = welcome("http://127.0.0.1:3000", file, true);
        for part in [
            "ringfence is ready at http://127.0.0.1:3000\n",
            "  dashboard      http://127.0.0.1:3000/dashboard\n  documentation  http://127.0.0.1:3000/docs\n",
            "set -a; . '/var/lib/ringfence/credentials.env'; set +a\n",
            "Ctrl-C",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
        assert!(!welcome("http://127.0.0.1:3000", file, false).contains("dashboard"));
        let line = ready("http://127.0.0.1:3000", file);
        assert!(line.starts_with("ringfence is ready at http://127.0.0.1:3000 - ") && line.lines().count() == 1);
    }
}
