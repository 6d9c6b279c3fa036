//! `GET /v2/sandboxes`, and `GET /sandboxes` with the same parameters.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use http::{HeaderName, HeaderValue, StatusCode, Uri};
use model::lifecycle;
use model::limits::LIST_LIMIT;
use store::sandboxes::{Order, SandboxCursor, SandboxFilter, SandboxQuery};
use utoipa::IntoParams;
use utoipa::openapi::{Object, ObjectBuilder, Type};

use super::create::TemplateName;
use super::{ListedSandbox, SandboxState};
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json;
use crate::api::query::{Query, parse_metadata};
use crate::clock::{parse_rfc3339, rfc3339};
use crate::lifecycle::Platform;

const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
const TOTAL_RUNNING: HeaderName = HeaderName::from_static("x-total-running");

/// What a list is asked for.
#[derive(IntoParams)]
#[into_params(parameter_in = Query, rename_all = "camelCase")]
#[expect(dead_code, reason = "it describes a query that `Query` reads")]
struct ListParameters {
    /// Pairs `key=value`, joined by `&`, keys and values percent-encoded; all of them must be in a sandbox's metadata.
    #[param(required = false, example = "user=alice&app=x")]
    metadata: String,
    /// In which state, several joined by commas; any, when left out.
    #[param(required = false, style = Form, explode = false, min_items = 1)]
    state: Vec<SandboxState>,
    #[param(required = false, schema_with = order_schema)]
    order: String,
    /// Only those that were started then or later.
    #[param(required = false, format = DateTime)]
    started_after: String,
    /// Only those of this template, by id or name, without a tag.
    #[param(required = false, pattern = r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+$")]
    template: String,
    /// `X-Next-Token` of the page before.
    #[param(required = false)]
    next_token: String,
    /// Most sandboxes on one page. Without it, 100; `GET /sandboxes` without any of `limit`, `nextToken` and `state` has
    /// everything on one page.
    #[param(required = false, minimum = 1, maximum = 100)]
    limit: i32,
}

fn order_schema() -> Object {
    let words = ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(["asc", "desc"]));
    let words = words.default(Some("desc".into()));
    words
        .description(Some("By time of start: the latest first, or the earliest."))
        .build()
}

/// A page of the team's sandboxes.
#[utoipa::path(
    get,
    path = "/v2/sandboxes",
    tag = "sandboxes",
    params(ListParameters),
    responses((
        status = 200,
        description = "A page of the team's sandboxes",
        body = Vec<ListedSandbox>,
        headers(
            ("X-Next-Token" = String, description = "Where the next page begins; absent on the last one"),
            ("X-Total-Running" = u64, description = "How many match and run, on all pages; absent when `state` leaves out `running`"),
        ),
    ))
)]
pub(crate) async fn list_sandboxes(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::of(&uri)?;
    let limit = parse_limit(&query)?.unwrap_or(*LIST_LIMIT.end());
    list(&platform, &caller, &query, limit).await
}

/// The older path: everything that runs, unless it is asked for pages.
#[utoipa::path(
    get,
    path = "/sandboxes",
    tag = "sandboxes",
    params(ListParameters),
    responses((
        status = 200,
        description = "A page of the team's sandboxes",
        body = Vec<ListedSandbox>,
        headers(
            ("X-Next-Token" = String, description = "Where the next page begins; absent on the last one"),
            ("X-Total-Running" = u64, description = "How many match and run, on all pages; absent when `state` leaves out `running`"),
        ),
    ))
)]
pub(crate) async fn list_sandboxes_v1(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::of(&uri)?;
    let paged = ["limit", "nextToken", "state", "state[]"]
        .iter()
        .any(|name| query.all(name).next().is_some());
    let default = if paged { *LIST_LIMIT.end() } else { u32::MAX };
    let limit = parse_limit(&query)?.unwrap_or(default);
    list(&platform, &caller, &query, limit).await
}

async fn list(platform: &Platform, caller: &Caller, query: &Query, limit: u32) -> Result<Response, ApiError> {
    let wants_running = parse_states(query)?.contains(&SandboxState::Running);
    let order = parse_order(query)?;
    let after = query
        .single("nextToken")?
        .map(|token| parse_token(token, order))
        .transpose()?;
    let started_from_us = query
        .single("startedAfter")?
        .map(|text| parse_rfc3339(text).ok_or_else(|| ApiError::schema("parameter \"startedAfter\": not a time")))
        .transpose()?;
    let metadata = query
        .single("metadata")?
        .map(parse_metadata)
        .transpose()?
        .unwrap_or_default();
    let template = match query.single("template")? {
        None => None,
        Some(text) => {
            let name = TemplateName::parse(text)?;
            if name.tag.is_some() {
                return Err(ApiError::invalid("parameter \"template\" must not have a tag"));
            }
            match name.resolve(platform, &caller.team).await? {
                Some(row) => Some(row.id),
                None => return page(&[], None, wants_running.then_some(0), order),
            }
        }
    };
    let filter = SandboxFilter {
        states: vec![lifecycle::State::Running],
        metadata,
        template,
        started_from_us,
    };
    // Nothing is ever paused, so a list of what is paused is empty.
    if !wants_running {
        return page(&[], None, None, order);
    }
    let total = platform.store.sandbox_count_running(&caller.team, &filter).await?;
    let found = platform
        .store
        .sandbox_page(
            &caller.team,
            &SandboxQuery {
                filter,
                order,
                after,
                limit,
            },
        )
        .await?;
    let items: Vec<ListedSandbox> = found.rows.into_iter().map(ListedSandbox::new).collect();
    page(&items, found.next.as_ref(), Some(total), order)
}

