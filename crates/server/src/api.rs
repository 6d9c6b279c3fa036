//! The REST API.
//!
//! Every error response, from a handler, the router, a limit or a panic, is the JSON object `{code, message[,
//! error_code]}`, because SDKs read the code from the body and not from the status line.

mod access_tokens;
mod address;
mod api_keys;
mod auth;
mod body;
mod describe;
mod docs;
mod error;
mod events;
mod injection_rules;
pub(crate) mod injection_values;
mod json;
mod mcp;
mod not_built;
mod observe;
mod openapi;
mod page;
mod query;
mod rate;

mod sandboxes;
mod secrets;
mod signed;
pub(crate) mod state;
mod team_limits;
mod team_metrics;
mod teams;
mod templates;
mod webhooks;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Router};
use http::{HeaderName, StatusCode, Uri};
use model::limits::DEFAULT_MAX_LIFETIME_S;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{Any as AnyOf, CorsLayer};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) use address::ApiAddress;
pub(crate) use auth::credential;
pub(crate) use body::read_limited;
pub(crate) use docs::{has_tag, prefers_pages};
use error::ErrorBody;
pub(crate) use error::{ApiError, Unplaced};
use observe::{Observer, Operations};
use sandboxes::{create, fork, injections, lifetime, list, logs, metrics, network, pause, single, snapshots};
pub(crate) use signed::SIGNED_MAX_BYTES;
use state::ApiState;
pub(crate) use templates::find_own as find_own_template;

use crate::health::Health;
use crate::telemetry::Telemetry;

/// Time limit for answering a request. Clients have given up by then (the SDKs after 60 s).
const ANSWER_BOUND: Duration = Duration::from_secs(70);

/// Retry interval for a server that is not ready, in seconds. A start takes less, a drain and a start a little more.
const READY_AFTER_S: u32 = 1;

/// Time limit for uploading files for a build (the SDKs have the same).
const UPLOAD_BOUND: Duration = Duration::from_secs(3600);

/// The routes, each with its operation.
fn routes() -> OpenApiRouter<ApiState> {
    let built = OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(check_health))
        .routes(routes!(openapi::get_openapi))
        .routes(routes!(teams::list_teams))
        .routes(routes!(api_keys::list_api_keys, api_keys::create_api_key))
        .routes(routes!(api_keys::rename_api_key, api_keys::delete_api_key))
        .routes(routes!(access_tokens::create_access_token))
        .routes(routes!(access_tokens::delete_access_token))
        .routes(routes!(list::list_sandboxes_v1, create::create_sandbox_v1))
        .routes(routes!(list::list_sandboxes, create::create_sandbox))
        .routes(routes!(metrics::list_sandboxes_metrics))
        .routes(routes!(single::get_sandbox, single::delete_sandbox))
        .routes(routes!(pause::pause_sandbox))
        .routes(routes!(fork::fork_sandbox))
        .routes(routes!(snapshots::create_snapshot))
        .routes(routes!(snapshots::list_snapshots))
        .routes(routes!(snapshots::delete_snapshot))
        .routes(routes!(lifetime::set_sandbox_timeout))
        .routes(routes!(lifetime::refresh_sandbox))
        .routes(routes!(pause::connect_sandbox_v1))
        .routes(routes!(pause::connect_sandbox))
        .routes(routes!(pause::resume_sandbox))
        .routes(routes!(network::update_sandbox_network))
        .routes(routes!(
            injections::get_sandbox_injections,
            injections::set_sandbox_injections
        ))
        .routes(routes!(injections::set_sandbox_token))
        .routes(routes!(
            injection_rules::list_injection_rules,
            injection_rules::create_injection_rule
        ))
        .routes(routes!(
            injection_rules::get_injection_rule,
            injection_rules::update_injection_rule,
            injection_rules::delete_injection_rule
        ))
        .routes(routes!(logs::get_sandbox_logs_v1))
        .routes(routes!(logs::get_sandbox_logs))
        .routes(routes!(metrics::get_sandbox_metrics))
        .routes(routes!(
            templates::list_templates_v1,
            templates::build::create_template_v1
        ))
        .routes(routes!(templates::list_templates, templates::build::create_template_v2))
        .routes(routes!(templates::build::create_template))
        .routes(routes!(templates::list_default_templates))
        .routes(routes!(templates::ready_made::list_ready_made_templates))
        .routes(routes!(
            templates::get_template,
            templates::build::rebuild_template,
            templates::manage::update_template_v1,
            templates::manage::delete_template
        ))
        .routes(routes!(templates::manage::update_template))
        .routes(routes!(
            templates::files::get_template_upload,
            templates::files::put_template_upload
        ))
        .routes(routes!(templates::start::start_build))
        .routes(routes!(templates::start::start_build_v1))
        .routes(routes!(templates::cancel::cancel_build))
        .routes(routes!(templates::status::get_build_status))
        .routes(routes!(templates::status::get_build_logs))
        .routes(routes!(templates::layers::list_build_layers))
        .routes(routes!(
            templates::tags::assign_template_tags,
            templates::tags::delete_template_tags
        ))
        .routes(routes!(templates::tags::list_template_tags))
        .routes(routes!(templates::history::count_template_tags))
        .routes(routes!(templates::history::has_template_tag))
        .routes(routes!(templates::history::list_template_tag_groups))
        .routes(routes!(templates::history::list_template_tag_assignments))
        .routes(routes!(templates::get_template_alias))
        .routes(routes!(team_limits::list_team_limits))
        .routes(routes!(team_metrics::get_team_metrics))
        .routes(routes!(team_metrics::get_team_metrics_max))
        .routes(routes!(events::list_sandboxes_events))
        .routes(routes!(events::list_sandbox_events))
        .routes(routes!(webhooks::list_webhooks, webhooks::create_webhook))
        .routes(routes!(
            webhooks::get_webhook,
            webhooks::update_webhook,
            webhooks::delete_webhook
        ))
        .routes(routes!(webhooks::list_webhook_deliveries))
        .routes(routes!(secrets::list_secrets, secrets::create_secret))
        .routes(routes!(
            secrets::get_secret,
            secrets::update_secret,
            secrets::delete_secret
        ));
    not_built::add(built)
}

