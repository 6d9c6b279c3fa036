//! The life of a sandbox.
//!
//! ```text
//!              ┌────────────────────── started ◀── resuming ◀──resume── paused
//!              ▼                                   │      └──failed──▶ ▲
//!   creating ──started──▶ running ──pause──▶ pausing ──────saved───────┘
//!      │                    │ ▲                │ │
//!      │                    │ └─────failed─────┘ │
//!      │                    └────died────────────┴──▶ gone ◀──ended── stopping
//!      └──failed──▶ gone
//!
//!   creating, running, pausing, paused, resuming ──stop──▶ stopping
//! ```
//!
//! Every state but `running` and `paused` is a window in which a crash of the platform leaves work to do. What the next
//! start does with a row that it finds is [`State::recovery`]:
//!
//! | Row | Its processes run | They do not |
//! |---|---|---|
//! | `creating`, `stopping` | removed: no client was told that it lives, or one was told that it ends | removed |
//! | `running` | adopted | removed: it ended by itself |
//! | `pausing` | adopted as `running`: the pause has failed, and its client was told nothing | `paused` |
//! | `paused` | its processes are ended: they would write on a disk that counts as saved | kept |
//! | `resuming` | adopted as `running` | `paused`, as before |
//! | `gone` | removed | removed |
//!
//! A sandbox that was pausing and does not run has all that its processes wrote on its disk, so it is paused and not
//! lost. Whether its memory was saved too is for the saved memory itself to say, which counts only when it is complete.

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A row exists and the node is starting it; no client knows the id yet.
    Creating,
    /// A client was told that it runs.
    Running,
    /// It is being saved, so that its processes can be ended without losing it.
    Pausing,
    /// Nothing of it runs; its disk is kept.
    Paused,
    /// It is being started from what was saved.
    Resuming,
    /// It is being ended; it answers no client any more.
    Stopping,
    /// Nothing of it is left.
    Gone,
}

/// Something that happened to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Its agent answered.
    Started,
    /// It could not be started, saved or resumed.
    Failed,
    /// A client or its deadline asked for it to be paused.
    Pause,
    /// Everything of it is saved and none of its processes runs.
    Saved,
    /// A client or its traffic asked for it to go on.
    Resume,
    /// A client or its deadline asked for its end.
    Stop,
    /// It ended by itself.
    Died,
    /// The node has removed it.
    Ended,
}

/// An event that has no meaning in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} does not happen to a sandbox that is {state:?}")]
pub struct Illegal {
    /// The state the sandbox is in.
    pub state: State,
    /// The event that does not fit.
    pub event: Event,
}

/// What a start of the platform does with a sandbox that an earlier one left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Adopt it if it runs, otherwise remove it.
    Adopt,
    /// Keep its disk; nothing of it may run.
    Keep,
    /// Adopt it as running if it runs, otherwise keep its disk as that of a paused one.
    AdoptOrKeep,
    /// Remove it.
    Remove,
}

impl Event {
    /// Every event.
    pub const ALL: [Self; 8] = [
        Self::Started,
        Self::Failed,
        Self::Pause,
        Self::Saved,
        Self::Resume,
        Self::Stop,
        Self::Died,
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

    /// The state after `event`. Asking again for what is under way changes nothing.
    ///
    /// # Errors
    /// When the event does not happen in this state.
    pub fn next(self, event: Event) -> Result<Self, Illegal> {
        match (self, event) {
            (Self::Creating, Event::Started) => Ok(Self::Running),
            (Self::Creating, Event::Failed) => Ok(Self::Gone),

            (Self::Running, Event::Pause) => Ok(Self::Pausing),
            (Self::Running | Self::Pausing, Event::Died) => Ok(Self::Gone),

            (Self::Pausing, Event::Pause) => Ok(Self::Pausing),
            (Self::Pausing, Event::Saved) => Ok(Self::Paused),
            (Self::Pausing, Event::Failed) => Ok(Self::Running),

            (Self::Paused, Event::Resume) => Ok(Self::Resuming),

            (Self::Resuming, Event::Resume) => Ok(Self::Resuming),
            (Self::Resuming, Event::Started) => Ok(Self::Running),
            // What was saved is there still.
            (Self::Resuming, Event::Failed | Event::Died) => Ok(Self::Paused),

            (Self::Creating | Self::Running | Self::Pausing | Self::Paused | Self::Resuming, Event::Stop) => {
                Ok(Self::Stopping)
            }
            (Self::Stopping, Event::Stop | Event::Died) => Ok(Self::Stopping),
            (Self::Stopping, Event::Ended) => Ok(Self::Gone),

            (state, event) => Err(Illegal { state, event }),
        }
    }

    /// What a start of the platform does with a sandbox whose row is in this state.
    #[must_use]
    pub fn recovery(self) -> Recovery {
        match self {
            Self::Running => Recovery::Adopt,
            Self::Paused => Recovery::Keep,
            Self::Pausing | Self::Resuming => Recovery::AdoptOrKeep,
            Self::Creating | Self::Stopping | Self::Gone => Recovery::Remove,
        }
    }

    /// The word a database column stores.
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

    /// The state a database column names, if it names one.
    #[must_use]
    pub fn from_column(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_state_and_event_is_decided() {
        use State::*;
        let none = None;
        #[rustfmt::skip]
        let table = [
            //           Started        Failed         Pause          Saved         Resume          Stop            Died            Ended
            (Creating, [Some(Running), Some(Gone),    none,          none,         none,           Some(Stopping), none,           none]),
            (Running,  [none,          none,          Some(Pausing), none,         none,           Some(Stopping), Some(Gone),     none]),
            (Pausing,  [none,          Some(Running), Some(Pausing), Some(Paused), none,           Some(Stopping), Some(Gone),     none]),
            (Paused,   [none,          none,          none,          none,         Some(Resuming), Some(Stopping), none,           none]),
            (Resuming, [Some(Running), Some(Paused),  none,          none,         Some(Resuming), Some(Stopping), Some(Paused),   none]),
            (Stopping, [none,          none,          none,          none,         none,           Some(Stopping), Some(Stopping), Some(Gone)]),
            (Gone,     [none,          none,          none,          none,         none,           none,           none,           none]),
        ];
        assert_eq!(table.map(|(state, _)| state), State::ALL);
        for (state, row) in table {
            for (event, want) in Event::ALL.into_iter().zip(row) {
                let got = state.next(event);
                assert_eq!(got.ok(), want, "{state:?} {event:?}");
                assert!(want.is_some() || got == Err(Illegal { state, event }));
            }
        }
    }

    #[test]
    fn columns_name_every_state_and_nothing_else() {
        for state in State::ALL {
            assert_eq!(State::from_column(state.as_str()), Some(state));
        }
        for word in ["", "Running", "ended"] {
            assert_eq!(State::from_column(word), None);
        }
    }

    #[test]
    fn only_what_a_client_may_count_on_is_kept() {
        use State::*;
        let table = [
            (Creating, Recovery::Remove),
            (Running, Recovery::Adopt),
            (Pausing, Recovery::AdoptOrKeep),
            (Paused, Recovery::Keep),
            (Resuming, Recovery::AdoptOrKeep),
            (Stopping, Recovery::Remove),
            (Gone, Recovery::Remove),
        ];
        assert_eq!(table.map(|(state, _)| state), State::ALL);
        for (state, want) in table {
            assert_eq!(state.recovery(), want, "{state:?}");
        }
    }
}
