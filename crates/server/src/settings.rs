//! Settings of a server, chosen by the operator.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blobs::Blobs;
use link::{Address, Authority};
use model::capacity::Bounds;
use model::injection::provider::Providers;
use model::limits;
use model::network::Cidr;
use model::resources::Resources;
use proxy::egress::EgressSettings;
use rustls::pki_types::CertificateDer;
use secrecy::SecretBox;
use store::records::DeliveryLimits;
use tokio::runtime::Handle;

use crate::chance::Chance;
use crate::clock::Clock;
pub use crate::peers::Network;
use crate::seal::Sealer;
pub use crate::telemetry::settings::{Endpoint, TelemetrySettings, parse_headers};
use crate::tls::Tls;

/// Maximum of a rate limit: above it the interval would be shorter than the resolution of the clock.
pub const BUCKET_MAX: u32 = 1_000_000;

/// Settings of a server. The crate itself reads no configuration and no environment variables.
#[derive(Debug)]
pub struct ServerSettings {
    /// Domain of sandbox traffic as returned to clients, with the port unless it is the default of the scheme, e.g.
    /// `sandbox.localhost:3000`.
    pub domain: String,
    /// Secret that every token of a sandbox is derived from. It must stay the same across restarts, or clients of
    /// adopted sandboxes lose access.
    pub token_seed: SecretBox<[u8; 32]>,
    /// What teams may use.
    pub limits: Limits,
    /// What must remain free on the host.
    pub capacity: CapacitySettings,
    /// Every agent requires its token, even where a client of `POST /sandboxes` did not ask for that.
    pub always_secure: bool,
    /// Limits of a sandbox that the template's build does not set (the number of processes).
    pub resources: Resources,
    /// Logs and metrics: how much is kept, and for how long.
    pub records: RecordSettings,
    /// The clock of the server.
    pub clock: Clock,
    /// Decides between nodes that are alike.
    pub chance: Chance,
    /// How many connections clients may have.
    pub connections: ConnectionLimits,
    /// Runtimes on which connections are served, best with one thread each; the runtime of the caller if there are none.
    pub traffic: Vec<Handle>,
    /// The documentation endpoint.
    pub mcp: McpSettings,
    /// The dashboard.
    pub dashboard: DashboardSettings,
    /// Certificate for HTTPS on the same port as HTTP; HTTP only if `None`.
    pub tls: Option<Tls>,
    /// Encrypts secrets of clients for the database. Its key must stay the same across restarts, or sandboxes with such
    /// secrets lose their network.
    pub sealer: Sealer,
    /// The providers that injections can be of.
    pub providers: Providers,
    /// Signed requests.
    pub signing: SigningSettings,
    /// The rules for connections from sandboxes that the nodes apply, by which requests are refused early.
    pub egress: EgressSettings,
    /// Repositories that sandboxes get.
    pub repositories: RepositorySettings,
    /// Builds of templates.
    pub builds: BuildSettings,
    /// Sandboxes that are started in advance.
    pub pool: PoolSettings,
    /// Where layers and uploaded files are kept besides the node; none to keep them on the node only.
    pub blobs: Option<BlobSettings>,
    /// Paused sandboxes.
    pub pause: PauseSettings,
    /// Webhooks of teams.
    pub webhooks: WebhookSettings,
    /// Traces and the export of metrics; none if nothing is exported.
    pub telemetry: Option<TelemetrySettings>,
    /// How it works with other servers on its database; none for a platform that never does.
    pub servers: Option<ServersSettings>,
}

/// How a server works with other servers on its database.
#[derive(Debug, Clone)]
pub struct ServersSettings {
    /// The name of its host.
    pub name: String,
    /// Where the others reach its port of nodes; none if it works alone.
    pub address: Option<Address>,
    /// Whether several servers can work on the database: the file of SQLite belongs to one.
    pub can_share: bool,
    /// Issues the certificates that servers show to each other. All have the same.
    pub authority: Arc<Authority>,
    /// The time, for certificates.
    pub now: fn() -> SystemTime,
}

