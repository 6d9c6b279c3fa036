//! Entries for sandboxes' logs, on their way from the tasks that see something to the server that keeps them.
//!
//! One bounded queue takes the entries of all sandboxes, and nobody ever waits to write: an entry that finds no room
//! there is dropped and counted, and the next entry of that sandbox that gets through is preceded by one that
//! says how many were lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use model::id::SandboxId;
use model::log::Level;
use protocol::node::{Logger, SandboxLog};

use crate::reports::Reports;

/// The host's clock, in microseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "entries tell when the host saw something")]
pub(crate) fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Where the entries of one sandbox are written.
#[derive(Debug)]
pub(crate) struct Journal {
    id: SandboxId,
    reports: Arc<Reports>,
    /// Entries that found no room since one got through.
    lost: AtomicU64,
}

impl Journal {
    pub(crate) fn new(id: SandboxId, reports: Arc<Reports>) -> Self {
        Self {
            id,
            reports,
            lost: AtomicU64::new(0),
        }
    }

    /// Writes what the host itself has seen.
    pub(crate) fn host<const N: usize>(&self, level: Level, message: &str, fields: [(&str, String); N]) {
        let fields = fields.map(|(key, value)| (key.to_owned(), value));
        self.write(level, Logger::Sandbox, message.to_owned(), fields.into());
    }

    /// Writes an entry with the present time. Never waits.
    pub(crate) fn write(&self, level: Level, logger: Logger, message: String, fields: BTreeMap<String, String>) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 && !self.send(Level::Warn, Logger::Sandbox, dropped(lost), dropped_fields(lost)) {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
            return;
        }
        if !self.send(level, logger, message, fields) {
            self.lost.fetch_add(1, Ordering::Relaxed);
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
        self.reports.log(entry)
    }
}

/// What an entry about entries that are not there says.
pub(crate) fn dropped(count: u64) -> String {
    format!("{count} entries of this log were dropped: there were too many at once")
}

/// The same for programs.
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
    use crate::reports::Entries;

    #[test]
    fn what_is_lost_is_counted() {
        let reports = Reports::bounded(2, 1);
        let mut entries = Entries::of(&reports);
        let journal = Journal::new("iabc".parse().unwrap(), Arc::clone(&reports));
        let other = Journal::new("iother".parse().unwrap(), reports);
        for message in ["one", "two", "three", "four"] {
            journal.host(Level::Info, message, [("event_type", "test".to_owned())]);
        }
        let mut messages = || entries.try_next().map(|entry| entry.message);
        assert_eq!(messages(), Some("one".to_owned()));
        assert_eq!(messages(), Some("two".to_owned()));
        assert_eq!(messages(), None);
        other.host(Level::Info, "has lost nothing", []);
        // There is room for the note, and then none for the entry.
        journal.host(Level::Info, "five", []);
        assert_eq!(messages(), Some("has lost nothing".to_owned()));
        assert_eq!(messages(), Some(dropped(2)));
        journal.host(Level::Info, "six", []);
        let entry = entries.try_next().unwrap();
        assert_eq!(entry.fields["dropped"], "1");
        assert_eq!(entry.level, Level::Warn);
        assert_eq!(entries.try_next().unwrap().message, "six");
    }
}
