//! Placement: on which node a sandbox is tried first, and where next.
//!
//! A server decides alone, from what nodes have pushed to it ([`Report`]) and from its own requests in flight. What it knows is
//! old by the time it decides, and other servers decide at the same time, so nothing here is a promise: the truth is the permit
//! that a node gives out ([`crate::capacity`]). A refusal says that nothing was begun, and the next candidate is tried.
//!
//! The order of candidates:
//!
//! 1. the best of [`CHOICES`] nodes chosen at random among those that have room as far as is known, then the others of these.
//!    Best of all would send the requests of all servers to the same node until its next report; the best of a few spreads them
//!    nearly as evenly as perfect knowledge would, and needs none;
//! 2. the least loaded of others that have room. Where the cluster is nearly full, three at random would miss the last places;
//! 3. nodes of which nothing certain is known: their last report is old, or they have refused lately. A node that is
//!    silent is not tried before one that speaks, but its places are used before anybody is refused.
//!
//! A node is never a candidate that drains, lacks a feature, or has said lately that it is full. A node that refuses is taken
//! for full until it reports again, or for a while that doubles with each refusal in a row; after a few of them, whatever it
//! reports. So a node that says that it has room and always refuses costs a server one try in a minute.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::capacity::{Bounds, HostCapacity};
use crate::id::{LayerId, NodeId};

/// How many nodes are chosen at random, of which the best comes first.
pub const CHOICES: usize = 3;
/// How many others are looked at closely, so that the cost of a decision does not grow with what nodes have.
const OTHERS: usize = 32;
/// How many candidates there are at most: a request that all of them refuse has waited for as many answers.
pub const CANDIDATES: usize = 12;
/// The age from which on a report is old, in microseconds. Nodes report about once per second.
pub const OLD_US: i64 = 10_000_000;
/// First and longest time for which a node counts as full that has refused, in microseconds.
const REFUSED_US: (i64, i64) = (1_000_000, 60_000_000);
/// From how many refusals in a row on a node counts as full although it says that it has room.
const OBSTINATE: u32 = 3;
/// Full load in the unit of scores.
const FULL: u64 = 1000;
/// How many sandboxes per core are a full load where a host sets no maximum.
const PER_CORE: u64 = 32;
/// What a missing layer costs, and all of them at most: a fetch takes longer than a start.
const LAYER_COST: (u64, u64) = (60, 300);
const MIB: u64 = 1 << 20;

/// What a node says of itself, about once per second and whenever it begins to drain or to be full.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Memory of the host, in bytes.
    pub memory_bytes: u64,
    /// What the host has left; none where it cannot tell.
    pub left: Option<HostCapacity>,
    /// Cores of the host.
    pub cores: u32,
    /// Sandboxes that count for [`Bounds::max_sandboxes`], without those that are starting.
    pub running: u32,
    /// Permits of sandboxes that are not running yet.
    pub starting: u32,
    /// Share of the time in which something waited for processors or memory, in per cent.
    pub pressure: u8,
    /// What must remain free, and how many sandboxes there may be.
    pub bounds: Bounds,
    /// The layers that the node has.
    pub layers: HashSet<LayerId>,
    /// What the node can do besides running sandboxes.
    pub features: BTreeSet<String>,
    /// Whether no new sandboxes come to the node.
    pub is_draining: bool,
}

/// What a sandbox needs of its node.
#[derive(Debug, Clone, Default)]
pub struct Need<'a> {
    /// The limit of its memory, in MiB.
    pub memory_mb: u32,
    /// The layers of its file system.
    pub layers: &'a [LayerId],
    /// What its node has to be able to do.
    pub features: &'a [&'a str],
}

/// What became of a request that a node was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The sandbox is the node's.
    Placed,
    /// The node has no capacity; nothing was begun.
    Refused,
    /// Anything else: the node is away, or what was asked for failed.
    Failed,
}

/// What a server knows of one node.
#[derive(Debug, Clone)]
struct Seen {
    report: Report,
    reported_us: i64,
    /// Requests of this server that the node has not answered.
    in_flight: u32,
    /// Sandboxes of this server that came to the node after its report.
    placed: u32,
    /// Time until which the node counts as full, and how often in a row it has refused.
    refused_until_us: i64,
    refusals: u32,
}

/// How much is known of the room of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Some,
    Unknown,
    None,
}

/// What a server knows of all nodes that are connected.
#[derive(Debug, Clone, Default)]
pub struct Nodes {
    seen: BTreeMap<NodeId, Seen>,
}

