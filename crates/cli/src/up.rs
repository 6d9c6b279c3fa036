//! `ringfence up`: the platform in one process, from the first check to the last drained request.
//!
//! The order is that of what can be refused: the host, the data directory, the port, the database, the lease of the
//! node, the node, the server. Whatever fails leaves nothing behind that a second try would trip over.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blobs::{BlobError, Blobs, Claim};
use node::Node;
use runtime::settings::CriuChoice;
use rustix::process::Resource;
use secrecy::SecretBox;
use server::clock::Clock;
use server::lease::{NodeIdentity, NodeLease};
use server::operator::OperatorSocket;
use server::server::Server;
use server::settings::{BlobSettings, BuildSettings, ConnectionLimits, PauseSettings, RepositorySettings};
use store::Store;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::config::blobs::BlobConfig;
use crate::config::builds::registry_authorities;
use crate::config::egress::{authorities, upstream_roots};
use crate::config::telemetry::TelemetryConfig;
use crate::connection_threads::ConnectionThreads;
use crate::credentials::{self, Addresses};
use crate::data_dir::DataDir;
use crate::database::open_store;
use crate::doctor;
use crate::master_key::{self, MasterKey};
use crate::secret::random;
use crate::signals::Signals;
use crate::tls;
use crate::{accounts, harden, node_identity, output, template, templates, up_with};

/// How long blocking work, such as making a sandbox that nobody waits for any more, may hold up the end.
const BLOCKING_BOUND: Duration = Duration::from_secs(5);
/// How long a drain may take. The server and the node bound theirs by less; service managers kill after 90 s.
const DRAIN_BOUND: Duration = Duration::from_secs(30);

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
    let lock = dir.lock()?;
    let identity = node_identity::load(&dir, &lock, settings.has_own_database())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the async runtime")?;
    // Connections and what they carry have threads of their own, so that no traffic, however it is shaped, is in the way
    // of create requests, deadlines and supervision. The kernel shares the cores between them.
    let connections = ConnectionThreads::start(BLOCKING_BOUND).context("start the threads of connections")?;
    let traffic = tokio::runtime::Builder::new_multi_thread()
        .thread_name("egress")
        .enable_all()
        .build()
        .context("start the async runtime of the egress gateway")?;
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
    let drain = async {
        server.drained().await;
        node.release().await;
        store.close().await;
    };
    tokio::select! {
        () = drain => {
            tracing::info!("drained");
            Ok(code)
        }
        name = signals.next() => {
            tracing::warn!("{name} again: ending without waiting for requests");
            Ok(ExitCode::FAILURE)
        }
        () = tokio::time::sleep(DRAIN_BOUND) => {
            tracing::error!("still not drained after {DRAIN_BOUND:?}: ending without waiting longer");
            Ok(ExitCode::FAILURE)
        }
    }
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

/// Listens on the address of a flag.
async fn bind(address: SocketAddr, flag: &str) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow!("another program listens on {address}; end it, or choose another address with {flag}")
        }
        _ => anyhow!(error).context(format!("listen on {address}")),
    })?;
    let bound = listener.local_addr().context("read the address of the listener")?;
    Ok((listener, bound))
}

