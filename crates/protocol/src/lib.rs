//! The wire contracts: server ↔ node ([`node`]) and host ↔ agent ([`agent`]).
//!
//! Invariant: data and seams only. No policy, no state, no transport of its own.

pub mod agent;
pub mod node;
pub mod signature;
