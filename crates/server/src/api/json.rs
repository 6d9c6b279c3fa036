//! JSON responses.

use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

use super::error::ApiError;

/// A JSON response.
pub(super) fn json<T: Serialize>(status: StatusCode, body: &T) -> Result<Response, ApiError> {
    let bytes = serde_json::to_vec(body).map_err(ApiError::failed)?;
    let content_type = HeaderValue::from_static("application/json; charset=utf-8");
    Ok((status, [(header::CONTENT_TYPE, content_type)], bytes).into_response())
}
