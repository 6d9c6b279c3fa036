//! `GET /v2/sandboxes`, and `GET /sandboxes` with the same parameters.

use axum::extract;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode};
use model::lifecycle::State;
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
    /// Filters and paging of a list.
    pub(crate) struct ListParameters {
        /// Pairs `key=value` joined by `&`, keys and values percent-encoded. The metadata of a sandbox must contain all
        /// of them.
        "metadata" metadata: MetadataFilter;
        /// States, separated by commas; default: any, and with `GET /sandboxes` only `running`.
        "state" states: States;
        "order" order: OneOf<Order>;
        /// Only sandboxes started at this time or later.
        "startedAfter" started_from_us: Time;
        /// Only sandboxes of this template, by id or name, without a tag.
        "template" template: TemplateFilter;
        /// `X-Next-Token` of the previous page.
        "nextToken" next_token: Text;
        /// Maximum number of sandboxes on one page; default: 100. `GET /sandboxes` without `limit`, `nextToken` and
        /// `state` returns everything on one page.
        "limit" limit: PageLimit;
    }
}

impl EnumParameter for Order {
    const VALUES: &'static [(&'static str, Self)] = &[("asc", Self::Asc), ("desc", Self::Desc)];
    const DESCRIPTION: &'static str = "Order by start time: latest first, or earliest first.";
    const DEFAULT: Option<&'static str> = Some("desc");
}

impl EnumParameter for SandboxState {
    const VALUES: &'static [(&'static str, Self)] = &[("running", Self::Running), ("paused", Self::Paused)];
    const DESCRIPTION: &'static str = "The state of a sandbox.";
}

/// States separated by commas (SDKs), repeated, or with the brackets that some HTTP libraries add.
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

/// A template reference, which is resolved later.
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

/// Lists the sandboxes of the team, in pages.
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
            ("X-Next-Token" = String, description = "Token of the next page; absent on the last page"),
            ("X-Total-Running" = u64, description = "Number of matching running sandboxes on all pages; absent if `state` excludes `running`"),
        ),
    ))
)]
pub(crate) async fn list_sandboxes(
    extract::State(store): extract::State<Store>,
    caller: Caller,
    Params(parameters): Params<ListParameters>,
) -> Result<Response, ApiError> {
    let limit = parameters.limit.unwrap_or(*LIST_LIMIT.end());
    list(&store, &caller, parameters, limit).await
}

/// Lists the sandboxes of the team (version 1): all running ones, unless paging is requested.
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
            ("X-Next-Token" = String, description = "Token of the next page; absent on the last page"),
            ("X-Total-Running" = u64, description = "Number of matching running sandboxes on all pages; absent if `state` excludes `running`"),
        ),
    ))
)]
pub(crate) async fn list_sandboxes_v1(
    extract::State(store): extract::State<Store>,
    caller: Caller,
    Params(parameters): Params<ListParameters>,
) -> Result<Response, ApiError> {
    let mut parameters = parameters;
    let is_paged = parameters.next_token.is_some() || parameters.states.is_some();
    let default = if is_paged { *LIST_LIMIT.end() } else { u32::MAX };
    let limit = parameters.limit.unwrap_or(default);
    // Clients of this version know of no paused sandboxes unless they ask for them.
    parameters.states.get_or_insert_with(|| vec![SandboxState::Running]);
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
        states: stored(states),
        metadata: parameters.metadata.unwrap_or_default(),
        template,
        started_from_us: parameters.started_from_us,
    };
    let total = if wants_running {
        Some(store.sandbox_count_running(&caller.team, &filter).await?)
    } else {
        None
    };
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
    page(&items, found.next.as_ref(), total, order)
}

/// The stored states of sandboxes that are in these states for clients; of all that clients know without any.
fn stored(states: Option<&[SandboxState]>) -> Vec<State> {
    let is_wanted = |state| states.is_none_or(|states| states.contains(&SandboxState::of(state)));
    let known = [State::Running, State::Pausing, State::Paused, State::Resuming];
    known.into_iter().filter(|state| is_wanted(*state)).collect()
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
