//! Proxies between sandboxes and everything else: [`ingress`] forwards requests to ports of sandboxes, [`egress`] connects
//! them to the internet.
//!
//! Invariant: both ends of every stream are untrusted. No input causes a panic, buffers are bounded, and a stream is only
//! closed cleanly if the other end closed it cleanly.

pub mod egress;
pub mod ingress;
