//! What was assigned to the tags of a template, and when.
//!
//! Only assignments to finished builds count, because no other can be used. Every team that sees a template can read
//! them; like its details, those of templates of other teams are not found.

use std::cmp::Ordering;
use std::collections::HashMap;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use model::id::TemplateId;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use store::Store;
use store::tags::{TagAssignmentRow, TagSummary};
use utoipa::ToSchema;
use uuid::Uuid;

use super::error::NoTemplate;
use super::{NamePath, TemplateParameter, find};
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::page::{cursor, cut, invalid_cursor, parse_cursor};
use crate::api::query::shape::{EnumParameter, Number, OneOf, PageLimit, Params, ShortText, Text, query};
use crate::clock::rfc3339;
use crate::templates::{TAG_MAX, parse_tag};

/// Default number of assignments of a tag in a list of tags (API contract).
const GROUP_ASSIGNMENTS: i64 = 6;
/// Maximum number of assignments of a tag in a list of tags, which has up to 100 tags.
const GROUP_ASSIGNMENTS_MAX: i64 = 50;
/// Default number of tags on one page (API contract).
const GROUPS: u32 = 25;
/// Default number of assignments on one page of the history of a tag (API contract).
const ASSIGNMENTS: u32 = 50;

query! {
    /// Which tag.
    pub(crate) struct TagParameter {
        /// The tag. Capital letters and spaces around it are ignored.
        "tag" tag: Text => required;
    }
}

query! {
    /// Paging of the history of a tag.
    pub(crate) struct HistoryParameters {
        /// `nextCursor` of the previous page.
        "cursor" cursor: Text;
        /// Maximum number of assignments on one page.
        "limit" limit: PageLimit = ASSIGNMENTS;
    }
}

query! {
    /// Which tags, in which order, and how much of their history.
    pub(crate) struct GroupParameters {
        /// Maximum number of assignments of each tag.
        "assignmentLimit" assignments: Number<1, GROUP_ASSIGNMENTS_MAX> = GROUP_ASSIGNMENTS;
        /// Maximum number of tags on one page.
        "tagsLimit" limit: PageLimit = GROUPS;
        /// `nextCursor` of the previous page, which must have had the same `sort`.
        "tagsCursor" cursor: Text;
        /// Only tags that contain this text. Capital letters and spaces around it are ignored.
        "search" search: ShortText<TAG_MAX>;
        "sort" sort: OneOf<TagOrder>;
    }
}

/// The order of a list of tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagOrder {
    LatestDesc,
    LatestAsc,
    NameAsc,
    NameDesc,
}

impl EnumParameter for TagOrder {
    const VALUES: &'static [(&'static str, Self)] = &[
        ("latest_desc", Self::LatestDesc),
        ("latest_asc", Self::LatestAsc),
        ("name_asc", Self::NameAsc),
        ("name_desc", Self::NameDesc),
    ];
    const DESCRIPTION: &'static str = "Order by the newest assignment, or by name.";
    const DEFAULT: Option<&'static str> = Some("latest_desc");
}

impl TagOrder {
    fn name(self) -> &'static str {
        let found = Self::VALUES.iter().find(|(_, order)| *order == self);
        found.map_or("", |(name, _)| name)
    }

    /// Whether `a` comes before, with or after `b`.
    fn compare(self, a: &TagSummary, b: &TagSummary) -> Ordering {
        let by_name = a.tag.cmp(&b.tag);
        let by_time = a.latest_us.cmp(&b.latest_us);
        match self {
            Self::LatestDesc => by_time.reverse().then(by_name),
            Self::LatestAsc => by_time.then(by_name),
            Self::NameAsc => by_name,
            Self::NameDesc => by_name.reverse(),
        }
    }
}

/// How many tags a template has.
#[derive(Serialize, ToSchema)]
struct TemplateTagCount {
    /// Number of tags that have a finished build.
    total: u64,
}

/// Whether a template has a tag.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTagExists {
    /// Whether a finished build has the tag.
    exists: bool,
    /// The tag in the form in which it is stored.
    normalized_tag: String,
}

