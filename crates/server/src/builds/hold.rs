//! Keeping what builds and snapshots have stored on the node while a backup copies it.
//!
//! A backup copies the database first, and then what its rows refer to. Nothing of that changes once it is stored, so it
//! is enough that nothing is removed: collections of layers, memory, files and objects are skipped meanwhile.

use std::sync::Arc;

use tokio::sync::{OwnedRwLockWriteGuard, RwLockReadGuard};

use super::Builds;

/// A guard that keeps everything stored from being removed, until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    builds: Arc<Builds>,
    guard: Option<OwnedRwLockWriteGuard<()>>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In this order: what was not removed meanwhile is removed by a collection, which must not find this held.
        drop(self.guard.take());
        self.builds.memories_changed.notify_one();
    }
}

impl Builds {
    /// Waits for collections in progress, and has none begin until the result is dropped.
    pub(crate) async fn hold(self: &Arc<Self>) -> Hold {
        Hold {
            builds: Arc::clone(self),
            guard: Some(Arc::clone(&self.backup).write_owned().await),
        }
    }

    /// The permission to remove what is stored; none while a backup is being made.
    pub(super) fn may_remove(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.backup.try_read().ok()
    }
}
