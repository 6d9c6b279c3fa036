//! `/api-keys`: the API keys of the caller's team.
//!
//! A key is shown once, in the response that creates it. A deleted key is refused from the first request after its
//! deletion, because every request looks up its key.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use store::Store;
use store::keys::{ApiKeyRow, KeyMask};
use utoipa::ToSchema;
use uuid::Uuid;

use super::auth::{Caller, KeyPath};
use super::body::RequiredBody;
use super::body::shape::body;
use super::body::values::Name;
use super::error::ApiError;
use super::json::json;
use crate::clock::{Clock, rfc3339};
use crate::keys::NewKey;

body! {
    /// The name of a key or token.
    pub(crate) struct KeyName {
        /// The name. It must not contain control characters, or begin or end with a space.
        "name" name: Name;
    }
}

impl KeyName {
    /// The name itself.
    pub(super) fn into_text(self) -> String {
        self.name.0
    }
}

/// The recognisable part of a key or token.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct ShownMask {
    prefix: String,
    /// Number of characters after the prefix.
    value_length: u32,
    /// The first of them.
    masked_value_prefix: String,
    /// The last of them.
    masked_value_suffix: String,
}

impl From<KeyMask> for ShownMask {
    fn from(mask: KeyMask) -> Self {
        Self {
            prefix: mask.prefix,
            value_length: mask.value_length,
            masked_value_prefix: mask.first,
            masked_value_suffix: mask.last,
        }
    }
}

/// A user of a team.
#[derive(Serialize, ToSchema)]
struct TeamUser {
    id: String,
    /// Always `null`: users of this platform have none.
    email: Option<String>,
}

/// An API key, without the key.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TeamApiKey {
    id: String,
    name: String,
    mask: ShownMask,
    #[schema(format = DateTime)]
    created_at: String,
    created_by: TeamUser,
    /// When it was last used, with a precision of a minute.
    #[schema(format = DateTime)]
    last_used: Option<String>,
}

impl From<ApiKeyRow> for TeamApiKey {
    fn from(row: ApiKeyRow) -> Self {
        Self {
            id: row.id,
            name: row.name,
            mask: row.mask.into(),
            created_at: rfc3339(row.created_us),
            created_by: TeamUser {
                id: row.user_id.into(),
                email: None,
            },
            last_used: row.last_used_us.map(rfc3339),
        }
    }
}

/// A newly created API key.
#[derive(Serialize, ToSchema)]
struct CreatedTeamApiKey {
    #[serde(flatten)]
    facts: TeamApiKey,
    /// The key itself. It is shown only in this response.
    key: String,
}

/// Lists the valid API keys of the team, oldest first.
#[utoipa::path(
    get,
    path = "/api-keys",
    tag = "keys",
    responses((status = 200, description = "The keys", body = Vec<TeamApiKey>))
)]
pub(crate) async fn list_api_keys(State(store): State<Store>, caller: Caller) -> Result<Response, ApiError> {
    let rows = store.api_key_list(&caller.team).await?;
    let keys: Vec<TeamApiKey> = rows
        .into_iter()
        .filter(|row| row.revoked_us.is_none())
        .map(TeamApiKey::from)
        .collect();
    json(StatusCode::OK, &keys)
}

/// Creates an API key for the team.
#[utoipa::path(
    post,
    path = "/api-keys",
    tag = "keys",
    request_body(content = KeyName),
    responses((status = 201, description = "The new key, shown only this once", body = CreatedTeamApiKey))
)]
pub(crate) async fn create_api_key(
    State(store): State<Store>,
    State(clock): State<Clock>,
    caller: Caller,
    body: RequiredBody<KeyName>,
) -> Result<Response, ApiError> {
    let name = body.read()?.into_text();
    let key = NewKey::api_key().map_err(ApiError::failed)?;
    let row = ApiKeyRow {
        id: Uuid::now_v7().to_string(),
        team_id: caller.team,
        user_id: caller.user,
        name,
        mask: key.mask(),
        created_us: clock.now_us(),
        revoked_us: None,
        last_used_us: None,
    };
    store.api_key_insert(&row, &key.hash()).await?;
    tracing::info!(key.id = row.id, "created an API key");
    let created = CreatedTeamApiKey {
        facts: row.into(),
        key: key.expose(),
    };
    json(StatusCode::CREATED, &created)
}

/// Renames an API key of the team.
#[utoipa::path(
    patch,
    path = "/api-keys/{apiKeyID}",
    tag = "keys",
    params(("apiKeyID" = inline(KeyPath), Path, description = "The id of the key.")),
    request_body(content = KeyName),
    responses(
        (status = 200, description = "The renamed key", body = TeamApiKey),
        (status = 404, description = "The team has no such key"),
    )
)]
pub(crate) async fn rename_api_key(
    State(store): State<Store>,
    caller: Caller,
    KeyPath(id): KeyPath,
    body: RequiredBody<KeyName>,
) -> Result<Response, ApiError> {
    let name = body.read()?.into_text();
    match store.api_key_rename(&caller.team, &id, &name).await? {
        Some(row) => json(StatusCode::OK, &TeamApiKey::from(row)),
        None => Err(ApiError::no_key("API key", id)),
    }
}

/// Revokes an API key of the team, which may be the key of this request. Requests with it are refused from now on.
#[utoipa::path(
    delete,
    path = "/api-keys/{apiKeyID}",
    tag = "keys",
    params(("apiKeyID" = inline(KeyPath), Path, description = "The id of the key.")),
    responses(
        (status = 204, description = "The key was revoked"),
        (status = 404, description = "The team has no such key"),
    )
)]
pub(crate) async fn delete_api_key(
    State(store): State<Store>,
    State(clock): State<Clock>,
    caller: Caller,
    KeyPath(id): KeyPath,
) -> Result<StatusCode, ApiError> {
    let now_us = clock.now_us();
    if !store.api_key_revoke_of(&caller.team, &id, now_us).await? {
        return Err(ApiError::no_key("API key", id));
    }
    tracing::info!(key.id = id, "revoked an API key");
    Ok(StatusCode::NO_CONTENT)
}
