//! Benchmarks of a running platform, for `ringfence bench` and for `xtask`: a client of the HTTP API, untrimmed statistics,
//! tables.
//!
//! The client sends the requests of an SDK and is independent of internals of the platform.

pub mod client;
pub mod process;
pub mod stats;
pub mod table;
