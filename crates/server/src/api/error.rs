//! The one error of the API: what a client is told, and what only the log is.

use std::error::Error;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use model::id::InvalidId;
use protocol::node::NodeError;
use serde_json::json;
use store::error::StoreError;

use crate::lifecycle::{Chain, CreateError, ExtendError};

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            error_code: None,
            source: None,
        }
    }

    fn code(mut self, error_code: &'static str) -> Self {
        self.error_code = Some(error_code);
        self
    }

    /// Adds what the log is told and the client is not.
    pub(crate) fn caused_by(mut self, source: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// 400: what was sent does not have the shape that the API describes.
    pub(crate) fn schema(why: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("validation error: {why}"))
    }

    /// 400: what was sent is well-formed and not acceptable.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }

    /// 401: nobody is known by what was presented.
    pub(crate) fn unauthenticated(why: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, why)
    }

    /// 404: the sandbox does not exist, or belongs to somebody else, which is told alike.
    pub(crate) fn no_sandbox(id: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("sandbox \"{id}\" does not exist or you have no access to it"),
        )
    }

    /// 404: nothing can be made of that template.
    pub(crate) fn no_template(why: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, why)
    }

    /// 409: the sandbox is being ended.
    pub(crate) fn stopping(id: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox \"{id}\" is being killed"))
    }

    /// 404: no such route.
    pub(crate) fn unknown_path(path: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("validation error: no operation is known at path {path}"),
        )
    }

    /// 405: the route does not take this method.
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

    /// 408: the body did not arrive in time.
    pub(crate) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "request body did not arrive in time")
    }

    /// 500: not the client's fault, and no more than that is told.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal server error").code("internal_server_error")
    }

    /// 503: the server is starting or draining.
    pub(crate) fn not_ready() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the platform is not ready, try again in a moment",
        )
    }
}

impl From<InvalidId> for ApiError {
    fn from(error: InvalidId) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "the database is unavailable")
                .code("internal_server_error")
                .caused_by(error),
            StoreError::Conflict { .. }
            | StoreError::Dangling { .. }
            | StoreError::Unstorable { .. }
            | StoreError::Address { .. }
            | StoreError::Database { .. }
            | StoreError::Corrupt { .. }
            | StoreError::SchemaTooNew { .. } => Self::internal().caused_by(error),
        }
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
            CreateError::Node(NodeError::Capacity(_)) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "there is no room for another sandbox at the moment",
            )
            .code("sandbox_capacity_unavailable")
            .caused_by(error),
            CreateError::Node(NodeError::NotFound(_) | NodeError::Failed(_))
            | CreateError::Died
            | CreateError::BrokeOff => failed(error),
        }
    }
}

impl ApiError {
    /// What became of a change of the deadline of `id`.
    pub(crate) fn not_extended(error: ExtendError, id: impl std::fmt::Display) -> Self {
        match error {
            ExtendError::Store(error) => error.into(),
            ExtendError::Stopping => Self::stopping(id),
            ExtendError::Gone => Self::no_sandbox(id),
            ExtendError::BrokeOff => Self::internal().caused_by(error),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error()
            && let Some(source) = &self.source
        {
            tracing::error!(
                status = self.status.as_u16(),
                error = %Chain(source.as_ref()),
                "{}", self.message
            );
        }
        let mut body = json!({"code": self.status.as_u16(), "message": self.message});
        if let Some(error_code) = self.error_code {
            body["error_code"] = json!(error_code);
        }
        let content_type = HeaderValue::from_static("application/json; charset=utf-8");
        (self.status, [(header::CONTENT_TYPE, content_type)], body.to_string()).into_response()
    }
}
