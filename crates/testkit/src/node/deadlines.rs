//! Deadlines of the fake node: it notes them, and a test says what it has done about them.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{ExpiredSandbox, NodeDeadline};

use super::behaviour::Behaviour;

/// The deadlines of a fake node.
#[derive(Debug)]
pub struct FakeDeadlines {
    /// Whether the node says that it keeps deadlines; a node of a version before does not.
    pub are_kept: AtomicBool,
    /// Behaviour of a change.
    pub set: Mutex<Behaviour>,
    /// The last change of each sandbox.
    pub told: Mutex<HashMap<SandboxId, NodeDeadline>>,
    /// What the node has ended and paused by itself, until the server has it forget that.
    pub expired: Mutex<Vec<ExpiredSandbox>>,
}

impl Default for FakeDeadlines {
    fn default() -> Self {
        Self {
            are_kept: AtomicBool::new(false),
            set: Mutex::new(Behaviour::Works),
            told: Mutex::default(),
            expired: Mutex::default(),
        }
    }
}
