//! Termination signals. The first requests an orderly exit, the second an immediate one.

use std::process::ExitCode;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal as TokioSignal, SignalKind, signal};

/// The exit code of a program that was ended by a signal, without the number of the signal.
pub(crate) const BY_SIGNAL: u8 = 128;

/// SIGTERM and SIGINT.
pub(crate) struct Signals {
    terminate: TokioSignal,
    interrupt: TokioSignal,
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

/// A signal that ends programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    Hangup,
    Interrupt,
    Quit,
    Terminate,
    Kill,
}

impl Signal {
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Hangup => 1,
            Self::Interrupt => 2,
            Self::Quit => 3,
            Self::Terminate => 15,
            Self::Kill => 9,
        }
    }

    /// The exit code of a program that was ended by it.
    pub(crate) fn exit_code(self) -> ExitCode {
        ExitCode::from(BY_SIGNAL + self.number())
    }
}

/// All signals that end programs in the usual course of events.
pub(crate) struct AllSignals {
    hangup: TokioSignal,
    interrupt: TokioSignal,
    quit: TokioSignal,
    terminate: TokioSignal,
}

impl AllSignals {
    /// Installs the handlers.
    pub(crate) fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("listen for signals");
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            interrupt: listen(SignalKind::interrupt())?,
            quit: listen(SignalKind::quit())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    /// The next signal.
    pub(crate) async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::Hangup,
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.quit.recv() => Signal::Quit,
            _ = self.terminate.recv() => Signal::Terminate,
        }
    }
}
