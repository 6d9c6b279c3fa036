//! What the tests and benches of several crates share. No release contains it.

#![expect(clippy::disallowed_methods, reason = "what it starts ends with the test")]

pub mod node;
pub mod privileged;
mod relay;
pub mod remote;
