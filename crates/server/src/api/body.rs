//! Reading a JSON body as the API describes it: unknown keys are ignored, `null` counts as absent only where a default
//! exists, integers are 32 bits and may be written `1.0`, and only the first fault is told.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use model::limits::{BODY_MAX_BYTES, NAME_MAX, is_name};
use serde_json::{Map, Value};

use super::error::ApiError;

/// How much of a body that is too large is read before the connection is closed on the rest.
const DISCARD_MAX_BYTES: usize = 4 * BODY_MAX_BYTES;
/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that may be absent.
#[derive(Debug)]
pub(crate) struct OptionalBody(Map<String, Value>);

/// A body that must be there.
#[derive(Debug)]
pub(crate) struct RequiredBody(Map<String, Value>);

impl OptionalBody {
    pub(crate) fn fields(&self) -> Fields<'_> {
        Fields {
            map: &self.0,
            at: String::new(),
        }
    }
}

impl RequiredBody {
    /// The body as text that is the same for the same values, in whatever order and with whatever spaces they came.
    pub(crate) fn canonical(&self) -> String {
        let mut text = String::new();
        write_canonical(&Value::Object(self.0.clone()), &mut text);
        text
    }

    pub(crate) fn fields(&self) -> Fields<'_> {
        Fields {
            map: &self.0,
            at: String::new(),
        }
    }
}

impl<S: Send + Sync> FromRequest<S> for OptionalBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        read(request).await.map(|body| Self(body.unwrap_or_default()))
    }
}

impl<S: Send + Sync> FromRequest<S> for RequiredBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        match read(request).await? {
            Some(body) => Ok(Self(body)),
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

async fn read(request: Request) -> Result<Option<Map<String, Value>>, ApiError> {
    let (parts, body) = request.into_parts();
    let announced: Option<usize> = parts
        .headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    // A client that waits to be told to send is told not to; any other is sending already.
    if announced.is_some_and(|bytes| bytes > BODY_MAX_BYTES) && parts.headers.contains_key(header::EXPECT) {
        return Err(ApiError::too_large(BODY_MAX_BYTES));
    }
    let bytes = tokio::time::timeout(BODY_TIMEOUT, collect(body))
        .await
        .map_err(|_| ApiError::too_slow())??;
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

/// Reads a body up to the limit. What is beyond is read too and dropped, within reason, because a connection that is
/// closed on unread bytes is reset, and the client would not see why.
async fn collect(mut body: Body) -> Result<Vec<u8>, ApiError> {
    let mut kept = Vec::new();
    let mut total: usize = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::schema("failed to read request body"))?;
        let Some(data) = frame.data_ref() else { continue };
        total = total.saturating_add(data.len());
        if total <= BODY_MAX_BYTES {
            kept.extend_from_slice(data);
        } else {
            kept = Vec::new();
        }
        if total > DISCARD_MAX_BYTES {
            break;
        }
    }
    if total > BODY_MAX_BYTES {
        return Err(ApiError::too_large(BODY_MAX_BYTES));
    }
    Ok(kept)
}

fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// What an explicit `null` means for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Null {
    /// The same as leaving the key out.
    Absent,
    /// A fault.
    Refused,
}

/// The keys of one JSON object, with its place in the body for messages.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    at: String,
}

impl<'a> Fields<'a> {
    /// The value of a key, if there is one.
    fn value(&self, key: &str, null: Null) -> Result<Option<&'a Value>, ApiError> {
        match self.map.get(key) {
            None => Ok(None),
            Some(Value::Null) if null == Null::Absent => Ok(None),
            Some(Value::Null) => Err(self.fault(key, "value is not nullable")),
            value => Ok(value),
        }
    }

    /// A fault at a key.
    pub(crate) fn fault(&self, key: &str, why: &str) -> ApiError {
        ApiError::schema(format_args!("{}/{key}: {why}", self.at))
    }

    /// The dotted name of a key, as documentation writes it.
    fn name(&self, key: &str) -> String {
        format!("{}/{key}", self.at).trim_start_matches('/').replace('/', ".")
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ApiError> {
        match self.value(key, Null::Refused)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.fault(key, "value must be a string")),
        }
    }

    pub(crate) fn required_text(&self, key: &str) -> Result<&'a str, ApiError> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    /// The name of a team, a key or a token.
    pub(crate) fn required_name(&self, key: &str) -> Result<&'a str, ApiError> {
        let name = self.required_text(key)?;
        if is_name(name) {
            return Ok(name);
        }
        let why =
            format!("value must have 1 to {NAME_MAX} characters, none of them a control character or outer space");
        Err(self.fault(key, &why))
    }

    /// A fault about a key that is not there.
    pub(crate) fn missing(&self, key: &str) -> ApiError {
        self.fault(key, &format!("property \"{key}\" is missing"))
    }

    pub(crate) fn flag(&self, key: &str, null: Null) -> Result<Option<bool>, ApiError> {
        match self.value(key, null)? {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.fault(key, "value must be a boolean")),
        }
    }

    /// A 32-bit integer that is not negative.
    pub(crate) fn count(&self, key: &str, null: Null) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.value(key, null)? else {
            return Ok(None);
        };
        let Value::Number(number) = value else {
            return Err(self.fault(key, "value must be an integer"));
        };
        let whole = match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => whole,
            // Exact, as every whole number of 32 bits is a double.
            #[expect(
                clippy::cast_possible_truncation,
                reason = "checked to be whole and small just before"
            )]
            (None, Some(float)) if float.fract() == 0.0 && float.abs() < 9e15 => float as i64,
            (None, Some(float)) if float.fract() != 0.0 => {
                return Err(self.fault(key, "value must be an integer"));
            }
            (None, _) => return Err(self.fault(key, "number must be an int32")),
        };
        if whole < 0 {
            return Err(self.fault(key, "number must be at least 0"));
        }
        match i32::try_from(whole) {
            Ok(whole) => Ok(Some(whole.unsigned_abs())),
            Err(_) => Err(self.fault(key, "number must be an int32")),
        }
    }

    /// An object of strings.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<BTreeMap<String, String>>, ApiError> {
        let Some(fields) = self.object(key, Null::Refused)? else {
            return Ok(None);
        };
        fields
            .map
            .keys()
            .map(|key| Ok((key.clone(), fields.required_text(key)?.to_owned())))
            .collect::<Result<_, ApiError>>()
            .map(Some)
    }

    pub(crate) fn object(&self, key: &str, null: Null) -> Result<Option<Fields<'a>>, ApiError> {
        match self.value(key, null)? {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                map,
                at: format!("{}/{key}", self.at),
            })),
            Some(_) => Err(self.fault(key, "value must be an object")),
        }
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        match self.value(key, Null::Refused)? {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(self.fault(key, "value must be an array")),
        }
    }

    /// Whether the object has no key.
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Why a key that is known and has no effect is refused.
    pub(crate) fn unavailable(&self, key: &str) -> String {
        format!("{} is not available on this platform", self.name(key))
    }
}
