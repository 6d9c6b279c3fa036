//! The control plane: the REST API, the lifecycle of every sandbox, and the port that serves both the API and sandbox
//! traffic.
//!
//! Invariants: the rows are authoritative and are changed first; memory (routes, deadlines) is rebuilt from them at
//! startup. Nodes are reached through [`protocol::node::NodeApi`] only. Work that changes a sandbox runs on a task of
//! its own, so that a client disconnect leaves no partial change. Stopping the server never touches a sandbox. Several
//! servers may share a database; each changes only the rows of the nodes whose leases it holds, and forwards what is about
//! others ([`others`]).
//!
//! Layers: [`sandboxes`], [`admission`], [`authentication`], [`templates`], [`builds`] and [`records`] are independent of HTTP and
//! have errors of their own. [`api`] reads requests, calls them, and translates results and errors to the API;
//! [`listen`] handles connections; [`operator`] serves the operator. [`server`] builds them all and wires them
//! together.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start tasks of their own"))]

mod admission;
mod agent;
pub mod api;
mod authentication;
mod builds;
mod chain;
pub mod chance;
pub mod clock;
mod creation;
mod dashboard;
mod deadlines;
mod exchange;
mod health;
mod ids;
mod injections;
pub mod keys;
mod layers;
pub mod lease;
mod listen;
mod mcp;
pub mod members;
mod metrics;
mod node;
mod node_pauses;
mod nodes;
pub mod operator;
mod others;
mod outcome;
mod parcels;
pub mod peers;
mod pool;
mod readers;
mod records;
mod repositories;
mod sandboxes;
pub mod seal;
mod secrets;
pub mod server;
pub mod sessions;
pub mod settings;
mod signature;
mod space;
mod start_command;
mod telemetry;
mod templates;
pub mod tls;
mod webhooks;
