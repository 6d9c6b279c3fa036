//! The operator API: the sandboxes of all teams on all nodes, served as HTTP on a Unix socket in the data directory.
//!
//! The REST API shows a team its own sandboxes. The operator has to see all of them: which one uses up the machine,
//! which team owns it, what its log says, and to be able to kill it. The socket needs no key: it is in a directory that
//! only the platform's own user can enter, and the user of the peer is checked as well. Responses contain no secrets of
//! a sandbox (no token, no metadata, no environment), so they may be pasted into a ticket; the one exception is [`access`],
//! whose response a command keeps to itself.

mod accept;
mod access;
mod backup;
mod context;
mod elsewhere;
pub(crate) mod metrics;
pub(crate) mod nodes;
mod sign_in;
mod socket;
mod streams;
mod templates;

use std::collections::{BTreeMap, HashMap};

use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http::StatusCode;
use model::id::TeamId;
use model::lifecycle;
use model::log::Level;
use protocol::node::NodeError;
use serde::{Deserialize, Serialize};
use store::records::{LogOrder, LogQuery, LogRow};
use store::sandboxes::SandboxRow;

pub use self::access::{OperatorAccess, STREAM_PROTOCOL};
pub use self::context::OperatorError;
use self::context::{ErrorResponse, parse, team_names};
pub(crate) use self::context::{FromServer, Operator};
use self::elsewhere::{NodeLocation, NodeLocations, ServedBy};
pub use self::nodes::{OperatorNodeChange, OperatorNodeStatus, OperatorPaused, OperatorToken};
pub use self::sign_in::OperatorCode;
pub use self::socket::OperatorSocket;
pub(crate) use self::socket::serve;
pub(crate) use self::streams::Streams;
pub use self::templates::{OperatorCollection, OperatorLayer, OperatorSpace, OperatorTemplate};
use crate::builds::BuildSandbox;
use crate::chain::Chain;
use crate::clock::rfc3339;
pub use crate::members::{OperatorLeft, OperatorNode};
use crate::outcome::EndReason;
use crate::pool::{AGE_MAX_US, PooledSandbox};
use crate::records::Sample;
use crate::sandboxes::entry::StopOutcome;

/// Default maximum number of log entries in a response.
const LOG_LIMIT_DEFAULT: u32 = 1000;
/// Largest maximum number of log entries in a response.
const LOG_LIMIT_MAX: u32 = 10_000;

/// A sandbox in the operator API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorSandbox {
    /// Id of the sandbox.
    pub id: String,
    /// Name of the owning team; empty in the warm pool.
    pub team: String,
    /// The template that the sandbox was created from: its alias, or else its id.
    pub template: String,
    /// `creating`, `running`, `pausing`, `paused`, `resuming`, `stopping`, or `building` where a step of a build runs in it; `starting` or `pooled` in the
    /// warm pool.
    pub state: String,
    /// When the sandbox started, RFC 3339.
    pub started_at: String,
    /// When it ends unless its timeout is changed, RFC 3339; when it was paused, of a paused sandbox.
    pub end_at: String,
    /// Cores.
    pub cpu_count: u32,
    /// Memory, in MiB.
    pub memory_mb: u32,
    /// Disk, in MiB.
    pub disk_mb: u32,
    /// What is kept of the sandbox while it is paused: `memory` (its processes) or `filesystem` (its disk alone).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Space that it takes on the disk of the host while it is paused, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_bytes: Option<u64>,
    /// Why it could not be resumed the last time, while it is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_error: Option<String>,
    /// The node that it is on, where nodes are processes of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The name of the node's host, where nodes are processes of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The name of the host of the server that the node is connected to, if that is another server than the one that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Whether the node is connected to no server. The other fields are what was known of the sandbox last.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_node_away: bool,
    /// The latest sample of its usage, if there is one and it is not paused.
    pub usage: Option<OperatorUsage>,
}

