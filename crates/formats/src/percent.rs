//! Percent-encoding, and strict decoding: an invalid escape is an error and never passed through, because filters can be
//! bypassed if two parsers interpret an escape differently.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Characters that are encoded in a part of a URL: all but the unreserved ones of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Characters that are encoded in a path.
const RESERVED_IN_PATH: &AsciiSet = &RESERVED.remove(b'/');

/// A `%` without two hexadecimal digits, or escapes that are not valid UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadEscape;

/// The meaning of `+`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plus {
    /// A space, as in a query string or a form.
    Space,
    /// Itself, as in a path.
    Plus,
}

/// Encodes a text as one part of a URL, such as a value in a query.
#[must_use]
pub fn encode(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

/// Encodes a path, whose slashes stay.
#[must_use]
pub fn encode_path(path: &str) -> String {
    utf8_percent_encode(path, RESERVED_IN_PATH).to_string()
}

/// Decodes every escape of `text` once.
///
/// # Errors
/// [`BadEscape`] when an escape is invalid or the result is not UTF-8.
pub fn decode(text: &str, plus: Plus) -> Result<String, BadEscape> {
    String::from_utf8(decode_bytes(text, plus)?).map_err(|_| BadEscape)
}

/// Decodes every escape of `text` once, to bytes that need not be UTF-8.
///
/// # Errors
/// [`BadEscape`] when an escape is invalid.
pub fn decode_bytes(text: &str, plus: Plus) -> Result<Vec<u8>, BadEscape> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let high = bytes.next().and_then(hex_digit).ok_or(BadEscape)?;
                let low = bytes.next().and_then(hex_digit).ok_or(BadEscape)?;
                out.push(high << 4 | low);
            }
            b'+' if plus == Plus::Space => out.push(b' '),
            other => out.push(other),
        }
    }
    Ok(out)
}

/// The value of a hexadecimal digit in either case.
fn hex_digit(byte: u8) -> Option<u8> {
    let digit = char::from(byte).to_digit(16)?;
    u8::try_from(digit).ok()
}

/// The pairs of a query string, decoded, in order. A key without `=` has the empty value.
///
/// # Errors
/// [`BadEscape`] at the invalid pair; the pairs before it were yielded.
pub fn query_pairs(query: &str) -> impl Iterator<Item = Result<(String, String), BadEscape>> + '_ {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decode(key, Plus::Space)?, decode(value, Plus::Space)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_once_and_strictly() {
        for (text, want) in [
            ("a%20b+c", Ok("a b c")),
            ("%2569", Ok("%69")),
            ("%c3%A9", Ok("é")),
            ("", Ok("")),
            ("%", Err(BadEscape)),
            ("%2", Err(BadEscape)),
            ("%zz", Err(BadEscape)),
            ("%+1", Err(BadEscape)),
            ("%ff", Err(BadEscape)),
        ] {
            assert_eq!(decode(text, Plus::Space).as_deref(), want.as_ref().copied(), "{text}");
        }
        assert_eq!(decode("a+b", Plus::Plus).as_deref(), Ok("a+b"));
    }

    #[test]
    fn bytes_need_not_be_text() {
        assert_eq!(decode_bytes("/%ff%2f", Plus::Plus).as_deref(), Ok(&b"/\xff/"[..]));
        assert_eq!(decode_bytes("%f", Plus::Plus), Err(BadEscape));
    }

    #[test]
    fn what_is_encoded_is_decoded_to_itself() {
        for (text, want) in [
            ("my-template_1:v1.0", "my-template_1%3Av1.0"),
            ("a&team=b é", "a%26team%3Db%20%C3%A9"),
            ("/a~b", "%2Fa~b"),
        ] {
            assert_eq!(encode(text), want);
            assert_eq!(decode(want, Plus::Space).as_deref(), Ok(text));
        }
        assert_eq!(encode_path("/a?b/%#"), "/a%3Fb/%25%23");
    }

    #[test]
    fn a_query_is_split_before_it_is_decoded() {
        let pairs: Result<Vec<_>, _> = query_pairs("a=1%262&&b&c=d=e").collect();
        let want = [("a", "1&2"), ("b", ""), ("c", "d=e")];
        assert_eq!(
            pairs,
            Ok(want.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        );
        assert!(query_pairs("a=1&b=%").any(|pair| pair.is_err()));
    }
}
