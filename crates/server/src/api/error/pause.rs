//! Responses about sandboxes that are paused, or cannot be.

use http::StatusCode;
use protocol::node::NodeError;

use super::{ApiError, IN_PROGRESS_AFTER_S};
use crate::sandboxes::backoff::TooEarly;
use crate::sandboxes::pause::PauseError;

impl ApiError {
    /// 409: the sandbox is being paused or resumed; `verb` says which.
    pub(super) fn changing(id: impl std::fmt::Display, verb: &str) -> Self {
        let why = format!("sandbox \"{id}\" is being {verb}: try again in a moment");
        Self::new(StatusCode::CONFLICT, why).retry_after(IN_PROGRESS_AFTER_S)
    }

    /// The response when a sandbox was not paused.
    pub(crate) fn not_paused(error: PauseError, id: impl std::fmt::Display) -> Self {
        match error {
            PauseError::Paused => Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is already paused")),
            PauseError::Running | PauseError::Stopping | PauseError::Gone => Self::no_sandbox(id),
            PauseError::Cancelled => {
                let why = format!(
                    "sandbox \"{id}\" was not paused: a request or traffic resumed it meanwhile, and it runs on"
                );
                Self::new(StatusCode::CONFLICT, why)
            }
            PauseError::Unhealthy => {
                let why = format!(
                    "the agent of sandbox \"{id}\" does not respond, and requireHealthyGuest is true: the sandbox runs on"
                );
                // Clients take 409 for a sandbox that is paused already.
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
                    .code("sandbox_guest_agent_unresponsive")
                    .retry_after(IN_PROGRESS_AFTER_S)
            }
            PauseError::Node(_) | PauseError::TaskFailed => {
                let why = format!("sandbox \"{id}\" could not be paused, and runs on: try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error)
            }
            other => Self::not_changed_in_state(other),
        }
    }

    /// The response when a sandbox was not resumed.
    pub(crate) fn not_resumed(error: PauseError, id: impl std::fmt::Display) -> Self {
        match error {
            PauseError::Running => Self::running(id),
            PauseError::Paused | PauseError::Stopping | PauseError::Gone => Self::no_sandbox(id),
            PauseError::Node(NodeError::Refused(refusal)) => {
                let why = format!(
                    "sandbox \"{id}\" is still paused: {refusal}: start it anew from its files with `\"memory\": false`"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            }
            PauseError::Node(NodeError::Busy { owner_limit }) => Self::restores_busy(owner_limit),
            PauseError::TooEarly(TooEarly { why, wait_s }) => {
                let why = format!(
                    "sandbox \"{id}\" is still paused: it could not be resumed lately, and is not tried again for \
                     {wait_s} s: {why}: start it anew from its files with `\"memory\": false`"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
                    .code("sandbox_resume_delayed")
                    .retry_after(wait_s)
            }
            PauseError::Node(_) | PauseError::TaskFailed => {
                let why = format!("sandbox \"{id}\" could not be resumed, and is still paused: try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error)
            }
            other => Self::not_changed_in_state(other),
        }
    }

    /// The response when a client could not connect to a sandbox.
    pub(crate) fn not_connected(error: PauseError, id: impl std::fmt::Display) -> Self {
        match error {
            PauseError::Stopping => Self::stopping(id),
            // Its state changed again and again.
            PauseError::Running | PauseError::Paused => Self::changing(id, "paused or resumed"),
            other => Self::not_resumed(other, id),
        }
    }

    /// Others are restored with their processes at the moment: 429 if they are of the same team, which can have `team_limit`
    /// at the same time, otherwise 503.
    pub(super) fn restores_busy(team_limit: Option<usize>) -> Self {
        let error = match team_limit {
            Some(limit) => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "your team is limited to {limit} sandboxes that are restored with their processes at the same time: try \
                     again in a moment"
                ),
            )
            .code("restore_limit_reached"),
            None => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the host restores as many sandboxes with their processes as it can: try again in a moment",
            )
            .code("restore_capacity_unavailable"),
        };
        error.retry_after(IN_PROGRESS_AFTER_S)
    }

    fn not_changed_in_state(error: PauseError) -> Self {
        match error {
            PauseError::Store(error) => error.into(),
            PauseError::OverQuota(over) => over.into(),
            PauseError::NoCapacity(_) => Self::no_capacity(IN_PROGRESS_AFTER_S).caused_by(error),
            PauseError::Starting => {
                let why = "the sandbox is being started already, and may keep its processes: try again in a moment";
                Self::new(StatusCode::CONFLICT, why)
                    .code("sandbox_start_in_flight")
                    .retry_after(IN_PROGRESS_AFTER_S)
            }
            PauseError::Unsupported(_) => Self::new(
                StatusCode::NOT_IMPLEMENTED,
                "this host cannot do that: its operator finds the reason with `ringfence doctor`",
            )
            .code("not_supported")
            .caused_by(error),
            other => Self::internal().caused_by(other),
        }
    }
}
