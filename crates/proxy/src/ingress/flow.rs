//! One exchange with a sandbox, as seen by the three parties that can end it: the task that drives the connection
//! into the sandbox, the response's body, and the call that waits for the response's head.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;
use super::dial;

/// No head yet: the client can still be told what went wrong.
const WAITING: u8 = 0;
/// The head is out: all that is left is to cut.
const STREAMING: u8 = 1;
/// The response is complete; the client's connection may already serve another request.
const FINISHED: u8 = 2;

/// Shared state of one exchange.
#[derive(Debug, Clone)]
pub(super) struct Flow {
    phase: Arc<AtomicU8>,
    abort: CancellationToken,
    client: Option<ClientConnection>,
    gate: Option<CancellationToken>,
}

impl Flow {
    /// A new exchange. `client` is what to cut, where a cut takes nothing else with it; `gate` opens when the guest
    /// asks for the request's body.
    pub(super) fn new(client: Option<ClientConnection>, gate: Option<CancellationToken>) -> Self {
        Self {
            phase: Arc::new(AtomicU8::new(WAITING)),
            abort: CancellationToken::new(),
            client,
            gate,
        }
    }

    /// The head is on its way to the client.
    pub(super) fn stream(&self) {
        self.phase.store(STREAMING, Ordering::Release);
    }

    /// The response is complete. The request's body may still be on its way in, and may end by itself, unless it
    /// never began: then nothing will.
    pub(super) fn finish(&self) {
        self.phase.store(FINISHED, Ordering::Release);
        if self.gate.as_ref().is_some_and(|gate| !gate.is_cancelled()) {
            self.abort.cancel();
        }
    }

    /// Cuts the client off if it is in the middle of the response.
    pub(super) fn cut(&self) {
        if self.phase.load(Ordering::Acquire) == STREAMING
            && let Some(client) = &self.client
        {
            client.cut();
        }
    }

    /// Ends the connection into the sandbox.
    pub(super) fn abort(&self) {
        self.abort.cancel();
    }

    /// A guard that ends the connection into the sandbox unless it is released.
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

/// Drives the connection into the sandbox until it is done, the sandbox ends, or nobody wants it any more. It runs
/// apart from the response's body, so that a client that does not read cannot hold a dead sandbox's socket.
pub(super) async fn drive<C>(connection: C, flow: Flow, mut ending: watch::Receiver<bool>, stop: CancellationToken)
where
    C: Future<Output = hyper::Result<()>>,
{
    tokio::select! {
        biased;
        () = dial::ended(&mut ending) => flow.cut(),
        () = stop.cancelled() => flow.cut(),
        () = flow.abort.cancelled() => {}
        result = connection => {
            if let Err(error) = result {
                tracing::debug!(%error, "connection into the sandbox");
            }
        }
    }
}
