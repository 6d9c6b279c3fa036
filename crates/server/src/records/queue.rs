//! The queue of records that wait to be written.
//!
//! Adding an item never waits. The queue is bounded in number and bytes, in case the database is too slow or
//! unavailable; items that do not fit are dropped and counted, and the affected log gets an entry about it once there
//! is space.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use model::id::{SandboxId, TeamId};
use model::log::Level;
use parking_lot::Mutex;
use store::records::{LogRow, MetricChunk, NewEvent, NewLogEntry, NewTeamUsage, RecordBatch};
use tokio::sync::{Notify, watch};

use crate::clock::Clock;

/// Maximum number of items.
pub(super) const ITEMS_MAX: usize = 16_384;
/// Maximum number of entries and events of one sandbox, so that a busy sandbox does not displace the entries of others.
const ITEMS_PER_SANDBOX: usize = ITEMS_MAX / 4;
/// Approximate maximum size, in bytes.
const BYTES_MAX: u64 = 16 << 20;

/// A record to be written.
#[derive(Debug)]
pub(super) enum Item {
    Entry(NewLogEntry),
    Chunk(MetricChunk),
    Event(NewEvent),
    Usage(NewTeamUsage),
    /// The end of a sandbox, in microseconds since the Unix epoch.
    End(TeamId, SandboxId, i64),
}

impl Item {
    fn bytes(&self) -> u64 {
        match self {
            Self::Entry(entry) => entry.row.bytes(),
            Self::Chunk(chunk) => u64::try_from(chunk.samples.len()).unwrap_or(u64::MAX),
            Self::Event(event) => event.bytes(),
            Self::End(..) | Self::Usage(_) => 0,
        }
    }
}

impl Item {
    /// The sandbox whose share of the queue the item takes.
    fn counted_for(&self) -> Option<&SandboxId> {
        match self {
            Self::Entry(entry) => Some(&entry.sandbox_id),
            Self::Event(event) => Some(&event.sandbox_id),
            Self::Chunk(_) | Self::Usage(_) | Self::End(..) => None,
        }
    }
}

/// A bounded queue of records.
#[derive(Debug)]
pub(super) struct WriteQueue {
    waiting: Mutex<Waiting>,
    seq: AtomicI64,
    /// Notified when there is something to write.
    pub(super) not_empty: Notify,
    /// Notified when a reader waits for the items to be written.
    pub(super) flush_requested: Notify,
    /// How many of the items that were added have been written or given up.
    done: watch::Sender<u64>,
    /// How long a reader waits for the items to be written.
    settle: Duration,
}

#[derive(Debug, Default)]
struct Waiting {
    items: VecDeque<Item>,
    bytes: u64,
    /// Number of items added since the start.
    put: u64,
    /// Number of entries and events dropped since the start.
    lost: u64,
    /// Number of waiting entries and events of each sandbox.
    entries_of: HashMap<SandboxId, usize>,
    /// Number of dropped entries by log, until the log gets an entry about it.
    dropped: HashMap<(TeamId, SandboxId), u64>,
}

impl Waiting {
    /// Whether as many items of a sandbox wait as may.
    fn is_busy(&self, sandbox: &SandboxId) -> bool {
        self.entries_of
            .get(sandbox)
            .is_some_and(|own| *own >= ITEMS_PER_SANDBOX)
    }
}

impl WriteQueue {
    /// A queue whose readers wait for pending items to be written for this long, before they read what is stored.
    pub(super) fn new(settle: Duration) -> Self {
        Self {
            settle,
            waiting: Mutex::default(),
            // Unique across restarts too, whatever clock the times of the entries come from.
            seq: AtomicI64::new(Clock::system().now_us()),
            not_empty: Notify::new(),
            flush_requested: Notify::new(),
            done: watch::Sender::new(0),
        }
    }

