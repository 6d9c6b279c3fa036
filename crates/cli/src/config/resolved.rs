//! The configuration as the commands use it. Each key sets one of these fields, or one of the settings in them, which are
//! passed on as they are.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use link::Address;
use model::injection::provider::Providers;
use model::resources::Resources;
use node::NodeSettings;
use proxy::egress::EgressSettings;
use server::settings::{
    BuildSettings, CapacitySettings, ConnectionLimits, DashboardSettings, Limits, McpSettings, PauseSettings,
    PoolSettings, RecordSettings, RepositorySettings, SigningSettings, WebhookSettings,
};

use super::blobs::BlobConfig;
use super::database_url::DatabaseUrl;
use super::telemetry::TelemetryConfig;
use super::values::LogFormat;
use crate::master_key::KeySource;
use crate::tls::Https;

/// How long processes are written to disk when the platform is stopped. It has 75 s in all, of which files alone need the rest.
const CHECKPOINTS_AT_SHUTDOWN_WITHIN: Duration = Duration::from_secs(45);

/// Sandboxes of `base` that are kept ready unless the operator says how many, and the memory that a host must have for it,
/// in bytes. They take 2 MiB each, which is little, but on a small host nothing is taken without being asked for.
const POOL_BASE: u32 = 4;
const POOL_HOST_BYTES: u64 = 3 << 30;

/// How many sandboxes of `base` are kept ready by default on a host with this much memory.
fn pool_base(host_bytes: u64) -> u32 {
    if host_bytes >= POOL_HOST_BYTES { POOL_BASE } else { 0 }
}

/// The memory that the kernel of the host manages, in bytes.
fn memory_of_host() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// The configuration, validated.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The data directory, absolute.
    pub(crate) data_dir: PathBuf,
    /// Address to listen on; port 0 selects a free port.
    pub(crate) listen: SocketAddr,
    /// Address on which metrics are served, if at all; port 0 selects a free port.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Address to which nodes connect; port 0 selects a free port.
    pub(crate) nodes_listen: SocketAddr,
    /// Where other servers reach that, if there are any.
    pub(crate) nodes_address: Option<Address>,
    /// The servers that a node connects to; none for those that it has joined.
    pub(crate) nodes_servers: Vec<Address>,
    /// The domain of sandboxes, if configured.
    pub(crate) domain: Option<String>,
    /// Whether the port speaks HTTPS.
    pub(crate) https: Https,
    /// The format of the log.
    pub(crate) log_format: LogFormat,
    /// The filter of the log, if configured.
    pub(crate) log_level: Option<String>,
    /// The database.
    pub(crate) database_url: DatabaseUrl,
    /// The providers that injections can be of.
    pub(crate) providers: Providers,
    /// Signed requests.
    pub(crate) signing: SigningSettings,
    /// Where the master key comes from.
    pub(crate) master_key: KeySource,
    /// The node and its driver, except for what the node shares with the server and what is known at the start only.
    pub(crate) node: NodeSettings,
    /// The resources of a sandbox of `base`.
    pub(crate) resources: Resources,
    /// The limits of teams.
    pub(crate) limits: Limits,
    /// The capacity reserved on this host.
    pub(crate) capacity: CapacitySettings,
    /// How many connections clients may have.
    pub(crate) connections: ConnectionLimits,
    /// Retention and size limits of logs and metrics.
    pub(crate) records: RecordSettings,
    /// Whether every agent requires its token.
    pub(crate) always_secure: bool,
    /// What is open to sandboxes, and how much they may use.
    pub(crate) egress: EgressSettings,
    /// Issuers of certificates that are trusted on intercepted connections.
    pub(crate) egress_ca_file: Option<PathBuf>,
    /// Files with the certificates of issuers that sandboxes trust.
    pub(crate) egress_ca_files: Vec<PathBuf>,
    /// The documentation endpoint.
    pub(crate) mcp: McpSettings,
    /// The dashboard.
    pub(crate) dashboard: DashboardSettings,
    /// Repositories that sandboxes get, except where their copies are kept.
    pub(crate) repositories: RepositorySettings,
    /// Builds of templates, except where uploaded files are kept.
    pub(crate) builds: BuildSettings,
    /// Issuers of certificates that registries of images may have, by registry.
    pub(crate) registry_ca_files: BTreeMap<String, PathBuf>,
    /// The bucket of layers and uploaded files, if there is one.
    pub(crate) blobs: Option<BlobConfig>,
    /// Sandboxes that are started in advance.
    pub(crate) pool: PoolSettings,
    /// Paused sandboxes.
    pub(crate) pause: PauseSettings,
    /// Webhooks of teams, except for the issuers in the file below.
    pub(crate) webhooks: WebhookSettings,
    /// Issuers of certificates that are trusted of receivers of events.
    pub(crate) webhooks_ca_file: Option<PathBuf>,
    /// Where traces are sent, if they are.
    pub(crate) telemetry: Option<TelemetryConfig>,
    /// Unknown environment variables with our prefix, for a warning.
    pub(crate) unknown_env: Vec<String>,
}