/// A sample of the usage of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorUsage {
    /// When the sample was taken, RFC 3339.
    pub at: String,
    /// Share of its cores since the sample before, in percent: 100 is all of them.
    pub cpu_percent: f64,
    /// Memory without page cache, in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory_used_bytes: u64,
    /// Page cache, in bytes.
    #[serde(rename = "cache_bytes")]
    pub memory_cache_bytes: u64,
    /// Disk, in bytes.
    #[serde(rename = "disk_bytes")]
    pub disk_used_bytes: u64,
    /// What it has received since it was created, in bytes.
    #[serde(default)]
    pub received_bytes: u64,
    /// What it has sent since it was created, in bytes.
    #[serde(default)]
    pub sent_bytes: u64,
}

/// An entry of a sandbox's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorLogEntry {
    /// When the entry happened, RFC 3339.
    pub at: String,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// The part of the platform that wrote the entry.
    pub logger: String,
    /// A message for people.
    pub message: String,
    /// Details for programs.
    pub fields: BTreeMap<String, String>,
}

/// The routes of the socket.
pub(crate) fn router(operator: Operator) -> Router {
    Router::new()
        .route("/sandboxes", get(list_sandboxes))
        .route("/sandboxes/{id}", get(show_sandbox).delete(kill_sandbox))
        .route("/sandboxes/{id}/logs", get(read_logs))
        .route("/sandboxes/{id}/access", post(access::enter))
        .route("/sandboxes/{id}/ports/{port}", post(access::open))
        .route("/template", get(templates::read_manifest).post(templates::import))
        .route("/layers/{id}", get(templates::read_layer))
        .route("/collections", post(templates::collect))
        .route("/backup", post(backup::hold))
        .route("/metrics", get(metrics::read_metrics))
        .route("/nodes", get(nodes::list_nodes))
        .route("/dashboard/codes", post(sign_in::issue_code))
        .with_state(operator)
}

async fn list_sandboxes(State(operator): State<Operator>) -> Result<Json<Vec<OperatorSandbox>>, ErrorResponse> {
    let rows = match operator.members.get() {
        Some(_) => operator.store.sandbox_list_joined().await?,
        None => operator.sandboxes.rows_served().await?,
    };
    let locations = NodeLocations::read(&operator).await?;
    let names = team_names(&operator).await?;
    let mut latest = operator.records.latest_of(&rows).await?;
    let shown = rows.into_iter().map(|row| {
        let latest = latest.remove(&row.id);
        show(&operator, &names, &locations, row, latest.as_ref())
    });
    let mut shown: Vec<_> = shown.collect();
    let building = operator.builds.sandboxes().into_iter();
    shown.extend(building.map(|sandbox| show_building(&names, &sandbox)));
    shown.extend(operator.sandboxes.nodes.pooled().iter().map(pooled));
    Ok(Json(shown))
}

async fn show_sandbox(
    State(operator): State<Operator>,
    Path(id): Path<String>,
) -> Result<Json<OperatorSandbox>, ErrorResponse> {
    let sandbox = parse(&id)?;
    let names = team_names(&operator).await?;
    let mut building = operator.builds.sandboxes().into_iter();
    if let Some(sandbox) = building.find(|building| building.id == sandbox) {
        return Ok(Json(show_building(&names, &sandbox)));
    }
    let row = operator.store.sandbox_by_id(&sandbox).await?;
    let row = row.ok_or_else(|| ErrorResponse::no_sandbox(&id))?;
    let latest = operator.records.latest(&row.team_id, &row.id).await?;
    let locations = NodeLocations::read(&operator).await?;
    Ok(Json(show(&operator, &names, &locations, row, latest.as_ref())))
}

