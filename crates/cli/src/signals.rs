//! Termination signals. The first requests an orderly exit, the second an immediate one.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    has_arrived: bool,
}

impl Signals {
    /// Installs handlers for both signals.
    ///
    /// # Errors
    /// When a system call fails.
    pub(crate) fn listen() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("listen for SIGINT")?,
            has_arrived: false,
        })
    }

    /// Whether [`Self::next`] has returned.
    pub(crate) fn has_arrived(&self) -> bool {
        self.has_arrived
    }

    /// The name of the next signal.
    pub(crate) async fn next(&mut self) -> &'static str {
        let name = tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        };
        self.has_arrived = true;
        name
    }
}
