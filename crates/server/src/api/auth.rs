//! Authentication of requests.
//!
//! A request presents an API key as `X-API-Key`, or an API key or an access token as `Authorization: Bearer`. If both
//! headers are present, only the first one counts: clients send a stale token along with a valid key. Where signed
//! requests are accepted, a signature takes precedence over both, see [`super::signed`]. Requests of the dashboard have the
//! owner of their session instead. Every credential
//! acts for one user of one team and has all rights of the team.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, Path};
use http::{HeaderMap, HeaderValue, StatusCode, header, request};
use model::id::{SandboxId, TeamId, UserId};
use secrecy::SecretString;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::describe::path_parameter;
use super::error::ApiError;
use super::signed::Signer;
use super::state::ApiState;
use crate::admission::quota::TeamQuota;
use crate::admission::rate::RateSlot;
use crate::authentication::{AuthenticationError, Credential, SessionOwner};
use crate::creation::Creator;
use crate::keys::{ACCESS_TOKEN_PREFIX, InvalidKey};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::entry::SandboxEntry;
use crate::telemetry::TeamSlot;

/// Header that carries the API key.
pub(super) const API_KEY: &str = "x-api-key";
/// Header that names the team to act for. A credential has only one team, so any other is refused.
const TEAM_ID: &str = "x-team-id";

/// The user and team of a request's credential. It is the first extractor of a handler, so that unauthenticated clients
/// get no other errors.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The team.
    pub(crate) team: TeamId,
    /// The user.
    pub(crate) user: UserId,
    /// The API key of the request, unless it has an access token.
    pub(crate) api_key: Option<SecretString>,
    /// What the team may use.
    pub(crate) quota: Arc<TeamQuota>,
    /// Whether the request was signed with an access key.
    pub(crate) is_signed: bool,
    /// How long the authentication took.
    pub(crate) auth_time: Duration,
    rate: RateSlot,
}

/// The credential of a request.
pub(crate) fn credential(headers: &HeaderMap) -> Result<Credential, ApiError> {
    if let Some(key) = headers.get(API_KEY) {
        return Ok(Credential::ApiKey(key.to_str().unwrap_or_default().trim().into()));
    }
    let Some(sent) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::unauthenticated(
            "authorization header is missing: send your key as X-API-Key, or as Authorization: Bearer",
        ));
    };
    let token = sent
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    match token {
        Some(token) if token.starts_with(ACCESS_TOKEN_PREFIX) => Ok(Credential::AccessToken(token.into())),
        Some(token) => Ok(Credential::ApiKey(token.into())),
        None => Err(ApiError::unauthenticated(
            "authorization header is malformed: it must be Bearer and an API key or an access token",
        )),
    }
}

impl Caller {
    /// A sandbox of the team that this server can change.
    pub(super) async fn sandbox(&self, sandboxes: &Sandboxes, id: &SandboxId) -> Result<Arc<SandboxEntry>, ApiError> {
        let entry = sandboxes.entry_of_team(id, &self.team).await;
        entry.map_err(|error| ApiError::absent(error, id))
    }

    /// A sandbox of the team that is to be resumed: one that is paused on a node that is away may be brought to another one.
    pub(super) async fn sandbox_to_resume(
        &self,
        sandboxes: &Arc<Sandboxes>,
        id: &SandboxId,
    ) -> Result<Arc<SandboxEntry>, ApiError> {
        match sandboxes.entry_to_resume(id, &self.team).await {
            Ok(entry) => entry.map_err(|error| ApiError::absent(error, id)),
            Err(error) => Err(ApiError::not_resumed(error, id)),
        }
    }

    /// The client on whose behalf sandboxes are created.
    pub(super) fn creator(&self) -> Creator {
        Creator {
            team: self.team.clone(),
            user: self.user.clone(),
            quota: Arc::clone(&self.quota),
            rate: self.rate.clone(),
        }
    }
}

