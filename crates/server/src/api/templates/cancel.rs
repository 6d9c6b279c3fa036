//! Cancelling a build.

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;

use super::error::NotOwnBuild;
use super::status::BuildPath;
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::state::ApiState;

/// The reason of a build that its owner has cancelled.
const CANCELLED: &str = "the build was cancelled";

/// Cancels a build that waits or is in progress: its sandboxes are ended, and its status is `error`. What its finished
/// steps have made is kept for later builds, as always. This operation is an extension: no SDK sends it.
#[utoipa::path(
    post,
    path = "/templates/{templateID}/builds/{buildID}/cancel",
    tag = "templates",
    params(BuildPath),
    responses(
        (status = 204, description = "The build was cancelled"),
        (status = 409, description = "The build has ended"),
        NotOwnBuild,
    )
)]
pub(crate) async fn cancel_build(
    State(state): State<ApiState>,
    caller: Caller,
    path: BuildPath,
) -> Result<Response, ApiError> {
    let (template, build) = path.find(&caller, &state.builds).await?;
    let build = build.id;
    let now_us = state.clock.now_us();
    if !state
        .store
        .build_cancel(&template.id, &build, CANCELLED, now_us)
        .await?
    {
        let why = format!("build \"{build}\" has ended");
        return Err(ApiError::new(StatusCode::CONFLICT, why));
    }
    tracing::info!(template.id = %template.id, build.id = %build, "cancelled a build");
    // One of another node is cancelled there when it looks at its row the next time.
    state.builds.cancel(&[build]);
    Ok(StatusCode::NO_CONTENT.into_response())
}
