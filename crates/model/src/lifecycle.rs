//! The lifecycle of a sandbox: its states, the transitions between them, and recovery at a start of the platform.
//!
//! ```text
//!              ┌────────────────────── resumed ◀── resuming ◀──resume── paused
//!              ▼                                   │      └──failed──▶ ▲
//!   creating ──started──▶ running ──pause──▶ pausing ──────saved───────┘
//!      │                    │ ▲                │ │
//!      │                    │ └─────failed─────┘ │
//!      │                    └────died────────────┴──▶ gone ◀──ended── stopping
//!      └──failed──▶ gone
//!
//!   running, pausing, paused, resuming ──stop──▶ stopping
//!   paused, resuming ──lost──▶ gone
//!   paused ──kept otherwise──▶ paused
//! ```
//!
//! What is kept of a paused sandbox is [`Kept`]: its processes, stopped in the memory of the host, or its disk alone.
//!
//! Only [`State::next`] changes a state. Which changes of a row a database makes follows from it, see [`row`]; what becomes
//! of a command to a sandbox in each state is decided in [`command`], and whether a paused sandbox moves to another node before a
//! resume in [`moving`].
//!
//! Every state but `running` and `paused` is a window in which a crash of the platform leaves work to do. What the next
//! start does with a row that it finds is [`State::recovery`]:
//!
//! | State of the row | Processes are running | No process is running |
//! |---|---|---|
//! | `creating`, `stopping` | removed: no client was told that it exists, or one was told that it ends | removed |
//! | `running` | adopted | removed: it ended by itself. Kept as `paused` if its disk was saved and not used since: a row that was written later was lost with the power of the host |
//! | `pausing`, `resuming`, kept in memory | adopted as `paused` if they are stopped, and as `running` if not: what the kernel does decides | as `paused` |
//! | `pausing`, kept on disk | adopted as `running`: they were not ended | as `paused` |
//! | `resuming`, kept on disk | ended: no client knows what they have done | as `paused` |
//! | `paused`, kept in memory | adopted; they stay stopped | removed: it is lost, for example because the host restarted. As `paused` where a checkpoint of it is complete: its processes were written to disk after they had been stopped |
//! | `paused`, kept on disk | the processes are ended: they would write to a disk that counts as saved | kept |
//! | `gone` | removed | removed |

pub mod command;
pub mod moving;
pub mod row;

use serde::{Deserialize, Serialize};

/// The state of a sandbox in its lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A row exists and the node is starting it; no client knows the id yet.
    Creating,
    /// The sandbox runs, and a client was told so.
    Running,
    /// Its processes are being stopped.
    Pausing,
    /// None of its processes runs; [`Kept`] says what there is of it.
    Paused,
    /// Its processes are about to continue.
    Resuming,
    /// The sandbox is being ended and accepts no requests.
    Stopping,
    /// The sandbox is removed completely.
    Gone,
}

/// What is kept of a paused sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Its processes, stopped where they are, in the memory of the host. A restart of the host ends them.
    Memory,
    /// Its disk, and a checkpoint beside it: its processes, written to disk. Rows, messages and clients call it `image`.
    #[serde(rename = "image")]
    Checkpoint,
    /// Its disk.
    Filesystem,
}

impl Kept {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Checkpoint, Self::Filesystem];

    /// The name in database columns and for clients.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Checkpoint => "image",
            Self::Filesystem => "filesystem",
        }
    }

    /// The kind with that name; none for an unknown name.
    #[must_use]
    pub fn from_column(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kept| kept.as_str() == word)
    }
}

/// A cause for a change of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// The agent of a new sandbox responded.
    Started,
    /// The sandbox could not be started, saved or resumed.
    Failed,
    /// Pause requested by a client or by the deadline.
    Pause,
    /// What is to be kept of it is complete, and none of its processes runs.
    Saved,
    /// Something else is kept of it than before: its processes were written to disk, or given up.
    KeptOtherwise,
    /// Resume requested by a client or by traffic to the sandbox.
    Resume,
    /// Its processes run again.
    Resumed,
    /// End requested by a client or by the deadline.
    Stop,
    /// The sandbox ended by itself.
    Died,
    /// What was kept of it is gone.
    Lost,
    /// The node has removed it.
    Ended,
}

