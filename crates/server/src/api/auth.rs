//! Who asks. Each request's key is looked up anew, so that a key revoked by another process stops at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, Path};
use http::request;
use model::id::{SandboxId, TeamId, UserId};

use super::error::ApiError;
use crate::keys::{InvalidApiKey, hash_api_key};
use crate::lifecycle::Platform;

/// Header that carries the API key.
const API_KEY: &str = "x-api-key";

/// The user and team of a request's API key. It comes before all else in a handler, because whoever is not known is
/// not told what else is wrong.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The team.
    pub(crate) team: TeamId,
    /// The user.
    pub(crate) user: UserId,
    /// What finding that out took.
    pub(crate) auth_time: Duration,
}

impl FromRequestParts<Arc<Platform>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, platform: &Arc<Platform>) -> Result<Self, ApiError> {
        let begun = Instant::now();
        let sent = parts
            .headers
            .get(API_KEY)
            .ok_or_else(|| ApiError::unauthenticated("authorization header is missing: send your key as X-API-Key"))?;
        let hash = hash_api_key(sent.to_str().unwrap_or_default().trim()).map_err(|why| match why {
            InvalidApiKey::Prefix => ApiError::unauthenticated("authorization header is malformed: not an API key"),
            InvalidApiKey::Digits => ApiError::unauthenticated("invalid API key: invalid format"),
        })?;
        // The lookup compares hashes, so its timing tells nothing about a key.
        let owner = platform
            .store
            .api_key_by_hash(&hash)
            .await?
            .ok_or_else(|| ApiError::unauthenticated("invalid API key: cannot get the team for it"))?;
        tracing::Span::current().record("team.id", owner.team_id.as_str());
        Ok(Self {
            team: owner.team_id,
            user: owner.user_id,
            auth_time: begun.elapsed(),
        })
    }
}

/// The sandbox id of a path.
#[derive(Debug)]
pub(crate) struct SandboxPath(pub(crate) SandboxId);

impl FromRequestParts<Arc<Platform>> for SandboxPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, platform: &Arc<Platform>) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, platform)
            .await
            .map_err(|_| ApiError::invalid("invalid sandbox ID: it is not text"))?;
        Ok(Self(SandboxId::from_path(&text)?))
    }
}
