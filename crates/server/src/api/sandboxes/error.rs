//! Responses about sandboxes that several operations have in common.

use http::StatusCode;

use crate::api::describe::error_sets;
use crate::api::error::{ApiError, NODE_AWAY, SOON_S};
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::elsewhere::AbsentError;

error_sets! {
    /// There is no such sandbox.
    NoSandbox {
        404 "The team has no such sandbox";
    }
    /// There is no such sandbox, or it does not run.
    NotRunning {
        404 "The team has no such sandbox, or it is not running";
    }
    /// A running sandbox was not changed.
    NotChanged {
        404 "The team has no such sandbox, or it is not running";
        409 "The sandbox is being killed";
    }
}

impl ApiError {
    /// 404: the sandbox does not exist or belongs to another team; the response is the same.
    pub(crate) fn no_sandbox(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("sandbox \"{id}\" doesn't exist or you don't have access to it"),
        )
    }

    /// The response for a sandbox that this server cannot change: 404, or 503 if it is on another node.
    pub(crate) fn absent(error: AbsentError, id: impl std::fmt::Display) -> Self {
        match error {
            AbsentError::Store(error) => error.into(),
            AbsentError::Unknown => Self::no_sandbox(id),
            AbsentError::Away { node } => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("sandbox \"{id}\" is on node \"{node}\", which is not connected: try again later"),
            )
            .code(NODE_AWAY),
            AbsentError::Elsewhere { node } => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("sandbox \"{id}\" is on node \"{node}\": send the request to the server of that node"),
            )
            .code("sandbox_on_other_node"),
        }
    }

    /// 503: the server that serves the node of the sandbox does not answer this one.
    pub(crate) fn other_server_away(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "sandbox \"{id}\" is on a node of another server, which does not answer, and whether a change took effect is \
                 not known: try again in a moment"
            ),
        )
        .code(NODE_AWAY)
        .retry_after(SOON_S)
    }

    /// 503: the server that builds a template does not answer this one.
    pub(crate) fn build_server_away() -> Self {
        let why = "the server that builds this template does not answer: try again in a moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why).retry_after(SOON_S)
    }

    /// 500: another server was to create a sandbox and has not answered. SDKs must not try again by themselves, because one may
    /// have been created.
    pub(crate) fn create_unknown() -> Self {
        let why = "the server that was to create the sandbox does not answer, and it is not known whether it did: see the list \
                   of sandboxes, or send the request again if it has an Idempotency-Key";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, why)
            .code("internal_server_error")
            .should_retry(false)
    }

    /// 409: the sandbox is being ended.
    pub(crate) fn stopping(id: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is being killed"))
    }

    /// 503: the sandbox is being killed, and its node is not connected.
    pub(crate) fn kill_away(id: impl std::fmt::Display) -> Self {
        let why = format!(
            "the node of sandbox \"{id}\" is not connected, so whether it is killed is not known yet: it will be once the node \
             is back"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            .code("node_away")
            .retry_after(SOON_S)
    }

    /// 503: nothing of the sandbox runs any more, and the database could not record that.
    pub(crate) fn kill_unrecorded(id: impl std::fmt::Display) -> Self {
        let why = format!(
            "sandbox \"{id}\" does not run any more, but the database could not record that: the platform tries again, and \
             so may you"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            .code("internal_server_error")
            .retry_after(SOON_S)
    }

    /// 503: what the sandbox does now is not in its row yet, because the database has failed.
    pub(super) fn unsettled() -> Self {
        let why = "the database has failed, and the state of the sandbox is not recorded yet: try again in a moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            .code("internal_server_error")
            .retry_after(SOON_S)
    }

    /// 409: the sandbox is being paused or resumed; `verb` says which.
    pub(crate) fn changing(id: impl std::fmt::Display, verb: &str) -> Self {
        let why = format!("sandbox \"{id}\" is being {verb}: try again in a moment");
        Self::new(StatusCode::CONFLICT, why).retry_after(SOON_S)
    }

    /// The response when a running sandbox could not be changed.
    pub(crate) fn not_changed(error: ChangeError, id: impl std::fmt::Display) -> Self {
        match error {
            ChangeError::Store(error) => error.into(),
            ChangeError::Stale => Self::unsettled(),
            ChangeError::Stopping => Self::stopping(id),
            ChangeError::Changing(verb) => Self::changing(id, verb),
            ChangeError::Gone => Self::no_sandbox(id),
            ChangeError::NotTold(_) => Self::not_told(id).caused_by(error),
            ChangeError::NotApplied(_) => Self::not_applied(id).caused_by(error),
            ChangeError::NoToken => Self::invalid(format!(
                "sandbox \"{id}\" has no injection of a code host, so there is no token to replace"
            )),
            ChangeError::Seal(_) | ChangeError::TaskFailed => Self::internal().caused_by(error),
        }
    }

    /// 503: the deadline was not changed, because the node of the sandbox, which keeps it as well, was not told.
    pub(crate) fn not_told(id: impl std::fmt::Display) -> Self {
        let why = format!(
            "the node of sandbox \"{id}\" is not connected, so its timeout was not changed: try again in a moment"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            .code(NODE_AWAY)
            .retry_after(SOON_S)
    }

    /// 500: a change was stored but not applied. A repeated request is safe, and can work.
    fn not_applied(id: impl std::fmt::Display) -> Self {
        let why = format!(
            "the change of sandbox \"{id}\" was stored but not applied, so its connections may still follow the \
             settings before: send the request again, or wait until the platform has tried again"
        );
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, why)
            .code("sandbox_change_not_applied")
            .should_retry(true)
    }

    /// Others are restored with their processes at the moment: 429 if they are of the same team, which can have `team_limit`
    /// at the same time, otherwise 503.
    pub(crate) fn restores_busy(team_limit: Option<usize>) -> Self {
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
        error.retry_after(SOON_S)
    }
}
