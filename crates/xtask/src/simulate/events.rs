//! What happens in a simulation, in the order of its time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use model::capacity::{Bounds, PermitRequest, Purpose};
use model::id::{LayerId, NodeId, SandboxId};
use model::placement::{self, Need, Nodes, Report};

use super::cluster::{Chance, FakeHost, Habit, layer};
use super::outcome::{Args, Outcome};

/// Share of create requests for which the cluster has places, in per cent.
const PLACES_PERCENT: u64 = 92;
/// How long a request, an answer or a report is on its way, in microseconds.
const WAY_US: (i64, i64) = (200, 3_000);
/// How long a start takes, in microseconds.
const START_US: (i64, i64) = (30_000, 400_000);
/// How long a sandbox lives that ends, in microseconds.
const LIFE_US: (i64, i64) = (1_000_000, 20_000_000);
/// How often nodes report, in microseconds.
const OFTEN_US: i64 = 1_000_000;
const RARELY_US: i64 = 30_000_000;
/// Share of sandboxes that end, and of starts that fail, in per cent.
const ENDS_PERCENT: u32 = 5;
const FAILS_PERCENT: u32 = 1;

/// Processor time of this thread: another program that is busy makes no decision slower.
fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(spent).unwrap_or_default()
}

/// A create request on its way.
#[derive(Debug)]
struct Create {
    server: usize,
    id: SandboxId,
    candidates: Vec<NodeId>,
    /// How many of them it was sent to.
    tries: usize,
    memory_bytes: u64,
    fails: bool,
    ends: bool,
}

#[derive(Debug)]
enum Happening {
    /// A client asks a server.
    Asked(usize),
    /// A request for a permit arrives at the node that is tried.
    Arrives(Box<Create>),
    /// The answer arrives at the server.
    Answered(Box<Create>, bool),
    /// The start arrives at the node.
    Starts(Box<Create>),
    /// The start is over.
    Started(Box<Create>),
    /// The answer of a start arrives at the server.
    Settled(usize, NodeId, SandboxId, bool),
    /// A permit that is given back arrives.
    GivenBack(NodeId, SandboxId),
    Ends(usize, SandboxId),
    Reports(usize),
    Reported(usize, NodeId, Box<Report>),
}

/// An event at its time. Of two at the same time, the first that was planned happens first.
struct Planned {
    at_us: i64,
    number: u64,
    event: Happening,
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.number) == (other.at_us, other.number)
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.number).cmp(&(other.at_us, other.number))
    }
}

/// A simulation.
pub(super) struct Run {
    hosts: Vec<FakeHost>,
    numbers: BTreeMap<NodeId, usize>,
    servers: Vec<Nodes>,
    /// Requests that clients have not made yet, of each server.
    left: Vec<usize>,
    pause_us: i64,
    planned: BinaryHeap<Reverse<Planned>>,
    next: u64,
    now_us: i64,
    /// Create requests that are not answered.
    open: usize,
    chance: Chance,
    outcome: Outcome,
}

impl Run {
    pub(super) fn new(args: &Args) -> Self {
        let mut chance = Chance::new(args.seed);
        let places = u64::try_from(args.creates * args.servers).unwrap_or(u64::MAX) * PLACES_PERCENT / 100;
        // From small hosts to those with sixteen times as much.
        let weights: Vec<u64> = (0..args.nodes)
            .map(|_| (1 << chance.below(5)) + chance.below(3))
            .collect();
        let all: u64 = weights.iter().sum();
        let hosts: Vec<FakeHost> = (weights.iter().enumerate())
            .map(|(n, weight)| {
                let places = u32::try_from(places * weight / all.max(1)).unwrap_or(u32::MAX).max(1);
                let habit = match (chance.happens(args.stale), chance.happens(25)) {
                    (false, _) => Habit::Often,
                    (true, false) => Habit::Rarely,
                    (true, true) => Habit::Once,
                };
                FakeHost::new(n, places, habit, &mut chance)
            })
            .collect();
        let mut run = Self {
            numbers: hosts.iter().enumerate().map(|(n, host)| (host.id.clone(), n)).collect(),
            servers: vec![Nodes::default(); args.servers],
            left: vec![args.creates; args.servers],
            pause_us: 1_000_000 / i64::from(args.rate.max(1)),
            planned: BinaryHeap::new(),
            next: 0,
            now_us: 1,
            open: args.creates * args.servers,
            chance,
            outcome: Outcome {
                places: hosts.iter().map(FakeHost::places).sum(),
                ..Outcome::default()
            },
            hosts,
        };
        for n in 0..run.hosts.len() {
            let report = run.hosts[n].report(run.now_us);
            for server in &mut run.servers {
                server.report(&run.hosts[n].id, report.clone(), run.now_us);
            }
            run.plan_report(n);
        }
        for server in 0..run.servers.len() {
            run.plan_in(run.pause_us, Happening::Asked(server));
        }
        run
    }

    /// Runs until every request is answered.
    pub(super) fn run(mut self) -> Outcome {
        while self.open > 0 {
            let Some(Reverse(planned)) = self.planned.pop() else {
                break;
            };
            self.now_us = planned.at_us;
            self.happen(planned.event);
        }
        self.outcome.until_us = self.now_us;
        self.outcome.over = u64::try_from(self.hosts.iter().filter(|host| host.is_over).count()).unwrap_or(u64::MAX);
        self.outcome
    }

    fn plan_in(&mut self, us: i64, event: Happening) {
        self.next += 1;
        self.planned.push(Reverse(Planned {
            at_us: self.now_us + us,
            number: self.next,
            event,
        }));
    }

    fn plan_after(&mut self, (from_us, to_us): (i64, i64), event: Happening) {
        let us = self.chance.between(from_us, to_us);
        self.plan_in(us, event);
    }

