use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const RESUME: Resume = Resume {
    discards_processes: false,
    may_go_on: true,
    is_unwanted: false,
};
const UNWANTED: Resume = Resume {
    is_unwanted: true,
    ..RESUME
};
const ANEW: Resume = Resume {
    discards_processes: true,
    ..RESUME
};
const LATER: Resume = Resume {
    may_go_on: false,
    ..RESUME
};

/// Every command.
const COMMANDS: [Command; 18] = [
    Command::Pause,
    Command::PauseAtDeadline { is_due: true },
    Command::PauseAtDeadline { is_due: false },
    Command::Resume(RESUME),
    Command::Resume(ANEW),
    Command::Resume(LATER),
    Command::Resume(UNWANTED),
    Command::Connect,
    Command::Stop { is_retry: false },
    Command::Stop { is_retry: true },
    Command::Change,
    Command::Fork,
    Command::Snapshot { is_other_made: false },
    Command::Snapshot { is_other_made: true },
    WRITE,
    Command::Write {
        is_in_memory: false,
        is_interrupted: false,
    },
    Command::Write {
        is_in_memory: true,
        is_interrupted: true,
    },
    Command::Exit,
];

/// A write of what is in memory, which nobody else needs.
const WRITE: Command = Command::Write {
    is_in_memory: true,
    is_interrupted: false,
};

#[test]
fn every_command_that_arrives_has_a_disposition() {
    use Arrival::{Cancel, Join, Refuse, Run, Wait};
    use Refusal::*;
    #[rustfmt::skip]
    let table = [
        // Creating      Running          Pausing          Paused           Resuming          Stopping          Gone
        [Wait,           Wait,            Wait,            Refuse(Paused),  Wait,             Wait,             Wait],
        [Wait,           Wait,            Wait,            Refuse(Paused),  Wait,             Wait,             Wait],
        [Wait,           Wait,            Wait,            Refuse(Paused),  Wait,             Wait,             Wait],
        [Wait,           Refuse(Running), Cancel,          Wait,            Wait,             Wait,             Wait],
        [Wait,           Refuse(Running), Wait,            Wait,            Refuse(Resuming), Wait,             Wait],
        [Wait,           Refuse(Running), Wait,            Wait,            Wait,             Wait,             Wait],
        [Wait,           Refuse(Running), Cancel,          Wait,            Wait,             Wait,             Wait],
        [Refuse(Gone),   Run,             Wait,            Wait,            Wait,             Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Cancel,          Cancel,          Cancel,          Cancel,           Join,             Refuse(Gone)],
        [Refuse(Gone),   Cancel,          Cancel,          Cancel,          Cancel,           Wait,             Refuse(Gone)],
        [Refuse(Gone),   Wait,            Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Wait,            Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Wait,            Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(InSnapshot), Refuse(Pausing), Refuse(Paused), Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Wait,            Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Wait,            Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Wait,            Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Run,            Run,             Wait,            Wait,            Wait,             Join,             Join],
    ];
    for (command, row) in COMMANDS.into_iter().zip(table) {
        for (state, want) in State::ALL.into_iter().zip(row) {
            assert_eq!(state.arrival(command), want, "{command:?} arrives in {state:?}");
        }
    }
}

