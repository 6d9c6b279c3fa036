//! `/events/webhooks`: the webhooks of the caller's team. No response has the secret of one.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::event::{EventType, EventTypes};
use model::secret::Secret;
use serde::Serialize;
use serde_json::Value;
use store::webhooks::{AttemptRow, WebhookRow};
use utoipa::ToSchema;
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

use super::auth::{Caller, KeyPath};
use super::body::RequiredBody;
use super::body::shape::{BodyValue, FieldPath, body};
use super::body::values::Name;
use super::describe::error_sets;
use super::error::ApiError;
use super::events::type_schema;
use super::json::json;
use super::query::shape::{Number, Params, query};
use crate::clock::rfc3339;
use crate::webhooks::receiver::URL_MAX;
use crate::webhooks::{NewWebhook, WebhookError, WebhookUpdate, Webhooks};

/// Longest secret, in bytes.
const SECRET_MAX: usize = 256;
/// Microseconds in a millisecond.
const MILLISECOND_US: i64 = 1000;

body! {
    /// A webhook to create.
    pub(crate) struct WebhookCreate {
        /// Its name. It must not contain control characters, or begin or end with a space.
        "name" name: Name;
        /// Where events are sent to: a URL of at most 2048 bytes that begins with `https://`, whose host has only public
        /// addresses unless the operator allows others.
        "url" url: WebhookUrl;
        /// Whether events are sent.
        "enabled" enabled: Option<bool> = true;
        /// The types of events that are sent.
        "events" events: WantedEvents;
        /// The secret that signs events: 1 to 256 bytes; 32 random ones are advised. It is never returned.
        "signatureSecret" secret: SignatureSecret;
    }
}

body! {
    /// What is changed of a webhook. What is absent stays as it is.
    pub(crate) struct WebhookChanges {
        /// Its name.
        "name" name: Option<Name>;
        /// Where events are sent to.
        "url" url: Option<WebhookUrl>;
        /// Whether events are sent. Those that wait are dropped if not.
        "enabled" enabled: Option<bool>;
        /// The types of events that are sent.
        "events" events: Option<WantedEvents>;
        /// The secret that signs events. It is never returned.
        "signatureSecret" secret: Option<SignatureSecret>;
    }
}

/// The URL of a webhook. Its syntax is checked later, by the rules of the operator.
pub(crate) struct WebhookUrl(String);

impl BodyValue for WebhookUrl {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let url = String::read(value, at)?;
        if url.len() > URL_MAX {
            return Err(at.error(format_args!("maximum length is {URL_MAX} bytes")));
        }
        Ok(Self(url))
    }

    #[expect(
        deprecated,
        reason = "its successor is a list, which not all readers of the document support"
    )]
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .example(Some("https://example.com/hook".into()))
            .into()
    }
}

/// The types of events that a webhook wants, at least one.
pub(crate) struct WantedEvents(EventTypes);

impl BodyValue for WantedEvents {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let items = value.as_array().ok_or_else(|| at.error("value must be an array"))?;
        let most = EventType::ALL.len();
        if items.is_empty() || items.len() > most {
            return Err(at.error(format_args!("value must have 1 to {most} items")));
        }
        let types = items.iter().map(|item| {
            let found = item.as_str().and_then(EventType::from_name);
            found.ok_or_else(|| {
                let allowed = EventType::ALL.map(EventType::as_str).join(", ");
                at.error(format_args!("each item must be one of {allowed}"))
            })
        });
        types.collect::<Result<_, _>>().map(Self)
    }

    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new()
            .items(type_schema())
            .min_items(Some(1))
            .max_items(Some(EventType::ALL.len()))
            .into()
    }
}

/// The secret that signs events.
pub(crate) struct SignatureSecret(Secret);

impl BodyValue for SignatureSecret {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let secret = String::read(value, at)?;
        if secret.is_empty() || secret.len() > SECRET_MAX {
            return Err(at.error(format_args!("value must have 1 to {SECRET_MAX} bytes")));
        }
        Ok(Self(Secret::new(secret)))
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .min_length(Some(1))
            .max_length(Some(SECRET_MAX))
            .into()
    }
}