/// Settings of the webhooks of teams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookSettings {
    /// Maximum number of webhooks of a team; with 0 there are none.
    pub per_team: u32,
    /// Networks in which receivers may be although they are not public.
    pub allow_private: Vec<Cidr>,
    /// Hosts of receivers that may have any address.
    pub allow_hosts: Vec<String>,
    /// Networks in which no receiver may be. They take precedence over [`Self::allow_private`].
    pub deny: Vec<Cidr>,
    /// Whether URLs may begin with `http://`.
    pub allow_http: bool,
    /// Issuers of certificates of receivers that are trusted beside those of the host.
    pub authorities: Vec<CertificateDer<'static>>,
    /// The pause before the second attempt to send an event. The following ones are longer.
    pub retry: Duration,
}

impl Default for WebhookSettings {
    fn default() -> Self {
        Self {
            per_team: 10,
            allow_private: Vec::new(),
            allow_hosts: Vec::new(),
            deny: Vec::new(),
            allow_http: false,
            authorities: Vec::new(),
            retry: Duration::from_secs(10),
        }
    }
}

/// Settings of paused sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PauseSettings {
    /// How long a sandbox may be paused before it is ended, in seconds; none for any time.
    pub retention_s: Option<u32>,
    /// Whether running sandboxes are paused when the server is stopped, and kept on disk like those that are paused in memory.
    pub at_shutdown: bool,
    /// How long processes are written to disk then; of sandboxes for which it is too short, the files are kept.
    pub checkpoints_at_shutdown_within: Duration,
    /// Whether the node is asked to write the processes of paused sandboxes to disk. What it cannot write stays in memory.
    pub processes_on_disk: bool,
    /// When a pause is answered that writes processes to disk.
    pub answer: PauseAnswer,
    /// Whether what is paused on disk is copied to the blob store, if there is one, so that other nodes can go on with it.
    pub copies: bool,
    /// How much one copy sends per second at most, in MiB; none for no limit.
    pub copy_mib_per_s: Option<u32>,
}

/// When a pause is answered that writes processes to disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PauseAnswer {
    /// When they are on disk, and what is kept survives a power cut.
    #[default]
    Durable,
    /// When they are stopped. They are written afterwards, and are in memory until then.
    Frozen,
}

/// Settings of the blob store.
#[derive(Debug, Clone)]
pub struct BlobSettings {
    /// The store.
    pub store: Arc<Blobs>,
    /// The name of the database, to which the objects must belong: see [`Blobs::claim`].
    pub owner: String,
    /// Maximum size of the layers on the node, in bytes; none for no limit.
    pub cache_bytes: Option<u64>,
    /// How long an object that nothing refers to is kept, in seconds. Longer than a build takes, where several nodes
    /// share the database.
    pub grace_s: u32,
}

impl ServerSettings {
    /// Settings with the platform's defaults for a domain, a seed and a sealer.
    #[must_use]
    pub fn new(domain: String, token_seed: SecretBox<[u8; 32]>, sealer: Sealer) -> Self {
        Self {
            domain,
            token_seed,
            limits: Limits::default(),
            capacity: CapacitySettings::default(),
            always_secure: false,
            resources: Resources::default(),
            records: RecordSettings::default(),
            clock: Clock::system(),
            chance: Chance::system(),
            connections: ConnectionLimits::default(),
            traffic: Vec::new(),
            mcp: McpSettings::default(),
            dashboard: DashboardSettings::default(),
            tls: None,
            sealer,
            providers: Providers::default(),
            signing: SigningSettings::default(),
            egress: EgressSettings::default(),
            repositories: RepositorySettings::default(),
            builds: BuildSettings::default(),
            pool: PoolSettings::default(),
            blobs: None,
            pause: PauseSettings::default(),
            webhooks: WebhookSettings::default(),
            telemetry: None,
            servers: None,
        }
    }
}

/// Settings of the warm pool: sandboxes that are started in advance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// How many sandboxes of `base` are kept ready.
    pub base: u32,
    /// How many sandboxes of each template with a start command are kept ready while it is used.
    pub per_template: u32,
    /// Maximum number of sandboxes in the pool.
    pub total: u32,
    /// Maximum memory of all sandboxes in the pool, as measured, in MiB.
    pub memory_mb: u32,
    /// Interval between checks for what is too old or not needed any more.
    pub check_interval: Duration,
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self {
            base: 0,
            per_template: 1,
            total: 16,
            memory_mb: 2048,
            check_interval: Duration::from_secs(2),
        }
    }
}

