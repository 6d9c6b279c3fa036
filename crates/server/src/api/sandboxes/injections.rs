//! `/sandboxes/{sandboxID}/injections` and `/sandboxes/{sandboxID}/github-token`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::injection::spec::InjectionItem;
use model::limits::ATTACHMENTS_MAX;
use model::secret::Secret;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{NotChanged, NotRunning};
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::RequiredBody;
use crate::api::body::shape::body;
use crate::api::body::values::List;
use crate::api::error::ApiError;
use crate::api::injection_rules::ShownInjection;
use crate::api::injection_values::ItemValue;
use crate::api::json::json;
use crate::injections::{RefusedInjections, SandboxInjections};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::injections::InjectionUpdate;

body! {
    /// The injections of a sandbox from now on.
    pub(crate) struct SandboxInjectionsUpdate {
        /// All of them, in order of precedence.
        "injections" injections: List<ItemValue, 0, ATTACHMENTS_MAX>;
    }
}

body! {
    /// A token for the code hosts of a sandbox.
    pub(crate) struct SandboxToken {
        /// The token.
        "authorization_token" token: String;
    }
}

/// The injections of a sandbox, without secrets.
#[derive(Serialize, ToSchema)]
#[schema(as = SandboxInjections)]
struct ShownInjections {
    injections: Vec<ShownInjection>,
}

/// The injections of a request, which are not checked yet.
///
/// # Errors
/// With what is wrong, for the client.
pub(super) fn items(settings: List<ItemValue, 0, ATTACHMENTS_MAX>) -> Result<Vec<InjectionItem>, String> {
    let List(settings) = settings;
    let items = settings.into_iter().enumerate();
    let items = items.map(|(index, ItemValue(one))| one.item().map_err(|why| format!("injections[{index}].{why}")));
    items.collect()
}

/// The response to injections that are refused.
fn refused(error: RefusedInjections) -> ApiError {
    match error {
        RefusedInjections::Store(error) => error.into(),
        RefusedInjections::Invalid(why) => ApiError::invalid(why),
    }
}

/// Returns the injections of a sandbox. Keys, tokens and values of headers are masked.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}/injections",
    tag = "sandboxes",
    params(SandboxPath),
    responses((status = 200, description = "The injections", body = ShownInjections), NotRunning)
)]
pub(crate) async fn get_sandbox_injections(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Response, ApiError> {
    caller.sandbox(&sandboxes, &id).await?;
    let injections = sandboxes.policies.injections.of_sandbox(&id).await?;
    let items = injections.map(|injections| injections.items).unwrap_or_default();
    let injections = items.iter().map(ShownInjection::of_item).collect();
    json(StatusCode::OK, &ShownInjections { injections })
}

/// Replaces the injections of a sandbox, for new connections.
#[utoipa::path(
    put,
    path = "/sandboxes/{sandboxID}/injections",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = SandboxInjectionsUpdate),
    responses((status = 204, description = "The sandbox has these injections"), NotChanged)
)]
pub(crate) async fn set_sandbox_injections(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: RequiredBody<SandboxInjectionsUpdate>,
) -> Result<StatusCode, ApiError> {
    let injections = SandboxInjections {
        user: caller.user.clone(),
        items: items(body.read()?.injections).map_err(ApiError::invalid)?,
    };
    let entry = caller.sandbox(&sandboxes, &id).await?;
    sandboxes
        .policies
        .injections
        .check(&injections)
        .await
        .map_err(refused)?;
    sandboxes
        .set_injections(&entry, InjectionUpdate::Replace(injections))
        .await
        .map_err(|error| ApiError::not_changed(error, &id))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Replaces the token for the code hosts of a sandbox, for new connections. Other injections stay as they are.
#[utoipa::path(
    put,
    path = "/sandboxes/{sandboxID}/github-token",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = SandboxToken),
    responses((status = 204, description = "The sandbox has this token"), NotChanged)
)]
pub(crate) async fn set_sandbox_token(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: RequiredBody<SandboxToken>,
) -> Result<StatusCode, ApiError> {
    let token = Secret::new(body.read()?.token);
    model::injection::spec::check_secret("authorization_token", &token)
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    let entry = caller.sandbox(&sandboxes, &id).await?;
    sandboxes
        .set_injections(&entry, InjectionUpdate::Token(token))
        .await
        .map_err(|error| ApiError::not_changed(error, &id))?;
    Ok(StatusCode::NO_CONTENT)
}
