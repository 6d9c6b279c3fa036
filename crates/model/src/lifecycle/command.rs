//! What becomes of a command to a sandbox: whether it is carried out, waits, shares an outcome, or is refused.
//!
//! A sandbox does one thing at a time. Commands take turns in the order in which they come, and each is decided twice: when
//! it arrives ([`State::arrival`]), and when its turn has come ([`State::at_turn`]), because what ran in between may have
//! changed the state. What waits for its turn, and does not need it any more, shares the outcome of that.
//!
//! | Command | arrives: creating | running | pausing | paused | resuming | stopping | gone |
//! |---|---|---|---|---|---|---|---|
//! | pause | wait | wait | wait | refuse | wait | wait | wait |
//! | resume | wait | refuse | cancel the pause, if that has the same result; otherwise wait | wait | wait; refuse if it would give up processes | wait | wait |
//! | connect | refuse | run | wait | wait | wait | refuse | refuse |
//! | stop | refuse | cancel | cancel | cancel | cancel | join; wait if the attempt before has failed | refuse |
//! | change, fork | refuse | wait | refuse | refuse | refuse | refuse | refuse |
//! | snapshot | refuse | wait; refuse while another one is being made | refuse | refuse | refuse | refuse | refuse |
//! | write | refuse | refuse | refuse | wait | refuse | refuse | refuse |
//! | exit | run | run | wait | wait | wait | join | join |
//!
//! | Command | has its turn: creating | running | pausing | paused | resuming | stopping | gone |
//! |---|---|---|---|---|---|---|---|
//! | pause | refuse | run; join if the deadline that asked for it was extended | refuse | join; refuse if it came when the sandbox was being resumed | refuse | refuse | refuse |
//! | resume, connect | refuse | join | refuse | run; refuse if traffic asks and the files are wanted | refuse | refuse | refuse |
//! | stop | refuse | refuse | refuse | refuse | refuse | run | refuse |
//! | change, fork, snapshot | refuse | run | refuse | refuse | refuse | refuse | refuse |
//! | write | refuse | refuse | refuse | run; join if nothing is in memory, or a command waits | refuse | refuse | refuse |
//! | exit | join | run | join | run | join | join | join |
//!
//! No command has its turn in `pausing` or `resuming`, except after a panic, before that is repaired: the sandbox is in one
//! of them for as long as another command has its turn.
//!
//! Two things are no commands, because they take no turn: a deadline ([`State::at_deadline`]), which makes one, and traffic
//! ([`State::traffic`]), which passes, or makes one.

use super::{State, Transition};

/// A request to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Pauses the sandbox.
    Pause,
    /// Pauses the sandbox at its deadline.
    PauseAtDeadline {
        /// The deadline has passed. Otherwise the sandbox was given another one since.
        is_due: bool,
    },
    /// Resumes the sandbox.
    Resume(Resume),
    /// Extends the deadline of a running sandbox, and resumes one that is paused.
    Connect,
    /// Ends the sandbox.
    Stop {
        /// An attempt to end the sandbox has failed.
        is_retry: bool,
    },
    /// Changes the deadline, the network or the injections.
    Change,
    /// Forks the sandbox.
    Fork,
    /// Makes a snapshot of the sandbox.
    Snapshot {
        /// Another snapshot of the sandbox is being made.
        is_other_made: bool,
    },
    /// Writes to disk what is paused in memory, in the background.
    Write {
        /// The sandbox is in memory.
        is_in_memory: bool,
        /// A command waits that needs the sandbox as it is.
        is_interrupted: bool,
    },
    /// Notes that nothing of the sandbox runs any more. This command comes from the node.
    Exit,
}

/// How a sandbox is to be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// Kept processes are given up.
    pub discards_processes: bool,
    /// A sandbox that goes on running instead of being paused and resumed is the same to the client.
    pub may_go_on: bool,
    /// Traffic asks, and the sandbox was paused for its files, which only clients resume.
    pub is_unwanted: bool,
}

/// What becomes of a command that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// The command is carried out now, whatever has its turn.
    Run,
    /// The command shares the outcome of what is under way.
    Join,
    /// The command waits for its turn.
    Wait,
    /// The command waits for its turn, and a pause that is under way is cancelled.
    Cancel,
    /// The command is refused.
    Refuse(Refusal),
}

/// What becomes of a command that has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtTurn {
    /// The command is carried out.
    Run,
    /// What the command asked for was done since it arrived: it shares the outcome of that.
    Join,
    /// The command is refused.
    Refuse(Refusal),
}

