//! Entries for sandboxes' logs, on their way from the tasks that see something to the server that keeps them.
//!
//! One bounded channel takes the entries of all sandboxes, and nobody ever waits to write: an entry that finds the
//! channel full is dropped and counted, and the next entry of that sandbox that gets through is preceded by one that
//! says how many were lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use model::id::SandboxId;
use model::log::Level;
use protocol::node::SandboxLog;
use tokio::sync::mpsc;

/// Entries that may wait for the server. With entries of the largest size this is about 16 MiB.
pub(crate) const WAITING: usize = 4096;

/// The host's clock, in microseconds since 1970.
pub(crate) fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Where the entries of one sandbox are written.
#[derive(Debug)]
pub(crate) struct Journal {
    id: SandboxId,
    sender: mpsc::Sender<SandboxLog>,
    /// Entries that found the channel full since one got through.
    lost: AtomicU64,
}

impl Journal {
    pub(crate) fn new(id: SandboxId, sender: mpsc::Sender<SandboxLog>) -> Self {
        Self {
            id,
            sender,
            lost: AtomicU64::new(0),
        }
    }

    /// Writes what the host itself has seen.
    pub(crate) fn host<const N: usize>(&self, level: Level, message: &str, fields: [(&str, String); N]) {
        let fields = fields.map(|(key, value)| (key.to_owned(), value));
        self.write(level, "sandbox", message.to_owned(), fields.into());
    }

    /// Writes an entry with the present time. Never waits.
    pub(crate) fn write(&self, level: Level, logger: &'static str, message: String, fields: BTreeMap<String, String>) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 && !self.send(Level::Warn, "sandbox", dropped(lost), dropped_fields(lost)) {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
            return;
        }
        if !self.send(level, logger, message, fields) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn send(&self, level: Level, logger: &'static str, message: String, fields: BTreeMap<String, String>) -> bool {
        let entry = SandboxLog {
            id: self.id.clone(),
            at_us: now_us(),
            level,
            logger,
            message,
            fields,
        };
        self.sender.try_send(entry).is_ok()
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

    #[test]
    fn what_is_lost_is_counted() {
        let (sender, mut receiver) = mpsc::channel(2);
        let journal = Journal::new("iabc".parse().unwrap(), sender.clone());
        let other = Journal::new("iother".parse().unwrap(), sender);
        for message in ["one", "two", "three", "four"] {
            journal.host(Level::Info, message, [("event_type", "test".to_owned())]);
        }
        let mut messages = || receiver.try_recv().map(|entry| entry.message);
        assert_eq!(messages(), Ok("one".to_owned()));
        assert_eq!(messages(), Ok("two".to_owned()));
        assert!(messages().is_err());
        other.host(Level::Info, "has lost nothing", []);
        // There is room for the note, and then none for the entry.
        journal.host(Level::Info, "five", []);
        assert_eq!(messages(), Ok("has lost nothing".to_owned()));
        assert_eq!(messages(), Ok(dropped(2)));
        journal.host(Level::Info, "six", []);
        let entry = receiver.try_recv().unwrap();
        assert_eq!(entry.fields["dropped"], "1");
        assert_eq!(entry.level, Level::Warn);
        assert_eq!(receiver.try_recv().unwrap().message, "six");
    }
}
