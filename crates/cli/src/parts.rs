//! What `up` and `server` are made of: the listeners, the database, keys, certificates, and the settings of the server.
//!
//! The order is that of what can be refused: ports, files that are named in the configuration, the database, keys.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blobs::{BlobError, Blobs, Claim};
use link::Authority;
use proxy::egress::EgressSettings;
use runtime::settings::CriuChoice;
use rustix::process::Resource;
use secrecy::SecretBox;
use server::settings::{
    BlobSettings, BuildSettings, ConnectionLimits, PauseSettings, RepositorySettings, ServerSettings,
    TelemetrySettings, WebhookSettings,
};
use server::tls::Tls;
use store::Store;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::config::blobs::BlobConfig;
use crate::config::builds::registry_authorities;
use crate::config::egress::{authorities, upstream_roots};
use crate::config::telemetry::TelemetryConfig;
use crate::credentials::{self, Addresses};
use crate::data_dir::DataDir;
use crate::database::open_store;
use crate::master_key::{self, MasterKey};
use crate::secret::random;
use crate::{accounts, node_files, templates, tls};

/// A listener, and the address that it has.
pub(crate) type Bound = (TcpListener, SocketAddr);

/// Everything of a server that does not depend on its node.
pub(crate) struct Parts {
    /// Listens for clients.
    pub(crate) listener: Bound,
    /// Listens for requests for metrics, if there is one.
    pub(crate) metrics: Option<Bound>,
    /// The database.
    pub(crate) store: Store,
    /// What clients connect to.
    pub(crate) addresses: Addresses,
    /// What is open to sandboxes.
    pub(crate) egress: EgressSettings,
    master: MasterKey,
    token_seed: [u8; 32],
    tls: Option<Tls>,
    webhooks: WebhookSettings,
    telemetry: Option<TelemetrySettings>,
    registry_authorities: BTreeMap<String, String>,
    blobs: Option<BlobSettings>,
}

/// Listens on the address of a flag or a key.
pub(crate) async fn bind(address: SocketAddr, flag: &str) -> Result<Bound> {
    let listener = TcpListener::bind(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow!("another program listens on {address}; end it, or choose another address with {flag}")
        }
        _ => anyhow!(error).context(format!("listen on {address}")),
    })?;
    let bound = listener.local_addr().context("read the address of the listener")?;
    Ok((listener, bound))
}

impl Parts {
    /// Opens and reads everything. `stop` ends what keeps the certificate of HTTPS current.
    ///
    /// # Errors
    /// When something cannot be used; nothing is left behind then that another try would trip over.
    pub(crate) async fn prepare(settings: &Config, dir: &DataDir, stop: &CancellationToken) -> Result<Self> {
        let listener = bind(settings.listen, "--listen").await?;
        let bound = listener.1;
        let metrics = match settings.metrics_listen {
            Some(address) => Some(bind(address, "--metrics-listen").await?),
            None => None,
        };
        let egress = egress_of(settings)?;
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
        Ok(Self {
            listener,
            metrics,
            store,
            addresses,
            egress,
            master,
            token_seed,
            tls: shown.map(|shown| shown.keep(stop.clone())).transpose()?,
            webhooks,
            telemetry,
            registry_authorities,
            blobs,
        })
    }

    /// The authority of nodes, which all servers on the database have.
    ///
    /// # Errors
    /// When the database fails, or has one that this server cannot use.
    pub(crate) async fn authority(&self, dir: &DataDir) -> Result<Authority> {
        node_files::authority(dir, &self.store, &self.master).await
    }

    /// Whether HTTPS is served.
    pub(crate) fn has_https(&self) -> bool {
        self.tls.is_some()
    }

    /// The settings of the server. `writes_processes` says whether its node can write processes to disk.
    pub(crate) fn server(
        &self,
        settings: &Config,
        dir: &DataDir,
        connections: Vec<Handle>,
        writes_processes: bool,
    ) -> ServerSettings {
        ServerSettings {
            limits: settings.limits.clone(),
            capacity: settings.capacity,
            connections: fitting(&settings.connections),
            traffic: connections,
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
                registry_authorities: self.registry_authorities.clone(),
                ..settings.builds.clone()
            },
            pool: settings.pool.clone(),
            pause: PauseSettings {
                processes_on_disk: match settings.node.driver.criu {
                    CriuChoice::Off => false,
                    CriuChoice::Auto => writes_processes,
                    // Where the one that was asked for cannot be used, each pause says so.
                    CriuChoice::At(_) => true,
                },
                ..settings.pause
            },
            webhooks: self.webhooks.clone(),
            telemetry: self.telemetry.clone(),
            blobs: self.blobs.clone(),
            resources: settings.resources,
            egress: self.egress.clone(),
            providers: settings.providers.clone(),
            signing: settings.signing.clone(),
            tls: self.tls.clone(),
            ..ServerSettings::new(
                self.addresses.domain.clone(),
                SecretBox::new(Box::new(self.token_seed)),
                self.master.sealer(),
            )
        }
    }
}

/// What is open to sandboxes, with the files that the configuration names.
///
/// # Errors
/// When a file cannot be read.
pub(crate) fn egress_of(settings: &Config) -> Result<EgressSettings> {
    let mut egress = settings.egress.clone();
    if let Some(path) = &settings.egress_ca_file {
        egress.upstream_roots = upstream_roots(path).context("egress.ca_file")?;
    }
    egress.authorities = authorities(&settings.egress_ca_files).context("egress.ca_files")?;
    Ok(egress)
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
