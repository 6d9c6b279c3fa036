//! Tables of how long things took.

use std::time::Duration;

use measure::stats::Distribution;

/// The columns of [`row`].
pub(super) const HEADER: [&str; 7] = ["milliseconds", "p50", "p90", "p99", "max", "mean", "n"];

/// A row of times.
pub(super) fn row(what: &str, times: Vec<Duration>) -> Vec<String> {
    let mut row = vec![what.to_owned()];
    match Distribution::of(times) {
        Some(t) => {
            row.extend([t.p50_ms, t.p90_ms, t.p99_ms, t.max_ms, t.mean_ms].map(|ms| format!("{ms:.2}")));
            row.push(t.n.to_string());
        }
        None => row.extend(["-", "-", "-", "-", "-", "0"].map(str::to_owned)),
    }
    row
}
