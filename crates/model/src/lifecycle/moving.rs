//! Whether a paused sandbox moves to another node before it is resumed, and what becomes of the resume where no node takes it.
//!
//! This is about what is paused on a disk, where copies of that are made: another node goes on with the copy. Of these lines the
//! first that applies decides ([`Home::before_resume`]):
//!
//! | Node of the sandbox | Decision |
//! |---|---|
//! | has lost it | move |
//! | drains, and the other nodes were not asked yet | move |
//! | connected | resume |
//! | away, and there is no copy | resume, which fails because the node is away |
//! | away for a moment | wait |
//! | away | move |
//!
//! Where no node takes the copy ([`MoveReason::not_taken`]), and where the move fails ([`MoveReason::resumes_after_failure`]):
//!
//! | Reason of the move | not taken, node connected | not taken, node away | failed, node connected | failed, node away |
//! |---|---|---|---|---|
//! | lost | refuse: lost | refuse: away | fail | fail |
//! | draining | decide again | decide again | resume | fail |
//! | away | resume | refuse: away | fail | fail |

/// What is known of the node of a paused sandbox that is about to be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// The node has nothing of the sandbox.
    pub has_lost: bool,
    /// The node drains, and other nodes were not asked yet.
    pub drains: bool,
    /// Whether the node is connected.
    pub link: Link,
    /// The blob store has a copy of what is kept of the sandbox. This matters only while the node is not connected.
    pub has_copy: bool,
}

/// The connection of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// The node is connected.
    Connected,
    /// The node has not been connected for a moment, as when it is restarted.
    Interrupted,
    /// The node is not connected, and is not waited for any longer.
    Away,
}

/// What is done before a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeforeResume {
    /// The sandbox is resumed on its node.
    Resume,
    /// The connection of the node is waited for, and the decision made again.
    Wait,
    /// Other nodes are asked to take the sandbox.
    Move(MoveReason),
}

/// Why a paused sandbox leaves its node before a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveReason {
    /// The node is connected, and has nothing of the sandbox: its disk was lost or replaced.
    Lost,
    /// The node gets no new sandboxes.
    Draining,
    /// The node is not connected.
    Away,
}

/// What becomes of a resume whose sandbox no other node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotTaken {
    /// The sandbox is resumed on its node.
    Resume,
    /// The decision is made again, without regard to the drain of the node.
    DecideAgain,
    /// The resume is refused: the node is not connected.
    RefuseAway,
    /// The resume is refused: the node is connected, and has nothing of the sandbox.
    RefuseLost,
}

impl Home {
    /// What is done before the sandbox is resumed.
    #[must_use]
    pub fn before_resume(self) -> BeforeResume {
        if self.has_lost {
            return BeforeResume::Move(MoveReason::Lost);
        }
        if self.drains {
            return BeforeResume::Move(MoveReason::Draining);
        }
        match self.link {
            Link::Connected => BeforeResume::Resume,
            Link::Interrupted | Link::Away if !self.has_copy => BeforeResume::Resume,
            Link::Interrupted => BeforeResume::Wait,
            Link::Away => BeforeResume::Move(MoveReason::Away),
        }
    }
}

impl MoveReason {
    /// The reason in the log.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Draining => "draining",
            Self::Away => "away",
        }
    }

    /// What becomes of the resume where no node takes the sandbox. `is_connected` says whether its own node is connected by now.
    #[must_use]
    pub fn not_taken(self, is_connected: bool) -> NotTaken {
        match (self, is_connected) {
            (Self::Lost, true) => NotTaken::RefuseLost,
            (Self::Draining, _) => NotTaken::DecideAgain,
            // A resume that begins makes the copy that of an earlier pause, and one without the node would reach nothing.
            (Self::Lost | Self::Away, false) => NotTaken::RefuseAway,
            (Self::Away, true) => NotTaken::Resume,
        }
    }

    /// Whether the sandbox is resumed on its node where the move has failed. Otherwise the resume fails for the same reason.
    #[must_use]
    pub fn resumes_after_failure(self, is_connected: bool) -> bool {
        match self {
            Self::Draining => is_connected,
            Self::Lost | Self::Away => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_moves_where_its_node_cannot_go_on_with_it() {
        use BeforeResume::{Move, Resume, Wait};
        use Link::{Away, Connected, Interrupted};
        use MoveReason::{Draining, Lost};

        // Lost, drains, a copy; connected, interrupted, away.
        let gone = Move(MoveReason::Away);
        let table = [
            (false, false, false, [Resume, Resume, Resume]),
            (false, false, true, [Resume, Wait, gone]),
            (false, true, false, [Move(Draining); 3]),
            (false, true, true, [Move(Draining); 3]),
            (true, false, false, [Move(Lost); 3]),
            (true, false, true, [Move(Lost); 3]),
            (true, true, false, [Move(Lost); 3]),
            (true, true, true, [Move(Lost); 3]),
        ];
        for (has_lost, drains, has_copy, decisions) in table {
            for (link, decision) in [Connected, Interrupted, Away].into_iter().zip(decisions) {
                let home = Home {
                    has_lost,
                    drains,
                    link,
                    has_copy,
                };
                assert_eq!(home.before_resume(), decision, "{home:?}");
            }
        }
    }

    #[test]
    fn a_resume_without_a_move_goes_on_or_says_why_not() {
        use NotTaken::{DecideAgain, RefuseAway, RefuseLost, Resume};

        // Not taken, and failed, each with the node connected and away.
        for (reason, not_taken, resumes) in [
            (MoveReason::Lost, [RefuseLost, RefuseAway], [false, false]),
            (MoveReason::Draining, [DecideAgain, DecideAgain], [true, false]),
            (MoveReason::Away, [Resume, RefuseAway], [false, false]),
        ] {
            let both = [true, false];
            assert_eq!(both.map(|is_connected| reason.not_taken(is_connected)), not_taken);
            assert_eq!(
                both.map(|is_connected| reason.resumes_after_failure(is_connected)),
                resumes
            );
        }
    }

    /// A resume is decided in a few steps, whatever happens to the connection meanwhile.
    #[test]
    fn a_drain_is_decided_about_once() {
        for link in [Link::Connected, Link::Interrupted, Link::Away] {
            let home = Home {
                has_lost: false,
                drains: false,
                link,
                has_copy: true,
            };
            assert_ne!(home.before_resume(), BeforeResume::Move(MoveReason::Draining));
        }
        let again = [MoveReason::Lost, MoveReason::Away].map(|reason| [true, false].map(|is| reason.not_taken(is)));
        assert!(!again.as_flattened().contains(&NotTaken::DecideAgain));
    }
}
