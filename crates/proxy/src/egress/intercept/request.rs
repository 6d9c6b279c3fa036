//! One request of an intercepted connection: checked, matched, and forwarded.

use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use super::super::record::InjectedRequest;
use super::super::sandbox::Sandbox;
use super::body::{RequestBody, ResponseBody};
use super::decode::{Coding, describe_decoded};
use super::error::BoxError;
use super::framing;
use super::mask::{Masker, mask_headers};
use super::rules::{Applied, Facts};
use super::state::{Activity, InFlight};
use super::upstream::{Sender, Tasks};

/// The port of HTTPS, which an authority need not mention.
const HTTPS_PORT: u16 = 443;
/// The only protocol to which a connection may be upgraded. Others could carry further requests.
const WEBSOCKET: &str = "websocket";
/// The answer to requests beyond the limit.
const TOO_MANY: &str = "this sandbox sends too many requests per second to hosts of its injection rules";
/// The answers in place of those that could not be searched for secrets.
const ENCODED: &str = "the server has encoded its answer, although it was asked not to, in a way in which it cannot be searched for injected secrets";
const TOO_MANY_ENCODED: &str = "too many encoded answers at a time are searched for injected secrets";
/// Longest method and path in a log.
const METHOD_LOGGED: usize = 32;
const PATH_LOGGED: usize = 1024;
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
/// Headers that ask for a part of a text: a secret could be got in pieces. The further ones are read by web servers as the
/// first, and by an object store before it.
const RANGES: [HeaderName; 3] = [
    header::RANGE,
    HeaderName::from_static("request-range"),
    HeaderName::from_static("x-ms-range"),
];
/// Headers that ask for a text in another form: encoded message by message, as the difference to another text, in another
/// character set.
const FORMS: [HeaderName; 4] = [
    HeaderName::from_static("grpc-accept-encoding"),
    HeaderName::from_static("connect-accept-encoding"),
    HeaderName::from_static("a-im"),
    header::ACCEPT_CHARSET,
];
/// How the messages of a body are encoded.
const MESSAGE_ENCODINGS: [HeaderName; 2] = [
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("connect-content-encoding"),
];

/// An intercepted connection.
pub(super) struct Session {
    pub(super) sandbox: Arc<Sandbox>,
    /// The host of every request, in lower case.
    pub(super) host: String,
    /// The address that the program chose.
    pub(super) destination: SocketAddr,
    pub(super) sender: Sender,
    pub(super) activity: Arc<Activity>,
    pub(super) tasks: Tasks,
    /// Connections that are relayed after an upgrade.
    pub(super) upgraded: TaskTracker,
}

/// A request that is not forwarded.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    status: StatusCode,
    why: &'static str,
}

const fn refusal(status: StatusCode, why: &'static str) -> Refusal {
    Refusal { status, why }
}

