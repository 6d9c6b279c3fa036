//! The operator's way into a sandbox: who enters is recorded, and byte streams lead to its ports.
//!
//! A command first asks for access, which is written to the log of the sandbox and to that of the platform, and gets the
//! token of the agent; then it opens streams. The token leaves the platform only here: every peer of the socket may read
//! the master key, from which it is derived. Streams have a limit of their own and do not count as connections of
//! the socket, so that shells that stay open do not keep other commands out. They end with the sandbox, with its pause,
//! with either end, and when the platform is stopped.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::{Json, body::Body};
use http::{HeaderValue, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use model::lifecycle;
use protocol::node::{DialError, SandboxStream};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use tokio::io::copy_bidirectional_with_sizes;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::context::{ErrorResponse, Operator, parse};
use super::elsewhere::absent;
use super::streams::STREAMS;
use crate::chain::Chain;
use crate::outcome::OperatorCommand;
use crate::records::LifecycleEvent;
use crate::sandboxes::entry::SandboxEntry;
use crate::sandboxes::pause::PauseError;

/// Name of the protocol in the header `Upgrade`: bytes without any framing.
pub const STREAM_PROTOCOL: &str = "ringfence-stream";

/// How long a connection to a port may take. A full accept queue inside would otherwise hold it for minutes.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are read at a time, in each direction.
const BUFFER: usize = 64 << 10;

/// Query parameters of a request for access.
#[derive(Debug, Deserialize)]
pub(super) struct EntryParameters {
    /// The command that asks: `exec`, `shell`, `cp` or `forward`.
    command: String,
    /// Whether a paused sandbox is resumed.
    #[serde(default)]
    resume: bool,
}

/// What a command needs to enter a sandbox.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorAccess {
    /// The token that the agent requires.
    pub token: String,
    /// Disk of the sandbox, in MiB.
    pub disk_mb: u32,
}

impl fmt::Debug for OperatorAccess {
    /// Omits the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorAccess")
            .field("disk_mb", &self.disk_mb)
            .finish_non_exhaustive()
    }
}

/// Grants access to a sandbox that runs, and records that.
pub(super) async fn enter(
    State(operator): State<Operator>,
    Path(id): Path<String>,
    Query(wanted): Query<EntryParameters>,
) -> Result<Json<OperatorAccess>, ErrorResponse> {
    let Some(command) = OperatorCommand::ALL
        .into_iter()
        .find(|one| one.as_str() == wanted.command)
    else {
        let why = "command must be exec, shell, cp or forward".to_owned();
        return Err(ErrorResponse(StatusCode::BAD_REQUEST, why));
    };
    let entry = match find(&operator, &id).await {
        Err(absent) if wanted.resume => recall(&operator, &id).await.ok_or(absent)?,
        found => found?,
    };
    if wanted.resume && is_asleep(&entry) {
        let resumed = operator.sandboxes.resume_for_operator(&entry).await;
        resumed.map_err(|error| not_resumed(&id, &error))?;
    }
    check_runs(&entry)?;
    let row = operator.store.sandbox_by_id(&entry.id).await?;
    let row = row.ok_or_else(|| ErrorResponse::no_sandbox(&id))?;
    tracing::info!(
        sandbox.id = %entry.id,
        team.id = %entry.team,
        command = command.as_str(),
        "the operator enters a sandbox"
    );
    operator
        .records
        .log_event(&entry.id, &LifecycleEvent::OperatorEntered(command));
    Ok(Json(OperatorAccess {
        token: entry.access_token.expose_secret().to_owned(),
        disk_mb: row.disk_mb,
    }))
}

