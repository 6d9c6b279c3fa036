//! Templates: what sandboxes are made of. Reading them; what builds and changes them is in [`super::not_built`].
//!
//! A team sees its own templates and the global ones, which every team can start. Those of other teams are what does not
//! exist, and so is a template that another team made public: it is started by its id and not listed.

use std::str::FromStr;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use model::id::{TeamId, TemplateId};
use model::limits::LIST_LIMIT;
use serde::Serialize;
use store::Store;
use store::sandboxes::Order;
use store::templates::{BuildCursor, BuildRow, BuildStatus, TemplateOverview, TemplateRow};
use utoipa::ToSchema;

use super::auth::Caller;
use super::error::{ApiError, ErrorBody};
use super::json::json;
use super::page::{parse_token, with_next};
use super::query::shape::{PageLimit, Params, Text, query};
use crate::clock::rfc3339;
use crate::templates::TemplateName;

/// The id of a build that there is not: clients read it as an id before they look at `buildStatus`.
const NO_BUILD: &str = "00000000-0000-0000-0000-000000000000";

/// How far a build has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum TemplateBuildStatus {
    Waiting,
    Building,
    Ready,
    Error,
}

impl From<BuildStatus> for TemplateBuildStatus {
    fn from(status: BuildStatus) -> Self {
        match status {
            BuildStatus::Building => Self::Building,
            BuildStatus::Ready => Self::Ready,
            BuildStatus::Failed => Self::Error,
        }
    }
}

/// One template of a list.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Template {
    #[serde(rename = "templateID")]
    template_id: String,
    /// The newest build that sandboxes can be started from; only zeros when there is none.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Of a sandbox that is started from it, like the two after it; 0 when there is no build.
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_mb: u32,
    /// Whether other teams can start it.
    public: bool,
    /// The names that it answers to.
    aliases: Vec<String>,
    /// The same with the team's name before them, where they are the team's own.
    names: Vec<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
    /// Not kept.
    #[schema(value_type = Option<Object>)]
    created_by: Option<()>,
    /// When a sandbox was last started from it.
    #[schema(format = DateTime)]
    last_spawned_at: Option<String>,
    /// How many sandboxes were started from it, by whichever team.
    spawn_count: i64,
    /// How many builds there were, however they ended.
    build_count: i64,
    /// The version of the agent; empty when there is no build.
    envd_version: String,
    /// Of the newest build.
    build_status: TemplateBuildStatus,
    /// Whether it comes with the platform.
    is_default: bool,
}

impl Template {
    fn new(overview: TemplateOverview, team_name: &str) -> Self {
        let TemplateOverview {
            template,
            updated_us,
            build_count,
            build_status,
            ready,
        } = overview;
        let is_default = template.team_id.is_none();
        let names = template.aliases.iter().map(|alias| {
            if is_default {
                alias.clone()
            } else {
                format!("{team_name}/{alias}")
            }
        });
        Self {
            names: names.collect(),
            template_id: template.id.into(),
            cpu_count: ready.as_ref().map_or(0, |build| build.cpu_count),
            memory_mb: ready.as_ref().map_or(0, |build| build.memory_mb),
            disk_mb: ready.as_ref().map_or(0, |build| build.disk_mb),
            envd_version: ready.as_ref().map_or_else(String::new, version),
            build_id: ready.map_or_else(|| NO_BUILD.to_owned(), |build| build.id.into()),
            public: template.public || is_default,
            aliases: template.aliases,
            created_at: rfc3339(template.created_us),
            updated_at: rfc3339(updated_us),
            created_by: None,
            last_spawned_at: template.last_spawned_us.map(rfc3339),
            spawn_count: template.spawn_count,
            build_count,
            build_status: build_status.map_or(TemplateBuildStatus::Waiting, TemplateBuildStatus::from),
            is_default,
        }
    }
}

/// The agent's version of a build. One that was built before the version was kept starts with the platform's own.
fn version(build: &BuildRow) -> String {
    let own = || protocol::agent::VERSION.to_owned();
    build.agent_version.clone().unwrap_or_else(own)
}

/// One build.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateBuild {
    #[serde(rename = "buildID")]
    build_id: String,
    status: TemplateBuildStatus,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, nullable = false)]
    finished_at: Option<String>,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_mb: u32,
    envd_version: String,
}