#[test]
fn every_command_that_has_its_turn_has_a_disposition() {
    use AtTurn::{Join, Refuse, Run};
    use Refusal::*;
    #[rustfmt::skip]
    let table = [
        // Creating      Running          Pausing          Paused           Resuming          Stopping          Gone
        [Refuse(Gone),   Run,             Refuse(Gone),    Join,            Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Run,             Refuse(Gone),    Join,            Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Join,            Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Run,             Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Run,             Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Run,             Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Refuse(Gone),    Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Join,            Refuse(Gone),    Run,             Refuse(Gone),     Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Run,              Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Run,              Refuse(Gone)],
        [Refuse(Gone),   Run,             Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Run,             Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Run,             Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Run,             Refuse(Pausing), Refuse(Paused),  Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Run,             Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Join,            Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Refuse(Gone),   Refuse(Running), Refuse(Pausing), Join,            Refuse(Resuming), Refuse(Stopping), Refuse(Gone)],
        [Join,           Run,             Join,            Run,             Join,             Join,             Join],
    ];
    for (command, row) in COMMANDS.into_iter().zip(table) {
        for (state, want) in State::ALL.into_iter().zip(row) {
            assert_eq!(
                state.at_turn(command, State::Running),
                want,
                "{command:?} has its turn in {state:?}"
            );
        }
    }
    // One that came when the sandbox was being resumed, or was paused, has not asked for the pause that it finds.
    for arrived in State::ALL {
        let want = match arrived {
            State::Running | State::Pausing => Join,
            _ => Refuse(Paused),
        };
        assert_eq!(State::Paused.at_turn(Command::Pause, arrived), want, "{arrived:?}");
    }
}

/// The transition with which a command begins that is carried out; none if it leaves the state.
fn begins_with(command: Command, state: State) -> Option<Transition> {
    match command {
        Command::Pause | Command::PauseAtDeadline { .. } => Some(Transition::Pause),
        Command::Resume(_) | Command::Connect => Some(Transition::Resume),
        Command::Stop { .. } => Some(Transition::Stop),
        Command::Write { .. } => Some(Transition::KeptOtherwise),
        Command::Exit => state.exit(),
        Command::Change | Command::Fork | Command::Snapshot { .. } => None,
    }
}

#[test]
fn what_is_carried_out_is_a_transition_that_the_state_allows() {
    for command in COMMANDS {
        for state in State::ALL {
            if state.at_turn(command, State::Running) == AtTurn::Run
                && let Some(transition) = begins_with(command, state)
            {
                assert!(state.next(transition).is_ok(), "{command:?} in {state:?}");
            }
            let arrival = state.arrival(command);
            let is_stop = matches!(command, Command::Stop { .. }) && arrival == Arrival::Cancel;
            if is_stop || (command == Command::Exit && arrival == Arrival::Run) {
                let transition = begins_with(command, state).unwrap();
                assert!(state.next(transition).is_ok(), "{command:?} in {state:?}");
            }
        }
    }
}

#[test]
fn every_state_has_a_rule_for_deadlines() {
    use AtDeadline::*;
    for number in 0..8_u8 {
        let [is_due, pauses, is_retention_over] = [1, 2, 4].map(|bit| number & bit != 0);
        let deadlines = Deadlines {
            is_due,
            pauses,
            is_retention_over,
        };
        let runs = match (is_due, pauses) {
            (false, _) => Nothing,
            (true, true) => Pause,
            (true, false) => Expire,
        };
        let paused = if is_retention_over { EndRetention } else { Nothing };
        let want = [Expire, runs, Nothing, paused, Nothing, Expire, Expire];
        for (state, want) in State::ALL.into_iter().zip(want) {
            assert_eq!(state.at_deadline(deadlines), want, "{state:?} {deadlines:?}");
        }
    }
}

#[test]
fn every_state_has_a_rule_for_traffic() {
    use Passage::*;
    for number in 0..4_u8 {
        let [on_traffic, paused_for_files] = [1, 2].map(|bit| number & bit != 0);
        let asleep = if on_traffic && !paused_for_files { Wake } else { Refuse };
        let resuming = if on_traffic { Wake } else { Refuse };
        let want = [Refuse, Pass, asleep, asleep, resuming, Refuse, Refuse];
        let wakes = Wakes {
            on_traffic,
            paused_for_files,
        };
        for (state, want) in State::ALL.into_iter().zip(want) {
            assert_eq!(state.traffic(wakes), want, "{state:?} {wakes:?}");
        }
    }
}

/// A sandbox with its queue, as the server drives it.
struct Sandbox {
    state: State,
    queue: VecDeque<(Command, State)>,
    running: Option<Command>,
    is_cancelled: bool,
    stop_failed: bool,
    answered: usize,
}

