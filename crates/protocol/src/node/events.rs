//! The stream of node events.
//!
//! A stream begins with a [`Snapshot`] of the running sandboxes. After it, every sandbox that ends by itself is
//! reported; a node that cannot keep such a report ends the stream instead. A server that subscribes again, and
//! compares the sandboxes that it believed to run before it subscribed with the snapshot, therefore misses no end.
//!
//! Everything is bounded. Log entries wait on the node until a subscriber reads them, across subscriptions; when too
//! many wait, entries are dropped and counted, and a later entry of the same sandbox reports how many. Events already
//! on their way to a subscriber that is gone are lost. Of a state ([`DiskStops`], [`Throttles`]) only the latest is
//! kept.
//!
//! Samples are not part of the stream: the caller decides how often to take them ([`super::NodeApi::samples`]).

use std::fmt;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use model::id::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::guards::{DiskStops, Throttles};
use super::log::SandboxLog;

/// What a node reports to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", content = "detail", rename_all = "snake_case")]
pub enum NodeEvent {
    /// The running sandboxes. Always and only the first event of a stream.
    Snapshot(Snapshot),
    /// A sandbox begins to end by itself: its streams have to be aborted rather than closed. The caller of
    /// [`super::NodeApi::kill`] aborts them before.
    Ending(SandboxId),
    /// A sandbox ended by itself, and none of its processes is left.
    Exited(SandboxId),
    /// An entry for the log of a sandbox.
    Log(SandboxLog),
    /// Sandboxes were stopped from writing because the host's disk is nearly full, or may write again.
    DiskStops(DiskStops),
    /// Processor time of sandboxes was limited because they create many processes, or is not limited any more.
    Throttles(Throttles),
}

/// The state of a node at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Every sandbox that was started successfully and has not ended.
    pub sandboxes: Vec<LiveSandbox>,
    /// What the disk guard has done so far.
    pub disk_stops: DiskStops,
    /// What was done about sandboxes that create many processes.
    pub throttles: Throttles,
}

/// A sandbox in a [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Whether the sandbox is ending.
    pub is_ending: bool,
}

type PollNext = dyn FnMut(&mut Context<'_>) -> Poll<Option<NodeEvent>> + Send;

/// A stream of [`NodeEvent`]s. It ends when the node is gone, when a later subscription has replaced it, and when the
/// node could not keep the event of an end.
pub struct NodeEvents(Box<PollNext>);

impl NodeEvents {
    /// Creates a stream from a function that polls for the next event.
    pub fn from_poll(poll_next: impl FnMut(&mut Context<'_>) -> Poll<Option<NodeEvent>> + Send + 'static) -> Self {
        Self(Box::new(poll_next))
    }

    /// The next event; `None` at the end. Cancel-safe: no event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<NodeEvent> {
        poll_fn(|cx| (self.0)(cx)).await
    }

    /// The next event, if one is available.
    pub fn try_next(&mut self) -> Option<NodeEvent> {
        match (self.0)(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        }
    }
}

impl From<mpsc::Receiver<NodeEvent>> for NodeEvents {
    fn from(mut events: mpsc::Receiver<NodeEvent>) -> Self {
        Self::from_poll(move |cx| match events.try_recv() {
            Ok(event) => Poll::Ready(Some(event)),
            // Also registers the waker.
            Err(_) => events.poll_recv(cx),
        })
    }
}

impl fmt::Debug for NodeEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeEvents")
    }
}