/// Settings of builds of templates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildSettings {
    /// Where uploaded files are kept; none to keep none, so that no build can copy any.
    pub directory: Option<PathBuf>,
    /// How many builds run at the same time on this node. Others wait for their turn.
    pub concurrent: u32,
    /// Maximum size of one uploaded archive, in bytes.
    pub file_bytes: u64,
    /// Maximum size of all uploaded archives of a team, in bytes.
    pub team_files_bytes: u64,
    /// How long an upload may send nothing. It holds a connection, and space of its team.
    pub upload_stall: Duration,
    /// How long an uploaded archive is kept after its last use, in seconds.
    pub file_age_s: u32,
    /// How long a layer that no build needs any more is kept for later builds, after its last use, in seconds.
    pub cache_age_s: u32,
    /// Approximate maximum size of all layers that are kept for later builds, in bytes.
    pub cache_bytes: u64,
    /// Interval between removals of what is not used any more, in seconds.
    pub collect_interval_s: u32,
    /// Addresses that images of registries are fetched from instead, by the host of the registry.
    pub registry_mirrors: BTreeMap<String, String>,
    /// Registries, `host` or `host:port`, that are reached without TLS.
    pub insecure_registries: Vec<String>,
    /// Certificates in PEM that are trusted besides those of the system, by registry, `host` or `host:port`.
    pub registry_authorities: BTreeMap<String, String>,
}

impl Default for BuildSettings {
    fn default() -> Self {
        Self {
            directory: None,
            concurrent: 2,
            file_bytes: 2 << 30,
            team_files_bytes: 20 << 30,
            upload_stall: Duration::from_secs(60),
            file_age_s: 7 * 24 * 3600,
            cache_age_s: 7 * 24 * 3600,
            cache_bytes: 20 << 30,
            collect_interval_s: 600,
            registry_mirrors: BTreeMap::new(),
            insecure_registries: Vec::new(),
            registry_authorities: BTreeMap::new(),
        }
    }
}

/// Settings of the repositories that sandboxes get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepositorySettings {
    /// Where copies are kept; none to keep none.
    pub directory: Option<PathBuf>,
    /// How long all repositories of a create request together may take, in seconds; at most [`Self::CLONE_TIMEOUT_MAX_S`].
    pub clone_timeout_s: u32,
    /// The age from which a copy that lacks something is replaced, in seconds.
    pub soft_age_s: u32,
    /// The age from which a copy is not used any more, in seconds.
    pub hard_age_s: u32,
    /// Maximum size of one copy, in bytes.
    pub bundle_bytes: u64,
    /// Maximum size of all copies of a team, in bytes.
    pub team_bytes: u64,
    /// Maximum size of all copies, in bytes.
    pub total_bytes: u64,
    /// Maximum number of copies.
    pub mirrors: usize,
}

impl RepositorySettings {
    /// Longest time limit for repositories, in seconds: clients give up after 60 s.
    pub const CLONE_TIMEOUT_MAX_S: u32 = 50;
}

impl Default for RepositorySettings {
    fn default() -> Self {
        Self {
            directory: None,
            clone_timeout_s: 45,
            soft_age_s: 300,
            hard_age_s: 24 * 3600,
            bundle_bytes: 512 << 20,
            team_bytes: 2 << 30,
            total_bytes: 8 << 30,
            mirrors: 1000,
        }
    }
}

/// Settings of signed requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SigningSettings {
    /// The words of the header `Authorization` that announce a signature, without regard to case.
    pub schemes: Vec<String>,
    /// Whether the signature must cover a date, so that no request can be replayed after 15 minutes.
    pub require_date: bool,
    /// Whether operations on injection rules require a signature; an API key is not enough then.
    pub required_for_rules: bool,
}

impl Default for SigningSettings {
    fn default() -> Self {
        Self {
            schemes: ["Ringfence", "Qiniu", "Sufy"].map(str::to_owned).into(),
            require_date: false,
            required_for_rules: false,
        }
    }
}

