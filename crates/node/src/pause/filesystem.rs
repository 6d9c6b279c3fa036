//! The strategy *filesystem*: the disk of a sandbox is written out while its processes are stopped.
//!
//! The driver has the record of kept disks, so they survive the platform and the host. A crash before the processes are
//! ended leaves a running sandbox, and after that one whose disk is complete.

use std::io;
use std::sync::Arc;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::blocking;

/// Stops the processes of a sandbox and writes out its disk. When this fails, they go on, unless they stood still before.
pub(super) async fn write(shared: &Arc<Shared>, handle: &Arc<SandboxHandle>, was_frozen: bool) -> io::Result<()> {
    let written = blocking({
        let (shared, handle) = (Arc::clone(shared), Arc::clone(handle));
        move || {
            let driver = &shared.driver;
            driver.storage().keep(handle.id(), handle.disk())?;
            // One of an earlier pause does not belong to what is on the disk now.
            driver.storage().forget_checkpoint(handle.id(), handle.disk())?;
            // Most of what it has to write, while it still runs.
            handle.sandbox().sync()?;
            if driver.capabilities().freeze && !was_frozen {
                handle.sandbox().freeze()?;
            }
            handle.sandbox().sync()
        }
    });
    let written = written.await.and_then(|written| written);
    if written.is_err() && !was_frozen && shared.driver.capabilities().freeze {
        // It may have been stopped in part.
        let _ = handle.sandbox().thaw();
    }
    written
}
