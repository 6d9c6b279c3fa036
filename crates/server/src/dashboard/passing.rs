//! What of a request goes on, and what of an answer comes back: lists of what is allowed, for both.
//!
//! An answer of the API is for clients of other origins too, and one of an agent is whatever the sandbox likes. Here both
//! become data for the page's script: never a document that could run, no cookie, no redirect, no permission for others.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use formats::percent;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, request};
use http_body::{Frame, SizeHint};
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::guard;
use super::sessions::Session;
use crate::api::ApiError;

/// Headers of requests to the API. The session takes the place of a credential, and only the session's team is acted for.
const TO_API: [HeaderName; 5] = [
    header::ACCEPT,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::USER_AGENT,
    HeaderName::from_static("idempotency-key"),
];
/// Headers of requests to an agent.
const TO_AGENT: [HeaderName; 8] = [
    header::ACCEPT,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::HOST,
    header::RANGE,
    HeaderName::from_static("connect-protocol-version"),
    HeaderName::from_static("connect-timeout-ms"),
    HeaderName::from_static("keepalive-ping-interval"),
];
/// Headers of answers of an agent.
const FROM_AGENT: [HeaderName; 4] = [
    header::ACCEPT_RANGES,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::RETRY_AFTER,
];
/// Types of answers of an agent that the page reads; every other becomes bytes.
const AGENT_TYPES: [&str; 2] = ["application/connect+json", "application/json"];
/// Header with the token of a sandbox's agent.
const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");
/// What a page of the dashboard may load: files of its own.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                           form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
/// What a document may do that is none: nothing, in an origin of its own.
const DATA_POLICY: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";
/// Longest name of a file, in bytes.
const NAME_MAX: usize = 255;
/// Headers by which an answer acts on the whole origin, or leads away from it.
const ACTING: [HeaderName; 7] = [
    header::SET_COOKIE,
    header::LINK,
    header::REFRESH,
    header::STRICT_TRANSPORT_SECURITY,
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("service-worker-allowed"),
    HeaderName::from_static("sourcemap"),
];

/// What limits the answer of an agent.
#[derive(Debug)]
pub(crate) struct Reading {
    /// The session, whose end cuts the answer.
    pub(super) session: Arc<Session>,
    /// Name of the file that is read, if it is one.
    pub(super) file: Option<String>,
}

