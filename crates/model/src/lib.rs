//! The vocabulary of the platform: ids, limits, resources, log levels and the lifecycle of a sandbox.
//!
//! Invariant: this crate is pure and total. No I/O, no async, no clock, no SQL, no HTTP: randomness and time are
//! arguments, and every function returns for every input.

pub mod backoff;
pub mod capacity;
pub mod egress_proxy;
pub mod event;
pub mod header;
pub mod header_rules;
pub mod id;
pub mod injection;
pub mod lifecycle;
pub mod limits;
pub mod log;
pub mod network;
pub mod placement;
pub mod repository;
pub mod resources;
pub mod sandbox;
pub mod secret;
pub mod template;
