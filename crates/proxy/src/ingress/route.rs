//! Which sandbox a request is for, read from the request alone.
//!
//! One port serves the REST API and all sandbox traffic, so the order matters: a host label names a sandbox, then the
//! routing headers do on any host, then a signed file link does by its signature, and the rest is the API. Whoever
//! means a sandbox and spells it wrong gets a 400, never the API.

use http::{HeaderMap, Method, Uri, header, request};
use model::id::SandboxId;

use crate::percent;

/// Header that names the sandbox.
pub const ID_HEADER: &str = "e2b-sandbox-id";
/// Header that names the port inside the sandbox.
pub const PORT_HEADER: &str = "e2b-sandbox-port";

/// A port inside a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The sandbox, which may not exist.
    pub id: SandboxId,
    /// The TCP port, never 0.
    pub port: u16,
}

/// A file link that carries its permission and no sandbox: the sandbox is the one whose token made the signature.
#[derive(Clone, PartialEq, Eq)]
pub struct SignedFile {
    /// The `path` query value, empty when absent.
    pub path: String,
    /// What the method does: `read`, `write`, or empty for a method that does neither.
    pub operation: &'static str,
    /// The `username` query value, empty when absent.
    pub username: String,
    /// The `signature` query value.
    pub signature: String,
    /// The `signature_expiration` query value, in Unix seconds.
    pub expiration: Option<i64>,
}

impl std::fmt::Debug for SignedFile {
    /// Without the signature, which opens the file to whoever reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignedFile")
            .field("path", &self.path)
            .field("operation", &self.operation)
            .finish_non_exhaustive()
    }
}

/// Where a request belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// A port of a sandbox.
    Sandbox(Target),
    /// The file routes of the sandbox that the signature fits.
    SignedFile(SignedFile),
    /// The REST API.
    Api,
}

/// Why a request that means a sandbox cannot be routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadRoute {
    /// The host is missing its one value, or is no host.
    Host,
    /// The sandbox id is malformed.
    Id,
    /// The port is not one of 1 to 65535.
    Port,
    /// One routing header is there and this one is not.
    MissingHeader(&'static str),
    /// This routing header is there more than once.
    RepeatedHeader(&'static str),
}

impl BadRoute {
    /// What to tell the client.
    #[must_use]
    pub fn message(self) -> String {
        match self {
            Self::Host => "invalid host".to_owned(),
            Self::Id => "invalid sandbox ID".to_owned(),
            Self::Port => "invalid sandbox port".to_owned(),
            Self::MissingHeader(name) => format!("missing header {name}"),
            Self::RepeatedHeader(name) => format!("header {name} must be sent once"),
        }
    }
}

/// Decides where a request belongs.
///
/// # Errors
/// [`BadRoute`] when it means a sandbox and does not name one properly, or carries several hosts.
pub fn route(parts: &request::Parts) -> Result<Route, BadRoute> {
    if let Some(host) = host(&parts.uri, &parts.headers)?
        && let Some(target) = target_in_host(host)?
    {
        return Ok(Route::Sandbox(target));
    }
    if let Some(target) = target_in_headers(&parts.headers)? {
        return Ok(Route::Sandbox(target));
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
    // Two hosts are how one reader is made to see another request than the next reader does.
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
    // `u16::from_str` takes a plus sign, which no port has.
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
        // The first of several counts, as the agent reads it.
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

/// What a request does to a file. A browser's preflight is about the method that it announces.
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

/// Routes of the agent that only its host may call, as they are on TCP port 49983 of the platform whose clients these
/// are, and ours.
const CONTROL_PATHS: [&str; 8] = [
    "/init",
    "/freeze",
    "/unfreeze",
    "/collapse",
    "/fsfreeze",
    "/fsthaw",
    "/upgrade",
    "/events",
];

/// Whether a path, decoded once and cleaned of `.`, `..` and doubled slashes, is a control route. A path that cannot
/// be decoded is none: the agent cannot decode it either.
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
    CONTROL_PATHS.contains(&format!("/{}", segments.join("/")).as_str())
}

#[cfg(test)]
mod fuzz;
