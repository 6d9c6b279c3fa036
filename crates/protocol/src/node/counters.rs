//! What the egress gateway of a node counts. Totals are of all sandboxes, also of those that ended.

use serde::{Deserialize, Serialize};

/// Counters of the egress gateway of a node, since the node started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EgressCounters {
    /// TCP connections.
    pub tcp: EgressConnections,
    /// UDP flows.
    pub udp: EgressConnections,
    /// Bytes that left sandboxes, without headers.
    pub bytes_sent: u64,
    /// Bytes that sandboxes received, without headers.
    pub bytes_received: u64,
    /// Bytes that sandboxes sent over streams that were opened into them, which are not those of the gateway.
    #[serde(default)]
    pub streams_sent: u64,
    /// Bytes that sandboxes received over such streams.
    #[serde(default)]
    pub streams_received: u64,
    /// Connections and flows that are not in the log of their sandbox, because there were too many at once.
    pub unlogged: u64,
    /// TCP connections that were intercepted.
    #[serde(default)]
    pub intercepted: u64,
    /// Requests on intercepted connections that a rule applied to.
    #[serde(default)]
    pub injected: u64,
    /// Requests on intercepted connections that were not forwarded.
    #[serde(default)]
    pub requests_refused: u64,
    /// Requests on intercepted connections beyond the limit of a sandbox.
    #[serde(default)]
    pub requests_limited: u64,
    /// DNS queries.
    pub dns: DnsCounters,
}

/// Connections of one protocol. Those that carry DNS queries to the resolver are at most counted as open; [`DnsCounters`]
/// has their queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EgressConnections {
    /// Open connections, with those that the gateway is still deciding about.
    pub open: u64,
    /// Allowed connections that have ended.
    pub ended: u64,
    /// Refused connections.
    pub denied: u64,
    /// Allowed connections whose destination could not be reached.
    pub failed: u64,
}

/// DNS queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DnsCounters {
    /// Queries of sandboxes, and names that the gateway resolved for connections.
    pub queries: u64,
    /// Queries that the cache answered.
    pub cache_hits: u64,
    /// Queries that a policy refused.
    pub refused: u64,
    /// Queries that waited, because their sandbox asks more than its limit allows.
    pub limited: u64,
    /// Queries that got no answer, because too many of their sandbox waited.
    #[serde(default)]
    pub unanswered: u64,
    /// Queries that were forwarded to DNS servers.
    pub forwarded: u64,
    /// Forwarded queries that no server answered.
    pub failed: u64,
}
