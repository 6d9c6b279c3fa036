//! What the node counts of sandboxes that it has held back so that others keep their part of the host.
//!
//! Only who holds them back writes the counters (`guard`, `process_watch`). Each is read by itself: they need not fit each
//! other at any time.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use protocol::node::{DiskStops, Throttles};

/// Counters of the guard.
#[derive(Debug, Default)]
pub(crate) struct GuardCounters {
    pub(crate) stopped: AtomicU32,
    pub(crate) stops: AtomicU64,
    pub(crate) ends: AtomicU64,
    /// What file systems have promised and not yet written, in bytes.
    pub(crate) owed: AtomicU64,
}

impl GuardCounters {
    pub(crate) fn stops(&self) -> DiskStops {
        DiskStops {
            stopped: self.stopped.load(Ordering::Relaxed),
            stops: self.stops.load(Ordering::Relaxed),
            ends: self.ends.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn owed(&self) -> u64 {
        self.owed.load(Ordering::Relaxed)
    }
}

/// Counters of the watch of processes.
#[derive(Debug, Default)]
pub(crate) struct ThrottleCounters {
    pub(crate) throttled: AtomicU32,
    pub(crate) throttles: AtomicU64,
}

impl ThrottleCounters {
    pub(crate) fn read(&self) -> Throttles {
        Throttles {
            throttled: self.throttled.load(Ordering::Relaxed),
            throttles: self.throttles.load(Ordering::Relaxed),
        }
    }
}
