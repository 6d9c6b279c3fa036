//! Removing what is old, in slices so small that nobody waits for one.

use std::sync::Arc;
use std::time::Duration;

use store::Store;
use store::error::StoreError;
use tokio_util::sync::CancellationToken;

use super::Records;
use crate::clock::SECOND_US;
use crate::lifecycle::Chain;

/// Rows that are removed in one transaction.
const SLICE: u32 = 500;
/// Pause between slices: creates come first.
const PAUSE: Duration = Duration::from_millis(50);

impl Records {
    /// Removes logs and metrics whose time is over, every now and then, until `stop` is cancelled.
    pub(crate) async fn purge(self: Arc<Self>, store: Store, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.settings.purge_interval) => {}
            }
            match self.purge_once(&store, &stop).await {
                Ok(0) => {}
                Ok(rows) => tracing::debug!(rows, "removed old logs and metrics"),
                // Tried again the next time.
                Err(error) => tracing::warn!(error = %Chain(&error), "remove old logs and metrics"),
            }
        }
    }

    async fn purge_once(&self, store: &Store, stop: &CancellationToken) -> Result<u64, StoreError> {
        let mut rows = 0;
        while !stop.is_cancelled() {
            let before_us = |seconds: u32| self.clock.now_us() - i64::from(seconds) * SECOND_US;
            let logs = store.log_purge(before_us(self.settings.log_retention_s), SLICE).await?;
            let metrics = store
                .metric_purge(before_us(self.settings.metric_retention_s), SLICE)
                .await?;
            if logs + metrics == 0 {
                break;
            }
            rows += logs + metrics;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(rows)
    }
}
