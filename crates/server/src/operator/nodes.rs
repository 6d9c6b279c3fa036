//! The nodes of the server: a list of them, and, where they are processes of their own, tokens to join and forgetting one.

use std::sync::Arc;

use axum::extract::{FromRef, Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use model::id::NodeId;
use serde::{Deserialize, Serialize};

use super::context::{ErrorResponse, Operator};
use crate::chain::Chain;
use crate::members::{NodeMembers, OperatorNode, TOKEN_LIFETIME, TokenError};
use crate::nodes::Nodes;

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

/// What is known of nodes.
#[derive(Clone)]
pub(crate) struct Known {
    members: Arc<NodeMembers>,
    nodes: Arc<Nodes>,
}

impl FromRef<Known> for Arc<NodeMembers> {
    fn from_ref(known: &Known) -> Self {
        Arc::clone(&known.members)
    }
}

/// The routes of the operator API of a server whose nodes are processes of their own: `routes`, and those about nodes.
pub(crate) fn around(routes: Router, members: Arc<NodeMembers>, nodes: Arc<Nodes>) -> Router {
    Router::new()
        .route("/nodes/{id}", get(show_node).delete(forget_node))
        .route("/node-tokens", post(make_token))
        .with_state(Known { members, nodes })
        .merge(routes)
}

async fn make_token(State(members): State<Arc<NodeMembers>>) -> Result<Json<OperatorToken>, ErrorResponse> {
    match members.make_token().await {
        Ok(token) => Ok(Json(OperatorToken {
            token,
            expires_in_s: TOKEN_LIFETIME.as_secs(),
        })),
        Err(TokenError::Store(error)) => Err(error.into()),
        Err(error @ TokenError::Trust(_)) => Err(ErrorResponse(
            StatusCode::INTERNAL_SERVER_ERROR,
            Chain(&error).to_string(),
        )),
    }
}

/// The nodes that have joined, or the one that is a part of the server.
pub(super) async fn list_nodes(State(operator): State<Operator>) -> Result<Json<Vec<OperatorNode>>, ErrorResponse> {
    let nodes = &operator.sandboxes.nodes;
    if let Some(members) = operator.members.get() {
        return Ok(Json(members.list(nodes).await?));
    }
    let mut shown = Vec::new();
    for node in nodes.all() {
        shown.push(OperatorNode::of_server(&node).await);
    }
    Ok(Json(shown))
}

async fn show_node(State(known): State<Known>, Path(id): Path<String>) -> Result<Json<OperatorNode>, ErrorResponse> {
    let node = known.members.find(&parse(&id)?, &known.nodes).await?;
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
