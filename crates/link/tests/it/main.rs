//! The link between a server and a node, with a fake node behind it: real sockets and TLS, and peers that do not keep to the
//! rules.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "in a test an error is a failure, and its place is what matters; the tests have tasks and a clock of their own"
)]

mod calls;
mod peers;
mod place;
mod raw;
mod servers;
