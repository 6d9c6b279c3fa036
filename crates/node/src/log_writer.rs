//! Writes log entries of one sandbox into the journal.
//!
//! The journal is one bounded queue for all sandboxes, and writing never waits: an entry that finds it full is dropped
//! and counted, and the next entry of that sandbox that is accepted is preceded by one that reports how many were
//! dropped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use model::id::SandboxId;
use model::log::Level;
use protocol::node::{Logger, SandboxLog};

use crate::journal::Journal;

/// The host's clock, in microseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "entries carry the time of the host")]
pub(crate) fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// The log of one sandbox.
#[derive(Debug)]
pub(crate) struct LogWriter {
    id: SandboxId,
    journal: Arc<Journal>,
    /// Entries dropped since the last accepted one.
    dropped: AtomicU64,
}

impl LogWriter {
    pub(crate) fn new(id: SandboxId, journal: Arc<Journal>) -> Self {
        Self {
            id,
            journal,
            dropped: AtomicU64::new(0),
        }
    }

    /// The sandbox.
    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Writes an entry of the host's own.
    pub(crate) fn host<'a>(&self, level: Level, message: &str, fields: impl IntoIterator<Item = (&'a str, String)>) {
        let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), value));
        self.write(level, Logger::Sandbox, message.to_owned(), fields.collect());
    }

    /// Writes an entry with the current time. Never waits.
    pub(crate) fn write(&self, level: Level, logger: Logger, message: String, fields: BTreeMap<String, String>) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0
            && !self.send(
                Level::Warn,
                Logger::Sandbox,
                dropped_message(dropped),
                dropped_fields(dropped),
            )
        {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
            return;
        }
        if !self.send(level, logger, message, fields) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn send(&self, level: Level, logger: Logger, message: String, fields: BTreeMap<String, String>) -> bool {
        let entry = SandboxLog {
            id: self.id.clone(),
            at_us: now_us(),
            level,
            logger,
            message,
            fields,
        };
        self.journal.log(entry)
    }
}

/// Message of an entry that reports dropped entries.
pub(crate) fn dropped_message(count: u64) -> String {
    format!("{count} entries of this log were dropped: there were too many at once")
}

/// The note about dropped entries as structured fields.
pub(crate) fn dropped_fields(count: u64) -> BTreeMap<String, String> {
    let field = |key: &str, value: String| (key.to_owned(), value);
    [
        field("event_type", "entries_dropped".to_owned()),
        field("dropped", count.to_string()),
    ]
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::LogEntries;

    #[test]
    fn dropped_entries_are_counted() {
        let journal = Journal::bounded(2, 1);
        let mut entries = LogEntries::of(&journal);
        let log = LogWriter::new("iabc".parse().unwrap(), Arc::clone(&journal));
        let other = LogWriter::new("iother".parse().unwrap(), journal);
        for message in ["one", "two", "three", "four"] {
            log.host(Level::Info, message, [("event_type", "test".to_owned())]);
        }
        let mut messages = || entries.try_next().map(|entry| entry.message);
        assert_eq!(messages(), Some("one".to_owned()));
        assert_eq!(messages(), Some("two".to_owned()));
        assert_eq!(messages(), None);
        other.host(Level::Info, "other sandbox", []);
        // There is space for the report of dropped entries, but not for the entry itself.
        log.host(Level::Info, "five", []);
        assert_eq!(messages(), Some("other sandbox".to_owned()));
        assert_eq!(messages(), Some(dropped_message(2)));
        log.host(Level::Info, "six", []);
        let entry = entries.try_next().unwrap();
        assert_eq!(entry.fields["dropped"], "1");
        assert_eq!(entry.level, Level::Warn);
        assert_eq!(entries.try_next().unwrap().message, "six");
    }
}
