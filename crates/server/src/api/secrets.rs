//! `/secrets`: the secrets of the caller's team. No response has the value of one.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, StatusCode, header, request};
use serde::Serialize;
use store::Store;
use store::sandboxes::Order;
use store::secrets::SecretRow;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::body::RequiredBody;
use super::body::shape::body;
use super::body::values::Texts;
use super::describe::{error_sets, path_parameter};
use super::error::ApiError;
use super::json::json;
use super::page::with_next;
use super::query::shape::Params;
use super::templates::PageParameters;
use crate::clock::rfc3339;
use crate::sandboxes::Sandboxes;
use crate::secrets::{SECRETS_OF_TEAM_MAX, SecretError, Secrets};

body! {
    /// A secret to store.
    pub(crate) struct NewSecret {
        /// Its name, unique in the team, of at most 128 characters, without `{`, `}`, `/` and control characters. It is
        /// stored in lower case, and must not begin with `sec_`.
        "name" name: String;
        /// Its value: 1 to 8192 printable ASCII characters. It is never returned.
        "value" value: String;
        /// Texts of the client: at most 32 entries, keys of at most 128 bytes, values of at most 1024 bytes, 8192 bytes
        /// in all.
        "metadata" metadata: Option<Texts>;
    }
}

body! {
    /// A new value of a secret.
    pub(crate) struct SecretUpdate {
        /// The value. It is never returned.
        "value" value: String;
        /// Texts of the client, which replace those before. If absent, they are kept.
        "metadata" metadata: Option<Texts>;
    }
}

/// A secret, without its value.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Secret {
    #[serde(rename = "secretID")]
    secret_id: String,
    name: String,
    /// How often its value was set.
    current_version: i64,
    metadata: Texts,
    #[schema(format = DateTime)]
    created_at: String,
    /// When its value was last set.
    #[schema(format = DateTime)]
    updated_at: String,
}

impl From<SecretRow> for Secret {
    fn from(row: SecretRow) -> Self {
        Self {
            secret_id: row.id,
            name: row.name,
            current_version: row.version,
            metadata: row.metadata,
            created_at: rfc3339(row.created_us),
            updated_at: rfc3339(row.updated_us),
        }
    }
}

/// The id or the name of a secret in a path.
#[derive(Debug)]
pub(crate) struct SecretPath(String);

impl IntoParams for SecretPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let about = "The id or the name of the secret";
        vec![path_parameter("secretID", Some(about), Some("^[^/{}]+$"))]
    }
}

impl<S: Send + Sync> FromRequestParts<S> for SecretPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid secret ID: it is not text"))?;
        Ok(Self(text))
    }
}

impl ApiError {
    /// The response when a request for a secret failed.
    fn secret(error: SecretError, secret: &str) -> Self {
        match error {
            SecretError::Store(error) => error.into(),
            SecretError::Invalid(why) => Self::invalid(why),
            SecretError::Taken => Self::taken(format!("secret \"{secret}\" already exists")),
            SecretError::TooMany => {
                let why = format!("your team is limited to {SECRETS_OF_TEAM_MAX} secrets: delete one first");
                Self::new(StatusCode::TOO_MANY_REQUESTS, why)
                    .code("secret_limit_reached")
                    .should_retry(false)
            }
            SecretError::Unknown => Self::no_key("secret", secret),
            SecretError::Seal(error) => Self::failed(error),
        }
    }
}

/// Keeps caches from storing a response.
fn uncached(mut response: Response) -> Response {
    let no_store = HeaderValue::from_static("no-store");
    response.headers_mut().insert(header::CACHE_CONTROL, no_store);
    response
}

/// The response to a request, which no cache stores, whatever it is.
async fn answer(response: impl Future<Output = Result<Response, ApiError>>) -> Response {
    uncached(response.await.unwrap_or_else(ApiError::into_response))
}

