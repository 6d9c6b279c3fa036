//! How far a copy is, as one line on a terminal.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::output;
use crate::output::mib;
use crate::terminal;

/// Time between two lines.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// The progress of a copy.
#[derive(Debug)]
pub(super) struct Progress {
    is_shown: bool,
    is_dirty: bool,
    files: u64,
    bytes: Counter,
    name: String,
    begun: Instant,
    last: Option<Instant>,
}

/// Bytes that are copied, which the body of a request counts as well.
#[derive(Debug, Clone, Default)]
pub(super) struct Counter(Arc<AtomicU64>);

impl Counter {
    pub(super) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Progress {
    /// Shows lines if stderr is a terminal.
    pub(super) fn new(is_quiet: bool) -> Self {
        Self {
            is_shown: !is_quiet && terminal::is_terminal(io::stderr()),
            is_dirty: false,
            files: 0,
            bytes: Counter::default(),
            name: String::new(),
            begun: Instant::now(),
            last: None,
        }
    }

    /// The counter of bytes.
    pub(super) fn counter(&self) -> Counter {
        self.bytes.clone()
    }

    /// A file begins.
    pub(super) fn begin(&mut self, name: &str) {
        if self.is_shown {
            self.name = output::printable(name);
        }
        self.show();
    }

    /// Bytes of it were copied.
    pub(super) fn add(&mut self, bytes: usize) {
        self.bytes.add(bytes);
        self.show();
    }

    /// The file is complete.
    pub(super) fn end(&mut self) {
        self.files += 1;
    }

    /// Shows a line, unless there was one a moment ago.
    pub(super) fn show(&mut self) {
        let is_due = self.last.is_none_or(|last| last.elapsed() >= PAUSE);
        if !self.is_shown || !is_due {
            return;
        }
        self.last = Some(Instant::now());
        let (columns, _) = terminal::size();
        let text = format!("{}  {}", self.sum(), self.name);
        let line: String = text.chars().take(usize::from(columns).saturating_sub(1)).collect();
        self.is_dirty = true;
        // A terminal that is gone needs no progress.
        let _ = write!(io::stderr().lock(), "\r\x1b[K{line}");
    }

    /// Removes the line.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.is_dirty) {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }

    /// Shows the result.
    pub(super) fn sum_up(&mut self) {
        self.clear();
        if self.is_shown {
            let _ = writeln!(io::stderr().lock(), "copied {}", self.sum());
        }
    }

    fn sum(&self) -> String {
        let bytes = self.bytes.get();
        let millis = u64::try_from(self.begun.elapsed().as_millis())
            .unwrap_or(u64::MAX)
            .max(1);
        let rate = bytes.saturating_mul(1000) / millis;
        format!("{} files, {} ({}/s)", self.files, mib(bytes), mib(rate))
    }
}