/// A transition that a state does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("illegal transition {transition:?} of a sandbox in state {state:?}")]
pub struct IllegalTransition {
    /// The state of the sandbox.
    pub state: State,
    /// The transition that the state does not allow.
    pub transition: Transition,
}

/// What a start of the platform does with a sandbox of an earlier run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Adopts a sandbox that runs, and removes any other.
    Adopt,
    /// Keeps the sandbox paused, with what is kept of it.
    Keep(Kept),
    /// Adopts the sandbox in the state in which its processes are, otherwise as [`Self::Keep`].
    AdoptOrKeep(Kept),
    /// Removes the sandbox.
    Remove,
}

impl Transition {
    /// Every transition.
    pub const ALL: [Self; 11] = [
        Self::Started,
        Self::Failed,
        Self::Pause,
        Self::Saved,
        Self::KeptOtherwise,
        Self::Resume,
        Self::Resumed,
        Self::Stop,
        Self::Died,
        Self::Lost,
        Self::Ended,
    ];
}

impl State {
    /// Every state.
    pub const ALL: [Self; 7] = [
        Self::Creating,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopping,
        Self::Gone,
    ];

    /// The state after `transition`. A repeated request for what is under way changes nothing.
    ///
    /// # Errors
    /// When this state does not allow the transition.
    pub fn next(self, transition: Transition) -> Result<Self, IllegalTransition> {
        match (self, transition) {
            (Self::Creating, Transition::Started) => Ok(Self::Running),
            (Self::Creating, Transition::Failed) => Ok(Self::Gone),

            (Self::Running, Transition::Pause) => Ok(Self::Pausing),
            (Self::Running | Self::Pausing, Transition::Died) => Ok(Self::Gone),

            (Self::Pausing, Transition::Pause) => Ok(Self::Pausing),
            (Self::Pausing, Transition::Saved) => Ok(Self::Paused),
            (Self::Pausing, Transition::Failed) => Ok(Self::Running),

            (Self::Paused, Transition::KeptOtherwise) => Ok(Self::Paused),
            (Self::Paused, Transition::Resume) => Ok(Self::Resuming),
            (Self::Paused | Self::Resuming, Transition::Lost) => Ok(Self::Gone),

            (Self::Resuming, Transition::Resume) => Ok(Self::Resuming),
            (Self::Resuming, Transition::Resumed) => Ok(Self::Running),
            // The saved state is still there.
            (Self::Resuming, Transition::Failed | Transition::Died) => Ok(Self::Paused),

            // One that is being created is known to its create request alone, which removes it if it fails.
            (Self::Running | Self::Pausing | Self::Paused | Self::Resuming, Transition::Stop) => Ok(Self::Stopping),
            (Self::Stopping, Transition::Stop | Transition::Died) => Ok(Self::Stopping),
            (Self::Stopping, Transition::Ended) => Ok(Self::Gone),

            (state, transition) => Err(IllegalTransition { state, transition }),
        }
    }

    /// Whether clients know a sandbox in this state, and can use it: it runs, is paused, or is between the two.
    #[must_use]
    pub fn is_present(self) -> bool {
        match self {
            Self::Running | Self::Pausing | Self::Paused | Self::Resuming => true,
            Self::Creating | Self::Stopping | Self::Gone => false,
        }
    }

    /// What a start of the platform does with a sandbox whose row is in this state, and has this as what is kept of it.
    #[must_use]
    pub fn recovery(self, kept: Kept) -> Recovery {
        match self {
            Self::Running => Recovery::Adopt,
            Self::Paused => Recovery::Keep(kept),
            // What was started anew on its disk has not got all that a client was told of it.
            Self::Resuming if kept == Kept::Filesystem => Recovery::Keep(kept),
            Self::Pausing | Self::Resuming => Recovery::AdoptOrKeep(kept),
            Self::Creating | Self::Stopping | Self::Gone => Recovery::Remove,
        }
    }