impl TemplateBuild {
    fn new(row: BuildRow) -> Self {
        Self {
            envd_version: version(&row),
            build_id: row.id.into(),
            status: row.status.into(),
            created_at: rfc3339(row.created_us),
            updated_at: rfc3339(row.finished_us.unwrap_or(row.created_us)),
            finished_at: row.finished_us.map(rfc3339),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
        }
    }
}

/// A template with a page of its builds.
#[derive(Serialize, ToSchema)]
struct TemplateWithBuilds {
    #[serde(flatten)]
    template: Template,
    /// The newest first.
    builds: Vec<TemplateBuild>,
}

/// What a name leads to.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateAlias {
    #[serde(rename = "templateID")]
    template_id: String,
    /// Whether other teams can start it.
    public: bool,
}

query! {
    /// Which page of a list.
    pub(crate) struct PageParameters {
        /// `X-Next-Token` of the page before.
        "nextToken" next_token: Text;
        /// Most items on one page.
        "limit" limit: PageLimit = *LIST_LIMIT.end();
    }
}

impl PageParameters {
    /// The time and the id of the last item before the page, of a list whose items have ids of this kind.
    fn after<I: FromStr>(&self) -> Result<Option<(i64, I)>, ApiError> {
        let token = self.next_token.as_deref().filter(|token| !token.is_empty());
        token.map(|token| parse_token(token, Order::Desc)).transpose()
    }

    fn len(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX)
    }
}

query! {
    /// Whose list. Clients name their own team, and no other can be asked for.
    pub(crate) struct TeamParameter {
        "teamID" team: Text => hidden;
    }
}

impl TeamParameter {
    fn check(&self, caller: &Caller) -> Result<(), ApiError> {
        match &self.team {
            Some(team) if team != caller.team.as_str() => Err(ApiError::invalid(
                "teamID names another team than the one that the key is of",
            )),
            Some(_) | None => Ok(()),
        }
    }
}

/// The template that a part of a path names, by its id or by a name that leads to it, if the team may know of it.
pub(crate) async fn find(text: &str, team: &TeamId, store: &Store) -> Result<TemplateRow, ApiError> {
    let name = TemplateName::parse(text)?;
    let found = name.resolve(store, team).await?;
    let known = found.filter(|row| row.team_id.as_ref().is_none_or(|owner| owner == team));
    match (known, &name.tag) {
        (Some(row), None) => Ok(row),
        // No build has another tag than the usual one.
        (Some(_), Some(_)) | (None, _) => Err(ApiError::unknown_template(text)),
    }
}

/// The one parameter of a path, as text.
pub(crate) struct NamePath(String);

impl<S: Send + Sync> FromRequestParts<S> for NamePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid template reference: it is not text"))?;
        Ok(Self(text))
    }
}

/// The overviews that a team may have, and what its name is.
async fn overviews(
    store: &Store,
    caller: &Caller,
    only: Option<&TemplateId>,
) -> Result<(Vec<TemplateOverview>, String), ApiError> {
    let found = store.template_overviews(&caller.team, only).await?;
    let team = store.team_by_id(&caller.team).await?;
    Ok((found, team.map_or_else(String::new, |team| team.name)))
}

/// The team's templates and those of the platform, the oldest first.
#[utoipa::path(
    get,
    path = "/templates",
    tag = "templates",
    responses(
        (status = 200, description = "The templates", body = Vec<Template>),
        (status = 400, description = "`teamID` names another team", body = ErrorBody),
    )
)]
pub(crate) async fn list_templates_v1(
    State(store): State<Store>,
    caller: Caller,
    Params(whose): Params<TeamParameter>,
) -> Result<Response, ApiError> {
    whose.check(&caller)?;
    let (found, team) = overviews(&store, &caller, None).await?;
    let all: Vec<Template> = found.into_iter().map(|row| Template::new(row, &team)).collect();
    json(StatusCode::OK, &all)
}

