//! The one place of this crate that reads the clock; everything below takes the time as an argument.

use jiff::Timestamp;

/// The time of the host.
#[expect(clippy::disallowed_methods, reason = "a program begins here, and with it the time")]
pub(crate) fn now() -> Timestamp {
    Timestamp::now()
}

/// The time of the host as the database stores it: microseconds since 1970.
pub(crate) fn now_us() -> i64 {
    now().as_microsecond()
}
