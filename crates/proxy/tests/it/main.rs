//! The ingress between real sockets: a client on one side, servers on loopback behind a fake node on the other.

#![expect(
    clippy::disallowed_methods,
    reason = "clients and servers of the tests are tasks of their own"
)]

mod answers;
mod clock;
mod cut;
mod forward;
mod grpc;
mod hostile;
mod hostile_grpc;
mod https_ports;
mod reuse;
mod routing;
mod streams;
mod support;
