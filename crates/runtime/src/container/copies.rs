//! Copies of the disks of sandboxes that run: what a snapshot is made of.
//!
//! The copy must be the file system as it was at one moment, and a running file system is that at no time. So every
//! process of the sandbox is stopped by the freezer, which leaves none of them in the middle of a system call; then the file
//! system is written out, and nothing can change the disk while it is read. The file system itself is not frozen: if the
//! platform were killed meanwhile, nobody would thaw it, and its processes could not even be killed. Stopped processes are
//! found by the next start, which lets them continue.

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::running::Running;
use super::state::ContainerDriver;
use crate::cgroup::Freezer;
use crate::disk;
use crate::driver::Sandbox as _;
use crate::process::has_ended;
use crate::stored::{CopyRequest, LayerError};

/// How long processes may take to be stopped. One that waits for the disk is stopped when that has answered.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Lets the processes of a sandbox continue when it is dropped.
struct Stopped<'a> {
    freezer: Freezer,
    sandbox: &'a Running,
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.freezer.thaw() {
            // Its group is gone, so it has ended.
            tracing::warn!(sandbox.id = %self.sandbox.name.id, "cannot let a sandbox continue whose disk was copied, most likely it has ended: {error}");
        }
    }
}

impl ContainerDriver {
    /// Copies the disk of a sandbox, and records the file system of the copy, which keeps the layers below it.
    pub(super) fn copy_disk(
        &self,
        sandbox: &Running,
        request: &CopyRequest,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Duration, LayerError> {
        if !self.capabilities.freeze {
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let rootfs = self.storage.layers.rootfs_of(&sandbox.name.disk)?;
        self.storage.layers.use_for(&request.to, &rootfs)?;
        let copied = self.copy_at_rest(sandbox, request, is_cancelled);
        if copied.is_err()
            && let Err(error) = self.storage.remove_disk(&request.to)
        {
            tracing::warn!("cannot remove an incomplete copy of a disk, the next start of the platform does: {error}");
        }
        copied
    }

    fn copy_at_rest(
        &self,
        sandbox: &Running,
        request: &CopyRequest,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Duration, LayerError> {
        let (from, to) = (
            self.storage.disk_path(&sandbox.name.disk),
            self.storage.disk_path(&request.to),
        );
        // Most of what has to be written, while it still runs.
        sandbox.sync()?;
        let has_space = |bytes: u64| {
            let free = self.storage.disk_available()?;
            if free >= request.keep_free_bytes.saturating_add(bytes) {
                Ok(())
            } else {
                Err(LayerError::Full(
                    "the host's disk has no space for a copy of the sandbox's disk".to_owned(),
                ))
            }
        };
        has_space(disk::held_bytes(&from)?)?;

        let freezer = self.tree.freezer(&sandbox.name)?;
        let begun = Instant::now();
        let stopped = Stopped { freezer, sandbox };
        loop {
            stopped.freezer.freeze()?;
            if stopped.freezer.is_at_rest()? {
                break;
            }
            if begun.elapsed() >= STOP_TIMEOUT || is_cancelled() {
                let why = "a process of the sandbox could not be stopped: the kernel blocks it";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why).into());
            }
        }
        sandbox.write_out()?;
        disk::copy(&from, &to, &mut || {
            if is_cancelled() {
                Err(io::Error::from(io::ErrorKind::Interrupted).into())
            } else {
                has_space(0)
            }
        })?;
        // The end of a process, even of one that is stopped, changes the file system.
        if has_ended(sandbox.agent.as_fd())? {
            return Err(io::Error::from(io::ErrorKind::NotFound).into());
        }
        drop(stopped);
        Ok(begun.elapsed())
    }
}
