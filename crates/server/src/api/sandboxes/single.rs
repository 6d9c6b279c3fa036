//! `GET` and `DELETE /sandboxes/{sandboxID}`.

use std::sync::Arc;

use axum::extract;
use axum::response::Response;
use http::StatusCode;
use model::lifecycle::State;
use store::sandboxes::SandboxRow;

use super::SandboxDetail;
use super::error::NoSandbox;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::state::SandboxAccess;
use crate::outcome::EndReason;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::entry::StopOutcome;

/// Returns the details of a sandbox.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}",
    tag = "sandboxes",
    params(SandboxPath),
    responses((status = 200, description = "The sandbox", body = SandboxDetail), NoSandbox)
)]
pub(crate) async fn get_sandbox(
    extract::State(sandboxes): extract::State<Arc<Sandboxes>>,
    extract::State(access): extract::State<Arc<SandboxAccess>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Response, ApiError> {
    let row = sandboxes.store().sandbox_by_id(&id).await?;
    let Some(row) = row.filter(|row| row.team_id == caller.team) else {
        return Err(ApiError::no_sandbox(id));
    };
    // For sandboxes of this node, the registry is the first to know their state.
    let state = if sandboxes.is_here(&row) {
        sandboxes
            .tracked
            .registry
            .get(&id)
            .map_or(State::Gone, |entry| entry.state())
    } else {
        row.state
    };
    match state {
        State::Running | State::Pausing | State::Paused | State::Resuming => json(
            StatusCode::OK,
            &SandboxDetail::new(SandboxRow { state, ..row }, &access),
        ),
        State::Creating | State::Stopping | State::Gone => Err(ApiError::no_sandbox(id)),
    }
}

/// Kills a sandbox, and answers 204 once nothing of it runs. Concurrent requests wait for the same termination.
#[utoipa::path(
    delete,
    path = "/sandboxes/{sandboxID}",
    tag = "sandboxes",
    params(SandboxPath),
    responses((status = 204, description = "The sandbox was killed"), NoSandbox)
)]
pub(crate) async fn delete_sandbox(
    extract::State(sandboxes): extract::State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, ApiError> {
    let entry = match caller.sandbox(&sandboxes, &id).await {
        Ok(entry) => entry,
        // It may be paused on a node that is away.
        Err(_) if sandboxes.end_left(&id, Some(&caller.team), EndReason::Killed).await? => {
            return Ok(StatusCode::NO_CONTENT);
        }
        Err(error) => return Err(error),
    };
    match sandboxes.stop(&entry).await {
        Some(StopOutcome::Gone) => Ok(StatusCode::NO_CONTENT),
        Some(StopOutcome::Failed) => Err(ApiError::internal()),
        Some(StopOutcome::Away) => Err(ApiError::kill_away(id)),
        Some(StopOutcome::Unrecorded) => Err(ApiError::kill_unrecorded(id)),
        None => Err(ApiError::no_sandbox(id)),
    }
}
