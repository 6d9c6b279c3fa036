//! Deadlines that a node keeps beside the server's own: what it does with a sandbox that is overdue while no server is there, and
//! how it says so afterwards.

use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::Kept;
use serde::{Deserialize, Serialize};

/// The deadline of a running sandbox, as its node is told it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDeadline {
    /// Time that is left, from when the sandbox runs, or from when this arrives if it does already. The clocks of the two
    /// hosts may differ, so no time of day is told.
    pub left: Duration,
    /// What the node does when no server does anything in time.
    pub then: Overdue,
}

/// What is done with a sandbox that is overdue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overdue {
    /// The sandbox is ended.
    End,
    /// The sandbox is paused, and this is kept of it. Where the host cannot keep that, its disk is kept.
    Pause(Kept),
}

/// A sandbox that a node has ended or paused by itself, because it was overdue and no server was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpiredSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// How long ago that was.
    pub ago: Duration,
    /// What has become of it.
    pub outcome: Expired,
}

/// What a node has made of a sandbox that was overdue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expired {
    /// Nothing of the sandbox is left.
    Ended,
    /// The sandbox is paused.
    Paused {
        /// What is kept of it.
        kept: Kept,
        /// Space that it takes on the disk of the host, in bytes; 0 where that is not known.
        disk_bytes: u64,
    },
}
