//! Paths of requests: the one form in which rules compare them.

use super::PathPattern;

/// Text that is not the path of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// A `*` that is not the last character.
    #[error("a path may have `*` only as its last character")]
    Star,
    /// A path that servers read in different ways.
    #[error(
        "the path must not contain spaces, control characters, backslashes, an encoded `/` or `\\`, a `%` without two \
         hexadecimal digits, or a doubled encoding"
    )]
    Ambiguous,
    /// A prefix that ends in a dot segment.
    #[error("a path that ends with `*` must not have `.` or `..` as its last segment")]
    DotPrefix,
}

/// The form in which the path of a request (without its query) is compared with the paths of rules; none if servers
/// read the path in different ways, so that nobody can say which one it is. Rules for every path ignore the path, so
/// they also match such requests; no other rule does.
///
/// - Escapes of letters, digits and `-._~` are decoded; other escapes keep their meaning and get upper-case digits.
/// - Characters that a path cannot have, such as `{` or `é`, are encoded.
/// - The segments `.` and `..` are removed as in RFC 3986 section 5.2.4, whether encoded or not.
/// - Case, a slash at the end and doubled slashes count.
///
/// None are paths that do not begin with `/`, and those with a control character, a space, a backslash, an encoded `/`,
/// `\` or control character, an invalid escape, an escape that is encoded twice, `..` after a doubled slash (some servers
/// remove the doubled slash first), or a dot segment with parameters (`..;x`, which some servers take for `..`). The empty
/// path is `/`.
#[must_use]
pub fn normalize_path(path: &str) -> Option<String> {
    if path.is_empty() {
        return Some("/".to_owned());
    }
    let decoded = decode_unreserved(path)?;
    let mut segments: Vec<&str> = Vec::new();
    let mut has_empty = false;
    let mut rest = decoded.strip_prefix('/')?.split('/').peekable();
    while let Some(segment) = rest.next() {
        let is_last = rest.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    if has_empty {
                        return None;
                    }
                    segments.pop();
                }
                if is_last {
                    segments.push("");
                }
            }
            _ if is_dot_with_parameters(segment) => return None,
            _ => {
                has_empty |= segment.is_empty() && !is_last;
                segments.push(segment);
            }
        }
    }
    Some(format!("/{}", segments.join("/")))
}

/// Whether a segment becomes a dot segment on servers that remove parameters from it.
fn is_dot_with_parameters(segment: &str) -> bool {
    let rest = segment.strip_prefix("..").or_else(|| segment.strip_prefix('.'));
    rest.is_some_and(|rest| rest.starts_with(';') || rest.starts_with("%3B"))
}

/// Decodes and encodes what does not change the meaning of a path; none if the path is ambiguous in itself.
fn decode_unreserved(path: &str) -> Option<String> {
    let mut text = String::with_capacity(path.len());
    let mut bytes = path.as_bytes();
    while let [byte, rest @ ..] = bytes {
        bytes = rest;
        let mut value = *byte;
        let is_escape = value == b'%';
        if is_escape {
            let [high, low, rest @ ..] = bytes else { return None };
            value = digit(*high)? << 4 | digit(*low)?;
            bytes = rest;
            if value == b'/' {
                return None;
            }
        }
        match value {
            b'\\' | 0..=b' ' | 0x7f => return None,
            _ if value.is_ascii_alphanumeric() || b"-._~".contains(&value) => text.push(char::from(value)),
            _ if !is_escape && b"/!$&'()*+,;=:@".contains(&value) => text.push(char::from(value)),
            _ => {
                const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
                text.push('%');
                text.push(char::from(DIGITS[usize::from(value >> 4)]));
                text.push(char::from(DIGITS[usize::from(value & 15)]));
            }
        }
    }
    let is_doubled = text.split("%25").skip(1).any(|rest| {
        let mut digits = rest.bytes();
        [digits.next(), digits.next()]
            .into_iter()
            .all(|byte| byte.is_some_and(|byte| byte.is_ascii_hexdigit()))
    });
    (!is_doubled).then_some(text)
}

fn digit(byte: u8) -> Option<u8> {
    let value = char::from(byte).to_digit(16)?;
    u8::try_from(value).ok()
}

