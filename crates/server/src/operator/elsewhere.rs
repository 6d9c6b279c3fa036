//! Sandboxes on nodes of other servers of the service, and on nodes that no server has: where they are, and who can end them.
//!
//! Any server of a service lists all sandboxes, from the rows, and has the server of a node kill what is on it. What is streamed,
//! such as a shell, is only at the server of the node: everywhere else, the error names its host. Templates are read as files from
//! any server whose nodes have their layers.

use std::collections::HashMap;

use axum::body::{Body, to_bytes};
use axum::response::IntoResponse as _;
use http::{Response, StatusCode, Uri};
use model::id::{NodeId, SandboxId};
use store::error::StoreError;
use store::servers::ServerPlace;

use super::context::{ErrorResponse, Operator, OperatorError};
use crate::listen::forwarding::Forwarded;
use crate::outcome::EndReason;
use crate::sandboxes::elsewhere::AbsentError;

/// How often a sandbox is looked for that has left the server which was asked to kill it.
const ATTEMPTS: usize = 3;
/// Longest answer of another server that is read, in bytes.
const ANSWER_MAX_BYTES: usize = 64 << 10;

/// The nodes that have joined, with where they are; none where the node is a part of the server.
pub(super) struct NodeLocations(HashMap<NodeId, NodeLocation>);

/// Where a node is.
pub(super) struct NodeLocation {
    /// The name of the node's host.
    pub(super) name: String,
    pub(super) server: ServedBy,
}

/// The server that serves a node.
pub(super) enum ServedBy {
    /// This one, which the node is connected to.
    This,
    /// Another one, as the leases say.
    Other(ServerPlace),
    /// None: the node is away.
    None,
}

impl NodeLocations {
    pub(super) async fn read(operator: &Operator) -> Result<Self, StoreError> {
        let Some(members) = operator.members.get() else {
            return Ok(Self(HashMap::new()));
        };
        let sandboxes = &operator.sandboxes;
        let now_us = operator.store.lease_time_us(sandboxes.clock.now_us()).await?;
        let listed = operator.store.node_place_list(now_us).await?;
        let placed = listed.into_iter().map(|node| {
            let is_connected = || members.hub().connected(&node.id).is_some();
            let server = match node.server {
                _ if sandboxes.nodes.is_served(&node.id) && is_connected() => ServedBy::This,
                Some(server) if server.id != sandboxes.home => ServedBy::Other(server),
                Some(_) | None => ServedBy::None,
            };
            let name = node.name;
            (node.id, NodeLocation { name, server })
        });
        Ok(Self(placed.collect()))
    }

    pub(super) fn of(&self, node: Option<&NodeId>) -> Option<&NodeLocation> {
        self.0.get(node?)
    }
}

/// The host of a server, as an operator knows it.
fn host_of(server: &ServerPlace) -> String {
    match &server.address {
        Some(address) => format!("{} ({address})", server.name),
        None => server.name.clone(),
    }
}

/// The error for a sandbox that is not in the registry.
pub(super) async fn absent(operator: &Operator, id: &SandboxId) -> Result<ErrorResponse, StoreError> {
    let Some(row) = operator.store.sandbox_by_id(id).await? else {
        return Ok(ErrorResponse::no_sandbox(id.as_str()));
    };
    let why = match operator.sandboxes.absent(&row).await? {
        AbsentError::Away { node } | AbsentError::Elsewhere { node } => {
            match NodeLocations::read(operator).await?.of(row.node_id.as_ref()) {
                Some(NodeLocation {
                    name,
                    server: ServedBy::Other(server),
                }) => format!(
                    "sandbox {id} is on node {name} of the server on {}: run the command on the host of that server",
                    host_of(server)
                ),
                Some(NodeLocation { name, .. }) => {
                    format!("sandbox {id} is on node {name}, which is not connected: see `ringfence node list`")
                }
                // A platform of its own, which has the name of its host.
                None => format!(
                    "sandbox {id} is on host {node}, on which another platform works with this database: run the command there"
                ),
            }
        }
        AbsentError::Unknown => return Ok(ErrorResponse::no_sandbox(id.as_str())),
        AbsentError::Store(error) => return Err(error),
    };
    Ok(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))
}

