//! Sandboxes whose processes are kept on disk, in an image beside it.
//!
//! ```text
//!   pause:   note the disk ─▶ stop the processes ─▶ write the image, the disk ─▶ end the processes ─▶ mark as saved
//!            └───────────────── until here, a failure leaves it running ────────┘
//!   resume:  restore on the disk, the workload stopped ─▶ identity, network ─▶ remove the image ─▶ let it continue
//!            └───────────── a failure ends what was restored, and all is kept ────────────────────┘
//! ```
//!
//! A sandbox that is paused in memory already is written in the same way, and stays stopped where the other goes on.
//!
//! What cannot be written stays in memory (`pause`). An image belongs to the disk as it was when it was written, so it is
//! gone before anything in the sandbox can change that.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use model::lifecycle::Kept;
use model::log::Level;
use protocol::node::{NodeError, PausedSandbox};
use runtime::cancel::{Cancel, Raced};
use runtime::driver::{Sandbox, WriteError};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::{blocking, failed};
use crate::{kept, pause};

/// How long what an ended sandbox held on the host may take to be removed before the pause is over nevertheless.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(30);
/// What an image has beside the memory of its processes, at most, in bytes: a few hundred KiB in most cases.
const IMAGE_MARGIN: u64 = 16 << 20;
/// How often the processes are written before they stay in memory, where the reason may be gone the next time.
const ATTEMPTS: usize = 3;

/// Writes the processes of a sandbox, running or stopped, to disk, and ends them. Where that is not possible, they are
/// stopped in memory.
pub(crate) async fn pause(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    handle: Arc<SandboxHandle>,
    cancelled: CancellationToken,
) -> Result<PausedSandbox, NodeError> {
    attempt(shared, tasks, handle, cancelled, ATTEMPTS).await
}

async fn attempt(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    handle: Arc<SandboxHandle>,
    cancelled: CancellationToken,
    attempts: usize,
) -> Result<PausedSandbox, NodeError> {
    if !shared.driver.capabilities().images {
        return pause::pause(shared, handle, false).await;
    }
    let changing = handle.change().await;
    if handle.is_ending() {
        return Err(NodeError::NotFound(handle.id().clone()));
    }
    let (id, disk) = (handle.id().clone(), handle.disk().clone());
    let cancel = Arc::new(Cancel::new().map_err(failed)?);
    // Before, so that nothing more is asked of its agent.
    let was_frozen = handle.set_frozen(true);
    let policy = handle.egress();
    let mut cleaned = handle.cleaned();
    let written = blocking({
        let (shared, handle, cancel) = (Arc::clone(&shared), Arc::clone(&handle), Arc::clone(&cancel));
        move || write(&shared, &handle, &cancel)
    });
    tokio::pin!(written);
    let written = tokio::select! {
        written = &mut written => written,
        () = shared.stop.cancelled() => {
            cancel.request();
            written.await
        }
        () = cancelled.cancelled() => {
            cancel.request();
            written.await
        }
    };
    let written = written.unwrap_or_else(|error| Err(error.into()));
    if let Err(error) = written {
        if handle.is_ending() {
            return Err(NodeError::NotFound(id));
        }
        match was_frozen {
            true => drop(changing),
            false => {
                let was_at_rest = handle.set_at_rest(false);
                if let Some(policy) = policy.filter(|_| was_at_rest) {
                    handle.set_egress(policy);
                }
                handle.set_frozen(false);
                match was_at_rest {
                    true => drop(tasks.spawn(pause::respawn(Arc::clone(&handle), changing))),
                    false => drop(changing),
                }
            }
        }
        if cancel.is_requested() && (was_frozen || !shared.stop.is_cancelled()) {
            return Err(NodeError::Cancelled);
        }
        if let WriteError::Passing(why) = &error
            && attempts > 1
        {
            tracing::debug!(sandbox.id = %id, "write the processes of a sandbox again: {why}");
            return Box::pin(attempt(shared, tasks, handle, cancelled, attempts - 1)).await;
        }
        let why = match error {
            WriteError::Refused(why) | WriteError::Passing(why) => {
                // Quoted, because names of files in it are chosen inside.
                tracing::info!(sandbox.id = %id, reason = ?why, "the processes of a sandbox are not written to disk");
                why
            }
            WriteError::Failed(error) => {
                tracing::error!(sandbox.id = %id, "write the processes of a sandbox to disk: {error}");
                error.to_string()
            }
        };
        let fields = [("event_type", "kept_in_memory".to_owned()), ("reason", why)];
        let message = "the processes could not be written to disk, and stay in memory while the sandbox is paused";
        handle.log().host(Level::Warn, message, fields);
        return pause::pause(shared, handle, false).await;
    }
    drop(changing);
    drop(handle);
    if tokio::time::timeout(CLEAN_TIMEOUT, cleaned.wait_for(|cleaned| *cleaned))
        .await
        .is_err()
    {
        tracing::error!(sandbox.id = %id, "something of a paused sandbox is still on the host");
    }
    let disk_bytes = kept::save(&shared, id, disk).await;
    Ok(PausedSandbox {
        kept: Kept::Image,
        memory_bytes: 0,
        disk_bytes,
    })
}

