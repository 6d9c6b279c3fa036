//! What is left of ended sandboxes: how much may be left at a time, how many are taken down at a time, and who waits for it.
//!
//! An end is answered when no process of the sandbox is left: nothing of it runs, can be reached or is charged any more.
//! Taking down its file systems, disk and control groups takes longer, because the kernel writes out and waits for
//! readers, so it happens after the answer:
//!
//! - The mount namespace is held by a descriptor ([`Held`]), so that the kernel does not unmount while the last process exits.
//!   When the platform is killed, the kernel closes it, and the next start removes the rest.
//! - What is held is bounded ([`SANDBOXES_MAX`], [`BYTES_MAX`]). Beyond that, an end takes as long as the kernel needs, which
//!   also slows down who creates and deletes faster than the host can follow.
//! - Few are taken down at a time ([`Teardowns::turn`]), so that they do not take the processors from requests.
//! - What needs the end of it all waits ([`Teardowns::settled`]), for a bounded time: processes that the kernel blocks may
//!   never end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use runtime::driver::{HeldMounts, Sandbox};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// Ended sandboxes whose file systems may be held at a time.
const SANDBOXES_MAX: usize = 32;
/// Memory and disk space that these may have, together. Some of it is only free once they are taken down.
const BYTES_MAX: u64 = 2 << 30;
/// With more than this behind, a question for the free capacity of the host waits.
const BYTES_UNNOTICED: u64 = 64 << 20;
/// How long a tear-down counts for those who wait: one that takes longer is blocked in the kernel.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Fewest and most tear-downs at a time. Each mostly waits for the kernel.
const TURNS: (usize, usize) = (2, 16);

/// The tear-downs of a node.
#[derive(Debug)]
pub(crate) struct Teardowns {
    /// Tear-downs that have begun and are not over, with the time of their beginning.
    under_way: watch::Sender<BTreeMap<u64, Instant>>,
    next: AtomicU64,
    behind: Mutex<Behind>,
    turns: Semaphore,
}

/// What is held of ended sandboxes.
#[derive(Debug, Default)]
struct Behind {
    sandboxes: usize,
    bytes: u64,
}

/// A tear-down that is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct Teardown {
    of: Arc<Teardowns>,
    number: u64,
}

/// The file systems of a sandbox that ends. Dropping this unmounts them once its last process has exited, and takes
/// milliseconds.
#[derive(Debug)]
pub(crate) struct Held {
    of: Arc<Teardowns>,
    bytes: u64,
    mounts: Option<HeldMounts>,
}

impl Teardowns {
    pub(crate) fn new() -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (fewest, most) = TURNS;
        Arc::new(Self {
            under_way: watch::Sender::default(),
            next: AtomicU64::default(),
            behind: Mutex::default(),
            turns: Semaphore::new(cores.clamp(fewest, most)),
        })
    }

    /// Notes that a sandbox is about to be taken down. Before others learn of its end.
    pub(crate) fn begin(self: &Arc<Self>) -> Teardown {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        self.under_way.send_modify(|under_way| {
            under_way.insert(number, Instant::now());
        });
        Teardown {
            of: Arc::clone(self),
            number,
        }
    }

    /// Holds the file systems of a sandbox that is about to be killed; none when enough is held, or it cannot be measured.
    /// Takes tens of microseconds.
    pub(crate) fn hold(self: &Arc<Self>, sandbox: &dyn Sandbox) -> Option<Held> {
        // What there is of it now is more than is left once its processes are gone, so the bound holds.
        let mounts = sandbox.hold_mounts().ok()?;
        let mut held = self.reserve(mounts.bytes)?;
        held.mounts = Some(mounts);
        Some(held)
    }

    /// Counts a sandbox with this much among what is held, if that is allowed.
    fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Held> {
        let mut behind = self.behind.lock();
        let sum = behind.bytes.saturating_add(bytes);
        if behind.sandboxes >= SANDBOXES_MAX || sum > BYTES_MAX {
            return None;
        }
        behind.sandboxes += 1;
        behind.bytes = sum;
        Some(Held {
            of: Arc::clone(self),
            bytes,
            mounts: None,
        })
    }

    /// Waits for the turn to take one down, and keeps it until the result is dropped.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed; if it were, the number would not be limited.
        self.turns.acquire().await.ok()
    }

    /// Waits until all that have begun are over, except those that take unusually long.
    pub(crate) async fn settled(&self) {
        let now = Instant::now();
        let recent = |began: &Instant| now.duration_since(*began) < WAIT_MAX;
        let mut changes = self.under_way.subscribe();
        let awaited: Vec<(u64, Instant)> = (changes.borrow_and_update().iter())
            .filter(|(_, began)| recent(began))
            .map(|(number, began)| (*number, *began))
            .collect();
        let Some((_, last)) = awaited.last() else { return };
        let deadline = *last + WAIT_MAX;
        let over = changes.wait_for(|left| !awaited.iter().any(|(number, _)| left.contains_key(number)));
        if tokio::time::timeout_at(deadline.into(), over).await.is_err() {
            tracing::warn!(
                "an ended sandbox still takes up memory or disk of the host, most likely because the kernel is busy with disk I/O"
            );
        }
    }

    /// Waits as [`Self::settled`] if what is behind matters for the capacity of the host.
    pub(crate) async fn settled_for_capacity(&self) {
        let bytes = self.behind.lock().bytes;
        if bytes > BYTES_UNNOTICED {
            self.settled().await;
        }
    }
}

