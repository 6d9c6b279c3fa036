//! Output on stdout. Logs and errors go to stderr, so that stdout can be piped.

use std::io::{self, Write};

use anyhow::Result;
use clap::ValueEnum;
use measure::table;
use serde::Serialize;

/// Output format of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Text for people.
    Text,
    /// JSON for programs.
    Json,
}

/// Writes text to stdout. A reader that has gone away (`| head`) is no error.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn text(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A text from elsewhere as one line that does not steer the terminal.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Writes one line.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn line(line: &str) -> Result<()> {
    text(&format!("{line}\n"))
}

/// Writes a value as indented JSON.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Writes rows under a header, in columns as wide as their widest cell.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Result<()> {
    text(&table::columns(header, rows))
}

/// Prints an error to stderr.
pub(crate) fn error(error: &anyhow::Error) {
    // If stderr is closed, there is nowhere to report it.
    let _ = writeln!(io::stderr().lock(), "ringfence: {error:#}");
}