impl Nodes {
    /// Notes what a node has said.
    pub fn report(&mut self, node: &NodeId, report: Report, now_us: i64) {
        match self.seen.get_mut(node) {
            Some(seen) => {
                seen.report = report;
                seen.reported_us = now_us;
                // Those that the node has answered are part of what it says now.
                seen.placed = 0;
                if seen.refusals < OBSTINATE {
                    seen.refused_until_us = i64::MIN;
                }
            }
            None => {
                let seen = Seen {
                    report,
                    reported_us: now_us,
                    in_flight: 0,
                    placed: 0,
                    refused_until_us: i64::MIN,
                    refusals: 0,
                };
                self.seen.insert(node.clone(), seen);
            }
        }
    }

    /// Notes whether a node drains, before it reports again.
    pub fn drain(&mut self, node: &NodeId, is_draining: bool) {
        if let Some(seen) = self.seen.get_mut(node) {
            seen.report.is_draining = is_draining;
        }
    }

    /// Forgets a node: it is not connected any more.
    pub fn forget(&mut self, node: &NodeId) {
        self.seen.remove(node);
    }

    /// Notes that a node is sent a request.
    pub fn begin(&mut self, node: &NodeId) {
        if let Some(seen) = self.seen.get_mut(node) {
            seen.in_flight = seen.in_flight.saturating_add(1);
        }
    }

    /// Notes what became of it.
    pub fn finish(&mut self, node: &NodeId, outcome: Outcome, now_us: i64) {
        let Some(seen) = self.seen.get_mut(node) else {
            return;
        };
        seen.in_flight = seen.in_flight.saturating_sub(1);
        match outcome {
            Outcome::Placed => {
                seen.placed = seen.placed.saturating_add(1);
                seen.refusals = 0;
            }
            // Others that were on their way when it began to refuse say nothing new.
            Outcome::Refused if now_us < seen.refused_until_us => {}
            Outcome::Refused => {
                let pause_us = (REFUSED_US.0 << seen.refusals.min(6)).min(REFUSED_US.1);
                seen.refused_until_us = now_us.saturating_add(pause_us);
                seen.refusals = seen.refusals.saturating_add(1);
            }
            Outcome::Failed => {}
        }
    }

    /// The nodes on which a sandbox is tried, in this order; none where no node has room or can do what is needed.
    /// `random` returns a number below its argument.
    pub fn candidates(&self, need: &Need<'_>, now_us: i64, random: &mut dyn FnMut(usize) -> usize) -> Vec<NodeId> {
        self.candidates_of(&|_| true, need, now_us, random)
    }

    /// As [`Self::candidates`], of those nodes for which `of` is true.
    pub fn candidates_of(
        &self,
        of: &dyn Fn(&NodeId) -> bool,
        need: &Need<'_>,
        now_us: i64,
        random: &mut dyn FnMut(usize) -> usize,
    ) -> Vec<NodeId> {
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        for (id, seen) in self.seen.iter().filter(|(id, _)| of(id)) {
            match seen.room(need, now_us) {
                Room::Some => known.push((id, seen)),
                Room::Unknown => unknown.push((id, seen)),
                Room::None => {}
            }
        }
        choose(&mut known, CHOICES + OTHERS, random);
        choose(&mut unknown, OTHERS, random);
        let chosen = known.len().min(CHOICES);
        let (first, others) = known.split_at_mut(chosen);
        let mut order = in_order(first, need, first.len(), random);
        for group in [others, &mut unknown] {
            let left = CANDIDATES.saturating_sub(order.len());
            order.extend(in_order(group, need, left, random));
        }
        order.into_iter().cloned().collect()
    }
}

impl Nodes {
    /// How many nodes have room as far as is known, and how loaded the best of them would be with the sandbox, in thousandths.
    #[must_use]
    pub fn room(&self, need: &Need<'_>, now_us: i64) -> (u32, u64) {
        let known = self.seen.values().filter(|seen| seen.room(need, now_us) == Room::Some);
        let (mut count, mut best) = (0_u32, u64::MAX);
        for seen in known {
            count = count.saturating_add(1);
            best = best.min(seen.score(need));
        }
        (count, if count == 0 { FULL } else { best })
    }
}

/// Keeps `most` of some nodes, chosen at random.
fn choose<T>(nodes: &mut Vec<T>, most: usize, random: &mut dyn FnMut(usize) -> usize) {
    for index in 0..most.min(nodes.len()) {
        let left = nodes.len() - index;
        nodes.swap(index, index + random(left).min(left - 1));
    }
    nodes.truncate(most);
}

