//! Streams of other servers, each of which is a connection of HTTP with forwarded requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use link::{Answers, ServedFuture, Taken};
use model::id::{NodeId, SandboxId};
use protocol::node::SandboxStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::forwarding::to_others::{ANY, SANDBOXES};
use super::{End, Gateway, HEAD_BYTES, OnTracker, PING, SEND_BYTES, STREAMS, WINDOW_BYTES};

/// Longest time for the head of a forwarded request, and between two of them on a stream. The other server keeps one for less.
const HEAD_BOUND: Duration = Duration::from_secs(10);

/// Serves what other servers forward.
#[derive(Debug)]
pub(crate) struct FromOthers {
    gateway: Arc<Gateway>,
    tasks: TaskTracker,
    end: End,
}

impl FromOthers {
    /// Serves on `tasks`; requests in progress are still answered once `drain` is cancelled, and cut with `abort`.
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        tasks: TaskTracker,
        drain: CancellationToken,
        abort: CancellationToken,
    ) -> Self {
        Self {
            gateway,
            tasks,
            end: End { drain, abort },
        }
    }

    async fn serve_stream(self: Arc<Self>, stream: SandboxStream) {
        let gateway = Arc::clone(&self.gateway);
        let service = service_fn(move |request: Request<Incoming>| {
            let gateway = Arc::clone(&gateway);
            async move { Ok::<_, Infallible>(Box::pin(gateway.answer_forwarded(request)).await) }
        });
        let mut builder = auto::Builder::new(OnTracker(self.tasks.clone()));
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_BOUND)
            .preserve_header_case(true)
            // With the head, which the other server has added.
            .max_buf_size(2 * HEAD_BYTES.0);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PING.0)
            .keep_alive_timeout(PING.1)
            .initial_stream_window_size(WINDOW_BYTES.0)
            .initial_connection_window_size(WINDOW_BYTES.1)
            .max_send_buf_size(SEND_BYTES)
            .max_header_list_size(2 * HEAD_BYTES.1)
            .max_concurrent_streams(STREAMS);
        let mut connection = Box::pin(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let mut draining = false;
        loop {
            tokio::select! {
                biased;
                () = self.end.abort.cancelled() => return,
                () = self.end.drain.cancelled(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        tracing::debug!(%error, "a stream of another server failed");
                    }
                    return;
                }
            }
        }
    }
}

impl Answers for FromOthers {
    fn takes(&self, path: &str) -> Taken {
        if !self.gateway.is_ready() {
            return Taken::Busy;
        }
        if path == ANY {
            return Taken::Yes;
        }
        let id = path.strip_prefix(SANDBOXES).and_then(|id| id.parse::<SandboxId>().ok());
        match id {
            Some(id) if self.gateway.services.registry.get(&id).is_some() => Taken::Yes,
            Some(_) | None => Taken::NotHere,
        }
    }

    fn serve(self: Arc<Self>, _from: NodeId, stream: SandboxStream) -> ServedFuture {
        // It is waited for until what was answered has been sent.
        let tasks = self.tasks.clone();
        Box::pin(tasks.track_future(self.serve_stream(stream)))
    }
}
