//! The condition of a live sandbox: how far its end is, whether its processes stand still, and what its supervisor has seen.
//!
//! All of it is one value with one lock, so no reader sees a half of a change, and each change can be waited for. Nobody
//! holds the lock for longer than that: the system calls that bring a condition about are made before or after it.
//!
//! ```text
//!   lives ──▶ ending ──▶ ended ──▶ cleaned          runs ◀──▶ frozen ◀──▶ at rest
//!                                                    ▲
//!                                                    └──▶ being copied
//! ```
//!
//! Its end never goes back. Whether it stands still is changed with the turn of the sandbox alone (`SandboxHandle::change`),
//! except while it is kept ready, before a client knows it.

use std::sync::Arc;

use tokio::sync::watch;

/// The condition of a sandbox. A clone is of the same sandbox, and outlives its handle.
#[derive(Debug, Clone)]
pub(crate) struct Condition(Arc<watch::Sender<Now>>);

#[derive(Debug)]
struct Now {
    life: Life,
    stillness: Stillness,
    /// Whether its disk is kept after its end, for a commit or a pause.
    keeps_disk: bool,
    /// Whether the events of its agent are followed.
    is_followed: bool,
    /// How often it got a new spawner.
    respawns: u64,
}

/// How far the end of a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Life {
    Lives,
    /// Its end was requested, or has begun.
    Ending,
    /// No process of it is left.
    Ended,
    /// Nothing of it is left on the host but a disk that is kept.
    Cleaned,
}

/// Whether the processes of a sandbox stand still, so that its agent does not respond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stillness {
    Runs,
    /// The sandbox is about to be copied, or is, and goes on after that.
    Copied,
    /// The sandbox is paused, or kept ready for a client.
    Frozen,
    /// The sandbox is frozen for a checkpoint: it has no spawner, and its agent may wait for the host.
    AtRest,
}

impl Condition {
    /// The condition of a sandbox that runs.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Now {
            life: Life::Lives,
            stillness: Stillness::Runs,
            keeps_disk: false,
            is_followed: false,
            respawns: 0,
        })))
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.0.borrow().life >= Life::Ending
    }

    /// Begins its end, unless it is ending already. Returns whether it was not.
    pub(crate) fn begin_end(&self, keeps_disk: bool) -> bool {
        self.0.send_if_modified(|now| {
            let is_first = now.life == Life::Lives;
            if is_first {
                now.life = Life::Ending;
                now.keeps_disk = keeps_disk;
            }
            is_first
        })
    }

    /// Notes that no process of it is left.
    pub(crate) fn set_ended(&self) {
        self.advance(Life::Ended);
    }

    /// Notes that nothing of it is left on the host but a disk that is kept.
    pub(crate) fn set_cleaned(&self) {
        self.advance(Life::Cleaned);
    }

    fn advance(&self, to: Life) {
        self.0.send_modify(|now| now.life = now.life.max(to));
    }

    /// Whether its disk is kept after its end.
    pub(crate) fn keeps_disk(&self) -> bool {
        self.0.borrow().keeps_disk
    }

    /// Waits until it begins to end.
    pub(crate) async fn until_ending(&self) {
        self.until(|now| now.life >= Life::Ending).await;
    }

    /// Waits until no process of it is left.
    pub(crate) async fn until_ended(&self) {
        self.until(|now| now.life >= Life::Ended).await;
    }

    /// Waits until nothing of it is left on the host but a disk that is kept.
    pub(crate) async fn until_cleaned(&self) {
        self.until(|now| now.life == Life::Cleaned).await;
    }

    /// Whether its processes stand still, or are about to: paused, kept ready, or copied.
    pub(crate) fn is_frozen(&self) -> bool {
        self.0.borrow().stillness != Stillness::Runs
    }

    /// Whether it is frozen for a checkpoint.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.0.borrow().stillness == Stillness::AtRest
    }

    /// Whether it runs, or goes on in a moment.
    pub(crate) fn runs_or_is_copied(&self) -> bool {
        matches!(self.0.borrow().stillness, Stillness::Runs | Stillness::Copied)
    }

    /// Notes that its processes stand still, or are about to. One that is at rest stays so. Returns whether they did before.
    pub(crate) fn freeze(&self) -> bool {
        !self.0.send_if_modified(|now| {
            let is_change = now.stillness == Stillness::Runs;
            if is_change {
                now.stillness = Stillness::Frozen;
            }
            is_change
        })
    }

    /// Notes that it is at rest.
    pub(crate) fn rest(&self) {
        self.0.send_modify(|now| now.stillness = Stillness::AtRest);
    }

    /// Notes that it stands still until it is copied.
    pub(crate) fn copy(&self) {
        self.0.send_modify(|now| now.stillness = Stillness::Copied);
    }

    /// Notes that its processes go on. Returns whether they stood still before.
    pub(crate) fn go_on(&self) -> bool {
        self.0.send_if_modified(|now| {
            let was_still = now.stillness != Stillness::Runs;
            now.stillness = Stillness::Runs;
            was_still
        })
    }

    /// Waits until its processes do not stand still.
    pub(crate) async fn until_it_runs(&self) {
        self.until(|now| now.stillness == Stillness::Runs).await;
    }

    /// Notes whether the events of its agent are followed.
    pub(crate) fn set_followed(&self, is_followed: bool) {
        self.0.send_modify(|now| now.is_followed = is_followed);
    }

    /// Waits until the events of its agent are followed.
    pub(crate) async fn until_followed(&self) {
        self.until(|now| now.is_followed).await;
    }

    /// How often it got a new spawner.
    pub(crate) fn respawns(&self) -> u64 {
        self.0.borrow().respawns
    }

    /// Notes that it got a new spawner.
    pub(crate) fn count_respawn(&self) {
        self.0.send_modify(|now| now.respawns += 1);
    }

    async fn until(&self, is_reached: impl FnMut(&Now) -> bool) {
        // The sender lives as long as this does.
        let _ = self.0.subscribe().wait_for(is_reached).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_begins_once_and_never_goes_back() {
        let condition = Condition::new();
        assert!(!condition.is_ending() && condition.begin_end(true));
        assert!(condition.is_ending() && !condition.begin_end(false) && condition.keeps_disk());
        let of_supervisor = condition.clone();
        let cleaned = async {
            of_supervisor.set_cleaned();
            // Late, for example from a request that has waited.
            of_supervisor.set_ended();
            assert!(!of_supervisor.begin_end(true));
        };
        tokio::join!(condition.until_ended(), condition.until_cleaned(), cleaned);
        condition.until_ending().await;
    }

    #[test]
    fn an_end_that_others_have_requested_keeps_no_disk() {
        let condition = Condition::new();
        assert!(condition.begin_end(false) && !condition.begin_end(true) && !condition.keeps_disk());
    }

    #[tokio::test]
    async fn what_is_at_rest_stays_so_until_it_goes_on() {
        let condition = Condition::new();
        assert!(!condition.freeze() && condition.freeze() && !condition.is_at_rest());
        condition.rest();
        assert!(condition.freeze() && condition.is_at_rest() && !condition.runs_or_is_copied());
        tokio::join!(condition.until_it_runs(), async { assert!(condition.go_on()) });
        assert!(!condition.go_on() && !condition.is_frozen());
    }

    #[test]
    fn a_sandbox_that_is_copied_stands_still_for_a_moment() {
        let condition = Condition::new();
        condition.copy();
        assert!(condition.is_frozen() && condition.runs_or_is_copied());
        assert!(condition.go_on() && !condition.is_frozen());
    }
}
