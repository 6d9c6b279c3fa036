//! Responses when no snapshot was made.

use http::StatusCode;
use store::snapshots::NameUse;

use super::{ApiError, IN_PROGRESS_AFTER_S};
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::copies::PER_TEAM as COPIES_PER_TEAM;
use crate::sandboxes::snapshot::SnapshotError;

/// Retry interval when the host has no space for a snapshot or makes others, in seconds.
const BUSY_AFTER_S: u32 = 10;

impl ApiError {
    /// The response when no snapshot of a sandbox was made. It runs on, unless something else has ended it.
    pub(crate) fn no_snapshot(error: SnapshotError, id: impl std::fmt::Display, name: &str) -> Self {
        match error {
            SnapshotError::Store(error) => error.into(),
            SnapshotError::State(ChangeError::Changing(verb)) => Self::changing(id, verb),
            SnapshotError::State(ChangeError::Stopping) => Self::stopping(id),
            SnapshotError::State(_) => Self::no_sandbox(id),
            SnapshotError::InProgress => {
                let why = format!("another snapshot of sandbox \"{id}\" was being made: try again");
                Self::new(StatusCode::CONFLICT, why).retry_after(IN_PROGRESS_AFTER_S)
            }
            SnapshotError::NameTaken(NameUse::Id) => {
                Self::taken(format!("name \"{name}\" is the id of a template: choose another"))
            }
            SnapshotError::NameTaken(_) => Self::taken(format!(
                "name \"{name}\" is that of a template of your team that is no snapshot: choose another"
            )),
            SnapshotError::TooManyTags => Self::tag_limit(),
            SnapshotError::Refused(why) => {
                Self::invalid(format!("the files of sandbox \"{id}\" cannot be a snapshot: {why}"))
            }
            SnapshotError::Unsupported(_) => Self::new(
                StatusCode::NOT_IMPLEMENTED,
                "this host cannot make snapshots: they need the freezer of cgroup v2, which it does not have",
            )
            .code("not_supported")
            .caused_by(error),
            SnapshotError::TooMany => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "no snapshot of sandbox \"{id}\" was made: the team makes {COPIES_PER_TEAM} others at the moment, which is the \
                     maximum; try again when one of them is complete"
                ),
            )
            .code("snapshot_capacity_unavailable")
            .retry_after(BUSY_AFTER_S),
            SnapshotError::NoCapacity(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "the host has no space for a snapshot of sandbox \"{id}\", or is busy with others: the sandbox runs on, \
                     try again later"
                ),
            )
            .code("snapshot_capacity_unavailable")
            .retry_after(BUSY_AFTER_S)
            .caused_by(error),
            SnapshotError::Failed(_) | SnapshotError::ServerStopping | SnapshotError::TaskFailed => {
                let why = format!("no snapshot of sandbox \"{id}\" could be made, and the sandbox runs on: try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error)
            }
        }
    }
}
