//! Codes by which the operator signs in to the dashboard.

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::context::{ErrorResponse, Operator};

/// A code that opens one session of the dashboard.
#[derive(Clone, Serialize, Deserialize)]
pub struct OperatorCode {
    /// The code: whoever has it can sign in.
    pub code: String,
    /// How long it is good for, in seconds.
    pub expires_in_s: u64,
}

impl std::fmt::Debug for OperatorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperatorCode").finish_non_exhaustive()
    }
}

/// Makes a code.
pub(super) async fn issue_code(State(operator): State<Operator>) -> Result<Json<OperatorCode>, ErrorResponse> {
    match operator.dashboard.operator_code() {
        Some(Ok((code, lifetime))) => Ok(Json(OperatorCode {
            code,
            expires_in_s: lifetime.as_secs(),
        })),
        Some(Err(error)) => Err(ErrorResponse(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
        None => Err(ErrorResponse(
            StatusCode::CONFLICT,
            "the dashboard is turned off: set dashboard.enabled = true and restart the platform".to_owned(),
        )),
    }
}
