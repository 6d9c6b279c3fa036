//! The suites of `it` that involve a node, with the link of two machines between server and node: everything they exchange
//! is encoded, and crosses one multiplexed connection.

#![expect(clippy::disallowed_methods, reason = "clients of the tests are tasks of their own")]

use std::sync::Arc;

use link::{Calls, RemoteNode};
use protocol::node::NodeApi;
use testkit::node::FakeNode;
use tokio_util::sync::CancellationToken;

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
#[path = "../it/lost_answers.rs"]
mod lost_answers;
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

/// Buffer of the connection in each direction, in bytes.
const CONNECTION_BYTES: usize = 64 * 1024;

/// Connects the server to its node through a link.
fn reached(node: &Arc<FakeNode>) -> Arc<dyn NodeApi> {
    // Tests go on once an event was used.
    let remote = Arc::new(RemoteNode::default().in_lockstep());
    let (near, far) = tokio::io::duplex(CONNECTION_BYTES);
    let node = Arc::clone(node) as Arc<dyn NodeApi>;
    tokio::spawn(async move { link::serve(node, far, &Calls::on(tokio::runtime::Handle::current())).await });
    let carried = Arc::clone(&remote);
    tokio::spawn(async move { carried.carry(near, &CancellationToken::new()).await });
    remote
}
