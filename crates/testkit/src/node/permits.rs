//! Permits of the fake node: those of the product, with the clock of a test.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use model::capacity::{HostLoad, Permits};
use model::id::SandboxId;
use parking_lot::Mutex;

type NowUs = Arc<dyn Fn() -> i64 + Send + Sync>;

/// The permits of a fake node, which has no bounds of its own unless they are set.
pub struct FakePermits {
    pub(super) permits: Mutex<Permits>,
    now_us: Mutex<Option<NowUs>>,
    /// The size and the bounds of its host, and what else it says of its load; none of a node of a version before that.
    pub load: Mutex<Option<HostLoad>>,
    /// Number of calls that ask for a permit.
    pub asked: AtomicUsize,
    /// Number of starts that do.
    pub asked_by_start: AtomicUsize,
    /// Whether the node says that it takes permits that come with starts.
    pub come_with_starts: AtomicBool,
}

impl Default for FakePermits {
    fn default() -> Self {
        let load = HostLoad {
            memory_bytes: 64 << 30,
            cores: 16,
            ..HostLoad::default()
        };
        Self {
            permits: Mutex::default(),
            now_us: Mutex::default(),
            load: Mutex::new(Some(load)),
            asked: AtomicUsize::new(0),
            asked_by_start: AtomicUsize::new(0),
            come_with_starts: AtomicBool::new(true),
        }
    }
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
