//! Tags of templates: names of builds.

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use model::id::BuildId;
use serde::Serialize;
use store::Store;
use store::builds::DEFAULT_TAG;
use store::templates::TemplateRow;
use utoipa::ToSchema;

use super::error::NotOwnTemplate;
use super::{NamePath, find_own};
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::body;
use crate::api::body::values::List;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::clock::{Clock, rfc3339};
use crate::templates::{InvalidTemplateName, TemplateName, new_tag, parse_tag};

/// Maximum number of tags in a request.
const TAGS_MAX: usize = 100;

body! {
    /// Tags to assign.
    pub(crate) struct TagAssignment {
        /// The build: `name[:tag]`, where the tag may be the id of a build.
        "target" target: String;
        /// The tags that it gets.
        "tags" tags: List<String, 1, TAGS_MAX>;
    }
}

body! {
    /// Tags to remove.
    pub(crate) struct TagRemoval {
        /// The template, without a tag.
        "name" name: String;
        /// The tags; `default` cannot be removed.
        "tags" tags: List<String, 1, TAGS_MAX>;
    }
}

/// The build that has tags now.
#[derive(Serialize, ToSchema)]
struct AssignedTags {
    tags: Vec<String>,
    #[serde(rename = "buildID")]
    build_id: String,
}

/// A tag of a template.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTag {
    tag: String,
    /// The newest finished build with this tag.
    #[serde(rename = "buildID")]
    build_id: String,
    /// When it got the tag.
    #[schema(format = DateTime)]
    created_at: String,
}

fn parse_all(
    List(tags): List<String, 1, TAGS_MAX>,
    parse: fn(&str) -> Result<String, InvalidTemplateName>,
) -> Result<Vec<String>, ApiError> {
    let mut parsed: Vec<String> = Vec::new();
    for tag in tags {
        let tag = parse(&tag)?;
        if !parsed.contains(&tag) {
            parsed.push(tag);
        }
    }
    Ok(parsed)
}

/// The template of a name, which must have no namespace but that of the team.
async fn own(name: &TemplateName, text: &str, caller: &Caller, store: &Store) -> Result<TemplateRow, ApiError> {
    if !name.is_own(store, &caller.team).await? {
        return Err(ApiError::foreign_namespace(name));
    }
    find_own(text, &caller.team, store).await
}

/// Assigns tags to a finished build. A tag that another build has moves to this one.
#[utoipa::path(
    post,
    path = "/templates/tags",
    tag = "templates",
    request_body(content = TagAssignment),
    responses(
        (status = 201, description = "The build and its new tags", body = AssignedTags),
        (status = 403, description = "The template belongs to another team"),
        (status = 404, description = "The team has no such template, or it has no such finished build"),
    )
)]
pub(crate) async fn assign_template_tags(
    State(store): State<Store>,
    State(clock): State<Clock>,
    caller: Caller,
    body: RequiredBody<TagAssignment>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let name = TemplateName::parse(&body.target)?;
    let tags = parse_all(body.tags, new_tag)?;
    let row = own(&name, &body.target, &caller, &store).await?;
    let build = store.build_by_tag(&row.id, name.tag()).await?;
    let build: BuildId = match build {
        Some(build) => build.id,
        None => {
            return Err(ApiError::no_template(format!(
                "template \"{}\" has no finished build with tag \"{}\"",
                name.name,
                name.tag()
            )));
        }
    };
    if !store.tags_assign(&row.id, &build, &tags, clock.now_us()).await? {
        return Err(ApiError::tag_limit());
    }
    let assigned = AssignedTags {
        tags,
        build_id: build.into(),
    };
    json(StatusCode::CREATED, &assigned)
}

/// Removes tags of a template. Builds stay.
#[utoipa::path(
    delete,
    path = "/templates/tags",
    tag = "templates",
    request_body(content = TagRemoval),
    responses((status = 204, description = "The template has none of these tags"), NotOwnTemplate)
)]
pub(crate) async fn delete_template_tags(
    State(store): State<Store>,
    caller: Caller,
    body: RequiredBody<TagRemoval>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let name = TemplateName::parse(&body.name)?;
    if name.tag.is_some() {
        return Err(ApiError::invalid("name must not contain a tag"));
    }
    let tags = parse_all(body.tags, parse_tag)?;
    if tags.iter().any(|tag| tag == DEFAULT_TAG) {
        return Err(ApiError::invalid("tag \"default\" cannot be removed"));
    }
    let row = own(&name, &body.name, &caller, &store).await?;
    for tag in &tags {
        store.tag_remove(&row.id, tag).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Lists the tags of a template, in alphabetical order, that have a finished build.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/tags",
    tag = "templates",
    params(("templateID" = String, Path, description = "The id or a name of the template")),
    responses((status = 200, description = "The tags", body = Vec<TemplateTag>), NotOwnTemplate)
)]
pub(crate) async fn list_template_tags(
    State(store): State<Store>,
    caller: Caller,
    NamePath(text): NamePath,
) -> Result<Response, ApiError> {
    let row = find_own(&text, &caller.team, &store).await?;
    let tags = store.tag_list(&row.id).await?.into_iter().map(|tag| TemplateTag {
        tag: tag.tag,
        build_id: tag.build_id.into(),
        created_at: rfc3339(tag.created_us),
    });
    json(StatusCode::OK, &tags.collect::<Vec<_>>())
}