/// Answers a request of the program.
///
/// # Errors
/// When the server did not answer: the connection ends then as that of the server did.
pub(super) async fn handle(
    session: Arc<Session>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, BoxError> {
    let in_flight = InFlight::new(&session.activity);
    if !session.sandbox.interceptor.admit_request() {
        session.sandbox.shared.counters.request_limited();
        let mut response = answer(&request, StatusCode::TOO_MANY_REQUESTS, TOO_MANY);
        let headers = response.headers_mut();
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return Ok(response);
    }
    if let Err(Refusal { status, why }) = check(&request, &session.host, session.destination.port()) {
        session.sandbox.shared.counters.request_refused();
        return Ok(answer(&request, status, why));
    }
    if let Sender::Failed(why) = &session.sender {
        return Ok(answer(&request, StatusCode::BAD_GATEWAY, why));
    }
    let policy = session.sandbox.policy();
    let rules = session.sandbox.interceptor.rules(&policy);
    let facts = Facts {
        host: &session.host,
        port: session.destination.port(),
        path: request.uri().path(),
        query: request.uri().query(),
        headers: request.headers(),
    };
    let applied = rules.choose(&facts);
    let record = applied
        .as_ref()
        .map(|applied| Box::new(session.record(applied, &request)));
    let forwarded = forward(&session, request, applied, in_flight).await;
    if let Some(mut record) = record {
        record.status = forwarded.as_ref().ok().map(|response| response.status().as_u16());
        session.sandbox.report_request(record);
    }
    Ok(forwarded?)
}

impl Session {
    fn record(&self, applied: &Applied, request: &Request<Incoming>) -> InjectedRequest {
        InjectedRequest {
            rule: applied.name().to_owned(),
            host: self.host.clone(),
            port: self.destination.port(),
            method: request.method().as_str().chars().take(METHOD_LOGGED).collect(),
            // Without the query, which may have secrets of the sandbox.
            path: request.uri().path().chars().take(PATH_LOGGED).collect(),
            status: None,
        }
    }
}

/// Whether a request is for the host of its connection, in a form that is forwarded.
fn check<B>(request: &Request<B>, host: &str, port: u16) -> Result<(), Refusal> {
    let uri = request.uri();
    if request.method() == Method::CONNECT {
        return Err(refusal(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not forwarded"));
    }
    let is_whole = *request.method() == Method::OPTIONS && uri.path() == "*";
    if !is_whole && !uri.path().starts_with('/') {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            "the target of the request is not a path",
        ));
    }
    if uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTPS) {
        return Err(refusal(StatusCode::MISDIRECTED_REQUEST, "the request is not for https"));
    }
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (host_header, further) = (hosts.next(), hosts.next());
    if further.is_some() {
        return Err(refusal(StatusCode::BAD_REQUEST, "the request has several Host headers"));
    }
    let authority = uri.authority().map(|authority| authority.as_str().as_bytes());
    let named = [authority, host_header.map(HeaderValue::as_bytes)];
    if named == [None, None] {
        return Err(refusal(StatusCode::BAD_REQUEST, "the request has no host"));
    }
    if named
        .into_iter()
        .flatten()
        .all(|authority| is_for(authority, host, port))
    {
        return Ok(());
    }
    let why = "the host of the request is not that of the connection";
    Err(refusal(StatusCode::MISDIRECTED_REQUEST, why))
}

/// Whether an authority is this host and port, in the plainest form.
fn is_for(authority: &[u8], host: &str, port: u16) -> bool {
    let (name, named) = match authority.iter().position(|byte| *byte == b':') {
        Some(colon) => (&authority[..colon], Some(&authority[colon + 1..])),
        None => (authority, None),
    };
    let is_port = match named {
        None => port == HTTPS_PORT,
        Some(digits) => digits == port.to_string().as_bytes(),
    };
    is_port && name.eq_ignore_ascii_case(host.as_bytes())
}

