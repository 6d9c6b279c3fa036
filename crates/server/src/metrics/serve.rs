//! `GET /metrics`, on an address of its own.
//!
//! Whoever reaches the address may read: there is nothing secret in it, and it is the operator's choice who does. What
//! clients of the API can do to it is nothing, because they cannot reach it through the API's port.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Moment;
use crate::lifecycle::Platform;

/// What the text is, as scrapers ask for it.
const CONTENT_TYPE: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
/// Connections at once; more wait. A scraper needs one.
const CONNECTIONS: usize = 16;
/// How long a connection may be silent: longer than any usual time between two scrapes.
const IDLE: Duration = Duration::from_secs(120);
/// Pause after the system refused a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `stop`. `streams` runs the connections to sandboxes, which are counted.
pub(crate) async fn serve(
    listener: TcpListener,
    platform: Arc<Platform>,
    streams: TaskTracker,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (permit, listener.accept().await)
            } => accepted,
        };
        let (permit, tcp) = match accepted {
            (Ok(permit), Ok((tcp, _))) => (permit, tcp),
            (_, Err(error)) => {
                tracing::warn!(%error, "accept a connection for metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
            (Err(_closed), _) => return,
        };
        let (platform, streams, stop) = (Arc::clone(&platform), streams.clone(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = serve_connection(tcp, platform, streams) => {}
            }
            drop(permit);
        });
    }
}

async fn serve_connection(tcp: TcpStream, platform: Arc<Platform>, streams: TaskTracker) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (platform, streams) = (Arc::clone(&platform), streams.clone());
        async move { Ok::<_, Infallible>(answer(&request, &platform, &streams).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(tcp), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "connection for metrics");
    }
}

async fn answer(request: &Request<Incoming>, platform: &Platform, streams: &TaskTracker) -> Response<Full<Bytes>> {
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "metrics are at /metrics");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are read with GET");
    }
    let moment = Moment {
        sandboxes: platform.live.count_by_state(),
        connections: streams.len(),
        log_entries_lost: platform.records.entries_lost(),
        room: platform
            .capacity
            .room(&*platform.node.0, &platform.settings.clock)
            .await,
    };
    match platform.metrics.text(&moment) {
        Ok(text) => {
            let mut response = Response::new(Full::from(text));
            response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
            response
        }
        Err(error) => {
            tracing::error!(%error, "write metrics");
            plain(StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written")
        }
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
}
