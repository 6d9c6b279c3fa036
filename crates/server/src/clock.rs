//! The clock of the server. Code that depends on the time takes a [`Clock`], so that tests can set it.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;

/// Microseconds in a second.
pub(crate) const SECOND_US: i64 = 1_000_000;

/// A source of the time, in microseconds since the Unix epoch.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> i64 + Send + Sync>);

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

impl Clock {
    /// The clock of the host.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where the server reads the system clock"
    )]
    pub fn system() -> Self {
        Self::new(|| Timestamp::now().as_microsecond())
    }

    /// A clock that calls `now_us`.
    pub fn new(now_us: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now_us))
    }

    /// Now, in microseconds since the Unix epoch.
    pub(crate) fn now_us(&self) -> i64 {
        (self.0)()
    }
}

/// A time in RFC 3339 and UTC, with at most six fractional digits.
pub(crate) fn rfc3339(time_us: i64) -> String {
    Timestamp::from_microsecond(time_us).unwrap_or_default().to_string()
}

/// Parses an RFC 3339 time to microseconds since the epoch; finer digits are cut off.
pub(crate) fn parse_rfc3339(text: &str) -> Option<i64> {
    text.parse::<Timestamp>().ok().map(Timestamp::as_microsecond)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc_with_no_more_digits_than_needed() {
        for (time_us, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_500_000, "1970-01-01T00:00:01.5Z"),
            (1_785_000_000_123_456, "2026-07-25T17:20:00.123456Z"),
        ] {
            assert_eq!(rfc3339(time_us), text);
            assert_eq!(parse_rfc3339(text), Some(time_us));
        }
        assert_eq!(parse_rfc3339("1970-01-01T01:00:01.5000009+01:00"), Some(1_500_000));
        assert_eq!(parse_rfc3339("yesterday"), None);
    }
}
