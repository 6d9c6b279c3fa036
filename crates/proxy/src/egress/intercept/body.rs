//! Bodies on their way through the gateway. They are passed on as they come, and never collected.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderName;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Sleep;

use super::budget::{Budget, Share};
use super::decode::Decoded;
use super::error::BoxError;
use super::mask::{Masker, Search, mask_headers};
use super::rules::Applied;
use super::state::InFlight;

/// How long a server may take to ask for a body with 100 before it is sent anyway: servers are not obliged to.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// The body of a request.
pub(super) struct RequestBody {
    inner: Incoming,
    share: Share,
    /// For requests with `Expect: 100-continue`: the server wants the body, or time is over.
    wait: Option<Wait>,
    /// The rule whose headers must not be in the trailers.
    applied: Option<Applied>,
}

struct Wait {
    wanted: oneshot::Receiver<()>,
    timeout: Pin<Box<Sleep>>,
    is_answered: bool,
}

/// Whether the body may be sent. If not, the server has answered without it, and never gets it.
impl Future for Wait {
    type Output = bool;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool> {
        let this = self.get_mut();
        if !this.is_answered {
            match Pin::new(&mut this.wanted).poll(cx) {
                Poll::Ready(Ok(())) => return Poll::Ready(true),
                Poll::Ready(Err(_)) => this.is_answered = true,
                Poll::Pending => return this.timeout.as_mut().poll(cx).map(|()| true),
            }
        }
        Poll::Ready(false)
    }
}

impl RequestBody {
    pub(super) fn new(inner: Incoming, applied: Option<Applied>, budget: &Budget) -> Self {
        Self {
            inner,
            share: budget.share(),
            wait: None,
            applied,
        }
    }

    /// Holds the body back until the server wants it. The client sends it once it is read here.
    pub(super) fn wait(&mut self, wanted: oneshot::Receiver<()>) {
        self.wait = Some(Wait {
            wanted,
            timeout: Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)),
            is_answered: false,
        });
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        if let Some(wait) = &mut this.wait {
            match Pin::new(wait).poll(cx) {
                Poll::Ready(true) => this.wait = None,
                Poll::Ready(false) | Poll::Pending => return Poll::Pending,
            }
        }
        ready!(this.share.poll_free(cx));
        if let Some(rest) = this.share.rest() {
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            this.share.give_back();
            return Poll::Pending;
        };
        let mut frame = frame.map(|frame| frame.map(|frame| frame.map_data(|data| this.share.count(data))));
        this.share.give_back();
        if let (Some(Ok(frame)), Some(applied)) = (&mut frame, &this.applied)
            && let Some(trailers) = frame.trailers_mut()
        {
            let ours: Vec<HeaderName> = trailers
                .keys()
                .filter(|name| applied.has_header(name))
                .cloned()
                .collect();
            for name in ours {
                trailers.remove(name);
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.share.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        longer(&self.inner.size_hint(), self.share.left())
    }
}

/// The size of a body of which some bytes were read already.
fn longer(hint: &SizeHint, read: usize) -> SizeHint {
    let read = read as u64;
    match hint.exact() {
        Some(left) => SizeHint::with_exact(left + read),
        None => *hint,
    }
}

/// The body of a response, or a text of the gateway.
pub(super) struct ResponseBody {
    source: Source,
    masked: Option<Masked>,
    /// None for a text of the gateway.
    share: Option<Share>,
    /// Counts the request as unfinished.
    _in_flight: Option<InFlight>,
}

enum Source {
    Upstream(Incoming),
    Decoded(Box<Decoded>),
    Text(Option<Bytes>),
}

/// What hides secrets in a body.
struct Masked {
    masker: Arc<Masker>,
    search: Search,
    /// Bytes of the body that are still to be searched.
    left: u64,
    /// Frames that come before the next one of the server.
    next: Option<Frame<Bytes>>,
}

impl ResponseBody {
    pub(super) fn upstream(body: Incoming, budget: &Budget, in_flight: InFlight) -> Self {
        Self {
            source: Source::Upstream(body),
            masked: None,
            share: Some(budget.share()),
            _in_flight: Some(in_flight),
        }
    }

