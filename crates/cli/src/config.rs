//! Configuration: resolves flags, environment, file and defaults into a validated [`Config`].
//!
//! Precedence: flag, then environment, then file, then default. Every error names the key and where its value came
//! from, and no error shows the value of a key that may hold a secret. An environment variable that is set but empty
//! counts as unset, because container tools pass on variables that nobody filled.
//!
//! Invariant: this is the only module of the platform that reads the environment.

pub(crate) mod blobs;
pub(crate) mod builds;
mod database_url;
pub(crate) mod egress;
mod error;
mod file;
mod https;
mod injection;
pub(crate) mod keys;
mod mcp;
mod pool;
mod repositories;
mod sources;
mod suggest;
mod values;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use model::injection::provider::Providers;
use model::resources::{OPEN_FILES_MAX, Resources};
use node::NodeSettings;
use proxy::egress::EgressSettings;
use runtime::settings::DriverSettings;
use server::settings::{
    BUCKET_MAX, BuildSettings, CapacitySettings, ConnectionLimits, Limits, McpSettings, PauseSettings, PoolSettings,
    RecordSettings, RepositorySettings, SigningSettings, TeamLimits,
};

use self::blobs::BlobConfig;
use self::database_url::{DatabaseUrl, database};
pub(crate) use self::error::ConfigError;
use self::error::Source;
use self::file::File;
use self::keys::Key;
use self::sources::Given;
pub(crate) use self::sources::{Sources, environment};
pub(crate) use self::suggest::similar_variable;
pub(crate) use self::values::LogFormat;
use self::values::{boolean, directory, disk_reserve, domain, integer, limit, listen, log_format, log_level, networks};
use crate::master_key::{KeySource, MASTER_ENV};
use crate::tls::Https;

/// Fewest files that processes of sandboxes may be limited to: fewer than that are not enough for ordinary programs.
const OPEN_FILES_MIN: u32 = 64;

/// The configuration, validated.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The data directory, absolute.
    pub(crate) data_dir: PathBuf,
    /// Address to listen on; port 0 selects a free port.
    pub(crate) listen: SocketAddr,
    /// Address on which metrics are served, if at all; port 0 selects a free port.
    pub(crate) metrics_listen: Option<SocketAddr>,
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
    /// Unknown environment variables with our prefix, for a warning.
    pub(crate) unknown_env: Vec<String>,
}