/// Sends a request to the server, and makes the response that the program gets.
async fn forward(
    session: &Arc<Session>,
    mut request: Request<Incoming>,
    applied: Option<Applied>,
    in_flight: InFlight,
) -> hyper::Result<Response<ResponseBody>> {
    let is_http2 = matches!(session.sender, Sender::Http2(_));
    let upgrade = (!is_http2 && is_websocket(&request)).then(|| hyper::upgrade::on(&mut request));
    // What follows such a request is not checked, see `framing`, so it must not be another one.
    let mut upgrades = request.headers().get_all(header::UPGRADE).iter();
    let is_last = !is_http2 && upgrades.any(|value| framing::is_websocket(value.as_bytes()));
    let is_head = *request.method() == Method::HEAD;
    let (mut parts, body) = request.into_parts();
    parts.uri = target(&parts.uri, &session.host, session.destination.port(), is_http2);
    parts.version = if is_http2 { Version::HTTP_2 } else { Version::HTTP_11 };
    clean(&mut parts.headers);
    if is_http2 {
        parts.headers.remove(header::HOST);
    }
    if upgrade.is_some() {
        parts
            .headers
            .insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        parts
            .headers
            .insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
    }
    let body_limit = session.sandbox.shared.settings.mask_bytes;
    let masker = applied.as_ref().map(|applied| Arc::clone(applied.masker()));
    let masker = masker.filter(|masker| !masker.is_empty());
    if let Some(applied) = &applied {
        applied.set(&mut parts.headers);
        if masker.is_some() && body_limit > 0 {
            ask_for_searchable(&mut parts.headers, body_limit);
        }
    }
    let waits = !is_http2 && expects_continue(&parts.headers);
    let mut body = RequestBody::new(body, applied, session.sandbox.interceptor.requests_held());
    let wanted = waits.then(|| {
        let (wants, wanted) = oneshot::channel();
        body.wait(wanted);
        wants
    });
    let mut request = Request::from_parts(parts, body);
    if let Some(wants) = wanted {
        let wants = Mutex::new(Some(wants));
        hyper::ext::on_informational(&mut request, move |response| {
            if response.status() == StatusCode::CONTINUE {
                wants.lock().take().and_then(|wants| wants.send(()).ok());
            }
        });
    }
    let mut response = session.sender.send(request).await?;
    let held = session.sandbox.interceptor.responses_held();
    if let Some(masker) = &masker {
        mask_head(&mut response, masker);
    }
    if let Some(program) = upgrade.filter(|_| response.status() == StatusCode::SWITCHING_PROTOCOLS) {
        relay_upgraded(session, program, hyper::upgrade::on(&mut response));
        return Ok(response.map(|body| ResponseBody::upstream(body, held, in_flight)));
    }
    let (mut parts, body) = response.into_parts();
    let closes = lists(&parts.headers, &header::CONNECTION, "close");
    let is_transfer_encoded = elements(&parts.headers, &header::TRANSFER_ENCODING)
        .any(|coding| !coding.eq_ignore_ascii_case("chunked") && !coding.eq_ignore_ascii_case("identity"));
    clean(&mut parts.headers);
    // It would lead to connections over UDP, which get no headers.
    parts.headers.remove(header::ALT_SVC);
    if (closes || is_last) && !is_http2 {
        parts
            .headers
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let has_body = !is_head
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&parts.status)
        && !body.is_end_stream();
    let mut body = ResponseBody::upstream(body, held, in_flight);
    if let Some(masker) = masker {
        if body_limit > 0 {
            let decoded = match searchable(&parts, has_body && is_transfer_encoded) {
                Ok(Coding::Plain) => Ok(()),
                Ok(_) if !has_body => {
                    describe_decoded(&mut parts.headers);
                    Ok(())
                }
                Ok(coding) => {
                    let permit = session.sandbox.interceptor.admit_decoder();
                    let permit = permit.ok_or(refusal(StatusCode::SERVICE_UNAVAILABLE, TOO_MANY_ENCODED));
                    permit.map(|permit| {
                        describe_decoded(&mut parts.headers);
                        body.decode(coding == Coding::Gzip, permit);
                    })
                }
                Err(_) if !has_body => Ok(()),
                Err(refusal) => Err(refusal),
            };
            if let Err(Refusal { status, why }) = decoded {
                let mut response = text_answer(status, why);
                if !is_http2 {
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(header::CONNECTION, close);
                }
                return Ok(response);
            }
        }
        body.mask(masker, body_limit);
    }
    Ok(Response::from_parts(parts, body))
}

/// Changes a request so that the answer is a whole text without a coding: only such an answer can be searched for
/// secrets.
fn ask_for_searchable(headers: &mut HeaderMap, searched: u64) {
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in FORMS {
        headers.remove(name);
    }
    let mut is_partial = false;
    for name in RANGES {
        if headers.contains_key(&name) && !is_beyond(headers, &name, searched) {
            is_partial = true;
        }
    }
    if is_partial {
        for name in RANGES.into_iter().chain([header::IF_RANGE]) {
            headers.remove(name);
        }
    }
}

/// Whether a range begins where the whole text is not searched any more, so that it shows nothing which that would hide.
fn is_beyond(headers: &HeaderMap, name: &HeaderName, searched: u64) -> bool {
    let mut values = headers.get_all(name).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return false;
    };
    let range = value.to_str().ok().and_then(|value| value.strip_prefix("bytes="));
    let Some((first, last)) = range.and_then(|range| range.split_once('-')) else {
        return false;
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let first = is_number(first).then(|| first.parse::<u64>().ok()).flatten();
    (last.is_empty() || is_number(last)) && first.is_some_and(|first| first >= searched)
}

