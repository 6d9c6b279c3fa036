//! Reading templates. Operations that build and change them are in the modules below.
//!
//! A team sees its own templates and the global ones, which every team can use. Templates of other teams are not found,
//! even if they are public: those can be used by their id but are not listed.

pub(crate) mod build;
pub(crate) mod cancel;
mod error;
pub(crate) mod files;
pub(crate) mod history;
pub(crate) mod layers;
pub(crate) mod manage;
pub(crate) mod ready_made;
pub(crate) mod start;
pub(crate) mod status;
pub(crate) mod tags;

use std::cmp::Reverse;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use model::id::{TeamId, TemplateId};
use model::limits::LIST_LIMIT;
use serde::Serialize;
use store::Store;
use store::builds::{BuildCursor, BuildRow, BuildStatus};
use store::sandboxes::Order;
use store::templates::{TemplateOverview, TemplateRow};
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::describe::path_parameter;
use super::error::ApiError;
use super::json::json;
use super::page::{cut, parse_token, with_next};
use super::query::shape::{PageLimit, Params, Text, query};
use crate::builds::Builds;
use crate::clock::rfc3339;
use crate::sandboxes::Sandboxes;
use crate::templates::TemplateName;
use error::NoTemplate;

/// The build id of a template without a build: clients parse it as an id before they check `buildStatus`.
const NO_BUILD: &str = "00000000-0000-0000-0000-000000000000";

/// The status of a build.
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
            BuildStatus::Waiting => Self::Waiting,
            BuildStatus::Building => Self::Building,
            BuildStatus::Ready => Self::Ready,
            BuildStatus::Failed => Self::Error,
        }
    }
}

/// A template in a list.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Template {
    #[serde(rename = "templateID")]
    template_id: String,
    /// The newest finished build with the tag `default`; all zeros if there is none.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Cores of a sandbox created from it; like `memoryMB` and `diskSizeMB`, 0 without a finished build.
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_mb: u32,
    /// Whether other teams can use it.
    public: bool,
    /// Its names.
    aliases: Vec<String>,
    /// Its names, with the namespace of the team unless it is a global template.
    names: Vec<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
    /// Not recorded, always `null`.
    #[schema(value_type = Option<Object>)]
    created_by: Option<()>,
    /// When a sandbox was last created from it.
    #[schema(format = DateTime)]
    last_spawned_at: Option<String>,
    /// How many sandboxes of all teams were created from it.
    spawn_count: i64,
    /// Number of builds, including failed ones.
    build_count: i64,
    /// The version of the agent; empty without a finished build.
    envd_version: String,
    /// The status of the newest build with the tag `default`; `error` also if layers of it are no longer on the host.
    build_status: TemplateBuildStatus,
    /// Whether it comes with the platform.
    is_default: bool,
}

impl Template {
    fn new(overview: TemplateOverview, namespace: &str) -> Self {
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
                format!("{namespace}/{alias}")
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

/// The agent version of a build. Builds from before the version was recorded use the platform's current version.
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
    /// When it was finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, nullable = false)]
    finished_at: Option<String>,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    /// Absent until the build is ready, like `envdVersion`.
    #[serde(rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    disk_mb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    envd_version: Option<String>,
}

impl TemplateBuild {
    fn new(row: BuildRow) -> Self {
        let is_ready = row.status == BuildStatus::Ready;
        Self {
            envd_version: is_ready.then(|| version(&row)),
            build_id: row.id.into(),
            status: row.status.into(),
            created_at: rfc3339(row.created_us),
            updated_at: rfc3339(row.finished_us.or(row.started_us).unwrap_or(row.created_us)),
            finished_at: row.finished_us.map(rfc3339),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: is_ready.then_some(row.disk_mb),
        }
    }
}

/// A template with a page of its builds.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateWithBuilds {
    #[serde(flatten)]
    template: Template,
    /// How many sandboxes of it are kept ready at the moment, for any team: a create request takes one of them.
    kept_ready: usize,
    /// The builds, newest first.
    builds: Vec<TemplateBuild>,
}

/// The template of a name.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateAlias {
    #[serde(rename = "templateID")]
    template_id: String,
    /// Whether other teams can use it.
    public: bool,
}

query! {
    /// Paging parameters.
    pub(crate) struct PageParameters {
        /// `X-Next-Token` of the previous page.
        "nextToken" next_token: Text;
        /// Maximum number of items on one page.
        "limit" limit: PageLimit = *LIST_LIMIT.end();
    }
}

impl PageParameters {
    /// How many items to look for: one more than a page has shows whether there is another.
    pub(super) fn wanted(&self) -> u32 {
        self.limit.saturating_add(1)
    }