/// Kills a sandbox, through the server that has its node.
async fn kill_sandbox(
    State(operator): State<Operator>,
    Path(id): Path<String>,
    forwarded: Option<Extension<FromServer>>,
) -> Result<StatusCode, ErrorResponse> {
    let sandbox = parse(&id)?;
    if let Some(killed) = operator.builds.kill_sandbox(&sandbox).await {
        tracing::info!(sandbox.id = %sandbox, "the operator kills a sandbox of a build");
        return match killed {
            Ok(()) => Ok(StatusCode::NO_CONTENT),
            Err(NodeError::NotFound(_)) => Err(ErrorResponse::no_sandbox(&id)),
            Err(error) => Err(ErrorResponse(
                StatusCode::SERVICE_UNAVAILABLE,
                Chain(&error).to_string(),
            )),
        };
    }
    let Some(entry) = operator.registry.get(&sandbox) else {
        if operator.sandboxes.nodes.end_pooled(&sandbox) {
            return Ok(StatusCode::NO_CONTENT);
        }
        if forwarded.is_some() {
            return Err(ErrorResponse::no_sandbox(&id));
        }
        return elsewhere::kill(&operator, &sandbox).await;
    };
    tracing::info!(sandbox.id = %entry.id, team.id = %entry.team, "the operator kills a sandbox");
    match operator.sandboxes.stop_because(&entry, EndReason::Operator).await {
        Some(StopOutcome::Gone) => Ok(StatusCode::NO_CONTENT),
        Some(StopOutcome::Away) => {
            let why = format!(
                "sandbox {id} is on a node that is not connected, and is killed once the node is back: see `ringfence node list`"
            );
            Err(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))
        }
        Some(StopOutcome::Failed | StopOutcome::Unrecorded) => {
            let why = format!("sandbox {id} could not be killed yet: retrying, see the log of the platform");
            Err(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))
        }
        None => Err(ErrorResponse::no_sandbox(&id)),
    }
}

/// Query parameters of the log route.
#[derive(Debug, Deserialize)]
struct LogParameters {
    limit: Option<u32>,
    level: Option<String>,
}

/// Returns the newest entries, oldest first. The log of an ended sandbox is available until it is purged.
async fn read_logs(
    State(operator): State<Operator>,
    Path(id): Path<String>,
    Query(wanted): Query<LogParameters>,
) -> Result<Json<Vec<OperatorLogEntry>>, ErrorResponse> {
    let sandbox = parse(&id)?;
    let level = match wanted.level.as_deref().map(str::parse::<Level>) {
        None => Level::Debug,
        Some(Ok(level)) => level,
        Some(Err(_)) => {
            let why = "level must be debug, info, warn or error".to_owned();
            return Err(ErrorResponse(StatusCode::BAD_REQUEST, why));
        }
    };
    let Some(team) = operator.records.owner(&sandbox).await? else {
        return Err(ErrorResponse::no_sandbox(&id));
    };
    let query = LogQuery {
        from_us: 0,
        to_us: i64::MAX,
        level,
        search: String::new(),
        order: LogOrder::Backward,
        limit: wanted.limit.unwrap_or(LOG_LIMIT_DEFAULT).min(LOG_LIMIT_MAX),
    };
    let rows = operator.records.log(&team, &sandbox, &query).await?;
    Ok(Json(rows.into_iter().rev().map(entry).collect()))
}

/// The name of a team.
fn team_name(names: &HashMap<TeamId, String>, id: &TeamId) -> String {
    match names.get(id) {
        Some(name) => name.clone(),
        // The team was created after the names were read.
        None => id.as_str().to_owned(),
    }
}

/// A sandbox of a build. Its usage is not measured.
fn show_building(names: &HashMap<TeamId, String>, sandbox: &BuildSandbox) -> OperatorSandbox {
    OperatorSandbox {
        id: sandbox.id.as_str().to_owned(),
        team: team_name(names, &sandbox.team),
        template: sandbox.template.as_str().to_owned(),
        state: "building".to_owned(),
        started_at: rfc3339(sandbox.started_us),
        end_at: rfc3339(sandbox.end_us),
        cpu_count: sandbox.resources.cpu_count,
        memory_mb: sandbox.resources.memory_mb,
        disk_mb: sandbox.resources.disk_mb,
        kept: None,
        kept_bytes: None,
        resume_error: None,
        node: None,
        node_name: None,
        server: None,
        is_node_away: false,
        usage: None,
    }
}

