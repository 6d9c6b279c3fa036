//! `GET /v2/sandboxes`, and `GET /sandboxes` with the same parameters.

use axum::extract::State;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode};
use model::lifecycle;
use model::limits::LIST_LIMIT;
use store::Store;
use store::sandboxes::{Order, SandboxCursor, SandboxFilter, SandboxQuery};
use utoipa::openapi::path::{ParameterBuilder, ParameterStyle};
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{ObjectBuilder, Ref, RefOr, Schema, Type};

use super::{ListedSandbox, SandboxState};
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::page::{parse_token, with_next};
use crate::api::query::Query;
use crate::api::query::shape::{
    EnumParameter, MetadataFilter, OneOf, PageLimit, Parameter, Params, Text, Time, parse_value, query,
};
use crate::templates::TemplateName;

const TOTAL_RUNNING: HeaderName = HeaderName::from_static("x-total-running");

query! {
    /// What a list is asked for.
    pub(crate) struct ListParameters {
        /// Pairs `key=value`, joined by `&`, keys and values percent-encoded; all of them must be in a sandbox's metadata.
        "metadata" metadata: MetadataFilter;
        /// In which state, several joined by commas; any, when left out.
        "state" states: States;
        "order" order: OneOf<Order>;
        /// Only those that were started then or later.
        "startedAfter" started_from_us: Time;
        /// Only those of this template, by id or name, without a tag.
        "template" template: TemplateFilter;
        /// `X-Next-Token` of the page before.
        "nextToken" next_token: Text;
        /// Most sandboxes on one page. Without it, 100; `GET /sandboxes` without any of `limit`, `nextToken` and `state` has
        /// everything on one page.
        "limit" limit: PageLimit;
    }
}

impl EnumParameter for Order {
    const VALUES: &'static [(&'static str, Self)] = &[("asc", Self::Asc), ("desc", Self::Desc)];
    const DESCRIPTION: &'static str = "By time of start: the latest first, or the earliest.";
    const DEFAULT: Option<&'static str> = Some("desc");
}

impl EnumParameter for SandboxState {
    const VALUES: &'static [(&'static str, Self)] = &[("running", Self::Running), ("paused", Self::Paused)];
    const DESCRIPTION: &'static str = "Where a sandbox is in its life.";
}

/// States joined by commas (SDKs), repeated, or with the brackets that some HTTP libraries add.
struct States;

impl Parameter for States {
    type Value = Vec<SandboxState>;

    fn take(query: &Query, name: &str) -> Result<Option<Self::Value>, ApiError> {
        let bracketed = format!("{name}[]");
        let words = query.all(name).chain(query.all(&bracketed));
        let words: Vec<&str> = words.flat_map(|value| value.split(',')).collect();
        if words.is_empty() {
            return Ok(None);
        }
        let states: Result<_, _> = words.into_iter().map(|word| parse_value(word, name)).collect();
        states.map(Some)
    }

    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new()
            .items(Ref::from_schema_name("SandboxState"))
            .min_items(Some(1))
            .into()
    }

    fn describe(parameter: ParameterBuilder) -> ParameterBuilder {
        parameter.style(Some(ParameterStyle::Form)).explode(Some(false))
    }
}

/// A template, which is looked for later.
struct TemplateFilter;

impl Parameter for TemplateFilter {
    type Value = String;

    fn take(query: &Query, name: &str) -> Result<Option<String>, ApiError> {
        Text::take(query, name)
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+$"))
            .into()
    }
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
    State(store): State<Store>,
    caller: Caller,
    Params(parameters): Params<ListParameters>,
) -> Result<Response, ApiError> {
    let limit = parameters.limit.unwrap_or(*LIST_LIMIT.end());
    list(&store, &caller, parameters, limit).await
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
    State(store): State<Store>,
    caller: Caller,
    Params(parameters): Params<ListParameters>,
) -> Result<Response, ApiError> {
    let is_paged = parameters.next_token.is_some() || parameters.states.is_some();
    let default = if is_paged { *LIST_LIMIT.end() } else { u32::MAX };
    let limit = parameters.limit.unwrap_or(default);
    list(&store, &caller, parameters, limit).await
}

async fn list(store: &Store, caller: &Caller, parameters: ListParameters, limit: u32) -> Result<Response, ApiError> {
    let states = parameters.states.as_deref();
    let wants_running = states.is_none_or(|states| states.contains(&SandboxState::Running));
    let order = parameters.order.unwrap_or(Order::Desc);
    let after = parameters
        .next_token
        .map(|token| parse_token(&token, order))
        .transpose()?;
    let after = after.map(|(started_us, id)| SandboxCursor { started_us, id });
    let template = match parameters.template {
        None => None,
        Some(text) => {
            let name = TemplateName::parse(&text)?;
            if name.tag.is_some() {
                return Err(ApiError::invalid("parameter \"template\" must not have a tag"));
            }
            match name.resolve(store, &caller.team).await? {
                Some(row) => Some(row.id),
                None => return page(&[], None, wants_running.then_some(0), order),
            }
        }
    };
    let filter = SandboxFilter {
        states: vec![lifecycle::State::Running],
        metadata: parameters.metadata.unwrap_or_default(),
        template,
        started_from_us: parameters.started_from_us,
    };
    // Nothing is ever paused, so a list of what is paused is empty.
    if !wants_running {
        return page(&[], None, None, order);
    }
    let total = store.sandbox_count_running(&caller.team, &filter).await?;
    let found = store
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
    if let Some(total) = total_running {
        response.headers_mut().insert(TOTAL_RUNNING, HeaderValue::from(total));
    }
    with_next(response, next.map(|cursor| (cursor.started_us, &cursor.id)), order)
}
