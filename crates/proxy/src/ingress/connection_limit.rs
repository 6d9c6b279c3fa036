//! Limits on connections into sandboxes, in total and per sandbox: each one uses a file descriptor and buffers of the
//! platform, and clients need no credentials to open them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
        Ok(ConnectionPermit(Arc::new(PermitState {
            id: id.clone(),
            taken: Arc::clone(&self.taken),
            released: AtomicBool::new(false),
        })))
    }
}

/// A counted connection. Its place is free again once [`Self::release`] was called or all clones are dropped.
#[derive(Debug, Clone)]
pub(super) struct ConnectionPermit(Arc<PermitState>);

#[derive(Debug)]
struct PermitState {
    id: SandboxId,
    taken: Arc<Mutex<Taken>>,
    released: AtomicBool,
}

impl ConnectionPermit {
    /// Frees the place.
    pub(super) fn release(&self) {
        self.0.release();
    }
}

impl PermitState {
    fn release(&self) {
        if self.released.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut taken = self.taken.lock();
        taken.total -= 1;
        if let Some(count) = taken.by_sandbox.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                taken.by_sandbox.remove(&self.id);
            }
        }
    }
}

impl Drop for PermitState {
    fn drop(&mut self) {
        self.release();
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
        // Released early, it is not counted down twice.
        first.release();
        drop((first, third));
        let taken = connections.taken.lock();
        assert_eq!((taken.total, taken.by_sandbox.len()), (1, 1));
    }
}
