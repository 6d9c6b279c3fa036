//! Helpers for HTTP: bodies, plain answers, query strings, cross-origin headers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use formats::percent;
use futures_util::Stream;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use serde::Serialize;

/// The body of an answer. It need not be `Send`: everything but file access runs on one thread.
pub(crate) enum Body {
    Empty,
    Full(Bytes),
    /// A body of `length` bytes, if the length is known. An error cuts the connection, so that no client takes a part
    /// for the whole.
    Stream {
        stream: Pin<Box<dyn Stream<Item = io::Result<Bytes>>>>,
        length: Option<u64>,
    },
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Empty => Poll::Ready(None),
            Self::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Self::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Self::Stream { stream, .. } => stream.as_mut().poll_next(ctx).map_ok(Frame::data),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Empty)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Stream {
                length: Some(length), ..
            } => SizeHint::with_exact(*length),
            Self::Stream { length: None, .. } => SizeHint::default(),
        }
    }
}

/// The answer to `HEAD`, made of the answer to `GET`: with the length of its body, if it is known, and without the
/// body.
pub(crate) fn head_of(response: Response<Body>) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    let has_length = !matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if let Some(length) = http_body::Body::size_hint(&body).exact().filter(|_| has_length) {
        head.headers.insert(header::CONTENT_LENGTH, length.into());
    }
    Response::from_parts(head, Body::Empty)
}

/// Reads the rest of a request that is answered before its end. A connection that is closed on a client which is still
/// sending is reset, and the answer with it, so the client gets to send for a while.
pub(crate) async fn read_on(mut body: hyper::body::Incoming) {
    /// What a client may still send: more than a disk of the usual size could have taken before it was full.
    const BYTES: u64 = 1 << 30;
    /// How long the rest may take.
    const TIME: std::time::Duration = std::time::Duration::from_secs(30);
    let mut left = BYTES;
    let read = async {
        while left > 0
            && let Some(Ok(frame)) = body.frame().await
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
        }
    };
    let _ = tokio::time::timeout(TIME, read).await;
}

/// An answer with a body of this type.
pub(crate) fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::Full(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// 204, not to be cached.
pub(crate) fn no_content() -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A plain-text answer.
pub(crate) fn text(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = response(status, "text/plain; charset=utf-8", format!("{message}\n"));
    response
        .headers_mut()
        .insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    // Values are plain data with string keys, which always serialize.
    response(
        status,
        "application/json",
        serde_json::to_vec(value).unwrap_or_default(),
    )
}

/// The error body of every answer that is not an RPC, and of failed authentication even there.
pub(crate) fn error(status: StatusCode, message: &str) -> Response<Body> {
    #[derive(Serialize)]
    struct ErrorBody<'a> {
        code: u16,
        message: &'a str,
    }
    let mut body = serde_json::to_vec(&ErrorBody {
        code: status.as_u16(),
        message,
    })
    .unwrap_or_default();
    body.push(b'\n');
    let mut response = response(status, "application/json; charset=utf-8", body);
    response
        .headers_mut()
        .insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The text of a header, if the request has it.
pub(crate) fn header_text(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Name and value pairs of a query string; pairs that are not UTF-8 after decoding are left out.
#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub(crate) fn parse(query: Option<&str>) -> Self {
        Self(percent::query_pairs(query.unwrap_or_default()).flatten().collect())
    }

    /// The first value with this name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, value)| value.as_str())
    }
}

const METHODS: &str = "HEAD, GET, POST, PUT, PATCH, DELETE";
/// What scripts may read besides the simple headers: those of gRPC, and ours.
const EXPOSED: &str =
    "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Location, Cache-Control, X-Content-Type-Options";

/// The answer to a CORS preflight request of a browser, if `request` is one.
pub(crate) fn preflight<B>(request: &Request<B>) -> Option<Response<Body>> {
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
    if request.method() != Method::OPTIONS {
        return None;
    }
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    set(
        headers,
        header::VARY,
        "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
    );
    if asked
        .to_str()
        .is_ok_and(|asked| METHODS.split(", ").any(|method| method == asked))
    {
        set(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN, "*");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, asked.clone());
        // A bare `*` would not cover Authorization, so what is asked for is named.
        if let Some(names) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        set(headers, header::ACCESS_CONTROL_MAX_AGE, "7200");
    }
    Some(response)
}

/// Lets scripts of any origin read an answer. The token, not the origin, says who may call.
pub(crate) fn allow_any_origin(headers: &mut HeaderMap) {
    set(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN, "*");
    set(headers, header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: &'static str) {
    headers.insert(name, HeaderValue::from_static(value));
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let query = Query::parse(Some(
            "path=%2Ftmp%2Fa+b&empty=&flag&sig=v1_%2B%2F&bad=%zz&path=second&u=%ff&&x=%4",
        ));
        assert_eq!(query.get("path"), Some("/tmp/a b"));
        assert_eq!(query.get("empty"), Some(""));
        assert_eq!(query.get("flag"), Some(""));
        assert_eq!(query.get("sig"), Some("v1_+/"));
        for absent in ["bad", "u", "x", "none"] {
            assert_eq!(query.get(absent), None, "{absent}");
        }
        assert_eq!(Query::parse(None).get("path"), None);
    }
}
