//! Configuration: resolves flags, environment, file and defaults into a validated [`Config`].
//!
//! Precedence: flag, then environment, then file, then default. Every error names the key and where its value came
//! from, and no error shows the value of a key that may hold a secret. An environment variable that is set but empty
//! counts as unset, because container tools pass on variables that nobody filled.
//!
//! Invariant: this is the only module of the platform that reads the environment.

pub(crate) mod blobs;
pub(crate) mod builds;
pub(crate) mod egress;
mod https;
mod injection;
pub(crate) mod keys;
mod mcp;
mod pool;
mod repositories;
mod suggest;
mod values;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use model::injection::provider::Providers;
use model::resources::{OPEN_FILES, OPEN_FILES_MAX, Resources};
use proxy::egress::EgressSettings;
use server::settings::{
    BUCKET_MAX, BuildSettings, CapacitySettings, ConnectionLimits, Limits, McpSettings, PauseSettings, PoolSettings,
    RecordSettings, RepositorySettings, SigningSettings, TeamLimits,
};

use self::blobs::BlobConfig;
use self::keys::{Key, Kind};
pub(crate) use self::suggest::similar_variable;
use self::suggest::{similar, unquoted};
use self::values::{
    boolean, database, directory, disk_reserve, domain, file, integer, limit, listen, log_format, log_level, networks,
};
use crate::master_key::{KeySource, MASTER_ENV};
use crate::tls::Https;

/// An error in the configuration. The operator has to correct it, so the exit code is that of a usage error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// An invalid value.
    #[error("{key}: {why} ({source_of})")]
    Value {
        /// The key, with the team's name where it is a team's.
        key: String,
        /// What is wrong with the value.
        why: String,
        /// Where the value came from.
        source_of: Source,
    },
    /// A key that requires another one.
    #[error("{key}: requires {other}")]
    Requires {
        /// The key.
        key: &'static str,
        /// The key that is not set.
        other: &'static str,
    },
    /// A key that excludes another one.
    #[error("{key}: cannot be set together with {other}")]
    Excludes {
        /// The key.
        key: &'static str,
        /// The other key that is set.
        other: &'static str,
    },
    /// A key that does not exist.
    #[error("unknown key {name} in {file}{}", .meant.map(|key| format!("; did you mean {key}?")).unwrap_or_default())]
    Unknown {
        /// The key as written.
        name: String,
        /// The file.
        file: String,
        /// A key with a similar name.
        meant: Option<&'static str>,
    },
    /// A configuration file that cannot be read.
    #[error("configuration file {file}: {why}")]
    File {
        /// The file.
        file: String,
        /// What the system or the parser said.
        why: String,
    },
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A flag.
    Flag(&'static str),
    /// An environment variable.
    Env(String),
    /// The configuration file.
    File(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "from the flag {flag}"),
            Self::Env(name) => write!(f, "from the environment variable {name}"),
            Self::File(path) => write!(f, "from {path}"),
        }
    }
}

/// How many processes a sandbox may create per second by default.
const PROCESS_RATE: u32 = 2000;
/// Fewest files that processes of sandboxes may be limited to: fewer than that are not enough for ordinary programs.
const OPEN_FILES_MIN: u32 = 64;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// The address of the database. Its `Debug` shows the kind only: the address may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct DatabaseUrl(String);

impl DatabaseUrl {
    /// The database in a data directory.
    fn within(data_dir: &Path) -> Self {
        Self(format!("sqlite:{}/ringfence.db", data_dir.display()))
    }