/// The headers with those names, with all their values.
pub(super) fn only(headers: &HeaderMap, allowed: &[HeaderName]) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for name in allowed {
        for value in headers.get_all(name) {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}

fn parts_with(parts: &request::Parts, uri: Uri, headers: HeaderMap) -> request::Parts {
    let mut made = Request::new(()).into_parts().0;
    made.method = parts.method.clone();
    made.version = parts.version;
    made.extensions = parts.extensions.clone();
    made.uri = uri;
    made.headers = headers;
    made
}

/// An address of this server below another path, with the query of a request.
fn rewritten(path: &str, uri: &Uri) -> Result<Uri, ApiError> {
    let text = match uri.query() {
        Some(query) => format!("/{path}?{query}"),
        None => format!("/{path}"),
    };
    text.parse()
        .map_err(|_| ApiError::invalid("the path of the request is malformed"))
}

/// The head of a request to the API.
pub(super) fn to_api(parts: &request::Parts, path: &str) -> Result<request::Parts, ApiError> {
    // It answers with a key that works, and makes one where there is none.
    if path == "teams" {
        return Err(ApiError::unknown_path(parts.uri.path()));
    }
    Ok(parts_with(
        parts,
        rewritten(path, &parts.uri)?,
        only(&parts.headers, &TO_API),
    ))
}

/// The head of a request to the operator API. Of that API, a browser gets what shows nodes and sandboxes and ends sandboxes: not templates, of
/// which the contents are a team's, and not backups.
pub(super) fn to_operator(parts: &request::Parts, path: &str) -> Result<request::Parts, ApiError> {
    let segments: Vec<&str> = path.split('/').collect();
    let is_allowed = match segments.as_slice() {
        ["metrics" | "nodes" | "sandboxes"] | ["sandboxes", _, "logs"] => parts.method == Method::GET,
        ["sandboxes", _] => matches!(parts.method, Method::GET | Method::DELETE),
        _ => false,
    };
    if !is_allowed {
        return Err(ApiError::unknown_path(parts.uri.path()));
    }
    Ok(parts_with(
        parts,
        rewritten(path, &parts.uri)?,
        only(&parts.headers, &TO_API),
    ))
}

/// The head of a request to an agent. `Authorization` names the user of the sandbox there.
pub(super) fn to_agent(parts: &request::Parts, path: &str) -> Result<request::Parts, ApiError> {
    let mut headers = only(&parts.headers, &TO_AGENT);
    let user = parts.headers.get(header::AUTHORIZATION);
    if let Some(user) = user.filter(|value| value.as_bytes().starts_with(b"Basic ")) {
        headers.insert(header::AUTHORIZATION, user.clone());
    }
    Ok(parts_with(parts, rewritten(path, &parts.uri)?, headers))
}

/// Adds the token that the agent of a sandbox requires.
pub(super) fn add_token(headers: &mut HeaderMap, token: &str) {
    if let Ok(mut value) = HeaderValue::try_from(token) {
        value.set_sensitive(true);
        headers.insert(ACCESS_TOKEN, value);
    }
}

/// The name under which a browser keeps the file that a request reads.
pub(super) fn file_name(uri: &Uri) -> String {
    let mut pairs = percent::query_pairs(uri.query().unwrap_or_default()).flatten();
    let path = pairs
        .find(|(key, _)| key == "path")
        .map(|(_, path)| path)
        .unwrap_or_default();
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    if name.is_empty() || name.len() > NAME_MAX {
        return "file".to_owned();
    }
    name.to_owned()
}

/// Makes the answer of an agent, or of the proxy before it, one for the page.
pub(crate) fn from_agent(response: Response, reading: &Reading) -> Response {
    let (mut parts, body) = response.into_parts();
    let sent_type = parts.headers.get(header::CONTENT_TYPE).cloned();
    parts.headers = only(&parts.headers, &FROM_AGENT);
    let is_read = reading.file.is_none() || parts.status != StatusCode::OK;
    let content_type = sent_type.filter(|sent| is_read && AGENT_TYPES.iter().any(|known| is_type(sent, known)));
    let bytes = HeaderValue::from_static("application/octet-stream");
    parts
        .headers
        .insert(header::CONTENT_TYPE, content_type.unwrap_or(bytes));
    if let Some(name) = &reading.file {
        let name = percent::encode(name);
        if let Ok(value) = HeaderValue::try_from(format!("attachment; filename*=UTF-8''{name}")) {
            parts.headers.insert(header::CONTENT_DISPOSITION, value);
        }
    }
    // To the page, it would mean that the session has ended.
    if parts.status == StatusCode::UNAUTHORIZED {
        parts.status = StatusCode::FORBIDDEN;
    }
    confine(&mut parts.headers);
    Response::from_parts(parts, Body::new(SessionBody::new(body, &reading.session)))
}

fn is_type(value: &HeaderValue, known: &str) -> bool {
    let value = value.to_str().unwrap_or_default();
    value
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .eq_ignore_ascii_case(known)
}

/// Sets what keeps an answer data.
pub(super) fn confine(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(DATA_POLICY));
    protect(headers);
}

/// Sets what every answer of the dashboard has, unless it has its own.
pub(super) fn protect(headers: &mut HeaderMap) {
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
}

/// Makes a file of a sandbox that is read by a signed link harmless: it is answered at the origin of the dashboard and of
/// the documentation, and a page in it would run as theirs.
///
/// A browser runs its viewer of PDF files in no such origin, and shows an empty page. So they are downloads here; at the
/// address of the sandbox itself, which is another origin, they are shown.
pub(crate) fn at_own_origin(headers: &mut HeaderMap) {
    let pdf = headers
        .get(header::CONTENT_TYPE)
        .filter(|sent| is_type(sent, "application/pdf"));
    if pdf.is_some() {
        let attachment = attached(headers.get(header::CONTENT_DISPOSITION));
        headers.insert(header::CONTENT_DISPOSITION, attachment);
    }
    for name in &ACTING {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// The name that a file was given, as a download.
fn attached(disposition: Option<&HeaderValue>) -> HeaderValue {
    let bare = HeaderValue::from_static("attachment");
    let given = disposition.and_then(|given| given.to_str().ok()).unwrap_or_default();
    match given.split_once(';') {
        Some((_, name)) => HeaderValue::try_from(format!("attachment;{name}")).unwrap_or(bare),
        None => bare,
    }
}

/// Removes the dashboard's cookies from a request to a sandbox.
pub(crate) fn without_cookies(headers: &mut HeaderMap) {
    let name_of = |pair: &str| guard::is_ours(pair.split('=').next().unwrap_or_default().trim());
    let has_ours = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).split(';').any(name_of);
    if !headers.get_all(header::COOKIE).iter().any(has_ours) {
        return;
    }
    let kept: Vec<HeaderValue> = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| {
            if !has_ours(value) {
                return Some(value.clone());
            }
            let pairs: Vec<&[u8]> = value
                .as_bytes()
                .split(|byte| *byte == b';')
                .filter(|pair| !name_of(&String::from_utf8_lossy(pair)))
                .map(<[u8]>::trim_ascii)
                .collect();
            HeaderValue::from_bytes(&pairs.join(&b"; "[..]))
                .ok()
                .filter(|value| !value.is_empty())
        })
        .collect();
    headers.remove(header::COOKIE);
    for value in kept {
        headers.append(header::COOKIE, value);
    }
}

