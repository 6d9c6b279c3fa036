//! `GET /teams`: the team that a credential speaks for, with a key for it.
//!
//! Clients that log in with a token ask here for the API key to use from then on. Keys are kept as hashes only, so none
//! of the others can be shown. Whoever presents an API key gets that one back. A user with an access token gets a key of
//! their own, made at the first call and shown again at every later one: it is derived from the platform's seed and the
//! id of its row. It is listed and revoked like any other key; once it is, the next call makes a new one.

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

/// What the key of a user is called until somebody renames it.
const KEY_NAME: &str = "made for a login";

/// A team.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Team {
    #[serde(rename = "teamID")]
    id: String,
    name: String,
    /// A key that acts for it: the one that was presented, or one of the caller's own.
    api_key: String,
    /// Whether it is the one to use unless another is named.
    is_default: bool,
}

/// The teams of the caller, which is one.
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
        None => key_of_user((&store, &tokens), clock.now_us(), &caller).await?,
    };
    let team = Team {
        id: team.id.into(),
        name: team.name,
        api_key,
        is_default: true,
    };
    json(StatusCode::OK, &[team])
}

/// The key of a user that can be shown again, made if there is none.
async fn key_of_user((store, tokens): (&Store, &TokenSeed), now_us: i64, caller: &Caller) -> Result<String, ApiError> {
    for row in store.api_key_list(&caller.team).await? {
        let key = NewKey::derived(tokens, &row.id);
        let may_be = row.revoked_us.is_none() && row.user_id == caller.user && row.mask == key.mask();
        // The mask is a part of the key only; the hash is all of it.
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
