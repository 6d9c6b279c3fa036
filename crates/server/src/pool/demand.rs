//! What is asked for: how many sandboxes of a kind there should be, and how long one takes.

use std::collections::VecDeque;
use std::sync::Arc;

use model::id::{TeamId, TemplateId};

use crate::builds::recipe::BuildSpec;
use crate::clock::SECOND_US;

/// First and longest time without another start after one of the same kind has failed, in microseconds.
const BACKOFF_US: i64 = 5 * SECOND_US;
const BACKOFF_MAX_US: i64 = 600 * SECOND_US;
/// How long a burst of requests is remembered, in microseconds.
const BURST_US: i64 = 300 * SECOND_US;
/// Maximum number of sandboxes of a kind that are kept because of a burst, where the operator does not ask for more.
const BURST_MAX: usize = 8;
/// Where one takes less than this to become ready, there is another one soon enough. In microseconds.
const QUICK_US: i64 = SECOND_US / 2;

/// The demand for sandboxes of one kind.
#[derive(Debug, Clone)]
pub(super) struct Demand {
    pub(super) template: TemplateId,
    /// The team that the template belongs to; none if it is the platform's.
    pub(super) owner: Option<TeamId>,
    pub(super) spec: Arc<BuildSpec>,
    /// How many of them the pool should have in any case.
    pub(super) size: u32,
    /// Whether the sandboxes are kept without being used.
    pub(super) is_permanent: bool,
    /// When one was last asked for.
    pub(super) used_us: i64,
    /// When the last ones were asked for.
    recent_us: VecDeque<i64>,
    /// How long the last one took to become ready; 0 if that is not known.
    pub(super) ready_us: i64,
    /// How many failed since one was used.
    pub(super) failures: u32,
    /// Time before which no sandbox is started for the demand.
    pub(super) retry_us: i64,
    /// The memory that the last one took.
    pub(super) memory_bytes: u64,
}

impl Demand {
    pub(super) fn new(template: TemplateId, spec: Arc<BuildSpec>, size: u32) -> Self {
        Self {
            template,
            owner: None,
            spec,
            size,
            is_permanent: false,
            used_us: 0,
            recent_us: VecDeque::new(),
            ready_us: 0,
            failures: 0,
            retry_us: 0,
            memory_bytes: 0,
        }
    }

    /// Notes that one was asked for.
    pub(super) fn used(&mut self, now_us: i64) {
        self.used_us = now_us;
        // More than in the largest burst, which counts until it is forgotten, also if single ones follow.
        if self.recent_us.len() >= 4 * BURST_MAX {
            self.recent_us.pop_front();
        }
        self.recent_us.push_back(now_us);
    }

    /// How many sandboxes the pool should have: what was asked for in the time that one takes to become ready, because
    /// as many could be needed before another one is ready.
    pub(super) fn wanted(&self, now_us: i64) -> usize {
        let size = usize::try_from(self.size).unwrap_or(usize::MAX);
        if self.is_permanent || self.ready_us < QUICK_US {
            return size;
        }
        let recent = self.recent_us.iter().filter(|used_us| now_us - **used_us < BURST_US);
        let within = |begin_us: i64| {
            let burst = self.recent_us.iter();
            burst
                .filter(|used_us| (begin_us..=begin_us + self.ready_us).contains(*used_us))
                .count()
        };
        let burst = recent.map(|used_us| within(*used_us)).max().unwrap_or(0);
        size.max(burst.min(BURST_MAX))
    }

    /// Notes that one failed, so that the next is not started immediately.
    pub(super) fn fail(&mut self, now_us: i64) {
        let wait_us = BACKOFF_US << self.failures.min(10);
        self.retry_us = now_us + wait_us.min(BACKOFF_MAX_US);
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(ready_us: i64, uses_s: &[i64]) -> Demand {
        let template = "t0000000000000000000".parse().expect("an id");
        let mut demand = Demand::new(template, Arc::new(BuildSpec::base()), 1);
        demand.ready_us = ready_us;
        uses_s.iter().for_each(|at| demand.used(at * SECOND_US));
        demand
    }

    #[test]
    fn as_many_are_kept_as_are_needed_while_another_one_becomes_ready() {
        let five = 5 * SECOND_US;
        let wanted = |demand: &Demand, now_s: i64| demand.wanted(now_s * SECOND_US);
        let cases: [(i64, &[i64], usize); 8] = [
            (five, &[0, 100, 200], 1),
            // Each 3 seconds: the second comes before the first is replaced.
            (five, &[0, 3, 6, 9, 12], 2),
            (five, &[0, 1, 2, 3, 100, 200], 4),
            (five, &[0, 5, 6], 2),
            // Nothing is known yet, or another one is there at once.
            (0, &[0, 0, 0], 1),
            (SECOND_US / 4, &[0, 0, 0], 1),
            (five, &[7; 40], BURST_MAX),
            (five, &[], 1),
        ];
        for (ready_us, uses_s, want) in cases {
            let last_s = uses_s.last().copied().unwrap_or(0);
            assert_eq!(wanted(&demand(ready_us, uses_s), last_s), want, "{uses_s:?}");
        }
        // A burst is forgotten, and only then.
        let burst = demand(five, &[10, 10, 10]);
        assert_eq!((wanted(&burst, 309), wanted(&burst, 311)), (3, 1));
        // What the operator asks for is the least.
        let more = Demand {
            size: 20,
            ..burst.clone()
        };
        assert_eq!(wanted(&more, 10), 20);
        let permanent = Demand {
            is_permanent: true,
            ..burst
        };
        assert_eq!(wanted(&permanent, 10), 1);
    }
}
