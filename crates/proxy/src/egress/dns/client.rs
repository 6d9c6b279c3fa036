//! State of a sandbox in the resolver: what it may resolve, what it was answered, and how much it asks.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use model::network::{Cidr, EgressPolicy};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, Semaphore};

use super::cache::Flights;
use super::lru::Lru;
use super::response::Response;
use crate::egress::rate::Rate;
use crate::egress::settings::EgressLimits;

/// There was no turn for a question, because its sandbox asks too much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoTurn;

/// Queries of one sandbox by UDP that wait for an answer. Each has a task of some KiB. Programs with hundreds of threads ask
/// for two kinds of addresses of a name in each.
const MAX_PENDING: usize = 1024;

/// Queries of one sandbox that are answered, in the long run and at once, most of them from the cache. Beyond, they are read
/// later: the work of the resolver is not charged to the sandbox.
const ANSWERS_PER_S: u32 = 10_000;
const ANSWERS_BURST: u32 = 2000;

/// Queries of one sandbox that DNS servers are asked at a time. Each has a socket; the others wait.
const MAX_FORWARDED: usize = 32;

/// Addresses whose names are remembered, for logs.
const MAX_NAMES: usize = 1024;

/// The resolver's state of one sandbox.
pub(crate) struct Client {
    policy: RwLock<Arc<EgressPolicy>>,
    default_allow: bool,
    names: Mutex<Lru<IpAddr, Arc<str>>>,
    answers: Rate,
    /// Questions that no cache answers.
    pub(super) rate: Rate,
    pub(super) pending: Semaphore,
    pub(super) forwarded: Semaphore,
    /// Questions of this sandbox that wait for their turn or for a server.
    pub(super) flights: Flights<Result<Arc<Response>, NoTurn>>,
    /// What was beyond the limits.
    pub(crate) beyond: Beyond,
}

/// Questions beyond the limits of a sandbox, since they were last looked at.
#[derive(Debug, Default)]
pub(crate) struct Beyond {
    waited: AtomicU64,
    unanswered: AtomicU64,
    changed: Notify,
}

impl Beyond {
    pub(super) fn count_waited(&self) {
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    pub(super) fn count_unanswered(&self) {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Returns once there are questions beyond the limits.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// How many waited, and how many got no answer. Begins to count anew.
    pub(crate) fn take(&self) -> (u64, u64) {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        (take(&self.waited), take(&self.unanswered))
    }
}

impl Client {
    /// `default_allow` is the operator's rule for addresses that the policy does not mention, and `per_second` the number
    /// of questions for which DNS servers are asked.
    pub(crate) fn new(policy: Arc<EgressPolicy>, default_allow: bool, per_second: u32) -> Self {
        Self {
            policy: RwLock::new(policy),
            default_allow,
            names: Mutex::new(Lru::new()),
            answers: Rate::new(ANSWERS_PER_S, ANSWERS_BURST),
            rate: Rate::new(per_second, per_second.saturating_mul(EgressLimits::BURST_FACTOR)),
            pending: Semaphore::new(MAX_PENDING),
            forwarded: Semaphore::new(MAX_FORWARDED),
            flights: Flights::default(),
            beyond: Beyond::default(),
        }
    }

    /// Changes what the sandbox may resolve from the next query on.
    pub(crate) fn set_policy(&self, policy: Arc<EgressPolicy>) {
        *self.policy.write() = policy;
    }

    /// The current policy.
    pub(crate) fn policy(&self) -> Arc<EgressPolicy> {
        self.policy.read().clone()
    }

    /// The name for which the sandbox was last given an address, for logs only: a DNS server of the sandbox's choice can
    /// claim any address for its names.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<String> {
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
    /// for any name would be a way out: the name itself carries data to the servers of its domain. That way is open already
    /// if the sandbox may connect to the servers that the resolver asks for it, but not if a proxy is between them: what it
    /// sends to them leaves through the proxy alone, and what the resolver sends does not.
    pub(super) fn may_resolve(&self, name: Option<&str>) -> bool {
        let policy = self.policy.read();
        let default_allow = policy.default_allow.unwrap_or(self.default_allow);
        let is_restricted = policy.denies_everything_else() || !default_allow;
        // Only the pattern for all names matches the empty one.
        !is_restricted
            || policy.allow.contains(&Cidr::ALL)
            || (policy.allows_dns_servers() && policy.proxy.is_none())
            || policy.allows_domain(name.unwrap_or_default())
    }

    /// Counts queries that were answered, and waits while there were too many.
    pub(crate) async fn pay(&self, queries: u32) {
        self.answers.pay(queries).await;
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
    use model::egress_proxy::EgressProxy;

    use super::*;

    fn client(policy: &EgressPolicy, default_allow: bool) -> Client {
        Client::new(Arc::new(policy.clone()), default_allow, 100)
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
        // Allowed servers that are not asked open no names, nor do servers that are asked and not allowed.
        let servers = ["9.9.9.9", "1.1.1.1"].map(|server| server.parse().unwrap());
        policy.allow = vec!["9.9.9.0/24".parse().unwrap()];
        check(&policy, true, [false; 4]);
        policy.dns_servers = servers.to_vec();
        check(&policy, true, [false; 4]);
        policy.dns_servers = servers[..1].to_vec();
        check(&policy, true, [true; 4]);
        check(&policy, false, [true; 4]);
        // The sandbox reaches them through its proxy only, which the resolver does not use.
        policy.proxy = Some(Box::new(EgressProxy {
            host: "8.8.8.8".parse().unwrap(),
            port: 1080,
            credentials: None,
            tls: None,
        }));
        check(&policy, true, [false; 4]);
        policy.proxy = None;
        policy.allow.clear();
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
