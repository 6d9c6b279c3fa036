//! What the gateway holds of bodies on their way, for all intercepted connections of a sandbox together.
//!
//! With HTTP/2, bytes of many bodies can wait on one connection until the other side takes them. They are counted until
//! they are written to it, and beyond a bound, no more are read: whoever sends them waits.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes per direction, as units of [`UNIT`].
const UNITS: usize = (24 << 20) / UNIT;
const UNIT: usize = 1 << 10;
/// Most bytes of a frame, and what has to be free before one is read.
const FRAME: usize = 16 << 10;

/// What may be held in one direction.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(UNITS)))
    }

    /// The share of one body.
    pub(super) fn share(&self) -> Share {
        Share {
            budget: self.clone(),
            waiting: None,
            taken: None,
            rest: Bytes::new(),
        }
    }
}

type Waiting = Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send + Sync>>;

/// What one body takes.
pub(super) struct Share {
    budget: Budget,
    waiting: Option<Waiting>,
    /// For the next frame.
    taken: Option<OwnedSemaphorePermit>,
    /// What is left of the last bytes that were read.
    rest: Bytes,
}

impl Share {
    /// Waits until a frame may be read.
    pub(super) fn poll_free(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.taken.is_none() {
            let budget = &self.budget.0;
            let units = u32::try_from(FRAME / UNIT).unwrap_or(u32::MAX);
            let waiting = self.waiting.get_or_insert_with(|| {
                let budget = Arc::clone(budget);
                Box::pin(async move { budget.acquire_many_owned(units).await.ok() })
            });
            self.taken = ready!(waiting.as_mut().poll(cx));
            self.waiting = None;
        }
        Poll::Ready(())
    }

    /// Gives back what was taken for a frame, which has not come yet or needs nothing.
    pub(super) fn give_back(&mut self) {
        self.taken = None;
    }

    /// Takes the bytes that were left of an earlier chunk, if any.
    pub(super) fn rest(&mut self) -> Option<Bytes> {
        let rest = std::mem::take(&mut self.rest);
        (!rest.is_empty()).then(|| self.count(rest))
    }

    /// Whether nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// How many bytes are left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The first of these bytes, counted until they are dropped. The others are [`Self::rest`].
    pub(super) fn count(&mut self, mut bytes: Bytes) -> Bytes {
        let mut permit = self.taken.take();
        if bytes.len() > FRAME {
            self.rest = bytes.split_off(FRAME);
        }
        // What is not needed is given back at once.
        let units = bytes.len().div_ceil(UNIT);
        let needed = permit.as_mut().and_then(|permit| permit.split(units.max(1)));
        Bytes::from_owner(Counted { bytes, _permit: needed })
    }
}

struct Counted {
    bytes: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn what_is_held_is_bounded_and_counted_until_it_is_dropped() {
        let budget = Budget::new();
        let mut cx = Context::from_waker(Waker::noop());
        let mut share = budget.share();
        let mut held = Vec::new();
        while share.poll_free(&mut cx).is_ready() {
            held.push(share.count(Bytes::from(vec![0; FRAME])));
        }
        assert_eq!(held.len() * FRAME, UNITS * UNIT);
        held.pop();
        assert!(share.poll_free(&mut cx).is_ready());
        // Small frames take what they need.
        let small = share.count(Bytes::from_static(b"x"));
        assert_eq!(budget.0.available_permits(), FRAME / UNIT - 1);
        drop((small, held));
        assert_eq!(budget.0.available_permits(), UNITS);
    }

    #[test]
    fn long_bytes_come_in_parts() {
        let budget = Budget::new();
        let mut cx = Context::from_waker(Waker::noop());
        let mut share = budget.share();
        let text: Vec<u8> = (0..FRAME * 2 + 5).map(|at| u8::try_from(at % 251).unwrap()).collect();
        assert!(share.poll_free(&mut cx).is_ready());
        let mut got = share.count(Bytes::from(text.clone())).to_vec();
        while !share.is_empty() {
            assert!(share.poll_free(&mut cx).is_ready());
            got.extend(share.rest().unwrap());
        }
        assert!(got == text && share.rest().is_none());
    }
}
