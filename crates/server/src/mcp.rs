//! The Model Context Protocol of the documentation endpoint, without sessions; `api/mcp.rs` receives the requests.
//!
//! Every request is answered on its own, as one JSON object and never as an event stream, so nothing is kept between
//! requests. The layer is our own: the usual server library demands an `Accept` header and a session, and does not
//! know the headers that repeat method and name.
//!
//! Anyone may call, so everything is bounded: the nesting of a body, the batch, each tool, and the rate of each peer.

mod message;
mod tools;

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, StatusCode, request};
use serde_json::{Value, json};

use self::message::{Message, Refusal, RpcError};
use self::tools::Tools;
use crate::peers::{ClientPeer, PeerRates};
use crate::readers::Readers;
use crate::settings::McpSettings;

/// Protocol versions, the preferred one first.
const VERSIONS: [&str; 2] = ["2025-06-18", "2025-03-26"];
/// The version that has batches.
const BATCH_VERSION: &str = "2025-03-26";
/// Headers of requests.
const METHOD: &str = "mcp-method";
const NAME: &str = "mcp-name";
const VERSION: &str = "mcp-protocol-version";

/// Maximum size of a body, in bytes.
pub(crate) const BODY_MAX_BYTES: usize = 64 * 1024;
/// Maximum nesting of a body, and number of messages of a batch.
const NESTING_MAX: usize = 32;
const BATCH_MAX: usize = 16;
/// Messages of one peer: a burst, and the interval at which further ones are answered.
const RATE: (u32, Duration) = (200, Duration::from_millis(10));

/// The service behind the endpoint.
#[derive(Debug)]
pub(crate) struct McpService {
    /// Path of the endpoint.
    pub(crate) path: String,
    tools: Tools,
    rates: PeerRates,
}

impl McpService {
    pub(crate) fn new(settings: McpSettings, readers: Arc<Readers>) -> Self {
        Self {
            tools: Tools::new(&settings, readers),
            path: settings.path,
            rates: PeerRates::new(RATE.0, RATE.1),
        }
    }
}

/// The answer to a request: a status, and the body if there is one.
pub(crate) type Answer = (StatusCode, Option<Value>);

impl McpService {
    /// Answers a request with a JSON body.
    ///
    /// # Errors
    /// When its peer sends too much or used up its processor time, with the time until the next request.
    pub(crate) async fn answer(
        &self,
        parts: &request::Parts,
        body: &[u8],
        client: ClientPeer,
    ) -> Result<Answer, Duration> {
        match parse(&parts.headers, body) {
            Ok(request) => {
                self.charge(client, request.messages.len())?;
                answer(self, request, &tools::docs_url(parts, client.is_tls), client).await
            }
            Err(error) => {
                self.charge(client, 1)?;
                Ok((StatusCode::BAD_REQUEST, Some(error.into_json())))
            }
        }
    }

    fn charge(&self, client: ClientPeer, messages: usize) -> Result<(), Duration> {
        let Some(peer) = client.peer else { return Ok(()) };
        for _ in 0..messages {
            self.rates.take(peer)?;
        }
        Ok(())
    }
}

/// A request whose headers agree with its body.
struct McpRequest {
    /// The messages of the body; in a batch, each may be an error instead.
    messages: Vec<Result<Message, RpcError>>,
    is_batch: bool,
}

/// The only value of a header.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, RpcError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match value.to_str() {
        Ok(value) if values.next().is_none() => Ok(Some(value.trim())),
        _ => Err(RpcError::header(format!(
            "header {name} must be one value of ASCII text"
        ))),
    }
}

/// Parses a body and checks the headers against it. Every error is a response with status 400.
fn parse(headers: &HeaderMap, body: &[u8]) -> Result<McpRequest, RpcError> {
    let value: Value = serde_json::from_slice(body).map_err(|error| RpcError::parse(&error))?;
    if depth(&value) > NESTING_MAX {
        return Err(RpcError::invalid_request(format!(
            "nested deeper than {NESTING_MAX} levels"
        )));
    }
    let (method, name, version) = (text(headers, METHOD)?, text(headers, NAME)?, text(headers, VERSION)?);
    let Value::Array(items) = value else {
        let message = Message::from_json(value)?;
        check_headers(&message, method, name)?;
        if !message.is_initialize() {
            check_version(&message, version)?;
        }
        return Ok(McpRequest {
            messages: vec![Ok(message)],
            is_batch: false,
        });
    };
    check_version(&Message::Response, version)?;
    if version != Some(BATCH_VERSION) {
        let why = format!("batches exist under protocol version {BATCH_VERSION} only: send one message at a time");
        return Err(RpcError::invalid_request(why));
    }
    if items.is_empty() || items.len() > BATCH_MAX {
        let why = format!("a batch has 1 to {BATCH_MAX} messages, not {}", items.len());
        return Err(RpcError::invalid_request(why));
    }
    let mut messages = Vec::with_capacity(items.len());
    for item in items {
        let message = Message::from_json(item).and_then(|message| {
            if message.is_initialize() {
                return Err(message.refuse(RpcError::invalid_request("initialize must not be in a batch")));
            }
            Ok(message)
        });
        if let Ok(message) = &message {
            check_headers(message, method, name)?;
        }
        messages.push(message);
    }
    Ok(McpRequest {
        messages,
        is_batch: true,
    })
}

