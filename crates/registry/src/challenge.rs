//! What a registry asks for: `WWW-Authenticate`.

/// A scheme that is supported. A token is preferred to a password.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

impl Challenge {
    pub(super) fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut realm = None;
        let mut service = None;
        let mut rest = rest;
        while let Some((name, value, next)) = parameter(rest) {
            match name.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                _ => {}
            }
            rest = next;
        }
        Some(Self::Bearer { realm: realm?, service })
    }
}

/// Splits the first parameter off: its name and value, and the others.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let text = text.trim_start_matches([' ', '\t', ',']);
    let (name, rest) = text.split_once('=')?;
    let Some(quoted) = rest.strip_prefix('"') else {
        let end = rest.find(',').unwrap_or(rest.len());
        return Some((name.trim(), rest[..end].trim().to_owned(), &rest[end..]));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((name.trim(), value, &quoted[index + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn challenges_are_parsed() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer {
                realm: realm.to_owned(),
                service: service.map(str::to_owned),
            })
        };
        for (text, expect) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            ("basic", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://a/t\",service=\"s, \\\"t\",scope=\"x:y:pull\"",
                bearer("https://a/t", Some("s, \"t")),
            ),
            (
                r#"Bearer realm="https://t.example/token",service="a b", scope="x=\"y""#,
                bearer("https://t.example/token", Some("a b")),
            ),
            ("BASIC realm=x", Some(Challenge::Basic)),
            ("BEARER Service=s, realm=https://a/t", bearer("https://a/t", Some("s"))),
            ("Bearer service=\"s\"", None),
            ("Bearer realm=\"open", None),
            ("Digest realm=x", None),
            ("", None),
        ] {
            assert_eq!(Challenge::parse(text), expect, "{text}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(text in ".{0,60}", rest in ".{0,60}") {
            let _ = Challenge::parse(&text);
            let _ = Challenge::parse(&format!("Bearer {rest}"));
        }
    }
}
