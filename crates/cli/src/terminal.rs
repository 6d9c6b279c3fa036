//! The terminal of this process in raw mode, and its return to what it was on every way out.
//!
//! Raw mode ends when its guard is dropped, which also happens when a panic unwinds and when a signal ends a command in
//! order. A panic on a thread restores it as well, before its message is printed. Only SIGKILL leaves a raw terminal
//! behind; `reset` mends it.

use std::io;
use std::sync::Once;

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use rustix::termios::{OptionalActions, Termios, Winsize};

/// The modes from before raw mode, while there is raw mode.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
static PANICS: Once = Once::new();

/// Raw mode, until this is dropped.
#[derive(Debug)]
pub(crate) struct Raw(());

impl Raw {
    /// Puts the terminal of stdin into raw mode.
    ///
    /// # Errors
    /// When stdin is not a terminal.
    pub(crate) fn enter() -> Result<Self> {
        let modes = rustix::termios::tcgetattr(io::stdin()).context("read the modes of the terminal")?;
        PANICS.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                before(info);
            }));
        });
        *BEFORE.lock() = Some(modes);
        let raw = Self(());
        raw.again()?;
        Ok(raw)
    }

    /// Puts it into raw mode again, after another program has changed its modes.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(crate) fn again(&self) -> Result<()> {
        let Some(mut modes) = BEFORE.lock().clone() else {
            return Ok(());
        };
        modes.make_raw();
        let set = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &modes);
        set.context("set the modes of the terminal")
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Ends raw mode, if there is any.
fn restore() {
    if let Some(modes) = BEFORE.lock().take() {
        // A terminal that is gone needs no modes.
        let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &modes);
    }
}

/// Whether a stream is a terminal.
pub(crate) fn is_terminal(stream: impl std::os::fd::AsFd) -> bool {
    rustix::termios::isatty(stream)
}

/// Columns and rows of the terminal of stdout; 80 by 24 if it does not say.
pub(crate) fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(Winsize { ws_col, ws_row, .. }) if ws_col > 0 && ws_row > 0 => (ws_col, ws_row),
        _ => (80, 24),
    }
}
