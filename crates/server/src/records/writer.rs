//! Writing what waits.
//!
//! Nothing is written at once: entries come in groups (a command starts, prints and ends), and one transaction for all
//! of them costs little more than one for each. A transaction is kept small, because creates wait behind it.

use std::sync::Arc;
use std::time::Duration;

use store::Store;
use store::error::StoreError;
use store::records::{LogSize, RecordBatch};
use tokio_util::sync::CancellationToken;

use super::Records;
use crate::chain::Chain;

/// How long the first item waits for others.
const GATHER: Duration = Duration::from_millis(200);
/// Most items in one transaction. Measured with SQLite, 256 entries hold the writer for about 3 ms.
const BATCH: usize = 256;
/// Pause before a database that is away is asked again.
const RETRY: Duration = Duration::from_secs(1);
/// What is left of a log that had to be cut, in hundredths of its bound: cutting is dear, so it is not done for each
/// entry.
const KEEP_PERCENT: u64 = 90;

impl Records {
    /// Writes what is put into the queue, until `stop` is cancelled; then what is left, once.
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
        for chunk in self.cut_tails() {
            self.queue.put(super::Item::Chunk(chunk));
        }
        self.write_waiting(&stop).await;
    }

    async fn write_waiting(&self, stop: &CancellationToken) {
        loop {
            let (batch, count) = self.queue.take(BATCH, self.clock.now_us());
            if count == 0 && batch.entries.is_empty() {
                return;
            }
            let sizes = write_batch(&self.store, &batch, stop).await;
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
            // The log is still too long when the next entries come, and then it is tried again.
            tracing::warn!(sandbox.id = %size.sandbox_id, error = %Chain(&error), "cut the log of a sandbox");
        }
    }
}

/// Writes a batch, and as long as the database is away waits for it. Whatever else it says, it would say again.
async fn write_batch(store: &Store, batch: &RecordBatch, stop: &CancellationToken) -> Vec<LogSize> {
    let mut warned = false;
    loop {
        match store.records_write(batch).await {
            Ok(sizes) => return sizes,
            Err(error @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) if !stop.is_cancelled() => {
                if !warned {
                    tracing::warn!(error = %Chain(&error), "logs and metrics wait for the database");
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
                    error = %Chain(&error),
                    "logs and metrics are lost"
                );
                return Vec::new();
            }
        }
    }
}
