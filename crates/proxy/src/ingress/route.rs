//! Routing: determines the target of a request from the request alone.
//!
//! One port serves the REST API and all sandbox traffic, so the order matters: a request to the API's host name goes to
//! the API; then a host label selects a sandbox, then routing headers on any host, then the signature of a signed file
//! link; all other requests go to the API. A malformed sandbox address is a 400 and never goes to the API.
//!
//! One exception exists for clients that send routing headers with every request, including those to the API (SDKs for
//! Python from 2.7 to 2.26, after a connect): requests accepted by [`Api::takes`] go to the API although routing headers
//! name the agent's port. Headers with another port are followed, because programs there may use `X-API-Key` themselves.

use formats::percent;
use http::{HeaderMap, Method, Uri, header, request};
use model::id::SandboxId;
use protocol::agent;

/// Header with the sandbox id.
pub const ID_HEADER: &str = "e2b-sandbox-id";
/// Header with the port inside the sandbox.
pub const PORT_HEADER: &str = "e2b-sandbox-port";

/// A port inside a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The sandbox, which may not exist.
    pub id: SandboxId,
    /// The TCP port, never 0.
    pub port: u16,
}

/// A signed file link without a sandbox id: it belongs to the sandbox whose token created the signature.
#[derive(Clone, PartialEq, Eq)]
pub struct SignedFile {
    /// The `path` query value, empty when absent.
    pub path: String,
    /// The operation of the method: `read`, `write`, or empty for other methods.
    pub operation: &'static str,
    /// The `username` query value, empty when absent.
    pub username: String,
    /// The `signature` query value.
    pub signature: String,
    /// The `signature_expiration` query value, in Unix seconds.
    pub expiration: Option<i64>,
}

impl std::fmt::Debug for SignedFile {
    /// Does not show the signature, which grants access to the file.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignedFile")
            .field("path", &self.path)
            .field("operation", &self.operation)
            .finish_non_exhaustive()
    }
}

/// The target of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// A port of a sandbox.
    Sandbox(Target),
    /// The file routes of the sandbox that the signature belongs to.
    SignedFile(SignedFile),
    /// The REST API.
    Api,
}

/// Why a request to a sandbox cannot be routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadRoute {
    /// The host is missing, repeated or malformed.
    Host,
    /// The sandbox id is malformed.
    Id,
    /// The port is not one of 1 to 65535.
    Port,
    /// Only one routing header was sent; this one is missing.
    MissingHeader(&'static str),
    /// This routing header was sent more than once.
    RepeatedHeader(&'static str),
}

impl BadRoute {
    /// The message for the client.
    #[must_use]
    pub fn message(self) -> String {
        match self {
            Self::Host => "Invalid host".to_owned(),
            Self::Id => "Invalid sandbox ID".to_owned(),
            Self::Port => "Invalid sandbox port".to_owned(),
            Self::MissingHeader(name) => format!("missing header {name}"),
            Self::RepeatedHeader(name) => format!("header {name} must be sent once"),
        }
    }
}

/// How the router recognises requests for the REST API.
pub trait Api {
    /// Whether this host name, without port, is that of the API.
    fn is_at(&self, host: &str) -> bool;

    /// Whether a request is for the API, judged by its route and its credentials.
    fn takes(&self, request: &request::Parts) -> bool;
}

/// Determines the target of a request.
///
/// # Errors
/// [`BadRoute`] when the address of a sandbox is malformed, or the request has several hosts.
pub fn route(parts: &request::Parts, api: &impl Api) -> Result<Route, BadRoute> {
    if let Some(host) = host(&parts.uri, &parts.headers)? {
        if api.is_at(without_port(host)) {
            return Ok(Route::Api);
        }
        if let Some(target) = target_in_host(host)? {
            return Ok(Route::Sandbox(target));
        }
    }
    if let Some(target) = target_in_headers(&parts.headers)? {
        return Ok(if target.port == agent::PORT && api.takes(parts) {
            Route::Api
        } else {
            Route::Sandbox(target)
        });
    }
    if let Some(signed) = signed_file(parts) {
        return Ok(Route::SignedFile(signed));
    }
    Ok(Route::Api)
}

/// The host of a request, with its port: the target's authority (HTTP/2, absolute form) before the `Host` header.
fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Result<Option<&'a str>, BadRoute> {
    let mut values = headers.get_all(header::HOST).iter();
    let first = values.next();
    // Several hosts could be interpreted differently by the next server (request smuggling).
    if values.next().is_some() {
        return Err(BadRoute::Host);
    }
    if let Some(authority) = uri.authority() {
        return Ok(Some(authority.as_str()));
    }
    first
        .map(|value| value.to_str().map_err(|_| BadRoute::Host))
        .transpose()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Reads `<port>-<id>[-<ignored>].<anything>`; `None` when the first label does not begin with digits and a dash.
fn target_in_host(host: &str) -> Result<Option<Target>, BadRoute> {
    let Some((label, _)) = host.split_once('.') else {
        return Ok(None);
    };
    let Some((port, rest)) = label.split_once('-') else {
        return Ok(None);
    };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(None);
    }
    let id = rest.split('-').next().unwrap_or(rest).to_ascii_lowercase();
    Ok(Some(Target {
        port: parse_port(port)?,
        id: id.parse().map_err(|_| BadRoute::Id)?,
    }))
}

