//! The server as its clients meet it: over sockets, with a database in a temporary directory and a fake node.

mod auth;
mod connections;
mod create;
mod drain;
mod errors;
mod idempotency;
mod keys;
mod lifetime;
mod limits;
mod list;
mod logs;
mod metrics;
mod openapi;
mod operations;
mod platform;
mod sandbox_metrics;
mod single;
mod tls;
mod traffic;