impl FromRequestParts<ApiState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &ApiState) -> Result<Self, ApiError> {
        let begun = Instant::now();
        let signer = parts.extensions.get::<Signer>().cloned();
        let is_signed = signer.is_some();
        let session = parts.extensions.get::<SessionOwner>().cloned();
        let (owner, credential) = match (signer, session) {
            (Some(Signer(owner)), _) | (None, Some(SessionOwner(owner))) => (owner, None),
            (None, None) => {
                let credential = credential(&parts.headers)?;
                (state.authenticator.owner(&credential).await?, Some(credential))
            }
        };
        tracing::Span::current().record("team.id", owner.team.as_str());
        if let Some(slot) = parts.extensions.get::<TeamSlot>() {
            slot.set(&owner.team);
        }
        if let Some(team) = parts.headers.get(TEAM_ID)
            && team.as_bytes().trim_ascii() != owner.team.as_str().as_bytes()
        {
            return Err(ApiError::no_team(String::from_utf8_lossy(team.as_bytes())));
        }
        let quota = state.admission.quota_of(&owner.team).await?;
        let rate = parts.extensions.get::<RateSlot>().cloned().unwrap_or_default();
        if let Some(requests) = &quota.requests {
            rate.take(requests, state.clock.now_us())
                .map_err(|level| ApiError::rate_limited("requests per second", level))?;
        }
        if let Some(credential) = &credential {
            state.authenticator.record_use(credential.kind(), &owner.credential);
        }
        Ok(Self {
            team: owner.team,
            user: owner.user,
            api_key: match credential {
                Some(Credential::ApiKey(key)) => Some(key),
                Some(Credential::AccessToken(_)) | None => None,
            },
            is_signed,
            quota,
            auth_time: begun.elapsed(),
            rate,
        })
    }
}

/// Pattern of sandbox ids in requests.
pub(super) const SANDBOX_ID_PATTERN: &str = "^[a-z0-9]{1,60}(-[a-z0-9]+)?$";

/// The sandbox of a path.
#[derive(Debug)]
pub(crate) struct SandboxPath(pub(crate) SandboxId);

impl IntoParams for SandboxPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let about = "The sandbox. A dash and an old client id may follow its id, and are ignored.";
        vec![path_parameter("sandboxID", Some(about), Some(SANDBOX_ID_PATTERN))]
    }
}

impl<S: Send + Sync> FromRequestParts<S> for SandboxPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid sandbox ID: it is not text"))?;
        Ok(Self(SandboxId::from_path(&text)?))
    }
}

/// The id of a key or token in a path: a UUID, in either case.
#[derive(Debug)]
pub(crate) struct KeyPath(pub(crate) String);

impl PartialSchema for KeyPath {
    fn schema() -> RefOr<Schema> {
        let pattern = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$";
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern))
            .into()
    }
}

impl ToSchema for KeyPath {}

impl<S: Send + Sync> FromRequestParts<S> for KeyPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let invalid = || ApiError::invalid("invalid ID: it must be a UUID");
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| invalid())?;
        let is_usual = text.len() == 36;
        let id = uuid::Uuid::try_parse(&text)
            .ok()
            .filter(|_| is_usual)
            .ok_or_else(invalid)?;
        Ok(Self(id.to_string()))
    }
}

impl ApiError {
    /// 401: the credentials are missing or invalid.
    pub(crate) fn unauthenticated(why: impl Into<String>) -> Self {
        let challenge = HeaderValue::from_static("Bearer realm=\"ringfence\"");
        Self::new(StatusCode::UNAUTHORIZED, why).header(header::WWW_AUTHENTICATE, challenge)
    }

    /// 404: the team does not exist, or is not the caller's.
    pub(crate) fn no_team(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("team \"{id}\" doesn't exist or you don't have access to it"),
        )
    }
}

impl From<AuthenticationError> for ApiError {
    fn from(error: AuthenticationError) -> Self {
        let why = match error {
            AuthenticationError::Store(error) => return error.into(),
            AuthenticationError::InvalidApiKey(InvalidKey::Prefix) => {
                "authorization header is malformed: not an API key"
            }
            AuthenticationError::InvalidApiKey(InvalidKey::Digits) => "invalid API key: invalid format",
            AuthenticationError::UnknownApiKey => "invalid API key: unknown key",
            AuthenticationError::InvalidAccessToken(_) => "invalid access token: invalid format",
            AuthenticationError::UnknownAccessToken => "invalid access token: unknown token",
        };
        Self::unauthenticated(why)
    }
}
