//! The agent as a process, in namespaces of its own, over its real sockets.
//!
//! Making the namespaces needs root; without it every test says so and passes. `AGENT_TESTS_MUST_RUN=1` makes that a
//! failure.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, its helpers included, and says why it is skipped"
)]

mod bounds;
mod client;
mod compose;
mod compressed_files;
mod compression;
mod control;
mod disk;
mod events;
mod files;
mod filesystem;
mod filesystem_watch;
mod gate;
mod metrics;
mod process;
mod process_input;
mod process_streams;
mod pty;
mod sandbox;
mod socket_memory;
mod spawner;
mod stream_input;
mod sys;
mod trust;