/// How a body has to be decoded to be searched.
///
/// # Errors
/// When it cannot be searched.
fn searchable(parts: &http::response::Parts, is_transfer_encoded: bool) -> Result<Coding, Refusal> {
    let coding = Coding::of(&parts.headers);
    let has_encoded_messages = MESSAGE_ENCODINGS.iter().any(|name| {
        let mut values = parts.headers.get_all(name).iter();
        values.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
    });
    // A part of an encoded text cannot be decoded.
    let is_encoded_part = parts.status == StatusCode::PARTIAL_CONTENT && coding != Coding::Plain;
    let is_difference = parts.status == StatusCode::IM_USED;
    if coding == Coding::Unknown || is_transfer_encoded || has_encoded_messages || is_encoded_part || is_difference {
        return Err(refusal(StatusCode::BAD_GATEWAY, ENCODED));
    }
    Ok(coding)
}

/// Relays what follows an upgrade, in both directions.
fn relay_upgraded(session: &Arc<Session>, program: hyper::upgrade::OnUpgrade, server: hyper::upgrade::OnUpgrade) {
    let upgraded = session.upgraded.token();
    session.tasks.run(async move {
        let relayed = async {
            let (program, server) = tokio::try_join!(program, server)?;
            let (mut program, mut server) = (TokioIo::new(program), TokioIo::new(server));
            let bytes = copy_bidirectional(&mut program, &mut server).await?;
            Ok::<_, BoxError>(bytes)
        };
        let relayed = relayed.await;
        tracing::trace!(?relayed, "upgraded connection to an intercepted host");
        drop(upgraded);
    });
}

/// The target of the forwarded request: with the host for HTTP/2, and otherwise without.
fn target(uri: &Uri, host: &str, port: u16, is_http2: bool) -> Uri {
    let path = uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    if !is_http2 {
        return Uri::from(path);
    }
    let authority = match port {
        HTTPS_PORT => Authority::try_from(host),
        port => Authority::try_from(format!("{host}:{port}")),
    };
    let whole = authority.ok().and_then(|authority| {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTPS);
        parts.authority = Some(authority);
        parts.path_and_query = Some(path.clone());
        Uri::from_parts(parts).ok()
    });
    whole.unwrap_or_else(|| Uri::from(path))
}

/// Removes headers that are about one connection: both sides have their own.
fn clean(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = elements(headers, &header::CONNECTION)
        .filter_map(|element| HeaderName::from_bytes(element.as_bytes()).ok())
        // A client cannot have these removed.
        .filter(|name| ![header::HOST, header::CONTENT_LENGTH, header::TE].contains(name))
        .collect();
    let takes_trailers = lists(headers, &header::TE, "trailers");
    for name in listed {
        headers.remove(name);
    }
    for name in [
        header::CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
    ] {
        headers.remove(name);
    }
    if takes_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// The elements of a header that is a list.
fn elements<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn lists(headers: &HeaderMap, name: &HeaderName, element: &str) -> bool {
    elements(headers, name).any(|listed| listed.eq_ignore_ascii_case(element))
}

fn is_websocket<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    let mut protocols = elements(headers, &header::UPGRADE);
    request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && lists(headers, &header::CONNECTION, "upgrade")
        && protocols
            .next()
            .is_some_and(|protocol| protocol.eq_ignore_ascii_case(WEBSOCKET))
        && protocols.next().is_none()
}

