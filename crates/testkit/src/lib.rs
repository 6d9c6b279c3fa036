//! Code shared by the tests and benchmarks of several crates. Not part of a release.

#![expect(clippy::disallowed_methods, reason = "its tasks and processes end with the test")]

pub mod mounts;
pub mod node;
pub mod privileged;
