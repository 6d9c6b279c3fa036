//! Spans of what the platform does without a request that is answered by it: builds with their steps, pauses at a deadline,
//! and resumes by traffic.
//!
//! Each begins a trace of its own, which the same part is recorded of as of requests without a trace. What a team causes is
//! bounded: a build has [`CHILDREN_MAX`] children at most, however many steps it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use model::id::TeamId;
use parking_lot::Mutex;

use super::context::{Sampler, SpanId, TraceId, random};
use super::queue::Queue;
use super::record::{Attribute, Kind, Record, Value};
use crate::clock::Clock;

/// Maximum number of children of a span.
pub(super) const CHILDREN_MAX: usize = 128;

/// The span of some work. It is recorded when it is dropped: as a failure, unless [`Self::end`] was told otherwise.
#[derive(Debug)]
pub(crate) struct WorkSpan {
    queue: Arc<Queue>,
    clock: Clock,
    trace: TraceId,
    parent: Option<SpanId>,
    span: SpanId,
    name: &'static str,
    start: Duration,
    begun: Instant,
    attributes: Mutex<Vec<Attribute>>,
    children: AtomicUsize,
    has_succeeded: AtomicBool,
}

impl WorkSpan {
    /// Begins the span of work for a team; none if its trace is not recorded.
    pub(super) fn begin(
        sampler: Sampler,
        queue: &Arc<Queue>,
        clock: &Clock,
        name: &'static str,
        team: &TeamId,
    ) -> Option<Self> {
        let trace = TraceId(random()?);
        if !sampler.takes(trace) {
            return None;
        }
        let span = Self::new(queue, clock, trace, None, name)?;
        span.note("ringfence.team.id", Value::Shared(team.as_str().into()));
        Some(span)
    }

    fn new(
        queue: &Arc<Queue>,
        clock: &Clock,
        trace: TraceId,
        parent: Option<SpanId>,
        name: &'static str,
    ) -> Option<Self> {
        Some(Self {
            trace,
            parent,
            span: SpanId(random()?),
            name,
            start: Duration::from_micros(u64::try_from(clock.now_us()).ok()?),
            begun: Instant::now(),
            attributes: Mutex::default(),
            children: AtomicUsize::new(0),
            has_succeeded: AtomicBool::new(false),
            queue: Arc::clone(queue),
            clock: clock.clone(),
        })
    }

    /// Begins the span of a part of the work; none once there are too many.
    pub(crate) fn child(&self, name: &'static str) -> Option<Self> {
        if self.children.fetch_add(1, Ordering::Relaxed) >= CHILDREN_MAX {
            return None;
        }
        Self::new(&self.queue, &self.clock, self.trace, Some(self.span), name)
    }

    pub(super) fn note(&self, key: &'static str, value: Value) {
        self.attributes.lock().push(Attribute(key, value));
    }

    /// Notes one of some words about the work.
    pub(crate) fn note_word(&self, key: &'static str, word: &'static str) {
        self.note(key, Value::Word(word));
    }

    /// The ids of its trace and of itself.
    #[cfg(test)]
    pub(super) fn ids(&self) -> (TraceId, SpanId) {
        (self.trace, self.span)
    }

    /// Says how the work went. The span ends when it is dropped.
    pub(crate) fn end(&self, has_succeeded: bool) {
        self.has_succeeded.store(has_succeeded, Ordering::Relaxed);
    }
}

impl Drop for WorkSpan {
    fn drop(&mut self) {
        let has_failed = !self.has_succeeded.load(Ordering::Relaxed);
        let record = Record {
            trace: self.trace,
            span: self.span,
            parent: self.parent,
            is_remote: false,
            name: self.name.into(),
            kind: Kind::Internal,
            start: self.start,
            took: self.begun.elapsed(),
            attributes: std::mem::take(self.attributes.get_mut()),
            has_failed,
        };
        self.queue.push(vec![record], true);
    }
}

/// Does some work, and says to its span how it went.
pub(crate) async fn traced<T, E>(span: Option<WorkSpan>, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let done = work.await;
    if let Some(span) = span {
        span.end(done.is_ok());
    }
    done
}