    /// The next sequence number of an entry.
    pub(super) fn next_seq(&self) -> i64 {
        self.seq.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds an item, or drops and counts it when the queue is full. The end of a sandbox is always added, or its log
    /// would never expire; there are no more of these items than sandboxes.
    pub(super) fn put(&self, item: Item) {
        let mut waiting = self.waiting.lock();
        let full = waiting.items.len() >= ITEMS_MAX || waiting.bytes >= BYTES_MAX;
        match item {
            Item::Entry(entry) if full || waiting.is_busy(&entry.sandbox_id) => {
                waiting.lost += 1;
                *waiting.dropped.entry((entry.team_id, entry.sandbox_id)).or_default() += 1;
                return;
            }
            Item::Chunk(chunk) if full => {
                drop(waiting);
                tracing::warn!(sandbox.id = %chunk.sandbox_id, "dropped metrics: the database is too slow");
                return;
            }
            Item::Usage(usage) if full => {
                drop(waiting);
                tracing::warn!(team.id = %usage.team_id, "dropped the usage of a team: the database is too slow");
                return;
            }
            Item::Event(event) if full || waiting.is_busy(&event.sandbox_id) => {
                waiting.lost += 1;
                drop(waiting);
                let kind = event.kind.as_str();
                tracing::warn!(sandbox.id = %event.sandbox_id, kind, "dropped a lifecycle event: there are too many");
                return;
            }
            item => {
                if let Some(sandbox) = item.counted_for() {
                    *waiting.entries_of.entry(sandbox.clone()).or_default() += 1;
                }
                waiting.bytes += item.bytes();
                waiting.items.push_back(item);
                waiting.put += 1;
            }
        }
        drop(waiting);
        self.not_empty.notify_one();
    }

    /// Number of entries dropped since the start.
    pub(super) fn lost(&self) -> u64 {
        self.waiting.lock().lost
    }

    /// Removes the oldest items, at most `limit`, and returns them with their number.
    pub(super) fn take(&self, limit: usize, now_us: i64) -> (RecordBatch, u64) {
        let mut waiting = self.waiting.lock();
        let count = waiting.items.len().min(limit);
        let mut batch = RecordBatch::default();
        for item in waiting.items.drain(..count).collect::<Vec<_>>() {
            waiting.bytes -= item.bytes();
            if let Some(sandbox) = item.counted_for()
                && let Some(own) = waiting.entries_of.get_mut(sandbox)
            {
                *own -= 1;
                if *own == 0 {
                    waiting.entries_of.remove(sandbox);
                }
            }
            match item {
                Item::Entry(entry) => batch.entries.push(entry),
                Item::Event(event) => batch.events.push(event),
                Item::Usage(usage) => batch.usage.push(usage),
                Item::Chunk(chunk) => batch.chunks.push(chunk),
                Item::End(team, id, at_us) => batch.ended.push((team, id, at_us)),
            }
        }
        if waiting.items.len() < ITEMS_MAX / 2 && waiting.bytes < BYTES_MAX / 2 && !waiting.dropped.is_empty() {
            let dropped = std::mem::take(&mut waiting.dropped);
            drop(waiting);
            for ((team_id, sandbox_id), lost) in dropped {
                tracing::warn!(sandbox.id = %sandbox_id, lost, "dropped entries of a log: the database is too slow");
                let row = self.gap(lost, now_us);
                batch.entries.push(NewLogEntry {
                    team_id,
                    sandbox_id,
                    row,
                });
            }
        }
        (batch, u64::try_from(count).unwrap_or(u64::MAX))
    }

    /// The log entry that reports dropped entries.
    fn gap(&self, lost: u64, at_us: i64) -> LogRow {
        LogRow {
            at_us,
            seq: self.next_seq(),
            level: Level::Warn,
            logger: super::lifecycle_event::LOGGER.to_owned(),
            message: format!("{lost} entries of this log were dropped: there were too many at once"),
            fields: [
                ("event_type".to_owned(), "entries_dropped".to_owned()),
                ("dropped".to_owned(), lost.to_string()),
            ]
            .into(),
        }
    }

    /// Counts items that were written or given up.
    pub(super) fn mark_done(&self, count: u64) {
        self.done.send_modify(|done| *done += count);
    }

    /// Waits until everything that was added before is written, within a time limit.
    pub(super) async fn flush(&self) {
        let put = self.waiting.lock().put;
        let mut done = self.done.subscribe();
        if *done.borrow_and_update() >= put {
            return;
        }
        self.flush_requested.notify_one();
        // The read that follows reports an unavailable database.
        let _ = tokio::time::timeout(self.settle, done.wait_for(|done| *done >= put)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn entry(queue: &WriteQueue, id: &str, message: String) -> Item {
        Item::Entry(NewLogEntry {
            team_id: "00000000-0000-4000-8000-000000000001".parse().expect("an id"),
            sandbox_id: id.parse().expect("an id"),
            row: LogRow {
                at_us: 1,
                seq: queue.next_seq(),
                level: Level::Info,
                logger: "test".to_owned(),
                message,
                fields: BTreeMap::new(),
            },
        })
    }

    fn end() -> Item {
        let team = "00000000-0000-4000-8000-000000000001".parse().expect("an id");
        Item::End(team, "iloud".parse().expect("an id"), 5)
    }

    #[test]
    fn dropped_entries_are_counted_and_reported() {
        let queue = WriteQueue::new(Duration::from_secs(1));
        for n in 0..ITEMS_MAX - 1 {
            queue.put(entry(&queue, &format!("i{}", n % 8), n.to_string()));
        }
        queue.put(entry(&queue, "iloud", "one".to_owned()));
        for _ in 0..3 {
            queue.put(entry(&queue, "iloud", "more".to_owned()));
        }
        queue.put(entry(&queue, "iquiet", "one".to_owned()));
        queue.put(end());
        let (batch, count) = queue.take(100, 9);
        assert_eq!((batch.entries.len(), count), (100, 100));
        let (batch, count) = queue.take(ITEMS_MAX * 2, 9);
        // The rest, the end that always fits, and one entry for each log with dropped entries.
        assert_eq!(count, u64::try_from(ITEMS_MAX - 100 + 1).expect("small"));
        assert_eq!(batch.ended.len(), 1);
        let notes: BTreeMap<&str, &str> = batch.entries[ITEMS_MAX - 100..]
            .iter()
            .map(|entry| (entry.sandbox_id.as_str(), entry.row.fields["dropped"].as_str()))
            .collect();
        assert_eq!(notes, BTreeMap::from([("iloud", "3"), ("iquiet", "1")]));
        assert!(
            batch.entries[ITEMS_MAX - 100..]
                .iter()
                .all(|entry| entry.row.at_us == 9)
        );
        // There is space again.
        queue.put(entry(&queue, "iloud", "again".to_owned()));
        let (batch, _) = queue.take(10, 9);
        assert_eq!(batch.entries.len(), 1);
    }

    #[test]
    fn a_busy_log_does_not_displace_others() {
        let queue = WriteQueue::new(Duration::from_secs(1));
        for n in 0..ITEMS_PER_SANDBOX + 2 {
            queue.put(entry(&queue, "iloud", n.to_string()));
        }
        queue.put(entry(&queue, "iquiet", "one".to_owned()));
        let (batch, count) = queue.take(1, 9);
        // One taken, and the entry about the dropped ones, because the queue as a whole has space.
        assert_eq!((batch.entries.len(), count), (2, 1));
        assert_eq!(batch.entries[1].row.fields["dropped"], "2");
        // One was taken, so one fits.
        queue.put(entry(&queue, "iloud", "fits".to_owned()));
        queue.put(entry(&queue, "iloud", "does not".to_owned()));
        let (batch, count) = queue.take(ITEMS_MAX, 9);
        assert_eq!(count, u64::try_from(ITEMS_PER_SANDBOX + 1).expect("small"));
        let quiet = batch
            .entries
            .iter()
            .filter(|entry| entry.sandbox_id.as_str() == "iquiet");
        assert_eq!(quiet.count(), 1);
        assert_eq!(batch.entries[ITEMS_PER_SANDBOX + 1].row.fields["dropped"], "1");
    }

    #[test]
    fn bytes_are_bounded() {
        let queue = WriteQueue::new(Duration::from_secs(1));
        for _ in 0..20 {
            queue.put(entry(&queue, "iloud", "x".repeat(1 << 20)));
        }
        let (batch, _) = queue.take(100, 9);
        assert_eq!(batch.entries.len(), 17);
        assert_eq!(batch.entries[16].row.fields["dropped"], "4");
        assert_eq!(queue.lost(), 4);
    }

    #[tokio::test]
    async fn flush_waits_for_earlier_items() {
        let queue = std::sync::Arc::new(WriteQueue::new(Duration::from_secs(1)));
        queue.flush().await;
        queue.put(end());
        queue.put(end());
        let flushing = {
            let queue = std::sync::Arc::clone(&queue);
            tokio::spawn(async move { queue.flush().await })
        };
        queue.flush_requested.notified().await;
        queue.put(end());
        queue.mark_done(1);
        tokio::task::yield_now().await;
        assert!(!flushing.is_finished());
        queue.mark_done(1);
        flushing.await.expect("no panic");
    }
}
