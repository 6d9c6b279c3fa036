//! `POST /sandboxes/{sandboxID}/snapshots`, `GET /snapshots` and `DELETE /snapshots/{snapshotID}`. Most clients delete
//! snapshots as templates.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::id::{SandboxId, TeamId, TemplateId};
use model::limits::LIST_LIMIT;
use serde::Serialize;
use store::Store;
use store::builds::DEFAULT_TAG;
use store::sandboxes::Order;
use store::snapshots::{NameUse, SnapshotFilter, SnapshotRow};
use utoipa::ToSchema;

use super::error::NotRunning;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::ShortString;
use crate::api::error::{ApiError, SOON_S};
use crate::api::json::json;
use crate::api::page::{cut, parse_token, with_next};
use crate::api::query::shape::{PageLimit, Params, Text, query};
use crate::api::templates::build::check_space;
use crate::api::templates::{NamePath, find_own, manage};
use crate::builds::Builds;
use crate::clock::Clock;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::copies::PER_TEAM as COPIES_PER_TEAM;
use crate::sandboxes::snapshot::{SnapshotError, SnapshotRequest};
use crate::templates::{TemplateName, new_tag};

/// Maximum length of a name with its namespace and tag, as of templates.
const NAME_MAX: usize = 128;
/// Retry interval when the host has no space for a snapshot or makes others, in seconds.
const BUSY_AFTER_S: u32 = 10;

body! {
    /// A snapshot to make of a sandbox.
    pub(crate) struct NewSnapshot {
        /// Its name, `[namespace/]name[:tag]`. If the team has a snapshot with this name, it gets another build.
        "name" name: Nullable<ShortString<NAME_MAX>>;
        /// `false`: only its files are kept. Otherwise its memory and processes are kept, too, where the host can.
        "memory" memory: Nullable<bool>;
    }
}

query! {
    /// Which snapshots are listed.
    pub(crate) struct SnapshotParameters {
        /// Snapshots of this sandbox, which may have ended.
        "sandboxID" sandbox: Text;
        /// Snapshots with this name, `[namespace/]name[:tag]`, or id.
        "name" name: Text;
        /// `X-Next-Token` of the previous page.
        "nextToken" next_token: Text;
        /// Maximum number of items on one page.
        "limit" limit: PageLimit = *LIST_LIMIT.end();
    }
}

/// A snapshot.
#[derive(Serialize, ToSchema)]
struct Snapshot {
    /// From which sandboxes are created: its name with the namespace of the team and its tag, or the id of its template with
    /// the tag.
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    /// Its name with the namespace of the team, without its tag; empty if it has none.
    names: Vec<String>,
}

impl Snapshot {
    fn new(template: &TemplateId, alias: Option<&str>, tag: &str, namespace: &str) -> Self {
        let Some(alias) = alias else {
            return Self {
                snapshot_id: format!("{template}:{tag}"),
                names: Vec::new(),
            };
        };
        Self {
            snapshot_id: format!("{namespace}/{alias}:{tag}"),
            names: vec![format!("{namespace}/{alias}")],
        }
    }
}

async fn namespace_of(store: &Store, team: &TeamId) -> Result<String, ApiError> {
    Ok(store.team_slug(team).await?.unwrap_or_default())
}

/// Makes a snapshot of a running sandbox: a template, from which sandboxes are created with the same files, memory, processes
/// and size. Where the host cannot keep the memory, or it is not wanted, they have the files, and the start command runs.
///
/// The sandbox stands still while it is copied, and then runs on. The response comes when sandboxes can be created
/// from the snapshot; if the client does not wait for it, the snapshot is made nevertheless.
#[utoipa::path(
    post,
    path = "/sandboxes/{sandboxID}/snapshots",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = NewSnapshot),
    responses(
        (status = 201, description = "The snapshot", body = Snapshot),
        (
            status = 409,
            description = "The sandbox is being paused, resumed, killed or snapshotted, or the name is that of \
                           something else",
        ),
        (status = 429, description = "The templates and snapshots of the team take as much space as they may"),
        (status = 501, description = "The host cannot make snapshots"),
        (
            status = 503,
            description = "The host has no space for the snapshot or is busy with others, or it failed; the sandbox \
                           runs on",
        ),
        NotRunning,
    )
)]
pub(crate) async fn create_snapshot(
    State(store): State<Store>,
    State(sandboxes): State<Arc<Sandboxes>>,
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: RequiredBody<NewSnapshot>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let memory = body.memory.0.unwrap_or(true);
    let name = body
        .name
        .0
        .map(|ShortString(name)| TemplateName::new(&name))
        .transpose()?;
    let entry = caller.sandbox(&sandboxes, &id).await?;
    let mut tag = DEFAULT_TAG.to_owned();
    if let Some(name) = &name {
        if !name.is_own(&store, &caller.team).await? {
            return Err(ApiError::foreign_namespace(name));
        }
        tag = new_tag(name.tag())?;
    }
    check_space(&builds, &caller).await?;
    let alias = name.as_ref().map(|name| name.name.clone());
    let request = SnapshotRequest {
        name,
        tag: tag.clone(),
        memory,
    };
    let made = sandboxes.snapshot(&builds, &entry, request).await;
    let template = made.map_err(|error| ApiError::no_snapshot(error, &id, alias.as_deref().unwrap_or_default()))?;
    let namespace = namespace_of(&store, &caller.team).await?;
    let snapshot = Snapshot::new(&template, alias.as_deref(), &tag, &namespace);
    json(StatusCode::CREATED, &snapshot)
}