/// An assignment of a tag to a finished build.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTagAssignment {
    assignment_id: String,
    build_id: String,
    #[schema(format = DateTime)]
    assigned_at: String,
    #[schema(format = DateTime)]
    build_created_at: String,
    #[schema(format = DateTime)]
    build_finished_at: Option<String>,
}

/// A page of the history of a tag.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTagAssignments {
    /// The assignments, newest first.
    data: Vec<TemplateTagAssignment>,
    /// The `cursor` of the next page; `null` on the last page.
    next_cursor: Option<String>,
}

/// A tag with its newest assignments.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTagGroup {
    tag: String,
    /// The assignments, newest first. The first is the build that the tag refers to.
    assignments: Vec<TemplateTagAssignment>,
    /// Whether the tag has more assignments.
    has_more: bool,
}

/// A page of the tags of a template.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTagGroups {
    tags: Vec<TemplateTagGroup>,
    /// The `tagsCursor` of the next page; `null` on the last page.
    next_cursor: Option<String>,
}

impl TemplateTagAssignment {
    fn new(template: &TemplateId, row: &TagAssignmentRow) -> Self {
        Self {
            assignment_id: assignment_id(template, row).to_string(),
            build_id: row.build_id.to_string(),
            assigned_at: rfc3339(row.created_us),
            build_created_at: rfc3339(row.build_created_us),
            build_finished_at: row.build_finished_us.map(rfc3339),
        }
    }
}

/// The id of an assignment. Rows have none, and never change, so it is derived from what they are.
fn assignment_id(template: &TemplateId, row: &TagAssignmentRow) -> Uuid {
    let mut digest = Sha256::new();
    for part in [template.as_str(), &row.tag, row.build_id.as_str()] {
        digest.update(part);
        digest.update([0]);
    }
    digest.update(row.seq.to_be_bytes());
    digest.update(row.created_us.to_be_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.finalize()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// The template and the tag of a path.
pub(crate) struct TagPath {
    template: String,
    tag: String,
}

impl<S: Send + Sync> FromRequestParts<S> for TagPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path((template, tag)) = Path::<(String, String)>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid template reference or tag: not valid UTF-8"))?;
        Ok(Self { template, tag })
    }
}

/// Counts the tags of a template that have a finished build.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/tags/count",
    tag = "templates",
    params(TemplateParameter),
    responses((status = 200, description = "The number of tags", body = TemplateTagCount), NoTemplate)
)]
pub(crate) async fn count_template_tags(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let row = find(&text, &caller.team, &store).await?;
    let total = store.tag_count(&row.id).await?;
    json(StatusCode::OK, &TemplateTagCount { total })
}

/// Tells whether a finished build of a template has a tag.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/tags/exists",
    tag = "templates",
    params(
        TemplateParameter,
        TagParameter,
    ),
    responses((status = 200, description = "Whether it has", body = TemplateTagExists), NoTemplate)
)]
pub(crate) async fn has_template_tag(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    Params(which): Params<TagParameter>,
) -> Result<Response, ApiError> {
    let tag = parse_tag(&which.tag)?;
    let row = find(&text, &caller.team, &store).await?;
    let found = store.tag_history(&row.id, &tag, None, 1).await?;
    let answer = TemplateTagExists {
        exists: !found.is_empty(),
        normalized_tag: tag,
    };
    json(StatusCode::OK, &answer)
}

