//! How often a team may still ask, in the headers of every answer to it.
//!
//! The rate is known where the team is, deep inside a handler, and an answer is made in many places, so the one leaves
//! it in a slot of the request and a layer around all handlers picks it up.

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

/// Where the rate of a request is left for its answer.
#[derive(Debug, Clone, Default)]
pub(super) struct RateSlot(Arc<Mutex<Option<Level>>>);

impl RateSlot {
    /// Leaves a rate; the last one counts, which is that of the narrower limit.
    pub(super) fn set(&self, level: Level) {
        *self.0.lock() = Some(level);
    }
}

/// The layer.
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
