//! Strict percent-decoding: an invalid escape is an error and never passed through, because filters can be bypassed if two
//! parsers interpret an escape differently.

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

/// Decodes every escape of `text` once.
///
/// # Errors
/// [`BadEscape`] when an escape is invalid or the result is not UTF-8.
pub fn decode(text: &str, plus: Plus) -> Result<String, BadEscape> {
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
    String::from_utf8(out).map_err(|_| BadEscape)
}

/// The value of a hexadecimal digit in either case.
#[must_use]
pub fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
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