async fn start(settings: &Config, dir: &DataDir, identity: NodeIdentity, runtimes: Runtimes) -> Result<Started> {
    let (listener, bound) = bind(settings.listen, "--listen").await?;
    let metrics = match settings.metrics_listen {
        Some(address) => Some(bind(address, "--metrics-listen").await?),
        None => None,
    };
    let mut egress = settings.egress.clone();
    if let Some(path) = &settings.egress_ca_file {
        egress.upstream_roots = upstream_roots(path).context("egress.ca_file")?;
    }
    egress.authorities = authorities(&settings.egress_ca_files).context("egress.ca_files")?;
    let mut webhooks = settings.webhooks.clone();
    if let Some(path) = &settings.webhooks_ca_file {
        webhooks.authorities = upstream_roots(path).context("webhooks.ca_file")?;
    }
    let telemetry = settings.telemetry.as_ref().map(TelemetryConfig::load).transpose()?;
    let registry_authorities = registry_authorities(&settings.registry_ca_files)?;
    let store = open_store(settings).await?;
    let master = MasterKey::load_or_make(dir, &settings.master_key)?;
    let addresses = Addresses::of(bound, settings.domain_at(bound.port()));
    let shown = tls::prepare(&settings.https, dir, &addresses.domain).context("prepare HTTPS")?;
    let account = accounts::default_account(&store).await?;
    if settings.node.driver.base {
        templates::ensure_base(&store, &settings.resources).await?;
    } else {
        templates::ensure_no_base(&store).await?;
    }
    accounts::ensure_credentials(&store, dir, &master, &account, &addresses).await?;
    let token_seed = master.token_seed(&store).await?;
    match &shown {
        Some(shown) => credentials::write_tls(dir, &addresses.domain, shown.authority.as_deref())?,
        // Of an earlier start: nothing would answer who follows it.
        None => dir.remove(credentials::TLS_FILE)?,
    }

    let blobs = match &settings.blobs {
        Some(blobs) => Some(open_blobs(blobs, dir, &token_seed).await?),
        None => None,
    };

    // Before anything of the node is looked at: another server may be at work on it.
    let lease = NodeLease::take(&store, identity, Clock::system())
        .await
        .context("take the lease of this node")?;
    let node = Node::start(node::NodeSettings {
        egress: egress.clone(),
        traffic: Some(runtimes.traffic),
        ..settings.node.clone()
    })
    .await
    .context("prepare the host for sandboxes")?;
    if !node.is_limited() {
        tracing::warn!("sandboxes run without limits of cpu, memory and processes: any of them can use up this host");
    }

    let stop = CancellationToken::new();
    let tls = shown.map(|shown| shown.keep(stop.clone())).transpose()?;
    let https = tls.is_some();
    let server = Server::start(
        listener,
        lease,
        node.clone(),
        server::settings::ServerSettings {
            limits: settings.limits.clone(),
            capacity: settings.capacity,
            connections: fitting(&settings.connections),
            traffic: runtimes.connections,
            records: settings.records.clone(),
            always_secure: settings.always_secure,
            mcp: settings.mcp.clone(),
            dashboard: settings.dashboard.clone(),
            repositories: RepositorySettings {
                directory: Some(dir.path().join("repositories")),
                ..settings.repositories.clone()
            },
            builds: BuildSettings {
                directory: Some(dir.path().join("builds")),
                registry_authorities,
                ..settings.builds.clone()
            },
            pool: settings.pool.clone(),
            pause: PauseSettings {
                processes_on_disk: match settings.node.driver.criu {
                    CriuChoice::Off => false,
                    CriuChoice::Auto => node.writes_processes(),
                    // Where the one that was asked for cannot be used, each pause says so.
                    CriuChoice::At(_) => true,
                },
                ..settings.pause
            },
            webhooks,
            telemetry,
            blobs,
            resources: settings.resources,
            egress,
            providers: settings.providers.clone(),
            signing: settings.signing.clone(),
            tls,
            ..server::settings::ServerSettings::new(
                addresses.domain.clone(),
                SecretBox::new(Box::new(token_seed)),
                master.sealer(),
            )
        },
        stop.clone(),
    )
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

/// Opens the blob store. What only the operator can correct ends the start; a server that is away does not, because
/// sandboxes and templates of the node need none.
async fn open_blobs(config: &BlobConfig, dir: &DataDir, token_seed: &[u8; 32]) -> Result<BlobSettings> {
    let settings = config.load(dir.path().join("blobs"))?;
    let store = Arc::new(Blobs::open(&settings)?);
    let owner = master_key::blob_owner(token_seed);
    let check = async {
        store.probe(&hex::encode(random::<8>()?)).await?;
        anyhow::Ok(store.claim(&owner).await?)
    };
    match check.await {
        Ok(Claim::Own) => tracing::info!("layers and uploaded files are kept in {}", store.place()),
        Ok(Claim::Foreign) => bail!(
            "the objects with the prefix {:?} in {} belong to another database: choose another blobs.prefix",
            settings.prefix,
            store.place()
        ),
        Err(error) => match error.downcast_ref::<BlobError>() {
            Some(why) if !why.is_lasting() => {
                tracing::error!("{why}: templates whose layers are not on this node cannot be used, and builds fail");
            }
            _ => return Err(error.context("the settings of the blob store cannot be used")),
        },
    }
    Ok(BlobSettings {
        store,
        owner,
        grace_s: config.grace_s,
        cache_bytes: config.cache_mb.map(|mb| u64::from(mb) << 20),
    })
}

/// The limits of connections, reduced to the file descriptors that are available: half of all are for sandboxes,
/// launchers and the database, which must never lack one because of what clients do.
fn fitting(limits: &ConnectionLimits) -> ConnectionLimits {
    let files = rustix::process::getrlimit(Resource::Nofile).current;
    let quarter = files.map_or(usize::MAX, |files| usize::try_from(files / 4).unwrap_or(usize::MAX));
    if limits.total > quarter {
        tracing::warn!(
            "server.connections is {} and becomes {quarter}, a quarter of the limit of open files: raise the hard limit of \
             whatever starts the platform (ulimit -Hn, LimitNOFILE= of a systemd unit, --ulimit nofile of a container) to \
             {}, or set server.connections to {quarter}",
            limits.total,
            limits.total.saturating_mul(4)
        );
    }
    ConnectionLimits {
        total: limits.total.min(quarter),
        into_sandboxes: limits.into_sandboxes.min(quarter),
        ..limits.clone()
    }
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
