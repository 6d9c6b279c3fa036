//! A sandbox as the resolver knows it: what it may resolve, what it was told, and how much it asks.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use model::network::{Cidr, EgressPolicy};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;

use super::lru::Lru;
use crate::egress::rate::Rate;

/// Queries of one sandbox in the long run: 100 per second. Package managers ask for some hundred names in a burst.
const PER_SECOND: u32 = 100;

/// Queries of one sandbox at once.
const BURST: u32 = 200;

/// Queries of one sandbox that wait for an answer. Each has a task and a datagram.
const MAX_PENDING: usize = 256;

/// Queries of one sandbox that DNS servers are asked at a time. Each has a socket; the others wait.
const MAX_FORWARDED: usize = 32;

/// Addresses whose names are remembered, for logs.
const MAX_NAMES: usize = 1024;

/// One sandbox.
pub(in crate::egress) struct Client {
    policy: RwLock<Arc<EgressPolicy>>,
    default_allow: bool,
    names: Mutex<Lru<IpAddr, Arc<str>>>,
    rate: Rate,
    pub(super) pending: Semaphore,
    pub(super) forwarded: Semaphore,
}

impl Client {
    /// `default_allow` is the operator's rule for addresses that the policy does not mention.
    pub(in crate::egress) fn new(policy: Arc<EgressPolicy>, default_allow: bool) -> Self {
        Self {
            policy: RwLock::new(policy),
            default_allow,
            names: Mutex::new(Lru::new()),
            rate: Rate::new(PER_SECOND, BURST),
            pending: Semaphore::new(MAX_PENDING),
            forwarded: Semaphore::new(MAX_FORWARDED),
        }
    }

    /// Changes what the sandbox may resolve from the next query on.
    pub(in crate::egress) fn set_policy(&self, policy: Arc<EgressPolicy>) {
        *self.policy.write() = policy;
    }

    /// The current policy.
    pub(in crate::egress) fn policy(&self) -> Arc<EgressPolicy> {
        self.policy.read().clone()
    }

    /// The name for which the sandbox was last given an address, for logs only: a DNS server of the sandbox's choice can
    /// claim any address for its names.
    pub(in crate::egress) fn name_of(&self, address: IpAddr) -> Option<String> {
        let mut names = self.names.lock();
        names.get(&address.to_canonical()).map(|name| (**name).to_owned())
    }

    pub(super) fn remember(&self, addresses: impl Iterator<Item = IpAddr>, name: &str) {
        let name: Arc<str> = name.into();
        let mut names = self.names.lock();
        for address in addresses.take(MAX_NAMES) {
            names.insert(address.to_canonical(), name.clone());
            if names.len() > MAX_NAMES {
                names.pop();
            }
        }
    }

    /// Whether the sandbox may resolve a name. `None` is a name that no host has. If most addresses are closed, a query
    /// for any name would be a way out: the name itself carries data to the servers of its domain.
    pub(super) fn may_resolve(&self, name: Option<&str>) -> bool {
        let policy = self.policy.read();
        let default_allow = policy.default_allow.unwrap_or(self.default_allow);
        let is_restricted = policy.denies_everything_else() || !default_allow;
        // Only the pattern for all names matches the empty one.
        !is_restricted || policy.allow.contains(&Cidr::ALL) || policy.allows_domain(name.unwrap_or_default())
    }

    /// Whether the sandbox has not exceeded its rate. Counts a query if so.
    pub(super) fn is_in_rate(&self) -> bool {
        self.rate.admit()
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("policy", &self.policy())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn client(policy: &EgressPolicy, default_allow: bool) -> Client {
        Client::new(Arc::new(policy.clone()), default_allow)
    }

    #[test]
    fn names_are_open_unless_addresses_are_closed() {
        let mut policy = EgressPolicy {
            allow_domains: vec!["*.example.com".parse().unwrap(), "a.example".parse().unwrap()],
            ..EgressPolicy::default()
        };
        let check = |policy: &EgressPolicy, default_allow: bool, expected: [bool; 4]| {
            let names = [Some("a.example"), Some("x.example.com"), Some("example.com"), None];
            let client = client(policy, default_allow);
            assert_eq!(names.map(|name| client.may_resolve(name)), expected, "{policy:?}");
        };
        check(&policy, true, [true; 4]);
        check(&policy, false, [true, true, false, false]);
        policy.deny = vec!["192.0.2.0/24".parse().unwrap()];
        check(&policy, true, [true; 4]);
        policy.deny.push(Cidr::ALL);
        check(&policy, true, [true, true, false, false]);
        policy.allow = vec!["192.0.2.0/24".parse().unwrap()];
        check(&policy, true, [true, true, false, false]);
        policy.allow.push(Cidr::ALL);
        check(&policy, true, [true; 4]);
        check(&policy, false, [true; 4]);
        policy.allow.clear();
        policy.allow_domains = vec!["*".parse().unwrap()];
        check(&policy, true, [true; 4]);
        policy.allow_domains.clear();
        check(&policy, true, [false; 4]);
        check(&EgressPolicy::default(), true, [true; 4]);
        check(&EgressPolicy::default(), false, [false; 4]);
        let of_team = |default_allow| EgressPolicy {
            default_allow: Some(default_allow),
            ..EgressPolicy::default()
        };
        check(&of_team(true), false, [true; 4]);
        check(&of_team(false), true, [false; 4]);
    }

    #[test]
    fn a_new_policy_applies_at_once() {
        let client = client(&EgressPolicy::default(), true);
        assert!(client.may_resolve(Some("a.example")));
        let closed = Arc::new(EgressPolicy {
            deny: vec![Cidr::ALL],
            ..EgressPolicy::default()
        });
        client.set_policy(closed.clone());
        assert!(!client.may_resolve(Some("a.example")));
        assert_eq!(client.policy(), closed);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_has_a_burst() {
        let client = client(&EgressPolicy::default(), true);
        let admitted = || (0..1000).filter(|_| client.is_in_rate()).count();
        assert_eq!(admitted(), 200);
        for (pass_ms, want) in [(9, 0), (1, 1), (990, 99), (3_600_000, 200)] {
            tokio::time::advance(Duration::from_millis(pass_ms)).await;
            assert_eq!(admitted(), want);
        }
    }

    #[test]
    fn names_are_remembered_up_to_a_bound() {
        let client = client(&EgressPolicy::default(), true);
        let address = |bits: usize| IpAddr::V4(u32::try_from(bits).unwrap().into());
        client.remember((0..MAX_NAMES).map(address), "a.example");
        assert_eq!(client.name_of(address(0)).as_deref(), Some("a.example"));
        client.remember([address(0), address(MAX_NAMES)].into_iter(), "b.example");
        assert_eq!(client.name_of(address(0)).as_deref(), Some("b.example"));
        assert_eq!(client.name_of(address(1)), None);
        assert_eq!(client.name_of(address(2)).as_deref(), Some("a.example"));
        let IpAddr::V4(v4) = address(2) else { unreachable!() };
        assert_eq!(client.name_of(v4.to_ipv6_mapped().into()).as_deref(), Some("a.example"));
        client.remember((0..1_000_000).map(address), "c.example");
        assert_eq!(client.names.lock().len(), MAX_NAMES);
    }
}
