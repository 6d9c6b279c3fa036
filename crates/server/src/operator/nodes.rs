//! The nodes of the server: a list of them, and, where they are processes of their own, tokens to join, draining one and
//! forgetting one.

use std::sync::Arc;

use axum::extract::{FromRef, Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http::StatusCode;
use model::id::NodeId;
use serde::{Deserialize, Serialize};

use super::context::{ErrorResponse, Operator};
use crate::chain::Chain;
use crate::members::{DrainError, NodeMembers, OperatorNode, TOKEN_LIFETIME, TokenError};
use crate::node_pauses::{self, NodePauseError};
use crate::sandboxes::Sandboxes;

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

/// The request to drain a node, or to end that.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct OperatorNodeChange {
    /// What the node is from now on.
    pub status: OperatorNodeStatus,
}

/// Whether a node gets new sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperatorNodeStatus {
    /// The node gets new sandboxes.
    Ready,
    /// The node gets none, and keeps those that it has.
    Draining,
}

/// What became of the sandboxes of a node that were paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorPaused {
    /// How many are kept on disk since.
    pub paused: u64,
    /// How many could not be kept; the log says why.
    pub failed: u64,
}

/// What is known of nodes.
#[derive(Clone)]
pub(crate) struct Known {
    members: Arc<NodeMembers>,
    sandboxes: Arc<Sandboxes>,
}

impl FromRef<Known> for Arc<NodeMembers> {
    fn from_ref(known: &Known) -> Self {
        Arc::clone(&known.members)
    }
}

/// The routes of the operator API of a server whose nodes are processes of their own: `routes`, and those about nodes.
pub(crate) fn around(routes: Router, members: Arc<NodeMembers>, sandboxes: Arc<Sandboxes>) -> Router {
    Router::new()
        .route("/nodes/{id}", get(show_node).post(change_node).delete(forget_node))
        .route("/nodes/{id}/pause", post(pause_node))
        .route("/node-tokens", post(make_token))
        .with_state(Known { members, sandboxes })
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
    let node = known.members.find(&parse(&id)?, &known.sandboxes.nodes).await?;
    Ok(Json(node.ok_or_else(|| no_node(&id))?))
}

/// Drains a node, or ends that, and returns it as it is then.
async fn change_node(
    State(known): State<Known>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<Json<OperatorNode>, ErrorResponse> {
    let change: OperatorNodeChange = serde_json::from_slice(&body).map_err(|error| {
        let why = format!("the body is not a status of a node, {{\"status\": \"draining\"}} or \"ready\": {error}");
        ErrorResponse(StatusCode::BAD_REQUEST, why)
    })?;
    let node = parse(&id)?;
    match change_to(&known, node, change.status).await {
        Some(Ok(())) => show_node(State(known), Path(id)).await,
        Some(Err(DrainError::Store(error))) => Err(error.into()),
        Some(Err(DrainError::Unknown)) => Err(no_node(&id)),
        Some(Err(DrainError::Unconfirmed)) => Err(ErrorResponse(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "node {id} is to drain, and the server that has it has not said yet that it knows: sandboxes may be created \
                 there until it does; run the command again to wait for it"
            ),
        )),
        None => Err(stopping()),
    }
}

/// Drains a node, or ends that; none if the task of that was cut.
async fn change_to(known: &Known, id: NodeId, status: OperatorNodeStatus) -> Option<Result<(), DrainError>> {
    let (members, nodes) = (Arc::clone(&known.members), Arc::clone(&known.sandboxes.nodes));
    let node = id.clone();
    // On a task, so that a request that is cut leaves no node that does not know what the database says.
    let changed = known.sandboxes.on_own_task(async move {
        match status {
            OperatorNodeStatus::Draining => members.drain(&node, &nodes).await.map(Some),
            OperatorNodeStatus::Ready => members.undrain(&node, &nodes).await.map(|()| None),
        }
    });
    match changed.await? {
        Ok(Some(since_us)) => Some(known.members.until_known(&id, since_us, &known.sandboxes.nodes).await),
        Ok(None) => Some(Ok(())),
        Err(error) => Some(Err(error)),
    }
}

/// Keeps on disk whatever a draining node has, through the server that it is connected to.
async fn pause_node(State(known): State<Known>, Path(id): Path<String>) -> Result<Json<OperatorPaused>, ErrorResponse> {
    let Some(node) = known.sandboxes.nodes.find(&parse(&id)?) else {
        let (store, clock) = (known.members.store(), &known.sandboxes.clock);
        let (paused, failed) = node_pauses::ask(store, clock, &parse(&id)?)
            .await
            .map_err(|error| match error {
                NodePauseError::Store(error) => error.into(),
                NodePauseError::NotDraining | NodePauseError::Away => ErrorResponse(
                    StatusCode::CONFLICT,
                    format!("node {id}: {error}; see `ringfence node list`"),
                ),
                NodePauseError::NotBegun | NodePauseError::Unknown => {
                    ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, format!("node {id}: {error}"))
                }
            })?;
        return Ok(Json(OperatorPaused { paused, failed }));
    };
    if !node.is_draining() {
        return Err(ErrorResponse(
            StatusCode::CONFLICT,
            format!("node {id} does not drain any more, so its sandboxes run on"),
        ));
    }
    let sandboxes = Arc::clone(&known.sandboxes);
    let paused = known.sandboxes.on_own_task(async move {
        let (paused, failed) = sandboxes.keep_all_of(&node).await;
        (paused, failed, node.is_draining())
    });
    let (paused, failed, is_draining) = paused.await.ok_or_else(stopping)?;
    if !is_draining {
        return Err(ErrorResponse(
            StatusCode::CONFLICT,
            format!("node {id} does not drain any more: {paused} of its sandboxes were paused, and the others run on"),
        ));
    }
    tracing::info!(node.id = id, paused, failed, "paused what was left on a draining node");
    Ok(Json(OperatorPaused {
        paused: paused as u64,
        failed: failed as u64,
    }))
}

fn stopping() -> ErrorResponse {
    let why = "the server is being stopped; try again".to_owned();
    ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why)
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
