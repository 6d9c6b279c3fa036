//! Which version of `base` lies below the disk of a sandbox that runs, and the change to another one.

use std::collections::BTreeSet;
use std::io;

use model::id::DiskId;

use super::opened::{Below, Storage};

impl Storage {
    /// Notes that a sandbox was started above a version of `base`, as [`crate::base::Versions::current`] named it before;
    /// it may have changed since.
    pub(crate) fn note_base(&self, disk: &DiskId, version: String, name: &str) {
        let below = if self.base.current().as_ref() == Some(&version) {
            Below::Version(version)
        } else {
            Below::UserNamed(name.to_owned())
        };
        self.bases.lock().insert(disk.clone(), below);
    }

    /// Notes under which name `base` knows a sandbox that an earlier platform has started.
    pub(crate) fn note_user_of_base(&self, disk: &DiskId, name: &str) {
        let mut bases = self.bases.lock();
        let below = bases.entry(disk.clone());
        below.or_insert_with(|| Below::UserNamed(name.to_owned()));
    }

    /// Forgets the name of a sandbox of which nothing but the disk is left.
    pub(crate) fn forget_user_of_base(&self, disk: &DiskId) {
        let mut bases = self.bases.lock();
        if let Some(Below::UserNamed(_)) = bases.get(disk) {
            bases.remove(disk);
        }
    }

    /// The version of `base` below the disk of a sandbox that runs; none if it has none, or that is not known.
    pub(crate) fn base_below(&self, disk: &DiskId) -> io::Result<Option<String>> {
        let known = self.bases.lock().get(disk).cloned();
        match known {
            Some(Below::Version(version)) => Ok(Some(version)),
            Some(Below::UserNamed(name)) if self.layers.rootfs_of(disk)?.has_base() => self.base.of(&name),
            _ => Ok(None),
        }
    }

    /// Creates a new version of `base` when the host's packages have changed, and removes versions that no sandbox uses,
    /// and layers that were removed while sandboxes used them. `names` are those of all sandboxes, running or not yet
    /// cleaned up.
    ///
    /// # Errors
    /// When the data directory cannot be read or written, and when `base` cannot be made.
    pub(crate) fn refresh_base(&self, names: impl FnOnce() -> io::Result<BTreeSet<String>>) -> io::Result<()> {
        let update = || {
            // Before the lock, so that no start waits for a copy of `/usr`.
            let made = self.base.make()?;
            let _changing = self.base_changes.write();
            self.base.make_current(&made)
        };
        if !self.base.host_is_changing() && update()? {
            tracing::info!("the host's packages changed: new sandboxes use a new version of `base`");
        }
        self.base.sweep(names)
    }
}
