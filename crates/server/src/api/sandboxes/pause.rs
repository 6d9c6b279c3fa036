//! `POST /sandboxes/{sandboxID}/pause`, and the calls that resume: `resume` and `connect`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::lifecycle::{self, Kept};
use model::limits::{DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S};
use protocol::node::NodeError;

use super::ConnectionInfo;
use super::create::timed;
use super::error::NoSandbox;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::Lifetime;
use crate::api::body::{OptionalBody, RequiredBody};
use crate::api::describe::error_sets;
use crate::api::error::{ApiError, DRAINING_AFTER_S, SOON_S};
use crate::api::json::json;
use crate::api::state::SandboxAccess;
use crate::outcome::{PauseReason, ResumeReason};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::backoff::TooEarly;
use crate::sandboxes::entry::SandboxEntry;
use crate::sandboxes::pause::{NotMoved, PauseError, PauseRequest};
use crate::sandboxes::resume::{Connected, ResumeRequest};

body! {
    /// Parameters for pausing a sandbox.
    pub(crate) struct PauseSandbox {
        /// `true`: its processes are kept and continue at a resume. `false`: they are ended, and only its files are kept.
        "memory" memory: Nullable<bool> = true;
        /// `true`: it is not paused unless its agent responds.
        "requireHealthyGuest" require_healthy_guest: Nullable<bool> = false;
    }
}

body! {
    /// Parameters for connecting to a sandbox.
    pub(crate) struct ConnectSandboxV1 {
        /// Seconds from now. A later deadline of a running sandbox is kept. A paused sandbox needs at least 1.
        "timeout" timeout: Lifetime<0>;
        /// `true`: the processes of a paused sandbox continue, if they are kept. `false`: they are given up, and it starts
        /// anew with its files.
        "memory" memory: Option<bool> = true;
    }
}

body! {
    /// Parameters for connecting to a sandbox.
    pub(crate) struct ConnectSandbox {
        /// Seconds from now. A later deadline of a running sandbox is kept. A paused sandbox needs at least 1.
        "timeout" timeout: Nullable<Lifetime<0>> = DEFAULT_TIMEOUT_V2_S;
        /// `true`: the processes of a paused sandbox continue, if they are kept. `false`: they are given up, and it starts
        /// anew with its files.
        "memory" memory: Option<bool> = true;
    }
}

body! {
    /// Parameters for resuming a paused sandbox.
    pub(crate) struct ResumeSandbox {
        /// Seconds from now until its deadline.
        "timeout" timeout: Nullable<Lifetime<1>> = DEFAULT_TIMEOUT_V1_S;
        /// Whether it is paused at its deadline, instead of what it was created with.
        "autoPause" auto_pause: Option<bool> => deprecated;
        /// `true`: its processes continue, if they are kept. `false`: they are given up, and it starts anew with its files.
        "memory" memory: Option<bool> = true;
    }
}

/// Pauses a sandbox: its connections are cut, and it has no deadline until it is resumed. Its processes are stopped and
/// kept in the memory of the host, whose restart ends it; or they are ended, and its files are kept on the disk of the host.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/pause",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<PauseSandbox>),
    responses(
        (status = 204, description = "The sandbox is paused"),
        (status = 409, description = "The sandbox is paused already, or a resume has cancelled the pause"),
        (status = 429, description = "The team has as many paused sandboxes as it can have"),
        (status = 501, description = "The host cannot keep the processes of sandboxes"),
        (status = 503, description = "The sandbox could not be paused, or its agent does not respond, and it runs on"),
        NoSandbox,
    )
)]
pub(crate) async fn pause_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: OptionalBody<PauseSandbox>,
) -> Result<StatusCode, ApiError> {
    let body = body.read()?;
    let entry = caller.sandbox(&sandboxes, &id).await?;
    let request = PauseRequest {
        reason: PauseReason::Client,
        keep: if body.memory { Kept::Memory } else { Kept::Filesystem },
        is_limited: true,
    };
    let paused = if body.require_healthy_guest {
        sandboxes.pause_if_healthy(&entry, request).await
    } else {
        sandboxes.pause(&entry, request).await
    };
    paused.map_err(|error| ApiError::not_paused(error, &id))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resumes a paused sandbox. A running sandbox can only be connected to.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/resume",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<ResumeSandbox>),
    responses(
        (status = 201, description = "The sandbox runs; how to reach it", body = ConnectionInfo),
        (status = 409, description = "The sandbox is already running, or being started in another way"),
        (status = 429, description = "The team is at one of its limits"),
        (status = 503, description = "The sandbox could not be resumed and is still paused"),
        NoSandbox,
    )
)]
pub(crate) async fn resume_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    State(access): State<Arc<SandboxAccess>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: OptionalBody<ResumeSandbox>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let timeout_s = body.timeout.within(&caller.quota)?;
    let request = request(&caller, timeout_s, body.auto_pause, body.memory);
    let entry = caller.sandbox_to_resume(&sandboxes, &id).await?;
    let resumed = sandboxes.resume(&entry, request).await;
    let resumed = resumed.map_err(|error| ApiError::not_resumed(error, &id))?;
    answer(resumed, &access)
}

