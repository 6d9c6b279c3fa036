use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::egress_proxy::ProxyCredentials;
use crate::secret::Secret;

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn pattern(text: &str) -> DomainPattern {
    text.parse().unwrap()
}

#[test]
fn networks_are_normalised() {
    for (text, normalised) in [
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("1.2.3.4/0", "0.0.0.0/0"),
        ("255.255.255.255/31", "255.255.255.254/31"),
        ("2001:DB8::1/32", "2001:db8::/32"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("ffff::/0", "::/0"),
        ("::ffff:10.1.2.3", "10.1.2.3/32"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
        ("::ffff:0:0/95", "::fffe:0:0/95"),
    ] {
        assert_eq!(cidr(text).to_string(), normalised, "{text}");
    }
}

#[test]
fn text_that_is_not_a_network() {
    for text in [
        "",
        "/",
        "/8",
        "10",
        "10.0.0/8",
        "10.0.0.0/",
        "10.0.0.0/33",
        "10.0.0.0/+8",
        "10.0.0.0/-1",
        "10.0.0.0/ 8",
        "10.0.0.0/8/8",
        "10.0.0.0/255.0.0.0",
        "10.0.0.0/256",
        "10.0.0.0/4294967304",
        "010.0.0.0/8",
        "0x0a.0.0.0",
        " 10.0.0.0",
        "::/129",
        "fe80::1%eth0",
        "[::1]",
        "example.com",
        "*",
    ] {
        assert_eq!(text.parse::<Cidr>(), Err(InvalidCidr(text.to_owned())));
    }
}

#[test]
fn networks_contain_their_addresses() {
    for (network, inside, outside) in [
        ("10.0.0.0/8", "10.255.255.255", "11.0.0.0"),
        ("10.0.0.0/8", "::ffff:10.0.0.1", "::10.0.0.1"),
        ("192.0.2.1", "192.0.2.1", "192.0.2.0"),
        ("192.0.2.0/31", "192.0.2.1", "192.0.2.2"),
        ("0.0.0.0/0", "255.255.255.255", "::"),
        ("128.0.0.0/1", "128.0.0.0", "127.255.255.255"),
        ("2001:db8::/32", "2001:db8:ffff::", "2001:db9::"),
        ("::/0", "ffff::1", "::ffff:1.2.3.4"),
        ("::/0", "::1", "0.0.0.1"),
        ("::ffff:10.0.0.0/104", "10.1.2.3", "::ffff:11.0.0.0"),
    ] {
        assert!(cidr(network).contains(address(inside)), "{network} {inside}");
        assert!(!cidr(network).contains(address(outside)), "{network} {outside}");
    }
    assert_eq!(cidr("0.0.0.0/0"), Cidr::ALL);
    assert_eq!(serde_json::to_string(&Cidr::ALL).unwrap(), "\"0.0.0.0/0\"");
}

#[test]
fn what_is_allowed_takes_precedence() {
    let mut policy = EgressPolicy {
        allow: vec![cidr("192.0.2.0/24"), cidr("2001:db8::/32")],
        deny: vec![cidr("192.0.0.0/16"), cidr("2001::/16")],
        ..EgressPolicy::default()
    };
    let decide = |policy: &EgressPolicy, text: &str| policy.decide(address(text));
    assert_eq!(decide(&policy, "192.0.2.1"), PolicyDecision::Allowed);
    assert_eq!(decide(&policy, "::ffff:192.0.2.1"), PolicyDecision::Allowed);
    assert_eq!(decide(&policy, "192.0.3.1"), PolicyDecision::Denied);
    assert_eq!(decide(&policy, "2001:db8::1"), PolicyDecision::Allowed);
    assert_eq!(decide(&policy, "2001:db9::1"), PolicyDecision::Denied);
    assert_eq!(decide(&policy, "192.1.0.0"), PolicyDecision::Unmentioned);
    assert!(!policy.denies_everything_else());
    policy.deny.push(Cidr::ALL);
    assert_eq!(decide(&policy, "192.1.0.0"), PolicyDecision::Denied);
    assert_eq!(decide(&policy, "2002::1"), PolicyDecision::Denied);
    assert!(policy.denies_everything_else());
    policy.allow_domains.push(pattern("*.example.com"));
    assert_eq!(decide(&policy, "192.1.0.0"), PolicyDecision::ByDomain);
    assert_eq!(decide(&policy, "192.0.2.1"), PolicyDecision::Allowed);
    assert!(policy.allows_domain("a.example.com"));
    assert!(!policy.allows_domain("example.com"));
    policy.allow.push(Cidr::ALL);
    assert_eq!(decide(&policy, "2002::1"), PolicyDecision::Allowed);
}

#[test]
fn everything_can_be_denied_in_parts() {
    let policy = |deny: &[&str]| EgressPolicy {
        deny: deny.iter().map(|text| cidr(text)).collect(),
        ..EgressPolicy::default()
    };
    for all in [
        &["0.0.0.0/0"][..],
        &["0.0.0.0/1", "128.0.0.0/1", "::/0"],
        &[
            "8000::/1",
            "128.0.0.0/2",
            "::/1",
            "192.0.0.0/2",
            "0.0.0.0/1",
            "10.0.0.0/8",
        ],
    ] {
        assert!(policy(all).denies_everything_else(), "{all:?}");
    }
    for some in [
        &[][..],
        &["::/0"],
        &["0.0.0.0/1", "128.0.0.0/1"],
        &["0.0.0.0/1", "128.0.0.0/2", "192.0.0.0/3", "::/0"],
        &["0.0.0.0/1", "128.0.0.0/1", "::/1", "c000::/2"],
    ] {
        assert!(!policy(some).denies_everything_else(), "{some:?}");
    }
}

fn addresses() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).into()),
        any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).into()),
        any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).to_ipv6_mapped().into()),
    ]
}

