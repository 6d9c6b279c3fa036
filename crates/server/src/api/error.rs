//! The error type of the API: what is returned to the client, and what is only logged.

mod fork;
mod lost;
mod pause;
mod snapshot;

use std::error::Error;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use model::id::InvalidId;
use protocol::node::NodeError;
use serde::Serialize;
use store::error::StoreError;
use store::tags::TAGS_MAX;
use utoipa::ToSchema;

use super::observe::StoreFailed;
use crate::admission::AdmissionError;
use crate::admission::quota::{OverQuota, PAUSED, PAUSED_DISK};
use crate::admission::rate::Level;
use crate::authentication::AuthenticationError;
use crate::chain::Chain;
use crate::keys::InvalidKey;
use crate::outcome::CreateOutcome;
use crate::repositories::RepositoryError;
use crate::sandboxes::change::ChangeError;
use crate::sandboxes::create::CreateError;
use crate::sandboxes::elsewhere::AbsentError;
use crate::sandboxes::header_rules::RulesError;
use crate::sandboxes::idempotency::ClaimError;
use crate::templates::{InvalidTemplateName, TemplateError};

/// Tells SDKs that support it not to retry, whatever the status.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");
/// The `error_code` of a host without capacity.
const NO_CAPACITY: &str = "sandbox_capacity_unavailable";
/// Retry interval for a server that is not ready, in seconds. A start takes less, a drain and a start a little more.
const READY_AFTER_S: u32 = 1;
/// Retry interval for a server whose disk is full, in seconds: the operator has to free space.
const FULL_AFTER_S: u32 = 10;
/// Retry interval for a team with too many builds, in seconds.
const BUILD_AFTER_S: u32 = 30;
/// Retry interval for a create request in progress, in seconds: it has most likely ended by then.
const IN_PROGRESS_AFTER_S: u32 = 1;

/// The body of every error response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    /// The HTTP status, which SDKs read from here.
    #[schema(minimum = 400, maximum = 599)]
    code: u16,
    /// What went wrong, for people.
    message: String,
    /// What went wrong, for programs, where one status has several reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    error_code: Option<&'static str>,
}

impl ErrorBody {
    pub(super) fn new(status: StatusCode, message: String) -> Self {
        Self {
            code: status.as_u16(),
            message,
            error_code: None,
        }
    }

    /// The body of an error that is a part of a response. Its cause is logged.
    fn of_part(error: ApiError) -> Self {
        if let Some(source) = &error.source {
            tracing::error!(error = %Chain(source.as_ref()), "{}", error.message);
        }
        Self {
            error_code: error.error_code,
            ..Self::new(error.status, error.message)
        }
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("two texts and a number are JSON")
    }
}

/// An error response.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    headers: Vec<(HeaderName, HeaderValue)>,
    store_failed: bool,
    source: Option<Box<dyn Error + Send + Sync>>,
}

