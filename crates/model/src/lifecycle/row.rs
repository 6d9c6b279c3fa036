//! The row of a sandbox: which changes of its state a database makes, and how far the row may be behind the sandbox.
//!
//! A sandbox is where its node has brought it. Its row follows, and may be behind on purpose: a database that fails when the
//! node has done its part does not undo that, and does not keep a sandbox from being ended.
//!
//! | Sandbox | The row may still be | Because |
//! |---|---|---|
//! | `running` | `pausing` | its pause failed, and that could not be stored |
//! | `running` | `resuming` | it was resumed, and that could not be stored |
//! | `paused` | `pausing` | it was paused, and that could not be stored |
//! | `paused` | `resuming` | its resume failed, and that could not be stored |
//! | `stopping` | whatever it was | it ends, whether or not that can be stored |
//!
//! After a crash, [`State::recovery`] makes of each such row what the sandbox is: what the node has decides.
//!
//! The next change is made from the row as it is. So two pairs of states follow each other in rows and never in a sandbox:
//! `resuming` to `pausing`, and `pausing` to `resuming`. Each is two transitions of the sandbox, of which the first was not
//! stored.

use super::{State, Transition};

/// A change of the state of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowChange {
    /// A new sandbox was started.
    Started,
    /// The sandbox is being paused.
    Pausing,
    /// The sandbox is paused: it was saved, its resume failed, or something else is kept of it.
    Paused,
    /// The sandbox is being resumed.
    Resuming,
    /// The sandbox runs again: it was resumed, or its pause failed.
    Running,
    /// The sandbox is being ended.
    Stopping,
    /// The sandbox is gone.
    Gone,
}

impl RowChange {
    /// Every change.
    pub const ALL: [Self; 7] = [
        Self::Started,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Running,
        Self::Stopping,
        Self::Gone,
    ];

    /// The state of the row afterwards.
    #[must_use]
    pub fn state(self) -> State {
        match self {
            Self::Started | Self::Running => State::Running,
            Self::Pausing => State::Pausing,
            Self::Paused => State::Paused,
            Self::Resuming => State::Resuming,
            Self::Stopping => State::Stopping,
            Self::Gone => State::Gone,
        }
    }

    /// The transitions of a sandbox that the change stores.
    fn transitions(self) -> &'static [Transition] {
        match self {
            Self::Started => &[Transition::Started],
            Self::Pausing => &[Transition::Pause],
            Self::Paused => &[Transition::Saved, Transition::Failed, Transition::KeptOtherwise],
            Self::Resuming => &[Transition::Resume],
            Self::Running => &[Transition::Resumed, Transition::Failed],
            Self::Stopping => &[Transition::Stop],
            Self::Gone => &[
                Transition::Failed,
                Transition::Died,
                Transition::Lost,
                Transition::Ended,
            ],
        }
    }

    /// The states of rows in which the change may be made: those that the row of a sandbox may have that makes one of its
    /// transitions.
    pub fn sources(self) -> impl Iterator<Item = State> {
        State::ALL.into_iter().filter(move |row| self.allows(*row))
    }

    /// Whether the change may be made to a row in state `row`.
    #[must_use]
    pub fn allows(self, row: State) -> bool {
        let stores = |state: State| {
            let mut transitions = self.transitions().iter();
            transitions.any(|transition| state.next(*transition) == Ok(self.state()))
        };
        State::ALL
            .into_iter()
            .any(|state| stores(state) && state.rows().contains(&row))
    }
}

