//! Patterns of sources: `*`, `?`, `[a-z]`, `[^a-z]` and an escaped character, within one component of a path.

/// Whether a text has a character that is special in a pattern.
#[must_use]
pub fn is_pattern(text: &[u8]) -> bool {
    text.iter().any(|byte| matches!(byte, b'*' | b'?' | b'[' | b'\\'))
}

/// A source without empty components, `.` and `..`; none if it leads out of the directory that it is in. As in Docker,
/// `a/../b` is `b` whether or not there is an `a`.
#[must_use]
pub fn clean(source: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in source.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Whether a name of a file matches a pattern. A malformed pattern matches nothing.
///
/// Time is at most the product of both lengths: a star that failed is never tried again.
#[must_use]
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut pattern_at, mut name_at) = (0, 0);
    // Where the last star is, and how much of the name it has taken.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern_at == pattern.len() && name_at == name.len() {
            return true;
        }
        if pattern.get(pattern_at) == Some(&b'*') {
            star = Some((pattern_at + 1, name_at));
            pattern_at += 1;
            continue;
        }
        let step = name
            .get(name_at)
            .and_then(|_| one(&pattern[pattern_at..], &name[name_at..]));
        if let Some((used, taken)) = step {
            pattern_at += used;
            name_at += taken;
            continue;
        }
        match star {
            Some((after, taken)) if taken < name.len() => {
                star = Some((after, taken + 1));
                (pattern_at, name_at) = (after, taken + 1);
            }
            _ => return false,
        }
    }
}

/// The length of the character at the beginning of a text.
fn width(text: &[u8]) -> usize {
    let length = match text.first() {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => 1,
    };
    match text.get(..length) {
        Some(part) if std::str::from_utf8(part).is_ok() => length,
        _ => 1,
    }
}

/// Matches one element of a pattern with the beginning of a name; how much of both was used.
fn one(pattern: &[u8], name: &[u8]) -> Option<(usize, usize)> {
    let taken = width(name);
    let c = &name[..taken];
    match pattern.first()? {
        b'?' => Some((1, taken)),
        b'[' => class(pattern, c).map(|used| (used, taken)),
        b'\\' => (pattern.get(1)? == name.first()?).then_some((2, 1)),
        literal => (*literal == name[0]).then_some((1, 1)),
    }
}

/// Matches a class; its length.
fn class(pattern: &[u8], c: &[u8]) -> Option<usize> {
    let mut at = 1;
    let is_negated = matches!(pattern.get(at), Some(b'^' | b'!'));
    at += usize::from(is_negated);
    let mut is_in = false;
    let mut count = 0;
    loop {
        if pattern.get(at) == Some(&b']') && count > 0 {
            return (is_in != is_negated).then_some(at + 1);
        }
        let low = member(pattern, &mut at)?;
        let mut high = low;
        if pattern.get(at) == Some(&b'-') && pattern.get(at + 1) != Some(&b']') {
            at += 1;
            high = member(pattern, &mut at)?;
        }
        // The order of UTF-8 is that of the characters.
        is_in |= low <= c && c <= high;
        count += 1;
    }
}

fn member<'a>(pattern: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    if pattern.get(*at) == Some(&b'\\') {
        *at += 1;
    }
    let rest = pattern.get(*at..).filter(|rest| !rest.is_empty())?;
    let length = width(rest);
    *at += length;
    Some(&rest[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_cleaned_before_anything_is_looked_for() {
        for (source, want) in [
            ("a", Some("a")),
            ("./app/../file", Some("file")),
            ("/a//b/./c/", Some("a/b/c")),
            ("*/../b", Some("b")),
            ("a/..", Some("")),
            (".", Some("")),
            ("...", Some("...")),
            ("..", None),
            ("a/../../b", None),
            ("/../a", None),
        ] {
            assert_eq!(clean(source).as_deref(), want, "{source}");
        }
    }

    #[test]
    fn patterns_match_names() {
        for (pattern, name, want) in [
            ("", "", true),
            ("a", "a", true),
            ("a", "b", false),
            ("*", "", true),
            ("*", "anything", true),
            ("*.txt", "a.txt", true),
            ("*.txt", "a.txt.gz", false),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxbyy", false),
            ("?", "é", true),
            ("?", "ab", false),
            ("[a-c]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[^a-c]x", "dx", true),
            ("[!a-c]x", "ax", false),
            ("[a-]", "-", true),
            ("[]a]", "]", true),
            ("[\\]]", "]", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("[", "[", false),
            ("[a", "a", false),
            ("\\", "\\", false),
            ("[à-é]", "è", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), want, "{pattern} {name}");
        }
        // Exponential in a matcher that tries every combination.
        assert!(!matches(&b"*a".repeat(1000), &b"a".repeat(999)));
    }
}
