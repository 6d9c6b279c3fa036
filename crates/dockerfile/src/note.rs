//! What a Dockerfile has that is skipped, and at which line.

/// What was skipped, for the log of the build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The line, from 1.
    pub line: usize,
    /// What has no effect.
    pub message: String,
}
