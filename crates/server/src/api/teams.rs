//! `GET /teams`: the team of a credential, with an API key for it.
//!
//! Clients that log in with a token get the API key to use from then on here. Keys are stored as hashes only, so
//! existing ones cannot be shown. A caller with an API key gets that key back. A user with an access token gets a key
//! of their own, created by the first call and returned by every later one: it is derived from the platform's seed and
//! the id of its row. It is listed and revoked like any other key; after that, the next call creates a new one.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use secrecy::ExposeSecret as _;
use serde::Serialize;
use store::Store;
use store::keys::ApiKeyRow;
use utoipa::ToSchema;
use uuid::Uuid;

use super::auth::Caller;
use super::error::ApiError;
use super::json::json;
use crate::clock::Clock;
use crate::keys::{NewKey, TokenSeed};

/// Initial name of the key of a user.
const KEY_NAME: &str = "created at login";

/// A team.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Team {
    #[serde(rename = "teamID")]
    id: String,
    name: String,
    /// An API key of the team: that of the request, or one of the caller's own.
    api_key: String,
    /// Whether it is used unless another team is named.
    is_default: bool,
}

/// Lists the teams of the caller, which is always one.
#[utoipa::path(
    get,
    path = "/teams",
    tag = "keys",
    responses((status = 200, description = "The teams", body = Vec<Team>))
)]
pub(crate) async fn list_teams(
    State(store): State<Store>,
    State(clock): State<Clock>,
    State(tokens): State<TokenSeed>,
    caller: Caller,
) -> Result<Response, ApiError> {
    let Some(team) = store.team_by_id(&caller.team).await? else {
        return Err(ApiError::no_team(&caller.team));
    };
    let api_key = match &caller.api_key {
        Some(key) => key.expose_secret().to_owned(),
        None => key_of_user(&store, &tokens, clock.now_us(), &caller).await?,
    };
    let team = Team {
        id: team.id.into(),
        name: team.name,
        api_key,
        is_default: true,
    };
    json(StatusCode::OK, &[team])
}

/// The derived key of a user. It is created if there is none.
async fn key_of_user(store: &Store, tokens: &TokenSeed, now_us: i64, caller: &Caller) -> Result<String, ApiError> {
    for row in store.api_key_list(&caller.team).await? {
        let key = NewKey::derived(tokens, &row.id);
        let may_be = row.revoked_us.is_none() && row.user_id == caller.user && row.mask == key.mask();
        // The mask has only a part of the key; the hash compares all of it.
        if may_be
            && let Some(owner) = store.api_key_by_hash(&key.hash()).await?
            && owner.key_id == row.id
        {
            return Ok(key.expose());
        }
    }
    let id = Uuid::now_v7().to_string();
    let key = NewKey::derived(tokens, &id);
    let row = ApiKeyRow {
        id,
        team_id: caller.team.clone(),
        user_id: caller.user.clone(),
        name: KEY_NAME.to_owned(),
        mask: key.mask(),
        created_us: now_us,
        revoked_us: None,
        last_used_us: None,
    };
    store.api_key_insert(&row, &key.hash()).await?;
    Ok(key.expose())
}