/// Has the server that has the node of a sandbox kill it.
pub(super) async fn kill(operator: &Operator, id: &SandboxId) -> Result<StatusCode, ErrorResponse> {
    let Some(forwarding) = operator.forwarding.get() else {
        return end_left(operator, id).await;
    };
    for _ in 0..ATTEMPTS {
        let row = operator.store.sandbox_by_id(id).await?;
        let row = row.ok_or_else(|| ErrorResponse::no_sandbox(id.as_str()))?;
        match forwarding.kill_for_operator(&row).await {
            None => return end_left(operator, id).await,
            Some(Forwarded::Answered(response)) => {
                let status = response.status().as_u16();
                tracing::info!(sandbox.id = %id, team.id = %row.team_id, status, "the operator has another server kill a sandbox");
                return answered(response).await;
            }
            // Its node has gone to another server.
            Some(Forwarded::NotThere(_)) => {}
            Some(Forwarded::Unsent(_)) => return Err(unanswered(operator, id, "so it was not killed").await?),
            Some(Forwarded::Lost) => {
                return Err(unanswered(operator, id, "so whether it is killed is not known").await?);
            }
        }
    }
    let why = format!("sandbox {id} is being moved from one server to another: run the command again in a moment");
    Err(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))
}

/// What another server says of a template that this one cannot read, because its layers are on nodes of others: the answer of the first
/// that can. If none can, it is why this one cannot, or, if it has no node, why another one cannot.
pub(super) async fn read(operator: &Operator, of: &Uri, refused: ErrorResponse) -> Response<Body> {
    let Some(forwarding) = operator.forwarding.get() else {
        return refused.into_response();
    };
    let mut told = None;
    for (_, link) in forwarding.others().best_first() {
        if let Forwarded::Answered(response) = forwarding.read_for_operator(of, &link).await {
            if response.status().is_success() {
                return response;
            }
            told.get_or_insert(response);
        }
    }
    told.filter(|_| !operator.sandboxes.nodes.has_any())
        .unwrap_or_else(|| refused.into_response())
}

/// Ends a sandbox that is at no server: one that is paused, with a copy in the blob store.
async fn end_left(operator: &Operator, id: &SandboxId) -> Result<StatusCode, ErrorResponse> {
    if !operator.sandboxes.end_left(id, None, EndReason::Operator).await? {
        return Err(absent(operator, id).await?);
    }
    tracing::info!(sandbox.id = %id, "the operator has killed a paused sandbox whose node is away");
    Ok(StatusCode::NO_CONTENT)
}

/// What another server has answered to a request to kill a sandbox.
async fn answered(response: Response<Body>) -> Result<StatusCode, ErrorResponse> {
    let status = response.status();
    if status.is_success() {
        return Ok(StatusCode::NO_CONTENT);
    }
    let body = to_bytes(response.into_body(), ANSWER_MAX_BYTES)
        .await
        .unwrap_or_default();
    let told = serde_json::from_slice(&body).map(|OperatorError { message }| message);
    let why = told.unwrap_or_else(|_| format!("the server that has the sandbox has answered with status {status}"));
    Err(ErrorResponse(status, why))
}

/// The error for a sandbox whose server does not answer.
async fn unanswered(operator: &Operator, id: &SandboxId, outcome: &str) -> Result<ErrorResponse, StoreError> {
    let Some(row) = operator.store.sandbox_by_id(id).await? else {
        return Ok(ErrorResponse::no_sandbox(id.as_str()));
    };
    let locations = NodeLocations::read(operator).await?;
    let of = match locations.of(row.node_id.as_ref()) {
        Some(NodeLocation {
            name,
            server: ServedBy::Other(server),
        }) => format!("node {name} of the server on {}, which", host_of(server)),
        Some(NodeLocation { name, .. }) => format!("node {name}, whose server"),
        None => "a node whose server".to_owned(),
    };
    let why = format!(
        "sandbox {id} is on {of} does not answer, {outcome}: run the command again once that server answers, or another one has \
         the node, within about half a minute where it is connected to several (`ringfence node list`)"
    );
    Ok(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))
}
