//! The documentation endpoint for agents, which anyone may call.
//!
//! Errors of HTTP (type, size, rate) are those of the rest of the API, errors of the protocol are JSON-RPC errors. It is
//! no part of the OpenAPI document: `tools/list` describes it, and its path is configurable. What it returns is public,
//! which is why requests from any web page are answered.

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, header};

use super::body::{is_json, read_limited};
use super::error::ApiError;
use super::state::ApiState;
use crate::mcp::BODY_MAX_BYTES;
use crate::peers::ClientPeer;

/// Answers one request.
pub(super) async fn call(
    State(state): State<ApiState>,
    Extension(client): Extension<ClientPeer>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    if !is_json(&parts.headers) {
        return Err(ApiError::wrong_media_type("application/json"));
    }
    let body = read_limited(&parts.headers, body, BODY_MAX_BYTES).await?;
    let answer = state.mcp.answer(&parts, &body, client).await;
    let (status, body) = answer.map_err(ApiError::too_many_requests)?;
    let Some(body) = body else {
        return Ok(status.into_response());
    };
    let content_type = HeaderValue::from_static("application/json");
    Ok((status, [(header::CONTENT_TYPE, content_type)], body.to_string()).into_response())
}
