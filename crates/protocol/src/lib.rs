//! The wire contracts: server ↔ node ([`node`]), host ↔ agent ([`agent`]), kernel ↔ agent ([`figures`]), kernel ↔ host
//! and agent ([`sockets`]), client ↔ agent ([`connect`], [`process`], [`filesystem`]) and server ↔ programs of a build
//! ([`image`]).
//!
//! Invariant: data and interfaces only. No policy, no state, no transport of its own.

pub mod agent;
pub mod connect;
pub mod figures;
pub mod filesystem;
pub mod image;
pub mod node;
pub mod parcel;
pub mod process;
pub mod signature;
pub mod sockets;
pub mod template_file;
