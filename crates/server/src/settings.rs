//! What the operator decides about a server.

use std::collections::BTreeMap;

use model::limits;
use model::resources::Resources;
use secrecy::SecretBox;

pub use crate::capacity::CapacitySettings;
use crate::clock::Clock;
pub use crate::rate::BUCKET_MAX;
use crate::tls::Tls;

/// Settings of a server. Nothing in the crate reads configuration or environment by itself.
#[derive(Debug)]
pub struct Settings {
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
    /// The time.
    pub clock: Clock,
    /// The certificate with which the port speaks HTTPS besides HTTP; without one it speaks HTTP only.
    pub tls: Option<Tls>,
}

impl Settings {
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
            clock: Clock::system(),
            tls: None,
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
    /// What the team of that name may use.
    #[must_use]
    pub fn of(&self, name: &str) -> TeamLimits {
        self.teams.get(name).copied().unwrap_or(self.default)
    }
}
