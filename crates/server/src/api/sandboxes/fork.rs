//! `POST /sandboxes/{sandboxID}/fork`.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::limits::{DEFAULT_TIMEOUT_V1_S, FORKS_MAX};
use serde::Serialize;
use utoipa::ToSchema;

use super::ConnectionInfo;
use super::error::NoSandbox;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::OptionalBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::{Lifetime, Within};
use crate::api::error::{ApiError, DRAINING_AFTER_S, ErrorBody, NODE_DRAINING, SOON_S};
use crate::api::json::json;
use crate::api::state::ApiState;
use crate::ids::new_sandbox_id;
use crate::sandboxes::backoff::TooEarly;
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::fork::peers::NotStarted;
use crate::sandboxes::fork::{ChildError, ForkError, ForkRequest};

/// Retry interval for a host without space, or that is busy with other forks, in seconds.
const BUSY_AFTER_S: u32 = 10;

body! {
    /// Parameters for forking a sandbox.
    pub(crate) struct ForkSandbox {
        /// Seconds from now until the deadline of each new sandbox.
        "timeout" timeout: Nullable<Lifetime<1>> = DEFAULT_TIMEOUT_V1_S;
        /// How many sandboxes are created. It must be less than the number of sandboxes that the team can have.
        "count" count: Nullable<Within<1, FORKS_MAX>> = 1;
    }
}

/// What became of one of the sandboxes of a fork: one of the two.
#[derive(Serialize, ToSchema)]
#[schema(as = ForkResult)]
pub(crate) struct ForkResult {
    /// How to reach it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    sandbox: Option<ConnectionInfo>,
    /// Why it does not run. Nothing is left of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    error: Option<ErrorBody>,
}

/// Forks a running sandbox: creates others that go on from where it is, with the same memory, processes and files, and that
/// have its template, metadata, network and lifecycle settings. It goes on, too, and its deadline stays.
///
/// The sandbox stands still while it is copied. The response has one entry for each sandbox that was asked for, and comes
/// when all of them run or have failed.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/fork",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<ForkSandbox>),
    responses(
        (status = 201, description = "What became of each sandbox", body = Vec<ForkResult>),
        (
            status = 409,
            description = "The sandbox is paused, or being paused, resumed or killed, or something in it cannot be \
                           copied",
        ),
        (status = 429, description = "The team is at one of its limits"),
        (status = 501, description = "The host cannot copy processes"),
        (
            status = 503,
            description = "The host has no space for the copies, is busy with others, or is being drained, or it failed; \
                           the sandbox runs on",
        ),
        NoSandbox,
    )
)]
pub(crate) async fn fork_sandbox(
    State(state): State<ApiState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: OptionalBody<ForkSandbox>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let timeout_s = body.timeout.within(&caller.quota)?;
    let Within(count) = body.count;
    if let Some(limit) = caller.quota.limits.sandboxes.filter(|limit| count >= *limit) {
        return Err(ApiError::invalid(format!(
            "count must be less than {limit}, the number of sandboxes that your team can have: the forked one counts as well"
        )));
    }
    let sandboxes = &state.sandboxes;
    let entry = caller.sandbox(sandboxes, &id).await?;
    if entry.lifecycle().auto_pause {
        caller.quota.check_auto_pause()?;
    }
    let ids = (0..count).map(|_| new_sandbox_id()).collect::<Result<Vec<_>, _>>();
    let ids = ids.map_err(ApiError::failed)?;
    let creator = caller.creator();
    // Each is a sandbox that is created.
    for _ in 0..count {
        creator
            .count(state.clock.now_us())
            .map_err(ApiError::creating_too_often)?;
    }
    let request = ForkRequest {
        user: creator.user,
        quota: creator.quota,
        timeout_s,
        ids,
    };
    let forked = sandboxes.fork(&state.builds, &entry, request).await;
    let forked = forked.map_err(|error| ApiError::not_forked(error, &id))?;
    let results = forked.into_iter().map(|child| match child {
        Ok(row) => ForkResult {
            sandbox: Some(ConnectionInfo::new(row, &state.access)),
            error: None,
        },
        Err(error) => ForkResult {
            sandbox: None,
            error: Some(ApiError::from(error).into_body()),
        },
    });
    json(StatusCode::CREATED, &results.collect::<Vec<_>>())
}

impl ApiError {
    /// The response when a sandbox was not forked. It runs on, unless something else has ended it.
    fn not_forked(error: ForkError, id: impl std::fmt::Display) -> Self {
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
            ForkError::Draining => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "the operator of this platform drains the node of sandbox \"{id}\", which gets no copies of sandboxes: the \
                     sandbox runs on; create sandboxes from a snapshot of this one, or try again later"
                ),
            )
            .code(NODE_DRAINING)
            .retry_after(DRAINING_AFTER_S)
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
                    .retry_after(SOON_S)
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
            ChildError::Elsewhere(error) => error.into(),
        }
    }
}

impl From<NotStarted> for ApiError {
    fn from(error: NotStarted) -> Self {
        match error {
            NotStarted::NoRoom => Self::no_capacity(BUSY_AFTER_S),
            NotStarted::OverQuota(why) => Self::new(StatusCode::TOO_MANY_REQUESTS, why).should_retry(false),
            NotStarted::Failed(why) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, why),
            NotStarted::Unknown => Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        }
    }
}
