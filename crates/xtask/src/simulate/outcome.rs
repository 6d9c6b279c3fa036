//! What a simulation is asked for, and what it has shown.

use std::time::Duration;

use measure::stats::Distribution;
use measure::table;
use model::placement::{CANDIDATES, OLD_US};

/// Share of all places that has to be taken before a request is refused, in per cent.
const FULL_PERCENT: f64 = 98.0;
/// What a decision may take, at the 99th percentile.
const DECISION: Duration = Duration::from_millis(2);

/// Flags of `simulate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Number of nodes
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(super) nodes: usize,
    /// Number of servers
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(super) servers: usize,
    /// Create requests of each server: a little more than the nodes have places
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(super) creates: usize,
    /// Create requests per second of each server
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(super) rate: u32,
    /// Share of nodes that report rarely or never, in per cent
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) stale: u32,
    /// Seed of everything that is left to chance
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
}

/// What a run has shown.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Places of all nodes.
    pub(super) places: u64,
    pub(super) placed: u64,
    pub(super) ended: u64,
    pub(super) failed: u64,
    pub(super) refused: u64,
    /// Nodes that had more than they may at some time.
    pub(super) over: u64,
    /// Sandboxes and permits of all nodes when the first request was refused.
    pub(super) at_first_refusal: Option<u64>,
    /// How many nodes each request was sent to.
    pub(super) tries: [u64; CANDIDATES + 1],
    /// Processor time of decisions.
    pub(super) decisions: Vec<Duration>,
    /// How long all of it took in the simulation, in microseconds.
    pub(super) until_us: i64,
}

impl Outcome {
    fn fullness(&self) -> Option<f64> {
        let share = |taken: u64| taken as f64 * 100.0 / self.places.max(1) as f64;
        self.at_first_refusal.map(share)
    }

    pub(super) fn failure(&self) -> Option<String> {
        if self.over > 0 {
            return Some(format!("{} nodes had more than they may", self.over));
        }
        match self.fullness() {
            None => Some("no request was refused, so the cluster was not full".to_owned()),
            Some(full) if full < FULL_PERCENT => Some(format!(
                "a request was refused when {full:.2} % of the places were taken: at least {FULL_PERCENT} % have to be"
            )),
            Some(_) => None,
        }
    }

    pub(super) fn report(&self, args: &Args) -> String {
        let sent: u64 = self.tries.iter().sum();
        let more: u64 = self.tries.iter().skip(2).sum();
        let share = more as f64 * 100.0 / sent.max(1) as f64;
        let most = self.tries.iter().rposition(|count| *count > 0).unwrap_or(0);
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let mut rows = vec![
            row("nodes, servers", format!("{}, {}", args.nodes, args.servers)),
            row(
                "nodes whose reports are rare",
                format!("{} % (older than {} s)", args.stale, OLD_US / 1_000_000),
            ),
            row("places of all nodes", self.places.to_string()),
            row("create requests", (args.creates * args.servers).to_string()),
            row("placed, of these ended", format!("{}, {}", self.placed, self.ended)),
            row("starts that failed", self.failed.to_string()),
            row("refused", self.refused.to_string()),
            row("nodes over a cap", self.over.to_string()),
            row(
                "full at the first refusal",
                self.fullness().map_or("-".to_owned(), |full| format!("{full:.2} %")),
            ),
            row("sent to more than one node", format!("{share:.2} %, {most} at most")),
            row("simulated time", format!("{} s", self.until_us / 1_000_000)),
        ];
        if let Some(took) = Distribution::of(self.decisions.clone()) {
            rows.push(row(
                "processor time of a decision, p50 and p99",
                format!(
                    "{:.3} and {:.3} ms (bar for p99: {} ms)",
                    took.p50_ms,
                    took.p99_ms,
                    DECISION.as_millis()
                ),
            ));
        }
        table::columns(&["what", "value"], rows)
    }
}