    /// The file, if it is one.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        let path = self.0.strip_prefix("sqlite:")?;
        Some(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))
    }

    /// The address, to be passed to the store only.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.0.split(':').next().unwrap_or_default();
        write!(f, "DatabaseUrl({kind}:…)")
    }
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
    /// Number of launcher processes, if configured.
    pub(crate) launchers: Option<usize>,
    /// Whether `base` is offered.
    pub(crate) base_template: bool,
    /// The resources of a sandbox of `base`.
    pub(crate) resources: Resources,
    /// The limits of teams.
    pub(crate) limits: Limits,
    /// Whether the whole disk of a sandbox is allocated at its start.
    pub(crate) reserve_disks: bool,
    /// How many files a process of a sandbox may have open, unless it asks for more.
    pub(crate) open_files: u32,
    /// How many processes a sandbox may create per second; none without a limit.
    pub(crate) process_rate: Option<u32>,
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
    /// The program that writes the processes of paused sandboxes to disk.
    pub(crate) criu: Option<PathBuf>,
    /// Whether the memory of sandboxes that are paused in memory is moved to swap.
    pub(crate) page_out: bool,
    /// Whether to run without a usable cgroup.
    pub(crate) unlimited: bool,
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

/// The environment, as far as it may configure anything: `RINGFENCE_*` and the two variables that `bench` reads.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub(crate) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| {
            (name.starts_with("RINGFENCE_") || name == "E2B_API_KEY" || name == "E2B_API_URL") && !value.is_empty()
        })
        .collect()
}

/// The unresolved values, by source.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// Flags that were given: the key's name and the value.
    pub(crate) flags: Vec<(&'static Key, String)>,
    /// The file named by `--config`.
    pub(crate) config: Option<PathBuf>,
    /// The environment, see [`environment`].
    pub(crate) env: BTreeMap<String, String>,
}

impl Sources {
    /// The configuration file, if there is one.
    pub(crate) fn file_path(&self) -> Option<PathBuf> {
        let of_env = || self.env.get("RINGFENCE_CONFIG").map(PathBuf::from);
        self.config.clone().or_else(of_env)
    }

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
            launchers: given
                .parse(keys::LAUNCHERS, |text| integer(text, 1, 64))?
                .map(|count| count as usize),
            base_template: given.parse(keys::BASE_TEMPLATE, boolean)?.unwrap_or(true),
            resources,
            reserve_disks,
            open_files: number(keys::SANDBOX_OPEN_FILES, OPEN_FILES_MIN, OPEN_FILES_MAX, OPEN_FILES)?,
            process_rate: given
                .parse(keys::SANDBOX_PROCESSES_PER_SECOND, |text| limit(text, 1_000_000))?
                .unwrap_or(Some(PROCESS_RATE)),
            limits: given.limits()?,
            connections: given.connections()?,
            mcp: given.mcp()?,
            repositories: given.repositories()?,
            builds: given.builds()?,
            registry_ca_files: given.registry_ca_files()?,
            blobs: given.blobs()?,
            pool: given.pool()?,
            pause: given.pause()?,
            criu: given.criu()?,
            page_out: given.page_out()?,
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
            unlimited: given.parse(keys::UNLIMITED, boolean)?.unwrap_or(false),
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

/// The values of one table of the file and the tables in it, flattened: `[sandbox] pids` is `sandbox.pids`.
type Values = BTreeMap<&'static str, String>;

/// The configuration file.
#[derive(Default)]
struct File {
    path: String,
    values: Values,
    /// The tables of providers of injections, by their names.
    providers: BTreeMap<String, toml::Table>,
    /// The tables of single teams, by their names.
    teams: BTreeMap<String, Values>,
}

impl File {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
            file: file.clone(),
            why: error.to_string(),
        })?;
        Self::parse(file, &text)
    }

    fn parse(path: String, text: &str) -> Result<Self, ConfigError> {
        let table: toml::Table = toml::from_str(text).map_err(|error| {
            // Only the message and the line: the parser would quote the line, and it may hold a password.
            let why = match error.span() {
                None => error.message().to_owned(),
                Some(span) => {
                    let before = text.as_bytes().iter().take(span.start);
                    let line = before.filter(|byte| **byte == b'\n').count() + 1;
                    let why = unquoted(text, line).unwrap_or_else(|| error.message().to_owned());
                    format!("line {line}: {why}")
                }
            };
            ConfigError::File {
                file: path.clone(),
                why,
            }
        })?;
        let mut file = Self {
            path,
            ..Self::default()
        };
        let mut table = table;
        file.providers = injection::take_providers(&file, &mut table)?;
        let teams = match table.remove(keys::TEAM) {
            None => toml::Table::new(),
            Some(toml::Value::Table(teams)) => teams,
            Some(_) => return Err(file.unknown(keys::TEAM.to_owned())),
        };
        for (team, value) in teams {
            let at = format!("{}.{team}", keys::TEAM);
            let toml::Value::Table(own) = value else {
                return Err(file.unknown(at));
            };
            let mut values = Values::new();
            file.flatten(keys::PER_TEAM, &format!("{at}."), "", &own, &mut values)?;
            file.teams.insert(team, values);
        }
        let mut values = Values::new();
        file.flatten(keys::ALL, "", "", &table, &mut values)?;
        file.values = values;
        Ok(file)
    }

    /// Takes the values of `known` keys out of a table. `at` is where the table with them begins, `prefix` where in
    /// that one `table` is.
    fn flatten(
        &self,
        known: &[&'static Key],
        at: &str,
        prefix: &str,
        table: &toml::Table,
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        for (word, value) in table {
            let name = format!("{prefix}{word}");
            let is_table = known.iter().any(|key| key.name.starts_with(&format!("{name}.")));
            match (known.iter().find(|key| key.name == name), value) {
                (None, toml::Value::Table(inner)) if is_table => {
                    self.flatten(known, at, &format!("{name}."), inner, values)?;
                }
                (None, _) => return Err(self.unknown(format!("{at}{name}"))),
                (Some(key), value) => {
                    let text = scalar(key.kind, value).ok_or_else(|| ConfigError::Value {
                        key: format!("{at}{name}"),
                        why: format!("must be {}", key.kind.describe()),
                        source_of: Source::File(self.path.clone()),
                    })?;
                    values.insert(key.name, text);
                }
            }
        }
        Ok(())
    }

    fn unknown(&self, name: String) -> ConfigError {
        ConfigError::Unknown {
            meant: similar(&name),
            name,
            file: self.path.clone(),
        }
    }
}

