//! Proxies between sandboxes and clients: [`ingress`] forwards requests to ports of sandboxes.
//!
//! Invariant: both ends of every stream are untrusted. No input causes a panic, buffers are bounded, and a stream is only
//! closed cleanly if the other end closed it cleanly.

pub mod ingress;
pub mod percent;
