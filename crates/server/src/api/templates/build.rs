//! Requesting builds: `POST /v3/templates` and its older forms.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::id::{BuildId, TemplateId};
use serde::Serialize;
use serde_json::json;
use store::Store;
use store::builds::{BuildRequested, BuildTarget, DEFAULT_TAG, NewBuild};
use utoipa::ToSchema;
use uuid::Uuid;

use super::error::NotOwnTemplate;
use super::{NamePath, Template, TemplateBuildStatus, find_own, overviews};
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::{AtLeast, List, ShortString};
use crate::api::describe::error_sets;
use crate::api::error::ApiError;
use crate::api::json::json as json_response;
use crate::api::state::ApiState;
use crate::builds::Builds;
use crate::ids::new_template_id;
use crate::templates::{TemplateName, new_tag};

const MIB: u64 = 1 << 20;

/// Retry interval for a team with too many builds, in seconds.
const BUILD_AFTER_S: u32 = 30;

/// Maximum length of a name with its namespace and tag (API contract).
const NAME_MAX: usize = 128;
/// Maximum number of tags in a request.
const TAGS_MAX: usize = 100;
/// Cores of a template whose request does not say (API contract).
const CPU_DEFAULT: u32 = 2;
/// Maximum number of cores (API contract).
const CPU_MAX: u32 = 32;
/// Memory of a template whose request does not say, in MiB (API contract).
const MEMORY_DEFAULT_MB: u32 = 1024;

body! {
    /// A template to build.
    pub(crate) struct NewTemplate {
        /// Its name, `[namespace/]name[:tag]`. If the team has a template with this name, it gets another build.
        "name" name: Nullable<ShortString<NAME_MAX>>;
        /// Another word for `name`, for older clients.
        "alias" alias: Nullable<ShortString<NAME_MAX>> => deprecated;
        /// Tags of the build; `default` if there are none and the name has none.
        "tags" tags: Option<List<String, 0, TAGS_MAX>>;
        /// Cores of its sandboxes: 1 or an even number; default: 2.
        "cpuCount" cpu_count: Nullable<AtLeast<1>>;
        /// Memory of its sandboxes in MiB, an even number; default: 1024.
        "memoryMB" memory_mb: Nullable<AtLeast<128>>;
    }
}

body! {
    /// A template to build, for older clients.
    pub(crate) struct NewTemplateV2 {
        /// Its name.
        "alias" alias: String;
        /// Cores of its sandboxes: 1 or an even number; default: 2.
        "cpuCount" cpu_count: Nullable<AtLeast<1>>;
        /// Memory of its sandboxes in MiB, an even number; default: 1024.
        "memoryMB" memory_mb: Nullable<AtLeast<128>>;
    }
}

body! {
    /// A template to build, for the oldest clients.
    pub(crate) struct NewTemplateV1 {
        /// A Dockerfile, for `POST /templates/{templateID}/builds/{buildID}`.
        "dockerfile" dockerfile: String;
        /// Its name.
        "alias" alias: Nullable<String>;
        /// What sandboxes run from their start on.
        "startCmd" start_cmd: Nullable<String>;
        /// What says that a sandbox is ready by ending with 0.
        "readyCmd" ready_cmd: Nullable<String>;
        /// Cores of its sandboxes: 1 or an even number; default: 2.
        "cpuCount" cpu_count: Nullable<AtLeast<1>>;
        /// Memory of its sandboxes in MiB, an even number; default: 1024.
        "memoryMB" memory_mb: Nullable<AtLeast<128>>;
    }
}

/// A requested build, with its template.
#[derive(Serialize, ToSchema)]
struct RequestedTemplate {
    /// `buildID` is the requested build, and `buildStatus` its status.
    #[serde(flatten)]
    template: Template,
    /// The tags of the build.
    tags: Vec<String>,
}

/// A request, in whatever version.
struct BuildRequest {
    target: Option<TemplateId>,
    name: Option<TemplateName>,
    tags: Vec<String>,
    cpu_count: Option<u32>,
    memory_mb: Option<u32>,
    request_json: Option<String>,
}

/// Checks the size of the sandboxes of a template. Clients compare the beginnings of these texts.
fn check_size(cpu_count: u32, memory_mb: u32, caller: &Caller) -> Result<(), ApiError> {
    let limits = &caller.quota.limits;
    let why = if cpu_count > CPU_MAX {
        format!("CPU count must be at most {CPU_MAX}")
    } else if cpu_count != 1 && !cpu_count.is_multiple_of(2) {
        "CPU count must be 1 or an even number".to_owned()
    } else if cpu_count > limits.template_cpu_count {
        format!(
            "CPU count must be at most {}, the limit of your team",
            limits.template_cpu_count
        )
    } else if !memory_mb.is_multiple_of(2) {
        "Memory must be divisible by 2".to_owned()
    } else if memory_mb > limits.template_memory_mb {
        format!(
            "Memory can't be higher than {} MiB, the limit of your team",
            limits.template_memory_mb
        )
    } else {
        return Ok(());
    };
    Err(ApiError::invalid(why))
}

