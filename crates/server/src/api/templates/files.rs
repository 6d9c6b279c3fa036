//! Uploading files for builds: a signed address, and what is sent to it.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{FromRequestParts as _, Request, State};
use axum::response::{IntoResponse as _, Response};
use http::uri::Authority;
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt as _;
use model::id::TemplateId;
use secrecy::ExposeSecret as _;
use serde::Serialize;
use store::Store;
use utoipa::ToSchema;

use super::error::NotOwnTemplate;
use super::find_own;
use super::status::BuildPath;
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::query::Query;
use crate::api::state::ApiState;
use crate::builds::files::{FileError, is_hash};
use crate::clock::SECOND_US;
use crate::peers::ClientPeer;

/// How long an address is valid, in seconds (API contract).
const VALID_S: i64 = 30 * 60;

/// Where to upload files.
#[derive(Serialize, ToSchema)]
struct TemplateUpload {
    /// Whether the platform has files with this hash.
    present: bool,
    /// The address to which they can be sent with `PUT` within 30 minutes, without further credentials.
    url: String,
}

/// The address of this platform as the client of a request reaches it.
fn origin(headers: &HeaderMap, is_tls: bool, domain: &str) -> String {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let is_tls = is_tls || header("x-forwarded-proto").is_some_and(|proto| proto.eq_ignore_ascii_case("https"));
    let scheme = if is_tls { "https" } else { "http" };
    let host = header(header::HOST.as_str()).and_then(|host| host.parse::<Authority>().ok());
    match host {
        Some(host) => format!("{scheme}://{host}"),
        None => format!("{scheme}://api.{domain}"),
    }
}

/// Returns where files for a build can be uploaded.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/files/{hash}",
    tag = "templates",
    params(
        ("templateID" = String, Path, description = "The id of the template"),
        ("hash" = String, Path, description = "The hash of the files", pattern = "^[0-9a-f]{64}$"),
    ),
    responses(
        (status = 201, description = "The address", body = TemplateUpload),
        (status = 503, description = "The platform keeps no files for builds"),
        NotOwnTemplate,
    )
)]
pub(crate) async fn get_template_upload(
    State(state): State<ApiState>,
    State(store): State<Store>,
    caller: Caller,
    path: BuildPath,
    headers: HeaderMap,
    peer: Option<Extension<ClientPeer>>,
) -> Result<Response, ApiError> {
    let hash = path.build;
    if !is_hash(&hash) {
        return Err(ApiError::invalid(
            "invalid hash: it must be 64 lower-case hexadecimal digits",
        ));
    }
    let template = find_own(&path.template, &caller.team, &store).await?;
    if !state.builds.files.is_on() {
        return Err(ApiError::upload(FileError::Off));
    }
    let present = state.builds.files.is_present(&caller.team, &hash).await;
    let expires = state.clock.now_us() / SECOND_US + VALID_S;
    let token = state.tokens.upload_token(&template.id, &hash, expires);
    let origin = origin(
        &headers,
        peer.is_some_and(|Extension(peer)| peer.is_tls),
        &state.access.domain,
    );
    let url = format!(
        "{origin}/templates/{}/files/{hash}?expires={expires}&token={}",
        template.id,
        token.expose_secret()
    );
    json(StatusCode::CREATED, &TemplateUpload { present, url })
}

impl ApiError {
    /// The response when an upload failed.
    pub(super) fn upload(error: FileError) -> Self {
        let why = error.to_string();
        match error {
            FileError::Store(error) => error.into(),
            FileError::TooLarge { .. } | FileError::TeamFull { .. } => Self::new(StatusCode::PAYLOAD_TOO_LARGE, why),
            FileError::DiskFull | FileError::Off => Self::new(StatusCode::SERVICE_UNAVAILABLE, why),
            FileError::Blobs(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error),
            FileError::Io(_) | FileError::Damaged => Self::internal().caused_by(error),
        }
    }
}

/// Stores files for a build, a tar archive that may be compressed with gzip. The address is that of
/// `GET /templates/{templateID}/files/{hash}`, which has the parameters.
#[utoipa::path(
    put,
    path = "/templates/{templateID}/files/{hash}",
    tag = "templates",
    security(),
    params(
        ("templateID" = String, Path, description = "The id of the template"),
        ("hash" = String, Path, description = "The hash of the files", pattern = "^[0-9a-f]{64}$"),
        ("expires" = i64, Query, description = "Until when the address is valid"),
        ("token" = String, Query, description = "The signature of the address"),
    ),
    responses(
        (status = 200, description = "The files were stored"),
        (status = 400, description = "A parameter is missing or invalid"),
        (status = 403, description = "The address is not valid, or not any more"),
        (status = 413, description = "The files are too large"),
    )
)]
pub(crate) async fn put_template_upload(State(state): State<ApiState>, request: Request) -> Result<Response, ApiError> {
    let (mut parts, mut body) = request.into_parts();
    let path = BuildPath::from_request_parts(&mut parts, &state).await?;
    let query = Query::of(&parts.uri)?;
    let missing = |name: &str| ApiError::invalid(format!("parameter \"{name}\" is missing"));
    let expires = query
        .integer("expires", 0..=i64::MAX)?
        .ok_or_else(|| missing("expires"))?;
    let token = query.single("token")?.ok_or_else(|| missing("token"))?;
    let hash = path.build;
    if !is_hash(&hash) {
        return Err(ApiError::invalid(
            "invalid hash: it must be 64 lower-case hexadecimal digits",
        ));
    }
    let template: TemplateId = path.template.parse()?;
    if !state.tokens.is_upload_token(&template, &hash, expires, token) {
        return Err(ApiError::forbidden("the address is not valid: request a new one"));
    }
    if expires < state.clock.now_us() / SECOND_US {
        return Err(ApiError::forbidden("the address has expired: request a new one"));
    }
    let row = state.store.template_by_id(&template).await?;
    let Some(team) = row.and_then(|row| row.team_id) else {
        return Err(ApiError::unknown_template(&path.template));
    };
    let announced = parts.headers.get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|value| value.to_str().ok()?.parse().ok());
    let files = Arc::clone(&state.builds.files);
    let stall = state.builds.settings.upload_stall;
    let mut upload = files.begin(&team, &hash, announced).await.map_err(ApiError::upload)?;
    loop {
        let frame = tokio::time::timeout(stall, body.frame()).await;
        let frame = frame.map_err(|_| ApiError::invalid(format!("nothing of the upload arrived for {stall:?}")))?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|_| ApiError::invalid("the upload was cut"))?;
        if let Ok(piece) = frame.into_data() {
            upload = files.write(upload, piece).await.map_err(ApiError::upload)?;
        }
    }
    files.keep(&team, &hash, upload).await.map_err(ApiError::upload)?;
    tracing::info!(template.id = %template, "stored files for builds");
    Ok(StatusCode::OK.into_response())
}