    /// Cuts what was found to a page. Returns `true` if there is more.
    pub(super) fn cut<T>(&self, found: &mut Vec<T>) -> bool {
        cut(found, self.limit)
    }

    /// The time and the id of the last item of the previous page.
    pub(super) fn after<I: FromStr>(&self) -> Result<Option<(i64, I)>, ApiError> {
        let token = self.next_token.as_deref().filter(|token| !token.is_empty());
        token.map(|token| parse_token(token, Order::Desc)).transpose()
    }
}

query! {
    /// The team of a list. Clients send their own team, and any other is refused.
    pub(crate) struct TeamParameter {
        "teamID" team: Text => hidden;
    }
}

impl TeamParameter {
    fn check(&self, caller: &Caller) -> Result<(), ApiError> {
        match &self.team {
            Some(team) if team != caller.team.as_str() => {
                Err(ApiError::invalid("teamID is not the team of the API key"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// The template with this id or name, if it is visible to the team.
pub(crate) async fn find(text: &str, team: &TeamId, store: &Store) -> Result<TemplateRow, ApiError> {
    let name = TemplateName::parse(text)?;
    let found = name.resolve(store, team).await?;
    let known = found.filter(|row| row.team_id.as_ref().is_none_or(|owner| owner == team));
    let Some(row) = known else {
        return Err(ApiError::unknown_template(text));
    };
    if name.tag.is_some() && store.build_by_tag(&row.id, name.tag()).await?.is_none() {
        return Err(ApiError::unknown_template(text));
    }
    Ok(row)
}

/// The template with this id or name, if it belongs to the team. A tag of the name is ignored.
pub(crate) async fn find_own(text: &str, team: &TeamId, store: &Store) -> Result<TemplateRow, ApiError> {
    let name = TemplateName::parse(text)?;
    match name.resolve(store, team).await? {
        Some(row) if row.team_id.as_ref() == Some(team) => Ok(row),
        Some(_) => Err(ApiError::foreign_template(text)),
        None => Err(ApiError::unknown_template(text)),
    }
}

/// The one parameter of a path, as text.
pub(crate) struct NamePath(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for NamePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid template reference: not valid UTF-8"))?;
        Ok(Self(text))
    }
}

/// The template of a path, in the description of operations that read it.
pub(crate) struct TemplateParameter;

impl IntoParams for TemplateParameter {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let about = "The id or a name of the template";
        vec![path_parameter("templateID", Some(about), Some("^[A-Za-z0-9_-]+$"))]
    }
}

/// The templates visible to a team, and the namespace of the team.
async fn overviews(
    store: &Store,
    caller: &Caller,
    only: Option<&TemplateId>,
) -> Result<(Vec<TemplateOverview>, String), ApiError> {
    let found = store.template_overviews(&caller.team, only).await?;
    let namespace = store.team_slug(&caller.team).await?;
    Ok((found, namespace.unwrap_or_default()))
}

/// The overviews of templates, with the status `error` for templates whose layers are gone.
async fn usable_overviews(
    builds: &Builds,
    caller: &Caller,
    only: Option<&TemplateId>,
) -> Result<(Vec<TemplateOverview>, String), ApiError> {
    let (mut found, namespace) = overviews(builds.rows.store(), caller, only).await?;
    let lost = builds.lost(found.iter().filter_map(|row| row.ready.as_ref())).await;
    for row in &mut found {
        let is_lost = row.ready.as_ref().is_some_and(|build| lost.contains_key(&build.id));
        if is_lost && row.build_status == Some(BuildStatus::Ready) {
            row.build_status = Some(BuildStatus::Failed);
        }
    }
    Ok((found, namespace))
}

/// Lists the templates of the team and of the platform, oldest first.
#[utoipa::path(
    get,
    path = "/templates",
    tag = "templates",
    responses(
        (status = 200, description = "The templates", body = Vec<Template>),
        (status = 400, description = "`teamID` names another team"),
    )
)]
pub(crate) async fn list_templates_v1(
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    Params(whose): Params<TeamParameter>,
) -> Result<Response, ApiError> {
    whose.check(&caller)?;
    let (found, team) = usable_overviews(&builds, &caller, None).await?;
    let all: Vec<Template> = found.into_iter().map(|row| Template::new(row, &team)).collect();
    json(StatusCode::OK, &all)
}

/// Lists the templates of the platform and then those of the team, newest first, in pages.
#[utoipa::path(
    get,
    path = "/v2/templates",
    tag = "templates",
    params(PageParameters),
    responses((
        status = 200,
        description = "A page of the templates",
        body = Vec<Template>,
        headers(("X-Next-Token" = String, description = "Token of the next page; absent on the last page")),
    ))
)]
pub(crate) async fn list_templates(
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    Params(whose): Params<TeamParameter>,
    Params(page): Params<PageParameters>,
) -> Result<Response, ApiError> {
    whose.check(&caller)?;
    let after = page.after::<TemplateId>()?;
    let (mut found, team) = usable_overviews(&builds, &caller, None).await?;
    let place = |row: &TemplateOverview| (row.template.created_us, row.template.id.clone());
    // Those of the platform come first, because clients take the first that is ready; then the newest.
    let rank = |row: &TemplateOverview| (row.template.team_id.is_some(), Reverse(place(row)));
    found.sort_unstable_by_key(rank);
    if let Some((created_us, id)) = after {
        let is_own = !found
            .iter()
            .any(|row| row.template.id == id && row.template.team_id.is_none());
        let last = (is_own, Reverse((created_us, id)));
        found.retain(|row| rank(row) > last);
    }
    let more = page.cut(&mut found);
    let next = found.last().filter(|_| more).map(place);
    let all: Vec<Template> = found.into_iter().map(|row| Template::new(row, &team)).collect();
    with_next(json(StatusCode::OK, &all)?, next, Order::Desc)
}

