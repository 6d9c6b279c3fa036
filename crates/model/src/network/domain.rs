//! Domain names of hosts, and the patterns that stand for them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest domain name as text, without a dot at the end: 255 bytes in messages (RFC 1035 section 3.1).
pub const MAX_DOMAIN_NAME: usize = 253;

/// Longest label of a domain name.
const MAX_LABEL: usize = 63;

/// The domain name that a text is, in lower case and without a dot at the end. Names of hosts only: labels of letters,
/// digits, hyphens and underscores. Not addresses, also not in forms such as `127.1`, `2130706433` or `0x7f.1`, which
/// only some programs take for addresses: the last label of a name is never a number.
#[must_use]
pub fn domain_name(text: &str) -> Option<String> {
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        (1..=MAX_LABEL).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_number = |label: &str| match label.get(..2) {
        Some("0x" | "0X") => label[2..].bytes().all(|byte| byte.is_ascii_hexdigit()),
        _ => label.bytes().all(|byte| byte.is_ascii_digit()),
    };
    let last = name.rsplit('.').next()?;
    let is_name = name.len() <= MAX_DOMAIN_NAME && name.split('.').all(is_label) && !is_number(last);
    is_name.then(|| name.to_ascii_lowercase())
}

/// A domain name, `*.` and a domain name, which stands for all names below it, or `*` for all names. In lower case,
/// without a dot at the end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainPattern(String);

/// Text that is not a domain pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a domain name such as example.com or *.example.com")]
pub struct InvalidDomain(String);

impl DomainPattern {
    /// Whether a name matches. Names are compared without regard to case and to a dot at the end.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let name = name.strip_suffix('.').unwrap_or(name);
        match self.0.strip_prefix('*') {
            Some("") => true,
            Some(suffix) => {
                let Some(start) = name.len().checked_sub(suffix.len()) else {
                    return false;
                };
                start > 0 && name.is_char_boundary(start) && name[start..].eq_ignore_ascii_case(suffix)
            }
            None => name.eq_ignore_ascii_case(&self.0),
        }
    }

    /// The pattern as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DomainPattern {
    type Err = InvalidDomain;

    fn from_str(text: &str) -> Result<Self, InvalidDomain> {
        let pattern = match text.strip_prefix("*.") {
            _ if text == "*" => Some(text.to_owned()),
            Some(parent) => domain_name(parent).map(|parent| format!("*.{parent}")),
            None => domain_name(text),
        };
        if let Some(pattern) = pattern.filter(|pattern| pattern.len() <= MAX_DOMAIN_NAME) {
            return Ok(Self(pattern));
        }
        Err(InvalidDomain(text.to_owned()))
    }
}

impl TryFrom<String> for DomainPattern {
    type Error = InvalidDomain;

    fn try_from(text: String) -> Result<Self, InvalidDomain> {
        text.parse()
    }
}

impl From<DomainPattern> for String {
    fn from(pattern: DomainPattern) -> Self {
        pattern.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> DomainPattern {
        text.parse().unwrap()
    }

    #[test]
    fn domain_names() {
        for (text, name) in [
            ("example.com", "example.com"),
            ("EXAMPLE.com.", "example.com"),
            ("localhost", "localhost"),
            ("_a-b_.1.x2", "_a-b_.1.x2"),
            ("0x.example", "0x.example"),
            ("1.2.3.4.in-addr.arpa", "1.2.3.4.in-addr.arpa"),
            ("a.0xg", "a.0xg"),
        ] {
            assert_eq!(domain_name(text).as_deref(), Some(name));
            assert_eq!(pattern(text).as_str(), name);
        }
        let label = "a".repeat(63);
        let longest = [&label[..], &label, &label, &label[..61]].join(".");
        assert_eq!(longest.len(), MAX_DOMAIN_NAME);
        assert_eq!(domain_name(&longest), Some(longest.clone()));
        assert_eq!(domain_name(&format!("{longest}.")), Some(longest.clone()));
        for text in [
            "",
            ".",
            "..",
            ".a",
            "a..",
            "a..b",
            "-a",
            "a-",
            "a.-b",
            "a b",
            " a",
            "a/b",
            "a:80",
            "a@b",
            "b\u{fc}cher.example",
            "\u{212a}elvin.example",
            "1.2.3.4",
            "1.2.3.4.",
            "127.1",
            "2130706433",
            "a.1",
            "0x7f000001",
            "127.0X1",
            "a.0x",
            "::1",
            &"a".repeat(64),
            &format!("{longest}a"),
        ] {
            assert_eq!(domain_name(text), None, "{text:?}");
            assert!(text.parse::<DomainPattern>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn domain_patterns() {
        for text in [
            "*.", "**", "*a", "*.*", "a.*", "a.*.b", "*.*.a", "*.1", "*..a", "*.a..", "* ", "*.-a",
        ] {
            assert_eq!(text.parse::<DomainPattern>(), Err(InvalidDomain(text.to_owned())));
        }
        let longest = format!("*.{}", ["a"; 126].join("."));
        assert_eq!(longest.len(), MAX_DOMAIN_NAME);
        assert!(longest.parse::<DomainPattern>().is_ok());
        assert!(format!("{longest}a").parse::<DomainPattern>().is_err());
        assert_eq!(pattern("*.EXAMPLE.com.").as_str(), "*.example.com");
        for (text, matching, other) in [
            (
                "example.com",
                &["example.com", "EXAMPLE.COM."][..],
                &["a.example.com", "example.com..", "example.co", ""][..],
            ),
            (
                "*.example.com",
                &["a.example.com", "a.b.EXAMPLE.com", "A.example.com."],
                &[
                    "example.com",
                    ".example.com",
                    "aexample.com",
                    "example.com.a",
                    "\u{fc}example.com",
                    "",
                ],
            ),
            ("*", &["a", "a.b.", "example.com"], &[]),
        ] {
            for name in matching {
                assert!(pattern(text).matches(name), "{text} {name:?}");
            }
            for name in other {
                assert!(!pattern(text).matches(name), "{text} {name:?}");
            }
        }
    }
}
