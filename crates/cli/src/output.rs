//! Output on stdout. Logs and errors go to stderr, so that stdout can be piped.
//!
//! Names of teams, keys and templates, and what a sandbox says, come from others. Whatever is written here as a line, a table, JSON
//! or an error cannot steer the operator's terminal, whoever named it.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use anyhow::Result;
use clap::ValueEnum;
use measure::table;
use serde::Serialize;

const MIB: u64 = 1 << 20;

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
    is_read(text).map(|_| ())
}

/// Writes text to stdout. False if its reader has gone away.
///
/// # Errors
/// When stdout cannot be written for another reason.
pub(crate) fn is_read(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A text from elsewhere as one line that does not steer the terminal.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_invisible(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// The lines of a text, none of which steers the terminal.
fn printable_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    lines.join("\n")
}

/// JSON in which what would steer the terminal is escaped. Such characters are in its strings alone, apart from line feeds.
fn printable_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    let mut units = [0; 2];
    for c in json.chars() {
        if c != '\n' && (c.is_control() || is_invisible(c)) {
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(safe, "\\u{unit:04x}");
            }
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Whether a character is not seen, but changes the order or the place of those that are.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// An amount of memory or disk.
pub(crate) fn mib(bytes: u64) -> String {
    let tenths = bytes.saturating_mul(10) / MIB;
    match tenths {
        0..100 => format!("{}.{} MiB", tenths / 10, tenths % 10),
        _ => format!("{} MiB", tenths / 10),
    }
}

/// Writes one line, or several with line feeds between them.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn line(line: &str) -> Result<()> {
    text(&format!("{}\n", printable_lines(line)))
}

/// Writes a value as indented JSON.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    text(&format!("{}\n", printable_json(&serde_json::to_string_pretty(value)?)))
}

/// Writes rows under a header, in columns as wide as their widest cell.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Result<()> {
    let cells = |row: Vec<String>| row.iter().map(|cell| printable(cell)).collect();
    text(&table::columns(header, rows.into_iter().map(cells)))
}

/// Writes items in the format that was asked for: as JSON, or as rows under a header.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn list<T: Serialize>(
    format: Format,
    items: Vec<T>,
    header: &[&str],
    row: impl Fn(T) -> Vec<String>,
) -> Result<()> {
    match format {
        Format::Json => json(&items),
        Format::Text => table(header, items.into_iter().map(row)),
    }
}

/// Prints an error to stderr.
pub(crate) fn error(error: &anyhow::Error) {
    // If stderr is closed, there is nowhere to report it.
    let _ = writeln!(
        io::stderr().lock(),
        "ringfence: {}",
        printable_lines(&format!("{error:#}"))
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_written_steers_the_terminal() {
        let hostile = "a\u{1b}[2J\u{9b}1m\u{202e}b\u{e0041}\t\u{7f}\"\\é";
        let lines = printable_lines(&format!("{hostile}\nsecond"));
        assert_eq!(lines, "a\\u{1b}[2J\\u{9b}1m\\u{202e}b\\u{e0041}\\t\\u{7f}\"\\é\nsecond");
        let value = serde_json::json!({"name": hostile, "more": [hostile]});
        let json = printable_json(&serde_json::to_string_pretty(&value).expect("JSON"));
        assert!(
            !json.chars().any(|c| c != '\n' && (c.is_control() || is_invisible(c))),
            "{json}"
        );
        let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(read, value, "the value is the same");
    }

    #[test]
    fn small_amounts_have_a_digit_more() {
        for (bytes, want) in [
            (0, "0.0 MiB"),
            (499_712, "0.4 MiB"),
            (10 * MIB - 1, "9.9 MiB"),
            (10 * MIB, "10 MiB"),
        ] {
            assert_eq!(mib(bytes), want);
        }
        assert_eq!(mib(u64::MAX), "1759218604441 MiB");
    }
}
