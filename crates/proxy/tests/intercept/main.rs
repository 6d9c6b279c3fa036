//! The egress gateway between real sockets: programs of a sandbox on one side, servers with TLS on the other.

#![expect(
    clippy::disallowed_methods,
    reason = "clients and servers of the tests are tasks of their own"
)]
#![expect(clippy::unwrap_used, reason = "a test fails where something does")]

#[path = "../it/clock.rs"]
mod clock;
mod forward;
mod hostile;
mod hostile_http2;
mod masking;
mod support;
mod upstream;