fn page(
    items: &[ListedSandbox],
    next: Option<&SandboxCursor>,
    total_running: Option<u64>,
    order: Order,
) -> Result<Response, ApiError> {
    let mut response = json(StatusCode::OK, &items)?;
    let headers = response.headers_mut();
    if let Some(total) = total_running {
        headers.insert(TOTAL_RUNNING, HeaderValue::from(total));
    }
    if let Some(value) = next.and_then(|cursor| HeaderValue::try_from(token(cursor, order)).ok()) {
        headers.insert(NEXT_TOKEN, value);
    }
    Ok(response)
}

fn parse_limit(query: &Query) -> Result<Option<u32>, ApiError> {
    let limit = query.integer("limit", i64::from(*LIST_LIMIT.start())..=i64::from(*LIST_LIMIT.end()))?;
    Ok(limit.map(|limit| u32::try_from(limit).expect("within the range of a page")))
}

/// States joined by commas (SDKs), repeated, or with the brackets that some HTTP libraries add; all, if none is named.
fn parse_states(query: &Query) -> Result<Vec<SandboxState>, ApiError> {
    let words: Vec<&str> = query
        .all("state")
        .chain(query.all("state[]"))
        .flat_map(|value| value.split(','))
        .collect();
    if words.is_empty() {
        return Ok(vec![SandboxState::Running, SandboxState::Paused]);
    }
    words
        .into_iter()
        .map(|word| match word {
            "running" => Ok(SandboxState::Running),
            "paused" => Ok(SandboxState::Paused),
            _ => Err(ApiError::schema(
                "parameter \"state\": value is not one of the allowed values [\"running\",\"paused\"]",
            )),
        })
        .collect()
}

fn parse_order(query: &Query) -> Result<Order, ApiError> {
    match query.single("order")? {
        None | Some("desc") => Ok(Order::Desc),
        Some("asc") => Ok(Order::Asc),
        Some(_) => Err(ApiError::schema(
            "parameter \"order\": value is not one of the allowed values [\"asc\",\"desc\"]",
        )),
    }
}

/// A place in a list as text: time and id, and the order when it is not the usual one. Clients take it as opaque.
fn token(cursor: &SandboxCursor, order: Order) -> String {
    let suffix = match order {
        Order::Desc => "",
        Order::Asc => "__asc",
    };
    URL_SAFE.encode(format!("{}__{}{suffix}", rfc3339(cursor.started_us), cursor.id))
}

fn parse_token(token: &str, order: Order) -> Result<SandboxCursor, ApiError> {
    let invalid = || ApiError::invalid("invalid next token");
    let text = URL_SAFE
        .decode(token)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let text = text.ok_or_else(invalid)?;
    let mut parts = text.split("__");
    let (time, id, suffix) = (parts.next(), parts.next(), parts.next());
    let fits = match order {
        Order::Desc => suffix.is_none(),
        Order::Asc => suffix == Some("asc"),
    };
    if !fits || parts.next().is_some() {
        return Err(invalid());
    }
    Ok(SandboxCursor {
        started_us: time.and_then(parse_rfc3339).ok_or_else(invalid)?,
        id: id.and_then(|id| id.parse().ok()).ok_or_else(invalid)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_as_its_place_in_its_order_only() {
        let cursor = SandboxCursor {
            started_us: 1_785_000_000_123_456,
            id: "iabc".parse().expect("an id"),
        };
        for (made, read, fits) in [
            (Order::Desc, Order::Desc, true),
            (Order::Asc, Order::Asc, true),
            (Order::Desc, Order::Asc, false),
            (Order::Asc, Order::Desc, false),
        ] {
            let back = parse_token(&token(&cursor, made), read).ok();
            assert_eq!(back, fits.then(|| cursor.clone()), "{made:?} {read:?}");
        }
        for bad in ["", "?", "YQ==", "YV9fYg==", "////"] {
            assert!(parse_token(bad, Order::Desc).is_err(), "{bad}");
        }
    }
}
