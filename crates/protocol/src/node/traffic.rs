//! Counts the bytes that cross the boundary of a sandbox.
//!
//! The host counts, where it moves the bytes itself: in the gateway, and in the streams that are opened into the sandbox.
//! Nothing that a sandbox says or holds is part of it. Counting is an addition to an atomic number, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Bytes between a sandbox and everything outside, without headers of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NetworkBytes {
    /// When the counter began, in microseconds since 1970. Each start of the processes of a sandbox and of the platform begins a
    /// new one.
    pub since_us: i64,
    /// Bytes that the sandbox received since then.
    pub received: u64,
    /// Bytes that the sandbox sent since then.
    pub sent: u64,
}

/// The counter of one sandbox.
#[derive(Debug)]
pub struct Traffic {
    since_us: i64,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Traffic {
    /// A counter that begins at this time, in microseconds since 1970.
    #[must_use]
    pub const fn new(since_us: i64) -> Self {
        Self {
            since_us,
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Counts bytes that the sandbox received.
    pub fn receive(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes that the sandbox sent.
    pub fn send(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// What was counted so far.
    #[must_use]
    pub fn read(&self) -> NetworkBytes {
        NetworkBytes {
            since_us: self.since_us,
            received: self.received.load(Ordering::Relaxed),
            sent: self.sent.load(Ordering::Relaxed),
        }
    }
}
