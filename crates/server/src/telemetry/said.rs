//! What the log says about the receiver: that exports begin to fail, and that they work again, and not each of them.

use std::time::{Duration, Instant};

/// Least time between two lines of the log about the same receiver.
const AGAIN: Duration = Duration::from_secs(60);

/// What was said about the receiver.
#[derive(Debug, Default)]
pub(super) struct Said {
    is_failing: bool,
    last: Option<Instant>,
}

impl Said {
    /// Whether a line may be written, which counts as written then.
    pub(super) fn may_speak(&mut self) -> bool {
        let may = self.last.is_none_or(|last| last.elapsed() >= AGAIN);
        if may {
            self.last = Some(Instant::now());
        }
        may
    }

    /// Notes an export that has failed. Returns whether the log is to say that exports begin to fail.
    pub(super) fn begins_to_fail(&mut self) -> bool {
        let begins = !self.is_failing && self.may_speak();
        self.is_failing |= begins;
        begins
    }

    /// Notes an export that was accepted. Returns whether the log has said that they fail.
    pub(super) fn works_again(&mut self) -> bool {
        std::mem::take(&mut self.is_failing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_that_fails_is_mentioned_once() {
        let mut said = Said::default();
        assert!(!said.works_again());
        assert!(said.begins_to_fail());
        assert!(!said.begins_to_fail() && !said.may_speak());
        assert!(said.works_again());
        assert!(!said.works_again());
        // A failure that was not mentioned is not said to be over.
        assert!(!said.begins_to_fail());
        assert!(!said.works_again());
    }
}
