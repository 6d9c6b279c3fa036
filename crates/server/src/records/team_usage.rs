//! How many sandboxes of each team run, and how many were started, by minute.
//!
//! Counted in memory and written once a minute, when the minute is over: the cost is that of the teams that have
//! sandboxes, not of what happens to them. A crash loses the minute that is not over. A team whose last sandbox has ended
//! gets one more minute with zeros, so that a chart falls to zero and does not end.

use std::collections::HashMap;

use model::id::TeamId;
use store::records::{NewTeamUsage, TeamUsage};
use uuid::Uuid;

use crate::clock::SECOND_US;

/// Length of what is counted together, in seconds.
pub(crate) const MINUTE_S: i64 = 60;
/// Length of what is counted together, in microseconds.
pub(super) const MINUTE_US: i64 = MINUTE_S * SECOND_US;

/// What all teams use at present.
#[derive(Debug)]
pub(super) struct TeamCounters {
    node_id: String,
    process: String,
    teams: HashMap<TeamId, Counter>,
}

/// What a team uses in the current minute.
#[derive(Debug, Clone, Copy, Default)]
struct Counter {
    minute_us: i64,
    running: u32,
    most: u32,
    starts: u32,
    /// Whether the minute before had something other than zeros.
    was_used: bool,
}

impl Counter {
    fn usage(&self) -> TeamUsage {
        TeamUsage {
            at_us: self.minute_us,
            sandboxes: self.most,
            starts: self.starts,
        }
    }

    fn is_used(&self) -> bool {
        self.most > 0 || self.starts > 0
    }
}

/// When the minute of a time began.
pub(super) fn minute_of(now_us: i64) -> i64 {
    now_us.div_euclid(MINUTE_US) * MINUTE_US
}

impl TeamCounters {
    pub(super) fn new(node_id: String) -> Self {
        Self {
            node_id,
            process: Uuid::new_v4().to_string(),
            teams: HashMap::new(),
        }
    }

    fn of(&mut self, team: &TeamId, now_us: i64) -> &mut Counter {
        self.teams.entry(team.clone()).or_insert_with(|| Counter {
            minute_us: minute_of(now_us),
            ..Counter::default()
        })
    }

    /// One more sandbox of the team runs.
    pub(super) fn enter(&mut self, team: &TeamId, now_us: i64) {
        let counter = self.of(team, now_us);
        counter.running += 1;
        counter.most = counter.most.max(counter.running);
    }

    /// One less sandbox of the team runs.
    pub(super) fn leave(&mut self, team: &TeamId, now_us: i64) {
        let counter = self.of(team, now_us);
        counter.running = counter.running.saturating_sub(1);
    }

    /// A sandbox of the team was started.
    pub(super) fn start(&mut self, team: &TeamId, now_us: i64) {
        let counter = self.of(team, now_us);
        counter.starts = counter.starts.saturating_add(1);
    }

    /// What the team uses in the current minute.
    pub(super) fn current(&self, team: &TeamId) -> Option<TeamUsage> {
        self.teams.get(team).map(Counter::usage)
    }

    /// Takes the minutes that are over, or all of them, to be written.
    pub(super) fn cut(&mut self, now_us: i64, all: bool) -> Vec<NewTeamUsage> {
        let minute_us = minute_of(now_us);
        let mut over = Vec::new();
        for (team, counter) in &mut self.teams {
            // A clock that was set back does not make minutes over again.
            if counter.minute_us >= minute_us && !all {
                continue;
            }
            if counter.is_used() || counter.was_used {
                over.push(NewTeamUsage {
                    team_id: team.clone(),
                    at_us: counter.minute_us,
                    node_id: self.node_id.clone(),
                    process: self.process.clone(),
                    sandboxes: counter.most,
                    starts: counter.starts,
                });
            }
            *counter = Counter {
                minute_us: minute_us.max(counter.minute_us),
                running: counter.running,
                most: counter.running,
                starts: 0,
                was_used: counter.is_used(),
            };
        }
        self.teams
            .retain(|_, counter| counter.running > 0 || counter.is_used() || counter.was_used);
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_the_most_of_its_time() {
        let team: TeamId = "00000000-0000-4000-8000-000000000001".parse().expect("an id");
        let mut counters = TeamCounters::new("node".to_owned());
        let at = |minute: i64, second: i64| minute * MINUTE_US + second * SECOND_US;
        counters.enter(&team, at(10, 5));
        counters.start(&team, at(10, 5));
        counters.enter(&team, at(10, 6));
        counters.start(&team, at(10, 6));
        counters.leave(&team, at(10, 7));
        let current = counters.current(&team).expect("a minute");
        assert_eq!((current.at_us, current.sandboxes, current.starts), (at(10, 0), 2, 2));
        assert!(counters.cut(at(10, 59), false).is_empty());
        let found = |cut: Vec<NewTeamUsage>| -> Vec<(i64, u32, u32)> {
            cut.iter().map(|row| (row.at_us, row.sandboxes, row.starts)).collect()
        };
        assert_eq!(found(counters.cut(at(11, 0), false)), [(at(10, 0), 2, 2)]);
        counters.leave(&team, at(11, 30));
        assert_eq!(found(counters.cut(at(12, 0), false)), [(at(11, 0), 1, 0)]);
        // One more with zeros, and then nothing.
        assert_eq!(found(counters.cut(at(13, 0), false)), [(at(12, 0), 0, 0)]);
        assert!(counters.cut(at(14, 0), false).is_empty() && counters.current(&team).is_none());
        // What was not counted as running cannot stop.
        counters.leave(&team, at(15, 0));
        assert!(counters.cut(at(15, 1), true).is_empty());
    }
}