/// Opens a stream to a port: the connection becomes one after the response 101.
pub(super) async fn open(
    State(operator): State<Operator>,
    Path((id, port)): Path<(String, u16)>,
    mut request: Request,
) -> Result<Response, ErrorResponse> {
    let asked = request.headers().get(header::UPGRADE).map(HeaderValue::as_bytes);
    if asked != Some(STREAM_PROTOCOL.as_bytes()) || port == 0 {
        let why = format!("a stream needs a port from 1 on, and the header upgrade: {STREAM_PROTOCOL}");
        return Err(ErrorResponse(StatusCode::BAD_REQUEST, why));
    }
    let upgrade = hyper::upgrade::on(&mut request);
    let entry = find(&operator, &id).await?;
    let (traffic, _) = entry.required();
    check_runs(&entry)?;
    let Some(permit) = operator.streams.permit() else {
        let why = format!("{STREAMS} streams into sandboxes are open, as many as allowed: end a command");
        return Err(ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why));
    };
    let dialed = tokio::time::timeout(DIAL_TIMEOUT, entry.node.handle.dial(&entry.id, port)).await;
    let stream = dialed.unwrap_or(Err(DialError::PortClosed)).map_err(|error| {
        let why = match error {
            DialError::PortClosed => format!("nothing accepts connections on port {port} of sandbox {id}"),
            DialError::Gone | DialError::Unreachable => format!("sandbox {id} cannot be reached: {error}"),
        };
        ErrorResponse(StatusCode::BAD_GATEWAY, why)
    })?;
    tracing::debug!(sandbox.id = %entry.id, port, "the operator opens a stream into a sandbox");
    let relay = Relay {
        upgrade,
        stream,
        ending: traffic.ending.clone(),
        stopping: operator.sandboxes.work.stopping().clone(),
        permit,
    };
    operator.streams.spawn(relay.run());
    let headers = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(STREAM_PROTOCOL)),
    ];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers, Body::empty()).into_response())
}

/// A stream between a command and a port.
struct Relay {
    upgrade: OnUpgrade,
    stream: SandboxStream,
    /// Cancelled when the sandbox ends or is paused.
    ending: CancellationToken,
    /// Cancelled when the platform is stopped.
    stopping: CancellationToken,
    permit: OwnedSemaphorePermit,
}

impl Relay {
    async fn run(self) {
        let Self {
            upgrade,
            mut stream,
            ending,
            stopping,
            permit,
        } = self;
        let copy = async {
            let Ok(client) = upgrade.await else { return };
            let mut client = TokioIo::new(client);
            // Either end may go away at any time, which is no error.
            let _ = copy_bidirectional_with_sizes(&mut client, &mut stream, BUFFER, BUFFER).await;
        };
        tokio::select! {
            biased;
            () = stopping.cancelled() => {}
            () = ending.cancelled() => {}
            () = copy => {}
        }
        drop(permit);
    }
}

/// Brings a paused sandbox of a node that is away to another one.
async fn recall(operator: &Operator, id: &str) -> Option<Arc<SandboxEntry>> {
    let row = operator.store.sandbox_by_id(&parse(id).ok()?).await.ok()??;
    operator.sandboxes.recall(row).await.ok()?
}

async fn find(operator: &Operator, id: &str) -> Result<Arc<SandboxEntry>, ErrorResponse> {
    let sandbox = parse(id)?;
    if let Some(entry) = operator.registry.get(&sandbox) {
        return Ok(entry);
    }
    let is_building = operator
        .builds
        .sandboxes()
        .iter()
        .any(|building| building.id == sandbox);
    if is_building
        || operator
            .sandboxes
            .nodes
            .pooled()
            .iter()
            .any(|pooled| pooled.id == sandbox)
    {
        let why = format!("sandbox {id} belongs to a build or to the pool: only sandboxes of clients can be entered");
        return Err(ErrorResponse(StatusCode::CONFLICT, why));
    }
    Err(absent(operator, &sandbox).await?)
}

fn check_runs(entry: &SandboxEntry) -> Result<(), ErrorResponse> {
    let why = match entry.state() {
        lifecycle::State::Running => return Ok(()),
        lifecycle::State::Paused | lifecycle::State::Pausing => {
            format!("sandbox {} is paused: --resume resumes it", entry.id)
        }
        state => format!("sandbox {} is {}: try again once it runs", entry.id, state.as_str()),
    };
    Err(ErrorResponse(StatusCode::CONFLICT, why))
}

fn is_asleep(entry: &SandboxEntry) -> bool {
    use lifecycle::State::{Paused, Pausing, Resuming};
    matches!(entry.state(), Pausing | Paused | Resuming)
}

fn not_resumed(id: &str, error: &PauseError) -> ErrorResponse {
    let why = format!("sandbox {id} could not be resumed: {}", Chain(error));
    ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why)
}
