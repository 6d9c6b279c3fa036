//! The network settings of a sandbox as clients request them, and the policy that they result in.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::egress_proxy::{InvalidProxy, ProxySpec};
use crate::header_rules::{HeaderRules, InvalidRules, RulesSpec};
use crate::limits::HOST_MASK_MAX;
use crate::network::domain::DomainPattern;
use crate::network::{Cidr, EgressPolicy};
use crate::secret::Secret;

/// The text for all addresses, in requests and answers.
const ALL_ADDRESSES: &str = "0.0.0.0/0";

/// The network settings of a sandbox. A column stores them as JSON. Entries are kept as the client wrote them, because
/// clients are shown them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkSpec {
    /// Whether its ports can be reached without a token.
    pub allow_public_traffic: bool,
    /// Addresses, networks and domains that are open even if they are denied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow_out: Vec<String>,
    /// Addresses and networks that are closed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny_out: Vec<String>,
    /// DNS servers, by IPv4 address; if empty, those of the operator.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dns_servers: Vec<String>,
    /// The proxy for its TCP connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<ProxySpec>,
    /// Headers for its HTTPS requests, by domain. They may be secrets and are never stored.
    #[serde(skip)]
    pub rules: RulesSpec,
    /// The rules as clients are shown them, with masked headers.
    #[serde(rename = "rules", skip_serializing_if = "RulesSpec::is_empty")]
    pub rules_shown: RulesSpec,
    /// The rules as they are stored: JSON, encrypted by the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules_sealed: Option<String>,
    /// The token for its repositories. It is never stored.
    #[serde(skip)]
    pub repository_token: Option<Secret>,
    /// The token as it is stored: encrypted by the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository_token_sealed: Option<String>,
    /// The host that requests to its ports have inside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<HostMask>,
    /// Its ports whose servers speak TLS.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub https_ports: Vec<u16>,
}

impl Default for NetworkSpec {
    fn default() -> Self {
        Self {
            allow_public_traffic: true,
            allow_out: Vec::new(),
            deny_out: Vec::new(),
            dns_servers: Vec::new(),
            egress_proxy: None,
            rules: RulesSpec::new(),
            rules_shown: RulesSpec::new(),
            rules_sealed: None,
            repository_token: None,
            repository_token_sealed: None,
            mask_request_host: None,
            https_ports: Vec::new(),
        }
    }
}

