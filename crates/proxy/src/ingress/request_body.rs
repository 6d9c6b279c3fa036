//! The body of a request on its way to a sandbox. It may have to wait for `100 Continue`, and what is not needed of it is
//! read all the same.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long to wait for `100 Continue` from the guest before the body is sent anyway, as RFC 9110 recommends; curl uses
/// the same value.
const CONTINUE_WAIT: Duration = Duration::from_secs(1);

/// How much of an unneeded body is read and discarded, and for how long, before its stream or connection is closed: as
/// much as clients upload in one request, at the speed of a slow network.
const DISCARD: (usize, Duration) = (256 * 1024 * 1024, Duration::from_secs(120));

/// Idle time after which a response no longer waits for the rest of the request, because the client may be waiting for
/// the response.
const QUIET: Duration = Duration::from_millis(500);

/// The runtime on which dropped bodies are read to their end.
pub(super) struct Discards {
    pub(super) runtime: Handle,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// The body of a client's request. When dropped, the rest of it is read and discarded, within limits, because a client
/// that is still sending does not read the response yet. An HTTP/1 connection that is closed with unread data is reset,
/// and the response is lost; on HTTP/2, many clients lose the response of a reset stream, and what they send afterwards
/// counts against the connection.
pub struct ClientBody {
    /// The body that hyper received, which is taken when this is dropped.
    incoming: Option<Incoming>,
    /// The whole body, if it was read before; none once it was taken.
    read: Option<Bytes>,
    /// Whether the client waits for `100 Continue`, which was not sent: then there is nothing to discard.
    waits: bool,
    /// Whether the client takes a response that ends before its request for complete.
    takes_early_end: bool,
    /// Counts received bytes for [`PendingUpload`]; closed at the end of the body.
    progress: Option<watch::Sender<u64>>,
    discards: Discards,
}

impl std::fmt::Debug for ClientBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientBody").finish_non_exhaustive()
    }
}

impl ClientBody {
    pub(super) fn new(incoming: Incoming, waits: bool, takes_early_end: bool, discards: Discards) -> Self {
        Self {
            incoming: Some(incoming),
            read: None,
            waits,
            takes_early_end,
            progress: None,
            discards,
        }
    }

    pub(super) fn of_bytes(bytes: Bytes, discards: Discards) -> Self {
        Self {
            incoming: None,
            read: (!bytes.is_empty()).then_some(bytes),
            waits: false,
            takes_early_end: false,
            progress: None,
            discards,
        }
    }

    /// The unread rest of the body, for a response that may be complete before it; none at the end of the body, and for
    /// clients that understand this.
    pub fn pending_upload(&mut self) -> Option<PendingUpload> {
        if self.is_end_stream() || self.takes_early_end {
            return None;
        }
        let progress = self.progress.get_or_insert_with(|| watch::Sender::new(0));
        Some(PendingUpload(progress.subscribe()))
    }
}

/// The rest of a request body that the client is still sending.
#[derive(Debug)]
pub struct PendingUpload(watch::Receiver<u64>);

impl PendingUpload {
    /// Returns when the client has sent everything, is idle, or the time limit is reached. For refusals over HTTP/2: a
    /// client that has queued a large body may not be able to receive a response (Node limits both to 10 MB together).
    pub async fn finished(self) {
        let mut progress = self.0;
        let sending = async {
            // An error is the end of the body.
            while let Ok(Ok(())) = tokio::time::timeout(QUIET, progress.changed()).await {}
        };
        let _ = tokio::time::timeout(DISCARD.1, sending).await;
    }

    /// Delays the end of a response body until the client has finished sending: over HTTP/2 some clients treat a
    /// response that ends before their request as a broken stream, whatever its status.
    pub fn delay_end<B>(self, body: B) -> DelayedEnd<B> {
        DelayedEnd {
            body,
            ended: Some(Box::pin(self.finished())),
        }
    }
}

/// A body whose end is delayed, see [`PendingUpload::delay_end`].
pub struct DelayedEnd<B> {
    body: B,
    /// Pending until the upload has finished.
    ended: Option<Signal>,
}

