//! A span that has ended, as it waits for its export, and what becomes of it in a message.
//!
//! Invariant: every text in it is one of this program, or an id that the platform has made. So nothing that a client sends
//! can be in a span, whatever it is, and the size of a span is bounded.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::context::{SpanId, TraceId};
use super::message::{AnyValue, KeyValue, OneValue, Span, Status};

/// `Status.code` of a span that failed.
const FAILED: i32 = 2;
/// Bits of `Span.flags`: the trace is recorded, the next one is known, and the parent is in another program.
const FLAGS: [u32; 3] = [1, 0x100, 0x200];

/// The kind of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A step inside of the platform.
    Internal = 1,
    /// A request that the platform answers.
    Server = 2,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Word(&'static str),
    Shared(Arc<str>),
    Number(i64),
}

/// What a span says about its request or its work: a key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attribute(pub(super) &'static str, pub(super) Value);

impl Attribute {
    pub(super) fn into_message(self) -> KeyValue {
        let Self(key, value) = self;
        let value = match value {
            Value::Word(text) => OneValue::Text(text.to_owned()),
            Value::Shared(text) => OneValue::Text(text.as_ref().to_owned()),
            Value::Number(number) => OneValue::Number(number),
        };
        KeyValue {
            key: key.to_owned(),
            value: Some(AnyValue { value: Some(value) }),
        }
    }
}

/// A span that has ended.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    pub(super) parent: Option<SpanId>,
    /// Whether the parent is a span of a client.
    pub(super) is_remote: bool,
    pub(super) name: Cow<'static, str>,
    pub(super) kind: Kind,
    /// Time from 1970 until it began.
    pub(super) start: Duration,
    pub(super) took: Duration,
    pub(super) attributes: Vec<Attribute>,
    pub(super) has_failed: bool,
}

impl Record {
    pub(super) fn into_message(self) -> Span {
        let [sampled, is_known, is_remote] = FLAGS;
        Span {
            trace_id: self.trace.0.to_vec(),
            span_id: self.span.0.to_vec(),
            parent_span_id: self.parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
            name: self.name.into_owned(),
            kind: self.kind as i32,
            start_time_unix_nano: nanoseconds(self.start),
            end_time_unix_nano: nanoseconds(self.start.saturating_add(self.took)),
            attributes: self.attributes.into_iter().map(Attribute::into_message).collect(),
            status: self.has_failed.then_some(Status { code: FAILED }),
            flags: sampled | is_known | if self.is_remote { is_remote } else { 0 },
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
