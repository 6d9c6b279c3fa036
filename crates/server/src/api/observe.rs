//! Metrics and spans of API requests, by operation and never by path.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::Method;
use serde_json::Value;

use crate::metrics::Metrics;
use crate::telemetry::{OTHER_METHOD, Telemetry};

/// Marks a response to a request that failed because of the database.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoreFailed;

/// State of the layer.
#[derive(Debug, Clone)]
pub(super) struct Observer {
    pub(super) metrics: Arc<Metrics>,
    pub(super) operations: Operations,
    /// What records spans, if that is on.
    pub(super) telemetry: Option<Arc<Telemetry>>,
}

/// A layer that counts requests, measures their duration and records their spans.
pub(super) async fn observe(State(observer): State<Observer>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().cloned();
    let span = observer.telemetry.as_ref().and_then(|telemetry| {
        let span = telemetry.begin(&request, http_method(&method))?;
        request.extensions_mut().insert(span.team());
        Some(span)
    });
    let response = next.run(request).await;
    let operation = path.and_then(|path| observer.operations.id(&method, path.as_str()).cloned());
    let metrics = &observer.metrics;
    metrics.request(
        operation.as_ref(),
        known_method(&method),
        response.status().as_u16(),
        begun.elapsed(),
    );
    if response.extensions().get::<StoreFailed>().is_some() {
        metrics.store_error();
    }
    if let Some(span) = span {
        span.finish(&response, operation);
    }
    response
}

/// The ids of the operations of a document, by method and route path.
#[derive(Debug, Clone, Default)]
pub(super) struct Operations(Arc<HashMap<(Method, String), Arc<str>>>);

impl Operations {
    /// Reads an `OpenAPI` document.
    pub(super) fn of(document: &Value) -> Self {
        let paths = document["paths"].as_object();
        let operations = paths.into_iter().flatten().flat_map(|(path, item)| {
            let item = item.as_object();
            item.into_iter().flatten().filter_map(move |(method, operation)| {
                let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).ok()?;
                Some(((method, path.clone()), operation["operationId"].as_str()?.into()))
            })
        });
        Self(Arc::new(operations.collect()))
    }

    /// The id of an operation.
    pub(super) fn id(&self, method: &Method, path: &str) -> Option<&Arc<str>> {
        self.0.get(&(method.clone(), path.to_owned()))
    }
}

/// A label value for a method: its name, or `other` for unknown ones.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// The method of a span, by the conventions for spans.
fn http_method(method: &Method) -> &'static str {
    match known_method(method) {
        "other" => OTHER_METHOD,
        known => known,
    }
}