/// The routes with all layers, and the rules by which requests are recognized as API requests. `longest_s` is the
/// longest maximum lifetime of any team, in seconds.
pub(crate) fn router(state: ApiState, longest_s: u32, telemetry: Option<Arc<Telemetry>>) -> (Router, ApiAddress) {
    let (router, document) = routes().split_for_parts();
    let document = openapi::finish(document, longest_s);
    let observer = Observer {
        metrics: Arc::clone(&state.metrics),
        operations: Operations::of(&document),
        telemetry,
    };
    let address = ApiAddress::new(&state.access.domain, &document);
    let mcp_path = state.mcp.path.clone();
    let router = router
        .route(&mcp_path, axum::routing::post(mcp::call))
        .merge(docs::routes())
        .fallback(|uri: Uri| async move { ApiError::unknown_path(uri.path()) })
        .method_not_allowed_fallback(|| async { ApiError::wrong_method() })
        .layer(axum::middleware::from_fn_with_state(state.clone(), signed::verify))
        .layer(Extension(openapi::ServedDocument::new(&document)))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(axum::middleware::from_fn(rate::add_rate_headers))
        .layer(axum::middleware::from_fn(limit_duration))
        .layer(cors())
        .layer(axum::middleware::from_fn_with_state(observer, observe::observe))
        .with_state(state);
    (router, address)
}

/// Reports that sandboxes can be created.
#[utoipa::path(
    get,
    path = "/health",
    tag = "platform",
    security(),
    responses(
        (status = 200, description = "Sandboxes can be created", body = str, content_type = "text/plain"),
        (status = 503, description = "The platform is starting or stopping, or its database does not answer"),
    )
)]
async fn check_health(State(health): State<Arc<Health>>) -> Result<&'static str, ApiError> {
    if health.has_database().await {
        Ok("Health check successful")
    } else {
        Err(ApiError::no_database())
    }
}