impl Config {
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

/// Variables with our prefix that are no configuration keys: the first is the master key itself, the credentials file
/// defines the next two, one is read before any key, and the last is how our own test suites name the program under test.
const OTHER_ENV: [&str; 6] = [
    MASTER_ENV,
    blobs::KEY_ENV,
    "RINGFENCE_ACCESS_KEY",
    "RINGFENCE_SECRET_KEY",
    "RINGFENCE_CONFIG",
    "RINGFENCE_BIN",
];

impl Sources {
    /// Resolves every key.
    ///
    /// # Errors
    /// At the first invalid value.
    pub(crate) fn resolve(&self) -> Result<Config, ConfigError> {
        let file = self
            .file_path()
            .map(|path| File::read(&path))
            .transpose()?
            .unwrap_or_default();
        let given = Given { sources: self, file };
        let data_dir = given.parse(keys::DATA_DIR, directory)?;
        let data_dir = data_dir.unwrap_or_else(|| PathBuf::from(keys::DATA_DIR.default));
        let database_url = given.parse(keys::DATABASE_URL, |text| database(text).map_err(str::to_owned))?;
        let base = Resources::default();
        let records = RecordSettings::default();
        let number = |key, min, max, default| Ok(given.parse(key, |text| integer(text, min, max))?.unwrap_or(default));
        let resources = Resources {
            cpu_count: number(keys::SANDBOX_CPU_COUNT, 1, 1024, base.cpu_count)?,
            memory_mb: number(keys::SANDBOX_MEMORY_MB, 64, u32::MAX, base.memory_mb)?,
            disk_mb: number(keys::SANDBOX_DISK_MB, 64, u32::MAX, base.disk_mb)?,
            pids: number(keys::SANDBOX_PIDS, 32, u32::MAX, base.pids)?,
        };
        let reserve_disks = given.parse(keys::SANDBOX_DISK_RESERVE, disk_reserve)?.unwrap_or(false);
        let node = NodeSettings::new(data_dir.clone());
        let driver = node.driver;
        let node = NodeSettings {
            isolation: given
                .parse(keys::SANDBOX_ISOLATION, str::parse)?
                .unwrap_or(node.isolation),
            driver: DriverSettings {
                launchers: given
                    .parse(keys::LAUNCHERS, |text| integer(text, 1, 64))?
                    .map_or(driver.launchers, |count| count as usize),
                unlimited: given.parse(keys::UNLIMITED, boolean)?.unwrap_or(driver.unlimited),
                disks_mb: vec![resources.disk_mb],
                reserve_disks,
                open_files: number(
                    keys::SANDBOX_OPEN_FILES,
                    OPEN_FILES_MIN,
                    OPEN_FILES_MAX,
                    driver.open_files,
                )?,
                base: given.parse(keys::BASE_TEMPLATE, boolean)?.unwrap_or(driver.base),
                criu: given.criu()?,
                page_out: given.page_out()?,
                ..driver
            },
            process_rate: given
                .parse(keys::SANDBOX_PROCESSES_PER_SECOND, |text| limit(text, 1_000_000))?
                .unwrap_or(node.process_rate),
            ..node
        };
        Ok(Config {
            listen: given
                .parse(keys::LISTEN, listen)?
                .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 3000))),
            metrics_listen: given.parse(keys::METRICS_LISTEN, listen)?,
            domain: given.parse(keys::DOMAIN, domain)?,
            https: given.https()?,
            log_format: given.parse(keys::LOG_FORMAT, log_format)?.unwrap_or(LogFormat::Text),
            log_level: given.parse(keys::LOG_LEVEL, log_level)?,
            database_url: database_url.unwrap_or_else(|| DatabaseUrl::within(&data_dir)),
            data_dir,
            providers: given.providers()?,
            signing: given.signing()?,
            master_key: given.master_key()?,
            node,
            resources,
            limits: given.limits()?,
            connections: given.connections()?,
            mcp: given.mcp()?,
            repositories: given.repositories()?,
            builds: given.builds()?,
            registry_ca_files: given.registry_ca_files()?,
            blobs: given.blobs()?,
            pool: given.pool()?,
            pause: given.pause()?,
            capacity: given.capacity(reserve_disks.then_some(resources.disk_mb))?,
            records: RecordSettings {
                log_retention_s: number(keys::LOGS_RETENTION_S, 0, u32::MAX, records.log_retention_s)?,
                log_entries: number(keys::LOGS_MAX_ENTRIES, 1, u32::MAX, records.log_entries)?,
                log_bytes: given
                    .parse(keys::LOGS_MAX_KB, |text| integer(text, 16, u32::MAX))?
                    .map_or(records.log_bytes, |kb| u64::from(kb) * 1024),
                log_total_bytes: given
                    .parse(keys::LOGS_MAX_TOTAL_MB, |text| integer(text, 1, u32::MAX))?
                    .map_or(records.log_total_bytes, |mb| u64::from(mb) << 20),
                metric_total_bytes: given
                    .parse(keys::METRICS_MAX_TOTAL_MB, |text| integer(text, 1, u32::MAX))?
                    .map_or(records.metric_total_bytes, |mb| u64::from(mb) << 20),
                metric_retention_s: number(keys::METRICS_RETENTION_S, 0, u32::MAX, records.metric_retention_s)?,
                ..records
            },
            always_secure: given.parse(keys::SANDBOX_ALWAYS_SECURE, boolean)?.unwrap_or(false),
            egress: given.egress()?,
            egress_ca_file: given.parse(keys::EGRESS_CA_FILE, values::file)?,
            egress_ca_files: given.parse(keys::EGRESS_CA_FILES, egress::files)?.unwrap_or_default(),
            unknown_env: self
                .env
                .keys()
                .filter(|name| name.starts_with("RINGFENCE_"))
                .filter(|name| !OTHER_ENV.contains(&name.as_str()) && !keys::ALL.iter().any(|key| key.env() == **name))
                .cloned()
                .collect(),
        })
    }
}