/// The section of the documentation about an error, which the header `Link` names: messages stay as clients know them.
fn help(status: StatusCode, error_code: Option<&str>) -> &'static str {
    match (status, error_code) {
        (_, Some(NO_CAPACITY)) => "/docs/configuration#capacity-of-the-host",
        (_, Some("sandbox_on_other_node")) => "/docs/operations#several-platforms-on-one-database",
        (_, Some("idempotency_request_mismatch" | "idempotency_in_progress")) => {
            "/docs/sandboxes/lifecycle#repeating-a-create-request"
        }
        (StatusCode::UNAUTHORIZED, _) => "/docs/troubleshooting#credentials",
        (StatusCode::TOO_MANY_REQUESTS, _) => "/docs/configuration#limits-of-teams",
        (StatusCode::NOT_IMPLEMENTED, _) => "/docs/api/not-available",
        _ => "/docs/api#errors",
    }
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            error_code: None,
            headers: Vec::new(),
            store_failed: false,
            source: None,
        }
    }

    fn code(mut self, error_code: &'static str) -> Self {
        self.error_code = Some(error_code);
        self
    }

    /// Adds a `Retry-After` header.
    fn retry_after(mut self, seconds: u32) -> Self {
        self.headers.push((header::RETRY_AFTER, HeaderValue::from(seconds)));
        self
    }

    /// Adds the cause, which is logged but not returned to the client.
    pub(crate) fn caused_by(mut self, source: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// 400: the request does not match the schema.
    pub(crate) fn schema(why: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("validation error: {why}"))
    }

    /// 400: the request matches the schema but is not acceptable.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }

    /// The body of one that is a part of a response.
    pub(crate) fn into_body(self) -> ErrorBody {
        ErrorBody::of_part(self)
    }

    /// The message for the client.
    #[cfg(test)]
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The outcome under which a create request with this response is counted.
    pub(crate) fn create_outcome(&self) -> CreateOutcome {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => CreateOutcome::Limited,
            _ if self.error_code == Some(NO_CAPACITY) => CreateOutcome::NoCapacity,
            status if status.is_client_error() => CreateOutcome::Refused,
            _ => CreateOutcome::Failed,
        }
    }

    /// 401: the credentials are missing or invalid.
    pub(crate) fn unauthenticated(why: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::UNAUTHORIZED, why);
        let challenge = HeaderValue::from_static("Bearer realm=\"ringfence\"");
        error.headers.push((header::WWW_AUTHENTICATE, challenge));
        error
    }

    /// 404: the sandbox does not exist or belongs to another team; the response is the same.
    pub(crate) fn no_sandbox(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("sandbox \"{id}\" doesn't exist or you don't have access to it"),
        )
    }

    /// The response for a sandbox that this server cannot change: 404, or 503 if it is on another node.
    pub(crate) fn absent(error: AbsentError, id: impl std::fmt::Display) -> Self {
        match error {
            AbsentError::Store(error) => error.into(),
            AbsentError::Unknown => Self::no_sandbox(id),
            AbsentError::Elsewhere { node } => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("sandbox \"{id}\" is on node \"{node}\": send the request to the server of that node"),
            )
            .code("sandbox_on_other_node"),
        }
    }

    /// 404: the template does not exist or belongs to another team; the response is the same.
    pub(crate) fn unknown_template(name: &str) -> Self {
        Self::no_template(format!(
            "template \"{name}\" doesn't exist or you don't have access to it"
        ))
    }

    /// 403: the template is one that the team can use and not change.
    pub(crate) fn foreign_template(name: &str) -> Self {
        Self::forbidden(format!("template \"{name}\" does not belong to your team"))
    }

    /// 403: the client may not do this.
    pub(crate) fn forbidden(why: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, why)
    }

    /// 413: an upload is larger than the operator allows.
    pub(crate) fn upload_too_large(why: String) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    }

    /// 503: uploads are not possible now.
    pub(crate) fn upload_unavailable(why: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    /// 429: the team has as many builds as it can have.
    pub(crate) fn build_limit(limit: u32) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("your team is limited to {limit} builds at the same time: wait until one has ended"),
        )
        .code("build_limit_reached")
        .retry_after(BUILD_AFTER_S)
    }

    /// 429: the templates of the team take as much space as they may.
    pub(crate) fn template_space_limit(limit_mb: u32, used_mb: u64) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "your team is limited to {limit_mb} MiB of templates and snapshots, {used_mb} are in use: delete those that \
                 are not needed any more"
            ),
        )
        .code("template_space_limit_reached")
    }

    /// 400: the template would have too many tags.
    pub(crate) fn tag_limit() -> Self {
        Self::invalid(format!(
            "a template can have {TAGS_MAX} tags: remove some with DELETE /templates/tags"
        ))
    }

    /// 409: the build has ended.
    pub(crate) fn build_ended(id: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::CONFLICT, format!("build \"{id}\" has ended"))
    }

    /// 404: no sandbox can be created from the template.
    pub(crate) fn no_template(why: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, why)
    }

    /// 404: the team does not exist, or is not the caller's.
    pub(crate) fn no_team(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("team \"{id}\" doesn't exist or you don't have access to it"),
        )
    }

    /// 404: the caller has no such key or token.
    pub(crate) fn no_key(kind: &str, id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("{kind} \"{id}\" doesn't exist or you don't have access to it"),
        )
    }

    /// The response when the header rules of a request were refused.
    pub(crate) fn header_rules(error: RulesError, prefix: &str) -> Self {
        match error {
            RulesError::Store(error) => error.into(),
            RulesError::Invalid(why) => Self::invalid(format!("{prefix}{why}")),
        }
    }

    /// The same error, with the advice to send the request again if that is safe because of its idempotency key.
    pub(crate) fn or_retry_with_key(mut self) -> Self {
        if self.status == StatusCode::REQUEST_TIMEOUT {
            self.message
                .push_str(": send the request again with the same Idempotency-Key");
        }
        self
    }

    /// 409: there is one of that name.
    pub(crate) fn taken(why: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, why)
    }

    /// 429: the team has as many secrets as it can have. A retry does not help.
    pub(crate) fn secret_limit(limit: u32) -> Self {
        let why = format!("your team is limited to {limit} secrets: delete one first");
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, why).code("secret_limit_reached");
        error.headers.push((SHOULD_RETRY, HeaderValue::from_static("false")));
        error
    }

    /// The error, in which the place of the value is that within `at`.
    pub(crate) fn within(mut self, at: &str) -> Self {
        self.message = format!("{at}.{}", self.message);
        self
    }

    /// 409: the sandbox is being ended.
    pub(crate) fn stopping(id: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is being killed"))
    }

    /// 409: the sandbox runs, so there is nothing to resume.
    pub(crate) fn running(id: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is already running"))
    }

    /// 501: an operation that clients know and that is not built yet.
    pub(crate) fn not_built(what: &str, method: &str, path: &str) -> Self {
        let why = format!("{what} is not built yet: this platform does not have {method} {path}");
        Self::new(StatusCode::NOT_IMPLEMENTED, why).code("not_built")
    }

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

    /// 413: the body is over the limit.
    pub(crate) fn too_large(limit_bytes: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("request body is larger than {limit_bytes} bytes"),
        )
    }

    /// 415: the body has another type than the endpoint takes.
    pub(crate) fn wrong_media_type(expected: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("header Content-Type must be {expected}"),
        )
    }

    /// 429: a client without credentials sends too many requests.
    pub(crate) fn too_many_requests(wait: Duration) -> Self {
        let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("too many requests from your address, try again in {seconds} s"),
        )
        .retry_after(seconds)
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "request body did not arrive in time")
    }

    /// 500: not the client's fault. The response has no details.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal server error").code("internal_server_error")
    }

    /// The request was not answered in time: 504, or 500 for a request that may have changed something. SDKs retry
    /// after a 504, and nothing must be created twice.
    pub(crate) fn too_long(is_safe: bool) -> Self {
        if is_safe {
            return Self::new(StatusCode::GATEWAY_TIMEOUT, "the request could not be answered in time");
        }
        let why = "the request could not be answered in time, and it is not known whether it took effect";
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, why).code("internal_server_error");
        error.headers.push((SHOULD_RETRY, HeaderValue::from_static("false")));
        error
    }

    /// 503: the server is starting or draining.
    pub(crate) fn not_ready() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the platform is not ready, try again in a moment",
        )
        .retry_after(READY_AFTER_S)
    }

    /// The response when an idempotency key could not be claimed. `mismatch` is the status for another request with the
    /// same key, which depends on the path.
    pub(crate) fn idempotency(error: ClaimError, mismatch: StatusCode) -> Self {
        match error {
            ClaimError::Store(error) => error.into(),
            ClaimError::Mismatch => Self::new(
                mismatch,
                "this Idempotency-Key was used with another request: send a new key with a new request",
            )
            .code("idempotency_request_mismatch"),
            ClaimError::InProgress => Self::new(
                StatusCode::CONFLICT,
                "the first request with this Idempotency-Key is still in progress: try again in a moment",
            )
            .code("idempotency_in_progress")
            .retry_after(IN_PROGRESS_AFTER_S),
        }
    }

    /// 500: a change was stored but not applied. A repeated request is safe, and can work.
    fn not_applied(id: impl std::fmt::Display) -> Self {
        let why = format!(
            "the change of sandbox \"{id}\" was stored but not applied, so its connections may still follow the \
             settings before: send the request again, or wait until the platform has tried again"
        );
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, why).code("sandbox_change_not_applied");
        error.headers.push((SHOULD_RETRY, HeaderValue::from_static("true")));
        error
    }

    /// 503: the host has no capacity for another sandbox.
    fn no_capacity(retry_after_s: u32) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "there is no capacity for another sandbox at the moment: try again later",
        )
        .code(NO_CAPACITY)
        .retry_after(retry_after_s)
    }

    /// 429: a rate limit of the team is exceeded.
    pub(crate) fn rate_limited(what: &str, level: Level) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "your team is limited to {} {what}, try again in {} s",
                level.limit, level.next_in_s
            ),
        )
        .retry_after(level.next_in_s)
    }
}

