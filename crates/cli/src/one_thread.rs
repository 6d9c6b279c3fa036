//! The async runtime of commands that talk to a platform.

use anyhow::{Context as _, Result};
use tokio::runtime::{Builder, Runtime};

/// A runtime on the thread of the caller: on a small machine a command competes with the platform for cores.
///
/// # Errors
/// When the system gives no event queue.
pub(crate) fn runtime() -> Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the async runtime")
}
