//! The disks of sandboxes that have no processes: written out after the end, and made ready for another start.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use model::id::{DiskId, SandboxId};

use super::opened::Storage;
use crate::checkpoint::sums;
use crate::wire::{Reply, Request, Work};
use crate::{disk, growth, kept};

/// How long a disk may take to be written out after its sandbox was paused. Most of it was written out before.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// How long a disk may take to become free before a sandbox is started on it. It was free when the sandbox was paused.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a kept disk may take to be made ready for a start, where that is needed at all.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// Pause between two looks at whether a disk is in use. The kernel has usually released it before the first.
const RELEASE_PAUSE: Duration = Duration::from_millis(5);

impl Storage {
    /// Creates the disk template of a size unless it exists. The lock is held meanwhile, so that it is created only
    /// once.
    pub(crate) fn prepare_disks(&self, disk_mb: u32) -> io::Result<()> {
        let mut sizes = self.disk_sizes.lock();
        if !sizes.contains(&disk_mb) {
            disk::make_template(&self.data_dir, disk_mb)?;
            sizes.insert(disk_mb);
        }
        Ok(())
    }

    /// Waits until the kept disk of a sandbox that has ended is written out, so that it survives a power cut, and notes
    /// that. Returns the space that it takes on the host, together with its checkpoint if there is one, in
    /// bytes. Blocks for as long as that takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// When the disk stays in use, or cannot be written out.
    pub fn save(&self, id: &SandboxId, disk: &DiskId, is_cancelled: &dyn Fn() -> bool) -> io::Result<u64> {
        self.wait_for_disk(disk, Instant::now() + SAVE_TIMEOUT, is_cancelled)?;
        let path = self.disk_path(disk);
        // The last that the kernel writes of a file system, when it is unmounted, is in the page cache.
        kept::sync(&path)?;
        kept::sync(&self.data_dir.join("disks"))?;
        self.kept.mark_saved(id, disk)?;
        let of_processes = sums::space(&self.kept.checkpoint(id, disk))?;
        Ok(fs::metadata(path)?.blocks().saturating_mul(512) + of_processes)
    }

    /// Waits until the disk of a sandbox that has ended is written out, and no longer mounted.
    pub(super) fn wait_for_disk(
        &self,
        disk: &DiskId,
        deadline: Instant,
        is_cancelled: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let path = self.disk_path(disk);
        while growth::is_attached(&path)? {
            if is_cancelled() || Instant::now() >= deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the disk of an ended sandbox is still in use",
                ));
            }
            std::thread::sleep(RELEASE_PAUSE);
        }
        Ok(())
    }

    /// Makes a kept disk ready for a start: nothing else uses it, it is free of errors, and it fits the version of `base`.
    pub(crate) fn prepare_kept(&self, id: &SandboxId, disk: &DiskId, base: Option<&str>) -> io::Result<()> {
        let during =
            |what: &'static str| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
        let deadline = Instant::now() + PREPARE_TIMEOUT;
        self.wait_for_disk(disk, Instant::now() + RELEASE_TIMEOUT, &|| false)?;
        let path = self.disk_path(disk);
        if !disk::is_clean(&path).map_err(during("read the disk"))? {
            tracing::warn!(sandbox.id = %id, "the disk of a sandbox was in use when the host stopped, and is repaired");
            disk::repair(&path, &|| Instant::now() >= deadline)?;
        }
        let is_moved = self.kept.is_moved(id, disk);
        let written = self.kept.base_of(id, disk);
        // Overlayfs has noted what lies below, which is another directory on another node.
        if is_moved || base.is_some_and(|base| written.as_deref() != Some(base)) {
            let order = Request::Rebase { disk: disk.clone() };
            match self
                .helpers()?
                .request_once(Work::Rebase, order.alone(), deadline, &|| false)?
            {
                Reply::Done => {}
                Reply::Failed(why) => return Err(io::Error::other(format!("fit the disk to `base`: {why}"))),
                _ => return Err(io::Error::other("unexpected reply")),
            }
            self.wait_for_disk(disk, Instant::now() + RELEASE_TIMEOUT, &|| false)?;
            if let Some(base) = base {
                self.kept
                    .set_base(id, disk, base)
                    .map_err(during("note the version of `base`"))?;
            }
            self.kept.mark_settled(id, disk)?;
        }
        // What is written from now on is not what was saved.
        self.kept.mark_used(id, disk)
    }
}
