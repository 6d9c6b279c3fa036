//! Why a Dockerfile is refused, and at which line.

/// Why a Dockerfile is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct Refusal {
    /// The line, from 1.
    pub line: usize,
    /// Why the Dockerfile is refused, and what to change.
    pub message: String,
}

impl Refusal {
    /// A refusal of a line.
    #[must_use]
    pub fn new(line: usize, message: impl Into<String>) -> Self {
        Self {
            line,
            message: message.into(),
        }
    }
}