/// Settings of the documentation endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpSettings {
    /// Its path, which ends with `/mcp`, so that it is not that of an operation of the API.
    pub path: String,
    /// The suffix of the names of its tools, after an underscore.
    pub suffix: String,
    /// How long a command over all pages may take altogether, and wait for its turn: on a busy host what runs at the lowest
    /// priority gets little of the processors.
    pub command_wait: Duration,
}

impl Default for McpSettings {
    fn default() -> Self {
        Self {
            path: "/mcp".to_owned(),
            suffix: "svc".to_owned(),
            command_wait: Duration::from_secs(10),
        }
    }
}

/// Settings of the dashboard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DashboardSettings {
    /// Whether there is one.
    pub is_enabled: bool,
    /// Whether browsers on other machines may sign in over HTTP, which shows the session to whoever reads the traffic.
    pub allows_http: bool,
}

impl Default for DashboardSettings {
    fn default() -> Self {
        Self {
            is_enabled: true,
            allows_http: false,
        }
    }
}

/// Limits of connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections of all clients.
    pub total: usize,
    /// Connections of one peer: an IPv4 address, or an IPv6 /64.
    pub per_peer: usize,
    /// Connections to all sandboxes.
    pub into_sandboxes: usize,
    /// Connections to one sandbox.
    pub per_sandbox: usize,
    /// Addresses that many clients share, besides loopback; limits per peer do not apply to them.
    pub shared_peers: Vec<Network>,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            total: 8192,
            per_peer: 1024,
            into_sandboxes: 16_384,
            per_sandbox: 2048,
            shared_peers: Vec::new(),
        }
    }
}

/// What one team may use. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TeamLimits {
    /// Maximum lifetime of a sandbox from its start, in seconds.
    pub max_lifetime_s: u32,
    /// Maximum number of sandboxes at the same time.
    pub sandboxes: Option<u32>,
    /// Maximum number of cores of all its sandboxes together.
    pub cpu_count: Option<u32>,
    /// Maximum memory of all its sandboxes together, in MiB.
    pub memory_mb: Option<u32>,
    /// Create requests per minute, which is also the burst size; at most [`BUCKET_MAX`].
    pub creates_per_minute: Option<u32>,
    /// Requests to the API per second, which is also the burst size; at most [`BUCKET_MAX`].
    pub requests_per_second: Option<u32>,
    /// Whether public addresses that a policy does not mention are open; if none, the operator's default decides.
    pub egress_default_allow: Option<bool>,
    /// Maximum number of paused sandboxes.
    pub paused_sandboxes: u32,
    /// Space that its paused sandboxes may take on disks, in MiB. One is paused while they take less.
    pub paused_disk_mb: Option<u32>,
    /// Maximum number of builds of templates that have not ended.
    pub builds: u32,
    /// Maximum number of cores of the sandboxes of one template.
    pub template_cpu_count: u32,
    /// Maximum memory of the sandboxes of one template, in MiB.
    pub template_memory_mb: u32,
    /// Space that the layers of its templates and snapshots may take, in MiB. One is made while they take less.
    pub template_disk_mb: Option<u32>,
}

impl Default for TeamLimits {
    fn default() -> Self {
        Self {
            max_lifetime_s: limits::DEFAULT_MAX_LIFETIME_S,
            sandboxes: None,
            cpu_count: None,
            memory_mb: None,
            creates_per_minute: None,
            requests_per_second: None,
            egress_default_allow: None,
            paused_sandboxes: 100,
            paused_disk_mb: None,
            builds: 20,
            template_cpu_count: 8,
            template_memory_mb: 8192,
            template_disk_mb: None,
        }
    }
}

/// What teams may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limits of every team that is not in `teams`.
    pub default: TeamLimits,
    /// Limits of single teams, by name. They replace the default completely.
    pub teams: BTreeMap<String, TeamLimits>,
}

impl Limits {
    /// The longest maximum lifetime of any team, in seconds.
    #[must_use]
    pub fn longest_lifetime_s(&self) -> u32 {
        let teams = self.teams.values().map(|team| team.max_lifetime_s);
        teams.fold(self.default.max_lifetime_s, u32::max)
    }

