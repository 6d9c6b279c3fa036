//! The header `Idempotency-Key` of create requests.

use axum::extract::FromRequestParts;
use http::{HeaderName, request};
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::SchemaType;
use utoipa::openapi::{ObjectBuilder, Required, Type};

use crate::api::error::ApiError;
use crate::sandboxes::idempotency::IdempotencyKey;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The `Idempotency-Key` of a request, if it has one.
pub(crate) struct IdempotencyHeader(pub(super) Option<IdempotencyKey>);

impl IntoParams for IdempotencyHeader {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let text = ObjectBuilder::new()
            .schema_type(SchemaType::from_iter([Type::String, Type::Null]))
            .min_length(Some(1))
            .max_length(Some(IdempotencyKey::MAX_LENGTH))
            .pattern(Some("^[!-~]+$"));
        let parameter = ParameterBuilder::new()
            .name("Idempotency-Key")
            .parameter_in(ParameterIn::Header)
            .description(Some(
                "Makes it safe to repeat the request: for 24 hours, the same key with the same body is answered with the \
                 same sandbox",
            ))
            .required(Required::False)
            .schema(Some(text));
        vec![parameter.build()]
    }
}

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