/// Whether the team may have more templates and snapshots.
pub(crate) async fn check_space(builds: &Builds, caller: &Caller) -> Result<(), ApiError> {
    let Some(limit_mb) = caller.quota.limits.template_disk_mb else {
        return Ok(());
    };
    let used = builds.template_bytes(&caller.team).await;
    let used_mb = used.map_err(ApiError::failed)? / MIB;
    if used_mb >= u64::from(limit_mb) {
        Err(too_little_space(limit_mb, used_mb))
    } else {
        Ok(())
    }
}

/// 429: the team has as many builds as it can have.
fn too_many_builds(limit: u32) -> ApiError {
    ApiError::new(
        StatusCode::TOO_MANY_REQUESTS,
        format!("your team is limited to {limit} builds at the same time: wait until one has ended"),
    )
    .code("build_limit_reached")
    .retry_after(BUILD_AFTER_S)
}

/// 429: the templates of the team take as much space as they may.
fn too_little_space(limit_mb: u32, used_mb: u64) -> ApiError {
    ApiError::new(
        StatusCode::TOO_MANY_REQUESTS,
        format!(
            "your team is limited to {limit_mb} MiB of templates and snapshots, {used_mb} are in use: delete those that \
             are not needed any more"
        ),
    )
    .code("template_space_limit_reached")
}

/// The tags of a build, in the order of the request and without duplicates.
fn tags_of(name: Option<&TemplateName>, others: &[String]) -> Result<Vec<String>, ApiError> {
    let mut tags: Vec<String> = Vec::new();
    let own = name.and_then(|name| name.tag.as_ref());
    for tag in own.into_iter().chain(others) {
        let tag = new_tag(tag)?;
        if !tags.contains(&tag) {
            tags.push(tag);
        }
    }
    if tags.is_empty() {
        tags.push(DEFAULT_TAG.to_owned());
    }
    Ok(tags)
}

async fn request(state: &ApiState, caller: &Caller, request: BuildRequest) -> Result<Response, ApiError> {
    let store = &state.store;
    if let Some(name) = &request.name
        && !name.is_own(store, &caller.team).await?
    {
        return Err(ApiError::foreign_namespace(name));
    }
    let tags = tags_of(request.name.as_ref(), &request.tags)?;
    let cpu_count = request.cpu_count.unwrap_or(CPU_DEFAULT);
    let memory_mb = request.memory_mb.unwrap_or(MEMORY_DEFAULT_MB);
    check_size(cpu_count, memory_mb, caller)?;
    check_space(&state.builds, caller).await?;
    let target = match request.target {
        Some(id) => BuildTarget::Template(id),
        None => {
            let id = new_template_id().map_err(ApiError::failed)?;
            BuildTarget::Alias(id)
        }
    };
    let build: BuildId = BuildId::try_from(Uuid::new_v4().to_string())?;
    let alias = request.name.map(|name| name.name);
    let limit = caller.quota.limits.builds;
    let new = NewBuild {
        team: caller.team.clone(),
        target,
        alias: alias.clone(),
        tags: tags.clone(),
        build: build.clone(),
        cpu_count,
        memory_mb,
        disk_mb: state.sandboxes.defaults.resources.disk_mb,
        request_json: request.request_json,
        limit,
        now_us: state.clock.now_us(),
    };
    let alias = alias.unwrap_or_default();
    let template = match store.build_request(&new).await? {
        BuildRequested::Accepted { template, superseded } => {
            state.builds.cancel(&superseded);
            template
        }
        BuildRequested::TooMany => return Err(too_many_builds(limit)),
        BuildRequested::AliasIsId => {
            return Err(ApiError::taken(format!(
                "name \"{alias}\" is the id of a template: choose another"
            )));
        }
        BuildRequested::AliasTaken => {
            return Err(ApiError::taken(format!(
                "name \"{alias}\" is that of another template of your team"
            )));
        }
        BuildRequested::TooManyTags => return Err(ApiError::tag_limit()),
        BuildRequested::NoTemplate => return Err(ApiError::no_template("the template does not exist any more")),
    };
    tracing::info!(template.id = %template, build.id = %build, "requested a build");
    let (found, namespace) = overviews(store, caller, Some(&template)).await?;
    let overview = found
        .into_iter()
        .next()
        .ok_or_else(|| ApiError::no_template("the template does not exist any more"))?;
    let template = Template {
        build_id: build.into(),
        build_status: TemplateBuildStatus::Waiting,
        cpu_count,
        memory_mb,
        ..Template::new(overview, &namespace)
    };
    json_response(StatusCode::ACCEPTED, &RequestedTemplate { template, tags })
}

