//! The body of a response, which must not end cleanly when its sandbox ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::dial::AliveCheck;
use super::flow::Flow;
use super::pool::Lease;

/// Why a response body was aborted.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The sandbox ended.
    #[error("the sandbox ended")]
    Ended,
    /// The stream from the sandbox failed.
    #[error("stream from the sandbox failed")]
    Broken(#[source] hyper::Error),
}

/// The body of a response, from the sandbox or from the proxy.
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
    pub(super) fn local(body: Full<Bytes>) -> Self {
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

/// The response body, forwarded from a sandbox.
pub(super) struct GuestBody {
    incoming: Incoming,
    flow: Flow,
    ending: CancellationToken,
    /// The connection; none when the body is finished.
    lease: Option<Lease>,
    /// Whether the connection may serve another request after this response.
    keeps: bool,
    /// Set if the body ends with the connection, which also ends if the server or sandbox is killed.
    alive: Option<AliveCheck>,
    at_end: bool,
}

impl GuestBody {
    /// `alive` is for a body that ends with its connection. The driver of the connection watches for the end of the
    /// sandbox, and breaks off `incoming`.
    pub(super) fn new(
        incoming: Incoming,
        lease: Lease,
        keeps: bool,
        flow: Flow,
        ending: CancellationToken,
        alive: Option<AliveCheck>,
    ) -> Self {
        Self {
            incoming,
            flow,
            ending,
            lease: Some(lease),
            keeps,
            alive,
            at_end: false,
        }
    }

    fn finish(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.finish(&self.flow, self.keeps);
        }
    }

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.lease.is_none() {
            return Poll::Ready(None);
        }
        if self.ending.is_cancelled() {
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
        let was_alive = match &mut self.alive {
            Some(alive) => ready!(alive.as_mut().poll(cx)),
            None => true,
        };
        if !was_alive || self.ending.is_cancelled() {
            return Poll::Ready(Some(Err(self.broken(BodyError::Ended))));
        }
        self.finish();
        Poll::Ready(None)
    }

    fn broken(&mut self, error: BodyError) -> BodyError {
        self.flow.cut();
        // Closes the connection.
        self.lease = None;
        error
    }
}

impl Drop for GuestBody {
    fn drop(&mut self) {
        // Otherwise the connection is closed with its lease.
        if self.incoming.is_end_stream() {
            self.finish();
        }
    }
}
