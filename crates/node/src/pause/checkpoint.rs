//! The strategy *checkpoint*: the processes of a sandbox are written to disk, beside its files, by CRIU.
//!
//! ```text
//!   note the disk ─▶ write out most of it ─▶ take space ─▶ bring to rest ─▶ write the processes, the rest of the disk ─▶ keep
//!   └─────── until here it is as it was ─────────────┘     └─── nothing of it runs, and a failure lets it go on ────┘
//! ```
//!
//! A sandbox that is frozen already is written in the same way, and stays frozen where the other goes on.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use model::log::Level;
use runtime::cancel::{Cancel, Raced};
use runtime::driver::{Sandbox, WriteError};
use tokio_util::sync::CancellationToken;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::blocking;

/// What a checkpoint has beside the memory of its processes, at most, in bytes: a few hundred KiB in most cases.
const MARGIN: u64 = 16 << 20;

/// Writes the checkpoint of a sandbox, running or frozen, and its disk, until `cancelled` or the end of the platform requests
/// `cancel`. When this returns, the sandbox is kept and ending. When it fails, the processes go on, unless they stood still
/// before.
pub(super) async fn write(
    shared: &Arc<Shared>,
    handle: &Arc<SandboxHandle>,
    cancelled: &CancellationToken,
    cancel: &Arc<Cancel>,
) -> Result<(), WriteError> {
    let written = blocking({
        let (shared, handle, cancel) = (Arc::clone(shared), Arc::clone(handle), Arc::clone(cancel));
        move || write_all(&shared, &handle, &cancel)
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
    written.unwrap_or_else(|error| Err(error.into()))
}

fn cancelled() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

/// Writes all that is kept of a sandbox: first what can be written while it runs.
fn write_all(shared: &Arc<Shared>, handle: &SandboxHandle, cancel: &Arc<Cancel>) -> Result<(), WriteError> {
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
        handle.condition().rest();
        handle.hold_egress();
    };
    let mut complete = || {
        sandbox.sync()?;
        // From here on it is saved, whatever happens.
        if shared.kept.keep(handle) {
            Ok(())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    };
    if cancel.is_requested() {
        return Err(cancelled().into());
    }
    sandbox.write_processes(&mut stopped, &mut complete, cancel)
}

/// Notes in the log of a sandbox why its processes stay in memory.
pub(super) fn note_kept_in_memory(handle: &SandboxHandle, error: WriteError) {
    let why = match error {
        WriteError::Refused(why) | WriteError::Passing(why) => {
            // Quoted, because names of files in it are chosen inside.
            tracing::info!(sandbox.id = %handle.id(), reason = ?why, "the processes of a sandbox are not written to disk");
            why
        }
        WriteError::Failed(error) => {
            tracing::error!(sandbox.id = %handle.id(), "cannot write the processes of a sandbox to disk, they stay in memory: {error}");
            error.to_string()
        }
    };
    let fields = [("event_type", "kept_in_memory".to_owned()), ("reason", why)];
    let message = "the processes could not be written to disk, and stay in memory while the sandbox is paused";
    handle.log().host(Level::Warn, message, fields);
}

/// Space for a checkpoint that is being written, so that several at once do not count on the same.
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
        let bytes = sandbox.usage()?.memory_used_bytes.saturating_add(MARGIN);
        let (space, free) = Self::take_bytes(shared, bytes)?;
        space.ok_or_else(|| {
            WriteError::Refused(format!(
                "its memory needs {} MiB on the host's disk, where {} MiB are free for checkpoints",
                bytes >> 20,
                free >> 20
            ))
        })
    }

    /// Takes what `count` copies of a sandbox may need: one checkpoint, and a disk each.
    ///
    /// # Errors
    /// With [`io::ErrorKind::StorageFull`] when the host has not that much beyond the space that it keeps free.
    pub(crate) fn of_fork(shared: &Arc<Shared>, sandbox: &dyn Sandbox, count: u64) -> Result<Self, WriteError> {
        let memory = sandbox.usage()?.memory_used_bytes.saturating_add(MARGIN);
        let disks = sandbox.disk()?.held_bytes.saturating_mul(count);
        let (space, _) = Self::take_bytes(shared, memory.saturating_add(disks))?;
        space.ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull).into())
    }

    /// The space, if there is as much, and how much there was.
    fn take_bytes(shared: &Arc<Shared>, bytes: u64) -> io::Result<(Option<Self>, u64)> {
        let taken = &shared.checkpoint_bytes;
        let all = taken.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let space = Self {
            shared: Arc::clone(shared),
            bytes,
        };
        let available = shared
            .driver
            .storage()
            .disk_available()?
            .saturating_sub(shared.keep_free_bytes());
        Ok((
            (all <= available).then_some(space),
            available.saturating_sub(all - bytes),
        ))
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.shared.checkpoint_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