fn show(
    operator: &Operator,
    names: &HashMap<TeamId, String>,
    locations: &NodeLocations,
    row: SandboxRow,
    latest: Option<&Sample>,
) -> OperatorSandbox {
    // The registry is the first to know that a sandbox is stopping.
    let state = operator.registry.get(&row.id).map_or(row.state, |entry| entry.state());
    let is_paused = matches!(state, lifecycle::State::Paused | lifecycle::State::Resuming);
    let location = locations.of(row.node_id.as_ref());
    let server = match location.map(|location| &location.server) {
        Some(ServedBy::Other(server)) => Some(server.name.clone()),
        Some(ServedBy::This | ServedBy::None) | None => None,
    };
    OperatorSandbox {
        id: row.id.as_str().to_owned(),
        team: team_name(names, &row.team_id),
        template: row.alias.unwrap_or_else(|| row.template_id.as_str().to_owned()),
        state: state.as_str().to_owned(),
        started_at: rfc3339(row.started_us),
        end_at: rfc3339(match state {
            lifecycle::State::Paused | lifecycle::State::Resuming => row.paused_us.unwrap_or(row.end_us),
            _ => row.end_us,
        }),
        cpu_count: row.cpu_count,
        memory_mb: row.memory_mb,
        disk_mb: row.disk_mb,
        kept: row.kept.filter(|_| is_paused).map(|kept| kept.as_str().to_owned()),
        kept_bytes: row
            .kept_bytes
            .filter(|_| is_paused)
            .and_then(|bytes| u64::try_from(bytes).ok()),
        resume_error: row.resume_error.filter(|_| is_paused),
        node: row
            .node_id
            .filter(|node| *node != operator.sandboxes.home)
            .map(|node| node.as_str().to_owned()),
        node_name: location.map(|location| location.name.clone()),
        server,
        is_node_away: matches!(
            location,
            Some(NodeLocation {
                server: ServedBy::None,
                ..
            })
        ),
        // Of when it ran, otherwise.
        usage: latest.filter(|_| !is_paused).map(usage),
    }
}

/// A sandbox of the warm pool.
fn pooled(pooled: &PooledSandbox) -> OperatorSandbox {
    OperatorSandbox {
        id: pooled.id.as_str().to_owned(),
        team: String::new(),
        template: pooled.template.as_str().to_owned(),
        state: if pooled.is_ready { "pooled" } else { "starting" }.to_owned(),
        started_at: rfc3339(pooled.since_us),
        end_at: rfc3339(pooled.since_us.saturating_add(AGE_MAX_US)),
        cpu_count: pooled.cpu_count,
        memory_mb: pooled.memory_mb,
        disk_mb: pooled.disk_mb,
        kept: None,
        kept_bytes: None,
        resume_error: None,
        node: None,
        node_name: None,
        server: None,
        is_node_away: false,
        usage: None,
    }
}

fn usage(sample: &Sample) -> OperatorUsage {
    OperatorUsage {
        at: rfc3339(sample.at_us),
        cpu_percent: f64::from(sample.cpu_used_centi) / 100.0,
        memory_used_bytes: sample.memory_used_bytes,
        memory_cache_bytes: sample.memory_cache_bytes,
        disk_used_bytes: sample.disk_used_bytes,
        received_bytes: sample.received_bytes,
        sent_bytes: sample.sent_bytes,
    }
}

fn entry(row: LogRow) -> OperatorLogEntry {
    OperatorLogEntry {
        at: rfc3339(row.at_us),
        level: row.level.as_str().to_owned(),
        logger: row.logger,
        message: row.message,
        fields: row.fields,
    }
}