/// The `most` best of some nodes, best first. Which of two equal ones comes first is left to chance, so that servers that know
/// the same do not all choose the same.
fn in_order<'a>(
    group: &mut [(&'a NodeId, &'a Seen)],
    need: &Need<'_>,
    most: usize,
    random: &mut dyn FnMut(usize) -> usize,
) -> Vec<&'a NodeId> {
    if most == 0 || group.is_empty() {
        return Vec::new();
    }
    let mut scored: Vec<(u64, usize, &NodeId)> = group
        .iter()
        .map(|(id, seen)| (seen.score(need), random(usize::MAX), *id))
        .collect();
    let compare = |one: &(u64, usize, &NodeId), other: &(u64, usize, &NodeId)| -> Ordering { one.cmp(other) };
    if most < scored.len() {
        scored.select_nth_unstable_by(most, compare);
        scored.truncate(most);
    }
    scored.sort_unstable_by(compare);
    scored.into_iter().map(|(_, _, id)| id).collect()
}

impl Seen {
    /// Sandboxes that the node has or is about to get, as far as this server knows.
    fn sandboxes(&self) -> u64 {
        [self.report.running, self.report.starting, self.placed, self.in_flight]
            .into_iter()
            .map(u64::from)
            .sum()
    }

    fn room(&self, need: &Need<'_>, now_us: i64) -> Room {
        let report = &self.report;
        let lacks = need.features.iter().any(|feature| !report.features.contains(*feature));
        if report.is_draining || lacks {
            return Room::None;
        }
        // A clock that was set back makes a report old, not new.
        let is_old = !(0..OLD_US).contains(&now_us.saturating_sub(self.reported_us));
        let is_full = report
            .bounds
            .max_sandboxes
            .is_some_and(|max| self.sandboxes() >= max.into());
        let is_short = report.left.is_some_and(|left| {
            let is_below = |bytes: u64, floor_mb: u32| bytes / MIB < floor_mb.into();
            let disk_mb = report
                .bounds
                .disk_floor_mb
                .saturating_add(report.bounds.disk_per_sandbox_mb);
            is_below(left.memory_available_bytes, report.bounds.memory_floor_mb)
                || is_below(left.disk_available_bytes, disk_mb)
        });
        let has_refused = now_us < self.refused_until_us;
        match (is_full || is_short || has_refused, is_old) {
            (false, false) => Room::Some,
            // What it has said of itself may not be true any more, but a refusal was heard just now.
            (_, true) if !has_refused => Room::Unknown,
            // What this server has sent may have ended, or have failed.
            (true, false) if !has_refused && !self.says_that_it_is_full() && !is_short => Room::Unknown,
            _ => Room::None,
        }
    }

    fn says_that_it_is_full(&self) -> bool {
        let report = &self.report;
        let said = report.running.saturating_add(report.starting);
        report.bounds.max_sandboxes.is_some_and(|max| said >= max)
    }

    /// How loaded the node would be with the sandbox, in thousandths: less is better.
    fn score(&self, need: &Need<'_>) -> u64 {
        let report = &self.report;
        let with_it = self.sandboxes().saturating_add(1);
        let share = |part: u64, whole: u64| part.saturating_mul(FULL).checked_div(whole).unwrap_or(FULL);
        let places = match report.bounds.max_sandboxes {
            Some(max) => u64::from(max),
            None => u64::from(report.cores).saturating_mul(PER_CORE),
        };
        let memory = report.left.map_or(0, |left| {
            // Those that this server has sent since will take something of it, and so will this one.
            let sent = u64::from(self.placed).saturating_add(u64::from(self.in_flight)) + 1;
            let taken = u64::from(need.memory_mb).saturating_mul(MIB).saturating_mul(sent);
            let free = left.memory_available_bytes.saturating_sub(taken);
            share(report.memory_bytes.saturating_sub(free), report.memory_bytes)
        });
        let missing = need.layers.iter().filter(|layer| !report.layers.contains(*layer));
        let missing = u64::try_from(missing.count()).unwrap_or(u64::MAX);
        let fetches = missing.saturating_mul(LAYER_COST.0).min(LAYER_COST.1);
        share(with_it, places)
            .max(memory)
            .saturating_add(u64::from(report.pressure).saturating_mul(FULL / 200))
            .saturating_add(fetches)
    }
}

#[cfg(test)]
mod tests;
