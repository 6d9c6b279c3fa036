//! State of a sandbox in the gateway, for everything that serves its connections and datagrams. All that serve its
//! connections and datagrams work with this.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use model::network::EgressPolicy;
use protocol::node::Traffic;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::buffers::Buffers;
use super::counters::Counters;
use super::dns::{Client, Resolver, ResolverSettings};
use super::intercept::{Interceptor, UpstreamTls};
use super::network::SandboxNetwork;
use super::rate::{Bandwidth, CountedRate};
use super::record::{EgressRecord, EgressReport, InjectedRequest, Report};
use super::relay::Pipes;
use super::settings::EgressSettings;
use super::verdict::Verdict;

/// The port of DNS.
pub(super) const DNS_PORT: u16 = 53;

/// Reports about one sandbox in the long run and at once. What is beyond is counted but not reported: a sandbox could
/// make thousands of refused connections per second.
const REPORTS_PER_S: u32 = 10;
const REPORTS_BURST: u32 = 200;

/// How often it is reported that a sandbox asks too much, and how long after the first time, to have more to say.
const QUERY_REPORTS: Duration = Duration::from_secs(60);
const FIRST_QUERY_REPORT: Duration = Duration::from_secs(1);

/// Decides about an address.
type Judge = fn(&EgressSettings, &EgressPolicy, IpAddr) -> Verdict;

/// What all sandboxes share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: EgressSettings,
    pub(super) resolver: Resolver,
    pub(super) pipes: Pipes,
    pub(super) buffers: Buffers,
    pub(super) upstream_tls: UpstreamTls,
    pub(super) counters: Arc<Counters>,
    pub(super) tasks: TaskTracker,
}

impl Shared {
    pub(super) fn new(settings: EgressSettings) -> Self {
        let resolver = Resolver::new(ResolverSettings {
            servers: settings.resolvers.clone(),
            hosts: settings.hosts.clone(),
            allow_private: settings.allow_private.clone(),
            deny: settings.deny.clone(),
        });
        Self {
            settings,
            resolver,
            pipes: Pipes::default(),
            buffers: Buffers::default(),
            upstream_tls: UpstreamTls::default(),
            counters: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }
}

/// What the gateway knows about a sandbox.
pub(super) struct Sandbox {
    pub(super) shared: Arc<Shared>,
    pub(super) network: Arc<dyn SandboxNetwork>,
    pub(super) client: Client,
    /// Resolves the name of a proxy: not by the policy, which is about destinations.
    pub(super) proxy_client: Client,
    pub(super) policy: watch::Sender<Arc<EgressPolicy>>,
    /// Whether its ends of connections are kept when these end.
    pub(super) is_held: watch::Sender<bool>,
    pub(super) bandwidth: Bandwidth,
    /// Counts what it receives and sends.
    pub(super) traffic: Arc<Traffic>,
    report: Report,
    reports: CountedRate,
    request_reports: CountedRate,
    pub(super) interceptor: Interceptor,
}

impl Sandbox {
    pub(super) fn new(
        shared: Arc<Shared>,
        network: Arc<dyn SandboxNetwork>,
        policy: EgressPolicy,
        report: Report,
        traffic: Arc<Traffic>,
    ) -> Self {
        let policy = Arc::new(policy);
        let settings = &shared.settings;
        let queries = settings.limits.dns_queries_per_s;
        Self {
            network,
            client: Client::new(Arc::clone(&policy), settings.default_allow, queries),
            proxy_client: Client::new(Arc::default(), true, queries),
            policy: watch::Sender::new(policy),
            is_held: watch::Sender::new(false),
            bandwidth: Bandwidth::new(settings.limits.bandwidth_mbit),
            traffic,
            report,
            reports: CountedRate::new(REPORTS_PER_S, REPORTS_BURST),
            request_reports: CountedRate::new(REPORTS_PER_S, REPORTS_BURST),
            interceptor: Interceptor::new(&settings.limits),
            shared,
        }
    }

    pub(super) fn report(&self, record: EgressRecord) {
        tracing::trace!(?record, "egress");
        self.shared.counters.outcome(record.protocol, &record.outcome);
        let Some(unreported) = self.reports.admit() else {
            return self.shared.counters.unlogged();
        };
        if unreported > 0 {
            (self.report)(EgressReport::Unreported(unreported));
        }
        (self.report)(EgressReport::Connection(record));
    }

    /// Reports a request, at a rate of its own, so that refused connections cannot keep requests out of the log.
    pub(super) fn report_request(&self, request: Box<InjectedRequest>) {
        self.shared.counters.injected();
        let Some(unreported) = self.request_reports.admit() else {
            return;
        };
        if unreported > 0 {
            (self.report)(EgressReport::UnreportedRequests(unreported));
        }
        (self.report)(EgressReport::Request(request));
    }

    /// Whether the resolver answers what is sent to a destination: at its own address, and in place of the DNS servers of
    /// the policy where the sandbox cannot reach them itself, by this decision.
    pub(super) fn is_for_resolver(&self, destination: SocketAddr, judge: Judge) -> bool {
        self.is_resolver(destination) || self.is_closed_server(destination, judge)
    }

    /// Whether a destination is the resolver itself.
    pub(super) fn is_resolver(&self, destination: SocketAddr) -> bool {
        self.is_dns(destination) && destination.ip().to_canonical() == self.network.resolver()
    }

    /// Whether a destination is a DNS server of the policy that the sandbox cannot reach, by this decision. May ask the
    /// kernel for a route.
    pub(super) fn is_closed_server(&self, destination: SocketAddr, judge: Judge) -> bool {
        let address = destination.ip().to_canonical();
        let policy = self.policy();
        self.is_dns(destination)
            && policy.has_dns_server(address)
            && judge(&self.shared.settings, &policy, address) != Verdict::Open
    }

    pub(super) fn is_dns(&self, destination: SocketAddr) -> bool {
        destination.port() == DNS_PORT && self.shared.settings.enabled
    }

    pub(super) fn policy(&self) -> Arc<EgressPolicy> {
        Arc::clone(&self.policy.borrow())
    }

    /// Waits while the sandbox's ends of connections are kept.
    pub(super) async fn released(&self) {
        let _ = self.is_held.subscribe().wait_for(|is_held| !is_held).await;
    }
}

/// Reports questions beyond the limit of the sandbox, until it is detached.
pub(super) async fn report_queries(sandbox: Arc<Sandbox>, stop: CancellationToken) {
    let beyond = &sandbox.client.beyond;
    let report = async {
        loop {
            beyond.changed().await;
            tokio::time::sleep(FIRST_QUERY_REPORT).await;
            let (waited, unanswered) = beyond.take();
            if waited + unanswered > 0 {
                (sandbox.report)(EgressReport::Queries {
                    per_second: sandbox.shared.settings.limits.dns_queries_per_s,
                    waited,
                    unanswered,
                });
                tokio::time::sleep(QUERY_REPORTS).await;
            }
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = report => {}
    }
}
