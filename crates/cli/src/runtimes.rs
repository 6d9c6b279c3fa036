//! The async runtimes of commands, and the end of those commands that serve until a signal comes.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::runtime::{Builder, Runtime};

use crate::signals::Signals;

/// How long blocking work, such as making a sandbox that nobody waits for any more, may hold up the end.
pub(crate) const BLOCKING_BOUND: Duration = Duration::from_secs(5);
/// How long a drain may take. The server and the node bound theirs by less; service managers kill after 90 s.
const DRAIN_BOUND: Duration = Duration::from_secs(30);

/// The runtime of a command that serves: a thread per core.
///
/// # Errors
/// When the system has no resources for it.
pub(crate) fn serving() -> Result<Runtime> {
    let built = Builder::new_multi_thread().enable_all().build();
    built.context("start the async runtime")
}

/// The runtime of the connection of a node, which runs on the thread that waits for its end.
///
/// # Errors
/// When the system has no resources for it.
pub(crate) fn link() -> Result<Runtime> {
    let built = Builder::new_current_thread().enable_all().build();
    built.context("start the async runtime of the connection to the server")
}

/// The runtime of a command that uses the host once.
///
/// # Errors
/// When the system has no resources for it.
pub(crate) fn small() -> Result<Runtime> {
    let built = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    built.context("start the async runtime")
}

/// The runtime on which connections of sandboxes are relayed, so that they are in the way of nothing else.
///
/// # Errors
/// When the system has no resources for it.
pub(crate) fn egress() -> Result<Runtime> {
    let built = Builder::new_multi_thread().thread_name("egress").enable_all().build();
    built.context("start the async runtime of the egress gateway")
}

/// Waits until everything that was begun has ended, but not for long, and not once another signal comes. Returns `code` if it
/// has ended.
pub(crate) async fn drain(drained: impl Future<Output = ()>, signals: &mut Signals, code: ExitCode) -> ExitCode {
    tokio::select! {
        () = drained => {
            tracing::info!("drained");
            code
        }
        name = signals.next() => {
            tracing::warn!("{name} again: ending without waiting for requests");
            ExitCode::FAILURE
        }
        () = tokio::time::sleep(DRAIN_BOUND) => {
            tracing::error!("still not drained after {DRAIN_BOUND:?}: ending without waiting longer");
            ExitCode::FAILURE
        }
    }
}
