//! Who asks. Each request's key is looked up anew, so that one revoked by this or another process stops at once.
//!
//! A request presents an API key as `X-API-Key`, or an API key or an access token as `Authorization: Bearer`. Where both
//! headers are there, the first decides alone: clients send a stale token along with a good key. Every credential speaks
//! for one user of one team and may do what the team may.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, Path};
use http::{HeaderMap, header, request};
use model::id::{SandboxId, TeamId, UserId};
use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretString};

use super::error::ApiError;
use super::rate::RateSlot;
use crate::clock::SECOND_US;
use crate::keys::{ACCESS_TOKEN_PREFIX, InvalidKey, hash_access_token, hash_api_key};
use crate::lifecycle::{Chain, Platform};
use crate::quota::TeamQuota;

/// Header that carries the API key.
const API_KEY: &str = "x-api-key";
/// Header that names the team to act for. A credential has but one, so this can only be wrong.
const TEAM_ID: &str = "x-team-id";
/// A use of a credential is noted when this much time passed since the last note, because it is a write.
const NOTE_INTERVAL_US: i64 = 60 * SECOND_US;

/// The user and team of a request's credential. It comes before all else in a handler, because whoever is not known is
/// not told what else is wrong.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The team.
    pub(crate) team: TeamId,
    /// The user.
    pub(crate) user: UserId,
    /// The API key that was presented, unless it was an access token.
    pub(crate) api_key: Option<SecretString>,
    /// What the team may use.
    pub(crate) quota: Arc<TeamQuota>,
    /// What finding that out took.
    pub(crate) auth_time: Duration,
    rate: RateSlot,
}

/// What a request presents.
enum Credential {
    ApiKey(SecretString),
    AccessToken(SecretString),
}

/// Whom a credential speaks for.
struct Owner {
    credential: String,
    team: TeamId,
    user: UserId,
}

impl Credential {
    fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        if let Some(key) = headers.get(API_KEY) {
            return Ok(Self::ApiKey(key.to_str().unwrap_or_default().trim().into()));
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
            Some(token) if token.starts_with(ACCESS_TOKEN_PREFIX) => Ok(Self::AccessToken(token.into())),
            Some(token) => Ok(Self::ApiKey(token.into())),
            None => Err(ApiError::unauthenticated(
                "authorization header is malformed: it must be Bearer and an API key or an access token",
            )),
        }
    }

    /// Whom it speaks for. The lookup compares hashes of random keys, so its timing tells nothing about a key.
    async fn owner(&self, platform: &Platform) -> Result<Owner, ApiError> {
        let owner = match self {
            Self::ApiKey(key) => {
                let hash = hash_api_key(key.expose_secret()).map_err(|why| match why {
                    InvalidKey::Prefix => {
                        ApiError::unauthenticated("authorization header is malformed: not an API key")
                    }
                    InvalidKey::Digits => ApiError::unauthenticated("invalid API key: invalid format"),
                })?;
                let owner = platform.store.api_key_by_hash(&hash).await?;
                let owner =
                    owner.ok_or_else(|| ApiError::unauthenticated("invalid API key: cannot get the team for it"))?;
                Owner {
                    credential: owner.key_id,
                    team: owner.team_id,
                    user: owner.user_id,
                }
            }
            Self::AccessToken(token) => {
                let hash = hash_access_token(token.expose_secret())
                    .map_err(|_| ApiError::unauthenticated("invalid access token: invalid format"))?;
                let owner = platform.store.access_token_by_hash(&hash).await?;
                let owner =
                    owner.ok_or_else(|| ApiError::unauthenticated("invalid access token: nobody is known by it"))?;
                Owner {
                    credential: owner.token_id,
                    team: owner.team_id,
                    user: owner.user_id,
                }
            }
        };
        Ok(owner)
    }

    /// Notes that it was used, now and then, beside the request.
    fn note_use(&self, platform: &Arc<Platform>, id: String) {
        let now_us = platform.settings.clock.now_us();
        if !platform.uses.is_due(&id, now_us) {
            return;
        }
        let is_api_key = matches!(self, Self::ApiKey(_));
        let store = platform.store.clone();
        platform.work.spawn(async move {
            let noted = if is_api_key {
                store.api_key_used(&id, now_us).await
            } else {
                store.access_token_used(&id, now_us).await
            };
            if let Err(error) = noted {
                tracing::warn!(key.id = id, error = %Chain(&error), "note the use of a key");
            }
        });
    }
}

/// When the use of each credential was last noted, in microseconds since the Unix epoch. As many as there are keys that
/// count: an unknown one never gets here.
#[derive(Debug, Default)]
pub(crate) struct Uses(Mutex<HashMap<String, i64>>);

impl Uses {
    fn is_due(&self, id: &str, now_us: i64) -> bool {
        let mut noted = self.0.lock();
        match noted.get_mut(id) {
            Some(at_us) if now_us - *at_us < NOTE_INTERVAL_US => false,
            Some(at_us) => {
                *at_us = now_us;
                true
            }
            None => {
                noted.insert(id.to_owned(), now_us);
                true
            }
        }
    }
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
        let credential = Credential::of(&parts.headers)?;
        let owner = credential.owner(platform).await?;
        tracing::Span::current().record("team.id", owner.team.as_str());
        if let Some(team) = parts.headers.get(TEAM_ID)
            && team.as_bytes().trim_ascii() != owner.team.as_str().as_bytes()
        {
            return Err(ApiError::no_team(String::from_utf8_lossy(team.as_bytes())));
        }
        let quota = platform.quotas.of(&platform.store, &owner.team).await?;
        let rate = parts.extensions.get::<RateSlot>().cloned().unwrap_or_default();
        if let Some(requests) = &quota.requests {
            let taken = requests.take(platform.settings.clock.now_us());
            rate.set(taken.unwrap_or_else(|level| level));
            taken.map_err(|level| ApiError::too_often("requests per second", level))?;
        }
        credential.note_use(platform, owner.credential);
        Ok(Self {
            team: owner.team,
            user: owner.user,
            api_key: match credential {
                Credential::ApiKey(key) => Some(key),
                Credential::AccessToken(_) => None,
            },
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

/// The id of a key or token in a path: a UUID, in either case.
#[derive(Debug)]
pub(crate) struct KeyPath(pub(crate) String);

impl FromRequestParts<Arc<Platform>> for KeyPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, platform: &Arc<Platform>) -> Result<Self, ApiError> {
        let invalid = || ApiError::invalid("invalid ID: it must be a UUID");
        let Path(text) = Path::<String>::from_request_parts(parts, platform)
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
