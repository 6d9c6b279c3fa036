//! Metrics of the copies of paused sandboxes in the blob store.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::series::{Counts, FloatGauge, Labels, float, series, with_unit};
use crate::outcome::CopyOutcome;

/// Paused sandboxes that are copied to the blob store, by what there is of their copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CopyCounts {
    /// Sandboxes with a complete copy.
    pub(crate) complete: usize,
    /// Sandboxes whose copy is being made, or waits for its turn.
    pub(crate) waiting: usize,
    /// Sandboxes whose copy has failed, whether or not it is tried again.
    pub(crate) failing: usize,
}

#[derive(Debug)]
pub(super) struct CopySeries {
    sandboxes: Family<Labels, Gauge>,
    uploads: Counts,
    downloads: Counts,
    uploaded: Counter,
    downloaded: Counter,
    last: FloatGauge,
}

impl CopySeries {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let outcomes = || CopyOutcome::ALL.map(CopyOutcome::as_str);
        let last = FloatGauge::default();
        last.set(f64::NAN);
        Self {
            sandboxes: series(
                registry,
                "paused_copies",
                "Paused sandboxes that are copied to the blob store, by the state of their copy",
            ),
            uploads: Counts::register(
                registry,
                "copy_uploads",
                "Attempts to copy a paused sandbox to the blob store, by outcome",
                "outcome",
                [CopyOutcome::Complete, CopyOutcome::Failed].map(CopyOutcome::as_str),
            ),
            downloads: Counts::register(
                registry,
                "copy_downloads",
                "Attempts to have another node keep the copy of a paused sandbox, by outcome",
                "outcome",
                outcomes(),
            ),
            uploaded: with_unit(
                registry,
                "copy_uploaded",
                Unit::Bytes,
                "Bytes of copies that were stored in the blob store",
                Counter::default(),
            ),
            downloaded: with_unit(
                registry,
                "copy_downloaded",
                Unit::Bytes,
                "Bytes of copies that were fetched from the blob store",
                Counter::default(),
            ),
            last: with_unit(
                registry,
                "copy_last_upload_timestamp",
                Unit::Seconds,
                "When the last copy was completed, in seconds since 1970; NaN if none was since the start",
                last,
            ),
        }
    }

    pub(super) fn set(&self, counts: CopyCounts) {
        for (state, count) in [
            ("complete", counts.complete),
            ("waiting", counts.waiting),
            ("failing", counts.failing),
        ] {
            let gauge = self.sandboxes.get_or_create(&[("state", state)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn upload(&self, outcome: CopyOutcome, now_us: i64) {
        self.uploads.add(outcome.as_str(), 1);
        if outcome == CopyOutcome::Complete {
            self.last.set(float(now_us.max(0).unsigned_abs()) / 1e6);
        }
    }

    pub(super) fn download(&self, outcome: CopyOutcome) {
        self.downloads.add(outcome.as_str(), 1);
    }

    pub(super) fn uploaded(&self, bytes: u64) {
        self.uploaded.inc_by(bytes);
    }

    pub(super) fn downloaded(&self, bytes: u64) {
        self.downloaded.inc_by(bytes);
    }
}
