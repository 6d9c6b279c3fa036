//! Peers: clients as identified by their addresses, and rate limits per peer for expensive operations.
//!
//! An IPv6 host commonly has a whole /64, so a /64 is one peer. A reverse proxy and loopback stand for many clients:
//! one of them must not use up the limits of the others, so they are not peers, and only global limits apply to them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// A client address, or a range of addresses that counts as one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Peer {
    /// An IPv4 address.
    V4(Ipv4Addr),
    /// The first 64 bits of an IPv6 address.
    V6(u64),
}

impl Peer {
    /// The peer of an address; `None` for addresses that many clients share.
    pub(crate) fn of(address: IpAddr, shared: &[Network]) -> Option<Self> {
        let address = address.to_canonical();
        if address.is_loopback() || shared.iter().any(|network| network.contains(address)) {
            return None;
        }
        Some(match address {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => Self::V6((address.to_bits() >> 64) as u64),
        })
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::V4(address) => address.fmt(f),
            Self::V6(half) => write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(*half) << 64)),
        }
    }
}

/// Extension of a request: who sent it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientPeer {
    /// `None` for addresses that many clients share.
    pub(crate) peer: Option<Peer>,
    /// Whether the connection comes from this machine. So do those of a reverse proxy on it.
    pub(crate) is_loopback: bool,
    /// Whether the connection is encrypted.
    pub(crate) is_tls: bool,
}

/// A range of addresses, written as `10.0.0.0/8`, `fd00::/8` or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(other)) => {
                let differing = ours.to_bits() ^ other.to_bits();
                differing.leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(ours), IpAddr::V6(other)) => {
                let differing = ours.to_bits() ^ other.to_bits();
                differing.leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }
}

/// The text is not a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address or a network such as 10.0.0.0/8")]
pub struct InvalidNetwork(String);

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let wrong = || InvalidNetwork(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            // `parse` alone would accept a sign.
            Some(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().map_err(|_| wrong())?,
            Some(_) => return Err(wrong()),
            None => most,
        };
        if prefix > most {
            return Err(wrong());
        }
        Ok(Self { address, prefix })
    }
}

/// Maximum number of peers with a rate of their own. Beyond it, all new peers share one rate.
const PEERS_MAX: usize = 8192;

/// A rate limit per peer: a burst of `burst`, and one permit per `interval` in the long run.
#[derive(Debug)]
pub(crate) struct PeerRates {
    interval: Duration,
    burst: u32,
    /// When each peer will have all its permits again. Peers that have them are removed when the table is full.
    full_at: Mutex<HashMap<Option<Peer>, Instant>>,
}

impl PeerRates {
    pub(crate) fn new(burst: u32, interval: Duration) -> Self {
        Self {
            interval,
            burst,
            full_at: Mutex::default(),
        }
    }

    /// Takes a permit of a peer.
    ///
    /// # Errors
    /// When none is left, with the time until the next one.
    pub(crate) fn take(&self, peer: Peer) -> Result<RatePermit, Duration> {
        let now = Instant::now();
        let mut table = self.full_at.lock();
        let key = key(&mut table, peer, now);
        let full_at = table.entry(key).or_insert(now);
        let next = (*full_at).max(now) + self.interval;
        let latest = now + self.interval * self.burst;
        if next > latest {
            return Err(next - latest);
        }
        *full_at = next;
        Ok(RatePermit(key))
    }

    /// Whether a peer has a permit left, without taking it.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn check(&self, peer: Peer) -> Result<(), Duration> {
        let now = Instant::now();
        let mut table = self.full_at.lock();
        let key = key(&mut table, peer, now);
        let next = table.get(&key).copied().unwrap_or(now).max(now) + self.interval;
        let latest = now + self.interval * self.burst;
        if next > latest { Err(next - latest) } else { Ok(()) }
    }

    /// Takes permits of a peer for what was already done. What it does not have is a debt.
    pub(crate) fn charge(&self, peer: Peer, permits: u32) {
        let now = Instant::now();
        let mut table = self.full_at.lock();
        let key = key(&mut table, peer, now);
        let full_at = table.entry(key).or_insert(now);
        *full_at = (*full_at).max(now) + self.interval.saturating_mul(permits);
    }

    /// Returns a permit whose operation turned out to be cheap.
    pub(crate) fn give_back(&self, permit: &RatePermit) {
        if let Some(full_at) = self.full_at.lock().get_mut(&permit.0)
            && let Some(earlier) = full_at.checked_sub(self.interval)
        {
            *full_at = earlier;
        }
    }
}

/// The key of the rate that applies to a peer: its own, or the shared one when the table is full.
fn key(table: &mut HashMap<Option<Peer>, Instant>, peer: Peer, now: Instant) -> Option<Peer> {
    if table.contains_key(&Some(peer)) {
        return Some(peer);
    }
    if table.len() >= PEERS_MAX {
        table.retain(|_, full_at| *full_at > now);
    }
    (table.len() < PEERS_MAX).then_some(peer)
}

/// A permit that was taken, with the rate that it was taken from.
#[derive(Debug)]
pub(crate) struct RatePermit(Option<Peer>);

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn peers_are_identified_by_address() {
        let shared: Vec<Network> = ["10.1.0.0/16", "fd00::/8", "192.0.2.7"]
            .iter()
            .map(|text| text.parse().expect("a network"))
            .collect();
        let peer = |text| Peer::of(address(text), &shared);
        for none in [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "10.1.255.1",
            "::ffff:10.1.0.1",
            "fdff::1",
            "192.0.2.7",
        ] {
            assert_eq!(peer(none), None, "{none}");
        }
        assert_eq!(peer("10.2.0.1"), Some(Peer::V4(Ipv4Addr::new(10, 2, 0, 1))));
        assert_eq!(peer("::ffff:10.2.0.1"), peer("10.2.0.1"));
        assert_ne!(peer("192.0.2.8"), peer("192.0.2.9"));
        assert_eq!(peer("2001:db8:1:2::1"), peer("2001:db8:1:2:ffff::9"));
        assert_ne!(peer("2001:db8:1:2::1"), peer("2001:db8:1:3::1"));
        assert_eq!(
            peer("2001:db8:1:2::1").expect("a peer").to_string(),
            "2001:db8:1:2::/64"
        );
    }

    #[test]
    fn networks_are_parsed() {
        let all: Network = "0.0.0.0/0".parse().expect("a network");
        assert!(all.contains(address("203.0.113.1")) && !all.contains(address("::1")));
        for wrong in [
            "",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0/8",
            "example.com",
            "10.0.0.0/8/8",
        ] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rates_are_per_peer_and_shared_beyond_the_maximum() {
        let rates = PeerRates::new(2, Duration::from_secs(1));
        let (one, other) = (Peer::V6(1), Peer::V6(2));
        assert!(rates.take(one).is_ok());
        let permit = rates.take(one).expect("the second");
        assert_eq!(rates.take(one).expect_err("empty"), Duration::from_secs(1));
        assert!(rates.take(other).is_ok());
        rates.give_back(&permit);
        assert!(rates.take(one).is_ok());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(rates.take(one).is_ok() && rates.take(one).is_err());

        let taken = (0..3 * PEERS_MAX as u64)
            .filter(|n| rates.take(Peer::V6(n + 10)).is_ok())
            .count();
        assert!(taken <= PEERS_MAX + 2, "{taken}");
        assert!(rates.full_at.lock().len() <= PEERS_MAX + 1);
        // Peers with all their permits are removed.
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(rates.take(Peer::V6(u64::MAX)).is_ok());
        assert!(rates.full_at.lock().len() <= 2);
    }
}
