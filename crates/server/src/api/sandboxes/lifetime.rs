//! Calls that change when a sandbox ends: `timeout`, `refreshes` and `connect`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::limits::{DEFAULT_TIMEOUT_V2_S, REFRESH_FLOOR_S, REFRESH_MAX_S};
use store::sandboxes::SandboxRow;

use super::ConnectionInfo;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::{Fields, Null, OptionalBody, RequiredBody};
use crate::api::error::ApiError;
use crate::api::json;
use crate::clock::SECOND_US;
use crate::lifecycle::{Deadline, Platform};

/// Sets the end to `timeout` seconds from now exactly, earlier or later.
pub(crate) async fn set_sandbox_timeout(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: RequiredBody,
) -> Result<StatusCode, ApiError> {
    let fields = body.fields();
    let timeout_s = fields
        .count("timeout", Null::Refused)?
        .ok_or_else(|| fields.missing("timeout"))?;
    change(&platform, &caller, sandbox, timeout_s, Deadline::Exactly).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a sandbox live for `duration` seconds from now at least.
pub(crate) async fn refresh_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: OptionalBody,
) -> Result<StatusCode, ApiError> {
    let fields = body.fields();
    let duration_s = fields.count("duration", Null::Refused)?.unwrap_or(0);
    if duration_s > REFRESH_MAX_S {
        return Err(fields.fault("duration", &format!("number must be at most {REFRESH_MAX_S}")));
    }
    let duration_s = duration_s.max(REFRESH_FLOOR_S);
    change(&platform, &caller, sandbox, duration_s, Deadline::AtLeast).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Connects with a timeout that must be given.
pub(crate) async fn connect_sandbox_v1(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: RequiredBody,
) -> Result<Response, ApiError> {
    let fields = body.fields();
    let timeout_s = fields
        .count("timeout", Null::Refused)?
        .ok_or_else(|| fields.missing("timeout"))?;
    connect(&platform, &caller, sandbox, timeout_s, &fields).await
}

/// Connects.
pub(crate) async fn connect_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: OptionalBody,
) -> Result<Response, ApiError> {
    let fields = body.fields();
    let timeout_s = fields.count("timeout", Null::Absent)?.unwrap_or(DEFAULT_TIMEOUT_V2_S);
    connect(&platform, &caller, sandbox, timeout_s, &fields).await
}

async fn connect(
    platform: &Arc<Platform>,
    caller: &Caller,
    sandbox: SandboxPath,
    timeout_s: u32,
    fields: &Fields<'_>,
) -> Result<Response, ApiError> {
    // Says how to resume, and this sandbox runs.
    fields.flag("memory", Null::Refused)?;
    super::create::check_longest(timeout_s, caller)?;
    // Never shortens: of two clients that connect, the one that needs less must not end the other's sandbox.
    let row = change(platform, caller, sandbox, timeout_s, Deadline::AtLeast).await?;
    json(StatusCode::OK, &ConnectionInfo::new(row, platform))
}

/// Moves the end to `seconds` from now, cut at the sandbox's longest life.
async fn change(
    platform: &Arc<Platform>,
    caller: &Caller,
    SandboxPath(id): SandboxPath,
    seconds: u32,
    deadline: fn(i64) -> Deadline,
) -> Result<SandboxRow, ApiError> {
    let Some(live) = platform.live.of_team(&id, &caller.team) else {
        return Err(ApiError::no_sandbox(id));
    };
    let wanted_us = platform.settings.clock.now_us() + i64::from(seconds) * SECOND_US;
    platform
        .set_deadline(&live, deadline(wanted_us.min(live.max_end_us)))
        .await
        .map_err(|error| ApiError::not_extended(error, &id))
}
