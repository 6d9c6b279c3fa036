//! What all routes of the operator API use: the services, and errors.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use axum::Json;
use axum::extract::FromRef;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use model::id::{SandboxId, TeamId};
use serde::{Deserialize, Serialize};
use store::Store;
use store::error::StoreError;

use super::metrics::MetricSources;
use super::streams::Streams;
use crate::builds::Builds;
use crate::chain::Chain;
use crate::dashboard::Dashboard;
use crate::members::NodeMembers;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::elsewhere::AbsentError;
use crate::sandboxes::registry::Registry;

/// The body of an error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorError {
    /// What went wrong.
    pub message: String,
}

/// An error response.
pub(super) struct ErrorResponse(pub(super) StatusCode, pub(super) String);

impl ErrorResponse {
    pub(super) fn no_sandbox(id: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("there is no sandbox {id}"))
    }
}

impl From<StoreError> for ErrorResponse {
    fn from(error: StoreError) -> Self {
        // Only the operator can fix it, so the response has the complete error chain.
        Self(StatusCode::SERVICE_UNAVAILABLE, Chain(&error).to_string())
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        (self.0, Json(OperatorError { message: self.1 })).into_response()
    }
}

/// The services of the operator API.
#[derive(Debug, Clone)]
pub(crate) struct Operator {
    pub(crate) store: Store,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) builds: Arc<Builds>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) records: Arc<Records>,
    pub(crate) dashboard: Arc<Dashboard>,
    pub(crate) streams: Streams,
    pub(crate) metrics: MetricSources,
    /// The nodes that may join; unset where the node is a part of the server.
    pub(crate) members: Arc<OnceLock<Arc<NodeMembers>>>,
}

impl FromRef<Operator> for MetricSources {
    fn from_ref(operator: &Operator) -> Self {
        operator.metrics.clone()
    }
}

/// The names of all teams.
pub(super) async fn team_names(operator: &Operator) -> Result<HashMap<TeamId, String>, StoreError> {
    let teams = operator.store.team_list().await?;
    Ok(teams.into_iter().map(|team| (team.id, team.name)).collect())
}

/// The error for a sandbox that is not in the registry.
pub(super) async fn absent(operator: &Operator, id: &SandboxId) -> Result<ErrorResponse, StoreError> {
    let row = operator.store.sandbox_by_id(id).await?;
    let why = match &row {
        Some(row) => operator.sandboxes.absent(row).await?,
        None => AbsentError::Unknown,
    };
    Ok(match why {
        AbsentError::Away { node } => ErrorResponse(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("sandbox {id} is on node {node}, which is not connected: see `ringfence node list`"),
        ),
        AbsentError::Elsewhere { node } => ErrorResponse(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("sandbox {id} is on node {node}: use the command there"),
        ),
        AbsentError::Unknown => ErrorResponse::no_sandbox(id.as_str()),
        AbsentError::Store(error) => error.into(),
    })
}

/// The id of a sandbox in a path.
pub(super) fn parse(id: &str) -> Result<SandboxId, ErrorResponse> {
    SandboxId::from_path(id).map_err(|_| ErrorResponse::no_sandbox(id))
}
