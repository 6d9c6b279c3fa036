//! What a node reports, in one stream.
//!
//! A stream begins with a [`Snapshot`] of what lives. After it, whatever ends unasked is reported; a node that cannot
//! keep such a report ends the stream instead. So who subscribes again and compares what it believed to run, before it
//! asked, with the snapshot has missed no end.
//!
//! Nothing here is unbounded. Entries of logs wait on the node until somebody takes them, from one subscription to the
//! next; when too many wait, entries are dropped and counted, and a later entry of the same sandbox says how many. What
//! was already on its way to a subscriber that is gone is lost. Of a state ([`DiskStops`]) only the newest is kept.
//!
//! Samples are not reported but asked for ([`super::NodeApi::samples`]): how often is for the caller to decide.

use std::fmt;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use model::id::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{DiskStops, SandboxLog};

/// Something that a node reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", content = "detail", rename_all = "snake_case")]
pub enum NodeEvent {
    /// What lives. The first event of a stream, and only that.
    Snapshot(Snapshot),
    /// A sandbox begins to end without being asked to: its streams are to be cut rather than ended. Who asks for an end
    /// cuts them before.
    Ending(SandboxId),
    /// A sandbox ended without being asked to, and none of its processes runs.
    Exited(SandboxId),
    /// Something for the log of a sandbox.
    Log(SandboxLog),
    /// The disk of the host was kept from being filled, or there is room again.
    DiskStops(DiskStops),
}

/// What lives on a node at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Every sandbox whose start was answered and that has not ended.
    pub sandboxes: Vec<LiveSandbox>,
    /// What was done to keep the host's disk from being filled.
    pub disk_stops: DiskStops,
}

/// A sandbox in a [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveSandbox {
    /// Which one.
    pub id: SandboxId,
    /// Whether it begins to end.
    pub is_ending: bool,
}

type PollNext = dyn FnMut(&mut Context<'_>) -> Poll<Option<NodeEvent>> + Send;

/// A stream of [`NodeEvent`]s. It ends when the node is gone, when a later subscription has taken its place, and when
/// the node could not keep the report of an end.
pub struct NodeEvents(Box<PollNext>);

impl NodeEvents {
    /// A stream out of a function that polls for the next event.
    pub fn from_poll(poll_next: impl FnMut(&mut Context<'_>) -> Poll<Option<NodeEvent>> + Send + 'static) -> Self {
        Self(Box::new(poll_next))
    }

    /// The next event; `None` at the end. Nothing is lost when the call is dropped.
    pub async fn next(&mut self) -> Option<NodeEvent> {
        poll_fn(|cx| (self.0)(cx)).await
    }

    /// The next event if it is there already.
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
            // Registers for the next one, too.
            Err(_) => events.poll_recv(cx),
        })
    }
}

impl fmt::Debug for NodeEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeEvents")
    }
}
