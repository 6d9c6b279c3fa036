//! What the program says on stdout. Logs and errors go to stderr, so that stdout can be piped.

use std::io::{self, Write};

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

/// How a command shows what it found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Writes text as it is. A reader that has gone away (`| head`) is no error.
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
    text(&columns(header, rows))
}

/// Rows under a header, in columns as wide as their widest cell.
pub(crate) fn columns(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut lines: Vec<Vec<String>> = vec![header.iter().map(|&cell| cell.to_owned()).collect()];
    lines.extend(rows);
    let mut widths = vec![0; header.len()];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Tells what went wrong, on stderr.
pub(crate) fn error(error: &anyhow::Error) {
    // There is nobody left to tell when stderr is closed.
    let _ = writeln!(io::stderr().lock(), "ringfence: {error:#}");
}
