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
mod buffers;
mod counters;
mod dns;
mod host_routes;
mod intercept;
mod network;
mod outside;
mod rate;
mod record;
mod relay;
mod roots;
mod sandbox;
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
use std::sync::Arc;

use model::network::EgressPolicy;
use protocol::node::{EgressCounters, Traffic};
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::intercept::{AuthorityError, authority_certificate};
pub use self::network::SandboxNetwork;
pub use self::record::{EgressRecord, EgressReport, InjectedRequest, Outcome, Protocol, Report};
pub use self::roots::host_roots;
pub use self::settings::{EgressLimits, EgressSettings};
pub use self::verdict::{Reason, check_proxy, closed_to_all};
use sandbox::{Sandbox, Shared, report_queries};

/// The gateway of a node.
#[derive(Debug)]
pub struct EgressGateway {
    shared: Arc<Shared>,
    runtime: Handle,
    stop: CancellationToken,
}

impl EgressGateway {
    /// A gateway with the operator's rules, whose connections run on `runtime`.
    #[must_use]
    pub fn new(settings: EgressSettings, runtime: Handle) -> Self {
        Self {
            shared: Arc::new(Shared::new(settings)),
            runtime,
            stop: CancellationToken::new(),
        }
    }

    /// The operator's settings of the gateway.
    #[must_use]
    pub fn settings(&self) -> &EgressSettings {
        &self.shared.settings
    }

    /// Connects a sandbox, until the attachment is dropped. What it receives and sends is counted by `traffic`.
    ///
    /// # Errors
    /// When the sockets cannot be polled.
    pub fn attach(
        &self,
        network: Arc<dyn SandboxNetwork>,
        policy: EgressPolicy,
        report: Report,
        traffic: Arc<Traffic>,
    ) -> io::Result<Attachment> {
        // A socket is polled by the runtime on which it was registered.
        let _runtime = self.runtime.enter();
        let listener = tokio::net::TcpListener::from_std(network.tcp()?)?;
        let shared = Arc::clone(&self.shared);
        let sandbox = Arc::new(Sandbox::new(shared, network, policy, report, traffic));
        let stop = self.stop.child_token();
        let tcp = tcp::serve(Arc::clone(&sandbox), listener, stop.clone());
        let udp = udp::serve(Arc::clone(&sandbox), stop.clone());
        let udp = async move {
            if let Err(error) = udp.await {
                tracing::error!("cannot receive datagrams of a sandbox, it has no UDP and no DNS from now on: {error}");
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

    /// Like [`Self::set_policy`], for a sandbox whose processes are stopped, to be written to disk. Connections that
    /// the policy does not allow are reset outside at once, and in the sandbox with the next policy: a checkpoint does not
    /// contain the error of a socket, so a connection that is reset before it is written would seem to have been closed
    /// properly.
    pub fn hold(&self, policy: EgressPolicy) {
        self.sandbox.is_held.send_replace(true);
        self.change_policy(policy);
    }

    fn change_policy(&self, policy: EgressPolicy) {
        let policy = Arc::new(policy);
        self.sandbox.client.set_policy(Arc::clone(&policy));
        self.sandbox.policy.send_replace(policy);
    }

    /// The policy that applies now.
    #[must_use]
    pub fn policy(&self) -> EgressPolicy {
        EgressPolicy::clone(&self.sandbox.policy.borrow())
    }
}