    /// The name that a database column stores.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Stopping => "stopping",
            Self::Gone => "gone",
        }
    }

    /// The state with that name in a database column; none for an unknown name.
    #[must_use]
    pub fn from_column(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_state_and_transition_has_an_outcome() {
        use State::*;
        let none = None;
        #[rustfmt::skip]
        let table = [
            //           Started        Failed         Pause          Saved         KeptOtherwise Resume          Resumed        Stop            Died            Lost        Ended
            (Creating, [Some(Running), Some(Gone),    none,          none,         none,         none,           none,          none,           none,           none,       none]),
            (Running,  [none,          none,          Some(Pausing), none,         none,         none,           none,          Some(Stopping), Some(Gone),     none,       none]),
            (Pausing,  [none,          Some(Running), Some(Pausing), Some(Paused), none,         none,           none,          Some(Stopping), Some(Gone),     none,       none]),
            (Paused,   [none,          none,          none,          none,         Some(Paused), Some(Resuming), none,          Some(Stopping), none,           Some(Gone), none]),
            (Resuming, [none,          Some(Paused),  none,          none,         none,         Some(Resuming), Some(Running), Some(Stopping), Some(Paused),   Some(Gone), none]),
            (Stopping, [none,          none,          none,          none,         none,         none,           none,          Some(Stopping), Some(Stopping), none,       Some(Gone)]),
            (Gone,     [none,          none,          none,          none,         none,         none,           none,          none,           none,           none,       none]),
        ];
        assert_eq!(table.map(|(state, _)| state), State::ALL);
        for (state, row) in table {
            for (transition, want) in Transition::ALL.into_iter().zip(row) {
                let got = state.next(transition);
                assert_eq!(got.ok(), want, "{state:?} {transition:?}");
                assert!(want.is_some() || got == Err(IllegalTransition { state, transition }));
            }
        }
    }

    #[test]
    fn column_names_round_trip_and_unknown_ones_are_refused() {
        for state in State::ALL {
            assert_eq!(State::from_column(state.as_str()), Some(state));
        }
        for kept in Kept::ALL {
            assert_eq!(Kept::from_column(kept.as_str()), Some(kept));
        }
        for word in ["", "Running", "ended", "Memory"] {
            assert_eq!(State::from_column(word), None);
            assert_eq!(Kept::from_column(word), None);
        }
    }

    #[test]
    fn what_is_kept_has_the_names_that_earlier_versions_wrote() {
        for (kept, name) in [
            (Kept::Memory, "memory"),
            (Kept::Checkpoint, "image"),
            (Kept::Filesystem, "filesystem"),
        ] {
            assert_eq!(kept.as_str(), name);
            assert_eq!(serde_json::to_value(kept).unwrap(), name);
            assert_eq!(serde_json::from_value::<Kept>(name.into()).unwrap(), kept);
        }
    }

    #[test]
    fn recovery_of_every_state() {
        use State::*;
        for kept in Kept::ALL {
            let resuming = match kept {
                Kept::Memory | Kept::Checkpoint => Recovery::AdoptOrKeep(kept),
                Kept::Filesystem => Recovery::Keep(kept),
            };
            let table = [
                (Creating, Recovery::Remove),
                (Running, Recovery::Adopt),
                (Pausing, Recovery::AdoptOrKeep(kept)),
                (Paused, Recovery::Keep(kept)),
                (Resuming, resuming),
                (Stopping, Recovery::Remove),
                (Gone, Recovery::Remove),
            ];
            assert_eq!(table.map(|(state, _)| state), State::ALL);
            for (state, want) in table {
                assert_eq!(state.recovery(kept), want, "{state:?} {kept:?}");
            }
        }
    }
}