error_sets! {
    /// A client was not connected to a sandbox.
    NotConnected {
        404 "The team has no such sandbox";
        409 "The sandbox is being killed, or being started in another way";
        429 "The sandbox is paused, and the team is at one of its limits";
        503 "The sandbox could not be resumed and is still paused";
    }
}

/// Connects to a sandbox, with a required timeout. A paused sandbox is resumed.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = ConnectSandboxV1),
    responses(
        (status = 200, description = "The sandbox runs; how to reach it", body = ConnectionInfo),
        (status = 201, description = "The sandbox was paused and runs again; how to reach it", body = ConnectionInfo),
        NotConnected,
    )
)]
pub(crate) async fn connect_sandbox_v1(
    State(sandboxes): State<Arc<Sandboxes>>,
    State(access): State<Arc<SandboxAccess>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: RequiredBody<ConnectSandboxV1>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    connect(&sandboxes, &access, &caller, sandbox, body.timeout, body.memory).await
}

/// Connects to a sandbox. A paused sandbox is resumed.
#[utoipa::path(
    post,
    path = "/v2/sandboxes/{sandboxID}/connect",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = Option<ConnectSandbox>),
    responses(
        (status = 200, description = "The sandbox runs; how to reach it", body = ConnectionInfo),
        (status = 201, description = "The sandbox was paused and runs again; how to reach it", body = ConnectionInfo),
        NotConnected,
    )
)]
pub(crate) async fn connect_sandbox(
    State(sandboxes): State<Arc<Sandboxes>>,
    State(access): State<Arc<SandboxAccess>>,
    caller: Caller,
    sandbox: SandboxPath,
    body: OptionalBody<ConnectSandbox>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    connect(&sandboxes, &access, &caller, sandbox, body.timeout, body.memory).await
}

async fn connect(
    sandboxes: &Arc<Sandboxes>,
    access: &SandboxAccess,
    caller: &Caller,
    SandboxPath(id): SandboxPath,
    timeout: Lifetime<0>,
    memory: bool,
) -> Result<Response, ApiError> {
    let timeout_s = timeout.within(&caller.quota)?;
    let entry = caller.sandbox_to_resume(sandboxes, &id).await?;
    if timeout_s == 0 && is_asleep(&entry) {
        let why = format!("sandbox \"{id}\" is paused, and with timeout 0 it would end at once: send at least 1");
        return Err(ApiError::invalid(why));
    }
    let connected = sandboxes
        .connect(&entry, request(caller, timeout_s, None, memory))
        .await;
    let connected = connected.map_err(|error| ApiError::not_connected(error, &id))?;
    answer(connected, access)
}