fn cancelled() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

fn write(shared: &Arc<Shared>, handle: &SandboxHandle, cancel: &Arc<Cancel>) -> Result<(), WriteError> {
    let (id, disk) = (handle.id(), handle.disk());
    let sandbox = handle.sandbox();
    let synced = cancel.race({
        let (shared, sandbox) = (Arc::clone(shared), Arc::clone(sandbox));
        let (id, disk) = (id.clone(), disk.clone());
        move || {
            shared.driver.storage().keep(&id, &disk)?;
            // Most of what it has to write, while it still runs.
            sandbox.sync()
        }
    });
    match synced? {
        Raced::Done(synced) => synced?,
        Raced::Cancelled(_) => return Err(cancelled().into()),
    }
    let _space = Space::take(shared, &**sandbox)?;
    let mut stopped = || {
        handle.set_at_rest(true);
        handle.hold_egress(pause::closed());
    };
    let mut complete = || {
        sandbox.sync()?;
        // From here on it is saved, whatever happens. First, so that it is one of the two at any time.
        shared.kept.insert(id.clone(), disk.clone());
        if handle.begin_end_and_keep_disk() {
            return Ok(());
        }
        shared.kept.forget(id);
        Err(io::Error::from(io::ErrorKind::NotFound))
    };
    if cancel.is_requested() {
        return Err(cancelled().into());
    }
    sandbox.write_processes(&mut stopped, &mut complete, cancel)
}

/// Space for an image that is being written, so that several at once do not count on the same.
pub(crate) struct Space {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Space {
    /// Takes what the memory of a sandbox may need.
    ///
    /// # Errors
    /// Refused when the host has not that much beyond the space that it keeps free.
    fn take(shared: &Arc<Shared>, sandbox: &dyn Sandbox) -> Result<Self, WriteError> {
        let bytes = sandbox.usage()?.memory_used_bytes.saturating_add(IMAGE_MARGIN);
        let (space, free) = Self::take_bytes(shared, bytes)?;
        space.ok_or_else(|| {
            WriteError::Refused(format!(
                "its memory needs {} MiB on the host's disk, where {} MiB are free for images",
                bytes >> 20,
                free >> 20
            ))
        })
    }

    /// Takes what `count` copies of a sandbox may need: one image of its memory, and a disk each.
    ///
    /// # Errors
    /// With [`io::ErrorKind::StorageFull`] when the host has not that much beyond the space that it keeps free.
    pub(crate) fn of_fork(shared: &Arc<Shared>, sandbox: &dyn Sandbox, count: u64) -> Result<Self, WriteError> {
        let memory = sandbox.usage()?.memory_used_bytes.saturating_add(IMAGE_MARGIN);
        let disks = sandbox.disk()?.held_bytes.saturating_mul(count);
        let (space, _) = Self::take_bytes(shared, memory.saturating_add(disks))?;
        space.ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull).into())
    }

    /// The space, if there is as much, and how much there was.
    fn take_bytes(shared: &Arc<Shared>, bytes: u64) -> io::Result<(Option<Self>, u64)> {
        let taken = &shared.image_bytes;
        let all = taken.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let space = Self {
            shared: Arc::clone(shared),
            bytes,
        };
        let kept_free = shared.disk_floor_bytes.saturating_add(shared.disk.owed());
        let available = shared.driver.storage().disk_available()?.saturating_sub(kept_free);
        Ok((
            (all <= available).then_some(space),
            available.saturating_sub(all - bytes),
        ))
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.shared.image_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
