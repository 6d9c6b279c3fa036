//! Limits on connections into sandboxes, in total and per sandbox: each one uses a file descriptor and buffers of the
//! platform, and clients need no credentials to open them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use model::id::SandboxId;
use parking_lot::Mutex;

/// The limit that refused a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LimitReached {
    /// The sandbox has reached its limit, given here.
    Sandbox(usize),
    /// All sandboxes together have reached their limit.
    Total,
}

/// Counts connections against the limits.
#[derive(Debug, Clone)]
pub(super) struct ConnectionLimiter {
    total: usize,
    per_sandbox: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    by_sandbox: HashMap<SandboxId, usize>,
}

impl ConnectionLimiter {
    pub(super) fn new(total: usize, per_sandbox: usize) -> Self {
        Self {
            total,
            per_sandbox,
            taken: Arc::default(),
        }
    }

    /// Counts a connection until the returned permit is dropped.
    ///
    /// # Errors
    /// When a limit is reached.
    pub(super) fn take(&self, id: &SandboxId) -> Result<ConnectionPermit, LimitReached> {
        let mut taken = self.taken.lock();
        if taken.total >= self.total {
            return Err(LimitReached::Total);
        }
        let of_sandbox = taken.by_sandbox.entry(id.clone()).or_default();
        if *of_sandbox >= self.per_sandbox {
            return Err(LimitReached::Sandbox(self.per_sandbox));
        }
        *of_sandbox += 1;
        taken.total += 1;
        Ok(ConnectionPermit {
            id: id.clone(),
            taken: Arc::clone(&self.taken),
        })
    }
}

/// A counted connection; dropping it frees its place.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    id: SandboxId,
    taken: Arc<Mutex<Taken>>,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        taken.total -= 1;
        if let Entry::Occupied(mut count) = taken.by_sandbox.entry(self.id.clone()) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_and_given_back() {
        let connections = ConnectionLimiter::new(3, 2);
        let [one, other]: [SandboxId; 2] = ["ione", "iother"].map(|id| id.parse().expect("an id"));
        let first = connections.take(&one).expect("a permit");
        let _second = connections.take(&one).expect("a permit");
        assert_eq!(connections.take(&one).expect_err("full"), LimitReached::Sandbox(2));
        let third = connections.take(&other).expect("a permit");
        assert_eq!(connections.take(&other).expect_err("full"), LimitReached::Total);
        drop((first, third));
        let taken = connections.taken.lock();
        assert_eq!((taken.total, taken.by_sandbox.len()), (1, 1));
    }
}
