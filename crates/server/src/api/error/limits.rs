//! Responses about limits: those of the host, of teams, and of clients without credentials.

use std::time::Duration;

use http::StatusCode;

use super::{ApiError, NO_CAPACITY};
use crate::admission::AdmissionError;
use crate::admission::quota::{OverQuota, PAUSED, PAUSED_DISK};
use crate::admission::rate::Level;

impl ApiError {
    /// 503: the host has no capacity for another sandbox.
    pub(crate) fn no_capacity(retry_after_s: u32) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "there is no capacity for another sandbox at the moment: try again later",
        )
        .code(NO_CAPACITY)
        .retry_after(retry_after_s)
    }

    /// 429: a rate limit of the team is exceeded.
    pub(crate) fn rate_limited(what: &str, level: Level) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "your team is limited to {} {what}, try again in {} s",
                level.limit, level.next_in_s
            ),
        )
        .retry_after(level.next_in_s)
    }

    /// 429: the team creates sandboxes too often.
    pub(crate) fn creating_too_often(level: Level) -> Self {
        Self::rate_limited("create requests per minute", level)
    }

    /// 429: a client without credentials sends too many requests.
    pub(crate) fn too_many_requests(wait: Duration) -> Self {
        let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("too many requests from your address, try again in {seconds} s"),
        )
        .retry_after(seconds)
    }
}

impl From<AdmissionError> for ApiError {
    fn from(error: AdmissionError) -> Self {
        match error {
            AdmissionError::OverQuota(over) => over.into(),
            AdmissionError::NoCapacity { retry_after_s, .. } => Self::no_capacity(retry_after_s).caused_by(error),
        }
    }
}

impl From<OverQuota> for ApiError {
    /// 429 that waiting does not resolve: without `Retry-After`, and with a header that keeps SDKs from retrying.
    fn from(over: OverQuota) -> Self {
        let OverQuota {
            resource,
            limit,
            used,
            requested,
            key: _,
        } = over;
        let what = match resource {
            PAUSED | PAUSED_DISK => "resume or kill a paused sandbox",
            _ => "kill a sandbox",
        };
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "your team is limited to {limit} {resource}, {used} are in use and this sandbox needs {requested}: {what}, \
                 or ask the operator of this platform for more"
            ),
        )
        .should_retry(false)
    }
}
