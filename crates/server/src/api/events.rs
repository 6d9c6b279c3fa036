//! `/events/sandboxes`: what happened to the sandboxes of the caller's team.
//!
//! Events outlive their sandbox, so its existence is not checked: an unknown sandbox, or another team's, has no events.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, StatusCode, header};
use model::event::{EventType, EventTypes};
use model::id::SandboxId;
use store::records::EventQuery;
use utoipa::ToSchema;
use utoipa::openapi::path::{ParameterBuilder, ParameterStyle};
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

use super::auth::{Caller, SandboxPath};
use super::error::ApiError;
use super::query::Query;
use super::query::shape::{EnumParameter, Flag, Number, Parameter, Params, parse_value, query};
use crate::records::Records;

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

/// An event in the life of a sandbox.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "describes what the records have stored as JSON")]
struct SandboxEvent {
    /// The version of this form: `v2`.
    version: String,
    /// The id of the event, a UUID. Attempts to send one event to a webhook have the same.
    id: String,
    /// `sandbox.lifecycle.created`, `updated`, `paused`, `resumed`, `checkpointed` or `killed`.
    #[schema(rename = "type")]
    kind: String,
    /// `lifecycle`, for earlier readers.
    event_category: String,
    /// `create`, `update`, `pause`, `resume`, `checkpoint` or `kill`, for earlier readers.
    event_label: String,
    /// What else is known about it.
    event_data: Option<SandboxEventData>,
    sandbox_id: String,
    sandbox_team_id: String,
    sandbox_template_id: String,
    sandbox_build_id: String,
    /// The run of the sandbox, which changes with a resume.
    sandbox_execution_id: String,
    #[schema(format = DateTime)]
    timestamp: String,
}

/// What else is known about an event.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes what the records have stored as JSON")]
struct SandboxEventData {
    /// The metadata of the sandbox, unless it is larger than 16 KiB.
    sandbox_metadata: Option<BTreeMap<String, String>>,
    /// When the sandbox ends now; in events of type `updated`.
    #[schema(format = DateTime)]
    set_timeout: Option<String>,
    /// The run that is over; in events of the types `paused` and `killed`.
    execution: Option<SandboxExecution>,
}

/// A run of a sandbox.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes what the records have stored as JSON")]
struct SandboxExecution {
    #[schema(format = DateTime)]
    started_at: String,
    vcpu_count: u32,
    /// Memory of the sandbox, in MiB.
    memory_mb: u32,
    /// How long the sandbox ran, in milliseconds.
    execution_time: i64,
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
