//! What the operator says about connections that leave sandboxes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::network::Cidr;
use rustls::pki_types::CertificateDer;

/// The operator's rules, which no policy of a sandbox widens, and the limits of each sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressSettings {
    /// Whether sandboxes reach anything outside. If not, every connection is refused and no name is resolved.
    pub enabled: bool,
    /// What applies to public addresses that the policy of a sandbox does not mention: open or closed.
    pub default_allow: bool,
    /// Networks that sandboxes may reach although they are not public, if their policies allow them.
    pub allow_private: Vec<Cidr>,
    /// Networks that are closed to all sandboxes. They take precedence over [`Self::allow_private`], [`Self::hosts`] and
    /// policies.
    pub deny: Vec<Cidr>,
    /// DNS servers, in order of preference; if empty, those of the host.
    pub resolvers: Vec<SocketAddr>,
    /// Addresses of names, in lower case without a dot at the end. They are answered without asking a DNS server.
    pub hosts: BTreeMap<String, Vec<IpAddr>>,
    /// Issuers of certificates of servers that are trusted beside those of the host, on connections that are intercepted.
    pub upstream_roots: Vec<CertificateDer<'static>>,
    /// Issuers that the operator trusts for sandboxes: in them, and wherever the gateway connects for one of them.
    pub authorities: Vec<CertificateDer<'static>>,
    /// How many bytes of a response are searched for secrets that were sent with its request; 0 for none. Its headers
    /// always are.
    pub mask_bytes: u64,
    /// Limits of each sandbox.
    pub limits: EgressLimits,
}

impl EgressSettings {
    /// [`Self::authorities`] in PEM, each on its own as usual: base64 in lines of 64 characters.
    #[must_use]
    pub fn authorities_pem(&self) -> String {
        let mut pem = String::new();
        for certificate in &self.authorities {
            pem.push_str("-----BEGIN CERTIFICATE-----\n");
            let mut rest = &*STANDARD.encode(certificate);
            while !rest.is_empty() {
                let (line, after) = rest.split_at(rest.len().min(64));
                pem.push_str(line);
                pem.push('\n');
                rest = after;
            }
            pem.push_str("-----END CERTIFICATE-----\n");
        }
        pem
    }
}

impl Default for EgressSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            default_allow: true,
            allow_private: Vec::new(),
            deny: Vec::new(),
            resolvers: Vec::new(),
            hosts: BTreeMap::new(),
            upstream_roots: Vec::new(),
            authorities: Vec::new(),
            mask_bytes: 4 << 20,
            limits: EgressLimits::default(),
        }
    }
}

/// How much one sandbox may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressLimits {
    /// Open TCP connections, at least 1.
    pub connections: u32,
    /// New TCP connections per second in the long run, at least 1. A burst may have [`Self::BURST_FACTOR`] times
    /// as many; further ones wait.
    pub connections_per_s: u32,
    /// Questions per second in the long run that DNS servers are asked for the sandbox, at least 1. A burst may have
    /// [`Self::BURST_FACTOR`] times as many; further ones wait for some seconds.
    pub dns_queries_per_s: u32,
    /// Bandwidth of all connections together, in each direction, in Mbit/s (10^6 bits); 0 is no limit.
    pub bandwidth_mbit: u32,
    /// Open UDP flows, that is pairs of a local and a remote address and port; 0 closes UDP except for the resolver.
    pub udp_flows: u32,
    /// Open TCP connections that are intercepted; 0 refuses connections to hosts of rules.
    pub intercepted: u32,
    /// Requests per second on all intercepted connections together in the long run, at least 1. A burst may have
    /// [`Self::BURST_FACTOR`] times as many; further ones are answered with 429.
    pub requests_per_s: u32,
}

impl EgressLimits {
    /// New connections, questions or requests in one burst, as a multiple of those per second: programs open many
    /// connections when they start and few afterwards.
    pub const BURST_FACTOR: u32 = 4;
}

impl Default for EgressLimits {
    fn default() -> Self {
        Self {
            connections: 1000,
            connections_per_s: 100,
            dns_queries_per_s: 100,
            bandwidth_mbit: 0,
            udp_flows: 256,
            intercepted: 256,
            requests_per_s: 1000,
        }
    }
}
