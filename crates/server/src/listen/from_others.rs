//! Streams of other servers, each of which is a connection of HTTP with forwarded requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use link::{Answers, ServedFuture, Taken};
use model::id::{NodeId, SandboxId};
use protocol::node::SandboxStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::forwarding::to_others::{ANY, SANDBOXES};
use super::{End, Gateway, HEAD_BYTES, http};

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
        // With the head, which the other server has added.
        let head_bytes = (2 * HEAD_BYTES.0, 2 * HEAD_BYTES.1);
        let builder = http(self.tasks.clone(), Some(HEAD_BOUND), head_bytes);
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
