//! The writer of the queue.
//!
//! Writes are delayed a little: entries come in groups (a command starts, prints and ends), and one transaction for all
//! of them costs little more than a transaction for one. Transactions are kept small, because create requests wait for
//! them.

use std::sync::Arc;
use std::time::Duration;

use store::Store;
use store::error::StoreError;
use store::records::{LogSize, RecordBatch};
use tokio_util::sync::CancellationToken;

use super::Records;
use crate::chain::Chain;

/// How long the first item waits for further ones.
const GATHER: Duration = Duration::from_millis(200);
/// Maximum number of items in one transaction. With SQLite, 256 entries block other writes for about 3 ms (measured).
const BATCH: usize = 256;
/// Pause before a retry when the database is unavailable.
const RETRY: Duration = Duration::from_secs(1);
/// How much of its limit a log is cut to, in percent: cutting is expensive, so it is not done for each entry.
const KEEP_PERCENT: u64 = 90;

impl Records {
    /// Writes the items of the queue until `stop` is cancelled, and then what is left, once.
    pub(crate) async fn write(self: Arc<Self>, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = self.queue.not_empty.notified() => {}
                () = stop.cancelled() => break,
            }
            tokio::select! {
                () = tokio::time::sleep(GATHER) => {}
                () = self.queue.flush_requested.notified() => {}
                () = stop.cancelled() => break,
            }
            self.write_waiting(&stop).await;
        }
        self.write_usage(true);
        for chunk in self.cut_tails() {
            self.queue.put(super::Item::Chunk(chunk));
        }
        self.write_waiting(&stop).await;
    }

    async fn write_waiting(&self, stop: &CancellationToken) {
        loop {
            let (mut batch, count) = self.queue.take(BATCH, self.clock.now_us());
            batch.delivery_limits = self.settings.delivery_limits;
            if count == 0 && batch.entries.is_empty() {
                return;
            }
            let sizes = write_batch(&self.store, &batch, stop).await;
            if !batch.events.is_empty() {
                self.events_written.notify_one();
            }
            self.queue.mark_done(count);
            self.count_growth(batch.entries.iter().map(|entry| entry.row.bytes()).sum());
            for size in sizes {
                self.cut_log(&size).await;
            }
        }
    }

    async fn cut_log(&self, size: &LogSize) {
        let (entries, bytes) = (u64::from(self.settings.log_entries), self.settings.log_bytes);
        if size.entries <= entries && size.bytes <= bytes {
            return;
        }
        let keep = |bound: u64| (bound.saturating_mul(KEEP_PERCENT) / 100).max(1);
        let cut = self
            .store
            .log_trim(&size.team_id, &size.sandbox_id, keep(entries), keep(bytes));
        if let Err(error) = cut.await {
            // Retried with the next entries of the log.
            tracing::warn!(sandbox.id = %size.sandbox_id, error = %Chain(&error), "cannot cut the log of a sandbox");
        }
    }
}

/// Writes a batch, and retries while the database is unavailable. Other errors would occur again, so the batch is
/// dropped.
async fn write_batch(store: &Store, batch: &RecordBatch, stop: &CancellationToken) -> Vec<LogSize> {
    let mut warned = false;
    loop {
        match store.records_write(batch).await {
            Ok(sizes) => return sizes,
            Err(error @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) if !stop.is_cancelled() => {
                if !warned {
                    tracing::warn!(error = %Chain(&error), "database unavailable: logs, metrics and events are delayed");
                    warned = true;
                }
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => {}
                    () = stop.cancelled() => {}
                }
            }
            Err(error) => {
                tracing::error!(
                    entries = batch.entries.len(),
                    chunks = batch.chunks.len(),
                    events = batch.events.len(),
                    error = %Chain(&error),
                    "cannot write logs, metrics and events: the batch is dropped"
                );
                return Vec::new();
            }
        }
    }
}
