//! The header `Idempotency-Key` of create requests.

use axum::extract::FromRequestParts;
use http::{HeaderName, request};

use crate::api::error::ApiError;
use crate::sandboxes::idempotency::IdempotencyKey;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The `Idempotency-Key` of a request, if it has one.
pub(crate) struct IdempotencyHeader(pub(super) Option<IdempotencyKey>);

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyHeader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        let mut sent = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(value) = sent.next() else {
            return Ok(Self(None));
        };
        match IdempotencyKey::parse(value.as_bytes()) {
            Some(key) if sent.next().is_none() => Ok(Self(Some(key))),
            _ => Err(ApiError::schema(format_args!(
                "header Idempotency-Key must be sent once and be 1 to {} visible ASCII characters",
                IdempotencyKey::MAX_LENGTH
            ))),
        }
    }
}
