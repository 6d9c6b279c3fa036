//! Addresses that are not public: closed unless the operator opens them.
//!
//! Public means globally reachable unicast, by the IANA registries of special-purpose addresses
//! (<https://www.iana.org/assignments/iana-ipv4-special-registry>, `iana-ipv6-special-registry`). IPv6 addresses that are
//! not in 2000::/3 are not allocated, so none of them is public. An IPv6 address that carries an IPv4 address is judged by
//! it, because a translator or relay would forward to that one. Unknown are the translation prefixes that a network chooses
//! for itself (RFC 6052); an operator who has one excludes it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What an address is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Category {
    /// Globally reachable unicast.
    Public,
    /// Private networks: 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, fc00::/7, and fec0::/10, which is deprecated.
    Private,
    /// The network between a carrier and its customers, which clouds use for services of their own: 100.64.0.0/10.
    Shared,
    /// The host itself: 127.0.0.0/8, ::1.
    Loopback,
    /// One link: 169.254.0.0/16, which includes metadata services of clouds, and fe80::/10.
    LinkLocal,
    /// A metadata service at an address that the registries do not list: 168.63.129.16 of Azure.
    Metadata,
    /// "This network", which Linux takes for the host itself: 0.0.0.0/8, ::.
    Unspecified,
    /// Groups of hosts: 224.0.0.0/4, ff00::/8.
    Multicast,
    /// All hosts of a link: 255.255.255.255.
    Broadcast,
    /// Examples in documents.
    Documentation,
    /// Benchmarks of network devices: 198.18.0.0/15, 2001:2::/48.
    Benchmarking,
    /// Reserved for protocols or for future use.
    Reserved,
}

impl Category {
    /// One word for logs. Stable.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Private => "private",
            Self::Shared => "shared",
            Self::Loopback => "loopback",
            Self::LinkLocal => "link-local",
            Self::Metadata => "metadata",
            Self::Unspecified => "unspecified",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Documentation => "documentation",
            Self::Benchmarking => "benchmarking",
            Self::Reserved => "reserved",
        }
    }
}

/// The category of an address.
pub(super) fn category(address: IpAddr) -> Category {
    match address {
        IpAddr::V4(address) => of_v4(address),
        IpAddr::V6(address) => of_v6(address),
    }
}

/// The IPv4 address that a translator or relay would forward to, for an IPv6 address that carries one.
pub(super) fn carried(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(address) = address else { return None };
    let segments = address.segments();
    match segments {
        [0, 0, 0, 0, 0, 0 | 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] | [0x64, 0xff9b, 1, ..] => {
            Some(ipv4(segments[6], segments[7]))
        }
        [0x2001, 0, ..] => Some(ipv4(!segments[6], !segments[7])),
        [0x2002, ..] => Some(ipv4(segments[1], segments[2])),
        _ => None,
    }
}

fn of_v4(address: Ipv4Addr) -> Category {
    match address.octets() {
        [0, ..] => Category::Unspecified,
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Category::Private,
        [100, 64..=127, ..] => Category::Shared,
        [127, ..] => Category::Loopback,
        [169, 254, ..] => Category::LinkLocal,
        [168, 63, 129, 16] => Category::Metadata,
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Category::Documentation,
        // Includes the anycast addresses for port mapping and relaying, which the nearest router answers, and a metadata
        // service of Oracle. 192.88.99.0/24 was the anycast prefix of 6to4 relays.
        [192, 0, 0, _] | [192, 88, 99, _] => Category::Reserved,
        [198, 18..=19, ..] => Category::Benchmarking,
        [224..=239, ..] => Category::Multicast,
        [255, 255, 255, 255] => Category::Broadcast,
        [240..=255, ..] => Category::Reserved,
        _ => Category::Public,
    }
}

fn of_v6(address: Ipv6Addr) -> Category {
    let segments = address.segments();
    let embedded = |at: usize| of_v4(ipv4(segments[at], segments[at + 1]));
    match segments {
        [0, 0, 0, 0, 0, 0, 0, 0] => Category::Unspecified,
        [0, 0, 0, 0, 0, 0, 0, 1] => Category::Loopback,
        // IPv4-mapped, and NAT64 with the well-known prefix.
        [0, 0, 0, 0, 0, 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => embedded(6),
        // IPv4-compatible, which is deprecated, and NAT64 for local use, where the position of the IPv4 address depends on
        // the network: never public.
        [0, 0, 0, 0, 0, 0, _, _] | [0x64, 0xff9b, 1, ..] => unless_public(embedded(6)),
        // Teredo: the server and, with all bits inverted, the client.
        [0x2001, 0, ..] => match embedded(2) {
            Category::Public => of_v4(ipv4(!segments[6], !segments[7])),
            server => server,
        },
        [0x2001, 2, 0, ..] => Category::Benchmarking,
        // Relays for multicast, and name servers for reverse names of private addresses: unlike the rest of 2001::/23,
        // globally reachable and not answered by the nearest router.
        [0x2001, 3, ..] | [0x2001, 4, 0x112, ..] => Category::Public,
        [0x2001, 0..=0x1ff, ..] => Category::Reserved,
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Category::Documentation,
        // 6to4.
        [0x2002, ..] => embedded(1),
        [0x2000..=0x3fff, ..] => Category::Public,
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Category::Private,
        [0xfe80..=0xfebf, ..] => Category::LinkLocal,
        [0xff00..=0xffff, ..] => Category::Multicast,
        _ => Category::Reserved,
    }
}

fn ipv4(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))
}

