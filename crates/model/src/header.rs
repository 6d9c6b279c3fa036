//! Headers that may be set on requests of sandboxes: the only place that decides what their names and values can be.

use crate::limits::HEADER_NAME_MAX;

/// Headers on which the framing, the routing or the connection of a request depend. To set them would change what a server
/// reads, or who reads it.
const RESERVED: [&str; 14] = [
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "sec-websocket-key",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Why a header cannot be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHeaderName {
    /// Text that is not a header name.
    #[error("it is not the name of a header")]
    NotAName,
    /// A header that rules must not set.
    #[error("the connection depends on it")]
    Reserved,
}

/// The name of a header in lower case; none if no header can have it.
#[must_use]
pub fn header_name(name: &str) -> Option<String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let is_name = (1..=HEADER_NAME_MAX).contains(&name.len()) && name.bytes().all(is_token);
    is_name.then(|| name.to_ascii_lowercase())
}

/// The name of a header in lower case, if rules can set it.
///
/// # Errors
/// With the reason why they cannot.
pub fn settable_name(name: &str) -> Result<String, InvalidHeaderName> {
    let name = header_name(name).ok_or(InvalidHeaderName::NotAName)?;
    if RESERVED.contains(&name.as_str()) {
        Err(InvalidHeaderName::Reserved)
    } else {
        Ok(name)
    }
}

/// Whether a header that is set can have the value, or contain it: printable ASCII, which every version of HTTP and every
/// server understands in the same way.
#[must_use]
pub fn is_header_value(value: &str) -> bool {
    value.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tokens_that_frame_nothing() {
        let longest = "x".repeat(HEADER_NAME_MAX);
        for (name, want) in [
            ("Authorization", Ok("authorization")),
            ("x!#$%&'*+-.^_`|~9", Ok("x!#$%&'*+-.^_`|~9")),
            (&longest, Ok(&*longest)),
            (&format!("{longest}x"), Err(InvalidHeaderName::NotAName)),
            ("", Err(InvalidHeaderName::NotAName)),
            ("a b", Err(InvalidHeaderName::NotAName)),
            ("a:", Err(InvalidHeaderName::NotAName)),
            (":path", Err(InvalidHeaderName::NotAName)),
            ("a\r\nb", Err(InvalidHeaderName::NotAName)),
            ("é", Err(InvalidHeaderName::NotAName)),
            ("Host", Err(InvalidHeaderName::Reserved)),
            ("TRANSFER-Encoding", Err(InvalidHeaderName::Reserved)),
            ("proxy-authorization", Err(InvalidHeaderName::Reserved)),
            ("Sec-WebSocket-Key", Err(InvalidHeaderName::Reserved)),
        ] {
            assert_eq!(settable_name(name), want.map(str::to_owned), "{name:?}");
        }
        // A condition may be about a header that cannot be set.
        assert_eq!(header_name("Host").as_deref(), Some("host"));
    }

    #[test]
    fn values_are_printable_ascii() {
        for (value, want) in [
            ("", true),
            (" ~", true),
            ("a\tb", false),
            ("a\n", false),
            ("é", false),
            ("\u{7f}", false),
        ] {
            assert_eq!(is_header_value(value), want, "{value:?}");
        }
    }
}
