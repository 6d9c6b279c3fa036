//! Lines: directives, comments, continuations and heredocs.

use crate::expand::Escape;
use crate::limits::{INSTRUCTIONS_MAX, TEXT_MAX};
use crate::refusal::Refusal;
use crate::words::{quoted, unquoted};

/// Maximum number of heredocs of an instruction.
const HEREDOCS_MAX: usize = 64;

/// An instruction on one line, without its continuations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Line of the file at which the instruction begins, from 1.
    pub(crate) number: usize,
    pub(crate) text: String,
    pub(crate) heredocs: Vec<Heredoc>,
}

/// A text that follows an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heredoc {
    /// The word that begins and ends the heredoc.
    pub(crate) name: String,
    /// Whether the name has no quotes.
    pub(crate) is_expanded: bool,
    /// Whether tabs at the beginning of lines are left out.
    pub(crate) has_tabs_removed: bool,
    /// Text of the heredoc as it is in the file.
    pub(crate) raw: String,
}

impl Heredoc {
    /// The heredoc that begins with a word; none if the text is not one, or has more words than that.
    pub(crate) fn begin(word: &str) -> Option<Self> {
        let rest = word
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .strip_prefix("<<")?;
        let (has_tabs_removed, rest) = match rest.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        if rest.contains('<') || quoted(rest, Escape::Backslash) != [rest] {
            return None;
        }
        let name = unquoted(rest)?;
        (!name.is_empty()).then(|| Self {
            is_expanded: !rest.contains(['"', '\'', '\\']),
            name,
            has_tabs_removed,
            raw: String::new(),
        })
    }

    /// Content of the heredoc, without its leading tabs where `<<-` removes them.
    pub(crate) fn content(&self) -> String {
        if self.has_tabs_removed {
            self.raw
                .split_inclusive('\n')
                .map(|line| line.trim_start_matches('\t'))
                .collect()
        } else {
            self.raw.clone()
        }
    }
}