impl<B> std::fmt::Debug for DelayedEnd<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DelayedEnd").finish_non_exhaustive()
    }
}

impl<B: Body + Unpin> Body for DelayedEnd<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        if let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            return Poll::Ready(Some(frame));
        }
        if let Some(ended) = &mut self.ended {
            ready!(ended.as_mut().poll(cx));
            self.ended = None;
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.ended.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ClientBody {
    fn drop(&mut self) {
        let Some(incoming) = self.incoming.take() else {
            return;
        };
        if self.waits || incoming.is_end_stream() {
            return;
        }
        let stop = self.discards.stop.clone();
        let progress = self.progress.take();
        let reading = async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = discard(incoming, progress) => {}
            }
        };
        self.discards.tasks.spawn_on(reading, &self.discards.runtime);
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        // Polling the body makes the server send `100 Continue`.
        self.waits = false;
        if let Some(bytes) = self.read.take() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        match &mut self.incoming {
            Some(incoming) => {
                let frame = ready!(Pin::new(incoming).poll_frame(cx));
                match &self.progress {
                    Some(progress) if matches!(frame, Some(Ok(_))) => progress.send_modify(|count| *count += 1),
                    _ => {}
                }
                if self.is_end_stream() || !matches!(frame, Some(Ok(_))) {
                    self.progress = None;
                }
                Poll::Ready(frame)
            }
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_none() && self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        if let Some(bytes) = &self.read {
            return SizeHint::with_exact(bytes.len() as u64);
        }
        self.incoming.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

/// Reads and discards a body, within limits.
async fn discard(mut body: Incoming, progress: Option<watch::Sender<u64>>) {
    let reading = async {
        let mut left = DISCARD.0;
        while let Some(Ok(frame)) = body.frame().await {
            if let Some(progress) = &progress {
                progress.send_modify(|count| *count += 1);
            }
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    // The result does not matter.
    let _ = tokio::time::timeout(DISCARD.1, reading).await;
}

type Signal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The request body, forwarded to a sandbox.
#[derive(Default)]
pub(super) struct RequestBody {
    /// None when there is no body.
    incoming: Option<ClientBody>,
    wait: Option<Signal>,
    sent: Upload,
}

/// Whether a request body was read to its end.
#[derive(Debug, Clone, Default)]
pub(super) struct Upload(Option<Arc<AtomicBool>>);

impl Upload {
    /// Whether all of the body was read, or there is none.
    pub(super) fn is_complete(&self) -> bool {
        self.0.as_ref().is_none_or(|sent| sent.load(Ordering::Acquire))
    }

    fn complete(&self) {
        if let Some(sent) = &self.0 {
            sent.store(true, Ordering::Release);
        }
    }
}

impl std::fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

impl RequestBody {
    /// Forwards `incoming`. With `expects_continue` the body is not polled before the returned gate opens, because polling
    /// makes the server side send `100 Continue`.
    pub(super) fn new(incoming: ClientBody, expects_continue: bool) -> (Self, Option<CancellationToken>) {
        if incoming.is_end_stream() {
            return (Self::default(), None);
        }
        let mut body = Self {
            incoming: Some(incoming),
            wait: None,
            sent: Upload(Some(Arc::default())),
        };
        if !expects_continue {
            return (body, None);
        }
        let gate = CancellationToken::new();
        let opened = gate.clone();
        body.wait = Some(Box::pin(async move {
            // In both cases the body is sent now, and the flow has to be notified.
            let _ = tokio::time::timeout(CONTINUE_WAIT, opened.cancelled()).await;
            opened.cancel();
        }));
        (body, Some(gate))
    }

    /// The progress of the body.
    pub(super) fn upload(&self) -> Upload {
        self.sent.clone()
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
        let Some(incoming) = &mut self.incoming else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *incoming).poll_frame(cx));
        let is_complete = match &frame {
            Some(Ok(_)) => incoming.is_end_stream(),
            Some(Err(_)) => false,
            None => true,
        };
        if is_complete {
            self.sent.complete();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}
