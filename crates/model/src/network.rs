//! What a sandbox may reach: networks, domain patterns, and the policy that consists of them.

pub(crate) mod domain;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use self::domain::{DomainPattern, InvalidDomain, MAX_DOMAIN_NAME, domain_name};
use crate::egress_proxy::EgressProxy;
use crate::injection::Interception;

/// A network in CIDR notation; a single address is a network of one. IPv4-mapped IPv6 addresses are IPv4 addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// Text that is not a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address or a network such as 10.0.0.0/8")]
pub struct InvalidCidr(String);

impl Cidr {
    /// All IPv4 addresses, and in policies all addresses.
    pub const ALL: Self = Self {
        address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        prefix: 0,
    };

    /// Whether the address is in the network.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits())
                    .checked_shr(32 - u32::from(self.prefix))
                    .unwrap_or(0)
                    == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits())
                    .checked_shr(128 - u32::from(self.prefix))
                    .unwrap_or(0)
                    == 0
            }
            _ => false,
        }
    }

    /// The first and the last address, as numbers.
    fn range(&self) -> (u128, u128) {
        let (start, longest) = match self.address {
            IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
            IpAddr::V6(address) => (address.to_bits(), 128),
        };
        let size = 1u128.checked_shl(longest - u32::from(self.prefix));
        (start, size.map_or(u128::MAX, |size| start + (size - 1)))
    }
}

impl FromStr for Cidr {
    type Err = InvalidCidr;

    fn from_str(text: &str) -> Result<Self, InvalidCidr> {
        let invalid = || InvalidCidr(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => longest,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().map_err(|_| invalid())?
            }
            Some(_) => return Err(invalid()),
        };
        if prefix > longest {
            return Err(invalid());
        }
        let (address, prefix) = match (address.to_canonical(), prefix) {
            (canonical, prefix) if canonical.is_ipv4() == address.is_ipv4() => (canonical, prefix),
            (canonical, 96..) => (canonical, prefix - 96),
            _ => (address, prefix),
        };
        let address = match address {
            IpAddr::V4(own) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(own.to_bits() & mask))
            }
            IpAddr::V6(own) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(own.to_bits() & mask))
            }
        };
        Ok(Self { address, prefix })
    }
}

impl TryFrom<String> for Cidr {
    type Error = InvalidCidr;

    fn try_from(text: String) -> Result<Self, InvalidCidr> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(network: Cidr) -> Self {
        network.to_string()
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// What a sandbox may reach. Public addresses only: what else is closed is the operator's decision, which no policy of
/// a sandbox widens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EgressPolicy {
    /// Networks that are open even if they are denied below. [`Cidr::ALL`] includes IPv6.
    pub allow: Vec<Cidr>,
    /// Domains that are open even if their addresses are denied below.
    pub allow_domains: Vec<DomainPattern>,
    /// Networks that are closed. [`Cidr::ALL`] includes IPv6.
    pub deny: Vec<Cidr>,
    /// Servers that answer the DNS queries of the sandbox; if empty, those of the operator.
    pub dns_servers: Vec<Ipv4Addr>,
    /// Whether addresses that no list mentions are open. If none, the operator's default.
    pub default_allow: Option<bool>,
    /// The proxy through which all TCP connections are made. While there is one, UDP is closed, except to the resolver.
    pub proxy: Option<Box<EgressProxy>>,
    /// The headers that the gateway sets on HTTPS requests of the sandbox. It opens nothing: the rest of the policy
    /// decides first.
    pub interception: Option<Box<Interception>>,
}

/// What a policy says about a public address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyDecision {
    /// An allowed network contains the address.
    Allowed,
    /// A network that is denied contains it, but a connection to a domain that is allowed is open.
    ByDomain,
    /// A denied network contains the address.
    Denied,
    /// The policy does not mention the address.
    Unmentioned,
}

impl EgressPolicy {
    /// What the policy says about a public address. What is allowed takes precedence over what is denied.
    #[must_use]
    pub fn decide(&self, address: IpAddr) -> PolicyDecision {
        let contains = |network: &Cidr| *network == Cidr::ALL || network.contains(address);
        if self.allow.iter().any(contains) {
            PolicyDecision::Allowed
        } else if !self.deny.iter().any(contains) {
            PolicyDecision::Unmentioned
        } else if self.allow_domains.is_empty() {
            PolicyDecision::Denied
        } else {
            PolicyDecision::ByDomain
        }
    }

    /// Whether an address is one of [`Self::dns_servers`].
    #[must_use]
    pub fn has_dns_server(&self, address: IpAddr) -> bool {
        self.dns_servers.iter().any(|server| address == IpAddr::V4(*server))
    }

    /// Whether all of [`Self::dns_servers`], of which there are some, are allowed by address.
    #[must_use]
    pub fn allows_dns_servers(&self) -> bool {
        let is_allowed = |server: &Ipv4Addr| self.decide((*server).into()) == PolicyDecision::Allowed;
        !self.dns_servers.is_empty() && self.dns_servers.iter().all(is_allowed)
    }

    /// Whether a domain is allowed by name.
    #[must_use]
    pub fn allows_domain(&self, name: &str) -> bool {
        self.allow_domains.iter().any(|pattern| pattern.matches(name))
    }

    /// Whether addresses that no network of [`Self::allow`] contains are closed altogether: the networks that are denied
    /// have all addresses, be it in parts.
    #[must_use]
    pub fn denies_everything_else(&self) -> bool {
        self.deny.contains(&Cidr::ALL) || (self.denies_all(true) && self.denies_all(false))
    }

    /// Whether the networks that are denied have all addresses of a family.
    fn denies_all(&self, ipv4: bool) -> bool {
        let of_family = self.deny.iter().filter(|network| network.address.is_ipv4() == ipv4);
        let mut ranges: Vec<(u128, u128)> = of_family.map(Cidr::range).collect();
        ranges.sort_unstable();
        let last = if ipv4 { u128::from(u32::MAX) } else { u128::MAX };
        let mut next = 0;
        for (start, end) in ranges {
            if start > next {
                return false;
            }
            if end == last {
                return true;
            }
            next = next.max(end + 1);
        }
        false
    }
}

#[cfg(test)]
mod tests;
