//! Where sandboxes are that are not on this server, as far as it was told: bounded in number and age.

use std::collections::HashMap;
use std::time::Duration;

use model::id::{NodeId, SandboxId};
use tokio::time::Instant;

/// How many are remembered.
const MOST: usize = 64 << 10;
/// How long it is remembered where a sandbox is: whoever has it no more says so.
const AGE: Duration = Duration::from_secs(60);
/// How long it is remembered that there is no such sandbox, whose id may be in use the next moment, or that no server answers.
const SHORT_AGE: Duration = Duration::from_millis(500);

/// What is known of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Known {
    /// The sandbox is on a node of this server.
    At(NodeId),
    /// There is no such sandbox.
    Nowhere,
    /// The server that has the sandbox does not answer, or none has it.
    Away,
}

impl Known {
    fn age(&self) -> Duration {
        match self {
            Self::At(_) => AGE,
            Self::Nowhere | Self::Away => SHORT_AGE,
        }
    }
}

/// What is known of sandboxes.
#[derive(Debug, Default)]
pub(super) struct Routes(HashMap<SandboxId, (Known, Instant)>);

impl Routes {
    /// What is known of a sandbox, and not too old.
    pub(super) fn find(&self, id: &SandboxId, now: Instant) -> Option<Known> {
        let (known, since) = self.0.get(id)?;
        (now.saturating_duration_since(*since) < known.age()).then(|| known.clone())
    }

    /// Notes what was found.
    pub(super) fn put(&mut self, id: &SandboxId, known: Known, now: Instant) {
        if self.0.len() >= MOST && !self.0.contains_key(id) {
            self.0
                .retain(|_, (known, since)| now.saturating_duration_since(*since) < known.age());
            if self.0.len() >= MOST {
                // Each is found again with one question.
                self.0.clear();
            }
        }
        self.0.insert(id.clone(), (known, now));
    }

    /// Forgets a sandbox.
    pub(super) fn forget(&mut self, id: &SandboxId) {
        self.0.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> SandboxId {
        format!("i{number:019}").parse().expect("an id")
    }

    fn server() -> NodeId {
        "0199d0a6-0000-7000-8000-000000000001".parse().expect("an id")
    }

    #[test]
    fn what_is_old_or_was_denied_is_not_believed() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        routes.put(&id(1), Known::At(server()), now);
        routes.put(&id(2), Known::Nowhere, now);
        assert_eq!(routes.find(&id(1), now + AGE / 2), Some(Known::At(server())));
        assert_eq!(routes.find(&id(1), now + AGE), None);
        assert_eq!(routes.find(&id(2), now), Some(Known::Nowhere));
        assert_eq!(routes.find(&id(2), now + SHORT_AGE), None);
        routes.forget(&id(1));
        assert_eq!(routes.find(&id(1), now), None);
    }

    #[test]
    fn a_flood_of_ids_takes_no_more_memory() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        for number in 0..3 * MOST {
            routes.put(&id(number), Known::Nowhere, now);
        }
        assert!(routes.0.len() <= MOST);
        assert_eq!(routes.find(&id(3 * MOST - 1), now), Some(Known::Nowhere));
    }
}