    /// The limits of the team with that name.
    #[must_use]
    pub fn of(&self, name: &str) -> TeamLimits {
        self.teams.get(name).copied().unwrap_or(self.default)
    }
}

/// Settings of logs and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordSettings {
    /// How long the log of a sandbox is kept after its end, in seconds.
    pub log_retention_s: u32,
    /// Maximum number of entries in the log of one sandbox. The oldest are removed first.
    pub log_entries: u32,
    /// Approximate maximum size of the log of one sandbox, in bytes. The oldest entries are removed first.
    pub log_bytes: u64,
    /// Approximate maximum size of all logs together, in bytes. Logs of the sandboxes that ended first are removed
    /// first.
    pub log_total_bytes: u64,
    /// Approximate maximum size of all samples together, in bytes. The oldest are removed first.
    pub metric_total_bytes: u64,
    /// How long lifecycle events, attempts to send them and the usage of teams are kept, in seconds.
    pub event_retention_s: u32,
    /// Approximate maximum size of all lifecycle events together, in bytes. The oldest of the team with the most are removed
    /// first, and those of a team that has more than a quarter.
    pub event_total_bytes: u64,
    /// How many events may wait to be sent to webhooks.
    pub delivery_limits: DeliveryLimits,
    /// How long a sample is kept, in seconds.
    pub metric_retention_s: u32,
    /// Time between samples.
    pub metric_interval: Duration,
    /// How soon a new sandbox gets its first sample, as long as sampling is cheap.
    pub metric_first: Duration,
    /// Interval between purges.
    pub purge_interval: Duration,
    /// How long a reader waits for what is not written yet, before it reads what is stored.
    pub settle: Duration,
}

impl Default for RecordSettings {
    fn default() -> Self {
        Self {
            log_retention_s: limits::DEFAULT_LOG_RETENTION_S,
            log_entries: limits::DEFAULT_LOG_ENTRIES,
            log_bytes: 4 << 20,
            log_total_bytes: 1 << 30,
            metric_total_bytes: 1 << 30,
            event_retention_s: limits::DEFAULT_LOG_RETENTION_S,
            event_total_bytes: 512 << 20,
            delivery_limits: DeliveryLimits::default(),
            metric_retention_s: limits::DEFAULT_METRIC_RETENTION_S,
            metric_interval: Duration::from_secs(5),
            metric_first: Duration::from_secs(1),
            purge_interval: Duration::from_secs(60),
            settle: Duration::from_secs(1),
        }
    }
}

/// What must remain free on the host, and how many sandboxes there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapacitySettings {
    /// Memory that create requests leave free, in MiB.
    pub memory_floor_mb: u32,
    /// Disk space that create requests leave free, in MiB.
    pub disk_floor_mb: u32,
    /// Disk space that a new sandbox preallocates on the host, in MiB; 0 where disks grow as they are written.
    pub disk_per_sandbox_mb: u32,
    /// Maximum number of sandboxes of all teams at the same time.
    pub max_sandboxes: Option<u32>,
}

impl CapacitySettings {
    /// Default memory floor, in MiB: enough for the platform itself and for what sandboxes take until the next reading.
    pub const MEMORY_FLOOR_MB: u32 = 256;
    /// Default disk floor, in MiB: the database is on the same disk.
    pub const DISK_FLOOR_MB: u32 = 1024;

    /// Bounds of a node with these settings.
    #[must_use]
    pub const fn bounds(self) -> Bounds {
        Bounds {
            memory_floor_mb: self.memory_floor_mb,
            disk_floor_mb: self.disk_floor_mb,
            disk_per_sandbox_mb: self.disk_per_sandbox_mb,
            max_sandboxes: self.max_sandboxes,
        }
    }
}

impl Default for CapacitySettings {
    fn default() -> Self {
        Self {
            memory_floor_mb: Self::MEMORY_FLOOR_MB,
            disk_floor_mb: Self::DISK_FLOOR_MB,
            disk_per_sandbox_mb: 0,
            max_sandboxes: None,
        }
    }
}
