//! Rate limit headers of responses.
//!
//! The rate limit is known only after authentication, inside a handler, and responses are created in many places. So
//! the extractor stores the level in a slot of the request, and a layer around all handlers adds it to the response.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::admission::rate::{Level, RateSlot};

const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

/// A layer that adds the headers.
pub(super) async fn add_rate_headers(mut request: Request, next: Next) -> Response {
    let slot = RateSlot::default();
    request.extensions_mut().insert(slot.clone());
    let mut response = next.run(request).await;
    if let Some(level) = slot.level() {
        write(level, response.headers_mut());
    }
    response
}

fn write(level: Level, headers: &mut HeaderMap) {
    for (name, value) in [
        (LIMIT, level.limit),
        (REMAINING, level.remaining),
        (RESET, level.full_in_s),
    ] {
        headers.insert(name, HeaderValue::from(value));
    }
}
