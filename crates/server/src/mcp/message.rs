//! Messages of JSON-RPC 2.0, as the protocol restricts them.

use std::time::Duration;

use serde_json::{Map, Value, json};

const PARSE: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const UNKNOWN_METHOD: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
/// A header that is required is missing, or differs from the body.
const HEADER: i32 = -32020;
const VERSION: i32 = -32022;

/// Longest part of a message of the client that is repeated in an error, in characters.
const SHOWN_MAX: usize = 100;

/// A message of a client.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Message {
    /// A call that gets an answer.
    Request { id: Value, method: String, params: Value },
    /// A call that gets no answer.
    Notification { method: String, params: Value },
    /// The answer to a call of the server, which never calls.
    Response,
}

impl Message {
    pub(super) fn from_json(value: Value) -> Result<Self, RpcError> {
        let Value::Object(mut map) = value else {
            return Err(RpcError::invalid_request("a message must be an object"));
        };
        let id = map.remove("id");
        let is_id = |id: &Value| id.is_string() || id.is_i64() || id.is_u64();
        let known = id.clone().filter(is_id).unwrap_or(Value::Null);
        Self::read(map, id).map_err(|error| error.of(known))
    }

    fn read(mut map: Map<String, Value>, id: Option<Value>) -> Result<Self, RpcError> {
        if map.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
            return Err(RpcError::invalid_request("jsonrpc must be \"2.0\""));
        }
        match &id {
            None => {}
            Some(id) if id.is_string() || id.is_i64() || id.is_u64() => {}
            Some(_) => return Err(RpcError::invalid_request("id must be a string or an integer")),
        }
        let params = map.remove("params");
        let method = match map.remove("method") {
            Some(Value::String(method)) => method,
            None if id.is_some() && (map.contains_key("result") || map.contains_key("error")) => {
                return Ok(Self::Response);
            }
            _ => return Err(RpcError::invalid_request("method is required and must be a string")),
        };
        let params = params.unwrap_or_else(|| json!({}));
        match id {
            Some(id) => Ok(Self::Request { id, method, params }),
            None => Ok(Self::Notification { method, params }),
        }
    }

    pub(super) fn method(&self) -> Option<&str> {
        match self {
            Self::Request { method, .. } | Self::Notification { method, .. } => Some(method),
            Self::Response => None,
        }
    }

    pub(super) fn params(&self) -> &Value {
        match self {
            Self::Request { params, .. } | Self::Notification { params, .. } => params,
            Self::Response => &Value::Null,
        }
    }

    pub(super) fn is_initialize(&self) -> bool {
        self.method() == Some("initialize")
    }

    /// An error as the answer to this message.
    pub(super) fn refuse(&self, error: RpcError) -> RpcError {
        match self {
            Self::Request { id, .. } => error.of(id.clone()),
            Self::Notification { .. } | Self::Response => error,
        }
    }
}

/// A JSON-RPC error, with the id of what it answers; `null` where that is not known.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RpcError {
    id: Value,
    code: i32,
    message: String,
    data: Option<Value>,
}

impl RpcError {
    fn new(code: i32, message: impl Into<String>) -> Self {
        Self {
            id: Value::Null,
            code,
            message: message.into(),
            data: None,
        }
    }

    pub(super) fn parse(error: &serde_json::Error) -> Self {
        Self::new(PARSE, format!("the body is not valid JSON: {error}"))
    }

    pub(super) fn invalid_request(why: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, format!("invalid request: {}", why.into()))
    }

    pub(super) fn invalid_params(why: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, format!("invalid params: {}", why.into()))
    }

    pub(super) fn unknown_method(method: &str) -> Self {
        let known = "initialize, ping, tools/list and tools/call";
        Self::new(
            UNKNOWN_METHOD,
            format!("unknown method {}; known are {known}", shown(method)),
        )
    }

    pub(super) fn header(why: impl Into<String>) -> Self {
        Self::new(HEADER, why)
    }

    pub(super) fn version(sent: &str, supported: &[&str]) -> Self {
        let why = format!(
            "unsupported protocol version {}; supported: {}",
            shown(sent),
            supported.join(", ")
        );
        let mut error = Self::new(VERSION, why);
        error.data = Some(json!({"supported": supported, "requested": sent}));
        error
    }

    /// Makes the error the answer to a request.
    pub(super) fn of(mut self, id: Value) -> Self {
        self.id = id;
        self
    }

    pub(super) fn into_json(self) -> Value {
        let mut error = json!({"code": self.code, "message": self.message});
        if let Some(data) = self.data {
            error["data"] = data;
        }
        json!({"jsonrpc": "2.0", "id": self.id, "error": error})
    }
}

/// A word of the client in quotes, not too long.
pub(super) fn shown(word: &str) -> String {
    let mut short: String = word.chars().take(SHOWN_MAX).collect();
    if short.len() < word.len() {
        short.push('…');
    }
    format!("{short:?}")
}
/// Why a message has no result.
pub(super) enum Refusal {
    Rpc(RpcError),
    /// The client has to wait.
    Wait(Duration),
}

impl From<RpcError> for Refusal {
    fn from(error: RpcError) -> Self {
        Self::Rpc(error)
    }
}
