//! What goes on with the memory of snapshots of one node, apart from what is done with it.

use std::collections::HashMap;

use model::id::BuildId;
use parking_lot::Mutex;
use tokio::sync::{RwLock, watch};

/// What goes on with the memories of a node.
#[derive(Debug, Default)]
pub(crate) struct NodeMemories {
    /// Whether they are being copied, and have to be looked at again afterwards.
    pub(crate) copying: Mutex<Option<bool>>,
    /// The memories that are on their way to the node: whether that has ended.
    pub(crate) arriving: Mutex<HashMap<BuildId, watch::Receiver<bool>>>,
    /// Shared by those that bring memories to the node. Whoever removes one that can come back has it alone, so that nobody finds it
    /// there a moment before.
    pub(crate) changing: RwLock<()>,
}

/// The memories that a node is known to have.
#[derive(Debug, Default)]
pub(crate) struct HeldMemories {
    /// When a sandbox was started from each last, as far as it was in this session, in microseconds since the Unix epoch; 0 otherwise.
    used_us: HashMap<BuildId, i64>,
}

impl HeldMemories {
    /// Makes the memories of a node of what it has said.
    pub(super) fn of(builds: impl Iterator<Item = BuildId>) -> Self {
        Self {
            used_us: builds.map(|build| (build, 0)).collect(),
        }
    }

    /// Whether it has this memory.
    pub(crate) fn has(&self, build: &BuildId) -> bool {
        self.used_us.contains_key(build)
    }

    /// As [`Self::has`], for a sandbox that is started from it now. For some time after that nobody removes it to save space.
    pub(crate) fn begin_use(&mut self, build: &BuildId, now_us: i64) -> bool {
        let used_us = self.used_us.get_mut(build);
        used_us.map(|used_us| *used_us = now_us).is_some()
    }

    /// Notes that it has a memory, which is used now.
    pub(crate) fn insert(&mut self, build: BuildId, now_us: i64) {
        self.used_us.insert(build, now_us);
    }

    /// Notes that it has no such memory any more.
    pub(crate) fn remove(&mut self, build: &BuildId) {
        self.used_us.remove(build);
    }

    /// When this memory was used last, in microseconds since the Unix epoch; 0 if that was before this session.
    pub(crate) fn used_us(&self, build: &BuildId) -> i64 {
        self.used_us.get(build).copied().unwrap_or(0)
    }
}
