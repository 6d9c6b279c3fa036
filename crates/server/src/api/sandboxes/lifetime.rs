//! Calls that change when a sandbox ends: `timeout` and `refreshes`.

use std::sync::Arc;

use axum::extract::State;
use http::StatusCode;
use model::limits::{REFRESH_FLOOR_S, REFRESH_MAX_S};
use store::sandboxes::SandboxRow;

use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::shape::body;
use crate::api::body::values::Count;
use crate::api::body::{OptionalBody, RequiredBody};
use crate::api::describe::error_sets;
use crate::api::error::ApiError;
use crate::clock::SECOND_US;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::deadline::Deadline;

body! {
    /// A new timeout of a sandbox.
    pub(crate) struct SandboxTimeout {
        /// Seconds from now, cut at the maximum lifetime; 0 ends the sandbox immediately, or pauses it
        /// if it was created with `autoPause`.
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

error_sets! {
    /// The deadline of a sandbox was not changed.
    DeadlineNotChanged {
        404 "The team has no such sandbox, or it is not running";
        409 "The sandbox is being killed, paused or resumed";
        503 "The node of the sandbox is not connected (`error_code` is `node_away`), so nothing was changed; or the database is \
             unavailable, the platform is starting or stopping, or the sandbox is on another node";
    }
}

/// Sets the deadline to exactly `timeout` seconds from now, earlier or later than before.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/timeout",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = SandboxTimeout),
    responses((status = 204, description = "The timeout was set"), DeadlineNotChanged)
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
    responses((status = 204, description = "The sandbox has at least this timeout"), DeadlineNotChanged)
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

/// Changes the deadline to `seconds` from now, cut at the maximum lifetime.
async fn change(
    sandboxes: &Arc<Sandboxes>,
    caller: &Caller,
    SandboxPath(id): SandboxPath,
    seconds: u32,
    deadline: fn(i64) -> Deadline,
) -> Result<SandboxRow, ApiError> {
    let entry = caller.sandbox(sandboxes, &id).await?;
    let wanted_us = sandboxes.clock.now_us() + i64::from(seconds) * SECOND_US;
    sandboxes
        .set_deadline(&entry, deadline(wanted_us.min(entry.max_end_us())))
        .await
        .map_err(|error| ApiError::not_changed(error, &id))
}
