//! Rate limit headers of responses.
//!
//! The rate limit is known only after authentication, inside a handler, and responses are created in many places. So
//! the extractor stores the level in a slot of the request, and a layer around all handlers adds it to the response.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;

use crate::admission::rate::Level;

const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

/// Passes the level of the rate limit from a request to its response.
#[derive(Debug, Clone, Default)]
pub(super) struct RateSlot(Arc<Mutex<Option<Level>>>);

impl RateSlot {
    /// Stores a level; the last one counts, which is that of the narrower limit.
    pub(super) fn set(&self, level: Level) {
        *self.0.lock() = Some(level);
    }
}

/// A layer that adds the headers.
pub(super) async fn add_rate_headers(mut request: Request, next: Next) -> Response {
    let slot = RateSlot::default();
    request.extensions_mut().insert(slot.clone());
    let mut response = next.run(request).await;
    let level = *slot.0.lock();
    if let Some(level) = level {
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
