//! Counts every request to the API, by its operation and never by its path.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::lifecycle::Platform;
use crate::metrics::Operations;

/// Marks an answer that the database is to blame for.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoreFailed;

/// What the layer needs.
#[derive(Debug, Clone)]
pub(super) struct Observer {
    pub(super) platform: Arc<Platform>,
    pub(super) operations: Operations,
}

/// The layer.
pub(super) async fn observe(State(observer): State<Observer>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let operation = path.and_then(|path| observer.operations.id(&method, path.as_str()).cloned());
    let metrics = &observer.platform.metrics;
    metrics.request(operation.as_ref(), &method, response.status(), begun.elapsed());
    if response.extensions().get::<StoreFailed>().is_some() {
        metrics.store_error();
    }
    response
}
