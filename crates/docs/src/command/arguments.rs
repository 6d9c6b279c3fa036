//! Options of commands: `-n 3`, `-n3`, `--lines 3`, `--lines=3`, flags in one word (`-il`), and `--` before what is no
//! option.

use super::error::{CommandError, shown};

/// One argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Argument<'a> {
    Short(char),
    Long(&'a str),
    Positional(String),
}

/// Iterates over arguments. A value is taken by the caller that knows that an option has one.
#[derive(Debug)]
pub(super) struct Arguments<'a> {
    command: &'static str,
    usage: &'static str,
    words: std::slice::Iter<'a, String>,
    /// The rest of a word of short options.
    cluster: &'a str,
    /// The value after `=` of a long option.
    value: Option<&'a str>,
    only_positional: bool,
}

impl<'a> Arguments<'a> {
    pub(super) fn new(command: &'static str, words: &'a [String], usage: &'static str) -> Self {
        Self {
            command,
            usage,
            words: words.iter(),
            cluster: "",
            value: None,
            only_positional: false,
        }
    }

    pub(super) fn next(&mut self) -> Option<Argument<'a>> {
        self.value = None;
        if let Some(flag) = self.cluster.chars().next() {
            self.cluster = &self.cluster[flag.len_utf8()..];
            return Some(Argument::Short(flag));
        }
        loop {
            let word = self.words.next()?.as_str();
            if self.only_positional || word == "-" || !word.starts_with('-') {
                return Some(Argument::Positional(word.to_owned()));
            }
            if word == "--" {
                self.only_positional = true;
                continue;
            }
            if let Some(long) = word.strip_prefix("--") {
                let (name, value) = match long.split_once('=') {
                    Some((name, value)) => (name, Some(value)),
                    None => (long, None),
                };
                self.value = value;
                return Some(Argument::Long(name));
            }
            let flag = word[1..].chars().next()?;
            self.cluster = &word[1 + flag.len_utf8()..];
            return Some(Argument::Short(flag));
        }
    }

    /// The value of the option that was just returned.
    pub(super) fn value(&mut self, option: &str) -> Result<String, CommandError> {
        if let Some(value) = self.value.take() {
            return Ok(value.to_owned());
        }
        if !self.cluster.is_empty() {
            let value = std::mem::take(&mut self.cluster);
            return Ok(value.strip_prefix('=').unwrap_or(value).to_owned());
        }
        let next = self.words.next().cloned();
        next.ok_or_else(|| self.refuse(format!("{option} needs a value")))
    }

    /// The value of an option, a number from `least`. Larger numbers than there are lines are all the same.
    pub(super) fn number(&mut self, option: &str, least: usize) -> Result<usize, CommandError> {
        let value = self.value(option)?;
        let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| value.parse::<u32>().map_or(u32::MAX, |number| number) as usize);
        number
            .filter(|number| *number >= least)
            .ok_or_else(|| self.refuse(format!("{option} must be a number from {least}, not {}", shown(&value))))
    }

    /// The number of `-N`, of which the first digit was just returned.
    pub(super) fn digits(&mut self, first: char) -> Result<usize, CommandError> {
        let rest = std::mem::take(&mut self.cluster);
        if !rest.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.refuse(format!("-{first}{} is not a number of lines", shown(rest))));
        }
        Ok(format!("{first}{rest}")
            .parse::<u32>()
            .map_or(u32::MAX, |number| number) as usize)
    }

    pub(super) fn unknown(&self, argument: &Argument<'_>) -> CommandError {
        let option = match argument {
            Argument::Short(flag) => format!("-{}", flag.escape_debug()),
            Argument::Long(name) => format!("--{}", shown(name)),
            Argument::Positional(word) => shown(word),
        };
        self.refuse(format!("unknown option {option}"))
    }

    fn refuse(&self, why: impl std::fmt::Display) -> CommandError {
        CommandError::new(format!("{}: {why}; {}", self.command, self.usage))
    }
}
