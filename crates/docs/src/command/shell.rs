//! Splits a command into words by the quoting rules of a POSIX shell. What a shell would do beyond that is refused with
//! the reason, never ignored: a client that pipes must not take the whole output for the filtered one.

/// Why a command cannot be split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SplitError {
    #[error(
        "unsupported {what} `{char}`: send one command at a time, and put the character in single quotes to mean itself"
    )]
    Operator { what: &'static str, char: char },
    #[error(
        "file name patterns are not expanded (`{0}`): name files, or put the character in single quotes to mean itself"
    )]
    Glob(char),
    #[error("a {0} quote is not closed")]
    Unclosed(&'static str),
    #[error("a backslash at the end of the command escapes nothing")]
    Backslash,
    #[error("control characters are not supported")]
    Control,
}

fn operator(char: char) -> Option<SplitError> {
    let what = match char {
        '|' => "pipe",
        '<' | '>' => "redirection",
        ';' | '&' => "command separator",
        '(' | ')' => "subshell",
        '`' | '$' => "substitution",
        '*' | '?' | '[' => return Some(SplitError::Glob(char)),
        _ => return None,
    };
    Some(SplitError::Operator { what, char })
}

/// The words of a command.
pub(super) fn split(command: &str) -> Result<Vec<String>, SplitError> {
    let command = command.trim_matches([' ', '\t', '\n', '\r']);
    if command.chars().any(|char| char.is_control() && char != '\t') {
        return Err(SplitError::Control);
    }
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = command.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            ' ' | '\t' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('\'') => break,
                        Some(char) => word.push(char),
                        None => return Err(SplitError::Unclosed("single")),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some(escaped @ ('"' | '\\' | '$' | '`')) => word.push(escaped),
                            Some(other) => word.extend(['\\', other]),
                            None => return Err(SplitError::Unclosed("double")),
                        },
                        // As in a shell, a `$` that begins no name is itself.
                        Some('$') if chars.peek().is_none_or(|next| !begins_substitution(*next)) => word.push('$'),
                        Some(char @ ('$' | '`')) => {
                            return Err(SplitError::Operator {
                                what: "substitution",
                                char,
                            });
                        }
                        Some(char) => word.push(char),
                        None => return Err(SplitError::Unclosed("double")),
                    }
                }
            }
            '\\' => match chars.next() {
                Some(escaped) => word.get_or_insert_default().push(escaped),
                None => return Err(SplitError::Backslash),
            },
            '$' if chars
                .peek()
                .is_none_or(|next| !begins_substitution(*next) && !matches!(next, '\'' | '"')) =>
            {
                word.get_or_insert_default().push('$');
            }
            char => match operator(char) {
                Some(error) => return Err(error),
                None => word.get_or_insert_default().push(char),
            },
        }
    }
    words.extend(word);
    Ok(words)
}

fn begins_substitution(next: char) -> bool {
    next.is_ascii_alphanumeric() || matches!(next, '_' | '{' | '(' | '@' | '*' | '#' | '?' | '-' | '$' | '!')
}

#[cfg(test)]
mod tests {
    use super::{SplitError, split};

    #[test]
    fn words() {
        for (command, expected) in [
            ("", &[] as &[&str]),
            ("  ls\t/ \n", &["ls", "/"]),
            ("rg 'a | b' /x", &["rg", "a | b", "/x"]),
            (r#"rg "a \"b\" \d \\ $" x"#, &["rg", r#"a "b" \d \ $"#, "x"]),
            (r"rg a\ b\|c", &["rg", "a b|c"]),
            (r"rg foo\.bar$", &["rg", "foo.bar$"]),
            ("rg ''", &["rg", ""]),
            ("rg a'b'\"c\"", &["rg", "abc"]),
            ("rg {a,b} ~ #x =", &["rg", "{a,b}", "~", "#x", "="]),
            ("rg 'é\u{1F980}'", &["rg", "é\u{1F980}"]),
        ] {
            assert_eq!(split(command).expect(command), expected, "{command}");
        }
    }

    #[test]
    fn powers_of_a_shell_are_refused() {
        let operator = |what, char| SplitError::Operator { what, char };
        for (command, error) in [
            ("ls | wc", operator("pipe", '|')),
            ("ls > /x", operator("redirection", '>')),
            ("cat < /x", operator("redirection", '<')),
            ("ls; ls", operator("command separator", ';')),
            ("ls && ls", operator("command separator", '&')),
            ("(ls)", operator("subshell", '(')),
            ("ls $(ls)", operator("substitution", '$')),
            ("ls $HOME", operator("substitution", '$')),
            ("ls \"$HOME\"", operator("substitution", '$')),
            ("ls `ls`", operator("substitution", '`')),
            ("ls \"`ls`\"", operator("substitution", '`')),
            ("cat /*.md", SplitError::Glob('*')),
            ("cat /?", SplitError::Glob('?')),
            ("cat /[a]", SplitError::Glob('[')),
            ("ls 'a", SplitError::Unclosed("single")),
            ("ls \"a", SplitError::Unclosed("double")),
            ("ls \"a\\", SplitError::Unclosed("double")),
            ("ls \\", SplitError::Backslash),
            ("ls\nls", SplitError::Control),
            ("ls \u{0}", SplitError::Control),
        ] {
            assert_eq!(split(command), Err(error), "{command}");
        }
    }
}