impl Sandbox {
    fn apply(&mut self, transition: Transition) -> bool {
        let next = self.state.next(transition);
        self.state = next.unwrap_or(self.state);
        next.is_ok()
    }

    fn arrive(&mut self, command: Command) {
        let arrived = self.state;
        let arrival = arrived.arrival(command);
        match arrival {
            Arrival::Wait | Arrival::Cancel => {
                self.is_cancelled |= arrival == Arrival::Cancel;
                if matches!(command, Command::Stop { .. }) {
                    assert!(self.apply(Transition::Stop));
                    self.stop_failed = false;
                }
                self.queue.push_back((command, arrived));
            }
            Arrival::Run => {
                if command == Command::Exit {
                    assert!(self.apply(arrived.exit().unwrap()));
                }
                self.answered += 1;
            }
            Arrival::Join | Arrival::Refuse(_) => self.answered += 1,
        }
    }

    /// Begins with the next command whose turn has come, or answers it.
    fn begin(&mut self) {
        if self.running.is_some() {
            return;
        }
        let Some((command, arrived)) = self.queue.pop_front() else {
            return;
        };
        // Nothing else has its turn, so nothing is half done.
        assert!(!matches!(self.state, State::Pausing | State::Resuming));
        match self.state.at_turn(command, arrived) {
            AtTurn::Run => {
                if let Some(transition) = begins_with(command, self.state) {
                    assert!(self.apply(transition), "{command:?} in {:?}", self.state);
                }
                self.is_cancelled = false;
                self.running = Some(command);
            }
            AtTurn::Join | AtTurn::Refuse(_) => self.answered += 1,
        }
    }

    /// Completes what runs. A stop that came meanwhile has changed the state, so what was begun may not be legal any more.
    fn finish(&mut self, is_well: bool) {
        let Some(command) = self.running.take() else { return };
        self.answered += 1;
        match command {
            Command::Pause | Command::PauseAtDeadline { .. } if is_well && !self.is_cancelled => {
                self.apply(Transition::Saved)
            }
            Command::Pause | Command::PauseAtDeadline { .. } => self.apply(Transition::Failed),
            Command::Resume(_) | Command::Connect if is_well => self.apply(Transition::Resumed),
            Command::Resume(_) | Command::Connect => self.apply(Transition::Failed),
            Command::Stop { .. } if is_well => self.apply(Transition::Ended),
            Command::Stop { .. } => {
                self.stop_failed = true;
                true
            }
            Command::Change | Command::Fork | Command::Snapshot { .. } | Command::Write { .. } | Command::Exit => true,
        };
    }
}

proptest! {
    /// Whatever comes in whatever order: each command is answered once, no state is entered that the lifecycle does not
    /// allow, and nothing that clients can use comes back once an end has begun.
    #[test]
    fn every_command_is_answered_in_the_end(
        steps in proptest::collection::vec((0..3_u8, 0..COMMANDS.len(), any::<bool>()), 0..200),
    ) {
        let mut sandbox = Sandbox {
            state: State::Running,
            queue: VecDeque::new(),
            running: None,
            is_cancelled: false,
            stop_failed: false,
            answered: 0,
        };
        let mut sent = 0;
        let mut is_ending = false;
        for (kind, index, is_well) in steps {
            match kind {
                0 => {
                    let mut command = COMMANDS[index];
                    if let Command::Stop { is_retry } = &mut command {
                        *is_retry = sandbox.stop_failed;
                    }
                    sandbox.arrive(command);
                    sent += 1;
                }
                1 => sandbox.begin(),
                _ => sandbox.finish(is_well),
            }
            is_ending |= matches!(sandbox.state, State::Stopping | State::Gone);
            prop_assert!(!is_ending || !sandbox.state.is_present());
        }
        while !sandbox.queue.is_empty() || sandbox.running.is_some() {
            sandbox.begin();
            sandbox.finish(true);
        }
        prop_assert_eq!(sandbox.answered, sent);
        prop_assert!(!matches!(sandbox.state, State::Pausing | State::Resuming));
    }
}
