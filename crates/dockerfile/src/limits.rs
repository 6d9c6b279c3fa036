//! How large a Dockerfile, and what becomes of it, may be.

/// Maximum size of a Dockerfile, in bytes.
pub const TEXT_MAX: usize = 256 << 10;
/// Maximum number of stages.
pub const STAGES_MAX: usize = 64;
/// Maximum number of instructions.
pub const INSTRUCTIONS_MAX: usize = 1000;
/// Maximum length of a word after expansion, in bytes.
pub const EXPANDED_MAX: usize = 128 << 10;
