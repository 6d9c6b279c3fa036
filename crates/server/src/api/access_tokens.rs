//! `/access-tokens`: the access tokens of the caller.
//!
//! A token acts for its user wherever an API key is accepted, and clients log in with it. It is shown once, in the
//! response that creates it, and is refused from the first request after its deletion.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use store::Store;
use store::tokens::AccessTokenRow;
use utoipa::ToSchema;
use uuid::Uuid;

use super::api_keys::{KeyName, ShownMask};
use super::auth::{Caller, KeyPath};
use super::body::RequiredBody;
use super::error::ApiError;
use super::json::json;
use crate::clock::{Clock, rfc3339};
use crate::keys::NewKey;

/// A newly created access token.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct CreatedAccessToken {
    id: String,
    name: String,
    /// The token itself. It is shown only in this response.
    token: String,
    mask: ShownMask,
    #[schema(format = DateTime)]
    created_at: String,
}

/// Creates an access token for the caller.
#[utoipa::path(
    post,
    path = "/access-tokens",
    tag = "keys",
    request_body(content = KeyName),
    responses((status = 201, description = "The new token, shown only this once", body = CreatedAccessToken))
)]
pub(crate) async fn create_access_token(
    State(store): State<Store>,
    State(clock): State<Clock>,
    caller: Caller,
    body: RequiredBody<KeyName>,
) -> Result<Response, ApiError> {
    let name = body.read()?.into_text();
    let token = NewKey::access_token().map_err(ApiError::failed)?;
    let row = AccessTokenRow {
        id: Uuid::now_v7().to_string(),
        user_id: caller.user,
        name,
        mask: token.mask(),
        created_us: clock.now_us(),
        last_used_us: None,
    };
    store.access_token_insert(&row, &token.hash()).await?;
    tracing::info!(token.id = row.id, "created an access token");
    let created = CreatedAccessToken {
        id: row.id,
        name: row.name,
        token: token.expose(),
        mask: row.mask.into(),
        created_at: rfc3339(row.created_us),
    };
    json(StatusCode::CREATED, &created)
}

/// Deletes an access token of the caller, which may be the token of this request. Requests with it are refused from now
/// on.
#[utoipa::path(
    delete,
    path = "/access-tokens/{accessTokenID}",
    tag = "keys",
    params(("accessTokenID" = inline(KeyPath), Path, description = "The id of the token.")),
    responses(
        (status = 204, description = "The token was deleted"),
        (status = 404, description = "The caller has no such token"),
    )
)]
pub(crate) async fn delete_access_token(
    State(store): State<Store>,
    caller: Caller,
    KeyPath(id): KeyPath,
) -> Result<StatusCode, ApiError> {
    if !store.access_token_delete(&caller.user, &id).await? {
        return Err(ApiError::no_key("access token", id));
    }
    tracing::info!(token.id = id, "deleted an access token");
    Ok(StatusCode::NO_CONTENT)
}
