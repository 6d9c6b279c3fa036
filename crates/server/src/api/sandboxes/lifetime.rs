//! Calls that change when a sandbox ends: `timeout`, `refreshes`, `connect` and `resume`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::lifecycle;
use model::limits::{DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S, REFRESH_FLOOR_S, REFRESH_MAX_S};
use store::sandboxes::SandboxRow;

use super::ConnectionInfo;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::{Count, Lifetime};
use crate::api::body::{OptionalBody, RequiredBody};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::json::json;
use crate::api::state::SandboxAccess;
use crate::clock::SECOND_US;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::deadline::Deadline;

body! {
    /// A new timeout of a sandbox.
    pub(crate) struct SandboxTimeout {
        /// Seconds from now, cut at the maximum lifetime; 0 ends the sandbox immediately.
        "timeout" timeout: Count<{ i32::MAX.unsigned_abs() }>;
    }
}

body! {
    /// A minimum timeout of a sandbox.
    pub(crate) struct SandboxRefresh {
        /// Seconds from now, at least 15; smaller values count as 15.
        "duration" duration: Option<Count<REFRESH_MAX_S>> = REFRESH_FLOOR_S;
    }
}

body! {
    /// Parameters for connecting to a sandbox.
    pub(crate) struct ConnectSandboxV1 {
        /// Seconds from now. A later deadline of a running sandbox is kept.
        "timeout" timeout: Lifetime<0>;
        ignored {
            /// Whether the memory of a paused sandbox is restored.
            "memory": Option<bool>;
        }
    }
}

body! {
    /// Parameters for connecting to a sandbox.
    pub(crate) struct ConnectSandbox {
        /// Seconds from now. A later deadline of a running sandbox is kept.
        "timeout" timeout: Nullable<Lifetime<0>> = DEFAULT_TIMEOUT_V2_S;
        ignored {
            /// Whether the memory of a paused sandbox is restored.
            "memory": Option<bool>;
        }
    }
}

body! {
    /// Parameters for resuming a paused sandbox.
    pub(crate) struct ResumeSandbox {
        /// Seconds from now until it ends.
        "timeout" timeout: Nullable<Lifetime<1>> = DEFAULT_TIMEOUT_V1_S;
        ignored {
            /// Whether it is paused again at its deadline.
            "autoPause": Option<bool> => deprecated;
            /// Whether its memory is restored.
            "memory": Option<bool>;
        }
    }
}

/// Sets the deadline to exactly `timeout` seconds from now, earlier or later than before.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/timeout",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = SandboxTimeout),
    responses(
        (status = 204, description = "The timeout was set"),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
pub(crate) async fn set_sandbox_timeout(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: RequiredBody<SandboxTimeout>,
) -> Result<StatusCode, ApiError> {
    let Count(timeout_s) = body.read()?.timeout;
    change(&sandboxes, &caller, sandbox, timeout_s, Deadline::Exactly).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Extends the deadline of a sandbox to at least `duration` seconds from now.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/refreshes",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<SandboxRefresh>),
    responses(
        (status = 204, description = "The sandbox has at least this timeout"),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
pub(crate) async fn refresh_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: OptionalBody<SandboxRefresh>,
) -> Result<StatusCode, ApiError> {
    let Count(duration_s) = body.read()?.duration;
    let duration_s = duration_s.max(REFRESH_FLOOR_S);
    change(&sandboxes, &caller, sandbox, duration_s, Deadline::AtLeast).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Connects to a sandbox, with a required timeout.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = ConnectSandboxV1),
    responses(
        (status = 200, description = "The sandbox runs; how to reach it", body = ConnectionInfo),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
pub(crate) async fn connect_sandbox_v1(
    State(sandboxes): State<Arc<Sandboxes>>,
    State(access): State<Arc<SandboxAccess>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: RequiredBody<ConnectSandboxV1>,
) -> Result<Response, ApiError> {
    connect((&sandboxes, &access), &caller, sandbox, body.read()?.timeout).await
}

/// Connects to a sandbox.
#[utoipa::path(
    post,
    path = "/v2/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<ConnectSandbox>),
    responses(
        (status = 200, description = "The sandbox runs; how to reach it", body = ConnectionInfo),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
pub(crate) async fn connect_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    State(access): State<Arc<SandboxAccess>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: OptionalBody<ConnectSandbox>,
) -> Result<Response, ApiError> {
    connect((&sandboxes, &access), &caller, sandbox, body.read()?.timeout).await
}

async fn connect(
    (sandboxes, access): (&Arc<Sandboxes>, &SandboxAccess),
    caller: &Caller,
    sandbox: SandboxPath,
    timeout: Lifetime<0>,
) -> Result<Response, ApiError> {
    let timeout_s = timeout.within(caller.quota.limits.max_lifetime_s)?;
    // Never shortens: of two clients that connect, the one with the shorter timeout must not end the other's sandbox.
    let row = change(sandboxes, caller, sandbox, timeout_s, Deadline::AtLeast).await?;
    json(StatusCode::OK, &ConnectionInfo::new(row, access))
}

/// Resumes a paused sandbox. A running sandbox can only be connected to.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/resume",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<ResumeSandbox>),
    responses(
        (status = 404, description = "The team has no such sandbox", body = ErrorBody),
        (status = 409, description = "The sandbox is already running", body = ErrorBody),
    )
)]
pub(crate) async fn resume_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: OptionalBody<ResumeSandbox>,
) -> Result<Response, ApiError> {
    body.read()?.timeout.within(caller.quota.limits.max_lifetime_s)?;
    // Sandboxes are never paused, so those of a team are running, starting or stopping.
    match sandboxes.entry_of_team(&id, &caller.team).await {
        Ok(entry) if entry.state() == lifecycle::State::Running => Err(ApiError::running(id)),
        Ok(_) => Err(ApiError::no_sandbox(id)),
        Err(error) => Err(ApiError::absent(error, id)),
    }
}

/// Changes the deadline to `seconds` from now, cut at the maximum lifetime.
async fn change(
    sandboxes: &Arc<Sandboxes>,
    caller: &Caller,
    SandboxPath(id): SandboxPath,
    seconds: u32,
    deadline: fn(i64) -> Deadline,
) -> Result<SandboxRow, ApiError> {
    let entry = sandboxes
        .entry_of_team(&id, &caller.team)
        .await
        .map_err(|error| ApiError::absent(error, &id))?;
    let wanted_us = sandboxes.clock.now_us() + i64::from(seconds) * SECOND_US;
    sandboxes
        .set_deadline(&entry, deadline(wanted_us.min(entry.max_end_us)))
        .await
        .map_err(|error| ApiError::not_changed(error, &id))
}