/// A webhook, without its secret.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Webhook {
    id: String,
    team_id: String,
    name: String,
    #[schema(format = DateTime)]
    created_at: String,
    enabled: bool,
    url: String,
    /// The types of events that are sent.
    events: Vec<&'static str>,
    /// How many events were never sent because too many waited for the receiver.
    dropped_events: i64,
}

impl From<WebhookRow> for Webhook {
    fn from(row: WebhookRow) -> Self {
        Self {
            id: row.id,
            team_id: row.team_id.to_string(),
            name: row.name,
            created_at: rfc3339(row.created_us),
            enabled: row.enabled,
            url: row.url,
            events: row.types.iter().map(EventType::as_str).collect(),
            dropped_events: row.dropped,
        }
    }
}

/// An attempt to send an event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct WebhookDelivery {
    /// The id of the attempt, as the receiver got it in `e2b-delivery-id`.
    id: String,
    event_id: String,
    /// The type of the event.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The number of the attempt, from 1.
    attempt: u32,
    #[schema(format = DateTime)]
    timestamp: String,
    /// The status of the answer, if there was one.
    status: Option<i64>,
    /// Why the event was not received: `address` (the host has no address, or one that is not allowed), `connect`, `tls`,
    /// `timeout`, `answer` (not HTTP), `redirect`, `status` (neither 2xx nor a redirect) or `secret` (the platform cannot open
    /// the secret: set it again). `null` if it was received.
    error: Option<String>,
    duration_ms: i64,
    /// When the next attempt is due; `null` if this was the last.
    #[schema(format = DateTime)]
    next_attempt_at: Option<String>,
}

impl From<AttemptRow> for WebhookDelivery {
    fn from(row: AttemptRow) -> Self {
        Self {
            id: row.id,
            event_id: row.event_id,
            kind: row.kind.as_str(),
            attempt: row.attempt,
            timestamp: rfc3339(row.at_us),
            status: row.status,
            error: row.error,
            duration_ms: row.duration_us / MILLISECOND_US,
            next_attempt_at: row.next_us.map(rfc3339),
        }
    }
}

query! {
    /// Which attempts.
    pub(crate) struct DeliveryParameters {
        /// How many attempts are passed over.
        "offset" offset: Number<0, { i64::MAX }> = 0_i64;
        /// Maximum number of attempts.
        "limit" limit: Number<1, 100> = 10_i64;
    }
}

error_sets! {
    /// There is no such webhook.
    NoWebhook {
        404 "The team has no such webhook";
    }
}

impl ApiError {
    /// The response when a request for a webhook failed.
    fn webhook(error: WebhookError, id: &str) -> Self {
        match error {
            WebhookError::Store(error) => error.into(),
            WebhookError::Invalid(why) => Self::invalid(why),
            WebhookError::TooMany(0) => {
                Self::forbidden("this platform has no webhooks: the operator switched them off")
            }
            WebhookError::TooMany(most) => {
                let why = format!("your team is limited to {most} webhooks: delete one first");
                Self::new(StatusCode::TOO_MANY_REQUESTS, why)
                    .code("webhook_limit_reached")
                    .should_retry(false)
            }
            WebhookError::Unknown => Self::no_key("webhook", id),
            WebhookError::Seal(error) => Self::failed(error),
        }
    }
}

/// Creates a webhook: events of the sandboxes of the team are sent to its URL from now on.
#[utoipa::path(
    post,
    path = "/events/webhooks",
    tag = "events",
    request_body(content = WebhookCreate),
    responses(
        (status = 201, description = "The webhook, without its secret", body = Webhook),
        (status = 403, description = "The operator has switched webhooks off"),
        (status = 429, description = "The team has as many webhooks as it can have"),
    )
)]
pub(crate) async fn create_webhook(
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    body: RequiredBody<WebhookCreate>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let new = NewWebhook {
        name: body.name.0,
        url: body.url.0,
        enabled: body.enabled,
        types: body.events.0,
        secret: body.secret.0,
    };
    let created = webhooks.create(&caller.team, new).await;
    let row = created.map_err(|error| ApiError::webhook(error, ""))?;
    tracing::info!(webhook.id = row.id, "created a webhook");
    json(StatusCode::CREATED, &Webhook::from(row))
}

