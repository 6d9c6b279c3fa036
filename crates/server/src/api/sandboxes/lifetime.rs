//! Calls that change when a sandbox ends: `timeout`, `refreshes`, `connect` and `resume`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::lifecycle;
use model::limits::{DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S, REFRESH_FLOOR_S, REFRESH_MAX_S};
use store::sandboxes::SandboxRow;
use utoipa::ToSchema;

use super::{ConnectionInfo, SandboxParameter};
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::{Fields, Null, OptionalBody, RequiredBody};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::json;
use crate::clock::SECOND_US;
use crate::lifecycle::{Deadline, Platform};

/// When a sandbox is to end.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct SandboxTimeout {
    /// Seconds from now. Cut where the sandbox would outlive its longest life; 0 ends it at once.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    timeout: i32,
}

/// How long a sandbox is to live at least.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct SandboxRefresh {
    /// Seconds from now; less than 15 counts as 15.
    #[schema(minimum = 0, maximum = 3600, default = 15, required = false)]
    duration: i32,
}

/// How long a sandbox that is connected to is to live at least.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct ConnectSandboxV1 {
    /// Seconds from now. Of a sandbox that runs, an end that is later stays.
    #[schema(minimum = 0, maximum = 86_400)]
    timeout: i32,
    /// Whether a paused sandbox gets its memory back.
    #[schema(required = false)]
    memory: bool,
}

/// How long a sandbox that is connected to is to live at least.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct ConnectSandbox {
    /// Seconds from now. Of a sandbox that runs, an end that is later stays.
    #[schema(minimum = 0, maximum = 86_400, default = 300)]
    timeout: Option<i32>,
    /// Whether a paused sandbox gets its memory back.
    #[schema(required = false)]
    memory: bool,
}

/// How a paused sandbox is to go on.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct ResumeSandbox {
    /// Seconds from now until it ends.
    #[schema(minimum = 1, maximum = 86_400, default = 15)]
    timeout: Option<i32>,
    /// Whether it is paused again at its end.
    #[schema(required = false)]
    #[deprecated]
    auto_pause: bool,
    /// Whether it gets its memory back.
    #[schema(required = false)]
    memory: bool,
}

/// Sets the end to `timeout` seconds from now exactly, earlier or later.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/timeout",
    tag = "sandboxes",
    params(SandboxParameter),
    request_body(content = SandboxTimeout),
    responses(
        (status = 204, description = "It is set"),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
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
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/refreshes",
    tag = "sandboxes",
    params(SandboxParameter),
    request_body(content = Option<SandboxRefresh>),
    responses(
        (status = 204, description = "It lives that long at least"),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
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
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxParameter),
    request_body(content = ConnectSandboxV1),
    responses(
        (status = 200, description = "It runs, and this is how to reach it", body = ConnectionInfo),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
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
#[utoipa::path(
    post,
    path = "/v2/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxParameter),
    request_body(content = Option<ConnectSandbox>),
    responses(
        (status = 200, description = "It runs, and this is how to reach it", body = ConnectionInfo),
        (status = 404, description = "The team has no such sandbox, or it is not running", body = ErrorBody),
        (status = 409, description = "The sandbox is being killed", body = ErrorBody),
    )
)]
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

/// Resumes a paused sandbox. One that runs is not to be resumed, only to be connected to.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/resume",
    tag = "sandboxes",
    params(SandboxParameter),
    request_body(content = Option<ResumeSandbox>),
    responses(
        (status = 404, description = "The team has no such sandbox", body = ErrorBody),
        (status = 409, description = "It runs already", body = ErrorBody),
    )
)]
pub(crate) async fn resume_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: OptionalBody,
) -> Result<Response, ApiError> {
    let fields = body.fields();
    let timeout_s = fields.count("timeout", Null::Absent)?.unwrap_or(DEFAULT_TIMEOUT_V1_S);
    fields.flag("autoPause", Null::Refused)?;
    fields.flag("memory", Null::Refused)?;
    super::create::check_timeout(timeout_s, &caller)?;
    // Nothing is ever paused, so what a team has runs, or is on its way to or from that.
    match platform.live.of_team(&id, &caller.team) {
        Some(live) if live.state() == lifecycle::State::Running => Err(ApiError::running(id)),
        Some(_) | None => Err(ApiError::no_sandbox(id)),
    }
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
