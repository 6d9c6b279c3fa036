//! Responses about sandboxes that were not forked.

use http::StatusCode;

use super::{ApiError, IN_PROGRESS_AFTER_S};
use crate::sandboxes::backoff::TooEarly;
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::fork::{ChildError, ForkError};

/// Retry interval for a host without space, or that is busy with other forks, in seconds.
const BUSY_AFTER_S: u32 = 10;

impl ApiError {
    /// The response when a sandbox was not forked. It runs on, unless something else has ended it.
    pub(crate) fn not_forked(error: ForkError, id: impl std::fmt::Display) -> Self {
        match error {
            ForkError::Store(error) => error.into(),
            ForkError::State(ChangeError::Changing(verb)) => Self::changing(id, verb),
            ForkError::State(ChangeError::Stopping) => Self::stopping(id),
            ForkError::State(_) => Self::no_sandbox(id),
            ForkError::Paused => {
                let why = format!("sandbox \"{id}\" is paused: resume it first");
                Self::new(StatusCode::CONFLICT, why)
            }
            ForkError::TooEarly(TooEarly { why, wait_s }) => {
                let why = format!(
                    "sandbox \"{id}\" could not be forked lately, and is not copied again for {wait_s} s; it runs on: {why}"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
                    .code("sandbox_fork_delayed")
                    .retry_after(wait_s)
            }
            ForkError::Refused(why) => {
                let why = format!("sandbox \"{id}\" cannot be forked as it is now, and runs on: {why}");
                Self::new(StatusCode::CONFLICT, why).code("sandbox_not_forkable")
            }
            ForkError::Unsupported(_) => Self::new(
                StatusCode::NOT_IMPLEMENTED,
                "this host cannot fork sandboxes: that needs CRIU and the freezer of cgroup v2, and its operator finds what \
                 is missing with `ringfence doctor`",
            )
            .code("not_supported")
            .caused_by(error),
            ForkError::NoCapacity(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "the host has no space for copies of sandbox \"{id}\", or is busy with others: the sandbox runs on, try \
                     again later"
                ),
            )
            .code("fork_capacity_unavailable")
            .retry_after(BUSY_AFTER_S)
            .caused_by(error),
            ForkError::Seal(_) | ForkError::Failed(_) | ForkError::TaskFailed => {
                let why = format!("sandbox \"{id}\" could not be forked, and runs on: try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
                    .retry_after(IN_PROGRESS_AFTER_S)
                    .caused_by(error)
            }
        }
    }
}

impl From<ChildError> for ApiError {
    fn from(error: ChildError) -> Self {
        match error {
            ChildError::Admission(error) => error.into(),
            ChildError::Create(error) => error.into(),
        }
    }
}
