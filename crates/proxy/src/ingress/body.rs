//! Bodies on their way through: the request's, which may have to wait for `100 Continue`, and the response's, which
//! must not end cleanly when its sandbox ended.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::dial::{self, Lives};
use super::flow::Flow;

/// How long a guest may leave `Expect: 100-continue` unanswered until the body is sent anyway, as RFC 9110 wants of
/// a client; curl waits as long.
const CONTINUE_WAIT: Duration = Duration::from_secs(1);

/// How much of a body that nobody wants is read, and for how long, before the connection is closed on the rest.
const DISCARD: (usize, Duration) = (256 * 1024 * 1024, Duration::from_secs(10));

/// Reads a body to its end for nothing, within bounds.
pub(super) async fn discard(mut body: Incoming) {
    let reading = async {
        let mut left = DISCARD.0;
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    // Either way there is nothing more to do for it.
    let _ = tokio::time::timeout(DISCARD.1, reading).await;
}

type Signal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The request's body on its way into a sandbox.
pub(super) struct RequestBody {
    incoming: Incoming,
    wait: Option<Signal>,
}

impl RequestBody {
    /// Passes `incoming` on. With `expects_continue` nothing of it is asked for before the returned gate opens,
    /// because asking is what makes the server side tell the client to continue.
    pub(super) fn new(incoming: Incoming, expects_continue: bool) -> (Self, Option<CancellationToken>) {
        if !expects_continue {
            return (Self { incoming, wait: None }, None);
        }
        let gate = CancellationToken::new();
        let opened = gate.clone();
        let wait: Signal = Box::pin(async move {
            // Either way the body goes out now, and the flow has to know.
            let _ = tokio::time::timeout(CONTINUE_WAIT, opened.cancelled()).await;
            opened.cancel();
        });
        let body = Self {
            incoming,
            wait: Some(wait),
        };
        (body, Some(gate))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(wait) = &mut self.wait {
            ready!(wait.as_mut().poll(cx));
            self.wait = None;
        }
        Pin::new(&mut self.incoming).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// Why a response's body broke off.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The sandbox ended.
    #[error("the sandbox ended")]
    Ended,
    /// The stream from the sandbox broke.
    #[error("the stream from the sandbox broke")]
    Broken(#[source] hyper::Error),
}

/// The body of a response: the sandbox's, or the proxy's own.
pub struct ResponseBody(Kind);

enum Kind {
    Own(Full<Bytes>),
    Guest(GuestBody),
}

impl std::fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

impl ResponseBody {
    pub(super) fn own(body: Full<Bytes>) -> Self {
        Self(Kind::Own(body))
    }

    pub(super) fn guest(body: GuestBody) -> Self {
        Self(Kind::Guest(body))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.0 {
            Kind::Own(body) => Pin::new(body).poll_frame(cx).map_err(|infallible| match infallible {}),
            Kind::Guest(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Own(body) => body.is_end_stream(),
            Kind::Guest(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Own(body) => body.size_hint(),
            Kind::Guest(body) => body.incoming.size_hint(),
        }
    }
}

/// A response's body on its way out of a sandbox.
pub(super) struct GuestBody {
    incoming: Incoming,
    flow: Flow,
    ending: watch::Receiver<bool>,
    ended: Signal,
    /// Where the end of the connection is the end of the body, which is also what a killed server leaves behind.
    lives: Option<Lives>,
    at_end: bool,
    finished: bool,
}

impl GuestBody {
    /// `lives` is for a body that nothing but the end of its connection ends.
    pub(super) fn new(incoming: Incoming, flow: Flow, ending: watch::Receiver<bool>, lives: Option<Lives>) -> Self {
        let mut watched = ending.clone();
        Self {
            incoming,
            flow,
            ending,
            ended: Box::pin(async move { dial::ended(&mut watched).await }),
            lives,
            at_end: false,
            finished: false,
        }
    }

    fn finish(&mut self) {
        self.finished = true;
        self.flow.finish();
    }

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        if self.ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(self.broken(BodyError::Ended))));
        }
        if !self.at_end {
            match ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if self.incoming.is_end_stream() {
                        self.finish();
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(self.broken(BodyError::Broken(error))))),
                None => self.at_end = true,
            }
        }
        let lived = match &mut self.lives {
            Some(lives) => ready!(lives.as_mut().poll(cx)),
            None => true,
        };
        if !lived || dial::has_ended(&self.ending) {
            return Poll::Ready(Some(Err(self.broken(BodyError::Ended))));
        }
        self.finish();
        Poll::Ready(None)
    }

    fn broken(&mut self, error: BodyError) -> BodyError {
        self.flow.cut();
        self.finished = true;
        self.flow.abort();
        error
    }
}

impl Drop for GuestBody {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        if self.incoming.is_end_stream() {
            self.flow.finish();
        } else {
            self.flow.abort();
        }
    }
}