impl From<InvalidId> for ApiError {
    fn from(error: InvalidId) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let mut answer = match error {
            StoreError::Unavailable { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "the database is unavailable")
                .code("internal_server_error")
                .caused_by(error),
            StoreError::Full { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "the disk of this server is full")
                .code("internal_server_error")
                .retry_after(FULL_AFTER_S)
                .caused_by(error),
            StoreError::Conflict { .. }
            | StoreError::Dangling { .. }
            | StoreError::UnsupportedCharacter { .. }
            | StoreError::Address { .. }
            | StoreError::Database { .. }
            | StoreError::Corrupt { .. }
            | StoreError::SchemaTooNew { .. } => Self::internal().caused_by(error),
        };
        answer.store_failed = true;
        answer
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        let failed = |error: CreateError| {
            Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the sandbox could not be created")
                .code("sandbox_create_failed")
                .caused_by(error)
        };
        match error {
            CreateError::Store(error) => error.into(),
            CreateError::NotReady { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, error.to_string()),
            CreateError::TimedOut => Self::new(StatusCode::GATEWAY_TIMEOUT, "the sandbox did not start in time")
                .code("sandbox_placement_timeout"),
            CreateError::NoCapacity { retry_after_s, .. } => Self::no_capacity(retry_after_s).caused_by(error),
            CreateError::Busy { team_limit } => Self::restores_busy(team_limit),
            CreateError::NotFetched(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the layers of the template are not on the node yet and could not be fetched in time: try again",
            )
            .code("template_unavailable")
            .caused_by(error),
            CreateError::Node(NodeError::NoLayer(ref layer)) => Self::lost_template(layer).caused_by(error),
            CreateError::Repositories(RepositoryError::Refused(why)) => Self::invalid(format!("resources: {why}")),
            CreateError::Repositories(RepositoryError::TimedOut { limit_s }) => Self::new(
                StatusCode::REQUEST_TIMEOUT,
                format!(
                    "cloning the repositories in resources took longer than {limit_s} s, and the sandbox was ended"
                ),
            ),
            CreateError::Repositories(RepositoryError::Unreachable { ref url, .. }) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("repository {url} could not be fetched from the code host: try again later"),
            )
            .code("repository_unavailable")
            .caused_by(error),
            CreateError::Repositories(RepositoryError::Sandbox(_)) => failed(error),
            CreateError::Seal(_)
            | CreateError::Node(_)
            | CreateError::StartCommand(_)
            | CreateError::Died
            | CreateError::TaskFailed => failed(error),
        }
    }
}

