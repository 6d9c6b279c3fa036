//! `GET` and `DELETE /sandboxes/{sandboxID}`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::lifecycle;

use super::{SandboxDetail, SandboxParameter};
use crate::api::auth::{Caller, SandboxPath};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::json;
use crate::lifecycle::Platform;
use crate::live::Stopped;

/// Everything about one sandbox.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}",
    tag = "sandboxes",
    params(SandboxParameter),
    responses(
        (status = 200, description = "The sandbox", body = SandboxDetail),
        (status = 404, description = "The team has no such sandbox", body = ErrorBody),
    )
)]
pub(crate) async fn get_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Response, ApiError> {
    let live = platform.live.of_team(&id, &caller.team);
    if live.is_none_or(|live| live.state() != lifecycle::State::Running) {
        return Err(ApiError::no_sandbox(id));
    }
    match platform.store.sandbox_by_id(&id).await? {
        Some(row) if row.state == lifecycle::State::Running => {
            json(StatusCode::OK, &SandboxDetail::new(row, &platform))
        }
        Some(_) | None => Err(ApiError::no_sandbox(id)),
    }
}

/// Ends a sandbox; 204 once nothing of it runs. Whoever asks while it is being ended waits for the same end.
#[utoipa::path(
    delete,
    path = "/sandboxes/{sandboxID}",
    tag = "sandboxes",
    params(SandboxParameter),
    responses(
        (status = 204, description = "It is gone"),
        (status = 404, description = "The team has no such sandbox", body = ErrorBody),
    )
)]
pub(crate) async fn delete_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, ApiError> {
    let Some(live) = platform.live.of_team(&id, &caller.team) else {
        return Err(ApiError::no_sandbox(id));
    };
    match platform.stop(&live).await {
        Some(Stopped::Gone) => Ok(StatusCode::NO_CONTENT),
        Some(Stopped::Failed) => Err(ApiError::internal()),
        None => Err(ApiError::no_sandbox(id)),
    }
}
