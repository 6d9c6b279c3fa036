//! The one place of this crate that reads the clock.

use jiff::Timestamp;

/// Seconds since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "the agent is a program of its own, and its answers tell the time"
)]
pub(crate) fn now_s() -> i64 {
    Timestamp::now().as_second()
}
