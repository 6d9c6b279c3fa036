//! The control plane: the REST API, the life of every sandbox, and the one port that serves both the API and the
//! traffic of sandboxes.
//!
//! Invariants: rows are the truth and are changed first; memory (routes, deadlines) is rebuilt from them at the start.
//! Nodes are reached through [`protocol::node::NodeApi`] only. Work that changes a sandbox runs on a task of its own,
//! so that a client that hangs up halfway leaves nothing half done. Stopping the server never touches a sandbox.

pub mod api;
mod capacity;
pub mod clock;
mod expiry;
mod idempotency;
pub mod keys;
mod lifecycle;
mod listen;
mod live;
mod metrics;
mod quota;
mod rate;
mod records;
pub mod server;
pub mod settings;
pub mod tls;
