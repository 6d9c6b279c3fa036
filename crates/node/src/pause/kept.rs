//! Kept sandboxes, which have a disk and no processes: which there are, and how a disk is removed.
//!
//! The driver has the record of them, which outlives the platform. This is the platform's own: who starts on a disk or removes
//! it holds it meanwhile, and only one of them can take it out.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use model::id::{DiskId, SandboxId};
use parking_lot::Mutex;
use runtime::storage::Storage;

use crate::handle::SandboxHandle;

/// The kept sandboxes of a node.
#[derive(Debug, Default)]
pub(crate) struct KeptSandboxes(Mutex<HashMap<SandboxId, Arc<KeptSandbox>>>);

/// A kept sandbox.
#[derive(Debug)]
pub(crate) struct KeptSandbox {
    pub(crate) disk: DiskId,
    /// Held while it is started or removed.
    pub(crate) changing: tokio::sync::Mutex<()>,
    /// How often its disk, or what is kept beside it, may have been changed. It is raised under the lock.
    pub(crate) changes: AtomicU64,
}

impl KeptSandbox {
    /// Notes, under the lock, that its disk or what is kept beside it is about to change.
    pub(super) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }
}

impl KeptSandboxes {
    pub(crate) fn insert(&self, id: SandboxId, disk: DiskId) {
        let kept = KeptSandbox {
            disk,
            changing: tokio::sync::Mutex::default(),
            changes: AtomicU64::default(),
        };
        self.0.lock().insert(id, Arc::new(kept));
    }

    /// Notes that a sandbox is kept from now on, whatever happens, and has its end begin, after which its disk remains.
    /// `false` if it is ending already: then its disk is removed.
    pub(super) fn keep(&self, handle: &SandboxHandle) -> bool {
        // First, so that it is a kept or a live one at any time.
        self.insert(handle.id().clone(), handle.disk().clone());
        let is_kept = handle.condition().begin_end(true);
        if !is_kept {
            self.0.lock().remove(handle.id());
        }
        is_kept
    }

    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        self.0.lock().keys().cloned().collect()
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<KeptSandbox>> {
        self.0.lock().get(id).cloned()
    }

    /// Takes out this one; `false` if another has.
    pub(crate) fn take(&self, id: &SandboxId, kept: &Arc<KeptSandbox>) -> bool {
        match self.0.lock().entry(id.clone()) {
            Entry::Occupied(entry) if Arc::ptr_eq(entry.get(), kept) => {
                entry.remove();
                true
            }
            _ => false,
        }
    }
}

/// Removes a disk, and the note that it is kept.
pub(crate) fn remove_disk(storage: &Storage, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
    storage.forget(id, disk)?;
    storage.remove_disk(disk)
}