impl PathPattern {
    /// Parses the pattern of a path in a rule: none or `/` for every path, a path, or a prefix and `*`. The path is
    /// normalised as [`normalize_path`] says.
    ///
    /// # Errors
    /// When it is not a path, or one that servers read in different ways.
    pub fn parse(path: &str) -> Result<Self, InvalidPath> {
        let prefix = path.strip_suffix('*');
        if prefix.unwrap_or(path).contains('*') {
            return Err(InvalidPath::Star);
        }
        let normalized = normalize_path(prefix.unwrap_or(path)).ok_or(InvalidPath::Ambiguous)?;
        if normalized == "/" && prefix.unwrap_or(path).trim_matches('/').is_empty() {
            return Ok(Self::Any);
        }
        let Some(prefix) = prefix else {
            return Ok(Self::Exact(normalized));
        };
        let last = decode_unreserved(prefix).ok_or(InvalidPath::Ambiguous)?;
        if last.ends_with("/.") || last.ends_with("/..") {
            return Err(InvalidPath::DotPrefix);
        }
        Ok(Self::Prefix(normalized))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_are_normalized() {
        for (path, normalized) in [
            ("", "/"),
            ("/", "/"),
            ("/v1/chat", "/v1/chat"),
            ("/V1/", "/V1/"),
            ("/%76%31/%7e", "/v1/~"),
            ("/a%3ab/%e4%bd", "/a%3Ab/%E4%BD"),
            ("/é{}", "/%C3%A9%7B%7D"),
            ("/v1/../admin", "/admin"),
            ("/v1/%2E%2e/admin", "/admin"),
            ("/v1/./x/.", "/v1/x/"),
            ("/v1/..", "/"),
            ("/../../x", "/x"),
            ("/a//b", "/a//b"),
            ("//a", "//a"),
            ("/a;x=1/b", "/a;x=1/b"),
            ("/100%25", "/100%25"),
            ("/...", "/..."),
            ("/..a", "/..a"),
        ] {
            assert_eq!(normalize_path(path).as_deref(), Some(normalized), "{path}");
        }
    }

    #[test]
    fn ambiguous_paths_have_no_normal_form() {
        for path in [
            "*",
            "v1",
            "example.com:443",
            "/a b",
            "/a\tb",
            "/a\\b",
            "/a%5cb",
            "/a%2fb",
            "/a%00",
            "/a%0d%0a",
            "/a%",
            "/a%2",
            "/a%zz",
            "/a%252e",
            "/a%252fb",
            "/a%25%32%66b",
            "/a//../b",
            "/a//b/../c",
            "/v1/..;/admin",
            "/v1/.;x/admin",
            "/v1/%2e%2e%3b/admin",
        ] {
            assert_eq!(normalize_path(path), None, "{path}");
        }
    }

    #[test]
    fn paths_of_rules() {
        let exact = |path: &str| Ok(PathPattern::Exact(path.to_owned()));
        let prefix = |path: &str| Ok(PathPattern::Prefix(path.to_owned()));
        for (path, pattern) in [
            ("", Ok(PathPattern::Any)),
            ("/", Ok(PathPattern::Any)),
            ("/*", Ok(PathPattern::Any)),
            ("*", Ok(PathPattern::Any)),
            ("/v1", exact("/v1")),
            ("/v1/", exact("/v1/")),
            ("/v1*", prefix("/v1")),
            ("/v1/*", prefix("/v1/")),
            ("/%761/../v2/*", prefix("/v2/")),
            ("/a/../", exact("/")),
            ("/v1/*/x", Err(InvalidPath::Star)),
            ("/v1/**", Err(InvalidPath::Star)),
            ("/v1/..*", Err(InvalidPath::DotPrefix)),
            ("/v1/%2e*", Err(InvalidPath::DotPrefix)),
            ("/v1%2*", Err(InvalidPath::Ambiguous)),
            ("/v1%2fx", Err(InvalidPath::Ambiguous)),
            ("v1", Err(InvalidPath::Ambiguous)),
        ] {
            assert_eq!(PathPattern::parse(path), pattern, "{path}");
        }
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own(path in "/([a-c./%;2eE5fF\\\\ ]|\\PC){0,24}") {
            if let Some(normalized) = normalize_path(&path) {
                prop_assert!(normalized.starts_with('/') && normalized.is_ascii());
                prop_assert!(normalized.split('/').all(|segment| segment != "." && segment != ".."));
                prop_assert_eq!(normalize_path(&normalized), Some(normalized));
            }
        }

        #[test]
        fn a_path_with_escapes_of_letters_is_the_same(path in "/[a-z./]{0,16}") {
            let escaped: String = path
                .chars()
                .map(|letter| match letter {
                    '/' => "/".to_owned(),
                    other => format!("%{:02x}", u32::from(other)),
                })
                .collect();
            prop_assert_eq!(normalize_path(&escaped), normalize_path(&path));
        }

        #[test]
        fn any_text_is_parsed_or_refused(path in "\\PC{0,32}") {
            let _ = PathPattern::parse(&path);
        }
    }
}
