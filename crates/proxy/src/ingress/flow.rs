//! State of one request/response exchange with a sandbox, shared by the three parties that can end it: the task that
//! drives the connection into the sandbox, the response body, and the call that waits for the head of the response.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

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
pub(super) struct Flow {
    phase: Arc<AtomicU8>,
    abort: CancellationToken,
    client: Option<ClientConnection>,
    gate: Option<CancellationToken>,
}

impl Flow {
    /// A new exchange. `client` is the connection to abort, if it serves no other streams; `gate` opens when the guest
    /// requests the body.
    pub(super) fn new(client: Option<ClientConnection>, gate: Option<CancellationToken>) -> Self {
        Self {
            phase: Arc::new(AtomicU8::new(WAITING)),
            abort: CancellationToken::new(),
            client,
            gate,
        }
    }

    /// Marks the head as sent to the client.
    pub(super) fn stream(&self) {
        self.phase.store(STREAMING, Ordering::Release);
    }

    /// Marks the response as complete. The request body may still be in transfer and can finish, unless it was never
    /// started.
    pub(super) fn finish(&self) {
        self.phase.store(FINISHED, Ordering::Release);
        if self.gate.as_ref().is_some_and(|gate| !gate.is_cancelled()) {
            self.abort.cancel();
        }
    }

    /// Aborts the client's connection if the response is incomplete.
    pub(super) fn cut(&self) {
        if self.phase.load(Ordering::Acquire) == STREAMING
            && let Some(client) = &self.client
        {
            client.cut();
        }
    }

    /// Closes the connection into the sandbox.
    pub(super) fn abort(&self) {
        self.abort.cancel();
    }

    /// A guard that closes the connection into the sandbox unless it is released.
    pub(super) fn abort_on_drop(&self) -> AbortOnDrop {
        AbortOnDrop(Some(self.abort.clone()))
    }
}

/// See [`Flow::abort_on_drop`].
#[derive(Debug)]
pub(super) struct AbortOnDrop(Option<CancellationToken>);

impl AbortOnDrop {
    pub(super) fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(abort) = &self.0 {
            abort.cancel();
        }
    }
}

/// Drives the connection into the sandbox until it is finished, the sandbox ends, or it is no longer needed. It runs
/// independently of the response body, so that a client that does not read cannot keep the socket of an ended sandbox open.
pub(super) async fn drive<C>(connection: C, flow: Flow, ending: CancellationToken, stop: CancellationToken)
where
    C: Future<Output = hyper::Result<()>>,
{
    tokio::select! {
        biased;
        () = ending.cancelled() => flow.cut(),
        () = stop.cancelled() => flow.cut(),
        () = flow.abort.cancelled() => {}
        result = connection => {
            if let Err(error) = result {
                tracing::debug!(%error, "connection into the sandbox");
            }
        }
    }
}
