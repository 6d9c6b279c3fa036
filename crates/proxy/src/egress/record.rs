//! What the gateway reports about connections.

use std::net::SocketAddr;
use std::time::Duration;

use super::verdict::Reason;

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// A TCP connection.
    Tcp,
    /// A UDP flow: datagrams between two pairs of address and port.
    Udp,
}

impl Protocol {
    /// Name in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A report about a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressReport {
    /// A request got headers that the sandbox does not know.
    Request(Box<InjectedRequest>),
    /// Number of requests that were not reported before the next one, because there were too many in a short time.
    UnreportedRequests(u64),
    /// A connection has ended or was refused.
    Connection(EgressRecord),
    /// Questions about names were beyond the limit of the sandbox since the last such report.
    Queries {
        /// The limit, in questions per second.
        per_second: u32,
        /// Number of queries that waited.
        waited: u64,
        /// Number of queries that got no answer, because too many waited.
        unanswered: u64,
    },
    /// Number of connections that were not reported before the next one, because there were too many in a short time.
    Unreported(u64),
}

/// Receives what the gateway reports about a sandbox. It must not wait.
pub type Report = Box<dyn Fn(EgressReport) + Send + Sync>;

/// A request that a rule of the sandbox applied to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedRequest {
    /// How logs name the rule.
    pub rule: String,
    /// Host of the request.
    pub host: String,
    /// Port of the request.
    pub port: u16,
    /// Method that the sandbox sent.
    pub method: String,
    /// Path that the sandbox sent, without the query.
    pub path: String,
    /// The status of the response; none if there was none.
    pub status: Option<u16>,
}

/// A connection of a sandbox that has ended or was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressRecord {
    /// Protocol of the connection.
    pub protocol: Protocol,
    /// The address that the sandbox requested.
    pub destination: SocketAddr,
    /// The domain that the connection named, or for which the sandbox was given that address. A claim of the sandbox.
    pub name: Option<String>,
    /// How the connection ended.
    pub outcome: Outcome,
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The connection was refused, and nothing left the host.
    Denied(Reason),
    /// The connection was allowed, but could not be made, for this reason.
    Failed(String),
    /// The connection was allowed, and has ended.
    Ended {
        /// Bytes from the sandbox.
        sent: u64,
        /// Bytes to the sandbox.
        received: u64,
        /// How long the connection was open.
        took: Duration,
        /// Why the gateway ended the connection, if it did.
        cut: Option<Reason>,
    },
}