/// Lists the webhooks of the team, oldest first.
#[utoipa::path(
    get,
    path = "/events/webhooks",
    tag = "events",
    responses((status = 200, description = "The webhooks, without their secrets", body = Vec<Webhook>))
)]
pub(crate) async fn list_webhooks(State(webhooks): State<Arc<Webhooks>>, caller: Caller) -> Result<Response, ApiError> {
    let rows = webhooks.list(&caller.team).await;
    let rows = rows.map_err(|error| ApiError::webhook(error, ""))?;
    let all: Vec<Webhook> = rows.into_iter().map(Webhook::from).collect();
    json(StatusCode::OK, &all)
}

/// Returns a webhook, without its secret.
#[utoipa::path(
    get,
    path = "/events/webhooks/{webhookID}",
    tag = "events",
    params(("webhookID" = inline(KeyPath), Path, description = "The id of the webhook.")),
    responses((status = 200, description = "The webhook, without its secret", body = Webhook), NoWebhook)
)]
pub(crate) async fn get_webhook(
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    KeyPath(id): KeyPath,
) -> Result<Response, ApiError> {
    let found = webhooks.find(&caller.team, &id).await;
    let row = found.map_err(|error| ApiError::webhook(error, &id))?;
    json(StatusCode::OK, &Webhook::from(row))
}

/// Changes a webhook. Events that wait are sent by what it says then.
#[utoipa::path(
    patch,
    path = "/events/webhooks/{webhookID}",
    tag = "events",
    params(("webhookID" = inline(KeyPath), Path, description = "The id of the webhook.")),
    request_body(content = WebhookChanges),
    responses((status = 200, description = "The webhook, without its secret", body = Webhook), NoWebhook)
)]
pub(crate) async fn update_webhook(
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    KeyPath(id): KeyPath,
    body: RequiredBody<WebhookChanges>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let update = WebhookUpdate {
        name: body.name.map(|name| name.0),
        url: body.url.map(|url| url.0),
        enabled: body.enabled,
        types: body.events.map(|events| events.0),
        secret: body.secret.map(|secret| secret.0),
    };
    let changed = webhooks.update(&caller.team, &id, update).await;
    let row = changed.map_err(|error| ApiError::webhook(error, &id))?;
    tracing::info!(webhook.id = row.id, "changed a webhook");
    json(StatusCode::OK, &Webhook::from(row))
}

/// Deletes a webhook. What waits to be sent to it is dropped.
#[utoipa::path(
    delete,
    path = "/events/webhooks/{webhookID}",
    tag = "events",
    params(("webhookID" = inline(KeyPath), Path, description = "The id of the webhook.")),
    responses((status = 204, description = "The webhook was deleted"), NoWebhook)
)]
pub(crate) async fn delete_webhook(
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    KeyPath(id): KeyPath,
) -> Result<StatusCode, ApiError> {
    let deleted = webhooks.delete(&caller.team, &id).await;
    deleted.map_err(|error| ApiError::webhook(error, &id))?;
    tracing::info!(webhook.id = id, "deleted a webhook");
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the latest attempts to send events to a webhook, newest first.
#[utoipa::path(
    get,
    path = "/events/webhooks/{webhookID}/deliveries",
    tag = "events",
    params(("webhookID" = inline(KeyPath), Path, description = "The id of the webhook."), DeliveryParameters),
    responses((status = 200, description = "The attempts", body = Vec<WebhookDelivery>), NoWebhook)
)]
pub(crate) async fn list_webhook_deliveries(
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    KeyPath(id): KeyPath,
    Params(parameters): Params<DeliveryParameters>,
) -> Result<Response, ApiError> {
    let limit = u32::try_from(parameters.limit).unwrap_or_default();
    let found = webhooks.attempts(&caller.team, &id, parameters.offset, limit).await;
    let rows = found.map_err(|error| ApiError::webhook(error, &id))?;
    let all: Vec<WebhookDelivery> = rows.into_iter().map(WebhookDelivery::from).collect();
    json(StatusCode::OK, &all)
}