/// Why a command is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The sandbox runs.
    Running,
    /// The sandbox is being paused.
    Pausing,
    /// The sandbox is paused.
    Paused,
    /// The sandbox is being resumed.
    Resuming,
    /// The sandbox is being ended.
    Stopping,
    /// Another snapshot of the sandbox is being made.
    InSnapshot,
    /// No client knows the sandbox yet, or it is gone.
    Gone,
}

/// What is to be done with a sandbox at its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtDeadline {
    /// Nothing: the sandbox has another deadline, or none.
    Nothing,
    /// The sandbox is paused.
    Pause,
    /// The sandbox has run for as long as it may, and is ended.
    Expire,
    /// The sandbox was paused for as long as paused sandboxes are kept, and is ended.
    EndRetention,
}

/// What becomes of traffic to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// The traffic passes.
    Pass,
    /// The traffic waits, and the sandbox is resumed.
    Wake,
    /// The traffic is refused.
    Refuse,
}

/// What a sandbox says about traffic to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wakes {
    /// Traffic resumes the sandbox.
    pub on_traffic: bool,
    /// The sandbox was paused for its files, which only clients resume.
    pub paused_for_files: bool,
}

/// What is known about the deadlines of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// The deadline has passed.
    pub is_due: bool,
    /// The sandbox is paused at its deadline.
    pub pauses: bool,
    /// The time has passed for which the sandbox is kept while it is paused.
    pub is_retention_over: bool,
}

impl Command {
    /// Whether a sandbox is written to disk no further while the command waits for its turn.
    #[must_use]
    pub fn interrupts_writes(self) -> bool {
        match self {
            Self::Resume(_) | Self::Connect | Self::Stop { .. } => true,
            Self::Pause
            | Self::PauseAtDeadline { .. }
            | Self::Change
            | Self::Fork
            | Self::Snapshot { .. }
            | Self::Write { .. }
            | Self::Exit => false,
        }
    }
}

impl State {
    /// What becomes of a command that arrives in this state.
    #[must_use]
    pub fn arrival(self, command: Command) -> Arrival {
        match command {
            Command::Pause | Command::PauseAtDeadline { .. } => match self {
                Self::Paused => Arrival::Refuse(Refusal::Paused),
                Self::Creating | Self::Running | Self::Pausing | Self::Resuming | Self::Stopping | Self::Gone => {
                    Arrival::Wait
                }
            },
            Command::Resume(resume) => match self {
                Self::Running => Arrival::Refuse(Refusal::Running),
                // What is under way may keep the processes.
                Self::Resuming if resume.discards_processes => Arrival::Refuse(Refusal::Resuming),
                Self::Pausing if resume.may_go_on && !resume.discards_processes => Arrival::Cancel,
                Self::Creating | Self::Pausing | Self::Paused | Self::Resuming | Self::Stopping | Self::Gone => {
                    Arrival::Wait
                }
            },
            Command::Connect => match self {
                Self::Running => Arrival::Run,
                Self::Pausing | Self::Paused | Self::Resuming => Arrival::Wait,
                Self::Creating | Self::Stopping | Self::Gone => Arrival::Refuse(self.refusal()),
            },
            Command::Stop { is_retry } => match self {
                Self::Running | Self::Pausing | Self::Paused | Self::Resuming => Arrival::Cancel,
                Self::Stopping if is_retry => Arrival::Wait,
                Self::Stopping => Arrival::Join,
                // Only its create request knows the id of a sandbox that is being created.
                Self::Creating | Self::Gone => Arrival::Refuse(Refusal::Gone),
            },
            Command::Snapshot { is_other_made: true } if self == Self::Running => Arrival::Refuse(Refusal::InSnapshot),
            Command::Change | Command::Fork | Command::Snapshot { .. } => {
                self.only(Self::Running).map_or(Arrival::Wait, Arrival::Refuse)
            }
            Command::Write { .. } => self.only(Self::Paused).map_or(Arrival::Wait, Arrival::Refuse),
            Command::Exit => match self {
                Self::Creating | Self::Running => Arrival::Run,
                // Until its state is certain.
                Self::Pausing | Self::Paused | Self::Resuming => Arrival::Wait,
                // Whoever ends it notices.
                Self::Stopping | Self::Gone => Arrival::Join,
            },
        }
    }