fn networks() -> impl Strategy<Value = Cidr> {
    (addresses(), 0u8..=128).prop_map(|(address, prefix)| {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        cidr(&format!("{address}/{}", prefix.min(longest)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn networks_are_read_as_they_are_written(network in networks()) {
        prop_assert_eq!(cidr(&network.to_string()), network);
        let json = serde_json::to_string(&network).unwrap();
        prop_assert_eq!(serde_json::from_str::<Cidr>(&json).unwrap(), network);
    }

    #[test]
    fn a_prefix_says_how_many_bits_are_equal(start in addresses(), other in addresses(), shared in 0u32..=128) {
        // An address that has the first bits in common with the start.
        let (start, other, width) = match (start.to_canonical(), other.to_canonical()) {
            (IpAddr::V4(start), IpAddr::V4(other)) => {
                let rest = u32::MAX.checked_shr(shared).unwrap_or(0);
                (start.into(), Ipv4Addr::from_bits(start.to_bits() & !rest | other.to_bits() & rest).into(), 32)
            }
            (IpAddr::V6(start), IpAddr::V6(other)) => {
                let rest = u128::MAX.checked_shr(shared).unwrap_or(0);
                (IpAddr::from(start), IpAddr::from(Ipv6Addr::from_bits(start.to_bits() & !rest | other.to_bits() & rest)), 128)
            }
            (start, other) => {
                let network = cidr(&format!("{start}/0"));
                prop_assert!(!network.contains(other));
                return Ok(());
            }
        };
        let equal = match (start, other) {
            (IpAddr::V4(start), IpAddr::V4(other)) => (start.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(start), IpAddr::V6(other)) => (start.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => unreachable!(),
        };
        if other.to_canonical() == other {
            for prefix in 0..=width {
                prop_assert_eq!(cidr(&format!("{start}/{prefix}")).contains(other), prefix <= equal, "{}", prefix);
            }
        }
    }

    #[test]
    fn no_text_panics(text in "[0-9a-fA-FxX:./*_ -]{0,24}|\\PC{0,16}", name in "\\PC{0,16}") {
        if let Ok(network) = text.parse::<Cidr>() {
            prop_assert_eq!(cidr(&network.to_string()), network);
        }
        if let Ok(pattern) = text.parse::<DomainPattern>() {
            prop_assert_eq!(pattern.as_str().parse::<DomainPattern>(), Ok(pattern.clone()));
            prop_assert!(text.parse::<IpAddr>().is_err());
            let _ = pattern.matches(&name);
            let parent = pattern.as_str().trim_start_matches("*.");
            prop_assert_eq!(pattern.matches(parent), !pattern.as_str().starts_with("*.") );
            prop_assert_eq!(pattern.matches(&format!("a.{parent}")), pattern.as_str().starts_with('*'));
        }
        if let Some(found) = domain_name(&text) {
            prop_assert_eq!(domain_name(&found), Some(found.clone()));
            prop_assert_eq!(domain_name(&text.to_uppercase()), Some(found));
        }
    }

    #[test]
    fn policies_survive_serialisation(
        allow in prop::collection::vec(networks(), 0..3),
        deny in prop::collection::vec(networks(), 0..3),
        domains in prop::collection::vec("(\\*\\.)?[a-z]{1,5}\\.[a-z]{2}", 0..3),
        without_default in any::<Option<bool>>(),
        address in addresses(),
    ) {
        let policy = EgressPolicy {
            allow,
            deny,
            allow_domains: domains.iter().map(|text| pattern(text)).collect(),
            dns_servers: vec![Ipv4Addr::new(192, 0, 2, 1)],
            default_allow: without_default,
            interception: None,
            proxy: Some(Box::new(EgressProxy {
                host: "proxy.example".parse().unwrap(),
                port: 1080,
                credentials: Some(ProxyCredentials {
                    username: "user".to_owned(),
                    password: Secret::new("hunter2".to_owned()),
                }),
                tls: None,
            })),
        };
        let shown = format!("{policy:?}");
        prop_assert!(!shown.contains("hunter2"));
        let json = serde_json::to_string(&policy).unwrap();
        prop_assert_eq!(&serde_json::from_str::<EgressPolicy>(&json).unwrap(), &policy);
        if policy.denies_everything_else() {
            prop_assert_ne!(policy.decide(address), PolicyDecision::Unmentioned);
        }
        if let IpAddr::V4(v4) = address {
            prop_assert_eq!(policy.decide(address), policy.decide(v4.to_ipv6_mapped().into()));
        }
    }

    #[test]
    fn everything_is_denied_if_no_address_is_left(
        cuts in prop::collection::vec((any::<u32>(), 1u8..=32), 0..4),
        without in prop::option::of(any::<prop::sample::Index>()),
    ) {
        // Networks that cover all addresses: those beside the way to each cut, and the cut itself.
        let mut deny = vec![cidr("::/0")];
        let mut open = vec![(0u32, 0u8)];
        for (bits, depth) in cuts {
            let at = open.iter().position(|(start, prefix)| {
                cidr(&format!("{}/{prefix}", Ipv4Addr::from_bits(*start))).contains(Ipv4Addr::from_bits(bits).into())
            });
            let (mut start, mut prefix) = open.swap_remove(at.unwrap());
            while prefix < depth {
                prefix += 1;
                let bit = 1u32 << (32 - prefix);
                open.push((start | (bit & !bits), prefix));
                start |= bits & bit;
            }
            open.push((start, prefix));
        }
        deny.extend(open.iter().map(|(start, prefix)| cidr(&format!("{}/{prefix}", Ipv4Addr::from_bits(*start)))));
        if let Some(without) = without {
            deny.remove(without.index(deny.len()));
        }
        let covered = without.is_none();
        let policy = EgressPolicy { deny, ..EgressPolicy::default() };
        prop_assert_eq!(policy.denies_everything_else(), covered || policy.deny.contains(&Cidr::ALL));
    }
}

#[test]
fn missing_keys_are_empty() {
    assert_eq!(
        serde_json::from_str::<EgressPolicy>("{}").unwrap(),
        EgressPolicy::default()
    );
    assert!(serde_json::from_str::<EgressPolicy>("{\"deny\":[\"example.com\"]}").is_err());
    assert!(serde_json::from_str::<EgressPolicy>("{\"allow_domains\":[\"1.2.3.4\"]}").is_err());
}
