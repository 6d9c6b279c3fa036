//! Nodes that are processes of their own: tokens to join, who has joined, and forgetting one.
//!
//! These routes answer before the server is ready, because it is not while it has no node.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use model::id::NodeId;
use serde::{Deserialize, Serialize};

use super::context::ErrorResponse;
use crate::chain::Chain;
use crate::listen::Gateway;
use crate::members::{NodeMembers, OperatorNode, TOKEN_LIFETIME, TokenError};

/// A token with which one node can join.
#[derive(Clone, Serialize, Deserialize)]
pub struct OperatorToken {
    /// The token: whoever has it becomes the node.
    pub token: String,
    /// How long it is good for, in seconds.
    pub expires_in_s: u64,
}

impl std::fmt::Debug for OperatorToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperatorToken").finish_non_exhaustive()
    }
}

/// The routes of the operator API of a server whose node is a process of its own: `routes` once the server is ready, and
/// those about nodes always.
pub(crate) fn around(routes: Router, members: Arc<NodeMembers>, gateway: Arc<Gateway>) -> Router {
    let gated = routes.layer(middleware::from_fn_with_state(gateway, until_ready));
    Router::new()
        .route("/nodes", get(list_nodes))
        .route("/nodes/{id}", get(show_node).delete(forget_node))
        .route("/node-tokens", post(make_token))
        .with_state(members)
        .merge(gated)
}

async fn until_ready(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    if gateway.is_ready() {
        return next.run(request).await;
    }
    let why = "the server is not ready: it waits until its node is connected, see `ringfence node list`";
    ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why.to_owned()).into_response()
}

async fn make_token(State(members): State<Arc<NodeMembers>>) -> Result<Json<OperatorToken>, ErrorResponse> {
    match members.make_token().await {
        Ok(token) => Ok(Json(OperatorToken {
            token,
            expires_in_s: TOKEN_LIFETIME.as_secs(),
        })),
        Err(TokenError::Store(error)) => Err(error.into()),
        Err(error @ TokenError::Occupied { .. }) => Err(ErrorResponse(StatusCode::CONFLICT, error.to_string())),
        Err(error @ TokenError::Trust(_)) => Err(ErrorResponse(
            StatusCode::INTERNAL_SERVER_ERROR,
            Chain(&error).to_string(),
        )),
    }
}

async fn list_nodes(State(members): State<Arc<NodeMembers>>) -> Result<Json<Vec<OperatorNode>>, ErrorResponse> {
    Ok(Json(members.list().await?))
}

async fn show_node(
    State(members): State<Arc<NodeMembers>>,
    Path(id): Path<String>,
) -> Result<Json<OperatorNode>, ErrorResponse> {
    let node = members.find(&parse(&id)?).await?;
    Ok(Json(node.ok_or_else(|| no_node(&id))?))
}

async fn forget_node(
    State(members): State<Arc<NodeMembers>>,
    Path(id): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    if members.forget(&parse(&id)?).await? {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(no_node(&id))
}

fn parse(id: &str) -> Result<NodeId, ErrorResponse> {
    id.parse().map_err(|_| no_node(id))
}

fn no_node(id: &str) -> ErrorResponse {
    ErrorResponse(
        StatusCode::NOT_FOUND,
        format!("there is no node {id}, or it was forgotten; see `ringfence node list`"),
    )
}