/// Lists the secrets of the team, newest first.
#[utoipa::path(
    get,
    path = "/secrets",
    tag = "secrets",
    params(PageParameters),
    responses((
        status = 200,
        description = "A page of the secrets, without their values",
        body = Vec<Secret>,
        headers(("X-Next-Token" = String, description = "Token of the next page; absent on the last page")),
    ))
)]
pub(crate) async fn list_secrets(
    State(store): State<Store>,
    caller: Caller,
    Params(page): Params<PageParameters>,
) -> Response {
    answer(async {
        let after = page.after::<String>()?;
        let after = after.as_ref().map(|(created_us, id)| (*created_us, id.as_str()));
        let mut rows = store.secret_list(&caller.team, after, page.wanted()).await?;
        let more = page.cut(&mut rows);
        let next = rows.last().filter(|_| more);
        let next = next.map(|row| (row.created_us, row.id.clone()));
        let secrets: Vec<Secret> = rows.into_iter().map(Secret::from).collect();
        with_next(json(StatusCode::OK, &secrets)?, next, Order::Desc)
    })
    .await
}

/// Stores a secret. Header rules of sandboxes refer to it as `${e2b.secrets.NAME}`.
#[utoipa::path(
    post,
    path = "/secrets",
    tag = "secrets",
    request_body(content = NewSecret),
    responses(
        (status = 201, description = "The secret, without its value", body = Secret),
        (status = 409, description = "The team has a secret with this name"),
        (status = 429, description = "The team has as many secrets as it can have"),
    )
)]
pub(crate) async fn create_secret(
    State(secrets): State<Arc<Secrets>>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    body: RequiredBody<NewSecret>,
) -> Response {
    answer(async {
        let body = body.read()?;
        let metadata = body.metadata.unwrap_or_default();
        let created = secrets.create(&caller.team, &body.name, &body.value, metadata).await;
        let row = created.map_err(|error| ApiError::secret(error, &body.name))?;
        tracing::info!(secret.id = row.id, "stored a secret");
        // Sandboxes may refer to one of this name that was deleted.
        sandboxes.apply_secret(&caller.team, &row.name).await;
        json(StatusCode::CREATED, &Secret::from(row))
    })
    .await
}

error_sets! {
    /// There is no such secret.
    NoSecret {
        404 "The team has no such secret";
    }
}

/// Returns a secret, without its value.
#[utoipa::path(
    get,
    path = "/secrets/{secretID}",
    tag = "secrets",
    params(SecretPath),
    responses((status = 200, description = "The secret, without its value", body = Secret), NoSecret)
)]
pub(crate) async fn get_secret(
    State(secrets): State<Arc<Secrets>>,
    caller: Caller,
    SecretPath(secret): SecretPath,
) -> Response {
    answer(async {
        let found = secrets.find(&caller.team, &secret).await;
        let row = found.map_err(|error| ApiError::secret(error, &secret))?;
        json(StatusCode::OK, &Secret::from(row))
    })
    .await
}

/// Sets the value of a secret. New connections of running sandboxes get the new value.
#[utoipa::path(
    post,
    path = "/secrets/{secretID}",
    tag = "secrets",
    params(SecretPath),
    request_body(content = SecretUpdate),
    responses((status = 200, description = "The secret, without its value", body = Secret), NoSecret)
)]
pub(crate) async fn update_secret(
    State(secrets): State<Arc<Secrets>>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SecretPath(secret): SecretPath,
    body: RequiredBody<SecretUpdate>,
) -> Response {
    answer(async {
        let body = body.read()?;
        let changed = secrets.update(&caller.team, &secret, &body.value, body.metadata).await;
        let row = changed.map_err(|error| ApiError::secret(error, &secret))?;
        tracing::info!(secret.id = row.id, secret.version = row.version, "changed a secret");
        sandboxes.apply_secret(&caller.team, &row.name).await;
        json(StatusCode::OK, &Secret::from(row))
    })
    .await
}

/// Deletes a secret. Running sandboxes no longer set headers that have it.
#[utoipa::path(
    delete,
    path = "/secrets/{secretID}",
    tag = "secrets",
    params(SecretPath),
    responses((status = 204, description = "The secret was deleted"), NoSecret)
)]
pub(crate) async fn delete_secret(
    State(secrets): State<Arc<Secrets>>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SecretPath(secret): SecretPath,
) -> Response {
    answer(async {
        let deleted = secrets.delete(&caller.team, &secret).await;
        let row = deleted.map_err(|error| ApiError::secret(error, &secret))?;
        tracing::info!(secret.id = row.id, "deleted a secret");
        sandboxes.apply_secret(&caller.team, &row.name).await;
        Ok(StatusCode::NO_CONTENT.into_response())
    })
    .await
}