/// An entry of network settings that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidNetwork {
    /// An allowed entry of unknown form.
    #[error(
        "allowOut[{index}]: {entry:?} is not an address, a network such as 203.0.113.0/24, or a domain such as \
         example.com or *.example.com"
    )]
    Allowed {
        /// Its index.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// A denied entry of unknown form.
    #[error("denyOut[{index}]: {entry:?} is not an address or a network such as 203.0.113.0/24")]
    Denied {
        /// Its index.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// A denied domain: nothing keeps a sandbox from connecting to its addresses.
    #[error(
        "denyOut[{index}]: {entry:?} is a domain, and only addresses and networks can be denied: deny \"0.0.0.0/0\" and \
         list in allowOut what stays open"
    )]
    DeniedDomain {
        /// Its index.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// A network that begins with an unspecified address, but is not the text for all addresses.
    #[error("{key}[{index}]: {entry:?} contains the unspecified address: for all addresses, write \"0.0.0.0/0\"")]
    Unspecified {
        /// The list.
        key: &'static str,
        /// Its index.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// An allowed domain where everything is open anyway.
    #[error(
        "allowOut[{index}]: allowing the domain {entry:?} requires that everything else is denied: add \"0.0.0.0/0\" to \
         denyOut, or set allow_internet_access to false"
    )]
    NothingDenied {
        /// Its index.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// A DNS server that is not an IPv4 address.
    #[error("dnsServers[{index}]: {entry:?} is not the IPv4 address of a server, such as 1.1.1.1")]
    DnsServer {
        /// Index of the entry.
        index: usize,
        /// The entry.
        entry: String,
    },
    /// A proxy that is not valid.
    #[error(transparent)]
    Proxy(#[from] InvalidProxy),
    /// Headers that cannot be set.
    #[error(transparent)]
    Rules(#[from] InvalidRules),
}

impl NetworkSpec {
    /// The headers for its HTTPS requests.
    ///
    /// # Errors
    /// At the first invalid rule.
    pub fn header_rules(&self) -> Result<HeaderRules, InvalidNetwork> {
        Ok(HeaderRules::parse(&self.rules)?)
    }

    /// What the sandbox may reach with these settings and this `allow_internet_access`, which if `false` denies
    /// everything that is not allowed, and otherwise has no effect.
    ///
    /// # Errors
    /// At the first invalid entry.
    pub fn egress(&self, allow_internet_access: Option<bool>) -> Result<EgressPolicy, InvalidNetwork> {
        let mut policy = EgressPolicy::default();
        let mut domain = None;
        for (index, entry) in self.allow_out.iter().enumerate() {
            if let Ok(network) = entry.parse::<Cidr>() {
                policy.allow.push(specified("allowOut", index, entry, network)?);
            } else if let Ok(pattern) = entry.parse::<DomainPattern>() {
                domain = domain.or(Some((index, entry)));
                policy.allow_domains.push(pattern);
            } else {
                let entry = entry.clone();
                return Err(InvalidNetwork::Allowed { index, entry });
            }
        }
        for (index, entry) in self.deny_out.iter().enumerate() {
            let Ok(network) = entry.parse::<Cidr>() else {
                let is_domain = entry.parse::<DomainPattern>().is_ok();
                let entry = entry.clone();
                return Err(if is_domain {
                    InvalidNetwork::DeniedDomain { index, entry }
                } else {
                    InvalidNetwork::Denied { index, entry }
                });
            };
            policy.deny.push(specified("denyOut", index, entry, network)?);
        }
        if allow_internet_access == Some(false) && !policy.denies_everything_else() {
            policy.deny.push(Cidr::ALL);
        }
        if let Some((index, entry)) = domain
            && !policy.denies_everything_else()
        {
            let entry = entry.clone();
            return Err(InvalidNetwork::NothingDenied { index, entry });
        }
        for (index, entry) in self.dns_servers.iter().enumerate() {
            match entry.parse::<Ipv4Addr>() {
                Ok(server) if !server.is_unspecified() => policy.dns_servers.push(server),
                Ok(_) | Err(_) => {
                    let entry = entry.clone();
                    return Err(InvalidNetwork::DnsServer { index, entry });
                }
            }
        }
        let proxy = self.egress_proxy.as_ref().map(ProxySpec::proxy).transpose()?;
        policy.proxy = proxy.map(Box::new);
        Ok(policy)
    }
}

/// Refuses a network that contains an unspecified address, unless it is written as [`ALL_ADDRESSES`].
fn specified(key: &'static str, index: usize, entry: &str, network: Cidr) -> Result<Cidr, InvalidNetwork> {
    let unspecified = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
    if entry != ALL_ADDRESSES && unspecified.into_iter().any(|address| network.contains(address)) {
        let entry = entry.to_owned();
        return Err(InvalidNetwork::Unspecified { key, index, entry });
    }
    Ok(network)
}

/// A host with an optional port, in which `${PORT}` stands for the port of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostMask(String);

/// Text that is not a host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be a host of letters, digits, '-', '_' and '.' or an IPv6 address in brackets, with an optional port, such as \
     localhost:${{PORT}}, and have at most {HOST_MASK_MAX} characters"
)]
pub struct InvalidHostMask;

impl HostMask {
    /// What stands for the port.
    const PORT: &str = "${PORT}";

    /// The host for requests to a port.
    #[must_use]
    pub fn host(&self, port: u16) -> String {
        self.0.replace(Self::PORT, &port.to_string())
    }
}

impl FromStr for HostMask {
    type Err = InvalidHostMask;

