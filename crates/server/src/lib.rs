//! The control plane: the REST API, the life of every sandbox, and the one port that serves both the API and the
//! traffic of sandboxes.
//!
//! Invariants: rows are the truth and are changed first; memory (routes, deadlines) is rebuilt from them at the start.
//! Nodes are reached through [`protocol::node::NodeApi`] only. Work that changes a sandbox runs on a task of its own,
//! so that a client that hangs up halfway leaves nothing half done. Stopping the server never touches a sandbox. Several
//! servers may share a database; each changes the rows of its own node only, whose lease it has.
//!
//! What decides lies below what speaks: [`sandboxes`], [`admission`], [`authentication`], [`templates`] and [`records`]
//! know no HTTP and have errors of their own. [`api`] reads requests, asks them, and says in the words of the API what
//! came of it; [`listen`] carries bytes; [`operator`] is the other door. [`server`] makes them all and hands to each
//! what it needs.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start tasks of their own"))]

mod admission;
pub mod api;
mod authentication;
mod chain;
pub mod clock;
mod deadlines;
pub mod keys;
pub mod lease;
mod listen;
mod metrics;
mod node;
pub mod operator;
mod outcome;
pub mod peers;
mod records;
mod sandboxes;
pub mod server;
pub mod settings;
mod space;
mod templates;
pub mod tls;
