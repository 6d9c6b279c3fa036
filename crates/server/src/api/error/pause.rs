//! Responses about sandboxes that are paused, or cannot be.

use http::StatusCode;

use super::{ApiError, IN_PROGRESS_AFTER_S};
use crate::sandboxes::pause::PauseError;

impl ApiError {
    /// 409: the sandbox is being paused or resumed; `verb` says which.
    pub(super) fn changing(id: impl std::fmt::Display, verb: &str) -> Self {
        let why = format!("sandbox \"{id}\" is being {verb}: try again in a moment");
        Self::new(StatusCode::CONFLICT, why).retry_after(IN_PROGRESS_AFTER_S)
    }

    /// 501: only the files of a sandbox would be kept.
    pub(crate) fn no_filesystem_pause() -> Self {
        let why = "pausing without memory (memory: false) is not built yet: this platform keeps the processes of a paused \
                   sandbox; send memory: true, or no body";
        Self::new(StatusCode::NOT_IMPLEMENTED, why).code("not_built")
    }

    /// 400: the processes of a paused sandbox would be given up.
    pub(crate) fn no_memory_override() -> Self {
        let why = "memory: false is not available on this platform: the processes of a paused sandbox continue when it \
                   is resumed";
        Self::invalid(why).code("sandbox_memory_override_disabled")
    }

    /// The response when a sandbox was not paused.
    pub(crate) fn not_paused(error: PauseError, id: impl std::fmt::Display) -> Self {
        match error {
            PauseError::Paused => Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is already paused")),
            PauseError::Running | PauseError::Stopping | PauseError::Gone => Self::no_sandbox(id),
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

    fn not_changed_in_state(error: PauseError) -> Self {
        match error {
            PauseError::Store(error) => error.into(),
            PauseError::OverQuota(over) => over.into(),
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
