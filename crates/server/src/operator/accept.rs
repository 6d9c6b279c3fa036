//! The accept loop of the operator's listeners: few concurrent connections, each open until the server stops.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Maximum number of concurrent connections; further ones wait. A scraper needs one, and so does a command.
const CONNECTIONS: usize = 16;
/// Pause after `accept` failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A source of connections.
pub(super) trait Listener: Send + Sync + 'static {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Waits for the next connection; `None` if it was refused.
    fn next(&self) -> impl Future<Output = io::Result<Option<Self::Stream>>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<Option<TcpStream>> {
        self.accept().await.map(|(stream, _)| Some(stream))
    }
}

/// Serves until `stop` is cancelled. A request head must arrive within `head_timeout`.
pub(super) async fn serve(
    listener: impl Listener,
    router: Router,
    head_timeout: Duration,
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
                (permit, listener.next().await)
            } => accepted,
        };
        let (permit, stream) = match accepted {
            (Ok(permit), Ok(Some(stream))) => (permit, stream),
            (_, Ok(None)) => continue,
            (_, Err(error)) => {
                tracing::warn!(%error, "cannot accept a connection of the operator");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
            (Err(_closed), _) => return,
        };
        let (router, stop) = (router.clone(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = serve_connection(stream, router, head_timeout) => {}
            }
            drop(permit);
        });
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    head_timeout: Duration,
) {
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        // A connection that becomes a stream is none any more.
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "connection of the operator failed");
    }
}