    fn plan_report(&mut self, n: usize) {
        let every_us = match self.hosts[n].habit {
            Habit::Often => OFTEN_US,
            Habit::Rarely => RARELY_US,
            Habit::Once => return,
        };
        self.plan_after((every_us / 2, every_us * 3 / 2), Happening::Reports(n));
    }

    fn happen(&mut self, event: Happening) {
        match event {
            Happening::Asked(server) => self.ask(server),
            Happening::Arrives(create) => {
                let n = self.target(&create);
                let request = PermitRequest {
                    id: create.id.clone(),
                    number: 1,
                    purpose: Purpose::Wanted,
                    bounds: Bounds::default(),
                    reads_again: false,
                };
                let is_given = self.hosts[n].permit(&request, self.now_us).is_ok();
                self.plan_after(WAY_US, Happening::Answered(create, is_given));
            }
            Happening::Answered(create, true) => self.plan_after(WAY_US, Happening::Starts(create)),
            Happening::Answered(create, false) => {
                let node = create.candidates[create.tries - 1].clone();
                self.servers[create.server].finish(&node, placement::Outcome::Refused, self.now_us);
                self.send(create);
            }
            Happening::Starts(create) => {
                let n = self.target(&create);
                // It has a permit, so it is never refused.
                let begun = self.hosts[n].begin(&create.id, self.now_us);
                assert_eq!(begun, Ok(()), "a start that has a permit");
                self.plan_after(START_US, Happening::Started(create));
            }
            Happening::Started(create) => self.start(*create),
            Happening::Settled(server, node, id, is_placed) => self.settle(server, &node, id, is_placed),
            Happening::GivenBack(node, id) => {
                if let Some(n) = self.numbers.get(&node) {
                    self.hosts[*n].give_back(&id, 1);
                }
            }
            Happening::Ends(n, id) => {
                self.hosts[n].end(&id);
                self.outcome.ended += 1;
            }
            Happening::Reports(n) => {
                let report = self.hosts[n].report(self.now_us);
                for server in 0..self.servers.len() {
                    let event = Happening::Reported(server, self.hosts[n].id.clone(), Box::new(report.clone()));
                    self.plan_after(WAY_US, event);
                }
                self.plan_report(n);
            }
            Happening::Reported(server, node, report) => self.servers[server].report(&node, *report, self.now_us),
        }
    }

    /// A client asks for a sandbox.
    fn ask(&mut self, server: usize) {
        self.left[server] -= 1;
        if self.left[server] > 0 {
            self.plan_after((self.pause_us / 2, self.pause_us * 3 / 2), Happening::Asked(server));
        }
        let first = u8::try_from(self.chance.below(256)).unwrap_or(0);
        let layers: [LayerId; 3] = std::array::from_fn(|n| layer(first.wrapping_add(u8::try_from(n).unwrap_or(0))));
        let need = Need {
            memory_mb: 512,
            layers: &layers,
            ..Need::default()
        };
        // A digit of the number in each byte, of which an id keeps the remainder by 36: no two creates have the same id.
        let mut number = self.outcome.decisions.len();
        let random = std::array::from_fn(|_| {
            let digit = u8::try_from(number % 36).unwrap_or(0);
            number /= 36;
            digit
        });
        let chance = &mut self.chance;
        let begun = cpu_time();
        let candidates = self.servers[server].candidates(&need, self.now_us, &mut |end| chance.index(end));
        self.outcome.decisions.push(cpu_time().saturating_sub(begun));
        let create = Create {
            server,
            id: SandboxId::from_random(&random),
            candidates,
            tries: 0,
            memory_bytes: (64 + self.chance.below(384)) << 20,
            fails: self.chance.happens(FAILS_PERCENT),
            ends: self.chance.happens(ENDS_PERCENT),
        };
        self.send(Box::new(create));
    }

    /// Sends a request to the next candidate, or refuses it.
    fn send(&mut self, mut create: Box<Create>) {
        let Some(node) = create.candidates.get(create.tries) else {
            self.outcome.tries[create.tries] += 1;
            self.outcome.refused += 1;
            self.open -= 1;
            if self.outcome.at_first_refusal.is_none() {
                let now_us = self.now_us;
                let taken = self.hosts.iter_mut().map(|host| host.count(now_us)).sum();
                self.outcome.at_first_refusal = Some(taken);
            }
            return;
        };
        self.servers[create.server].begin(node);
        create.tries += 1;
        self.plan_after(WAY_US, Happening::Arrives(create));
    }

    fn start(&mut self, create: Create) {
        let n = self.target(&create);
        let memory_bytes = (!create.fails).then_some(create.memory_bytes);
        self.hosts[n].settle(&create.id, memory_bytes, self.now_us);
        self.outcome.tries[create.tries] += 1;
        if create.ends && !create.fails {
            self.plan_after(LIFE_US, Happening::Ends(n, create.id.clone()));
        }
        let node = self.hosts[n].id.clone();
        self.plan_after(
            WAY_US,
            Happening::Settled(create.server, node, create.id, !create.fails),
        );
    }

    fn settle(&mut self, server: usize, node: &NodeId, id: SandboxId, is_placed: bool) {
        self.open -= 1;
        if is_placed {
            self.outcome.placed += 1;
            self.servers[server].finish(node, placement::Outcome::Placed, self.now_us);
        } else {
            self.outcome.failed += 1;
            self.servers[server].finish(node, placement::Outcome::Failed, self.now_us);
            self.plan_after(WAY_US, Happening::GivenBack(node.clone(), id));
        }
    }

    /// The node that a request was sent to last.
    fn target(&self, create: &Create) -> usize {
        self.numbers[&create.candidates[create.tries - 1]]
    }
}
