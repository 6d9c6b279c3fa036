//! Changing and deleting templates.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use store::Store;
use store::templates::{Deleted, TemplateRow};

use super::error::NotOwnTemplate;
use super::{NamePath, Template, find_own, overviews};
use crate::api::auth::Caller;
use crate::api::body::OptionalBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::builds::Builds;
use crate::clock::Clock;

body! {
    /// A change of a template.
    pub(crate) struct TemplateUpdate {
        /// Whether other teams can use it: by its id, or by its name with the namespace of its team.
        "public" public: Nullable<bool>;
    }
}

async fn update(store: &Store, caller: &Caller, text: &str, public: Option<bool>) -> Result<Response, ApiError> {
    let row = find_own(text, &caller.team, store).await?;
    if let Some(public) = public {
        if !store.template_set_public(&row.id, public).await? {
            return Err(ApiError::unknown_template(text));
        }
        tracing::info!(template.id = %row.id, public, "changed a template");
    }
    let (found, namespace) = overviews(store, caller, Some(&row.id)).await?;
    let overview = found
        .into_iter()
        .next()
        .ok_or_else(|| ApiError::unknown_template(text))?;
    json(StatusCode::OK, &Template::new(overview, &namespace))
}

/// Changes whether other teams can use a template, for older clients.
#[utoipa::path(
    patch,
    path = "/templates/{templateID}",
    tag = "templates",
    params(("templateID" = String, Path, description = "The id or a name of the template")),
    request_body(content = Option<TemplateUpdate>),
    responses((status = 200, description = "The template", body = Template), NotOwnTemplate)
)]
pub(crate) async fn update_template_v1(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    body: OptionalBody<TemplateUpdate>,
) -> Result<Response, ApiError> {
    update(&store, &caller, &text, body.read()?.public.0).await
}

/// Changes whether other teams can use a template.
#[utoipa::path(
    patch,
    path = "/v2/templates/{templateID}",
    tag = "templates",
    params(("templateID" = String, Path, description = "The id or a name of the template")),
    request_body(content = Option<TemplateUpdate>),
    responses((status = 200, description = "The template", body = Template), NotOwnTemplate)
)]
pub(crate) async fn update_template(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    body: OptionalBody<TemplateUpdate>,
) -> Result<Response, ApiError> {
    update(&store, &caller, &text, body.read()?.public.0).await
}

/// Deletes a template with all its builds. Its names can be used again, and its id cannot.
///
/// Builds of it that are in progress are cancelled. Templates that were built from it stay.
#[utoipa::path(
    delete,
    path = "/templates/{templateID}",
    tag = "templates",
    params(("templateID" = String, Path, description = "The id or a name of the template; a tag is ignored")),
    responses(
        (status = 204, description = "The template was deleted"),
        (status = 400, description = "Sandboxes that were created from it exist"),
        NotOwnTemplate,
    )
)]
pub(crate) async fn delete_template(
    State(store): State<Store>,
    State(builds): State<Arc<Builds>>,
    State(clock): State<Clock>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let row = find_own(&text, &caller.team, &store).await?;
    delete(&store, &builds, &clock, &row, &text).await
}

/// Deletes a template that a request names by this text.
pub(crate) async fn delete(
    store: &Store,
    builds: &Builds,
    clock: &Clock,
    row: &TemplateRow,
    text: &str,
) -> Result<Response, ApiError> {
    match store.template_delete(&row.id, clock.now_us()).await? {
        Deleted::Deleted(cancelled) => {
            builds.cancel(&cancelled);
            builds.note_deleted();
            tracing::info!(template.id = %row.id, "deleted a template");
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        Deleted::InUse => Err(ApiError::invalid(format!(
            "template \"{text}\" is used by sandboxes: kill them first"
        ))),
        Deleted::Missing => Err(ApiError::unknown_template(text)),
    }
}
