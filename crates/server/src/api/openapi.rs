//! The OpenAPI document, generated from the router: every route is added together with its operation, so that none is
//! undocumented.
//!
//! The responses of a handler are declared next to it, those of several handlers as sets ([`super::describe`]). The
//! responses of the layers around it (authentication, body limits, panics) are added here, to every operation that can have
//! them, and so is the body that all errors have. A schema describes what is accepted: keys
//! that this platform does not support are not part of it, and are refused by name.

use axum::Extension;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use model::limits::BODY_MAX_BYTES;
use serde_json::{Value, json};
use utoipa::OpenApi as _;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, OpenApi, RefOr};

use super::body::values::LIFETIME;
use super::describe::{error, error_content};
use super::error::ErrorBody;

/// Names of the security schemes.
const API_KEY: &str = "ApiKey";
const BEARER: &str = "Bearer";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Ringfence",
        description = "Isolated sandboxes for unreviewed code. Keys of a request body that are not described \
                       are ignored, unless they ask for something that this platform does not do: then the answer is \
                       400 and names the key. Operations that answer 501 are not built yet.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    components(schemas(ErrorBody)),
    tags(
        (name = "sandboxes", description = "Creating, finding, extending and ending sandboxes"),
        (name = "templates", description = "Templates that sandboxes are created from"),
        (name = "injection rules", description = "Saved injection rules"),
        (name = "events", description = "What happened to sandboxes, and webhooks that are told about it"),
        (name = "teams", description = "What teams use"),
        (name = "keys", description = "Teams, API keys and access tokens"),
        (name = "secrets", description = "Secrets that headers of requests refer to by name"),
        (name = "platform", description = "The platform itself"),
    )
)]
struct Base;

/// The document without any routes.
pub(super) fn base() -> OpenApi {
    let mut openapi = Base::openapi();
    let components = openapi.components.get_or_insert_with(Components::new);
    components.add_security_scheme(
        API_KEY,
        SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::with_description(
            "X-API-Key",
            "An API key: `e2b_` and hexadecimal digits. It acts for its team.",
        ))),
    );
    let mut bearer = Http::new(HttpAuthScheme::Bearer);
    bearer.description = Some("An API key or an access token (`sk_e2b_` and hexadecimal digits).".to_owned());
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    openapi.security = Some(vec![
        SecurityRequirement::new::<_, [&str; 0], &str>(API_KEY, []),
        SecurityRequirement::new::<_, [&str; 0], &str>(BEARER, []),
    ]);
    openapi
}

/// Adds the responses of the layers around the handlers, and the configured limit: the longest maximum lifetime of any
/// team, in seconds.
pub(super) fn finish(mut openapi: OpenApi, max_lifetime_s: u32) -> Value {
    for item in openapi.paths.paths.values_mut() {
        let operations = [
            &mut item.get,
            &mut item.put,
            &mut item.post,
            &mut item.delete,
            &mut item.patch,
        ];
        operations.into_iter().flatten().for_each(add_common_answers);
        if let Some(operation) = &mut item.get {
            add(operation, 504, "The request could not be answered in time");
        }
    }
    let mut document = serde_json::to_value(openapi).expect("a document is JSON");
    let operations = document["paths"]
        .as_object_mut()
        .into_iter()
        .flat_map(|paths| paths.values_mut());
    for operation in operations
        .filter_map(Value::as_object_mut)
        .flat_map(|item| item.values_mut())
    {
        // A body that may be absent must not be `null`, but the macro generates that for an `Option`.
        if let Some(schema) = operation.pointer_mut("/requestBody/content/application~1json/schema")
            && let Some(body) = schema.pointer_mut("/oneOf/0").map(Value::take)
        {
            *schema = body;
        }
    }
    let schemas = document["components"]["schemas"].as_object_mut();
    let properties = schemas.into_iter().flat_map(|schemas| schemas.values_mut());
    for property in properties
        .filter_map(|schema| schema.get_mut("properties")?.as_object_mut())
        .flat_map(|properties| properties.values_mut())
    {
        if let Some(timeout) = property.as_object_mut()
            && timeout.remove(LIFETIME).is_some()
        {
            timeout.insert("maximum".to_owned(), json!(max_lifetime_s));
        }
    }
    document
}

fn add_common_answers(operation: &mut Operation) {
    let is_open = operation.security.as_ref().is_some_and(Vec::is_empty);
    let has_parameters = operation.parameters.as_ref().is_some_and(|all| !all.is_empty());
    let takes_input = operation.request_body.is_some() || has_parameters;
    let mut answers = Vec::new();
    if takes_input {
        answers.push((400, "The request is invalid; `message` explains why"));
    }
    if !is_open {
        answers.push((401, "The credentials are missing or invalid"));
        answers.push((404, "X-Team-ID names a team that the caller has no access to"));
        answers.push((
            429,
            "A rate limit of the team is exceeded; retry after the number of seconds in `Retry-After`",
        ));
        answers.push((
            503,
            "The database is unavailable, the platform is starting or stopping, or the sandbox is on another node",
        ));
        answers.push((500, "Internal error"));
    }
    let too_large = format!("The body is larger than {BODY_MAX_BYTES} bytes");
    if operation.request_body.is_some() {
        answers.push((408, "The body did not arrive in time"));
        answers.push((413, &too_large));
    }
    for (status, description) in answers {
        add(operation, status, description);
    }
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && status.as_str() >= "400"
            && response.content.is_empty()
        {
            let (kind, content) = error_content();
            response.content.insert(kind.to_owned(), content.into());
        }
    }
}

/// Adds an error that the operation does not describe itself.
fn add(operation: &mut Operation, status: u16, description: &str) {
    let responses = &mut operation.responses.responses;
    responses
        .entry(status.to_string())
        .or_insert_with(|| error(description).into());
}

/// The document as it is served.
#[derive(Debug, Clone)]
pub(super) struct ServedDocument(Bytes);

impl ServedDocument {
    pub(super) fn new(document: &Value) -> Self {
        Self(document.to_string().into())
    }
}

/// Returns this document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "platform",
    security(),
    responses((status = 200, description = "The description of the API in OpenAPI 3.1", body = Object))
)]
pub(super) async fn get_openapi(Extension(ServedDocument(document)): Extension<ServedDocument>) -> Response {
    let content_type = HeaderValue::from_static("application/json; charset=utf-8");
    let mut response = Response::new(document.into());
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}
