//! What the operator decides about a server.

use model::limits;
use model::resources::Resources;
use secrecy::SecretBox;

use crate::clock::Clock;
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
    /// Longest life of a sandbox from its start, in seconds.
    pub max_lifetime_s: u32,
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
            max_lifetime_s: limits::DEFAULT_MAX_LIFETIME_S,
            always_secure: false,
            resources: Resources::default(),
            clock: Clock::system(),
            tls: None,
        }
    }
}
