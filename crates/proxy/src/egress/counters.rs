//! What the gateway counts for the operator, over all sandboxes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use protocol::node::{EgressConnections, EgressCounters};

use super::rate::Direction;
use super::record::{Outcome, Protocol};

/// Counters since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    tcp: Connections,
    udp: Connections,
    sent: AtomicU64,
    received: AtomicU64,
    unlogged: AtomicU64,
    intercepted: AtomicU64,
    injected: AtomicU64,
    requests_refused: AtomicU64,
    requests_limited: AtomicU64,
}

/// Counters of one protocol.
#[derive(Debug, Default)]
struct Connections {
    open: AtomicU64,
    ended: AtomicU64,
    denied: AtomicU64,
    failed: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Counters {
    fn of(&self, protocol: Protocol) -> &Connections {
        match protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        }
    }

    /// Counts a connection that has ended or was refused.
    pub(super) fn outcome(&self, protocol: Protocol, outcome: &Outcome) {
        let connections = self.of(protocol);
        let counter = match outcome {
            Outcome::Denied(_) => &connections.denied,
            Outcome::Failed(_) => &connections.failed,
            Outcome::Ended { .. } => &connections.ended,
        };
        add(counter, 1);
    }

    /// Counts a connection whose report was dropped.
    pub(super) fn unlogged(&self) {
        add(&self.unlogged, 1);
    }

    /// Counts a connection that is intercepted.
    pub(super) fn intercepted(&self) {
        add(&self.intercepted, 1);
    }

    /// Counts a request that a rule applied to.
    pub(super) fn injected(&self) {
        add(&self.injected, 1);
    }

    /// Counts a request on an intercepted connection that is not forwarded.
    pub(super) fn request_refused(&self) {
        add(&self.requests_refused, 1);
    }

    /// Counts a request on an intercepted connection that is beyond the limit.
    pub(super) fn request_limited(&self) {
        add(&self.requests_limited, 1);
    }

    /// Counts bytes that were relayed.
    pub(super) fn bytes(&self, direction: Direction, bytes: u64) {
        let counter = match direction {
            Direction::Out => &self.sent,
            Direction::In => &self.received,
        };
        add(counter, bytes);
    }

    /// The current values. Those about DNS are not counted here.
    pub(super) fn read(&self) -> EgressCounters {
        let connections = |counters: &Connections| EgressConnections {
            open: read(&counters.open),
            ended: read(&counters.ended),
            denied: read(&counters.denied),
            failed: read(&counters.failed),
        };
        EgressCounters {
            tcp: connections(&self.tcp),
            udp: connections(&self.udp),
            bytes_sent: read(&self.sent),
            bytes_received: read(&self.received),
            unlogged: read(&self.unlogged),
            intercepted: read(&self.intercepted),
            injected: read(&self.injected),
            requests_refused: read(&self.requests_refused),
            requests_limited: read(&self.requests_limited),
            ..EgressCounters::default()
        }
    }
}

/// Counts a connection as open until this is dropped.
#[derive(Debug)]
pub(super) struct Open {
    counters: Arc<Counters>,
    protocol: Protocol,
}

impl Open {
    pub(super) fn new(counters: &Arc<Counters>, protocol: Protocol) -> Self {
        add(&counters.of(protocol).open, 1);
        Self {
            counters: Arc::clone(counters),
            protocol,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.counters.of(self.protocol).open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::verdict::Reason;
    use super::*;

    #[test]
    fn each_event_has_its_counter() {
        let counters = Arc::new(Counters::default());
        let open = Open::new(&counters, Protocol::Tcp);
        let _other = Open::new(&counters, Protocol::Udp);
        let ended = Outcome::Ended {
            sent: 1,
            received: 2,
            took: Duration::ZERO,
            cut: None,
        };
        counters.outcome(Protocol::Tcp, &ended);
        counters.outcome(Protocol::Udp, &Outcome::Denied(Reason::Policy));
        counters.outcome(Protocol::Udp, &Outcome::Failed(String::new()));
        counters.bytes(Direction::Out, 3);
        counters.bytes(Direction::In, 4);
        counters.unlogged();
        counters.intercepted();
        counters.injected();
        counters.injected();
        (0..3).for_each(|_| counters.request_refused());
        (0..4).for_each(|_| counters.request_limited());
        let mut want = EgressCounters {
            tcp: EgressConnections {
                open: 1,
                ended: 1,
                ..EgressConnections::default()
            },
            udp: EgressConnections {
                open: 1,
                denied: 1,
                failed: 1,
                ..EgressConnections::default()
            },
            bytes_sent: 3,
            bytes_received: 4,
            unlogged: 1,
            intercepted: 1,
            injected: 2,
            requests_refused: 3,
            requests_limited: 4,
            ..EgressCounters::default()
        };
        assert_eq!(counters.read(), want);
        drop(open);
        want.tcp.open = 0;
        assert_eq!(counters.read(), want);
    }
}
