//! Admission by the fake node: what it counts, and the starts that have a permit.

use std::sync::atomic::Ordering;

use model::capacity::Bounds;
use model::id::SandboxId;
use protocol::node::{HostLoad, HostReport, NoCapacity, NodeError, PermitRequest};

use super::FakeNode;

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

    fn bounds(&self) -> Bounds {
        (*self.permits.load.lock()).map(|load| load.bounds).unwrap_or_default()
    }

    pub(super) fn say(&self) -> Result<HostReport, NodeError> {
        let left = (*self.room.lock()).ok_or_else(|| NodeError::failed("capacity unknown"))?;
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let counted = number(self.counted());
        let running = number(self.running.lock().len());
        let load = (*self.permits.load.lock()).map(|load| HostLoad {
            running,
            starting: counted.saturating_sub(running),
            ..load
        });
        Ok(HostReport { left, load })
    }

    pub(super) fn permit_for(&self, request: &PermitRequest) -> Result<(), NoCapacity> {
        self.permits.asked.fetch_add(1, Ordering::Relaxed);
        self.give_permit(request)
    }

    fn give_permit(&self, request: &PermitRequest) -> Result<(), NoCapacity> {
        let now_us = self.permits.now_us();
        let mut permits = self.permits.permits.lock();
        if request.reads_again {
            permits.forget_reading();
        }
        permits.take(request, self.bounds(), now_us, &*self.running.lock())?;
        if !permits.is_fresh(now_us) {
            permits.begin_reading();
            permits.end_reading(now_us, *self.room.lock());
        }
        permits.judge(request, self.bounds())
    }

    pub(super) fn begin_with(&self, id: &SandboxId, permit: Option<&PermitRequest>) -> Result<Begun<'_>, NodeError> {
        if let Some(request) = permit {
            self.permits.asked_by_start.fetch_add(1, Ordering::Relaxed);
            let given = self.give_permit(request);
            given.map_err(|why| NodeError::Capacity(why.to_string()))?;
        }
        self.begin(id)
    }

    pub(super) fn begin(&self, id: &SandboxId) -> Result<Begun<'_>, NodeError> {
        let mut permits = self.permits.permits.lock();
        let begun = permits.begin(id, self.bounds(), self.permits.now_us(), &*self.running.lock());
        begun.map_err(|why| NodeError::Capacity(why.to_string()))?;
        Ok(Begun {
            node: self,
            id: id.clone(),
        })
    }
}
