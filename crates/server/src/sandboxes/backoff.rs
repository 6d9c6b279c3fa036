//! Restores that have failed, and are not tried again for a while.
//!
//! A restore that hangs takes a turn of its team, and each one reads the whole checkpoint. A client that asks again and again is
//! answered at once with the reason, without a change of the row or a request to the node. In memory only: after a restart of
//! the platform, everything can be tried again.

use std::time::Duration;

use model::backoff;

use crate::clock::SECOND_US;

/// What has failed in a row.
#[derive(Debug, Default)]
pub(crate) struct BackOff(Option<Failed>);

#[derive(Debug)]
struct Failed {
    count: u32,
    /// When it failed last, in microseconds since the Unix epoch.
    at_us: i64,
    why: String,
}

/// A resume or fork has failed recently, and is not tried yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not tried again for {wait_s} s: {why}")]
pub(crate) struct TooEarly {
    /// Why it failed the last time, for the client.
    pub(crate) why: String,
    /// Seconds until it may be tried, at least 1.
    pub(crate) wait_s: u32,
}

impl BackOff {
    /// Whether it may be tried now.
    pub(crate) fn check(&self, now_us: i64) -> Result<(), TooEarly> {
        let Some(failed) = &self.0 else { return Ok(()) };
        let pause = backoff::pause(failed.count);
        // A clock that was set back makes nobody wait for longer.
        let gone = Duration::from_micros(u64::try_from(now_us - failed.at_us).unwrap_or(0));
        match pause.checked_sub(gone) {
            None | Some(Duration::ZERO) => Ok(()),
            Some(left) => Err(TooEarly {
                why: failed.why.clone(),
                wait_s: u32::try_from(left.as_micros().div_ceil(SECOND_US.unsigned_abs().into())).unwrap_or(u32::MAX),
            }),
        }
    }

    /// Notes that it has failed, for this reason, which is for the client. Returns how many seconds it is not tried.
    pub(crate) fn note_failure(&mut self, now_us: i64, why: &str) -> u32 {
        let count = self.0.as_ref().map_or(0, |failed| failed.count).saturating_add(1);
        self.0 = Some(Failed {
            count,
            at_us: now_us,
            why: why.to_owned(),
        });
        u32::try_from(backoff::pause(count).as_secs()).unwrap_or(u32::MAX)
    }

    /// Forgets what has failed: it works.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_785_000_000_000_000;

    fn wait_s(backoff: &BackOff, now_us: i64) -> u32 {
        backoff.check(now_us).map_or_else(|early| early.wait_s, |()| 0)
    }

    #[test]
    fn each_failure_doubles_the_pause() {
        let mut backoff = BackOff::default();
        let mut now_us = NOW;
        assert_eq!(wait_s(&backoff, now_us), 0);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(backoff.note_failure(now_us, "it hangs"), pause);
            assert_eq!(wait_s(&backoff, now_us), pause);
            let early = backoff.check(now_us + i64::from(pause) * SECOND_US - 1).unwrap_err();
            assert_eq!((early.wait_s, early.why.as_str()), (1, "it hangs"));
            now_us += i64::from(pause) * SECOND_US;
            assert_eq!(wait_s(&backoff, now_us), 0);
        }
        backoff.forget();
        assert_eq!(backoff.note_failure(now_us, "it hangs"), 1);
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_make_it_longer() {
        let mut backoff = BackOff::default();
        backoff.note_failure(NOW, "it hangs");
        backoff.note_failure(NOW, "it hangs");
        assert_eq!(wait_s(&backoff, NOW - 3600 * SECOND_US), 2);
    }
}
