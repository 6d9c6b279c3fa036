//! Variables and quotes in a word.

use crate::limits::EXPANDED_MAX;

/// How deep defaults of variables may be nested.
const DEPTH_MAX: usize = 16;

/// The character that escapes others and continues lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Escape {
    /// `\`.
    #[default]
    Backslash,
    /// A backtick, by a directive at the beginning of the file.
    Backtick,
}

impl Escape {
    /// The character.
    #[must_use]
    pub const fn as_char(self) -> char {
        match self {
            Self::Backslash => '\\',
            Self::Backtick => '`',
        }
    }
}

/// The value of a variable; none if it is not set. It is borrowed, so that naming a long value often costs nothing.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<&'a str>;

/// Why a word cannot be expanded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// A quote has no end.
    #[error("a quote {0} is not closed")]
    Quote(char),
    /// A brace has no end.
    #[error("a variable has no closing brace")]
    Brace,
    /// There is no such form.
    #[error("bad substitution ${{{0}}}: use ${{name}}, ${{name:-default}}, ${{name:+value}} or ${{name:?message}}")]
    Form(String),
    /// `${name:?message}` of a variable that is not set.
    #[error("variable {0} is not set: {1}")]
    Unset(String, String),
    /// The result is too long.
    #[error("longer than {EXPANDED_MAX} bytes after its variables were replaced")]
    TooLong,
    /// Defaults within defaults.
    #[error("variables are nested more than {DEPTH_MAX} levels deep")]
    TooDeep,
}

/// The word with its variables replaced and its quotes removed.
///
/// # Errors
/// When the word is malformed, or becomes too long.
pub fn expand(word: &str, escape: Escape, lookup: Lookup<'_>) -> Result<String, ExpandError> {
    let mut expansion = Expansion {
        rest: word,
        escape: escape.as_char(),
        has_quotes: true,
        lookup,
    };
    expansion.until(None, 0)
}

/// The text of a heredoc with its variables replaced. Quotes are characters like any other, and a backslash stands for
/// the character after it, whatever the directive `escape` says: as BuildKit has it.
///
/// # Errors
/// When a variable is malformed, or the text becomes too long.
pub fn expand_text(text: &str, lookup: Lookup<'_>) -> Result<String, ExpandError> {
    let mut expansion = Expansion {
        rest: text,
        escape: Escape::Backslash.as_char(),
        has_quotes: false,
        lookup,
    };
    expansion.until(None, 0)
}

struct Expansion<'a, 'b> {
    rest: &'a str,
    escape: char,
    has_quotes: bool,
    lookup: Lookup<'b>,
}

fn push(out: &mut String, text: &str) -> Result<(), ExpandError> {
    if out.len() + text.len() > EXPANDED_MAX {
        return Err(ExpandError::TooLong);
    }
    out.push_str(text);
    Ok(())
}