/// A page of the team's templates and those of the platform, the newest first.
#[utoipa::path(
    get,
    path = "/v2/templates",
    tag = "templates",
    params(PageParameters),
    responses((
        status = 200,
        description = "A page of the templates",
        body = Vec<Template>,
        headers(("X-Next-Token" = String, description = "Where the next page begins; absent on the last one")),
    ))
)]
pub(crate) async fn list_templates(
    State(store): State<Store>,
    caller: Caller,
    Params(whose): Params<TeamParameter>,
    Params(page): Params<PageParameters>,
) -> Result<Response, ApiError> {
    whose.check(&caller)?;
    let after = page.after::<TemplateId>()?;
    let (mut found, team) = overviews(&store, &caller, None).await?;
    // The database has them in the other order.
    found.reverse();
    let place = |row: &TemplateOverview| (row.template.created_us, row.template.id.clone());
    if let Some((created_us, id)) = &after {
        found.retain(|row| (row.template.created_us, row.template.id.as_str()) < (*created_us, id.as_str()));
    }
    let more = found.len() > page.len();
    found.truncate(page.len());
    let next = found.last().filter(|_| more).map(place);
    let all: Vec<Template> = found.into_iter().map(|row| Template::new(row, &team)).collect();
    with_next(json(StatusCode::OK, &all)?, next, Order::Desc)
}

/// The templates that come with the platform, the same for everybody.
#[utoipa::path(
    get,
    path = "/default-templates",
    tag = "templates",
    responses((status = 200, description = "The templates", body = Vec<Template>))
)]
pub(crate) async fn list_default_templates(State(store): State<Store>, caller: Caller) -> Result<Response, ApiError> {
    let (found, team) = overviews(&store, &caller, None).await?;
    let all: Vec<Template> = found
        .into_iter()
        .filter(|row| row.template.team_id.is_none() && row.ready.is_some())
        .map(|row| Template::new(row, &team))
        .collect();
    json(StatusCode::OK, &all)
}

/// One template with a page of its builds.
#[utoipa::path(
    get,
    path = "/templates/{templateID}",
    tag = "templates",
    params(
        (
            "templateID" = String, Path,
            description = "The template, by its id or by a name that leads to it",
            pattern = "^[A-Za-z0-9_-]+$",
        ),
        PageParameters,
    ),
    responses(
        (
            status = 200,
            description = "The template",
            body = TemplateWithBuilds,
            headers(("X-Next-Token" = String, description = "Where the next builds begin; absent with the last")),
        ),
        (status = 404, description = "The team has no such template", body = ErrorBody),
    )
)]
pub(crate) async fn get_template(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    Params(page): Params<PageParameters>,
) -> Result<Response, ApiError> {
    let after = page.after()?;
    let after = after.map(|(created_us, id)| BuildCursor { created_us, id });
    let row = find(&text, &caller.team, &store).await?;
    let (found, team) = overviews(&store, &caller, Some(&row.id)).await?;
    let Some(overview) = found.into_iter().next() else {
        return Err(ApiError::unknown_template(&text));
    };
    let wanted = page.limit.saturating_add(1);
    let mut builds = store.build_list(&row.id, after.as_ref(), wanted).await?;
    let more = builds.len() > page.len();
    builds.truncate(page.len());
    let next = builds.last().filter(|_| more);
    let next = next.map(|build| (build.created_us, build.id.clone()));
    let detail = TemplateWithBuilds {
        template: Template::new(overview, &team),
        builds: builds.into_iter().map(TemplateBuild::new).collect(),
    };
    with_next(json(StatusCode::OK, &detail)?, next, Order::Desc)
}

/// Which template a name leads to.
#[utoipa::path(
    get,
    path = "/templates/aliases/{alias}",
    tag = "templates",
    params((
        "alias" = String, Path,
        description = "A name, `[namespace/]name[:tag]`, its slash percent-encoded",
        pattern = "^[A-Za-z0-9_-]+(:[A-Za-z0-9_.-]+)?$",
    )),
    responses(
        (status = 200, description = "The template that it leads to", body = TemplateAlias),
        (status = 404, description = "It leads to none that the team may use", body = ErrorBody),
    )
)]
pub(crate) async fn get_template_alias(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let row = find(&text, &caller.team, &store).await?;
    let found = TemplateAlias {
        public: row.public || row.team_id.is_none(),
        template_id: row.id.into(),
    };
    json(StatusCode::OK, &found)
}
