//! The error that a client receives when its command is refused or fails, and how its own words appear in it.

/// Why a command was refused or failed; the text is what the client gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommandError(String);

impl CommandError {
    pub(super) fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

/// A word of the client, as it appears in a message: on one line and not too long.
pub(super) fn shown(word: &str) -> String {
    let mut short: String = word.chars().take(80).flat_map(char::escape_debug).collect();
    if word.chars().nth(80).is_some() {
        short.push('…');
    }
    short
}