impl From<AdmissionError> for ApiError {
    fn from(error: AdmissionError) -> Self {
        match error {
            AdmissionError::OverQuota(over) => over.into(),
            AdmissionError::NoCapacity { retry_after_s, .. } => Self::no_capacity(retry_after_s).caused_by(error),
        }
    }
}

impl From<AuthenticationError> for ApiError {
    fn from(error: AuthenticationError) -> Self {
        let why = match error {
            AuthenticationError::Store(error) => return error.into(),
            AuthenticationError::InvalidApiKey(InvalidKey::Prefix) => {
                "authorization header is malformed: not an API key"
            }
            AuthenticationError::InvalidApiKey(InvalidKey::Digits) => "invalid API key: invalid format",
            AuthenticationError::UnknownApiKey => "invalid API key: unknown key",
            AuthenticationError::InvalidAccessToken(_) => "invalid access token: invalid format",
            AuthenticationError::UnknownAccessToken => "invalid access token: unknown token",
        };
        Self::unauthenticated(why)
    }
}

impl From<InvalidTemplateName> for ApiError {
    fn from(error: InvalidTemplateName) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Store(error) => error.into(),
            TemplateError::Unknown { name } => Self::unknown_template(&name),
            TemplateError::McpGateway => Self::no_template(
                "template \"mcp-gateway\" is not available on this platform: it would contain the program that runs the \
                 servers in `mcp`; name a template of yours that has this program",
            ),
            TemplateError::UnknownTag { name, tag } => {
                Self::no_template(format!("template \"{name}\" has no build with tag \"{tag}\""))
            }
            TemplateError::NotBuilt { name } => Self::no_template(format!(
                "template \"{name}\" has no finished build with tag \"default\""
            )),
        }
    }
}

