//! Splitting the rest of an instruction into words.

use crate::expand::Escape;

/// Words separated by blanks, where quotes and escapes keep blanks in a word and stay as they are.
pub(crate) fn quoted(text: &str, escape: Escape) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = None;
    let mut quote = None;
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        if start.is_none() {
            if c.is_whitespace() {
                continue;
            }
            start = Some(at);
        }
        if is_escaped {
            is_escaped = false;
        } else if c == escape.as_char() && quote != Some('\'') {
            is_escaped = true;
        } else if quote == Some(c) {
            quote = None;
        } else if quote.is_none() && (c == '"' || c == '\'') {
            quote = Some(c);
        } else if quote.is_none() && c.is_whitespace() {
            words.extend(start.take().map(|start| &text[start..at]));
        }
    }
    words.extend(start.map(|start| &text[start..]));
    words
}

/// A word without its quotes, where a dollar sign is a character like any other; none if a quote has no end.
pub(crate) fn unquoted(word: &str) -> Option<String> {
    let mut out = String::new();
    let mut quote = None;
    let mut rest = word.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, quote) {
            ('\'' | '"', None) => quote = Some(c),
            (_, Some(open)) if c == open => quote = None,
            ('\\', None) => out.extend(rest.next()),
            ('\\', Some('"')) => out.push(rest.next_if(|next| matches!(next, '"' | '$' | '\\')).unwrap_or(c)),
            _ => out.push(c),
        }
    }
    quote.is_none().then_some(out)
}

/// A list in JSON; none if the text is not one.
pub(crate) fn json(text: &str) -> Option<Vec<String>> {
    let text = text.trim();
    if !text.starts_with('[') {
        return None;
    }
    serde_json::from_str(text).ok()
}

/// The flags at the beginning of a text, as name and value, and what follows them.
pub(crate) fn flags(text: &str, escape: Escape) -> (Vec<(&str, Option<&str>)>, &str) {
    let mut flags = Vec::new();
    let mut rest = text.trim_start();
    while rest.starts_with("--") {
        let Some(word) = quoted(rest, escape).first().copied() else {
            break;
        };
        rest = rest[word.len()..].trim_start();
        if word == "--" {
            break;
        }
        let flag = &word[2..];
        flags.push(match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, None),
        });
    }
    (flags, rest)
}

/// A text in quotes of the shell, unless it needs none.
pub(crate) fn shell_quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_quotes() {
        let split = |text| quoted(text, Escape::Backslash);
        assert_eq!(split("  a  b\tc "), ["a", "b", "c"]);
        assert_eq!(split(r#"a="b c" 'd e'f \ g"#), [r#"a="b c""#, "'d e'f", r"\ g"]);
        assert_eq!(split(r#""a\" b" c"#), [r#""a\" b""#, "c"]);
        assert_eq!(split(r"'a\' b"), [r"'a\'", "b"]);
        assert_eq!(split("\"open a"), ["\"open a"]);
        assert!(split("  ").is_empty());
    }

    #[test]
    fn quotes_are_removed() {
        for (word, want) in [
            ("EOF", Some("EOF")),
            ("'E O'F", Some("E OF")),
            (r#""a\"\x$b""#, Some(r#"a"\x$b"#)),
            (r"\E\$\'", Some("E$'")),
            ("$A${B}", Some("$A${B}")),
            ("'a", None),
            ("\"a", None),
        ] {
            assert_eq!(unquoted(word).as_deref(), want, "{word}");
        }
    }

    #[test]
    fn flags_come_first() {
        let (found, rest) = flags("--a=b  --c --d=\"e f\" x --y", Escape::Backslash);
        assert_eq!(found, [("a", Some("b")), ("c", None), ("d", Some("\"e f\""))]);
        assert_eq!(rest, "x --y");
        assert_eq!(flags("-- --a", Escape::Backslash), (Vec::new(), "--a"));
    }

    #[test]
    fn only_what_needs_quotes_gets_them() {
        assert_eq!(shell_quoted("/bin/a-b"), "/bin/a-b");
        assert_eq!(shell_quoted(""), "''");
        assert_eq!(shell_quoted("it's"), "'it'\\''s'");
    }
}
