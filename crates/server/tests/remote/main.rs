//! The suites of `it` that involve a node, with encoded byte streams between server and node, which proves that
//! everything they exchange can be serialized.

#![expect(clippy::disallowed_methods, reason = "clients of the tests are tasks of their own")]

use std::sync::Arc;

use protocol::node::NodeApi;
use testkit::node::FakeNode;
use testkit::remote::RemoteNode;

#[path = "../it/builds.rs"]
mod builds;
#[path = "../it/cancel.rs"]
mod cancel;
#[path = "../it/create.rs"]
mod create;
#[path = "../it/drain.rs"]
mod drain;
#[path = "../it/fork.rs"]
mod fork;
#[path = "../it/hostile.rs"]
mod hostile;
#[path = "../it/idempotency.rs"]
mod idempotency;
#[path = "../it/lifetime.rs"]
mod lifetime;
#[path = "../it/limits.rs"]
mod limits;
#[path = "../it/logs.rs"]
mod logs;
#[path = "../it/metrics.rs"]
mod metrics;
#[path = "../it/network.rs"]
mod network;
#[path = "../it/nodes.rs"]
mod nodes;
#[path = "../it/pause.rs"]
mod pause;
#[path = "../it/pause_limits.rs"]
mod pause_limits;
#[path = "../it/platform.rs"]
mod platform;
#[path = "../it/pool.rs"]
mod pool;
#[path = "../it/sandbox_metrics.rs"]
mod sandbox_metrics;
#[path = "../it/single.rs"]
mod single;
#[path = "../it/snapshots.rs"]
mod snapshots;
#[path = "../it/tls.rs"]
mod tls;
#[path = "../it/traffic.rs"]
mod traffic;
#[path = "../it/uploads.rs"]
mod uploads;

/// Connects the server to its node through encoded byte streams.
fn reached(node: &Arc<FakeNode>) -> Arc<dyn NodeApi> {
    RemoteNode::of(Arc::clone(node) as Arc<dyn NodeApi>)
}