impl Expansion<'_, '_> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next();
        self.rest = chars.as_str();
        next
    }

    /// Up to a character outside of quotes, which is taken as well, or to the end of the word.
    fn until(&mut self, stop: Option<char>, depth: usize) -> Result<String, ExpandError> {
        if depth > DEPTH_MAX {
            return Err(ExpandError::TooDeep);
        }
        let mut out = String::new();
        while let Some(c) = self.peek() {
            if Some(c) == stop {
                self.next();
                return Ok(out);
            }
            match c {
                '\'' if self.has_quotes => self.single(&mut out)?,
                '"' if self.has_quotes => self.double(&mut out, depth)?,
                '$' => self.dollar(&mut out, depth)?,
                _ => {
                    self.next();
                    // The last character of a word escapes nothing.
                    let literal = if c == self.escape { self.next() } else { Some(c) };
                    if let Some(literal) = literal {
                        push(&mut out, literal.encode_utf8(&mut [0; 4]))?;
                    }
                }
            }
        }
        match stop {
            Some(_) => Err(ExpandError::Brace),
            None => Ok(out),
        }
    }

    fn single(&mut self, out: &mut String) -> Result<(), ExpandError> {
        self.next();
        let end = self.rest.find('\'').ok_or(ExpandError::Quote('\''))?;
        push(out, &self.rest[..end])?;
        self.rest = &self.rest[end + 1..];
        Ok(())
    }

    fn double(&mut self, out: &mut String, depth: usize) -> Result<(), ExpandError> {
        self.next();
        loop {
            let c = self.peek().ok_or(ExpandError::Quote('"'))?;
            if c == '$' {
                self.dollar(out, depth)?;
                continue;
            }
            self.next();
            if c == '"' {
                return Ok(());
            }
            let mut literal = c;
            if c == self.escape {
                match self.peek() {
                    Some(next) if next == '"' || next == '$' || next == self.escape => {
                        self.next();
                        literal = next;
                    }
                    Some(_) => {}
                    None => continue,
                }
            }
            push(out, literal.encode_utf8(&mut [0; 4]))?;
        }
    }

    /// The name of a variable: letters, digits and underscores, a number, or one special character.
    fn name(&mut self) -> &str {
        let text = self.rest;
        let length = match text.chars().next() {
            Some(c) if c.is_ascii_alphabetic() || c == '_' => text
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .unwrap_or(text.len()),
            Some(c) if c.is_ascii_digit() => text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()),
            Some('@' | '*' | '#' | '?' | '-' | '$' | '!') => 1,
            _ => 0,
        };
        let (name, rest) = text.split_at(length);
        self.rest = rest;
        name
    }

    fn dollar(&mut self, out: &mut String, depth: usize) -> Result<(), ExpandError> {
        self.next();
        let lookup = self.lookup;
        if self.peek() != Some('{') {
            let name = self.name();
            return if name.is_empty() {
                push(out, "$")
            } else {
                push(out, lookup(name).unwrap_or_default())
            };
        }
        self.next();
        let inner = self.rest;
        let shown = || {
            let end = inner.find('}').unwrap_or(inner.len());
            ExpandError::Form(inner[..end].chars().take(100).collect())
        };
        let name = self.name().to_owned();
        if name.is_empty() {
            return Err(if inner.is_empty() { ExpandError::Brace } else { shown() });
        }
        let mut form = self.next().ok_or(ExpandError::Brace)?;
        let mut value = lookup(&name);
        if form == '}' {
            return push(out, value.unwrap_or_default());
        }
        if form == ':' {
            value = value.filter(|value| !value.is_empty());
            form = self.next().ok_or(ExpandError::Brace)?;
        }
        if !matches!(form, '-' | '+' | '?') {
            return Err(shown());
        }
        let word = self.until(Some('}'), depth + 1)?;
        match (form, value) {
            ('-' | '?', Some(value)) => push(out, value),
            ('-', None) | ('+', Some(_)) => push(out, &word),
            ('?', None) => Err(ExpandError::Unset(name, word)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(name: &str) -> Option<&'static str> {
        match name {
            "A" => Some("one"),
            "E" => Some(""),
            "D" => Some("$A\"'"),
            _ => None,
        }
    }

    #[test]
    fn words_are_expanded_as_docker_does() {
        for (word, want) in [
            ("", ""),
            ("plain", "plain"),
            ("$A-${A}x", "one-onex"),
            ("$A_B.", "."),
            ("'$A'", "$A"),
            ("\"$A b\"", "one b"),
            ("\"a\\\"b\\$A\\x\\\\\"", "a\"b$A\\x\\"),
            ("\\$A\\b", "$Ab"),
            ("end\\", "end"),
            ("$D", "$A\"'"),
            ("${N:-x}", "x"),
            ("${N-x}${E-x}", "x"),
            ("${E:-x}", "x"),
            ("${A:+x}${E:+y}${E+z}${N+n}", "xz"),
            ("${N:-${M:-\"$A }\"}}", "one }"),
            ("${A:?no}", "one"),
            ("$", "$"),
            ("$ $.", "$ $."),
            ("$1x", "x"),
            ("é$A", "éone"),
            ("a#b", "a#b"),
        ] {
            assert_eq!(expand(word, Escape::Backslash, &vars).as_deref(), Ok(want), "{word}");
        }
        assert_eq!(expand("`$A\\", Escape::Backtick, &vars).as_deref(), Ok("$A\\"));
    }

    #[test]
    fn texts_keep_their_quotes() {
        for (text, want) in [
            ("a \"$A\" '$A' ${A}\n", "a \"one\" 'one' one\n"),
            ("it's\n", "it's\n"),
            ("{\"a\": \"b\\\\\"c\"}", "{\"a\": \"b\\\"c\"}"),
            ("\\$A \\\\ \\x", "$A \\ x"),
            ("\\\n", "\n"),
            ("${N:-'x'}", "'x'"),
            ("`", "`"),
        ] {
            assert_eq!(expand_text(text, &vars).as_deref(), Ok(want), "{text}");
        }
        assert_eq!(expand_text("${A", &vars), Err(ExpandError::Brace));
    }

    #[test]
    fn malformed_words_are_errors() {
        for (word, want) in [
            ("'a", "quote '"),
            ("\"a", "quote \""),
            ("${A", "closing brace"),
            ("${", "closing brace"),
            ("${A:", "closing brace"),
            ("${A:-x", "closing brace"),
            ("${}", "bad substitution"),
            ("${:x}", "bad substitution"),
            ("${A#x}", "bad substitution ${A#x}"),
            ("${N:?give it}", "variable N is not set: give it"),
        ] {
            let error = expand(word, Escape::Backslash, &vars).unwrap_err().to_string();
            assert!(error.contains(want), "{word}: {error}");
        }
        let deep = "${N:-".repeat(DEPTH_MAX + 2);
        assert_eq!(expand(&deep, Escape::Backslash, &vars), Err(ExpandError::TooDeep));
        let value = "x".repeat(1 << 10);
        let long = |_: &str| Some(value.as_str());
        assert_eq!(
            expand(&"$A".repeat(129), Escape::Backslash, &long),
            Err(ExpandError::TooLong)
        );
    }
}
