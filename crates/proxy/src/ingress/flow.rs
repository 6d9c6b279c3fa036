//! State of one request/response exchange with a sandbox, shared by the parties that can end it: the task that drives the
//! connection into the sandbox, the response body, and the call that waits for the head of the response.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;

/// No head yet: an error response is still possible.
const WAITING: u8 = 0;
/// The head was sent: the response can only be aborted.
const STREAMING: u8 = 1;
/// The response is complete; the client's connection may already serve another request.
const FINISHED: u8 = 2;

/// Shared state of an exchange.
#[derive(Debug, Clone)]
pub(super) struct Flow(Arc<State>);

#[derive(Debug)]
struct State {
    phase: AtomicU8,
    client: Option<ClientConnection>,
    gate: Option<CancellationToken>,
}

impl Flow {
    /// A new exchange. `client` is the connection to abort, if it serves no other streams; `gate` opens when the guest
    /// requests the body.
    pub(super) fn new(client: Option<ClientConnection>, gate: Option<CancellationToken>) -> Self {
        Self(Arc::new(State {
            phase: AtomicU8::new(WAITING),
            client,
            gate,
        }))
    }

    /// Opens the gate: the guest has requested the body.
    pub(super) fn open_gate(&self) {
        if let Some(gate) = &self.0.gate {
            gate.cancel();
        }
    }

    /// Marks the head as sent to the client.
    pub(super) fn stream(&self) {
        self.0.phase.store(STREAMING, Ordering::Release);
    }

    /// Marks the response as complete. The request body may still be in transfer and can finish, unless it was never
    /// started: then the result is `false`.
    pub(super) fn finish(&self) -> bool {
        self.0.phase.store(FINISHED, Ordering::Release);
        self.0.gate.as_ref().is_none_or(CancellationToken::is_cancelled)
    }

    /// Aborts the client's connection if the response is incomplete.
    pub(super) fn cut(&self) {
        if self.0.phase.load(Ordering::Acquire) == STREAMING
            && let Some(client) = &self.0.client
        {
            client.cut();
        }
    }
}

/// What a connection into a sandbox shares with its users.
#[derive(Debug, Default)]
pub(super) struct Link {
    abort: CancellationToken,
    /// The exchange in progress; none while the connection is idle.
    flow: Mutex<Option<Flow>>,
}

impl Link {
    /// Sets the current exchange; none between two.
    pub(super) fn set_flow(&self, flow: Option<Flow>) {
        *self.flow.lock() = flow;
    }

    /// Closes the connection.
    pub(super) fn abort(&self) {
        self.abort.cancel();
    }

    fn cut(&self) {
        if let Some(flow) = &*self.flow.lock() {
            flow.cut();
        }
    }
}

/// Drives a connection into the sandbox until it is finished, the sandbox ends, or it is no longer needed. It runs
/// independently of the response body, so that a client that does not read cannot keep the socket of an ended sandbox open.
pub(super) async fn drive<C>(connection: C, link: Arc<Link>, ending: CancellationToken, stop: CancellationToken)
where
    C: Future<Output = hyper::Result<()>>,
{
    tokio::select! {
        biased;
        () = ending.cancelled() => link.cut(),
        () = stop.cancelled() => link.cut(),
        () = link.abort.cancelled() => {}
        result = connection => {
            if let Err(error) = result {
                tracing::debug!(%error, "connection into the sandbox");
            }
        }
    }
}
