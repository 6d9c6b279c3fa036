//! Dockerfiles as text: parsed into stages of instructions, with the rules of Docker for lines, words and variables, and
//! `.dockerignore` files.
//!
//! What cannot be honoured is refused with its line, before anything runs.
//!
//! Invariant: this crate is pure and total. There is no I/O, and time and memory are bounded by the size of a text, which
//! is bounded itself.

mod expand;
mod ignore;
mod instruction;
mod lines;
mod pattern;
mod stages;
mod words;

pub use expand::{Escape, ExpandError, Lookup, expand, expand_text};
pub use ignore::Ignore;
pub use instruction::{Argument, Command, Copy, Document, Instruction, Kind, Source};
pub use pattern::{clean, is_pattern, matches};
pub use stages::{Base, Origin, Plan, Stage};

/// Maximum size of a Dockerfile, in bytes.
pub const TEXT_MAX: usize = 256 << 10;
/// Maximum number of stages.
pub const STAGES_MAX: usize = 64;
/// Maximum number of instructions.
pub const INSTRUCTIONS_MAX: usize = 1000;
/// Maximum length of a word after expansion, in bytes.
pub const EXPANDED_MAX: usize = 128 << 10;

/// Why a Dockerfile is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct Refusal {
    /// The line, from 1.
    pub line: usize,
    /// The reason, and what to do.
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

/// What was skipped, for the log of the build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The line, from 1.
    pub line: usize,
    /// What has no effect.
    pub message: String,
}