impl Config {
    /// The defaults of all keys, as far as they do not depend on each other, with this data directory.
    pub(super) fn new(data_dir: PathBuf) -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 3000)),
            metrics_listen: None,
            nodes_listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 3100)),
            nodes_address: None,
            nodes_servers: Vec::new(),
            domain: None,
            https: Https::Off,
            log_format: LogFormat::Text,
            log_level: None,
            database_url: DatabaseUrl::within(&data_dir),
            providers: Providers::default(),
            signing: SigningSettings::default(),
            master_key: KeySource::DataDir,
            node: NodeSettings::new(data_dir.clone()),
            resources: Resources::default(),
            limits: Limits::default(),
            capacity: CapacitySettings::default(),
            connections: ConnectionLimits::default(),
            records: RecordSettings::default(),
            always_secure: false,
            egress: EgressSettings::default(),
            egress_ca_file: None,
            egress_ca_files: Vec::new(),
            mcp: McpSettings::default(),
            dashboard: DashboardSettings::default(),
            repositories: RepositorySettings::default(),
            builds: BuildSettings::default(),
            registry_ca_files: BTreeMap::new(),
            blobs: None,
            pool: PoolSettings {
                base: pool_base(memory_of_host()),
                ..PoolSettings::default()
            },
            pause: PauseSettings {
                checkpoints_at_shutdown_within: CHECKPOINTS_AT_SHUTDOWN_WITHIN,
                copies: true,
                ..PauseSettings::default()
            },
            webhooks: WebhookSettings::default(),
            webhooks_ca_file: None,
            telemetry: None,
            unknown_env: Vec::new(),
            data_dir,
        }
    }

    /// Whether the database is in the data directory, and with it no other platform's.
    pub(crate) fn has_own_database(&self) -> bool {
        self.database_url == DatabaseUrl::within(&self.data_dir)
    }

    /// The domain of sandboxes once the port of the listener is known.
    pub(crate) fn domain_at(&self, port: u16) -> String {
        self.domain
            .clone()
            .unwrap_or_else(|| format!("sandbox.localhost:{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_sandboxes_are_kept_ready_where_there_is_memory_for_it() {
        let wanted = [
            (1 << 30, 0),
            (POOL_HOST_BYTES - 1, 0),
            (3 << 30, 4),
            (64 << 30, 4),
            (u64::MAX, 4),
        ];
        for (host_bytes, base) in wanted {
            assert_eq!(pool_base(host_bytes), base, "{host_bytes}");
        }
    }

    #[test]
    fn the_memory_of_the_host_is_that_of_the_kernel() {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find(|line| line.starts_with("MemTotal:")).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(memory_of_host(), kib << 10);
    }
}