impl Given<'_> {
    /// The limits of teams: those for all teams, and those of the tables of single teams.
    fn limits(&self) -> Result<Limits, ConfigError> {
        let default = team_limits(TeamLimits::default(), |key, parse| self.parse(key, parse))?;
        let teams = self.file.teams.iter().map(|(team, values)| {
            let own = team_limits(default, |key, parse| {
                let Some(text) = values.get(key.name) else {
                    return Ok(None);
                };
                parse(text).map(Some).map_err(|why| ConfigError::Value {
                    key: format!("{}.{team}.{}", keys::TEAM, key.name),
                    why,
                    source_of: Source::File(self.file.path.clone()),
                })
            });
            let mut own = own?;
            if let Some(text) = values.get(keys::EGRESS_DEFAULT.name) {
                let parsed = egress::is_allow(text).map_err(|why| ConfigError::Value {
                    key: format!("{}.{team}.{}", keys::TEAM, keys::EGRESS_DEFAULT.name),
                    why,
                    source_of: Source::File(self.file.path.clone()),
                });
                own.egress_default_allow = Some(parsed?);
            }
            Ok((team.clone(), own))
        });
        Ok(Limits {
            default,
            teams: teams.collect::<Result<_, ConfigError>>()?,
        })
    }

    fn connections(&self) -> Result<ConnectionLimits, ConfigError> {
        let default = ConnectionLimits::default();
        let count = |key, default: usize| {
            let given = self.parse(key, |text| integer(text, 16, 1 << 20))?;
            Ok(given.map_or(default, |count| count as usize))
        };
        Ok(ConnectionLimits {
            total: count(keys::SERVER_CONNECTIONS, default.total)?,
            per_peer: count(keys::SERVER_CONNECTIONS_PER_PEER, default.per_peer)?,
            per_sandbox: count(keys::SERVER_CONNECTIONS_PER_SANDBOX, default.per_sandbox)?,
            shared_peers: self.parse(keys::SERVER_SHARED_PEERS, networks)?.unwrap_or_default(),
            ..default
        })
    }
}

/// A number of a limit, or none for no limit.
type ParseLimit = fn(&str) -> Result<Option<u32>, String>;

/// The keys of [`keys::PER_TEAM`] as `value` has them, and as `base` where it has none.
fn team_limits(
    base: TeamLimits,
    value: impl Fn(&'static Key, ParseLimit) -> Result<Option<Option<u32>>, ConfigError>,
) -> Result<TeamLimits, ConfigError> {
    let any: ParseLimit = |text| limit(text, u32::MAX);
    let rate: ParseLimit = |text| limit(text, BUCKET_MAX);
    let size: ParseLimit = |text| integer(text, 0, u32::MAX).map(Some);
    let lifetime: ParseLimit = |text| integer(text, 1, u32::MAX).map(Some);
    let lifetime_s = value(keys::SANDBOX_MAX_LIFETIME_S, lifetime)?.flatten();
    Ok(TeamLimits {
        max_lifetime_s: lifetime_s.unwrap_or(base.max_lifetime_s),
        sandboxes: value(keys::LIMITS_SANDBOXES, any)?.unwrap_or(base.sandboxes),
        cpu_count: value(keys::LIMITS_CPU_COUNT, any)?.unwrap_or(base.cpu_count),
        memory_mb: value(keys::LIMITS_MEMORY_MB, any)?.unwrap_or(base.memory_mb),
        creates_per_minute: value(keys::LIMITS_CREATES_PER_MINUTE, rate)?.unwrap_or(base.creates_per_minute),
        requests_per_second: value(keys::LIMITS_REQUESTS_PER_SECOND, rate)?.unwrap_or(base.requests_per_second),
        egress_default_allow: base.egress_default_allow,
        paused_sandboxes: value(keys::LIMITS_PAUSED_SANDBOXES, size)?
            .flatten()
            .unwrap_or(base.paused_sandboxes),
        paused_disk_mb: value(keys::LIMITS_PAUSED_DISK_MB, any)?.unwrap_or(base.paused_disk_mb),
        builds: value(keys::LIMITS_BUILDS, size)?.flatten().unwrap_or(base.builds),
        template_cpu_count: value(keys::LIMITS_TEMPLATE_CPU_COUNT, size)?
            .flatten()
            .unwrap_or(base.template_cpu_count),
        template_memory_mb: value(keys::LIMITS_TEMPLATE_MEMORY_MB, size)?
            .flatten()
            .unwrap_or(base.template_memory_mb),
        template_disk_mb: value(keys::LIMITS_TEMPLATE_DISK_MB, any)?.unwrap_or(base.template_disk_mb),
    })
}
