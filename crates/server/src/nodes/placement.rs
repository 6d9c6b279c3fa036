//! What this server knows of the room of its nodes, where there are several: [`model::placement`] under a lock.
//!
//! The lock is held for the time of a decision and never while something is awaited. A node without a report is one of which
//! nothing is known, and is tried after those that speak.

use std::sync::Arc;

use model::capacity::{Bounds, HostReport};
use model::id::{LayerId, NodeId};
use model::placement::{Need, Nodes, Outcome, Report};
use parking_lot::Mutex;

use super::room::Room;
use crate::chance::Chance;
use crate::clock::Clock;

/// Memory for each core of a node that does not say how many it has, in bytes.
const EACH_CORE: u64 = 2 << 30;

/// What is known of all nodes.
#[derive(Debug)]
pub(crate) struct Placement {
    seen: Mutex<Nodes>,
    chance: Chance,
    clock: Clock,
}

/// A request for room that a node was sent. One that is dropped without an outcome was cut, or has failed.
#[derive(Debug)]
pub(crate) struct Sent {
    placement: Arc<Placement>,
    node: NodeId,
    outcome: Outcome,
}

impl Sent {
    /// Notes what became of it.
    pub(crate) fn done(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let now_us = self.placement.clock.now_us();
        self.placement.seen.lock().finish(&self.node, self.outcome, now_us);
    }
}

impl Placement {
    pub(crate) fn new(chance: Chance, clock: Clock) -> Self {
        Self {
            seen: Mutex::default(),
            chance,
            clock,
        }
    }

    /// Adds a node that has not said anything yet.
    pub(super) fn add(&self, node: &NodeId, is_draining: bool) {
        let report = Report {
            is_draining,
            ..Report::default()
        };
        let mut seen = self.seen.lock();
        seen.forget(node);
        seen.report(node, report, i64::MIN);
    }

    /// Notes whether a node drains.
    pub(super) fn drain(&self, node: &NodeId, is_draining: bool) {
        self.seen.lock().drain(node, is_draining);
    }

    /// Notes what a node has said.
    pub(super) fn report(&self, node: &NodeId, report: Report) {
        self.seen.lock().report(node, report, self.clock.now_us());
    }

    /// Forgets a node whose session is over.
    pub(super) fn forget(&self, node: &NodeId) {
        self.seen.lock().forget(node);
    }

    /// Notes that a node is asked for room.
    pub(super) fn begin(self: &Arc<Self>, node: &NodeId) -> Sent {
        self.seen.lock().begin(node);
        Sent {
            placement: Arc::clone(self),
            node: node.clone(),
            outcome: Outcome::Failed,
        }
    }

    /// The nodes of some on which a sandbox is tried, in this order.
    pub(super) fn candidates(&self, of: &dyn Fn(&NodeId) -> bool, need: &Need<'_>) -> Vec<NodeId> {
        let mut random = |below| self.chance.below(below);
        let now_us = self.clock.now_us();
        self.seen.lock().candidates_of(of, need, now_us, &mut random)
    }

    /// What all nodes have left for a sandbox of any kind.
    pub(super) fn room(&self) -> Room {
        let (nodes, load) = self.seen.lock().room(&Need::default(), self.clock.now_us());
        Room { load, nodes }
    }

    /// Any number, to order what is equal.
    pub(super) fn any(&self) -> usize {
        self.chance.below(usize::MAX)
    }
}

/// What is said of a node besides its host.
pub(super) struct Told {
    /// Shares of its host that this server has given out.
    pub(super) sandboxes: u32,
    /// Sandboxes that were started in advance and that end when a request lacks their place.
    pub(super) spare: u32,
    /// The bounds of this server.
    pub(super) bounds: Bounds,
    /// Its layers.
    pub(super) layers: std::collections::HashSet<LayerId>,
    /// The most memory that it had left in its session, in bytes.
    pub(super) most_bytes: u64,
    /// Whether it drains.
    pub(super) is_draining: bool,
}

/// The report of a node. One that says nothing of its load is taken to be as large as the most that it had left, and to
/// have what this server has placed on it: it is placed on like the others.
pub(super) fn report_of(host: HostReport, told: Told) -> Report {
    let left = Some(host.left);
    let mut report = match host.load {
        Some(load) => Report {
            memory_bytes: load.memory_bytes,
            left,
            cores: load.cores,
            running: load.running,
            starting: load.starting,
            pressure: load.pressure,
            bounds: load.bounds,
            ..Report::default()
        },
        None => Report {
            memory_bytes: told.most_bytes,
            left,
            cores: u32::try_from(told.most_bytes / EACH_CORE).unwrap_or(u32::MAX).max(1),
            running: told.sandboxes,
            ..Report::default()
        },
    };
    report.running = report.running.saturating_sub(told.spare);
    report.bounds = report.bounds.and(told.bounds);
    report.layers = told.layers;
    report.is_draining = told.is_draining;
    report
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use model::capacity::{HostCapacity, HostLoad};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn told() -> Told {
        Told {
            sandboxes: 5,
            spare: 2,
            bounds: Bounds {
                max_sandboxes: Some(9),
                ..Bounds::default()
            },
            layers: HashSet::new(),
            most_bytes: 8 * GIB,
            is_draining: false,
        }
    }

    fn host(load: Option<HostLoad>) -> HostReport {
        HostReport {
            left: HostCapacity {
                memory_available_bytes: 3 * GIB,
                disk_available_bytes: 1 << 40,
            },
            load,
        }
    }

    #[test]
    fn a_node_says_its_size_and_the_narrower_bounds_count() {
        let load = HostLoad {
            memory_bytes: 16 * GIB,
            cores: 6,
            running: 7,
            starting: 1,
            pressure: 30,
            bounds: Bounds {
                memory_floor_mb: 100,
                max_sandboxes: Some(40),
                ..Bounds::default()
            },
        };
        let report = report_of(host(Some(load)), told());
        assert_eq!((report.memory_bytes, report.cores, report.pressure), (16 * GIB, 6, 30));
        // Those in the pool give way.
        assert_eq!((report.running, report.starting), (5, 1));
        assert_eq!(
            (report.bounds.memory_floor_mb, report.bounds.max_sandboxes),
            (100, Some(9))
        );
    }

    #[test]
    fn of_an_older_node_the_size_is_the_most_that_it_had_left() {
        let report = report_of(host(None), told());
        assert_eq!((report.memory_bytes, report.cores, report.running), (8 * GIB, 4, 3));
        let tiny = Told {
            most_bytes: 0,
            ..told()
        };
        assert_eq!(report_of(host(None), tiny).cores, 1);
        let draining = Told {
            is_draining: true,
            ..told()
        };
        assert!(report_of(host(None), draining).is_draining && !report.is_draining);
    }
}
