//! What a node does about sandboxes that take too much of its host: of its disk, or by creating many processes.

use serde::{Deserialize, Serialize};

/// State and counters of the disk guard, which keeps sandboxes from filling the host's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DiskStops {
    /// Sandboxes that are currently stopped from writing new data.
    pub stopped: u32,
    /// How often a sandbox was stopped from writing since the node started.
    pub stops: u64,
    /// How many sandboxes were ended because they kept taking space, since the node started.
    pub ends: u64,
}

/// State and counters of the watch over sandboxes that create many processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Throttles {
    /// Sandboxes whose processor time is currently limited, because they create many processes.
    pub throttled: u32,
    /// How often the processor time of a sandbox was limited since the node started.
    pub throttles: u64,
}
