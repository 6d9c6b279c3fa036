//! Spans that wait for their export: a bounded number of them, in memory only.
//!
//! Nobody ever waits to put one in. When the queue is full, new ones are dropped and counted, because those in it are about
//! the time before, which is where a fault begins. Spans of clients without credentials may fill half of it, so that
//! they cannot crowd out those of teams.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::record::Record;
use crate::metrics::Metrics;
use crate::outcome::SpanOutcome;

/// Maximum number of spans that wait. One takes less than 1 KiB.
pub(super) const QUEUED_MAX: usize = 8192;
/// Maximum number of spans of one export.
pub(super) const BATCH_MAX: usize = 512;

/// The queue.
#[derive(Debug)]
pub(super) struct Queue {
    spans: Mutex<VecDeque<Record>>,
    /// Notified when there is enough for an export.
    filled: Notify,
    metrics: Arc<Metrics>,
}

impl Queue {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            spans: Mutex::default(),
            filled: Notify::new(),
            metrics,
        }
    }

    /// Adds the spans of one trace, all or none. `is_known` is whether the client had credentials.
    pub(super) fn push(&self, spans: Vec<Record>, is_known: bool) {
        let count = spans.len();
        let max = if is_known { QUEUED_MAX } else { QUEUED_MAX / 2 };
        let has_enough = {
            let mut queued = self.spans.lock();
            if queued.len() + count > max {
                None
            } else {
                queued.extend(spans);
                Some(queued.len() >= BATCH_MAX)
            }
        };
        match has_enough {
            None => self.metrics.spans(SpanOutcome::QueueFull, count),
            Some(true) => self.filled.notify_one(),
            Some(false) => {}
        }
    }

    /// Resolves when there is enough for an export.
    pub(super) async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Whether there is enough for an export.
    pub(super) fn has_enough(&self) -> bool {
        self.spans.lock().len() >= BATCH_MAX
    }

    /// Takes the oldest spans for an export.
    pub(super) fn take(&self) -> Vec<Record> {
        let mut queued = self.spans.lock();
        let count = queued.len().min(BATCH_MAX);
        queued.drain(..count).collect()
    }

    /// Takes all that is left, and says how much it was.
    pub(super) fn clear(&self) -> usize {
        std::mem::take(&mut *self.spans.lock()).len()
    }

    /// How many spans have been dropped because the queue was full.
    pub(super) fn dropped(&self) -> u64 {
        self.metrics.spans_so_far(SpanOutcome::QueueFull)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::context::{SpanId, TraceId};
    use super::super::record::Kind;
    use super::*;
    use crate::settings::CapacitySettings;

    fn spans(count: usize) -> Vec<Record> {
        let span = Record {
            trace: TraceId([1; 16]),
            span: SpanId([1; 8]),
            parent: None,
            is_remote: false,
            name: "GET".into(),
            kind: Kind::Server,
            start: Duration::ZERO,
            took: Duration::ZERO,
            attributes: Vec::new(),
            has_failed: false,
        };
        vec![span; count]
    }

    fn queue() -> Queue {
        Queue::new(Arc::new(Metrics::new(&CapacitySettings::default())))
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        let queue = queue();
        queue.push(spans(QUEUED_MAX - 1), true);
        queue.push(spans(2), true);
        assert_eq!(queue.dropped(), 2, "a trace is kept as a whole or not at all");
        queue.push(spans(1), true);
        queue.push(spans(1), true);
        assert_eq!(queue.dropped(), 3);
        assert_eq!(queue.take().len(), BATCH_MAX);
        queue.push(spans(BATCH_MAX), true);
        assert_eq!((queue.dropped(), queue.clear()), (3, QUEUED_MAX));
        assert!(queue.take().is_empty());
    }

    #[test]
    fn clients_without_credentials_leave_half_of_it() {
        let queue = queue();
        for _ in 0..QUEUED_MAX {
            queue.push(spans(1), false);
        }
        assert_eq!(queue.dropped(), (QUEUED_MAX / 2) as u64);
        queue.push(spans(QUEUED_MAX / 2), true);
        assert_eq!(queue.clear(), QUEUED_MAX);
    }

    #[tokio::test]
    async fn an_export_begins_when_there_is_enough() {
        let queue = queue();
        queue.push(spans(BATCH_MAX - 1), true);
        let filled = tokio::time::timeout(Duration::ZERO, queue.filled()).await;
        assert!(filled.is_err());
        queue.push(spans(1), true);
        queue.filled().await;
    }
}