error_sets! {
    /// No build was requested.
    NotRequested {
        409 "The name is the id of a template";
        429 "The team has as many builds as it can have";
    }
}

/// Requests a build of a new template, or another build of the template with this name.
///
/// The build waits until it is started with `POST /v2/templates/{templateID}/builds/{buildID}`.
#[utoipa::path(
    post,
    path = "/v3/templates",
    tag = "templates",
    request_body(content = NewTemplate),
    responses((status = 202, description = "The requested build", body = RequestedTemplate), NotRequested)
)]
pub(crate) async fn create_template(
    State(state): State<ApiState>,
    caller: Caller,
    body: RequiredBody<NewTemplate>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let name = body.name.0.or(body.alias.0).map(|ShortString(name)| name);
    let new = BuildRequest {
        target: None,
        name: name.map(|name| TemplateName::new(&name)).transpose()?,
        tags: body.tags.map_or_else(Vec::new, |List(tags)| tags),
        cpu_count: body.cpu_count.0.map(|AtLeast(count)| count),
        memory_mb: body.memory_mb.0.map(|AtLeast(count)| count),
        request_json: None,
    };
    request(&state, &caller, new).await
}

/// Requests a build of a new template, or another build of the template with this name, for older clients.
#[utoipa::path(
    post,
    path = "/v2/templates",
    tag = "templates",
    request_body(content = NewTemplateV2),
    responses((status = 202, description = "The requested build", body = RequestedTemplate), NotRequested)
)]
pub(crate) async fn create_template_v2(
    State(state): State<ApiState>,
    caller: Caller,
    body: RequiredBody<NewTemplateV2>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let new = BuildRequest {
        target: None,
        name: Some(TemplateName::new(&body.alias)?),
        tags: Vec::new(),
        cpu_count: body.cpu_count.0.map(|AtLeast(count)| count),
        memory_mb: body.memory_mb.0.map(|AtLeast(count)| count),
        request_json: None,
    };
    request(&state, &caller, new).await
}

/// The request of a body of version 1.
fn request_v1(body: NewTemplateV1, target: Option<TemplateId>) -> Result<BuildRequest, ApiError> {
    let name = body.alias.0.map(|alias| TemplateName::new(&alias)).transpose()?;
    let sent = json!({
        "dockerfile": body.dockerfile,
        "startCmd": body.start_cmd.0,
        "readyCmd": body.ready_cmd.0,
    });
    Ok(BuildRequest {
        target,
        // Only the bare name counts.
        name: name.map(|name| TemplateName {
            namespace: None,
            tag: None,
            ..name
        }),
        tags: Vec::new(),
        cpu_count: body.cpu_count.0.map(|AtLeast(count)| count),
        memory_mb: body.memory_mb.0.map(|AtLeast(count)| count),
        request_json: Some(sent.to_string()),
    })
}

/// Requests a build of a new template, or another build of the template with this name, for the oldest clients.
#[utoipa::path(
    post,
    path = "/templates",
    tag = "templates",
    request_body(content = NewTemplateV1),
    responses((status = 202, description = "The requested build", body = RequestedTemplate), NotRequested)
)]
pub(crate) async fn create_template_v1(
    State(state): State<ApiState>,
    caller: Caller,
    body: RequiredBody<NewTemplateV1>,
) -> Result<Response, ApiError> {
    let new = request_v1(body.read()?, None)?;
    request(&state, &caller, new).await
}

/// Requests another build of a template, for the oldest clients. Another `alias` replaces the names of the template.
#[utoipa::path(
    post,
    path = "/templates/{templateID}",
    tag = "templates",
    params(("templateID" = String, Path, description = "The id of the template", pattern = "^[A-Za-z0-9_-]+$")),
    request_body(content = NewTemplateV1),
    responses(
        (status = 202, description = "The requested build", body = RequestedTemplate),
        (status = 409, description = "The name is taken"),
        (status = 429, description = "The team has as many builds as it can have"),
        NotOwnTemplate,
    )
)]
pub(crate) async fn rebuild_template(
    State(state): State<ApiState>,
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    body: RequiredBody<NewTemplateV1>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let row = find_own(&text, &caller.team, &store).await?;
    let new = request_v1(body, Some(row.id))?;
    request(&state, &caller, new).await
}
