//! The link between a server and a node, with a fake node behind it: real sockets and TLS, and peers that do not keep to the
//! rules.

#![expect(clippy::disallowed_methods, reason = "the tests have tasks and a clock of their own")]

mod calls;
mod peers;
mod place;
mod raw;