/// The headers that repeat method and name are optional, and must be right.
fn check_headers(message: &Message, method: Option<&str>, name: Option<&str>) -> Result<(), RpcError> {
    if let (Some(header), Some(actual)) = (method, message.method())
        && header != actual
    {
        let why = format!("header {METHOD} is {header:?}, but the method of the message is {actual:?}");
        return Err(message.refuse(RpcError::header(why)));
    }
    if let Some(header) = name
        && message.method() == Some("tools/call")
        && message.params().get("name").and_then(Value::as_str) != Some(header)
    {
        let why = format!("header {NAME} is {header:?}, but params.name of the message is not");
        return Err(message.refuse(RpcError::header(why)));
    }
    Ok(())
}

fn check_version(message: &Message, version: Option<&str>) -> Result<(), RpcError> {
    match version {
        Some(version) if VERSIONS.contains(&version) => Ok(()),
        Some(version) => Err(message.refuse(RpcError::version(version, &VERSIONS))),
        None => {
            let why = format!(
                "header {VERSION} is required after initialize: send one of {}",
                VERSIONS.join(", ")
            );
            Err(message.refuse(RpcError::header(why)))
        }
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// Answers the messages of a request. Errors of a single message have the status 200, because clients report them by
/// their code only then.
async fn answer(service: &McpService, request: McpRequest, base: &str, client: ClientPeer) -> Result<Answer, Duration> {
    let mut responses = Vec::new();
    for message in request.messages {
        match message {
            Ok(Message::Request { id, method, params }) => {
                let result = dispatch(service, &method, &params, base, client).await;
                responses.push(match result {
                    Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
                    Err(Refusal::Rpc(error)) => error.of(id).into_json(),
                    // In a batch, the messages before are not answered either: the whole can be sent again.
                    Err(Refusal::Wait(wait)) => return Err(wait),
                });
            }
            Ok(Message::Notification { .. } | Message::Response) => {}
            Err(error) => responses.push(error.into_json()),
        }
    }
    if responses.is_empty() {
        return Ok((StatusCode::ACCEPTED, None));
    }
    if request.is_batch {
        return Ok((StatusCode::OK, Some(Value::Array(responses))));
    }
    Ok((StatusCode::OK, responses.pop()))
}

async fn dispatch(
    service: &McpService,
    method: &str,
    params: &Value,
    base: &str,
    client: ClientPeer,
) -> Result<Value, Refusal> {
    let result = match method {
        "initialize" => initialize(service, params),
        "ping" => Ok(json!({})),
        "tools/list" => match params.get("cursor") {
            None | Some(Value::Null) => Ok(json!({"tools": service.tools.describe()})),
            Some(_) => Err(RpcError::invalid_params("unknown cursor: all tools are on one page")),
        },
        "tools/call" => return service.tools.call(params, base, client).await,
        "notifications/initialized" => Err(RpcError::invalid_request(
            "notifications/initialized is a notification: send it without an id",
        )),
        _ => Err(RpcError::unknown_method(method)),
    };
    Ok(result?)
}

fn initialize(service: &McpService, params: &Value) -> Result<Value, RpcError> {
    let asked = params.get("protocolVersion").and_then(Value::as_str);
    let asked =
        asked.ok_or_else(|| RpcError::invalid_params("params.protocolVersion is required and must be a string"))?;
    // A client that does not support the answer ends here.
    let version = VERSIONS
        .into_iter()
        .find(|version| *version == asked)
        .unwrap_or(VERSIONS[0]);
    Ok(json!({
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "ringfence", "title": "Ringfence documentation", "version": env!("CARGO_PKG_VERSION")},
        "instructions": service.tools.instructions(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Peer;

    fn ping(batch: usize) -> (request::Parts, String) {
        let request = http::Request::builder().header(VERSION, BATCH_VERSION);
        let parts = request.body(()).expect("a request").into_parts().0;
        let one = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
        (parts, Value::from(vec![one; batch]).to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn every_message_of_a_peer_counts() {
        let service = McpService::new(McpSettings::default(), Arc::new(Readers::new()));
        let client = |peer| ClientPeer {
            peer,
            is_loopback: false,
            is_tls: false,
        };
        let (one, other) = (client(Some(Peer::V6(1))), client(Some(Peer::V6(2))));
        let (parts, batch) = ping(10);
        for _ in 0..RATE.0 / 10 {
            let answer = service.answer(&parts, batch.as_bytes(), one).await;
            assert_eq!(answer.map(|(status, _)| status), Ok(StatusCode::OK));
        }
        assert_eq!(service.answer(&parts, b"{", one).await, Err(RATE.1));
        // Others are not affected, and addresses that many clients share have no limit.
        assert!(service.answer(&parts, b"{", other).await.is_ok());
        for _ in 0..RATE.0 {
            assert!(service.answer(&parts, batch.as_bytes(), client(None)).await.is_ok());
        }
        tokio::time::advance(RATE.1).await;
        let answer = service.answer(&parts, b"{", one).await;
        assert_eq!(answer.map(|(status, _)| status), Ok(StatusCode::BAD_REQUEST));
    }
}