fn unless_public(category: Category) -> Category {
    match category {
        Category::Public => Category::Reserved,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(table: &[(&str, Category)]) {
        for (text, expected) in table {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(category(address), *expected, "{text}");
        }
    }

    #[test]
    fn ipv4_at_both_sides_of_each_bound() {
        use Category::*;
        check(&[
            ("0.0.0.0", Unspecified),
            ("0.255.255.255", Unspecified),
            ("1.0.0.0", Public),
            ("9.255.255.255", Public),
            ("10.0.0.0", Private),
            ("10.255.255.255", Private),
            ("11.0.0.0", Public),
            ("100.63.255.255", Public),
            ("100.64.0.0", Shared),
            ("100.100.100.200", Shared),
            ("100.127.255.255", Shared),
            ("100.128.0.0", Public),
            ("126.255.255.255", Public),
            ("127.0.0.0", Loopback),
            ("127.255.255.255", Loopback),
            ("128.0.0.0", Public),
            ("168.63.129.15", Public),
            ("168.63.129.16", Metadata),
            ("168.63.129.17", Public),
            ("169.253.255.255", Public),
            ("169.254.0.0", LinkLocal),
            ("169.254.169.254", LinkLocal),
            ("169.254.255.255", LinkLocal),
            ("169.255.0.0", Public),
            ("172.15.255.255", Public),
            ("172.16.0.0", Private),
            ("172.31.255.255", Private),
            ("172.32.0.0", Public),
            ("191.255.255.255", Public),
            ("192.0.0.0", Reserved),
            ("192.0.0.9", Reserved),
            ("192.0.0.192", Reserved),
            ("192.0.0.255", Reserved),
            ("192.0.1.0", Public),
            ("192.0.1.255", Public),
            ("192.0.2.0", Documentation),
            ("192.0.2.255", Documentation),
            ("192.0.3.0", Public),
            ("192.31.196.1", Public),
            ("192.52.193.1", Public),
            ("192.88.98.255", Public),
            ("192.88.99.0", Reserved),
            ("192.88.99.255", Reserved),
            ("192.88.100.0", Public),
            ("192.167.255.255", Public),
            ("192.168.0.0", Private),
            ("192.168.255.255", Private),
            ("192.169.0.0", Public),
            ("198.17.255.255", Public),
            ("198.18.0.0", Benchmarking),
            ("198.19.255.255", Benchmarking),
            ("198.20.0.0", Public),
            ("198.51.99.255", Public),
            ("198.51.100.0", Documentation),
            ("198.51.100.255", Documentation),
            ("198.51.101.0", Public),
            ("203.0.112.255", Public),
            ("203.0.113.0", Documentation),
            ("203.0.113.255", Documentation),
            ("203.0.114.0", Public),
            ("223.255.255.255", Public),
            ("224.0.0.0", Multicast),
            ("239.255.255.255", Multicast),
            ("240.0.0.0", Reserved),
            ("255.255.255.254", Reserved),
            ("255.255.255.255", Broadcast),
        ]);
    }

    #[test]
    fn ipv6_at_both_sides_of_each_bound() {
        use Category::*;
        check(&[
            ("::", Unspecified),
            ("::1", Loopback),
            ("100::", Reserved),
            ("100::ffff:ffff:ffff:ffff", Reserved),
            ("100:0:0:1::", Reserved),
            ("1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Reserved),
            ("2000::", Public),
            ("2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Public),
            ("2001:1::1", Reserved),
            ("2001:1:ffff::", Reserved),
            ("2001:2::", Benchmarking),
            ("2001:2:0:ffff:ffff:ffff:ffff:ffff", Benchmarking),
            ("2001:2:1::", Reserved),
            ("2001:3::", Public),
            ("2001:3:ffff:ffff:ffff:ffff:ffff:ffff", Public),
            ("2001:4::", Reserved),
            ("2001:4:111:ffff::", Reserved),
            ("2001:4:112::1", Public),
            ("2001:4:113::", Reserved),
            ("2001:10::", Reserved),
            ("2001:20::", Reserved),
            ("2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", Reserved),
            ("2001:200::", Public),
            ("2001:4860:4860::8888", Public),
            ("2001:db7:ffff:ffff:ffff:ffff:ffff:ffff", Public),
            ("2001:db8::", Documentation),
            ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", Documentation),
            ("2001:db9::", Public),
            ("2003::", Public),
            ("2606:4700::1111", Public),
            ("2620:4f:8000::1", Public),
            ("3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Public),
            ("3fff::", Documentation),
            ("3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", Documentation),
            ("3fff:1000::", Public),
            ("4000::", Reserved),
            ("5f00::", Reserved),
            ("fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Reserved),
            ("fc00::", Private),
            ("fd00:ec2::254", Private),
            ("fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Private),
            ("fe00::", Reserved),
            ("fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Reserved),
            ("fe80::", LinkLocal),
            ("febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", LinkLocal),
            ("fec0::", Private),
            ("feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Private),
            ("ff00::", Multicast),
            ("ff02::1", Multicast),
            ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Multicast),
        ]);
    }

    #[test]
    fn an_embedded_ipv4_address_decides() {
        use Category::*;
        check(&[
            ("::ffff:8.8.8.8", Public),
            ("::ffff:127.0.0.1", Loopback),
            ("::ffff:169.254.169.254", LinkLocal),
            ("::fffe:8.8.8.8", Reserved),
            ("::1:ffff:8.8.8.8", Reserved),
            ("::2", Unspecified),
            ("::10.0.0.1", Private),
            ("::127.0.0.1", Loopback),
            ("::8.8.8.8", Reserved),
            ("64:ff9b::8.8.8.8", Public),
            ("64:ff9b::10.0.0.1", Private),
            ("64:ff9b::169.254.169.254", LinkLocal),
            ("64:ff9b::1:8.8.8.8", Reserved),
            ("64:ff9b:1::10.0.0.1", Private),
            ("64:ff9b:1::8.8.8.8", Reserved),
            ("64:ff9b:1:ffff:ffff:ffff:808:808", Reserved),
            ("64:ff9b:2::8.8.8.8", Reserved),
            ("2002:808:808::1", Public),
            ("2002:7f00:1::1", Loopback),
            ("2002:a9fe:a9fe::", LinkLocal),
            // 65.54.227.120 and 192.0.2.45, the example of RFC 4380.
            ("2001:0:4136:e378:8000:63bf:3fff:fdd2", Documentation),
            ("2001:0:4136:e378:8000:63bf:f7f7:f7f7", Public),
            ("2001:0:4136:e378:8000:63bf:80ff:fffe", Loopback),
            ("2001:0:a00:1:8000:63bf:f7f7:f7f7", Private),
            ("2001:1::8.8.8.8", Reserved),
        ]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_standard_library_agrees_about_what_it_knows(bits in any::<u32>()) {
            let address = Ipv4Addr::from_bits(bits);
            let found = of_v4(address);
            prop_assert_eq!(found == Category::Private, address.is_private());
            prop_assert_eq!(found == Category::Loopback, address.is_loopback());
            prop_assert_eq!(found == Category::LinkLocal, address.is_link_local());
            prop_assert_eq!(found == Category::Multicast, address.is_multicast());
            prop_assert_eq!(found == Category::Documentation, address.is_documentation());
            prop_assert_eq!(category(IpAddr::V6(address.to_ipv6_mapped())), found);
        }

        #[test]
        fn public_ipv6_is_global_unicast_or_carries_public_ipv4(bits in any::<u128>(), head in 0u128..16) {
            for bits in [bits, bits >> 80, bits >> 96, 0x2001 << 112 | bits >> (16 + head * 4), 0x64_ff9b << 96 | bits >> 96] {
                let address = Ipv6Addr::from_bits(bits);
                let nat64 = Ipv6Addr::from_bits(bits & !0xffff_ffff) == Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0);
                if of_v6(address) == Category::Public {
                    prop_assert!(bits >> 125 == 1 || address.to_ipv4_mapped().is_some() || nat64, "{}", address);
                    prop_assert!(!address.is_loopback() && !address.is_multicast() && !address.is_unspecified());
                }
                prop_assert!(!address.is_unicast_link_local() || of_v6(address) == Category::LinkLocal);
                prop_assert!(!address.is_unique_local() || of_v6(address) == Category::Private);
            }
        }
    }
}
