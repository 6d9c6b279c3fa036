//! `GET /ready-made-templates`: the recipes that come with the program. A build of one is started with `fromReadyMade`.

use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json::json;

/// A recipe that comes with the program, and what it is built with unless a request says otherwise.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ReadyMadeTemplate {
    /// Name of the recipe, for `fromReadyMade`.
    name: &'static str,
    /// Name that published clients ask for.
    template_name: String,
    /// What its sandboxes are for.
    description: String,
    /// Cores of its sandboxes.
    cpu_count: u32,
    /// Memory of its sandboxes, in MiB.
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    /// The arguments of a build.
    build_args: Vec<ReadyMadeArgument>,
    /// The Dockerfile. What it copies is not part of the answer.
    dockerfile: &'static str,
}

/// An argument of a recipe.
#[derive(Serialize, ToSchema)]
struct ReadyMadeArgument {
    /// Name of the argument.
    name: String,
    /// Value of the argument where none is sent; empty if there is none.
    default: String,
}

/// Lists the templates that come with the program as recipes. Each is built with `fromReadyMade` of
/// `POST /v2/templates/{templateID}/builds/{buildID}`, which needs the mirrors of packages that its page names.
#[utoipa::path(
    get,
    path = "/ready-made-templates",
    tag = "templates",
    responses((status = 200, description = "The recipes", body = Vec<ReadyMadeTemplate>))
)]
pub(crate) async fn list_ready_made_templates(_: Caller) -> Result<Response, ApiError> {
    let all = recipes::all().iter().map(|recipe| {
        let settings = recipe.settings()?;
        let arguments = recipe.arguments()?.into_iter();
        Ok(ReadyMadeTemplate {
            name: recipe.name,
            template_name: settings.name.unwrap_or_default(),
            description: settings.description.unwrap_or_default(),
            cpu_count: settings.cpu.unwrap_or_default(),
            memory_mb: settings.memory.unwrap_or_default(),
            build_args: arguments
                .map(|argument| ReadyMadeArgument {
                    name: argument.name,
                    default: argument.default.unwrap_or_default(),
                })
                .collect(),
            dockerfile: recipe.dockerfile(),
        })
    });
    let all: Result<Vec<_>, recipes::Malformed> = all.collect();
    json(StatusCode::OK, &all.map_err(ApiError::failed)?)
}
