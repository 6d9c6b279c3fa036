//! Trace contexts: the ids of traces and spans, and the `traceparent` header of the W3C with which a client passes them on.
//!
//! A header that is malformed counts as none, as the recommendation demands, so a client can break nothing but its own trace.
//! Of what clients send, only these ids and the sampled flag are taken over: `tracestate` is free text and is not.

use std::fmt;

use http::{HeaderMap, HeaderName};

/// The header that names the trace and the span of a client.
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Length of the header in version 00, and of the part of later versions that is read.
const LENGTH: usize = 55;
/// The flag of a trace that is recorded.
const SAMPLED: u8 = 1;

/// Id of a trace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TraceId(pub(super) [u8; 16]);

/// Id of a span.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanId(pub(super) [u8; 8]);

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

/// The span of a client, of which that of its request is a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parent {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    /// Whether the client records its trace.
    pub(super) is_sampled: bool,
}

impl Parent {
    /// The parent that a request names, if it names exactly one, and correctly.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Self::parse(value.as_bytes()),
            _ => None,
        }
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(LENGTH)?;
        let has_dashes = [2, 35, 52].iter().all(|at| known.get(*at) == Some(&b'-'));
        let [version] = digits(known.get(..2)?)?;
        let fits = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.is_empty() || rest.starts_with(b"-"),
        };
        if !has_dashes || !fits {
            return None;
        }
        let trace = digits(known.get(3..35)?)?;
        let span = digits(known.get(36..52)?)?;
        let [flags] = digits(known.get(53..)?)?;
        let is_valid = trace != [0; 16] && span != [0; 8];
        is_valid.then_some(Self {
            trace: TraceId(trace),
            span: SpanId(span),
            is_sampled: flags & SAMPLED != 0,
        })
    }
}

/// Bytes as lower-case hexadecimal digits, which is the only form that is allowed.
fn digits<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    if text.iter().any(u8::is_ascii_uppercase) {
        return None;
    }
    let mut bytes = [0; N];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    Some(bytes)
}

/// Which traces are recorded that no client has decided about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampler {
    /// Traces whose id is below are recorded: with the same ids, other programs decide the same.
    below: u64,
}

impl Sampler {
    /// Records this part of the traces, from 0 to 1.
    pub(super) fn new(ratio: f64) -> Self {
        // The ids that are compared have 63 bits.
        let all = (1_u64 << 63) as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "from 0 to 2^63, of which the lowest bits decide nothing"
        )]
        let below = (ratio.clamp(0.0, 1.0) * all) as u64;
        Self { below }
    }

    /// Whether a trace that begins here is recorded.
    pub(super) fn takes(self, TraceId(id): TraceId) -> bool {
        let [.., a, b, c, d, e, f, g, h] = id;
        u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1 < self.below
    }
}

/// Random bytes; none where the system has none, and then there is no span.
pub(super) fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn of(values: &[&str]) -> Option<Parent> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).unwrap());
        }
        Parent::of(&headers)
    }

    #[test]
    fn a_parent_is_read() {
        for (flags, is_sampled) in [("00", false), ("01", true), ("03", true), ("fe", false)] {
            let parent = of(&[&format!("00-{TRACE}-{SPAN}-{flags}")]).unwrap();
            assert_eq!(format!("{:?}", parent.trace), TRACE);
            assert_eq!(format!("{:?}", parent.span), SPAN);
            assert_eq!(parent.is_sampled, is_sampled, "{flags}");
        }
        for later in [format!("cc-{TRACE}-{SPAN}-01"), format!("cc-{TRACE}-{SPAN}-01-more")] {
            assert!(of(&[&later]).unwrap().is_sampled, "{later}");
        }
    }

    #[test]
    fn what_is_malformed_is_no_parent() {
        let good = format!("00-{TRACE}-{SPAN}-01");
        assert!(of(&[&good]).is_some());
        assert!(of(&[]).is_none());
        assert!(of(&[&good, &good]).is_none(), "two headers");
        for bad in [
            String::new(),
            "00".to_owned(),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("0-{TRACE}-{SPAN}-01"),
            format!("+0-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-+1"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("cc-{TRACE}-{SPAN}-01more"),
            format!("00_{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}_{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{}-01", SPAN.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{TRACE}-{}-01", &SPAN[1..]),
            format!("00-{}g-{SPAN}-01", &TRACE[1..]),
            format!(" 00-{TRACE}-{SPAN}-01"),
        ] {
            assert!(of(&[&bad]).is_none(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_a_client_sends_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            Parent::parse(&bytes);
        }

        #[test]
        fn all_or_nothing_is_exact(id: [u8; 16]) {
            prop_assert!(Sampler::new(1.0).takes(TraceId(id)));
            prop_assert!(!Sampler::new(0.0).takes(TraceId(id)));
        }
    }

    #[test]
    fn a_ratio_is_that_part_of_the_ids() {
        let sampler = Sampler::new(0.25);
        let id = |first: u8| {
            let mut id = [0xff; 16];
            id[8] = first;
            TraceId(id)
        };
        assert!(sampler.takes(id(0x3f)) && !sampler.takes(id(0x40)) && !sampler.takes(id(0xff)));
    }
}
