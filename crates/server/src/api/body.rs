//! Parsing of JSON bodies: unknown keys are ignored, integers have 32 bits and may be written `1.0`, and only the first
//! error is reported. The keys are declared next to each handler with [`shape`], from the types in [`values`].

pub(crate) mod shape;
pub(crate) mod values;

use std::marker::PhantomData;
use std::time::Duration;

use axum::body::Body as HttpBody;
use axum::extract::{FromRequest, Request};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt as _;
use model::limits::BODY_MAX_BYTES;
use serde_json::{Map, Value};

use self::shape::{Body, FieldPath};
use super::error::ApiError;

/// How much of an oversized body is read before the connection is closed, as a multiple of the limit.
const DISCARD_FACTOR: usize = 4;
/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that may be absent, which is the same as an empty object.
pub(crate) struct OptionalBody<T>(Map<String, Value>, PhantomData<fn() -> T>);

/// A required body.
pub(crate) struct RequiredBody<T>(Map<String, Value>, PhantomData<fn() -> T>);

impl<T: Body> OptionalBody<T> {
    /// Parses the body.
    pub(crate) fn read(&self) -> Result<T, ApiError> {
        T::read(&self.0, &FieldPath::BODY)
    }
}

impl<T: Body> RequiredBody<T> {
    /// Parses the body.
    pub(crate) fn read(&self) -> Result<T, ApiError> {
        T::read(&self.0, &FieldPath::BODY)
    }

    /// The body in a canonical form, independent of the order of keys and of white space.
    pub(crate) fn canonical(&self) -> String {
        let mut text = String::new();
        write_canonical(&Value::Object(self.0.clone()), &mut text);
        text
    }
}

impl<S: Send + Sync, T: Body> FromRequest<S> for OptionalBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = read(request).await?;
        Ok(Self(body.unwrap_or_default(), PhantomData))
    }
}

impl<S: Send + Sync, T: Body> FromRequest<S> for RequiredBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        match read(request).await? {
            Some(body) => Ok(Self(body, PhantomData)),
            None => Err(ApiError::schema("request body: value is required but missing")),
        }
    }
}

fn write_canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.iter().collect();
            fields.sort_unstable_by_key(|(key, _)| *key);
            text.push('{');
            for (key, value) in fields {
                write_canonical(&Value::String(key.clone()), text);
                text.push(':');
                write_canonical(value, text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for item in items {
                write_canonical(item, text);
                text.push(',');
            }
            text.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            use std::fmt::Write as _;
            let _ = write!(text, "{value}");
        }
    }
}

/// Reads a body of at most `most` bytes.
pub(crate) async fn read_limited(headers: &HeaderMap, body: HttpBody, most: usize) -> Result<Vec<u8>, ApiError> {
    let announced: Option<usize> = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    // A client that waits for `100 Continue` is refused early; any other is sending already.
    if announced.is_some_and(|bytes| bytes > most) && headers.contains_key(header::EXPECT) {
        return Err(ApiError::too_large(most));
    }
    tokio::time::timeout(BODY_TIMEOUT, collect(body, most))
        .await
        .map_err(|_| ApiError::too_slow())?
}

async fn read(request: Request) -> Result<Option<Map<String, Value>>, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = read_limited(&parts.headers, body, BODY_MAX_BYTES).await?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if !is_json(&parts.headers) {
        let sent = parts.headers.get(header::CONTENT_TYPE);
        let sent = sent.map(|value| String::from_utf8_lossy(value.as_bytes()));
        let sent = sent.unwrap_or_default();
        return Err(ApiError::schema(format_args!(
            "header Content-Type has unexpected value {sent:?}"
        )));
    }
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            Err(ApiError::schema("request body: value must be an object"))
        }
        Err(error) => Err(ApiError::schema(format_args!("failed to decode request body: {error}"))),
    }
}

/// Reads a body up to the limit. Some of what exceeds it is read and dropped, because a connection that is closed with
/// unread bytes is reset, and the client would not see the response.
async fn collect(mut body: HttpBody, most: usize) -> Result<Vec<u8>, ApiError> {
    let mut kept = Vec::new();
    let mut total: usize = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::schema("failed to read request body"))?;
        let Some(data) = frame.data_ref() else { continue };
        total = total.saturating_add(data.len());
        if total <= most {
            kept.extend_from_slice(data);
        } else {
            kept = Vec::new();
        }
        if total > most.saturating_mul(DISCARD_FACTOR) {
            break;
        }
    }
    if total > most {
        return Err(ApiError::too_large(most));
    }
    Ok(kept)
}

/// Whether the type of a body is JSON, whatever its parameters.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

impl ApiError {
    /// 413: the body is over the limit.
    pub(super) fn too_large(limit_bytes: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("request body is larger than {limit_bytes} bytes"),
        )
    }

    /// 415: the body has another type than the endpoint takes.
    pub(super) fn wrong_media_type(expected: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("header Content-Type must be {expected}"),
        )
    }

    /// 408: the body did not arrive in time.
    pub(super) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "request body did not arrive in time")
    }
}
