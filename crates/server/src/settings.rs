//! What the operator decides about a server.

use std::collections::BTreeMap;
use std::time::Duration;

use model::limits;
use model::resources::Resources;
use secrecy::SecretBox;
use tokio::runtime::Handle;

use crate::clock::Clock;
pub use crate::peers::Network;
use crate::tls::Tls;

/// Most permits of a rate: more would come faster than the clock can tell.
pub const BUCKET_MAX: u32 = 1_000_000;

/// Settings of a server. Nothing in the crate reads configuration or environment by itself.
#[derive(Debug)]
pub struct ServerSettings {
    /// Domain of sandbox traffic as told to clients, with the port where it is not the scheme's own, e.g.
    /// `sandbox.localhost:3000`.
    pub domain: String,
    /// Secret that every token of a sandbox is derived from. It must outlive restarts, or clients of adopted sandboxes
    /// lose access.
    pub token_seed: SecretBox<[u8; 32]>,
    /// What teams may use.
    pub limits: Limits,
    /// What must stay free on the host.
    pub capacity: CapacitySettings,
    /// Every agent wants its token, also where a client of the older path did not ask for that.
    pub always_secure: bool,
    /// What a sandbox may use, as far as the template's build leaves it open (the number of processes).
    pub resources: Resources,
    /// What is remembered of sandboxes, and for how long.
    pub records: RecordSettings,
    /// The time.
    pub clock: Clock,
    /// How many connections clients may have.
    pub connections: ConnectionLimits,
    /// Where connections are served, apart from everything else; without one, where everything is.
    pub traffic: Option<Handle>,
    /// The certificate with which the port speaks HTTPS besides HTTP; without one it speaks HTTP only.
    pub tls: Option<Tls>,
}

impl ServerSettings {
    /// Settings with the platform's defaults for a domain and a seed.
    #[must_use]
    pub fn new(domain: String, token_seed: SecretBox<[u8; 32]>) -> Self {
        Self {
            domain,
            token_seed,
            limits: Limits::default(),
            capacity: CapacitySettings::default(),
            always_secure: false,
            resources: Resources::default(),
            records: RecordSettings::default(),
            clock: Clock::system(),
            connections: ConnectionLimits::default(),
            traffic: None,
            tls: None,
        }
    }
}

/// How many connections there may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Of clients, in all.
    pub total: usize,
    /// Of one peer: an IPv4 address, or a /64 of IPv6.
    pub per_peer: usize,
    /// Into sandboxes, in all.
    pub into_sandboxes: usize,
    /// Into one sandbox.
    pub per_sandbox: usize,
    /// Addresses that many clients share, besides loopback; what holds for a peer does not hold for them.
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
    /// Longest life of a sandbox from its start, in seconds.
    pub max_lifetime_s: u32,
    /// Most sandboxes at once.
    pub sandboxes: Option<u32>,
    /// Most cores of all its sandboxes together.
    pub cpu_count: Option<u32>,
    /// Most memory of all its sandboxes together, in MiB.
    pub memory_mb: Option<u32>,
    /// Sandboxes that may be asked for per minute, and at once, at most [`BUCKET_MAX`].
    pub creates_per_minute: Option<u32>,
    /// Requests to the API per second, and at once, at most [`BUCKET_MAX`].
    pub requests_per_second: Option<u32>,
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
        }
    }
}

/// What teams may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// What a team may use that is not named below.
    pub default: TeamLimits,
    /// What single teams may use, by name, complete.
    pub teams: BTreeMap<String, TeamLimits>,
}

impl Limits {
    /// The longest life of a sandbox of any team, in seconds.
    #[must_use]
    pub fn longest_lifetime_s(&self) -> u32 {
        let teams = self.teams.values().map(|team| team.max_lifetime_s);
        teams.fold(self.default.max_lifetime_s, u32::max)
    }

    /// What the team of that name may use.
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
    /// Most entries of one sandbox's log. The oldest go first.
    pub log_entries: u32,
    /// Most bytes of one sandbox's log, about. The oldest entries go first.
    pub log_bytes: u64,
    /// Most bytes of all logs together, about. Those of the sandboxes that ended first go first.
    pub log_total_bytes: u64,
    /// Most bytes of all samples together, about. The oldest go first.
    pub metric_total_bytes: u64,
    /// How long a sample is kept, in seconds.
    pub metric_retention_s: u32,
    /// Time between samples.
    pub metric_interval: Duration,
    /// How long the first sample of a new sandbox may take, where that is cheap.
    pub metric_first: Duration,
    /// Pause between looks for what is too old.
    pub purge_interval: Duration,
}

impl Default for RecordSettings {
    fn default() -> Self {
        Self {
            log_retention_s: limits::DEFAULT_LOG_RETENTION_S,
            log_entries: limits::DEFAULT_LOG_ENTRIES,
            log_bytes: 4 << 20,
            log_total_bytes: 1 << 30,
            metric_total_bytes: 1 << 30,
            metric_retention_s: limits::DEFAULT_METRIC_RETENTION_S,
            metric_interval: Duration::from_secs(5),
            metric_first: Duration::from_secs(1),
            purge_interval: Duration::from_secs(60),
        }
    }
}

/// What must stay free on the host, and how many sandboxes there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapacitySettings {
    /// Memory that creates leave free, in MiB.
    pub memory_floor_mb: u32,
    /// Disk that creates leave free, in MiB.
    pub disk_floor_mb: u32,
    /// Disk that a new sandbox takes from the host at once, in MiB; 0 where it takes what it writes.
    pub disk_per_sandbox_mb: u32,
    /// Most sandboxes at once, of all teams.
    pub max_sandboxes: Option<u32>,
}

impl CapacitySettings {
    /// Memory that creates leave free unless the configuration says otherwise, in MiB: enough for the platform itself
    /// and for the moment until the next reading.
    pub const MEMORY_FLOOR_MB: u32 = 256;
    /// Disk that creates leave free unless the configuration says otherwise, in MiB: the database lies there too.
    pub const DISK_FLOOR_MB: u32 = 1024;
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