    fn from_str(text: &str) -> Result<Self, InvalidHostMask> {
        // Valid for the longest port, so for every other one too.
        let example = text.replace(Self::PORT, "65535");
        let (host, port) = match example.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (example.as_str(), None),
        };
        let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(address) => address.parse::<Ipv6Addr>().is_ok(),
            None => {
                let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
                !host.is_empty() && host.bytes().all(is_allowed)
            }
        };
        let is_port = |port: &str| {
            port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
        };
        if text.len() > HOST_MASK_MAX || !is_host || !port.is_none_or(is_port) {
            return Err(InvalidHostMask);
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for HostMask {
    type Error = InvalidHostMask;

    fn try_from(text: String) -> Result<Self, InvalidHostMask> {
        text.parse()
    }
}

impl From<HostMask> for String {
    fn from(mask: HostMask) -> Self {
        mask.0
    }
}

impl fmt::Display for HostMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(entries: &[&str]) -> Vec<String> {
        entries.iter().map(|entry| (*entry).to_owned()).collect()
    }

    fn spec(allow: &[&str], deny: &[&str], dns: &[&str]) -> NetworkSpec {
        NetworkSpec {
            allow_out: texts(allow),
            deny_out: texts(deny),
            dns_servers: texts(dns),
            ..NetworkSpec::default()
        }
    }

    #[test]
    fn settings_become_a_policy() {
        type Row<'a> = (&'a [&'a str], &'a [&'a str], Option<bool>, [&'a [&'a str]; 3]);
        const ALL: &[&str] = &["0.0.0.0/0"];
        let rows: &[Row<'_>] = &[
            (&[], &[], None, [&[], &[], &[]]),
            (&[], &[], Some(true), [&[], &[], &[]]),
            (&[], &[], Some(false), [&[], &[], ALL]),
            (&[], ALL, None, [&[], &[], ALL]),
            (&[], ALL, Some(false), [&[], &[], ALL]),
            (&["1.1.1.1"], &[], None, [&["1.1.1.1/32"], &[], &[]]),
            (ALL, &["8.8.8.8"], Some(false), [ALL, &[], &["8.8.8.8/32", "0.0.0.0/0"]]),
            (
                &["203.0.113.9/24", "2001:db8::1", "Example.COM", "*.example.com", "*"],
                ALL,
                Some(true),
                [
                    &["203.0.113.0/24", "2001:db8::1/128"],
                    &["example.com", "*.example.com", "*"],
                    ALL,
                ],
            ),
            (&["a.example"], &[], Some(false), [&[], &["a.example"], ALL]),
        ];
        for (allow, deny, access, [networks, domains, denied]) in rows {
            let policy = spec(allow, deny, &["1.1.1.1", "10.0.0.1"]).egress(*access);
            let policy = policy.expect("a policy");
            let shown = |networks: &[Cidr]| networks.iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(shown(&policy.allow), *networks, "{allow:?} {deny:?} {access:?}");
            assert_eq!(shown(&policy.deny), *denied, "{allow:?} {deny:?} {access:?}");
            let named: Vec<&str> = policy.allow_domains.iter().map(DomainPattern::as_str).collect();
            assert_eq!(named, *domains, "{allow:?} {deny:?} {access:?}");
            let servers = [Ipv4Addr::new(1, 1, 1, 1), Ipv4Addr::new(10, 0, 0, 1)];
            assert_eq!(policy.dns_servers, servers);
        }
    }

    #[test]
    fn errors_name_the_entry_and_what_to_do() {
        type Row<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], &'a [&'a str]);
        let rows: &[Row<'_>] = &[
            (
                &["1.1.1.1", "http://a.b"],
                &[],
                &[],
                &["allowOut[1]", "\"http://a.b\"", "*.example.com"],
            ),
            (&["1.2.3"], &[], &[], &["allowOut[0]"]),
            (&["10.0.0.0/33"], &[], &[], &["allowOut[0]"]),
            (&[""], &[], &[], &["allowOut[0]"]),
            (&["a.*.b"], &[], &[], &["allowOut[0]"]),
            (&["0.0.0.0"], &[], &[], &["allowOut[0]", "0.0.0.0/0"]),
            (&["::/0"], &[], &[], &["allowOut[0]", "0.0.0.0/0"]),
            (&["1.2.3.4/0"], &[], &[], &["allowOut[0]", "0.0.0.0/0"]),
            (&["::ffff:0.0.0.0/96"], &[], &[], &["allowOut[0]", "0.0.0.0/0"]),
            (&[], &["1.1.1.1", "::"], &[], &["denyOut[1]", "0.0.0.0/0"]),
            (&[], &["0.0.0.0/00"], &[], &["denyOut[0]", "0.0.0.0/0"]),
            (&[], &["example.com"], &[], &["denyOut[0]", "domain", "allowOut"]),
            (&[], &["*"], &[], &["denyOut[0]", "domain", "allowOut"]),
            (&[], &["a b"], &[], &["denyOut[0]", "203.0.113.0/24"]),
            (
                &["1.1.1.1", "a.b"],
                &["8.8.8.8"],
                &[],
                &["allowOut[1]", "\"a.b\"", "0.0.0.0/0", "allow_internet_access"],
            ),
            (&[], &[], &["1.1.1.1", "::1"], &["dnsServers[1]", "IPv4"]),
            (&[], &[], &["0.0.0.0"], &["dnsServers[0]", "IPv4"]),
            (&[], &[], &["dns.google"], &["dnsServers[0]", "IPv4"]),
        ];
        for (allow, deny, dns, parts) in rows {
            for access in [None, Some(true)] {
                let error = spec(allow, deny, dns).egress(access);
                let error = error.expect_err("an error").to_string();
                for part in *parts {
                    assert!(error.contains(part), "{part}: {error}");
                }
            }
        }
    }

    #[test]
    fn stored_settings_can_be_read() {
        let read = |text: &str| serde_json::from_str::<NetworkSpec>(text);
        for text in ["{}", r#"{"allowPublicTraffic":true}"#, r#"{"later":[1],"allowOut":[]}"#] {
            assert_eq!(read(text).ok(), Some(NetworkSpec::default()), "{text}");
        }
        let all = NetworkSpec {
            allow_public_traffic: false,
            mask_request_host: "a:${PORT}".parse().ok(),
            https_ports: vec![443, 8443],
            ..spec(&["a.b"], &["0.0.0.0/0"], &["1.1.1.1"])
        };
        let text = serde_json::to_string(&all).expect("JSON");
        let want = r#"{"allowPublicTraffic":false,"allowOut":["a.b"],"denyOut":["0.0.0.0/0"],"dnsServers":["1.1.1.1"],"maskRequestHost":"a:${PORT}","httpsPorts":[443,8443]}"#;
        assert_eq!(text, want);
        assert_eq!(read(&text).ok(), Some(all));
        let proxied = NetworkSpec {
            egress_proxy: Some(ProxySpec {
                address: "a.b:1".to_owned(),
                username: Some("u".to_owned()),
                password: Some(Secret::new("hunter2".to_owned())),
                password_sealed: Some("v1.x".to_owned()),
                tls: None,
            }),
            ..NetworkSpec::default()
        };
        let text = serde_json::to_string(&proxied).expect("JSON");
        let want =
            r#"{"allowPublicTraffic":true,"egressProxy":{"address":"a.b:1","username":"u","passwordSealed":"v1.x"}}"#;
        assert_eq!(text, want);
        // Without the password there is no policy, rather than one that connects without it.
        let stored = read(&text).expect("settings");
        assert_eq!(stored.egress(None), Err(InvalidNetwork::Proxy(InvalidProxy::Sealed)));
        assert!(proxied.egress(None).expect("a policy").proxy.is_some());
        for text in [
            "",
            r#"{"egressProxy":{}}"#,
            r#"{"allowOut":null}"#,
            r#"{"denyOut":[1]}"#,
            r#"{"maskRequestHost":"a b"}"#,
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn masks_are_hosts() {
        let longest = "a".repeat(HOST_MASK_MAX);
        for (mask, at_80, at_65535) in [
            ("example.com", "example.com", "example.com"),
            ("localhost:${PORT}", "localhost:80", "localhost:65535"),
            ("${PORT}-a_b.test:1", "80-a_b.test:1", "65535-a_b.test:1"),
            ("127.0.0.1:65535", "127.0.0.1:65535", "127.0.0.1:65535"),
            ("[::1]", "[::1]", "[::1]"),
            ("[::1]:${PORT}", "[::1]:80", "[::1]:65535"),
            (&longest, &longest, &longest),
        ] {
            let parsed: HostMask = mask.parse().expect("a mask");
            assert_eq!([parsed.host(80), parsed.host(65535)], [at_80, at_65535], "{mask}");
        }
        let too_long = "a".repeat(HOST_MASK_MAX + 1);
        for mask in [
            "",
            ":80",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:1${PORT}",
            "a b",
            "a\r\nb: c",
            "é.b",
            "u@a",
            "a/b",
            "a?b",
            "${port}",
            "$PORT",
            "::1",
            "[::1",
            "[::1]x",
            "[a]",
            "a:1:2",
            "http://a",
            &too_long,
        ] {
            assert_eq!(mask.parse::<HostMask>(), Err(InvalidHostMask), "{mask}");
        }
    }
}
