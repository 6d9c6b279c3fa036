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
mod limits;
mod lines;
mod note;
mod pattern;
mod refusal;
mod stages;
mod words;

pub use expand::{Escape, ExpandError, Lookup, expand, expand_text};
pub use ignore::Ignore;
pub use instruction::{Argument, Command, Copy, Document, Instruction, Kind, Source};
pub use limits::{EXPANDED_MAX, INSTRUCTIONS_MAX, STAGES_MAX, TEXT_MAX};
pub use note::Note;
pub use pattern::{clean, is_pattern, matches};
pub use refusal::Refusal;
pub use stages::{Base, Origin, Plan, Stage};
