//! The gateway between sandboxes and the internet: it decides what leaves them, and forwards it.
//!
//! A sandbox has no other way out. Everything that it sends to addresses other than its own arrives at sockets of the
//! gateway ([`SandboxNetwork`]), with the original destination. For each connection the gateway decides from the operator's
//! rules and the policy of the sandbox ([`verdict`]), connects on the host, and relays bytes. A refused connection is
//! reset, a refused datagram answered with an ICMP error, and both are reported ([`EgressRecord`]).
//!
//! Invariants: what is refused sends no packet from the host. A name is no reason to connect to an address that the
//! resolver did not give for it. Everything that a sandbox can make the gateway hold is bounded per sandbox.
//!
//! If the policy has a proxy, it makes the connections that are allowed ([`socks`]); none are made without it.
//!
//! Connections to hosts for which the sandbox has injection rules are intercepted ([`intercept`]); all others are relayed as
//! bytes.
//!
//! DNS queries to the address of the resolver are answered here too ([`dns`]). Port 53 of other addresses is like any other
//! port.

mod addresses;
mod counters;
mod dns;
mod host_routes;
mod intercept;
mod outside;
mod rate;
mod record;
mod relay;
mod roots;
mod settings;
mod sizes;
mod sniff;
mod socket;
mod socks;
mod tcp;
mod udp;
mod verdict;

use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use model::network::EgressPolicy;
use protocol::node::EgressCounters;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use self::intercept::{AuthorityError, authority_certificate};
pub use self::record::{EgressRecord, EgressReport, InjectedRequest, Outcome, Protocol};
pub use self::settings::{EgressLimits, EgressSettings};
pub use self::verdict::{Reason, check_proxy};
use counters::Counters;
use dns::{Client, Resolver, ResolverSettings};
use rate::Bandwidth;
use verdict::Verdict;

/// The gateway's sockets in the network of a sandbox.
pub trait SandboxNetwork: Debug + Send + Sync + 'static {
    /// A non-blocking listener that accepts every TCP connection to other addresses than the sandbox's own. The local
    /// address of a connection is its destination.
    ///
    /// # Errors
    /// When it cannot be duplicated.
    fn tcp(&self) -> io::Result<TcpListener>;

    /// The descriptor that becomes readable when datagrams wait for [`Self::receive`].
    fn udp(&self) -> BorrowedFd<'_>;

    /// Receives a datagram of the sandbox without waiting. Returns its length, its source and its destination.
    ///
    /// # Errors
    /// With [`io::ErrorKind::WouldBlock`] when none waits.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)>;

    /// Sends a datagram to the sandbox as if it came from `from`.
    ///
    /// # Errors
    /// When it is too long, or the kernel refuses it.
    fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()>;

    /// The address at which the resolver answers.
    fn resolver(&self) -> IpAddr;

    /// Tells the sender of a datagram that it was refused.
    ///
    /// # Errors
    /// As [`Self::send`].
    fn refuse(&self, source: SocketAddr, destination: SocketAddr) -> io::Result<()>;
}

/// The port of DNS.
const DNS_PORT: u16 = 53;

/// Decides about an address.
type Judge = fn(&EgressSettings, &EgressPolicy, IpAddr) -> Verdict;

/// Receives what the gateway reports about a sandbox. It must not wait.
pub type Report = Box<dyn Fn(EgressReport) + Send + Sync>;

/// The gateway of a node.
#[derive(Debug)]
pub struct EgressGateway {
    shared: Arc<Shared>,
    runtime: Handle,
    stop: CancellationToken,
}

/// What all sandboxes share.
#[derive(Debug)]
struct Shared {
    settings: EgressSettings,
    resolver: Resolver,
    pipes: relay::Pipes,
    buffers: udp::Buffers,
    upstream_tls: intercept::UpstreamTls,
    counters: Arc<Counters>,
    tasks: TaskTracker,
}

/// What the gateway knows about a sandbox.
struct Sandbox {
    shared: Arc<Shared>,
    network: Arc<dyn SandboxNetwork>,
    client: Client,
    /// Resolves the name of a proxy: not by the policy, which is about destinations.
    proxy_client: Client,
    policy: watch::Sender<Arc<EgressPolicy>>,
    /// Whether its ends of connections are kept when these end.
    is_held: watch::Sender<bool>,
    bandwidth: Bandwidth,
    report: Report,
    reports: rate::CountedRate,
    request_reports: rate::CountedRate,
    interceptor: intercept::Interceptor,
}

impl EgressGateway {
    /// A gateway with the operator's rules, whose connections run on `runtime`.
    #[must_use]
    pub fn new(settings: EgressSettings, runtime: Handle) -> Self {
        let resolver = Resolver::new(ResolverSettings {
            servers: settings.resolvers.clone(),
            hosts: settings.hosts.clone(),
            allow_private: settings.allow_private.clone(),
            deny: settings.deny.clone(),
        });
        Self {
            shared: Arc::new(Shared {
                settings,
                resolver,
                pipes: relay::Pipes::default(),
                buffers: udp::Buffers::default(),
                upstream_tls: intercept::UpstreamTls::default(),
                counters: Arc::default(),
                tasks: TaskTracker::new(),
            }),
            runtime,
            stop: CancellationToken::new(),
        }
    }

    /// What the operator says.
    #[must_use]
    pub fn settings(&self) -> &EgressSettings {
        &self.shared.settings
    }