fn target_in_headers(headers: &HeaderMap) -> Result<Option<Target>, BadRoute> {
    let id = single(headers, ID_HEADER)?;
    let port = single(headers, PORT_HEADER)?;
    match (id, port) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(BadRoute::MissingHeader(PORT_HEADER)),
        (None, Some(_)) => Err(BadRoute::MissingHeader(ID_HEADER)),
        (Some(id), Some(port)) => {
            let id = id.to_str().map_err(|_| BadRoute::Id)?;
            let port = port.to_str().map_err(|_| BadRoute::Port)?;
            Ok(Some(Target {
                id: SandboxId::from_path(id.trim()).map_err(|_| BadRoute::Id)?,
                port: parse_port(port.trim())?,
            }))
        }
    }
}

fn single<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<Option<&'a http::HeaderValue>, BadRoute> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(BadRoute::RepeatedHeader(name));
    }
    Ok(first)
}

fn parse_port(text: &str) -> Result<u16, BadRoute> {
    // `u16::from_str` accepts a plus sign, which is invalid in a port.
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(BadRoute::Port);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(BadRoute::Port),
        Ok(port) => Ok(port),
    }
}

fn signed_file(parts: &request::Parts) -> Option<SignedFile> {
    if parts.uri.path() != "/files" {
        return None;
    }
    let mut signed = SignedFile {
        path: String::new(),
        operation: operation(parts),
        username: String::new(),
        signature: String::new(),
        expiration: None,
    };
    let mut seen = Vec::new();
    for (key, value) in percent::query_pairs(parts.uri.query()?).flatten() {
        // The first of several values is used, as in the agent.
        if seen.contains(&key) {
            continue;
        }
        match key.as_str() {
            "path" => signed.path = value,
            "username" => signed.username = value,
            "signature" => signed.signature = value,
            "signature_expiration" => signed.expiration = value.parse().ok(),
            _ => continue,
        }
        seen.push(key);
    }
    seen.iter().any(|key| key == "signature").then_some(signed)
}

/// The operation of a request on a file. For a CORS preflight, that of the announced method.
fn operation(parts: &request::Parts) -> &'static str {
    let announced = parts
        .headers
        .get(header::ACCESS_CONTROL_REQUEST_METHOD)
        .filter(|_| parts.method == Method::OPTIONS)
        .and_then(|value| value.to_str().ok());
    match announced.unwrap_or(parts.method.as_str()) {
        "GET" | "HEAD" => "read",
        "POST" | "PUT" => "write",
        _ => "",
    }
}

/// Whether a path, decoded once and cleaned of `.`, `..` and doubled slashes, is one of [`agent::CONTROL_PATHS`]. A
/// path that cannot be decoded is not: the agent cannot decode it either.
#[must_use]
pub fn is_control_path(path: &str) -> bool {
    let Ok(decoded) = percent::decode(path, percent::Plus::Plus) else {
        return false;
    };
    let mut segments = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            name => segments.push(name),
        }
    }
    agent::CONTROL_PATHS.contains(&format!("/{}", segments.join("/")).as_str())
}

#[cfg(test)]
mod fuzz;