impl Drop for Teardown {
    fn drop(&mut self) {
        self.of.under_way.send_modify(|under_way| {
            under_way.remove(&self.number);
        });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Counted until the space is free.
        drop(self.mounts.take());
        let mut behind = self.of.behind.lock();
        behind.sandboxes -= 1;
        behind.bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_bounded_by_number_and_by_bytes() {
        let teardowns = Teardowns::new();
        let mut held: Vec<Held> = (0..SANDBOXES_MAX).map(|_| teardowns.reserve(1).unwrap()).collect();
        assert!(teardowns.reserve(0).is_none(), "as many as there may be");
        held.truncate(1);
        assert!(
            teardowns.reserve(BYTES_MAX).is_none(),
            "one more byte than there may be"
        );
        let rest = teardowns.reserve(BYTES_MAX - 1).unwrap();
        assert!(teardowns.reserve(1).is_none());
        drop(rest);
        assert!(teardowns.reserve(1).is_some());
        assert!(teardowns.reserve(u64::MAX).is_none());
        drop(held);
        let behind = teardowns.behind.lock();
        assert_eq!((behind.sandboxes, behind.bytes), (0, 0));
    }

    #[tokio::test]
    async fn those_that_have_begun_are_awaited_and_later_ones_are_not() {
        let teardowns = Teardowns::new();
        teardowns.settled().await;
        let (first, second) = (teardowns.begin(), teardowns.begin());
        let waiting = tokio::spawn({
            let teardowns = Arc::clone(&teardowns);
            async move { teardowns.settled().await }
        });
        while teardowns.under_way.receiver_count() == 0 {
            tokio::task::yield_now().await;
        }
        let later = teardowns.begin();
        drop(second);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(first);
        waiting.await.unwrap();
        drop(later);
    }

    #[tokio::test]
    async fn one_that_takes_too_long_is_not_awaited() {
        let teardowns = Teardowns::new();
        let blocked = teardowns.begin();
        let before = Instant::now().checked_sub(WAIT_MAX).unwrap();
        teardowns.under_way.send_modify(|under_way| {
            under_way.insert(blocked.number, before);
        });
        let began = Instant::now();
        teardowns.settled().await;
        assert!(began.elapsed() < WAIT_MAX / 2);
    }

    #[tokio::test]
    async fn few_have_their_turn_at_a_time() {
        let teardowns = Teardowns::new();
        let turns = teardowns.turns.available_permits();
        assert!((TURNS.0..=TURNS.1).contains(&turns));
        let mut taken = Vec::new();
        for _ in 0..turns {
            taken.push(teardowns.turn().await);
        }
        assert!(teardowns.turns.try_acquire().is_err());
        taken.pop();
        assert!(teardowns.turn().await.is_some());
    }
}