fn scalar(kind: Kind, value: &toml::Value) -> Option<String> {
    match (kind, value) {
        (Kind::Text, toml::Value::String(text)) => Some(text.clone()),
        (Kind::Integer, toml::Value::Integer(number)) => Some(number.to_string()),
        (Kind::Boolean, toml::Value::Boolean(flag)) => Some(flag.to_string()),
        (Kind::Hosts, table @ toml::Value::Table(_)) => egress::hosts_text(table),
        _ => None,
    }
}

/// All sources together.
struct Given<'a> {
    sources: &'a Sources,
    file: File,
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

    /// The value of a key and its source, of those that have it the one with the highest precedence.
    fn source(&self, key: &'static Key) -> Option<(&str, Source)> {
        let flag = self.sources.flags.iter().find(|(given, _)| given.name == key.name);
        if let Some((key, text)) = flag {
            Some((text, Source::Flag(key.flag.unwrap_or(key.name))))
        } else if let Some(text) = self.sources.env.get(&key.env()) {
            Some((text, Source::Env(key.env())))
        } else {
            let text = self.file.values.get(key.name)?;
            Some((text, Source::File(self.file.path.clone())))
        }
    }

    /// The parsed value of a key from the source with the highest precedence; none if it is not set.
    fn parse<T>(&self, key: &'static Key, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, ConfigError> {
        let Some((text, source_of)) = self.source(key) else {
            return Ok(None);
        };
        parse(text).map(Some).map_err(|why| ConfigError::Value {
            key: key.name.to_owned(),
            why,
            source_of,
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