/// Lists the snapshots of the team, newest first, in pages.
#[utoipa::path(
    get,
    path = "/snapshots",
    tag = "sandboxes",
    params(SnapshotParameters),
    responses((
        status = 200,
        description = "A page of the snapshots",
        body = Vec<Snapshot>,
        headers(("X-Next-Token" = String, description = "Token of the next page; absent on the last page")),
    ))
)]
pub(crate) async fn list_snapshots(
    State(store): State<Store>,
    caller: Caller,
    Params(wanted): Params<SnapshotParameters>,
) -> Result<Response, ApiError> {
    let namespace = namespace_of(&store, &caller.team).await?;
    let token = wanted.next_token.as_deref().filter(|token| !token.is_empty());
    let after = token.map(|token| parse_token(token, Order::Desc)).transpose()?;
    let Some(filter) = filter(&wanted, &namespace) else {
        return json(StatusCode::OK, &Vec::<Snapshot>::new());
    };
    let filter = SnapshotFilter { after, ..filter };
    let mut found = store
        .snapshot_list(&caller.team, &filter, wanted.limit.saturating_add(1))
        .await?;
    let more = cut(&mut found, wanted.limit);
    let next = found.last().filter(|_| more);
    let next = next.map(|row| (row.created_us, row.template_id.clone()));
    let of = |row: &SnapshotRow| Snapshot::new(&row.template_id, row.alias.as_deref(), &row.tag, &namespace);
    let all: Vec<Snapshot> = found.iter().map(of).collect();
    with_next(json(StatusCode::OK, &all)?, next, Order::Desc)
}

/// Deletes a snapshot, as `DELETE /templates/{templateID}` does.
#[utoipa::path(
    delete,
    path = "/snapshots/{snapshotID}",
    tag = "sandboxes",
    params(("snapshotID" = String, Path, description = "The id or a name of the snapshot; a tag is ignored")),
    responses(
        (status = 204, description = "The snapshot was deleted"),
        (status = 400, description = "Sandboxes that were created from it exist"),
        (status = 403, description = "The snapshot belongs to another team"),
        (status = 404, description = "The team has no such snapshot"),
    )
)]
pub(crate) async fn delete_snapshot(
    State(store): State<Store>,
    State(builds): State<Arc<Builds>>,
    State(clock): State<Clock>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let row = find_own(&text, &caller.team, &store).await?;
    let filter = SnapshotFilter {
        name: Some(row.id.to_string()),
        ..SnapshotFilter::default()
    };
    if store.snapshot_list(&caller.team, &filter, 1).await?.is_empty() {
        return Err(ApiError::unknown_template(&text));
    }
    manage::delete(&store, &builds, &clock, &row, &text).await
}

/// What is looked for; none if nothing can be found.
fn filter(wanted: &SnapshotParameters, namespace: &str) -> Option<SnapshotFilter> {
    let present = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let sandbox = match present(&wanted.sandbox) {
        None => None,
        Some(text) => Some(SandboxId::from_path(&text).ok()?),
    };
    let (mut name, mut tag) = (None, None);
    if let Some(text) = present(&wanted.name) {
        let parsed = TemplateName::parse(&text).ok()?;
        if parsed.namespace.is_some_and(|other| other != namespace) {
            return None;
        }
        name = Some(parsed.name);
        tag = parsed.tag;
    }
    Some(SnapshotFilter {
        sandbox,
        name,
        tag,
        after: None,
    })
}

impl ApiError {
    /// The response when no snapshot of a sandbox was made. It runs on, unless something else has ended it.
    fn no_snapshot(error: SnapshotError, id: impl std::fmt::Display, name: &str) -> Self {
        match error {
            SnapshotError::Store(error) => error.into(),
            SnapshotError::State(ChangeError::Changing(verb)) => Self::changing(id, verb),
            SnapshotError::State(ChangeError::Stopping) => Self::stopping(id),
            SnapshotError::State(_) => Self::no_sandbox(id),
            SnapshotError::InProgress => {
                let why = format!("another snapshot of sandbox \"{id}\" was being made: try again");
                Self::new(StatusCode::CONFLICT, why).retry_after(SOON_S)
            }
            SnapshotError::NameTaken(NameUse::Id) => {
                Self::taken(format!("name \"{name}\" is the id of a template: choose another"))
            }
            SnapshotError::NameTaken(_) => Self::taken(format!(
                "name \"{name}\" is that of a template of your team that is no snapshot: choose another"
            )),
            SnapshotError::TooManyTags => Self::tag_limit(),
            SnapshotError::Refused(why) => {
                Self::invalid(format!("the files of sandbox \"{id}\" cannot be a snapshot: {why}"))
            }
            SnapshotError::Unsupported(_) => Self::new(
                StatusCode::NOT_IMPLEMENTED,
                "this host cannot make snapshots: they need the freezer of cgroup v2, which it does not have",
            )
            .code("not_supported")
            .caused_by(error),
            SnapshotError::TooMany => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "no snapshot of sandbox \"{id}\" was made: the team makes {COPIES_PER_TEAM} others at the moment, which is the \
                     maximum; try again when one of them is complete"
                ),
            )
            .code("snapshot_capacity_unavailable")
            .retry_after(BUSY_AFTER_S),
            SnapshotError::NoCapacity(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "the host has no space for a snapshot of sandbox \"{id}\", or is busy with others: the sandbox runs on, \
                     try again later"
                ),
            )
            .code("snapshot_capacity_unavailable")
            .retry_after(BUSY_AFTER_S)
            .caused_by(error),
            SnapshotError::Failed(_) | SnapshotError::ServerStopping | SnapshotError::TaskFailed => {
                let why = format!("no snapshot of sandbox \"{id}\" could be made, and the sandbox runs on: try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, why).caused_by(error)
            }
        }
    }
}