/// Splits a file into its instructions.
pub(crate) fn split(text: &str) -> Result<(Escape, Vec<Line>), Refusal> {
    if text.len() > TEXT_MAX {
        return Err(Refusal::new(
            1,
            format!("the Dockerfile is larger than {TEXT_MAX} bytes"),
        ));
    }
    if let Some(at) = text.find('\0') {
        let line = text[..at].matches('\n').count() + 1;
        return Err(Refusal::new(line, "contains NUL"));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let raw: Vec<&str> = text
        .split('\n')
        .map(|line| line.strip_suffix('\r').unwrap_or(line))
        .collect();
    let escape = directives(&raw)?;
    let mut lines = Vec::new();
    let mut at = 0;
    while at < raw.len() {
        let number = at + 1;
        let first = raw[at].trim_start();
        at += 1;
        if first.is_empty() || first.starts_with('#') {
            continue;
        }
        let mut text = String::new();
        let mut next = Some(first);
        while let Some(line) = next.take() {
            let Some(continued) = continued(line, escape) else {
                text.push_str(line);
                break;
            };
            text.push_str(continued);
            // Comments and empty lines do not end an instruction.
            while let Some(line) = raw.get(at) {
                at += 1;
                if !line.trim().is_empty() && !line.trim_start().starts_with('#') {
                    next = Some(line);
                    break;
                }
            }
        }
        let text = text.trim_end().to_owned();
        let heredocs = heredocs(&text, number, &raw, &mut at)?;
        if lines.len() == INSTRUCTIONS_MAX {
            return Err(Refusal::new(
                number,
                format!("more than {INSTRUCTIONS_MAX} instructions"),
            ));
        }
        if !text.is_empty() {
            lines.push(Line { number, text, heredocs });
        }
    }
    Ok((escape, lines))
}

/// The line without its continuation character; none if the next line does not continue it.
fn continued(line: &str, escape: Escape) -> Option<&str> {
    let escape = escape.as_char();
    let before = line.trim_end_matches([' ', '\t']).strip_suffix(escape)?;
    (!before.ends_with(escape)).then_some(before)
}

/// Directives are comments at the very beginning.
fn directives(lines: &[&str]) -> Result<Escape, Refusal> {
    let mut escape = None;
    let mut has_syntax = false;
    for (index, line) in lines.iter().enumerate() {
        let Some(comment) = line.trim().strip_prefix('#') else {
            break;
        };
        let Some((key, value)) = comment.split_once('=') else {
            break;
        };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        let is_again = match key.as_str() {
            "escape" => {
                let parsed = match value {
                    "\\" => Escape::Backslash,
                    "`" => Escape::Backtick,
                    _ => return Err(Refusal::new(index + 1, "the directive escape takes \\ or `")),
                };
                escape.replace(parsed).is_some()
            }
            "syntax" => std::mem::replace(&mut has_syntax, true),
            "check" => false,
            _ => break,
        };
        if is_again {
            return Err(Refusal::new(index + 1, format!("the directive {key} appears twice")));
        }
    }
    Ok(escape.unwrap_or_default())
}

/// The heredocs that follow an instruction.
fn heredocs(text: &str, number: usize, raw: &[&str], at: &mut usize) -> Result<Vec<Heredoc>, Refusal> {
    let keyword = text.split_whitespace().next().unwrap_or_default().to_ascii_uppercase();
    if !matches!(keyword.as_str(), "RUN" | "COPY" | "ADD") || !text.contains("<<") {
        return Ok(Vec::new());
    }
    let words = quoted(text, Escape::Backslash);
    let mut heredocs: Vec<Heredoc> = words.into_iter().filter_map(Heredoc::begin).collect();
    if heredocs.len() > HEREDOCS_MAX {
        return Err(Refusal::new(number, format!("more than {HEREDOCS_MAX} heredocs")));
    }
    for heredoc in &mut heredocs {
        loop {
            let Some(line) = raw.get(*at) else {
                let why = format!("the heredoc has no end: a line that is only {}", heredoc.name);
                return Err(Refusal::new(number, why));
            };
            *at += 1;
            let end = if heredoc.has_tabs_removed {
                line.trim_start_matches('\t')
            } else {
                line
            };
            if end == heredoc.name {
                break;
            }
            heredoc.raw.push_str(line);
            heredoc.raw.push('\n');
        }
    }
    Ok(heredocs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        let (_, lines) = split(text).unwrap();
        lines.into_iter().map(|line| (line.number, line.text)).collect()
    }

    #[test]
    fn comments_and_continuations() {
        let text = "\u{feff}# comment\n\n  FROM a \\\r\n  # inside\n\n   AS b\r\nRUN a\\\\\nRUN b \\  \n c\\\nd\n";
        let want = [(3, "FROM a    AS b"), (7, "RUN a\\\\"), (8, "RUN b  cd")];
        assert_eq!(texts(text), want.map(|(number, text)| (number, text.to_owned())));
        assert_eq!(texts("RUN a \\"), [(1, "RUN a".to_owned())]);
        assert!(texts("\n#\n \\\n").is_empty());
    }

    #[test]
    fn directives_are_at_the_beginning() {
        let (escape, lines) = split("# syntax=docker/dockerfile:1\n#escape = `\nRUN a `\n b\\\n").unwrap();
        assert_eq!((escape, lines[0].text.as_str()), (Escape::Backtick, "RUN a  b\\"));
        let (escape, _) = split("# comment\n# escape=`\nRUN a\n").unwrap();
        assert_eq!(escape, Escape::Backslash);
        assert_eq!(split("# escape=x\n").unwrap_err().line, 1);
        assert_eq!(split("# escape=`\n# escape=`\n").unwrap_err().line, 2);
    }

    #[test]
    fn heredocs_follow_their_instruction() {
        let text = "RUN <<A cat <<-'B' >x\n$one\n A\nA\n\ttwo\n\tB\nRUN after\n";
        let (_, lines) = split(text).unwrap();
        let [a, b] = &lines[0].heredocs[..] else {
            panic!("{lines:?}")
        };
        assert_eq!(
            (a.name.as_str(), a.is_expanded, a.raw.as_str()),
            ("A", true, "$one\n A\n")
        );
        assert_eq!((b.is_expanded, b.content().as_str()), (false, "two\n"));
        assert_eq!((lines[1].number, lines[1].text.as_str()), (7, "RUN after"));
        let error = split("FROM a\nRUN <<EOF\nx\n").unwrap_err();
        assert_eq!((error.line, error.message.contains("EOF")), (2, true));
        let name = |word| Heredoc::begin(word).map(|heredoc| (heredoc.name, heredoc.is_expanded));
        let named = |name: &str, is_expanded| Some((name.to_owned(), is_expanded));
        assert_eq!(name("<<EOF"), named("EOF", true));
        assert_eq!(name("3<<-\"E F\""), named("E F", false));
        assert_eq!(name("<<$EOF"), named("$EOF", true));
        assert_eq!(name("<<\\EOF"), named("EOF", false));
        for word in [
            "<<EOF bash",
            "<< EOF",
            "<<",
            "<<-",
            "<<''",
            "<<'EOF",
            "a<<EOF",
            "<<A <<B",
        ] {
            assert_eq!(name(word), None, "{word}");
        }
        assert_eq!(split("ENV a=<<b\nRUN a<<<b \"x <<y\"\n").unwrap().1.len(), 2);
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(split(&" ".repeat(TEXT_MAX + 1)).is_err());
        assert!(split(&"RUN a\n".repeat(INSTRUCTIONS_MAX + 1)).is_err());
        assert_eq!(split("a\nb\0").unwrap_err().line, 2);
    }
}
