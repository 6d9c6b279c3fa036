//! Permits of the fake node: those of the product, with the clock of a test.

use std::fmt;
use std::sync::Arc;

use model::capacity::Permits;
use model::id::SandboxId;
use parking_lot::Mutex;

type NowUs = Arc<dyn Fn() -> i64 + Send + Sync>;

/// The permits of a fake node, which has no bounds of its own.
#[derive(Default)]
pub struct FakePermits {
    pub(super) permits: Mutex<Permits>,
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

    pub(super) fn now_us(&self) -> i64 {
        let now_us = self.now_us.lock().clone();
        now_us.map_or(0, |now_us| now_us())
    }
}
