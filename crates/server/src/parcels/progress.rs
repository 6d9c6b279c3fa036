//! How long a transfer may stand still. A slow one goes on for as long as it moves; one that does not is given up, so that it costs its
//! team a turn for about a minute.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// When the last part of a transfer was taken; none once all of them were.
#[derive(Debug, Clone)]
pub(super) struct Progress(Arc<Mutex<Option<Instant>>>);

impl Progress {
    /// A transfer that begins now.
    pub(super) fn begun() -> Self {
        Self(Arc::new(Mutex::new(Some(Instant::now()))))
    }

    /// Notes that a part was taken.
    pub(super) fn note(&self) {
        if let Some(last) = &mut *self.0.lock() {
            *last = Instant::now();
        }
    }

    /// Notes that the last part was taken. What the receiver does afterwards has other bounds.
    pub(super) fn end(&self) {
        *self.0.lock() = None;
    }

    /// Waits until no part was taken for this long.
    pub(super) async fn until_stalled(&self, bound: Duration) {
        loop {
            let Some(last) = *self.0.lock() else {
                return std::future::pending().await;
            };
            if last.elapsed() >= bound {
                return;
            }
            tokio::time::sleep_until(last + bound).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const BOUND: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn what_moves_goes_on_and_what_does_not_is_found() {
        let progress = Progress::begun();
        let begun = Instant::now();
        let mut stalled = Box::pin(progress.until_stalled(BOUND));
        for _ in 0..20 {
            tokio::time::sleep(BOUND - Duration::from_secs(1)).await;
            assert!((&mut stalled).now_or_never().is_none());
            progress.note();
        }
        stalled.await;
        assert_eq!(begun.elapsed(), 20 * (BOUND - Duration::from_secs(1)) + BOUND);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_taken_as_a_whole_does_not_stall() {
        let progress = Progress::begun();
        progress.end();
        progress.note();
        let stalled = tokio::time::timeout(100 * BOUND, progress.until_stalled(BOUND)).await;
        assert!(stalled.is_err());
    }
}
