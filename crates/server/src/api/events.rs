//! `/events/sandboxes`: what happened to the sandboxes of the caller's team.
//!
//! Events outlive their sandbox, so its existence is not checked: an unknown sandbox, or another team's, has no events.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, StatusCode, header};
use model::event::{EventType, EventTypes};
use model::id::SandboxId;
use store::records::EventQuery;
use utoipa::openapi::path::{ParameterBuilder, ParameterStyle};
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

use super::auth::{Caller, SandboxPath};
use super::error::ApiError;
use super::query::Query;
use super::query::shape::{EnumParameter, Flag, Number, Parameter, Params, parse_value, query};
use crate::records::{Records, SandboxEvent};

/// Default maximum number of events in a response (API contract).
const LIMIT_DEFAULT: i64 = 10;
/// Largest `limit` (API contract).
const LIMIT_MAX: i64 = 100;

query! {
    /// Which events, and in which order.
    pub(crate) struct EventParameters {
        /// How many events are passed over.
        "offset" offset: Number<0, { i64::MAX }> = 0_i64;
        /// Maximum number of events.
        "limit" limit: Number<1, LIMIT_MAX> = LIMIT_DEFAULT;
        /// Whether the oldest event comes first, and not the newest.
        "orderAsc" is_ascending: Flag = false;
        /// Only events of these types; the parameter may be repeated.
        "types" types: TypesOfEvents;
    }
}

impl EnumParameter for EventType {
    const VALUES: &'static [(&'static str, Self)] = &[
        (Self::Created.as_str(), Self::Created),
        (Self::Updated.as_str(), Self::Updated),
        (Self::Paused.as_str(), Self::Paused),
        (Self::Resumed.as_str(), Self::Resumed),
        (Self::Checkpointed.as_str(), Self::Checkpointed),
        (Self::Killed.as_str(), Self::Killed),
    ];
    const DESCRIPTION: &'static str = "A type of events.";
}

/// Types of events, repeated or separated by commas.
struct TypesOfEvents;

impl Parameter for TypesOfEvents {
    type Value = EventTypes;

    fn take(query: &Query, name: &str) -> Result<Option<EventTypes>, ApiError> {
        let words = query.all(name).flat_map(|value| value.split(','));
        let types: EventTypes = words
            .map(|word| parse_value::<EventType>(word, name))
            .collect::<Result<_, _>>()?;
        Ok((!types.is_empty()).then_some(types))
    }

    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().items(type_schema()).into()
    }

    fn describe(parameter: ParameterBuilder) -> ParameterBuilder {
        parameter.style(Some(ParameterStyle::Form)).explode(Some(true))
    }
}

/// The schema of a type of events.
pub(super) fn type_schema() -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(EventType::ALL.map(EventType::as_str)))
}

/// Returns events of the sandboxes of the team, the newest first.
#[utoipa::path(
    get,
    path = "/events/sandboxes",
    tag = "events",
    params(EventParameters),
    responses((status = 200, description = "The events", body = Vec<SandboxEvent>))
)]
pub(crate) async fn list_sandboxes_events(
    State(records): State<Arc<Records>>,
    caller: Caller,
    Params(parameters): Params<EventParameters>,
) -> Result<Response, ApiError> {
    answer(&records, &caller, None, &parameters).await
}

/// Returns events of a sandbox, the newest first.
#[utoipa::path(
    get,
    path = "/events/sandboxes/{sandboxID}",
    tag = "events",
    params(SandboxPath, EventParameters),
    responses((status = 200, description = "The events; empty for an unknown sandbox", body = Vec<SandboxEvent>))
)]
pub(crate) async fn list_sandbox_events(
    State(records): State<Arc<Records>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Params(parameters): Params<EventParameters>,
) -> Result<Response, ApiError> {
    answer(&records, &caller, Some(id), &parameters).await
}

/// The events as they were stored, which are JSON already.
async fn answer(
    records: &Records,
    caller: &Caller,
    sandbox_id: Option<SandboxId>,
    parameters: &EventParameters,
) -> Result<Response, ApiError> {
    let query = EventQuery {
        sandbox_id,
        types: parameters.types.unwrap_or(EventTypes::ALL),
        is_ascending: parameters.is_ascending,
        offset: parameters.offset,
        limit: u32::try_from(parameters.limit).unwrap_or_default(),
    };
    let events = records.events(&caller.team, &query).await?;
    let body = format!("[{}]", events.join(","));
    let content_type = HeaderValue::from_static("application/json; charset=utf-8");
    Ok((StatusCode::OK, [(header::CONTENT_TYPE, content_type)], body).into_response())
}
