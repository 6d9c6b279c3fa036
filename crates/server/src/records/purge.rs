//! Removal of old records, in batches small enough not to delay other writes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use store::error::StoreError;
use tokio_util::sync::CancellationToken;

use super::Records;
use crate::chain::Chain;
use crate::clock::SECOND_US;

/// Maximum number of rows removed in one transaction.
const SLICE: u32 = 500;
/// How much of their limit logs and metrics are reduced to once they exceed it, in percent.
const KEEP_PERCENT: u64 = 90;
/// Approximate maximum size of five minutes of samples of one sandbox in the database, in bytes.
const CHUNK_BYTES: u64 = 1536;
/// How many attempts to send events are kept of one webhook.
const ATTEMPTS_KEPT: u32 = 1000;
/// The share of a team of all events, as a divisor.
const TEAM_SHARE: u64 = 4;
/// Pause between batches: create requests take precedence.
const PAUSE: Duration = Duration::from_millis(50);

impl Records {
    /// Removes expired logs and metrics periodically, until `stop` is cancelled.
    pub(crate) async fn purge(self: Arc<Self>, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.settings.purge_interval) => {}
                () = self.over_budget.notified() => {}
            }
            match self.purge_once(&stop).await {
                Ok(0) => {}
                Ok(rows) => tracing::debug!(rows, "removed old logs and metrics"),
                // Retried the next time.
                Err(error) => tracing::warn!(error = %Chain(&error), "cannot remove old logs and metrics"),
            }
            if let Err(error) = self.enforce_event_bounds(&stop).await {
                tracing::warn!(error = %Chain(&error), "cannot reduce lifecycle events to their limits");
            }
            if let Err(error) = self.enforce_bounds(&stop).await {
                tracing::warn!(error = %Chain(&error), "cannot reduce logs and metrics to their limits");
            }
        }
    }

    /// Reduces all logs together, and all metrics together, to their limits.
    async fn enforce_bounds(&self, stop: &CancellationToken) -> Result<(), StoreError> {
        let keep = |bound: u64| bound.saturating_mul(KEEP_PERCENT) / 100;
        let bound = self.settings.log_total_bytes;
        let mut total = self.store.log_total().await?;
        if total > bound {
            tracing::info!(
                total,
                bound,
                "total size of logs exceeds the limit: removing the oldest"
            );
            while total > keep(bound) && !stop.is_cancelled() {
                if let Some(bytes) = self.store.log_evict(SLICE).await? {
                    total = total.saturating_sub(bytes);
                } else {
                    // Only running sandboxes have logs: the largest log is cut.
                    let Some(largest) = self.store.log_largest().await?.filter(|log| log.bytes > 0) else {
                        break;
                    };
                    let (team, id) = (&largest.team_id, &largest.sandbox_id);
                    self.store.log_trim(team, id, u64::MAX, largest.bytes / 2).await?;
                    total = self.store.log_total().await?;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        self.log_budget.store(bound.saturating_sub(total), Ordering::Relaxed);

        let bound = self.settings.metric_total_bytes / CHUNK_BYTES;
        let mut chunks = self.store.metric_count().await?;
        if chunks > bound {
            tracing::info!(
                chunks,
                bound,
                "total size of metrics exceeds the limit: removing the oldest"
            );
            while chunks > keep(bound) && !stop.is_cancelled() {
                let over = u32::try_from(chunks - keep(bound)).unwrap_or(u32::MAX);
                let gone = self.store.metric_purge(i64::MAX, over.min(SLICE)).await?;
                if gone == 0 {
                    break;
                }
                chunks = chunks.saturating_sub(gone);
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// Removes events, attempts to send them and the usage of teams up to a time, and returns how many.
    async fn purge_events(&self, to_us: i64) -> Result<u64, StoreError> {
        let events = self.store.event_purge(to_us, SLICE).await?;
        let attempts = self.store.attempt_purge(to_us, ATTEMPTS_KEPT, SLICE).await?;
        let usage = self.store.team_usage_purge(to_us, SLICE).await?;
        Ok(events + attempts + usage)
    }

    /// Reduces the events of each team to its share, and all of them together to their limit: the team with the most of them
    /// loses its oldest first, so that nobody displaces the events of others.
    async fn enforce_event_bounds(&self, stop: &CancellationToken) -> Result<(), StoreError> {
        let bound = self.settings.event_total_bytes;
        let (mut of_all, mut of_team) = (bound, bound / TEAM_SHARE);
        while !stop.is_cancelled() {
            let sizes = self.store.event_sizes().await?;
            let total: u64 = sizes.iter().map(|size| size.bytes).sum();
            let Some(largest) = sizes.first() else { break };
            if total <= of_all && largest.bytes <= of_team {
                break;
            }
            if of_all == bound {
                tracing::info!(team.id = %largest.team_id, bytes = largest.bytes, total, "too many events: removing the oldest");
                of_all = bound.saturating_mul(KEEP_PERCENT) / 100;
                of_team = of_all / TEAM_SHARE;
            }
            if self.store.event_evict(&largest.team_id, SLICE).await? == 0 {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Counts what was added to the logs, and triggers a purge when it exceeds the budget.
    pub(super) fn count_growth(&self, bytes: u64) {
        let subtract = |room: u64| Some(room.saturating_sub(bytes));
        let before = self
            .log_budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
        if before.is_ok_and(|room| room > 0 && room <= bytes) {
            self.over_budget.notify_one();
        }
    }

    async fn purge_once(&self, stop: &CancellationToken) -> Result<u64, StoreError> {
        let mut rows = 0;
        while !stop.is_cancelled() {
            let before_us = |seconds: u32| self.clock.now_us() - i64::from(seconds) * SECOND_US;
            let logs = self
                .store
                .log_purge(before_us(self.settings.log_retention_s), SLICE)
                .await?;
            let metrics = self
                .store
                .metric_purge(before_us(self.settings.metric_retention_s), SLICE)
                .await?;
            let events = self.purge_events(before_us(self.settings.event_retention_s)).await?;
            if logs + metrics + events == 0 {
                break;
            }
            rows += logs + metrics + events;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(rows)
    }
}