fn expects_continue(headers: &HeaderMap) -> bool {
    let expected = headers.get(header::EXPECT);
    expected.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Hides secrets in the head of a response.
fn mask_head(response: &mut Response<Incoming>, masker: &Masker) {
    // The words after the status, which nothing depends on: programs get those of the standard.
    response.extensions_mut().remove::<hyper::ext::ReasonPhrase>();
    mask_headers(response.headers_mut(), masker);
}

/// An answer of the gateway, after which the connection is closed.
fn answer<B>(request: &Request<B>, status: StatusCode, text: &str) -> Response<ResponseBody> {
    let mut response = text_answer(status, text);
    if request.version() < Version::HTTP_2 {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

fn text_answer(status: StatusCode, text: &str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::text(format!("{text}\n")));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_for_the_host_of_their_connection() {
        let check = |method: &str, target: &str, hosts: &[&str], port: u16| {
            let mut request = Request::builder().method(method).uri(target);
            for host in hosts {
                request = request.header("host", *host);
            }
            check(&request.body(()).unwrap(), "a.example", port).map_err(|refusal| refusal.status.as_u16())
        };
        for (method, target, hosts, port, want) in [
            ("GET", "/", &["a.example"][..], 443, Ok(())),
            ("GET", "/", &["A.Example:443"], 443, Ok(())),
            ("GET", "/", &["a.example:8443"], 8443, Ok(())),
            ("OPTIONS", "*", &["a.example"], 443, Ok(())),
            ("GET", "https://a.example/", &["a.example"], 443, Ok(())),
            ("GET", "https://a.example/", &[], 443, Ok(())),
            ("GET", "https://a.example/", &["b.example"], 443, Err(421)),
            ("GET", "https://b.example/", &["a.example"], 443, Err(421)),
            ("GET", "http://a.example/", &["a.example"], 443, Err(421)),
            ("GET", "https://x@a.example/", &["a.example"], 443, Err(421)),
            ("GET", "/", &[], 443, Err(400)),
            ("GET", "/", &["a.example", "a.example"], 443, Err(400)),
            ("GET", "/", &["a.example", "b.example"], 443, Err(400)),
            ("GET", "/", &["b.example"], 443, Err(421)),
            ("GET", "/", &["a.example."], 443, Err(421)),
            ("GET", "/", &["a.example:80"], 443, Err(421)),
            ("GET", "/", &["a.example:0443"], 443, Err(421)),
            ("GET", "/", &["a.example:"], 443, Err(421)),
            ("GET", "/", &["a.example"], 8443, Err(421)),
            ("GET", "/", &["a.example@b.example"], 443, Err(421)),
            ("GET", "/", &["a.example, b.example"], 443, Err(421)),
            ("GET", "/", &[""], 443, Err(421)),
            ("GET", "/", &["a.example/b"], 443, Err(421)),
            ("CONNECT", "a.example:443", &["a.example"], 443, Err(405)),
            ("CONNECT", "b.example:443", &["a.example"], 443, Err(405)),
            ("GET", "*", &["a.example"], 443, Err(400)),
        ] {
            assert_eq!(
                check(method, target, hosts, port),
                want,
                "{method} {target} {hosts:?} {port}"
            );
        }
    }

    #[test]
    fn headers_about_the_connection_are_removed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "x-a, Upgrade"),
            ("connection", "host, content-length , bad name,te"),
            ("x-a", "1"),
            ("x-b", "1"),
            ("host", "a.example"),
            ("content-length", "3"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "gzip, trailers"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        clean(&mut headers);
        let mut left: Vec<_> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {value:?}"))
            .collect();
        left.sort_unstable();
        let want = [
            "content-length: \"3\"",
            "host: \"a.example\"",
            "te: \"trailers\"",
            "x-b: \"1\"",
        ];
        assert_eq!(left, want);
    }

    #[test]
    fn only_websocket_is_an_upgrade() {
        for (connection, upgrade, want) in [
            ("Upgrade", "websocket", true),
            ("keep-alive, upgrade", "WebSocket", true),
            ("Upgrade", "h2c", false),
            ("Upgrade", "websocket, h2c", false),
            ("Upgrade", "TLS/1.0", false),
            ("close", "websocket", false),
        ] {
            let request = Request::builder()
                .header("connection", connection)
                .header("upgrade", upgrade);
            let request = request.body(()).unwrap();
            assert_eq!(is_websocket(&request), want, "{connection} {upgrade}");
        }
    }
}
