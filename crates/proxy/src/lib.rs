//! Proxies between sandboxes and everything else: [`ingress`] carries requests from outside to a port in a sandbox.
//!
//! Invariant: both ends of every stream are hostile. Nothing here panics on what it reads, buffers without a bound, or
//! ends a stream cleanly that the other end did not end cleanly.

pub mod ingress;
pub mod percent;
