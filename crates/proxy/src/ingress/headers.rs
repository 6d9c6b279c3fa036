//! Changes of headers between the two connections.
//!
//! Connection-specific fields are not forwarded (RFC 9110, 7.6.1), and forwarding headers of a client are removed, because
//! programs in a sandbox would take them for information from the proxy.
//!
//! Names keep their case, because there are programs that look for one. The HTTP library has it beside the headers, so it
//! needs nothing here.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Method, Response, StatusCode, Uri, Version, request};
use protocol::agent;
use secrecy::SecretString;

use super::access::{Access, TRAFFIC_TOKEN_HEADER, is_token};

/// Connection-specific fields, besides those listed in `Connection`.
const HOP_BY_HOP: [HeaderName; 7] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Carries the traffic token of a sandbox that is not public.
const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static(TRAFFIC_TOKEN_HEADER);
/// Carries the token of a sandbox's agent.
const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");
/// Carries the host of a client whose request has another one inside.
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// How the body of a request is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Framing {
    /// Whether there is a body.
    pub has_body: bool,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// Whether the client requests an upgrade to another protocol.
    pub upgrade: bool,
    /// Whether the connection can serve another request afterwards.
    pub keeps: bool,
}

/// Rewrites the head of a request for an HTTP/1.1 connection into the sandbox.
///
/// The connection is not kept after a request of which the server may not have read the body, nor after `HEAD`: servers
/// that send a body by mistake exist, and the next client would take it for its response.
pub(super) fn to_guest(parts: &mut request::Parts, has_body: bool, upgrades_allowed: bool) -> Framing {
    let upgrade = upgrades_allowed
        .then(|| requested_upgrade(&parts.headers, parts.version))
        .flatten();
    let expects_continue = has_body
        && parts.version == Version::HTTP_11
        && parts
            .headers
            .get(EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    let takes_trailers = lists(&parts.headers, &TE, "trailers");

    remove_hop_by_hop(&mut parts.headers);
    parts.headers.remove(TE);
    if takes_trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    parts.headers.remove(FORWARDED);
    let claimed: Vec<HeaderName> = parts
        .headers
        .keys()
        .filter(|name| name.as_str().starts_with("x-forwarded-"))
        .cloned()
        .collect();
    for name in claimed {
        parts.headers.remove(name);
    }
    if !expects_continue {
        parts.headers.remove(EXPECT);
    }

    let authority = parts.uri.authority().map(|authority| authority.as_str().to_owned());
    if let Some(value) = authority.and_then(|text| HeaderValue::try_from(text).ok()) {
        parts.headers.insert(HOST, value);
    }
    // HTTP/1.1 requires a host; an HTTP/1.0 client may have sent none.
    parts
        .headers
        .entry(HOST)
        .or_insert_with(|| HeaderValue::from_static("localhost"));

    // A body of unknown length with a method that usually has none would otherwise be omitted.
    if has_body && !parts.headers.contains_key(CONTENT_LENGTH) {
        parts
            .headers
            .insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let keeps = upgrade.is_none() && !expects_continue && parts.method != Method::HEAD;
    let upgrades = upgrade.is_some();
    if let Some(protocol) = upgrade {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, protocol);
    } else if !keeps {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    parts.uri = origin_form(&parts.method, &parts.uri);
    parts.version = Version::HTTP_11;
    Framing {
        has_body,
        expects_continue,
        upgrade: upgrades,
        keeps,
    }
}

/// Port of the code interpreter that published clients have built in.
const CODE_INTERPRETER_PORT: u16 = 49_999;

/// Removes the tokens of the sandbox from a request, and no other value: programs inside that read their requests must
/// not be able to use these tokens. One exception: clients of the code interpreter send it the token of its own sandbox on
/// purpose, because it asks the agent with it for the environment.
pub(super) fn remove_tokens(headers: &mut HeaderMap, access: &Access, port: u16) {
    remove_value(headers, &TRAFFIC_TOKEN, access.traffic_token.as_ref());
    if ![agent::PORT, CODE_INTERPRETER_PORT].contains(&port) {
        remove_value(headers, &ACCESS_TOKEN, access.access_token.as_ref());
    }
}

/// The host that requests to a port have inside, if it is not that of the client.
pub(super) fn masked_host(access: &Access, port: u16) -> Option<HeaderValue> {
    let mask = access.mask_host.as_ref().filter(|_| port != agent::PORT)?;
    HeaderValue::try_from(mask.host(port)).ok()
}

/// Replaces the host of a request for the sandbox, and passes on the one before.
pub(super) fn mask_host(headers: &mut HeaderMap, host: HeaderValue) {
    if let Some(before) = headers.insert(HOST, host) {
        headers.insert(FORWARDED_HOST, before);
    }
}

fn remove_value(headers: &mut HeaderMap, name: &HeaderName, token: Option<&SecretString>) {
    let Some(token) = token else { return };
    let (same, others): (Vec<HeaderValue>, Vec<HeaderValue>) = headers
        .get_all(name)
        .iter()
        .cloned()
        .partition(|value| is_token(token, value));
    if same.is_empty() {
        return;
    }
    headers.remove(name);
    for value in others {
        headers.append(name, value);
    }
}

/// Whether the body of this response ends with the connection.
pub(super) fn ends_with_connection(headers: &HeaderMap) -> bool {
    !headers.contains_key(CONTENT_LENGTH) && !lists(headers, &TRANSFER_ENCODING, "chunked")
}

/// Whether the server keeps the connection after this response, and the end of the response is certain.
///
/// Responses without a body by definition are excluded: a body that a server sends by mistake would be read as the next
/// response. So are responses with two statements of their length.
pub(super) fn keeps_connection<B>(response: &Response<B>) -> bool {
    let headers = response.headers();
    let status = response.status();
    let length = headers.get_all(CONTENT_LENGTH).iter().count();
    let encodings = headers.get_all(TRANSFER_ENCODING);
    let is_chunked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"chunked");
    response.version() == Version::HTTP_11
        && !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED
        && !lists(headers, &CONNECTION, "close")
        && encodings.iter().all(is_chunked)
        && encodings.iter().count() + length == 1
        && (length == 0 || has_one_length(headers))
}

/// Rewrites the headers of a response for the client's connection.
pub(super) fn to_client(headers: &mut HeaderMap, upgraded: bool) {
    let protocol = upgraded.then(|| headers.get(UPGRADE).cloned()).flatten();
    remove_hop_by_hop(headers);
    // The length of a message without a body, as in the response to HEAD, was not checked.
    if !has_one_length(headers) {
        headers.remove(CONTENT_LENGTH);
    }
    if upgraded {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol {
            headers.insert(UPGRADE, protocol);
        }
    }
}

/// The protocol that a client wants to upgrade to. Upgrades to HTTP/2 are not forwarded, because requests inside the
/// upgraded connection would not be checked.
fn requested_upgrade(headers: &HeaderMap, version: Version) -> Option<HeaderValue> {
    if version != Version::HTTP_11 || !lists(headers, &CONNECTION, "upgrade") || lists(headers, &UPGRADE, "h2c") {
        return None;
    }
    headers.get(UPGRADE).cloned()
}

/// Whether a comma-separated field holds a token, in any case.
fn lists(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|item| {
            item.split(';')
                .next()
                .is_some_and(|name| name.trim().eq_ignore_ascii_case(token))
        })
}

fn has_one_length(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(CONTENT_LENGTH).iter();
    let first = values.next();
    // `parse` accepts a plus sign, which is invalid in a length.
    let number = first
        .filter(|value| value.as_bytes().iter().all(u8::is_ascii_digit))
        .is_some_and(|value| value.to_str().is_ok_and(|text| text.parse::<u64>().is_ok()));
    number && values.next().is_none()
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // With both a length and chunked encoding, the length is ignored (RFC 9112, 6.3).
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // `Connection` must not remove fields that frame or route the request.
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn origin_form(method: &Method, uri: &Uri) -> Uri {
    if *method == Method::OPTIONS && uri.path() == "*" {
        return Uri::from_static("*");
    }
    uri.path_and_query()
        .and_then(|path| Uri::builder().path_and_query(path.clone()).build().ok())
        .unwrap_or_else(|| Uri::from_static("/"))
}

#[cfg(test)]
mod fuzz;