/// Lists the tags of a template that have a finished build, in pages, each with its newest assignments.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/tags/groups",
    tag = "templates",
    params(
        TemplateParameter,
        GroupParameters,
    ),
    responses((status = 200, description = "A page of the tags", body = TemplateTagGroups), NoTemplate)
)]
pub(crate) async fn list_template_tag_groups(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
    Params(parameters): Params<GroupParameters>,
) -> Result<Response, ApiError> {
    let order = parameters.sort.unwrap_or(TagOrder::LatestDesc);
    let after = parameters.cursor.as_deref().filter(|cursor| !cursor.is_empty());
    let after = after.map(|cursor| read_position(cursor, order)).transpose()?;
    let row = find(&text, &caller.team, &store).await?;
    let mut found = store.tag_summaries(&row.id).await?;
    let wanted = parameters.search.unwrap_or_default().trim().to_ascii_lowercase();
    found.retain(|tag| tag.tag.contains(&wanted));
    found.sort_unstable_by(|a, b| order.compare(a, b));
    if let Some(after) = &after {
        found.retain(|tag| order.compare(tag, after) == Ordering::Greater);
    }
    let more = cut(&mut found, parameters.limit);
    let next_cursor = found.last().filter(|_| more).map(|last| position(last, order));

    let names: Vec<&str> = found.iter().map(|tag| tag.tag.as_str()).collect();
    let each = usize::try_from(parameters.assignments).unwrap_or(usize::MAX);
    let rows = u32::try_from(each).unwrap_or(u32::MAX).saturating_add(1);
    let mut histories: HashMap<String, Vec<TemplateTagAssignment>> = HashMap::new();
    for assignment in store.tag_histories(&row.id, &names, rows).await? {
        let shown = TemplateTagAssignment::new(&row.id, &assignment);
        histories.entry(assignment.tag).or_default().push(shown);
    }
    let groups = found.into_iter().filter_map(|tag| {
        // Without assignments it was removed meanwhile.
        let mut assignments = histories.remove(&tag.tag)?;
        let has_more = assignments.len() > each;
        assignments.truncate(each);
        Some(TemplateTagGroup {
            tag: tag.tag,
            assignments,
            has_more,
        })
    });
    let page = TemplateTagGroups {
        tags: groups.collect(),
        next_cursor,
    };
    json(StatusCode::OK, &page)
}

/// The cursor of a page that begins after a tag.
fn position(tag: &TagSummary, order: TagOrder) -> String {
    cursor([&order.name(), &tag.latest_us, &tag.tag])
}

fn read_position(text: &str, order: TagOrder) -> Result<TagSummary, ApiError> {
    let [of, latest_us, tag] = parse_cursor(text)?;
    if of != order.name() {
        return Err(ApiError::invalid(format!(
            "the cursor is one of sort \"{of}\", and sort is \"{}\"",
            order.name()
        )));
    }
    let latest_us = latest_us.parse().map_err(|_| invalid_cursor())?;
    Ok(TagSummary { tag, latest_us })
}

/// Returns the history of a tag of a template, in pages: the finished builds that it was assigned to. A tag that the
/// template does not have has none.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/tags/{tag}/assignments",
    tag = "templates",
    params(
        TemplateParameter,
        ("tag" = String, Path, description = "The tag", pattern = "^[A-Za-z0-9_.-]+$"),
        HistoryParameters,
    ),
    responses((status = 200, description = "A page of the assignments", body = TemplateTagAssignments), NoTemplate)
)]
pub(crate) async fn list_template_tag_assignments(
    State(store): State<Store>,
    caller: Caller,
    path: TagPath,
    Params(page): Params<HistoryParameters>,
) -> Result<Response, ApiError> {
    let tag = parse_tag(&path.tag)?;
    let after = page.cursor.as_deref().filter(|cursor| !cursor.is_empty());
    let after = after.map(read_place).transpose()?;
    let row = find(&path.template, &caller.team, &store).await?;
    let wanted = page.limit.saturating_add(1);
    let mut found = store.tag_history(&row.id, &tag, after, wanted).await?;
    let more = cut(&mut found, page.limit);
    let last = found.last().filter(|_| more);
    let page = TemplateTagAssignments {
        next_cursor: last.map(|last| cursor([&last.created_us, &last.seq])),
        data: found
            .iter()
            .map(|assignment| TemplateTagAssignment::new(&row.id, assignment))
            .collect(),
    };
    json(StatusCode::OK, &page)
}

/// The time and the number of the last assignment of the previous page.
fn read_place(text: &str) -> Result<(i64, i64), ApiError> {
    let [at_us, seq] = parse_cursor(text)?;
    let number = |text: &str| text.parse().map_err(|_| invalid_cursor());
    Ok((number(&at_us)?, number(&seq)?))
}
