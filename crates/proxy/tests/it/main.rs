//! The ingress between real sockets: a client on one side, servers on loopback behind a fake node on the other.

mod answers;
mod cut;
mod forward;
mod routing;
mod streams;
mod support;