impl From<OverQuota> for ApiError {
    /// 429 that waiting does not resolve: without `Retry-After`, and with a header that keeps SDKs from retrying.
    fn from(over: OverQuota) -> Self {
        let OverQuota {
            resource,
            limit,
            used,
            requested,
            key: _,
        } = over;
        let what = match resource {
            PAUSED | PAUSED_DISK => "resume or kill a paused sandbox",
            _ => "kill a sandbox",
        };
        let mut error = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "your team is limited to {limit} {resource}, {used} are in use and this sandbox needs {requested}: {what}, \
                 or ask the operator of this platform for more"
            ),
        );
        error.headers.push((SHOULD_RETRY, HeaderValue::from_static("false")));
        error
    }
}

impl ApiError {
    /// The response when a running sandbox could not be changed.
    pub(crate) fn not_changed(error: ChangeError, id: impl std::fmt::Display) -> Self {
        match error {
            ChangeError::Store(error) => error.into(),
            ChangeError::Stopping => Self::stopping(id),
            ChangeError::Changing(verb) => Self::changing(id, verb),
            ChangeError::Gone => Self::no_sandbox(id),
            ChangeError::NotApplied(_) => Self::not_applied(id).caused_by(error),
            ChangeError::NoToken => Self::invalid(format!(
                "sandbox \"{id}\" has no injection of a code host, so there is no token to replace"
            )),
            ChangeError::Seal(_) | ChangeError::TaskFailed => Self::internal().caused_by(error),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error()
            && let Some(source) = &self.source
        {
            let (status, error) = (self.status.as_u16(), Chain(source.as_ref()));
            match self.status {
                // What the host lacks does not fail.
                StatusCode::NOT_IMPLEMENTED => tracing::info!(status, %error, "{}", self.message),
                _ => tracing::error!(status, %error, "{}", self.message),
            }
        }
        let body = ErrorBody {
            error_code: self.error_code,
            ..ErrorBody::new(self.status, self.message)
        };
        let content_type = HeaderValue::from_static("application/json; charset=utf-8");
        let mut response = (self.status, [(header::CONTENT_TYPE, content_type)], body.to_json()).into_response();
        response.headers_mut().extend(self.headers);
        let link = format!("<{}>; rel=\"help\"", help(self.status, self.error_code));
        let link = HeaderValue::from_str(&link).expect("addresses of pages are ASCII");
        response.headers_mut().insert(header::LINK, link);
        if self.store_failed {
            response.extensions_mut().insert(StoreFailed);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Errors lead to a section that exists in this version.
    #[test]
    fn help_is_served() {
        let site = ::docs::web::RenderedPages::new(::docs::catalogue());
        for (error, expected) in [
            (ApiError::unauthenticated("x"), "/docs/troubleshooting#credentials"),
            (ApiError::no_capacity(1), "/docs/configuration#capacity-of-the-host"),
            (ApiError::not_built("x", "GET", "/x"), "/docs/api/not-available"),
            (ApiError::schema("x"), "/docs/api#errors"),
            (
                ApiError::idempotency(ClaimError::InProgress, StatusCode::BAD_REQUEST),
                "/docs/sandboxes/lifecycle#repeating-a-create-request",
            ),
            (
                ApiError::absent(AbsentError::Elsewhere { node: "a".into() }, "b"),
                "/docs/operations#several-platforms-on-one-database",
            ),
            (
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "x"),
                "/docs/configuration#limits-of-teams",
            ),
        ] {
            let response = error.into_response();
            let link = response.headers()[header::LINK].to_str().expect("ASCII");
            assert_eq!(link, format!("<{expected}>; rel=\"help\""));
            let (path, id) = expected.split_once('#').unwrap_or((expected, "content"));
            let page = site.asset(path).expect("a page");
            assert!(page.body.contains(&format!(" id=\"{id}\"")), "{expected}");
        }
    }
}