/// Lists the templates of the platform, which are the same for every team.
#[utoipa::path(
    get,
    path = "/default-templates",
    tag = "templates",
    responses((status = 200, description = "The templates", body = Vec<Template>))
)]
pub(crate) async fn list_default_templates(
    State(builds): State<Arc<Builds>>,
    caller: Caller,
) -> Result<Response, ApiError> {
    let (found, team) = usable_overviews(&builds, &caller, None).await?;
    let all: Vec<Template> = found
        .into_iter()
        .filter(|row| row.template.team_id.is_none() && row.ready.is_some())
        .map(|row| Template::new(row, &team))
        .collect();
    json(StatusCode::OK, &all)
}

/// Returns a template with a page of its builds.
#[utoipa::path(
    get,
    path = "/templates/{templateID}",
    tag = "templates",
    params(
        TemplateParameter,
        PageParameters,
    ),
    responses(
        (
            status = 200,
            description = "The template",
            body = TemplateWithBuilds,
            headers(("X-Next-Token" = String, description = "Token of the next builds; absent on the last page")),
        ),
        NoTemplate,
    )
)]
pub(crate) async fn get_template(
    State(store): State<Store>,
    State(builds): State<Arc<Builds>>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    NamePath(text): NamePath,
    Params(page): Params<PageParameters>,
) -> Result<Response, ApiError> {
    let after = page.after()?;
    let after = after.map(|(created_us, id)| BuildCursor { created_us, id });
    let row = find(&text, &caller.team, &store).await?;
    let (found, team) = usable_overviews(&builds, &caller, Some(&row.id)).await?;
    let Some(overview) = found.into_iter().next() else {
        return Err(ApiError::unknown_template(&text));
    };
    let mut rows = store.build_list(&row.id, after.as_ref(), page.wanted()).await?;
    let more = page.cut(&mut rows);
    let lost = builds.lost(&rows).await;
    for build in rows.iter_mut().filter(|build| lost.contains_key(&build.id)) {
        build.status = BuildStatus::Failed;
    }
    let next = rows.last().filter(|_| more);
    let next = next.map(|build| (build.created_us, build.id.clone()));
    let pooled = sandboxes.nodes.pooled();
    let detail = TemplateWithBuilds {
        kept_ready: pooled
            .iter()
            .filter(|one| one.is_ready && one.template == row.id)
            .count(),
        template: Template::new(overview, &team),
        builds: rows.into_iter().map(TemplateBuild::new).collect(),
    };
    with_next(json(StatusCode::OK, &detail)?, next, Order::Desc)
}

/// Returns the template of a name.
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
        (status = 200, description = "The template of the name", body = TemplateAlias),
        (status = 400, description = "The namespace is not that of the team"),
        (status = 403, description = "The template belongs to another team"),
        (status = 404, description = "The team can use no template with this name"),
    )
)]
pub(crate) async fn get_template_alias(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let name = TemplateName::parse(&text)?;
    if !name.is_own(&store, &caller.team).await? {
        return Err(ApiError::foreign_namespace(&name));
    }
    let unknown = || ApiError::unknown_template(&text);
    let row = name.resolve(&store, &caller.team).await?.ok_or_else(unknown)?;
    if row.team_id.as_ref().is_some_and(|owner| *owner != caller.team) {
        return Err(ApiError::foreign_template(&text));
    }
    if name.tag.is_some() && store.build_by_tag(&row.id, name.tag()).await?.is_none() {
        return Err(unknown());
    }
    let found = TemplateAlias {
        public: row.public || row.team_id.is_none(),
        template_id: row.id.into(),
    };
    json(StatusCode::OK, &found)
}
