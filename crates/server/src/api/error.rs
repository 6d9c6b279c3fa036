//! The error type of the API: what is returned to the client, and what is only logged.
//!
//! The errors of a domain are made beside its handlers. Here are those that any handler may return.

mod limits;

use std::error::Error;

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use model::id::InvalidId;
use serde::Serialize;
use store::error::StoreError;
use utoipa::ToSchema;

use super::observe::StoreFailed;
use crate::chain::Chain;

/// Tells SDKs that support it not to retry, whatever the status.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");
/// The `error_code` of a host without capacity.
const NO_CAPACITY: &str = "sandbox_capacity_unavailable";
/// The `error_code` of a node that is not connected.
pub(super) const NODE_AWAY: &str = "node_away";
/// The `error_code` of nodes that get no new sandboxes.
pub(super) const NODE_DRAINING: &str = "node_draining";
/// Retry interval where nodes drain, in seconds: the operator has to end that, or add a node.
pub(super) const DRAINING_AFTER_S: u32 = 10;
/// Retry interval for a server whose disk is full, in seconds: the operator has to free space.
const FULL_AFTER_S: u32 = 10;
/// Retry interval for what is in progress, in seconds: it has most likely ended by then.
pub(super) const SOON_S: u32 = 1;

/// Extension of the response to a request for which no node of this server has room, or what it needs: nothing was begun, and
/// another server may have one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unplaced;

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

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("two texts and a number are JSON")
    }
}

/// An error response.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
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
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            error_code: None,
            headers: Vec::new(),
            store_failed: false,
            source: None,
        }
    }

    /// Adds the `error_code` of the body.
    pub(super) fn code(mut self, error_code: &'static str) -> Self {
        self.error_code = Some(error_code);
        self
    }

    /// Adds a header.
    pub(super) fn header(mut self, name: HeaderName, value: impl Into<HeaderValue>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Adds a `Retry-After` header.
    pub(crate) fn retry_after(self, seconds: u32) -> Self {
        self.header(header::RETRY_AFTER, seconds)
    }

    /// Tells SDKs whether a retry can work by itself.
    pub(super) fn should_retry(self, whether: bool) -> Self {
        let text = if whether { "true" } else { "false" };
        self.header(SHOULD_RETRY, HeaderValue::from_static(text))
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

    /// The body of an error that is a part of a response. Its cause is logged.
    pub(crate) fn into_body(self) -> ErrorBody {
        if let Some(source) = &self.source {
            tracing::error!(error = %Chain(source.as_ref()), "{}", self.message);
        }
        ErrorBody {
            error_code: self.error_code,
            ..ErrorBody::new(self.status, self.message)
        }
    }

    /// 403: the client may not do this.
    pub(crate) fn forbidden(why: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, why)
    }

    /// 404: the caller has no such key or token.
    pub(crate) fn no_key(kind: &str, id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("{kind} \"{id}\" doesn't exist or you don't have access to it"),
        )
    }

    /// 409: there is one of that name.
    pub(crate) fn taken(why: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, why)
    }

    /// 500 because of an error of the platform, which is logged.
    pub(super) fn failed(source: impl Error + Send + Sync + 'static) -> Self {
        Self::internal().caused_by(source)
    }

    /// 500: not the client's fault. The response has no details.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal server error").code("internal_server_error")
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
            StoreError::LeaseLost { .. } => {
                let message = "another server manages this node now; this one is ending";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
                    .code("internal_server_error")
                    .caused_by(error)
            }
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
        if matches!(self.error_code, Some(NO_CAPACITY | NODE_AWAY | NODE_DRAINING)) {
            response.extensions_mut().insert(Unplaced);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandboxes::elsewhere::AbsentError;
    use crate::sandboxes::idempotency::ClaimError;

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
            assert!(page.text().contains(&format!(" id=\"{id}\"")), "{expected}");
        }
    }
}