impl ApiError {
    /// 404: no such route.
    pub(crate) fn unknown_path(path: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("validation error: no operation is known at path {path}"),
        )
    }

    /// 405: the route does not support this method.
    pub(crate) fn wrong_method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "validation error: the method is not allowed at this path",
        )
    }

    /// The request was not answered in time: 504, or 500 for a request that may have changed something. SDKs retry
    /// after a 504, and nothing must be created twice.
    fn too_long(is_safe: bool) -> Self {
        if is_safe {
            return Self::new(StatusCode::GATEWAY_TIMEOUT, "the request could not be answered in time");
        }
        let why = "the request could not be answered in time, and it is not known whether it took effect";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, why)
            .code("internal_server_error")
            .should_retry(false)
    }

    /// 503: the server is starting or draining.
    pub(crate) fn not_ready() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the platform is not ready, try again in a moment",
        )
        .retry_after(READY_AFTER_S)
    }

    /// 503: the database does not answer.
    fn no_database() -> Self {
        let why = "the database of the platform does not answer: try again in a moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why).retry_after(READY_AFTER_S)
    }
}

/// The response while the server starts or drains.
pub(crate) fn unavailable() -> Response {
    ApiError::not_ready().into_response()
}

/// Whether a request uploads files for a build.
fn is_upload(request: &Request) -> bool {
    let mut parts = request.uri().path().split('/').skip(1);
    request.method() == http::Method::PUT && parts.next() == Some("templates") && parts.nth(1) == Some("files")
}

/// Limits the duration of requests.
async fn limit_duration(request: Request, next: Next) -> Response {
    let is_safe = request.method().is_safe();
    let bound = if is_upload(&request) {
        UPLOAD_BOUND
    } else {
        ANSWER_BOUND
    };
    match tokio::time::timeout(bound, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::too_long(is_safe).into_response(),
    }
}

/// The body of the response to a malformed HTTP request, for the statuses of such responses.
pub(crate) fn malformed_request_body(status: StatusCode) -> Option<Vec<u8>> {
    let why = match status {
        StatusCode::BAD_REQUEST => "malformed HTTP request",
        StatusCode::URI_TOO_LONG => "the request target is too long",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => "the request headers are too many or too large",
        _ => return None,
    };
    Some(ErrorBody::new(status, why.to_owned()).to_json())
}

#[expect(clippy::needless_pass_by_value, reason = "the layer's signature")]
fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(
        panic = text.unwrap_or("not a text"),
        "a handler panicked, which is a defect of the platform; its request was answered 500"
    );
    ApiError::internal().into_response()
}

/// Allows requests from other origins: SDKs also run in browsers.
fn cors() -> CorsLayer {
    const ALLOWED: [&str; 29] = [
        "authorization",
        "browser",
        "connect-protocol-version",
        "connect-timeout-ms",
        "content-type",
        "e2b-sandbox-id",
        "e2b-sandbox-port",
        "e2b-traffic-access-token",
        "idempotency-key",
        "keepalive-ping-interval",
        "lang",
        "lang_version",
        "machine",
        "mcp-method",
        "mcp-name",
        "mcp-protocol-version",
        "os",
        "package_version",
        "processor",
        "publisher",
        "release",
        "sdk_runtime",
        "system",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-access-token",
        "x-api-key",
        "x-team-id",
    ];
    const EXPOSED: [&str; 10] = [
        "link",
        "x-next-token",
        "x-total-running",
        "x-request-id",
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "retry-after",
        "should-retry",
        "server-timing",
    ];
    CorsLayer::new()
        .allow_origin(AnyOf)
        .allow_methods(AnyOf)
        .allow_headers(ALLOWED.map(HeaderName::from_static))
        .expose_headers(EXPOSED.map(HeaderName::from_static))
        .max_age(Duration::from_secs(3600))
}

/// The document of a platform with the default settings, as it is committed: JSON with a final line feed.
#[must_use]
pub fn document() -> String {
    let document = openapi::finish(routes().into_openapi(), DEFAULT_MAX_LIFETIME_S);
    format!("{document:#}\n")
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use http_body_util::BodyExt as _;
    use serde_json::json;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn a_panic_answers_500_without_details() {
        let router: Router = Router::new()
            .route("/", get(async || -> &'static str { panic!("a secret") }))
            .layer(CatchPanicLayer::custom(panicked));
        let request = http::Request::new(axum::body::Body::empty());
        let response = router.oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(
            body,
            json!({"code": 500, "message": "internal server error", "error_code": "internal_server_error"})
        );
    }
}
