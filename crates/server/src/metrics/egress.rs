//! Metrics of the egress gateway. The node counts; its values are taken over when the metrics are scraped.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use protocol::node::{EgressConnections, EgressCounters};

use super::series::{Labels, series, with_unit};

type OutcomeLabels = [(&'static str, &'static str); 2];
/// Takes one value out of what the node counted.
type Read = fn(&EgressCounters) -> u64;

#[derive(Debug)]
pub(super) struct EgressSeries {
    connections: Family<OutcomeLabels, Counter>,
    open: Family<Labels, Gauge>,
    totals: Vec<(Counter, Read)>,
}

impl EgressSeries {
    /// Exported from the first scrape on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let connections = series(
            registry,
            "egress_connections",
            "Outbound connections of sandboxes that ended, were refused or failed, by protocol and outcome",
        );
        let open = series(
            registry,
            "egress_open_connections",
            "Open outbound connections of sandboxes, by protocol",
        );
        let mut totals = Vec::new();
        let bytes: [(_, _, Read); 4] = [
            ("egress_sent", "Bytes that left sandboxes", |counters| {
                counters.bytes_sent
            }),
            (
                "egress_received",
                "Bytes that sandboxes received from outside",
                |counters| counters.bytes_received,
            ),
            (
                "ingress_sent",
                "Bytes that sandboxes sent to their clients",
                |counters| counters.streams_sent,
            ),
            (
                "ingress_received",
                "Bytes that sandboxes received from their clients",
                |counters| counters.streams_received,
            ),
        ];
        for (name, help, value) in bytes {
            totals.push((with_unit(registry, name, Unit::Bytes, help, Counter::default()), value));
        }
        let counts: [(_, _, Read); 12] = [
            (
                "egress_connections_unlogged",
                "Outbound connections that are not in the log of their sandbox because there were too many at once",
                |counters| counters.unlogged,
            ),
            (
                "egress_intercepted_connections",
                "Outbound connections of sandboxes to hosts of injection rules, which were intercepted",
                |counters| counters.intercepted,
            ),
            (
                "egress_injected_requests",
                "Requests of sandboxes that an injection rule applied to",
                |counters| counters.injected,
            ),
            (
                "egress_refused_requests",
                "Requests on intercepted connections that were not forwarded",
                |counters| counters.requests_refused,
            ),
            (
                "egress_limited_requests",
                "Requests on intercepted connections that were answered with 429, because their sandbox sent too many",
                |counters| counters.requests_limited,
            ),
            (
                "dns_queries",
                "DNS queries of sandboxes, and names that were resolved for their connections",
                |counters| counters.dns.queries,
            ),
            ("dns_cache_hits", "Questions that the DNS cache answered", |counters| {
                counters.dns.cache_hits
            }),
            (
                "dns_refused",
                "Questions that the network policy of a sandbox refused",
                |counters| counters.dns.refused,
            ),
            (
                "dns_limited",
                "DNS queries that waited because their sandbox has a limit",
                |counters| counters.dns.limited,
            ),
            (
                "dns_unanswered",
                "DNS queries that got no answer because too many of their sandbox waited",
                |counters| counters.dns.unanswered,
            ),
            ("dns_forwarded", "Questions that were sent to DNS servers", |counters| {
                counters.dns.forwarded
            }),
            ("dns_failed", "Questions that no DNS server answered", |counters| {
                counters.dns.failed
            }),
        ];
        for (name, help, value) in counts {
            totals.push((series(registry, name, help), value));
        }
        let all = Self {
            connections,
            open,
            totals,
        };
        all.set(&EgressCounters::default());
        all
    }

    /// Takes over what the node counted.
    pub(super) fn set(&self, counters: &EgressCounters) {
        for (protocol, connections) in [("tcp", &counters.tcp), ("udp", &counters.udp)] {
            let EgressConnections {
                open,
                ended,
                denied,
                failed,
            } = *connections;
            let gauge = self.open.get_or_create(&[("protocol", protocol)]);
            gauge.set(i64::try_from(open).unwrap_or(i64::MAX));
            for (outcome, count) in [("ended", ended), ("denied", denied), ("failed", failed)] {
                let labels = [("protocol", protocol), ("outcome", outcome)];
                store(&self.connections.get_or_create(&labels), count);
            }
        }
        for (counter, value) in &self.totals {
            store(counter, value(counters));
        }
    }
}

fn store(counter: &Counter, count: u64) {
    counter.inner().store(count, Ordering::Relaxed);
}
