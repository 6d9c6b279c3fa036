//! Permits of the fake node: those of the product, with the clock of a test.

use std::fmt;
use std::sync::Arc;

use model::capacity::{Bounds, Permits};
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{NoCapacity, NodeError, PermitRequest};

use super::FakeNode;

type NowUs = Arc<dyn Fn() -> i64 + Send + Sync>;

/// The permits of a fake node, which has no bounds of its own.
#[derive(Default)]
pub struct FakePermits {
    permits: Mutex<Permits>,
    now_us: Mutex<Option<NowUs>>,
}

impl fmt::Debug for FakePermits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakePermits")
    }
}

impl FakePermits {
    /// Sets the clock by which permits end and readings get old. Without one, time stands still.
    pub fn follow(&self, now_us: impl Fn() -> i64 + Send + Sync + 'static) {
        *self.now_us.lock() = Some(Arc::new(now_us));
    }

    pub(super) fn give_back(&self, id: &SandboxId, number: u64) {
        self.permits.lock().give_back(id, number);
    }

    fn now_us(&self) -> i64 {
        let now_us = self.now_us.lock().clone();
        now_us.map_or(0, |now_us| now_us())
    }
}

/// A start that has a permit, until this is dropped.
pub(super) struct Begun<'a> {
    node: &'a FakeNode,
    id: SandboxId,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let mut permits = self.node.permits.permits.lock();
        permits.settle(&self.id, self.node.permits.now_us(), &*self.node.running.lock());
    }
}

impl FakeNode {
    /// How many sandboxes count: those that run or are frozen, and permits of others.
    pub fn counted(&self) -> usize {
        let mut permits = self.permits.permits.lock();
        permits.count(self.permits.now_us(), &*self.running.lock())
    }

    pub(super) fn give_permit(&self, request: &PermitRequest) -> Result<(), NoCapacity> {
        let now_us = self.permits.now_us();
        let mut permits = self.permits.permits.lock();
        if request.reads_again {
            permits.forget_reading();
        }
        permits.take(request, Bounds::default(), now_us, &*self.running.lock())?;
        if !permits.is_fresh(now_us) {
            permits.begin_reading();
            permits.end_reading(now_us, *self.room.lock());
        }
        permits.judge(request, Bounds::default())
    }

    pub(super) fn begin(&self, id: &SandboxId) -> Result<Begun<'_>, NodeError> {
        let mut permits = self.permits.permits.lock();
        let begun = permits.begin(id, Bounds::default(), self.permits.now_us(), &*self.running.lock());
        begun.map_err(|why| NodeError::Capacity(why.to_string()))?;
        Ok(Begun {
            node: self,
            id: id.clone(),
        })
    }
}