    /// Connects a sandbox, until the attachment is dropped.
    ///
    /// # Errors
    /// When the sockets cannot be polled.
    pub fn attach(
        &self,
        network: Arc<dyn SandboxNetwork>,
        policy: EgressPolicy,
        report: Report,
    ) -> io::Result<Attachment> {
        // A socket is polled by the runtime on which it was registered.
        let _runtime = self.runtime.enter();
        let listener = tokio::net::TcpListener::from_std(network.tcp()?)?;
        let policy = Arc::new(policy);
        let settings = &self.shared.settings;
        let queries = settings.limits.dns_queries_per_s;
        let sandbox = Arc::new(Sandbox {
            shared: Arc::clone(&self.shared),
            network,
            client: Client::new(Arc::clone(&policy), settings.default_allow, queries),
            proxy_client: Client::new(Arc::default(), true, queries),
            policy: watch::Sender::new(policy),
            is_held: watch::Sender::new(false),
            bandwidth: Bandwidth::new(settings.limits.bandwidth_mbit),
            report,
            reports: rate::CountedRate::new(REPORTS_PER_S, REPORTS_BURST),
            request_reports: rate::CountedRate::new(REPORTS_PER_S, REPORTS_BURST),
            interceptor: intercept::Interceptor::new(&settings.limits),
        });
        let stop = self.stop.child_token();
        let tcp = tcp::serve(Arc::clone(&sandbox), listener, stop.clone());
        let udp = udp::serve(Arc::clone(&sandbox), stop.clone());
        let udp = async move {
            if let Err(error) = udp.await {
                tracing::error!("receive datagrams of a sandbox: {error}");
            }
        };
        let queries = report_queries(Arc::clone(&sandbox), stop.clone());
        self.shared.tasks.spawn_on(tcp, &self.runtime);
        self.shared.tasks.spawn_on(udp, &self.runtime);
        self.shared.tasks.spawn_on(queries, &self.runtime);
        Ok(Attachment {
            sandbox,
            _stop: stop.drop_guard(),
        })
    }

    /// What was counted so far, over all sandboxes.
    #[must_use]
    pub fn counters(&self) -> EgressCounters {
        EgressCounters {
            dns: self.shared.resolver.counters(),
            ..self.shared.counters.read()
        }
    }

    /// Resets all connections and waits until nothing is forwarded any more. Sandboxes cannot be attached afterwards.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

/// Reports about one sandbox in the long run and at once. What is beyond is counted but not reported: a sandbox could
/// make thousands of refused connections per second.
const REPORTS_PER_S: u32 = 10;
const REPORTS_BURST: u32 = 200;

/// How often it is reported that a sandbox asks too much, and how long after the first time, to have more to say.
const QUERY_REPORTS: Duration = Duration::from_secs(60);
const FIRST_QUERY_REPORT: Duration = Duration::from_secs(1);

/// Reports questions beyond the limit of the sandbox, until it is detached.
async fn report_queries(sandbox: Arc<Sandbox>, stop: CancellationToken) {
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

impl Sandbox {
    fn report(&self, record: EgressRecord) {
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

    /// Requests have a rate of their own, so that refused connections cannot keep them out of the log.
    fn report_request(&self, request: Box<InjectedRequest>) {
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
    fn is_for_resolver(&self, destination: SocketAddr, judge: Judge) -> bool {
        self.is_resolver(destination) || self.is_closed_server(destination, judge)
    }

    /// Whether a destination is the resolver itself.
    fn is_resolver(&self, destination: SocketAddr) -> bool {
        self.is_dns(destination) && destination.ip().to_canonical() == self.network.resolver()
    }

    /// Whether a destination is a DNS server of the policy that the sandbox cannot reach, by this decision. May ask the
    /// kernel for a route.
    fn is_closed_server(&self, destination: SocketAddr, judge: Judge) -> bool {
        let address = destination.ip().to_canonical();
        let policy = self.policy();
        self.is_dns(destination)
            && policy.has_dns_server(address)
            && judge(&self.shared.settings, &policy, address) != Verdict::Open
    }

    fn is_dns(&self, destination: SocketAddr) -> bool {
        destination.port() == DNS_PORT && self.shared.settings.enabled
    }

    fn policy(&self) -> Arc<EgressPolicy> {
        Arc::clone(&self.policy.borrow())
    }

    /// Waits while the sandbox's ends of connections are kept.
    async fn released(&self) {
        let _ = self.is_held.subscribe().wait_for(|is_held| !is_held).await;
    }
}

/// The connection of a sandbox to the gateway. On drop all its connections are reset, and nothing leaves the sandbox any
/// more.
pub struct Attachment {
    sandbox: Arc<Sandbox>,
    _stop: DropGuard,
}

impl Debug for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attachment").finish_non_exhaustive()
    }
}

impl Attachment {
    /// Changes the policy: at once for new connections, and open ones that it does not allow are reset.
    pub fn set_policy(&self, policy: EgressPolicy) {
        self.change_policy(policy);
        self.sandbox.is_held.send_replace(false);
    }

    /// The same for a sandbox whose processes are stopped, to be written to disk. Connections that the policy does not
    /// allow are reset outside at once, and in the sandbox with the next policy: an image does not contain the error of
    /// a socket, so a connection that is reset before it is written would seem to have been closed properly.
    pub fn hold(&self, policy: EgressPolicy) {
        self.sandbox.is_held.send_replace(true);
        self.change_policy(policy);
    }

    fn change_policy(&self, policy: EgressPolicy) {
        let policy = Arc::new(policy);
        self.sandbox.client.set_policy(Arc::clone(&policy));
        self.sandbox.policy.send_replace(policy);
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> EgressPolicy {
        EgressPolicy::clone(&self.sandbox.policy.borrow())
    }
}
