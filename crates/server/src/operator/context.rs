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
use crate::listen::forwarding::Forwarding;
use crate::members::NodeMembers;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
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
    /// The way to the other servers; unset where this one works alone.
    pub(crate) forwarding: Arc<OnceLock<Arc<Forwarding>>>,
}

/// Extension of a request that another server has forwarded for the operator: it is answered here, and goes no further.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FromServer;

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

/// The id of a sandbox in a path.
pub(super) fn parse(id: &str) -> Result<SandboxId, ErrorResponse> {
    SandboxId::from_path(id).map_err(|_| ErrorResponse::no_sandbox(id))
}
