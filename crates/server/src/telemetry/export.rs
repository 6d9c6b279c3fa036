//! The task that exports spans, in batches, until the server has stopped.
//!
//! What the receiver does cannot delay anything else: requests only put spans in a bounded queue, every exchange takes a bounded
//! time, a batch that is not accepted is tried again a few times with pauses that grow, and after the stop there is one bounded
//! attempt to send what is left. What is lost is counted; that it is lost is logged when that begins and when it is over,
//! and not for each export.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::client::{ExportClient, ExportError};
use super::message::{ExportRequest, Resource, ResourceSpans, Scope, ScopeSpans};
use super::queue::Queue;
use super::record::Record;
use super::said::Said;
use super::settings::Signal;
use crate::metrics::Metrics;
use crate::outcome::SpanOutcome;

/// How long a span waits for others at most.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often a batch is sent before it is given up.
const ATTEMPTS: u32 = 5;
/// The pause after the first failure, and the longest one. Each is twice as long as the one before, less up to a half.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long exporting what is left may take once everything else has stopped.
pub(super) const FLUSH_BOUND: Duration = Duration::from_secs(2);

/// The exporter.
#[derive(Debug)]
pub(super) struct Exporter {
    queue: Arc<Queue>,
    client: Arc<ExportClient>,
    metrics: Arc<Metrics>,
    resource: Resource,
    /// Spans that were taken from the queue and are neither accepted nor given up: their number and their export.
    batch: Option<Batch>,
    /// Failures since the last success.
    failures: u32,
    log: ExportLog,
}

#[derive(Debug)]
struct Batch {
    count: usize,
    body: Bytes,
    attempts: u32,
}

/// The log about the exports.
#[derive(Debug, Default)]
struct ExportLog {
    said: Said,
    /// Spans that were given up, and that did not fit the queue, when the receiver last worked.
    lost: u64,
}

impl Exporter {
    /// An exporter whose spans are those of a program with these attributes.
    pub(super) fn new(queue: Arc<Queue>, client: Arc<ExportClient>, metrics: Arc<Metrics>, resource: Resource) -> Self {
        Self {
            queue,
            client,
            metrics,
            resource,
            batch: None,
            failures: 0,
            log: ExportLog::default(),
        }
    }

    /// Exports until `stop` is cancelled, and then what is left.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.serve() => {}
        }
        // An exchange that was cut off may have arrived: the receiver knows spans by their ids.
        let _ = tokio::time::timeout(FLUSH_BOUND, self.flush()).await;
        let left = self.batch.take().map_or(0, |batch| batch.count) + self.queue.clear();
        if left > 0 {
            self.metrics.spans(SpanOutcome::Failed, left);
            tracing::warn!(spans = left, "spans could not be exported before the end");
        }
    }

    async fn serve(&mut self) {
        loop {
            let _ = tokio::time::timeout(INTERVAL, self.queue.filled()).await;
            while self.fill() {
                let error = self.attempt().await.err();
                if self.batch.is_some() {
                    let asked = error.and_then(ExportError::retry_after);
                    tokio::time::sleep(pause(self.failures, asked)).await;
                } else if !self.queue.has_enough() {
                    break;
                }
            }
        }
    }

    /// Sends what is left, without another attempt.
    async fn flush(&mut self) {
        while self.fill() {
            if self.attempt().await.is_err() {
                return;
            }
        }
    }

    /// Whether there is a batch to send.
    fn fill(&mut self) -> bool {
        if self.batch.is_none() {
            let records = self.queue.take();
            if !records.is_empty() {
                self.batch = Some(Batch {
                    count: records.len(),
                    body: self.encode(records),
                    attempts: 0,
                });
            }
        }
        self.batch.is_some()
    }

    /// Sends the batch once. It stays if it can be sent again.
    async fn attempt(&mut self) -> Result<(), ExportError> {
        let Some(batch) = &mut self.batch else {
            return Ok(());
        };
        batch.attempts += 1;
        let (count, attempts) = (batch.count, batch.attempts);
        match self.client.send(Signal::Traces, batch.body.clone()).await {
            Ok(rejected) => {
                self.batch = None;
                self.failures = 0;
                let rejected = usize::try_from(rejected).unwrap_or(count).min(count);
                self.metrics.spans(SpanOutcome::Exported, count - rejected);
                self.metrics.spans(SpanOutcome::Failed, rejected);
                self.log.worked(rejected, self.lost());
                Ok(())
            }
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                if !error.is_temporary() || attempts >= ATTEMPTS {
                    self.batch = None;
                    self.metrics.spans(SpanOutcome::Failed, count);
                }
                self.log.failed(error);
                Err(error)
            }
        }
    }

    /// How many spans have been lost since the start.
    fn lost(&self) -> u64 {
        self.queue.dropped() + self.metrics.spans_so_far(SpanOutcome::Failed)
    }

    fn encode(&self, records: Vec<Record>) -> Bytes {
        let request = ExportRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(self.resource.clone()),
                scope_spans: vec![ScopeSpans {
                    scope: Some(scope()),
                    spans: records.into_iter().map(Record::into_message).collect(),
                }],
            }],
        };
        request.encode_to_vec().into()
    }
}

impl ExportLog {
    fn failed(&mut self, error: ExportError) {
        if self.said.begins_to_fail() {
            tracing::warn!(%error, "spans cannot be exported: they wait in memory, and the newest are dropped when there are many");
        }
    }

    /// `lost` is how many spans have been lost since the start.
    fn worked(&mut self, rejected: usize, lost: u64) {
        let new = lost.saturating_sub(self.lost);
        if self.said.works_again() {
            tracing::info!(spans_lost = new, "spans are exported again");
        } else if new > 0 && self.said.may_speak() {
            tracing::warn!(
                spans_lost = new,
                spans_rejected = rejected,
                "spans are lost: the receiver rejects some, or there are more than it takes"
            );
        } else if new > 0 {
            // Said with the next ones.
            return;
        }
        self.lost = lost;
    }
}

/// What spans and metrics come from.
pub(super) fn scope() -> Scope {
    Scope {
        name: "ringfence".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// How long to wait after so many failures, and at least as long as the receiver asks for.
fn pause(failures: u32, retry_after: Option<Duration>) -> Duration {
    let (first, longest) = PAUSES;
    let doubled = first.saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX));
    let full = doubled.min(longest);
    let mut random = [0; 2];
    // Without randomness the pause is the full one.
    let _ = getrandom::fill(&mut random);
    let less = full / 2 * u32::from(u16::from_le_bytes(random)) / u32::from(u16::MAX);
    let own = full - less;
    retry_after.map_or(own, |asked| asked.max(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_are_bounded() {
        for (failures, full) in [
            (1, 1),
            (2, 2),
            (3, 4),
            (5, 16),
            (6, 30),
            (32, 30),
            (33, 30),
            (u32::MAX, 30),
        ] {
            let (got, full) = (pause(failures, None), Duration::from_secs(full));
            assert!(got <= full && got >= full / 2, "{failures}: {got:?}");
        }
        assert_eq!(pause(1, Some(Duration::from_secs(120))), Duration::from_secs(120));
        assert!(pause(6, Some(Duration::ZERO)) >= Duration::from_secs(15));
    }
}
