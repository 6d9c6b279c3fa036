//! How a running platform is measured, for `ringfence bench` and for the benches of developers: a client on the
//! platform's own interface, untrimmed statistics, tables.
//!
//! It asks for what the SDKs ask for and knows nothing of the platform's inside.

pub mod client;
pub mod process;
pub mod stats;
pub mod table;
