//! Who asks. Each request's key is looked up anew, so that a key revoked by another process stops at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, Path};
use http::request;
use model::id::{SandboxId, TeamId, UserId};

use super::error::ApiError;
use super::rate::RateSlot;
use crate::keys::{InvalidApiKey, hash_api_key};
use crate::lifecycle::Platform;
use crate::quota::TeamQuota;

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
    /// What the team may use.
    pub(crate) quota: Arc<TeamQuota>,
    /// What finding that out took.
    pub(crate) auth_time: Duration,
    rate: RateSlot,
}

impl Caller {
    /// Counts a create against the team's rate of them.
    pub(crate) fn count_create(&self, now_us: i64) -> Result<(), ApiError> {
        let Some(creates) = &self.quota.creates else {
            return Ok(());
        };
        let taken = creates.take(now_us);
        self.rate.set(taken.unwrap_or_else(|level| level));
        taken.map_err(|level| ApiError::too_often("creates per minute", level))?;
        Ok(())
    }
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
        let quota = platform.quotas.of(&platform.store, &owner.team_id).await?;
        let rate = parts.extensions.get::<RateSlot>().cloned().unwrap_or_default();
        if let Some(requests) = &quota.requests {
            let taken = requests.take(platform.settings.clock.now_us());
            rate.set(taken.unwrap_or_else(|level| level));
            taken.map_err(|level| ApiError::too_often("requests per second", level))?;
        }
        Ok(Self {
            team: owner.team_id,
            user: owner.user_id,
            quota,
            auth_time: begun.elapsed(),
            rate,
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
