//! The life of a sandbox.
//!
//! ```text
//!   creating ──started──▶ running ──stop──▶ stopping ──ended──▶ gone
//!      │                    │                  ▲
//!      │                    └──────died────────┼──────────────▶ gone
//!      └──failed / stop────────────────────────┴──────────────▶ gone
//! ```
//!
//! `creating` and `stopping` are the windows in which a crash of the platform leaves work to undo: whatever is
//! found in them at the next start is removed, because no client was told that it lives.

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A row exists and the node is starting it; no client knows the id yet.
    Creating,
    /// A client was told that it runs.
    Running,
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
    /// It could not be started.
    Failed,
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

impl State {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Creating, Self::Running, Self::Stopping, Self::Gone];

    /// The state after `event`.
    ///
    /// # Errors
    /// When the event does not happen in this state.
    pub fn next(self, event: Event) -> Result<Self, Illegal> {
        match (self, event) {
            (Self::Creating, Event::Started) => Ok(Self::Running),
            (Self::Creating, Event::Failed) => Ok(Self::Gone),
            (Self::Creating | Self::Running, Event::Stop) => Ok(Self::Stopping),
            (Self::Running, Event::Died) => Ok(Self::Gone),
            (Self::Stopping, Event::Stop | Event::Died) => Ok(Self::Stopping),
            (Self::Stopping, Event::Ended) => Ok(Self::Gone),
            (state, event) => Err(Illegal { state, event }),
        }
    }

    /// The word a database column stores.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
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
        use Event::*;
        use State::*;
        let legal = [
            (Creating, Started, Running),
            (Creating, Failed, Gone),
            (Creating, Stop, Stopping),
            (Running, Stop, Stopping),
            (Running, Died, Gone),
            (Stopping, Stop, Stopping),
            (Stopping, Died, Stopping),
            (Stopping, Ended, Gone),
        ];
        for state in State::ALL {
            for event in [Started, Failed, Stop, Died, Ended] {
                let want = legal
                    .iter()
                    .find(|(s, e, _)| (*s, *e) == (state, event))
                    .map(|(_, _, next)| *next);
                assert_eq!(state.next(event).ok(), want, "{state:?} {event:?}");
            }
            assert_eq!(State::from_column(state.as_str()), Some(state));
        }
        assert_eq!(State::from_column("paused"), None);
    }
}
