//! Tests of the server from a client's view: over sockets, with a database in a temporary directory and a fake node.

#![expect(clippy::disallowed_methods, reason = "clients of the tests are tasks of their own")]

use std::sync::Arc;

use protocol::node::NodeApi;
use testkit::node::FakeNode;

mod auth;
mod builds;
mod cancel;
mod cancelled_pauses;
mod connections;
mod copies;
mod create;
mod dashboard;
mod drain;
mod draining;
mod errors;
mod events;
mod fork;
mod frozen;
mod hostile;
mod idempotency;
mod injections;
mod kept;
mod keys;
mod lifetime;
mod limits;
mod list;
mod logs;
mod lost_answers;
mod mcp;
mod metrics;
mod network;
mod node_deadlines;
mod nodes;
mod not_built;
mod openapi;
mod operations;
mod operator_elsewhere;
mod pause;
mod pause_limits;
mod permits;
mod platform;
mod pool;
#[expect(
    clippy::unwrap_used,
    dead_code,
    reason = "it is that of the tests of the store, which stop it in between"
)]
#[path = "../../../store/tests/it/postgres.rs"]
mod postgres;
mod ready_made;
mod repositories;
mod restores;
mod sandbox_metrics;
mod secrets;
mod servers;
mod servers_apart;
mod several;
mod signed;
mod single;
mod snapshots;
mod space;
mod tags;
mod team_metrics;
mod templates;
mod tls;
mod traffic;
mod uploads;
mod webhooks;

/// Connects the server to its node in the same process. The suite `remote` connects them through encoded streams.
fn reached(node: &Arc<FakeNode>) -> Arc<dyn NodeApi> {
    Arc::clone(node) as Arc<dyn NodeApi>
}
