//! The versions of HTTP, as both sides of an intercepted connection negotiate them.

/// A protocol that is negotiated with TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alpn {
    Http1,
    Http2,
    /// No protocol was negotiated: HTTP/1.1 then.
    None,
}

impl Alpn {
    pub(super) fn name(self) -> Option<&'static [u8]> {
        match self {
            Self::Http1 => Some(b"http/1.1"),
            Self::Http2 => Some(b"h2"),
            Self::None => None,
        }
    }
}