impl State {
    /// The states that the row of a sandbox in this state may have when the next change of it is stored.
    #[must_use]
    pub fn rows(self) -> &'static [Self] {
        match self {
            Self::Creating => &[Self::Creating],
            Self::Running => &[Self::Running, Self::Pausing, Self::Resuming],
            Self::Pausing => &[Self::Pausing],
            Self::Paused => &[Self::Paused, Self::Pausing, Self::Resuming],
            Self::Resuming => &[Self::Resuming],
            Self::Stopping => &[
                Self::Stopping,
                Self::Running,
                Self::Pausing,
                Self::Paused,
                Self::Resuming,
            ],
            Self::Gone => &[],
        }
    }

    /// The change that brings the row of a sandbox in this state back from the beginning of something that was given up; none
    /// if the row is in no such state.
    #[must_use]
    pub fn repair(self, row: Self) -> Option<RowChange> {
        match (self, row) {
            (Self::Running, Self::Pausing) => Some(RowChange::Running),
            (Self::Paused, Self::Resuming) => Some(RowChange::Paused),
            _ => None,
        }
    }

    /// Whether settings in a row of this state may be changed: the deadline, the network, the injections. A row that is
    /// behind its sandbox is not changed in passing: it would get a new version, and never be brought to its state.
    #[must_use]
    pub fn takes_settings(self) -> bool {
        self == Self::Running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_row_and_change_has_an_outcome() {
        use RowChange as Change;
        use State::*;
        let table = [
            (Change::Started, vec![Creating]),
            (Change::Pausing, vec![Running, Pausing, Resuming]),
            (Change::Paused, vec![Pausing, Paused, Resuming]),
            (Change::Resuming, vec![Pausing, Paused, Resuming]),
            (Change::Running, vec![Pausing, Resuming]),
            (Change::Stopping, vec![Running, Pausing, Paused, Resuming, Stopping]),
            (
                Change::Gone,
                vec![Creating, Running, Pausing, Paused, Resuming, Stopping],
            ),
        ];
        assert_eq!(table.each_ref().map(|(change, _)| *change), Change::ALL);
        for (change, want) in table {
            assert_eq!(change.sources().collect::<Vec<_>>(), want, "{change:?}");
        }
    }

    /// What a row does that a sandbox does not is named, and nothing else is possible.
    #[test]
    fn rows_follow_sandboxes_except_where_they_may_be_behind() {
        use State::*;
        let mut behind = Vec::new();
        for change in RowChange::ALL {
            for row in change.sources() {
                let mut transitions = Transition::ALL.into_iter();
                let is_one = transitions.any(|transition| row.next(transition) == Ok(change.state()));
                if !is_one {
                    behind.push((row, change.state()));
                }
            }
        }
        assert_eq!(behind, [(Resuming, Pausing), (Pausing, Resuming)]);
    }

    #[test]
    fn a_repair_is_a_change_that_the_row_allows_and_leads_to_the_sandbox() {
        let mut repaired = Vec::new();
        for state in State::ALL {
            for row in State::ALL {
                let Some(change) = state.repair(row) else { continue };
                assert!(change.allows(row), "{state:?} {row:?}");
                assert_eq!(change.state(), state, "{row:?}");
                assert!(state.rows().contains(&row) && state != row, "{state:?} {row:?}");
                repaired.push((state, row));
            }
        }
        assert_eq!(
            repaired,
            [(State::Running, State::Pausing), (State::Paused, State::Resuming)]
        );
    }

    #[test]
    fn a_row_is_behind_only_where_a_transition_leads_on() {
        for state in State::ALL {
            for row in state.rows().iter().filter(|row| **row != state) {
                let mut transitions = Transition::ALL.into_iter();
                assert!(
                    transitions.any(|transition| row.next(transition) == Ok(state)),
                    "{row:?} is behind {state:?}"
                );
            }
        }
    }

    /// After a crash, no row of a sandbox that clients know is removed whatever the node has, however far it is behind.
    #[test]
    fn a_row_that_is_behind_is_recovered_like_the_sandbox() {
        use super::super::{Kept, Recovery};
        for state in State::ALL.into_iter().filter(|state| state.is_present()) {
            for row in state.rows() {
                for kept in Kept::ALL {
                    assert_ne!(row.recovery(kept), Recovery::Remove, "{row:?} of {state:?}");
                }
            }
        }
    }
}
