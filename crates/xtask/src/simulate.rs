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
mod outcome;

use std::io::Write as _;

use anyhow::{Context as _, Result, bail};

use self::events::Run;
pub(crate) use self::outcome::Args;
use crate::bench::conditions;

/// Runs the simulation and prints its report.
///
/// # Errors
/// When a bound does not hold.
pub(crate) fn run(args: &Args) -> Result<()> {
    let conditions = conditions::line();
    let outcome = Run::new(args).run();
    let report = format!("{conditions}{}", outcome.report(args));
    std::io::stdout()
        .write_all(report.as_bytes())
        .context("print the report")?;
    outcome.failure().map_or(Ok(()), |why| bail!(why))
}

#[cfg(test)]
mod tests {
    use super::outcome::Outcome;
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
            let outcome = Run::new(&small(seed)).run();
            assert_eq!(outcome.failure(), None, "seed {seed}: {outcome:?}");
            assert!(outcome.refused > 0 && outcome.ended > 0 && outcome.failed > 0);
        }
    }

    #[test]
    fn a_seed_makes_one_run() {
        let figures = |seed| {
            let outcome = Run::new(&small(seed)).run();
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
