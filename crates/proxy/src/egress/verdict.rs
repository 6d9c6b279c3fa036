//! The decision about a destination, from the operator's rules and the policy of the sandbox.

use std::fmt;
use std::net::IpAddr;

use model::egress_proxy::{EgressProxy, ProxyHost};
use model::network::{Cidr, EgressPolicy, PolicyDecision};

use super::addresses::{Category, carried, category};
use super::host_routes;
use super::roots::roots_of;
use super::settings::EgressSettings;

/// What applies to a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The destination is open.
    Open,
    /// The destination is open to connections whose first bytes name an allowed domain.
    ByDomain,
    /// The destination is closed.
    Closed(Reason),
}

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The operator has disabled the network of sandboxes.
    Disabled,
    /// The operator closed the network of the destination.
    Operator,
    /// The destination is not public, with the kind of address in one word.
    NotPublic(&'static str),
    /// The destination is the host.
    Host,
    /// The policy of the sandbox denies the destination.
    Policy,
    /// The operator's default denies what no policy allows.
    Default,
    /// The first bytes name no domain, or one that is not allowed.
    Domain,
    /// No address of the domain is open.
    DomainAddresses,
    /// The sandbox has too many connections or flows.
    Limit,
    /// The sandbox asks for too many names.
    Queries,
    /// The policy was changed while the connection was open.
    PolicyChange,
    /// One side had ended, and nothing came from the other for a long time.
    HalfClosed,
    /// Datagrams do not go through the proxy of the policy.
    ProxyDatagram,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled => f.write_str("sandboxes have no network here"),
            Self::Operator => f.write_str("the operator closed this network"),
            Self::NotPublic(kind) => write!(f, "the address is not public ({kind})"),
            Self::Host => f.write_str("the address belongs to the host"),
            Self::Policy => f.write_str("the network policy of the sandbox denies it"),
            Self::Default => f.write_str("no policy allows it"),
            Self::Domain => f.write_str("the connection names no allowed domain"),
            Self::DomainAddresses => f.write_str("the domain has no address that is open"),
            Self::Limit => f.write_str("the sandbox has reached its limit of connections"),
            Self::Queries => f.write_str("the sandbox has reached its limit of DNS queries"),
            Self::PolicyChange => f.write_str("the network policy was changed"),
            Self::HalfClosed => f.write_str("one side had ended and the other was silent"),
            Self::ProxyDatagram => f.write_str("UDP cannot go through the egress proxy"),
        }
    }
}

/// The decision about an address.
pub(super) fn judge(settings: &EgressSettings, policy: &EgressPolicy, address: IpAddr) -> Verdict {
    let address = address.to_canonical();
    if let Some(reason) = closed_to_all(settings, address) {
        return Verdict::Closed(reason);
    }
    // A translator would forward to the address inside.
    let inner = carried(address).map(|inner| policy.decide(inner.into()));
    let default_allow = policy.default_allow.unwrap_or(settings.default_allow);
    let decision = match (policy.decide(address), inner) {
        (PolicyDecision::Allowed | PolicyDecision::Unmentioned, Some(inner)) => inner,
        (outer, _) => outer,
    };
    match decision {
        PolicyDecision::Allowed => Verdict::Open,
        PolicyDecision::ByDomain => Verdict::ByDomain,
        PolicyDecision::Denied => Verdict::Closed(Reason::Policy),
        PolicyDecision::Unmentioned if default_allow => Verdict::Open,
        PolicyDecision::Unmentioned if !policy.allow_domains.is_empty() => Verdict::ByDomain,
        PolicyDecision::Unmentioned => Verdict::Closed(Reason::Default),
    }
}

/// The decision about datagrams to an address. They are never sent around a proxy.
pub(super) fn judge_datagram(settings: &EgressSettings, policy: &EgressPolicy, address: IpAddr) -> Verdict {
    match judge(settings, policy, address) {
        Verdict::Open if policy.proxy.is_some() => Verdict::Closed(Reason::ProxyDatagram),
        // The first bytes of a datagram name no domain that could be read.
        Verdict::ByDomain => Verdict::Closed(Reason::Domain),
        verdict => verdict,
    }
}