    /// What becomes of a command that has its turn in this state, and arrived in the state `arrived`.
    #[must_use]
    pub fn at_turn(self, command: Command, arrived: Self) -> AtTurn {
        // What was interrupted by a panic is about to be repaired.
        let refusal = match self {
            Self::Pausing | Self::Resuming => Refusal::Gone,
            Self::Creating | Self::Running | Self::Paused | Self::Stopping | Self::Gone => self.refusal(),
        };
        match command {
            // An extension has come first.
            Command::PauseAtDeadline { is_due: false } if self == Self::Running => AtTurn::Join,
            Command::Pause | Command::PauseAtDeadline { .. } => match self {
                Self::Running => AtTurn::Run,
                Self::Paused if matches!(arrived, Self::Running | Self::Pausing) => AtTurn::Join,
                Self::Creating | Self::Pausing | Self::Paused | Self::Resuming | Self::Stopping | Self::Gone => {
                    AtTurn::Refuse(refusal)
                }
            },
            // It was paused since the traffic came.
            Command::Resume(resume) if resume.is_unwanted && self == Self::Paused => AtTurn::Refuse(Refusal::Gone),
            Command::Resume(_) | Command::Connect => match self {
                Self::Paused => AtTurn::Run,
                // Another command has resumed it.
                Self::Running => AtTurn::Join,
                Self::Creating | Self::Pausing | Self::Resuming | Self::Stopping | Self::Gone => {
                    AtTurn::Refuse(refusal)
                }
            },
            Command::Stop { .. } => self.only(Self::Stopping).map_or(AtTurn::Run, AtTurn::Refuse),
            Command::Change | Command::Fork | Command::Snapshot { .. } => {
                self.only(Self::Running).map_or(AtTurn::Run, AtTurn::Refuse)
            }
            Command::Write {
                is_in_memory,
                is_interrupted,
            } => match self.only(Self::Paused) {
                Some(why) => AtTurn::Refuse(why),
                None if is_in_memory && !is_interrupted => AtTurn::Run,
                None => AtTurn::Join,
            },
            Command::Exit => match self {
                Self::Running | Self::Paused => AtTurn::Run,
                Self::Creating | Self::Pausing | Self::Resuming | Self::Stopping | Self::Gone => AtTurn::Join,
            },
        }
    }

    /// The transition of a sandbox of which nothing runs any more, if [`Command::Exit`] is carried out in this state.
    #[must_use]
    pub fn exit(self) -> Option<Transition> {
        match self {
            Self::Creating => Some(Transition::Failed),
            Self::Running => Some(Transition::Died),
            Self::Paused => Some(Transition::Lost),
            Self::Pausing | Self::Resuming | Self::Stopping | Self::Gone => None,
        }
    }

    /// What is done with a sandbox at its deadline.
    #[must_use]
    pub fn at_deadline(self, deadlines: Deadlines) -> AtDeadline {
        match self {
            Self::Running if !deadlines.is_due => AtDeadline::Nothing,
            Self::Running if deadlines.pauses => AtDeadline::Pause,
            Self::Paused if deadlines.is_retention_over => AtDeadline::EndRetention,
            Self::Pausing | Self::Paused | Self::Resuming => AtDeadline::Nothing,
            // One that could not be ended is tried again.
            Self::Creating | Self::Running | Self::Stopping | Self::Gone => AtDeadline::Expire,
        }
    }

    /// What becomes of traffic to a sandbox in this state.
    #[must_use]
    pub fn traffic(self, wakes: Wakes) -> Passage {
        match self {
            Self::Running => Passage::Pass,
            Self::Pausing | Self::Paused if wakes.on_traffic && !wakes.paused_for_files => Passage::Wake,
            // A client wants it to run, so it is not kept for its files any more.
            Self::Resuming if wakes.on_traffic => Passage::Wake,
            Self::Creating | Self::Pausing | Self::Paused | Self::Resuming | Self::Stopping | Self::Gone => {
                Passage::Refuse
            }
        }
    }

    /// Why a command is refused that only one state allows; none in that state.
    fn only(self, allowed: Self) -> Option<Refusal> {
        (self != allowed).then(|| self.refusal())
    }

    /// Why a command is refused that this state does not allow.
    fn refusal(self) -> Refusal {
        match self {
            Self::Running => Refusal::Running,
            Self::Pausing => Refusal::Pausing,
            Self::Paused => Refusal::Paused,
            Self::Resuming => Refusal::Resuming,
            Self::Stopping => Refusal::Stopping,
            Self::Creating | Self::Gone => Refusal::Gone,
        }
    }
}

#[cfg(test)]
mod tests;