/// A body that breaks off when the session ends: a terminal that is open must not outlive a sign-out.
struct SessionBody {
    body: Body,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
    expired: Pin<Box<Sleep>>,
}

/// The session ended while it read.
#[derive(Debug, thiserror::Error)]
#[error("the session has ended")]
struct SessionEnded;

impl SessionBody {
    fn new(body: Body, session: &Arc<Session>) -> Self {
        Self {
            body,
            ended: Box::pin(session.ended.clone().cancelled_owned()),
            expired: Box::pin(tokio::time::sleep_until(session.expires_at)),
        }
    }
}

impl http_body::Body for SessionBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.ended.as_mut().poll(context).is_ready() || self.expired.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(SessionEnded.into())));
        }
        Pin::new(&mut self.body).poll_frame(context).map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_the_last_part_of_the_path() {
        for (query, name) in [
            ("path=/home/user/a%20b.txt", "a b.txt"),
            ("username=root&path=%2Fetc%2Fhosts", "hosts"),
            ("path=/a/b/", "b"),
            ("path=", "file"),
            ("", "file"),
        ] {
            let uri = format!("/dashboard/agent/i/files?{query}").parse().expect("an address");
            assert_eq!(file_name(&uri), name, "{query}");
        }
        let long = format!("/files?path=/{}", "x".repeat(NAME_MAX + 1))
            .parse()
            .expect("an address");
        assert_eq!(file_name(&long), "file");
    }

    #[test]
    fn sandboxes_get_the_cookies_of_others_only() {
        let mut headers = HeaderMap::new();
        for value in [
            "a=1; __Host-ringfence-dashboard=t;b=2",
            "ringfence-dashboard-3000=t",
            "c=3",
        ] {
            headers.append(header::COOKIE, HeaderValue::from_static(value));
        }
        without_cookies(&mut headers);
        let left: Vec<_> = headers.get_all(header::COOKIE).iter().collect();
        assert_eq!(left, ["a=1; b=2", "c=3"]);
    }

    #[test]
    fn a_file_cannot_act_on_the_origin() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("set-cookie", "a=b"),
            ("clear-site-data", "*"),
            ("content-security-policy", "x"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        at_own_origin(&mut headers);
        assert_eq!(headers[header::CONTENT_SECURITY_POLICY], "sandbox");
        assert!(!headers.contains_key("set-cookie") && !headers.contains_key("clear-site-data"));
        assert!(!headers.contains_key("content-disposition"));
    }

    #[test]
    fn only_a_pdf_file_becomes_a_download_and_nothing_gets_out_of_its_box() {
        for (kind, given, expected) in [
            (
                "application/pdf",
                Some("inline; filename=a.pdf"),
                Some("attachment; filename=a.pdf"),
            ),
            ("Application/PDF ; version=1", Some("inline"), Some("attachment")),
            ("application/pdf", None, Some("attachment")),
            (
                "application/pdf",
                Some("attachment; filename=\"a;b.pdf\""),
                Some("attachment; filename=\"a;b.pdf\""),
            ),
            (
                "text/html",
                Some("inline; filename=a.pdf"),
                Some("inline; filename=a.pdf"),
            ),
            ("image/svg+xml", None, None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            if let Some(given) = given {
                headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static(given));
            }
            at_own_origin(&mut headers);
            let found = headers.get(header::CONTENT_DISPOSITION).map(HeaderValue::as_bytes);
            assert_eq!(found, expected.map(str::as_bytes), "{kind}");
            assert_eq!(headers[header::CONTENT_SECURITY_POLICY], "sandbox", "{kind}");
        }
    }
}
