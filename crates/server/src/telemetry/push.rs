//! The task that sends what `/metrics` shows to the receiver of traces, at an interval, until the server has stopped.
//!
//! Values count since the start, so an export that fails loses nothing: the next one says all that it would have said, and
//! nothing is sent again before it is due. At most one export is under way, each takes a bounded time, and nothing waits for
//! one but the end of the server, for a bounded time. The log says when exports begin to fail and when they work again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::client::{ExportClient, ExportError};
use super::export::{FLUSH_BOUND, scope};
use super::exposition::Converter;
use super::message::{MetricsRequest, Resource, ResourceMetrics, ScopeMetrics};
use super::said::Said;
use super::settings::Signal;
use crate::clock::Clock;

/// Time between two exports.
const INTERVAL: Duration = Duration::from_secs(15);
/// Time between two exports to a receiver that takes no metrics, such as one of traces alone.
const REFUSED_INTERVAL: Duration = Duration::from_secs(300);
/// How long reading the metrics may take: longer than the nodes may take to say theirs.
const READ_BOUND: Duration = Duration::from_secs(10);

/// What has the metrics as text.
pub(crate) trait ReadMetrics: Send + Sync {
    /// All metrics as they are now, in the format of Prometheus.
    fn text(&self) -> impl Future<Output = Result<String, fmt::Error>> + Send;
}

/// The exporter of metrics.
#[derive(Debug)]
pub(super) struct Pusher {
    client: Arc<ExportClient>,
    resource: Resource,
    clock: Clock,
    converter: Converter,
    log: PushLog,
}

/// The log about the exports.
#[derive(Debug, Default)]
struct PushLog {
    said: Said,
}

/// Why metrics were not exported.
#[derive(Debug, Clone, Copy)]
enum PushError {
    /// The metrics could not be read, which the log has.
    Unread,
    /// The receiver did not accept the export.
    Export(ExportError),
}

impl Pusher {
    /// An exporter of the metrics of a program with these attributes, which begin to count now.
    pub(super) fn new(client: Arc<ExportClient>, resource: Resource, clock: Clock) -> Self {
        let begun_ns = nanoseconds(&clock);
        Self {
            client,
            resource,
            clock,
            converter: Converter::new(begun_ns),
            log: PushLog::default(),
        }
    }

    /// Exports what `read` gives until `stop` is cancelled, and then once more.
    pub(super) async fn run<R: ReadMetrics>(mut self, read: R, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.serve(&read) => {}
        }
        // An exchange that was cut off may have arrived: the last values are the ones that count.
        let last = tokio::time::timeout(FLUSH_BOUND, self.push(&read)).await;
        if last.is_err() {
            tracing::warn!("the last metrics could not be exported before the end");
        }
    }

    async fn serve<R: ReadMetrics>(&mut self, read: &R) {
        loop {
            let pause = match self.push(read).await {
                Err(PushError::Export(error)) => pause(error),
                Ok(()) | Err(PushError::Unread) => INTERVAL,
            };
            tokio::time::sleep(pause).await;
        }
    }

    async fn push<R: ReadMetrics>(&mut self, read: &R) -> Result<(), PushError> {
        let body = self.body(read).await.ok_or(PushError::Unread)?;
        match self.client.send(Signal::Metrics, body.into()).await {
            Ok(rejected) => {
                self.log.worked(rejected);
                Ok(())
            }
            Err(error) => {
                self.log.failed(error);
                Err(PushError::Export(error))
            }
        }
    }

    /// The export of the metrics as they are now; none if they cannot be had, which the log says.
    async fn body<R: ReadMetrics>(&mut self, read: &R) -> Option<Vec<u8>> {
        let text = match tokio::time::timeout(READ_BOUND, read.text()).await {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => {
                self.log.unread(&error);
                return None;
            }
            Err(_) => {
                self.log.unread(&"they took too long");
                return None;
            }
        };
        let metrics = match self.converter.convert(&text, nanoseconds(&self.clock)) {
            Ok(metrics) => metrics,
            Err(error) => {
                self.log.unread(&error);
                return None;
            }
        };
        let request = MetricsRequest {
            resource_metrics: vec![ResourceMetrics {
                resource: Some(self.resource.clone()),
                scope_metrics: vec![ScopeMetrics {
                    scope: Some(scope()),
                    metrics,
                }],
            }],
        };
        Some(request.encode_to_vec())
    }
}

impl PushLog {
    fn failed(&mut self, error: ExportError) {
        if self.said.begins_to_fail() {
            tracing::warn!(%error, "metrics cannot be exported: the next export that succeeds has all of them");
        }
    }

    fn unread(&mut self, error: &dyn fmt::Display) {
        if self.said.may_speak() {
            tracing::error!(%error, "the metrics cannot be read for their export");
        }
    }

    fn worked(&mut self, rejected: u64) {
        if self.said.works_again() {
            tracing::info!("metrics are exported again");
        }
        if rejected > 0 && self.said.may_speak() {
            tracing::warn!(rejected, "the receiver rejects values of metrics");
        }
    }
}

/// How long to wait after a failure: as long as the receiver asks for, and longer if it takes no metrics.
fn pause(error: ExportError) -> Duration {
    let own = if error.is_temporary() {
        INTERVAL
    } else {
        REFUSED_INTERVAL
    };
    error.retry_after().map_or(own, |asked| asked.max(own))
}

/// Nanoseconds since 1970.
fn nanoseconds(clock: &Clock) -> u64 {
    u64::try_from(clock.now_us()).unwrap_or(0).saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    #[test]
    fn a_receiver_is_asked_less_often_when_it_refuses() {
        let of = |status: u16, retry_after: Option<u64>| {
            let status = StatusCode::from_u16(status).unwrap();
            let retry_after = retry_after.map(Duration::from_secs);
            pause(ExportError::Status { status, retry_after }).as_secs()
        };
        assert_eq!(pause(ExportError::Connect), INTERVAL);
        assert_eq!((of(503, None), of(429, Some(1)), of(503, Some(120))), (15, 15, 120));
        assert_eq!((of(404, None), of(401, Some(7))), (300, 300));
    }
}