/// Why the proxy of a policy is refused; none if it may be used. A name is checked when it is resolved.
///
/// # Errors
/// With what is wrong, for the client.
pub fn check_proxy(settings: &EgressSettings, proxy: &EgressProxy) -> Result<(), String> {
    if let ProxyHost::Address(address) = proxy.host
        && let Some(reason) = closed_to_all(settings, address).filter(|reason| *reason != Reason::Disabled)
    {
        return Err(format!("egressProxy.address: {address} cannot be used: {reason}"));
    }
    match proxy.tls.as_ref().and_then(|tls| tls.ca_cert.as_deref()) {
        Some(pem) => roots_of(pem)
            .map(drop)
            .map_err(|why| format!("egressProxy.tls.caCert: {why}")),
        None => Ok(()),
    }
}

/// Why an address is closed whatever a policy allows: it is not public, or the operator closes it. None if it is open.
///
/// The routing table of the host is asked, so addresses of the host itself are closed too.
#[must_use]
pub fn closed_to_all(settings: &EgressSettings, address: IpAddr) -> Option<Reason> {
    let address = address.to_canonical();
    let is_in = |networks: &[Cidr]| networks.iter().any(|network| network.contains(address));
    let inner_is_denied = || {
        let inner = carried(address)?;
        let is_denied = settings.deny.iter().any(|network| network.contains(inner.into()));
        is_denied.then_some(())
    };
    if !settings.enabled {
        Some(Reason::Disabled)
    } else if is_in(&settings.deny) || inner_is_denied().is_some() {
        Some(Reason::Operator)
    } else if is_in(&settings.allow_private) {
        None
    } else {
        match category(address) {
            Category::Public if host_routes::is_remote(address) => None,
            Category::Public => Some(Reason::Host),
            other => Some(Reason::NotPublic(other.word())),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::egress_proxy::ProxyTls;

    use super::*;

    fn policy(allow: &[&str], domains: &[&str], deny: &[&str]) -> EgressPolicy {
        EgressPolicy {
            allow: allow.iter().map(|text| text.parse().unwrap()).collect(),
            allow_domains: domains.iter().map(|text| text.parse().unwrap()).collect(),
            deny: deny.iter().map(|text| text.parse().unwrap()).collect(),
            ..EgressPolicy::default()
        }
    }

    #[track_caller]
    fn check(settings: &EgressSettings, policy: &EgressPolicy, table: &[(&str, Verdict)]) {
        for (address, want) in table {
            assert_eq!(judge(settings, policy, address.parse().unwrap()), *want, "{address}");
        }
    }

    const OPEN: Verdict = Verdict::Open;
    const POLICY: Verdict = Verdict::Closed(Reason::Policy);

    #[test]
    fn public_addresses_are_open_and_others_closed() {
        let closed = |kind| Verdict::Closed(Reason::NotPublic(kind));
        check(
            &EgressSettings::default(),
            &EgressPolicy::default(),
            &[
                ("1.1.1.1", OPEN),
                ("2606:4700::1111", OPEN),
                ("10.0.0.1", closed("private")),
                ("::ffff:10.0.0.1", closed("private")),
                ("64:ff9b::10.0.0.1", closed("private")),
                ("2002:a00:1::", closed("private")),
                ("127.0.0.1", closed("loopback")),
                ("::1", closed("loopback")),
                ("169.254.169.254", closed("link-local")),
                ("0.0.0.0", closed("unspecified")),
                ("100.64.0.1", closed("shared")),
            ],
        );
    }

    #[test]
    fn datagrams_are_not_sent_around_a_proxy() {
        let settings = EgressSettings::default();
        let mut policy = policy(&["1.1.1.1"], &["a.example"], &["0.0.0.0/0"]);
        let mut check = |proxy: Option<&str>, want: [Verdict; 2]| {
            policy.proxy = proxy.map(|host| Box::new(proxy_at(host)));
            let addresses = ["1.1.1.1", "1.1.1.2"].map(|text| text.parse().unwrap());
            assert_eq!(
                addresses.map(|address| judge_datagram(&settings, &policy, address)),
                want
            );
            assert_eq!(
                addresses.map(|address| judge(&settings, &policy, address)),
                [OPEN, Verdict::ByDomain]
            );
        };
        let domain = Verdict::Closed(Reason::Domain);
        check(None, [OPEN, domain]);
        check(Some("8.8.8.8"), [Verdict::Closed(Reason::ProxyDatagram), domain]);
    }

    fn proxy_at(host: &str) -> EgressProxy {
        EgressProxy {
            host: host.parse().unwrap(),
            port: 1080,
            credentials: None,
            tls: None,
        }
    }

    #[test]
    fn proxies_have_to_be_where_sandboxes_may_connect() {
        let settings = EgressSettings {
            allow_private: vec!["10.9.0.0/16".parse().unwrap()],
            deny: vec!["9.9.9.9".parse().unwrap()],
            ..EgressSettings::default()
        };
        for (host, part) in [
            ("8.8.8.8", None),
            ("10.9.0.1", None),
            ("proxy.example", None),
            (
                "10.8.0.1",
                Some("10.8.0.1 cannot be used: the address is not public (private)"),
            ),
            ("127.0.0.1", Some("loopback")),
            ("::1", Some("loopback")),
            ("9.9.9.9", Some("the operator closed")),
        ] {
            let checked = check_proxy(&settings, &proxy_at(host));
            assert_eq!(checked.is_ok(), part.is_none(), "{host}");
            assert!(part.is_none_or(|part| checked.unwrap_err().contains(part)), "{host}");
        }
        let mut proxy = proxy_at("8.8.8.8");
        for text in [
            "",
            "nonsense",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ] {
            proxy.tls = Some(ProxyTls {
                server_name: proxy.host.clone(),
                ca_cert: Some(text.to_owned()),
            });
            let error = check_proxy(&settings, &proxy).unwrap_err();
            assert!(error.starts_with("egressProxy.tls.caCert: "), "{error}");
        }
    }

    #[test]
    fn what_is_allowed_wins_over_what_is_denied() {
        let policy = policy(&["1.1.1.0/24"], &[], &["0.0.0.0/0"]);
        check(
            &EgressSettings::default(),
            &policy,
            &[("1.1.1.1", OPEN), ("1.1.2.1", POLICY), ("2606:4700::1111", POLICY)],
        );
    }

    #[test]
    fn a_denied_address_is_denied_inside_others_too() {
        let policy = policy(&[], &[], &["1.1.1.1", "8.8.8.0/24"]);
        check(
            &EgressSettings::default(),
            &policy,
            &[
                ("1.1.1.1", POLICY),
                ("::ffff:1.1.1.1", POLICY),
                ("64:ff9b::101:101", POLICY),
                ("2002:808:808::1", POLICY),
                ("64:ff9b::102:101", OPEN),
                ("1.1.1.2", OPEN),
            ],
        );
    }

    #[test]
    fn domains_decide_only_what_is_denied() {
        let policy = policy(&["1.1.1.1"], &["example.com"], &["0.0.0.0/0"]);
        let table = [("1.1.1.1", OPEN), ("1.1.1.2", Verdict::ByDomain)];
        check(&EgressSettings::default(), &policy, &table);
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let settings = EgressSettings {
            allow_private: vec!["10.9.0.0/16".parse().unwrap()],
            deny: vec!["10.9.1.0/24".parse().unwrap(), "9.9.9.9".parse().unwrap()],
            default_allow: false,
            ..EgressSettings::default()
        };
        let all = policy(&["0.0.0.0/0"], &[], &[]);
        let operator = Verdict::Closed(Reason::Operator);
        let table = [
            ("10.9.0.1", OPEN),
            ("10.9.1.1", operator),
            ("9.9.9.9", operator),
            ("64:ff9b::909:909", operator),
            ("10.8.0.1", Verdict::Closed(Reason::NotPublic("private"))),
            ("8.8.8.8", OPEN),
        ];
        check(&settings, &all, &table);
        let default = Verdict::Closed(Reason::Default);
        let none = EgressPolicy::default();
        check(&settings, &none, &[("8.8.8.8", default), ("10.9.0.1", default)]);
        check(&settings, &policy(&[], &["*"], &[]), &[("8.8.8.8", Verdict::ByDomain)]);
        // The default of the team replaces that of the operator.
        let of_team = |default_allow| EgressPolicy {
            default_allow: Some(default_allow),
            ..EgressPolicy::default()
        };
        check(&settings, &of_team(true), &[("8.8.8.8", OPEN), ("9.9.9.9", operator)]);
        check(&EgressSettings::default(), &of_team(false), &[("8.8.8.8", default)]);
        let disabled = EgressSettings {
            enabled: false,
            ..settings
        };
        check(&disabled, &all, &[("8.8.8.8", Verdict::Closed(Reason::Disabled))]);
    }
}