fn answer(connected: Connected, access: &SandboxAccess) -> Result<Response, ApiError> {
    let status = if connected.was_paused {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    let response = json(status, &ConnectionInfo::new(connected.row, access))?;
    Ok(timed(response, &connected.stages))
}

fn request(caller: &Caller, timeout_s: u32, auto_pause: Option<bool>, memory: bool) -> ResumeRequest {
    ResumeRequest {
        timeout_s,
        max_lifetime_s: caller.quota.limits.max_lifetime_s,
        auto_pause,
        discards_processes: !memory,
        reason: ResumeReason::Client,
    }
}

fn is_asleep(entry: &SandboxEntry) -> bool {
    use lifecycle::State::{Paused, Pausing, Resuming};
    matches!(entry.state(), Pausing | Paused | Resuming)
}

impl ApiError {
    /// The response when a sandbox was not paused.
    fn not_paused(error: PauseError, id: impl std::fmt::Display) -> Self {
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
                    .retry_after(SOON_S)
            }
            PauseError::Node(NodeError::Unreachable(_)) => {
                let why = format!(
                    "the node of sandbox \"{id}\" did not answer: it is paused or runs on, as its state says once the node answers \
                     again: try again"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error)
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
            PauseError::Running => {
                let why = format!("sandbox \"{id}\" is already running");
                Self::new(StatusCode::CONFLICT, why)
            }
            PauseError::Paused | PauseError::Stopping | PauseError::Gone => Self::no_sandbox(id),
            PauseError::Node(NodeError::Refused(refusal)) => {
                let why = format!(
                    "sandbox \"{id}\" is still paused: {refusal}: start it anew from its files with `\"memory\": false`"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
            }
            PauseError::Node(NodeError::Busy { owner_limit }) => Self::restores_busy(owner_limit),
            PauseError::NotTold(_) => Self::not_told(id).caused_by(error),
            PauseError::Lost(not_moved) => Self::node_lost_sandbox(not_moved, id).caused_by(error),
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

    /// 503: the node of a paused sandbox is connected and has nothing of it, and its copy stays in the blob store.
    fn node_lost_sandbox(not_moved: NotMoved, id: impl std::fmt::Display) -> Self {
        let why = format!(
            "sandbox \"{id}\" is still paused: its node is connected and has lost the sandbox, and {not_moved}"
        );
        let retry_after_s = match not_moved {
            // Its operator has to find out why.
            NotMoved::NoCopy => None,
            NotMoved::Draining => Some(DRAINING_AFTER_S),
            NotMoved::Changed | NotMoved::NoNode | NotMoved::NoRoom => Some(SOON_S),
        };
        let error = |why| Self::new(StatusCode::SERVICE_UNAVAILABLE, why).code("node_lost_sandbox");
        match retry_after_s {
            Some(seconds) => error(format!("{why}: try again later")).retry_after(seconds),
            None => error(why),
        }
    }

    /// The response when a client could not connect to a sandbox.
    fn not_connected(error: PauseError, id: impl std::fmt::Display) -> Self {
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
            PauseError::Stale => Self::unsettled(),
            PauseError::OverQuota(over) => over.into(),
            PauseError::NoCapacity(_) => Self::no_capacity(SOON_S).caused_by(error),
            PauseError::Starting => {
                let why = "the sandbox is being started already, and may keep its processes: try again in a moment";
                Self::new(StatusCode::CONFLICT, why)
                    .code("sandbox_start_in_flight")
                    .retry_after(SOON_S)
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

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse as _;
    use http::header;

    use super::*;

    /// What a client is told is not that the node is away.
    #[tokio::test]
    async fn a_node_that_has_lost_a_sandbox_is_connected() {
        for (not_moved, why, retry_after) in [
            (NotMoved::NoCopy, "the blob store has no usable copy", None),
            (
                NotMoved::Changed,
                "the sandbox was changed meanwhile: try again later",
                Some("1"),
            ),
            (
                NotMoved::NoNode,
                "no node is connected that can use the copy: try again later",
                Some("1"),
            ),
            (
                NotMoved::Draining,
                "every node that can use the copy drains: try again later",
                Some("10"),
            ),
            (
                NotMoved::NoRoom,
                "no node that can use the copy has room: try again later",
                Some("1"),
            ),
        ] {
            let response = ApiError::not_resumed(PauseError::Lost(not_moved), "x").into_response();
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            let told = response.headers().get(header::RETRY_AFTER);
            assert_eq!(told.map(|told| told.to_str().unwrap()), retry_after, "{not_moved:?}");
            let body = axum::body::to_bytes(response.into_body(), 4096).await.unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error_code"], "node_lost_sandbox");
            let message =
                format!("sandbox \"x\" is still paused: its node is connected and has lost the sandbox, and {why}");
            assert_eq!(body["message"], message);
        }
    }
}
