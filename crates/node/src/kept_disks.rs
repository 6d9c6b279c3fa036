//! The disks that are kept of sandboxes without processes: which there are, and how one is removed.
//!
//! The driver has the record of them, which outlives the platform. This is the platform's own: who starts on a disk or removes
//! it holds it meanwhile, and only one of them can take it out.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;

use model::id::{DiskId, SandboxId};
use parking_lot::Mutex;
use runtime::storage::Storage;

/// The kept disks of sandboxes without processes.
#[derive(Debug, Default)]
pub(crate) struct KeptSandboxes(Mutex<HashMap<SandboxId, Arc<KeptSandbox>>>);

/// One of them.
#[derive(Debug)]
pub(crate) struct KeptSandbox {
    pub(crate) disk: DiskId,
    /// Held while it is started or removed.
    pub(crate) changing: tokio::sync::Mutex<()>,
}

impl KeptSandboxes {
    pub(crate) fn insert(&self, id: SandboxId, disk: DiskId) {
        let changing = tokio::sync::Mutex::default();
        self.0.lock().insert(id, Arc::new(KeptSandbox { disk, changing }));
    }

    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        self.0.lock().keys().cloned().collect()
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<KeptSandbox>> {
        self.0.lock().get(id).cloned()
    }

    /// Takes out that of a sandbox which goes on.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.0.lock().remove(id);
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
