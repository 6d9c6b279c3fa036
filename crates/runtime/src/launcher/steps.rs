//! The steps of a start: how long each may take, how long it took, and which one failed.

use std::io;
use std::time::{Duration, Instant};

/// Maximum wait for each step of a start that another process performs. It takes milliseconds; the bound is for an
/// overloaded host, and below the platform's own timeout, so that the error reaches it.
pub(super) const STEP: Duration = Duration::from_secs(10);

/// Adds the failed step to an error.
pub(super) trait During<T> {
    fn during(self, what: &str) -> io::Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: &str) -> io::Result<T> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            io::Error::new(error.kind(), format!("{what}: {error}"))
        })
    }
}

/// Durations of the stages of a start, in microseconds.
pub(super) struct Stages(pub(super) Vec<(String, u64)>, Instant);

impl Stages {
    pub(super) fn new() -> Self {
        Self(Vec::new(), Instant::now())
    }

    pub(super) fn end(&mut self, name: &str) {
        let now = Instant::now();
        let took = now.duration_since(self.1).as_micros();
        self.0.push((name.to_owned(), u64::try_from(took).unwrap_or(u64::MAX)));
        self.1 = now;
    }
}