    /// Decodes the body of a server, of which nothing has been read yet.
    pub(super) fn decode(&mut self, is_gzip: bool, permit: OwnedSemaphorePermit) {
        let source = std::mem::replace(&mut self.source, Source::Text(None));
        self.source = match source {
            Source::Upstream(inner) => Source::Decoded(Box::new(Decoded::new(inner, is_gzip, permit))),
            source => source,
        };
    }

    pub(super) fn text(text: impl Into<Bytes>) -> Self {
        Self {
            source: Source::Text(Some(text.into())),
            masked: None,
            share: None,
            _in_flight: None,
        }
    }

    /// Hides secrets in the first bytes, and in trailers.
    pub(super) fn mask(&mut self, masker: Arc<Masker>, bytes: u64) {
        self.masked = Some(Masked {
            masker,
            search: Search::default(),
            left: bytes,
            next: None,
        });
    }
}

impl Masked {
    fn push(&mut self, mut part: Bytes) -> Bytes {
        let length = u64::try_from(part.len()).unwrap_or(u64::MAX);
        if length <= self.left {
            self.left -= length;
            return self.search.push(&self.masker, part);
        }
        let rest = part.split_off(usize::try_from(self.left).unwrap_or(part.len()));
        self.left = 0;
        let ready = self.search.push(&self.masker, part);
        [ready, self.search.finish(), rest].concat().into()
    }
}

impl Source {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self {
            Self::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Upstream(inner) => Pin::new(inner).poll_frame(cx).map_err(BoxError::from),
            Self::Decoded(decoded) => decoded.poll_frame(cx),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::Upstream(inner) => inner.is_end_stream(),
            Self::Decoded(decoded) => decoded.is_over(),
        }
    }
}

impl ResponseBody {
    /// The next frame, with its secrets hidden.
    fn poll_searched(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let source = &mut self.source;
        let Some(masked) = &mut self.masked else {
            return source.poll_frame(cx);
        };
        loop {
            if let Some(frame) = masked.next.take() {
                return Poll::Ready(Some(Ok(frame)));
            }
            let frame = ready!(source.poll_frame(cx));
            let held = |masked: &mut Masked| {
                let held = masked.search.finish();
                (!held.is_empty()).then(|| Frame::data(held))
            };
            let frame = match frame {
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(held(masked).map(Ok)),
                Some(Ok(frame)) => frame,
            };
            match frame.into_data() {
                Ok(part) => {
                    let is_over = masked.left == 0 && masked.search.is_empty();
                    let ready = if is_over { part } else { masked.push(part) };
                    if !ready.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(ready))));
                    }
                }
                Err(mut trailers) => {
                    if let Some(trailers) = trailers.trailers_mut() {
                        mask_headers(trailers, &masked.masker);
                    }
                    match held(masked) {
                        Some(held) => {
                            masked.next = Some(trailers);
                            return Poll::Ready(Some(Ok(held)));
                        }
                        None => return Poll::Ready(Some(Ok(trailers))),
                    }
                }
            }
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(share) = &mut this.share {
            ready!(share.poll_free(cx));
            if let Some(rest) = share.rest() {
                return Poll::Ready(Some(Ok(Frame::data(rest))));
            }
        }
        let polled = this.poll_searched(cx);
        let Some(share) = &mut this.share else { return polled };
        let counted =
            polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(|data| share.count(data)))));
        share.give_back();
        counted
    }

    fn is_end_stream(&self) -> bool {
        // Bytes may be held back.
        let is_held = self
            .masked
            .as_ref()
            .is_some_and(|masked| masked.next.is_some() || !masked.search.is_empty());
        self.source.is_over() && !is_held && self.share.as_ref().is_none_or(Share::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Source::Decoded(_) => SizeHint::default(),
            // Nothing gets longer or shorter by being hidden, but bytes may be held back.
            Source::Upstream(inner) => {
                let held = self.masked.as_ref().map_or(0, |masked| masked.search.held());
                longer(&inner.size_hint(), held + self.share.as_ref().map_or(0, Share::left))
            }
        }
    }
}
