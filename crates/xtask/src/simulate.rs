//! `simulate`: several servers place sandboxes on many nodes, with the placement and the permits of the product
//! (`model::placement`, `model::capacity`) and fake nodes around them.
//!
//! Time is simulated: requests, answers and reports take milliseconds on their way, starts take longer, and everything that
//! is decided meanwhile is decided without them. So servers know as little of each other as real ones do. The same seed makes the
//! same run, but for how long decisions take, which is measured.
//!
//! A run fails where a node had more than it may, or where a request was refused before the cluster was nearly full.

mod cluster;
mod events;

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use measure::stats::Distribution;
use measure::table;
use model::placement::{CANDIDATES, OLD_US};

use self::events::Run;
use crate::bench::conditions;

/// Share of all places that has to be taken before a request is refused, in per cent.
const FULL_PERCENT: f64 = 98.0;
/// What a decision may take, at the 99th percentile.
const DECISION: Duration = Duration::from_millis(2);

/// Flags of `simulate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Number of nodes
    #[arg(long, value_name = "N", default_value_t = 1000)]
    nodes: usize,
    /// Number of servers
    #[arg(long, value_name = "N", default_value_t = 3)]
    servers: usize,
    /// Create requests of each server: a little more than the nodes have places
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    creates: usize,
    /// Create requests per second of each server
    #[arg(long, value_name = "N", default_value_t = 1000)]
    rate: u32,
    /// Share of nodes that report rarely or never, in per cent
    #[arg(long, value_name = "N", default_value_t = 10)]
    stale: u32,
    /// Seed of everything that is left to chance
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// What a run has shown.
#[derive(Debug, Default)]
struct Outcome {
    /// Places of all nodes.
    places: u64,
    placed: u64,
    ended: u64,
    failed: u64,
    refused: u64,
    /// Nodes that had more than they may at some time.
    over: u64,
    /// Sandboxes and permits of all nodes when the first request was refused.
    at_first_refusal: Option<u64>,
    /// How many nodes each request was sent to.
    tries: [u64; CANDIDATES + 1],
    /// Processor time of decisions.
    decisions: Vec<Duration>,
    /// How long all of it took in the simulation, in microseconds.
    until_us: i64,
}

/// Runs the simulation and prints its report.
///
/// # Errors
/// When a bound does not hold.
pub(crate) fn run(args: &Args) -> Result<()> {
    let conditions = conditions::line();
    let outcome = Run::new(args).to_end();
    let report = format!("{conditions}{}", outcome.report(args));
    std::io::stdout()
        .write_all(report.as_bytes())
        .context("print the report")?;
    outcome.failure().map_or(Ok(()), |why| bail!(why))
}

impl Outcome {
    fn fullness(&self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
        let share = |taken: u64| taken as f64 * 100.0 / self.places.max(1) as f64;
        self.at_first_refusal.map(share)
    }

    fn failure(&self) -> Option<String> {
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

    fn report(&self, args: &Args) -> String {
        let sent: u64 = self.tries.iter().sum();
        let more: u64 = self.tries.iter().skip(2).sum();
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
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

#[cfg(test)]
mod tests {
    use super::*;

    fn small(seed: u64) -> Args {
        Args {
            nodes: 60,
            servers: 3,
            creates: 2000,
            rate: 200,
            stale: 10,
            seed,
        }
    }

    #[test]
    fn no_node_gets_more_than_it_may_and_nobody_is_refused_before_the_cluster_is_full() {
        for seed in 1..=3 {
            let outcome = Run::new(&small(seed)).to_end();
            assert_eq!(outcome.failure(), None, "seed {seed}: {outcome:?}");
            assert!(outcome.refused > 0 && outcome.ended > 0 && outcome.failed > 0);
        }
    }

    #[test]
    fn a_seed_makes_one_run() {
        let figures = |seed| {
            let outcome = Run::new(&small(seed)).to_end();
            (outcome.placed, outcome.refused, outcome.at_first_refusal, outcome.tries)
        };
        assert_eq!(figures(7), figures(7));
        assert_ne!(figures(7), figures(8));
    }

    #[test]
    fn a_run_that_breaks_a_bound_fails() {
        let full = Outcome {
            places: 1000,
            at_first_refusal: Some(980),
            ..Outcome::default()
        };
        assert_eq!(full.failure(), None);
        let early = Outcome {
            at_first_refusal: Some(979),
            ..full
        };
        assert!(early.failure().is_some_and(|why| why.contains("97.90 %")));
        let over = Outcome {
            over: 1,
            at_first_refusal: Some(1000),
            places: 1000,
            ..Outcome::default()
        };
        assert!(over.failure().is_some());
        assert!(Outcome::default().failure().is_some());
    }
}
