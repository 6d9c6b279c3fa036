//! The journal: node events that are kept until the server has received them.
//!
//! One queue for all sandboxes, which outlives a subscription. Adding an event never waits. A log entry that finds the
//! queue full is dropped and counted by its [`crate::log_writer::LogWriter`]. The end of a sandbox that finds it full
//! ends the subscription: the next one begins with a snapshot, so the server learns of the loss.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use protocol::node::{DiskStops, NodeEvent, NodeEvents, SandboxLog, Snapshot, Throttles};

/// Maximum number of queued log entries. With entries of the largest size this is about 16 MiB.
const LOGS: usize = 4096;
/// Maximum number of queued events about ends of sandboxes.
const ENDS: usize = 1024;

/// The node events of all sandboxes, read by the last subscription.
#[derive(Debug)]
pub(crate) struct Journal {
    logs_max: usize,
    ends_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<NodeEvent>,
    /// Number of log entries in the queue.
    logs: usize,
    disk_stops: DiskStops,
    /// Whether `disk_stops` has not been sent to the subscriber yet.
    has_new_disk_stops: bool,
    throttles: Throttles,
    /// Whether `throttles` has not been sent to the subscriber yet.
    has_new_throttles: bool,
    /// The number of the last subscription.
    subscription: u64,
    /// An end was lost since the last subscription.
    has_lost_end: bool,
    waker: Option<Waker>,
}

impl Journal {
    pub(crate) fn new() -> Arc<Self> {
        Self::bounded(LOGS, ENDS)
    }

    pub(crate) fn bounded(logs_max: usize, ends_max: usize) -> Arc<Self> {
        Arc::new(Self {
            logs_max,
            ends_max,
            state: Mutex::default(),
        })
    }

    /// Adds a log entry. `false` when the queue is full.
    pub(crate) fn log(&self, entry: SandboxLog) -> bool {
        let mut state = self.state.lock();
        if state.logs >= self.logs_max {
            return false;
        }
        state.logs += 1;
        state.queue.push_back(NodeEvent::Log(entry));
        state.wake();
        true
    }

    /// Adds the event that a sandbox is ending or has ended. A sandbox that has ended must no longer be part of a
    /// snapshot.
    pub(crate) fn end(&self, event: NodeEvent) {
        let mut state = self.state.lock();
        if state.queue.len() - state.logs >= self.ends_max {
            state.has_lost_end = true;
        } else {
            state.queue.push_back(event);
        }
        state.wake();
    }

    /// Records the state of the disk guard. The subscriber gets the latest state, if it changed.
    pub(crate) fn disk_stops(&self, disk_stops: DiskStops) {
        let mut state = self.state.lock();
        if state.disk_stops != disk_stops {
            state.disk_stops = disk_stops;
            state.has_new_disk_stops = true;
            state.wake();
        }
    }

    /// Records what was done about sandboxes that create many processes. The subscriber gets the latest state, if it
    /// changed.
    pub(crate) fn throttles(&self, throttles: Throttles) {
        let mut state = self.state.lock();
        if state.throttles != throttles {
            state.throttles = throttles;
            state.has_new_throttles = true;
            state.wake();
        }
    }

    /// Starts a subscription and ends the previous one. `look` takes the snapshot; an end that is lost from here on
    /// ends the new subscription.
    pub(crate) fn subscribe(self: &Arc<Self>, look: impl FnOnce() -> Snapshot) -> NodeEvents {
        let number = {
            let mut state = self.state.lock();
            state.subscription += 1;
            state.has_lost_end = false;
            state.wake();
            state.subscription
        };
        let mut snapshot = Some(look());
        let journal = Arc::clone(self);
        NodeEvents::from_poll(move |cx| match snapshot.take() {
            Some(snapshot) => Poll::Ready(Some(NodeEvent::Snapshot(snapshot))),
            None => journal.poll_next(number, cx),
        })
    }

    fn poll_next(&self, number: u64, cx: &mut Context<'_>) -> Poll<Option<NodeEvent>> {
        let mut state = self.state.lock();
        if state.subscription != number {
            return Poll::Ready(None);
        }
        if std::mem::take(&mut state.has_new_disk_stops) {
            return Poll::Ready(Some(NodeEvent::DiskStops(state.disk_stops)));
        }
        if std::mem::take(&mut state.has_new_throttles) {
            return Poll::Ready(Some(NodeEvent::Throttles(state.throttles)));
        }
        if let Some(event) = state.queue.pop_front() {
            state.logs -= usize::from(matches!(event, NodeEvent::Log(_)));
            return Poll::Ready(Some(event));
        }
        if state.has_lost_end {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl State {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// The log entries of a journal, for tests.
#[cfg(test)]
pub(crate) struct LogEntries(NodeEvents);

#[cfg(test)]
impl LogEntries {
    pub(crate) fn of(journal: &Arc<Journal>) -> Self {
        Self(journal.subscribe(Snapshot::default))
    }

    pub(crate) fn try_next(&mut self) -> Option<SandboxLog> {
        loop {
            if let NodeEvent::Log(entry) = self.0.try_next()? {
                return Some(entry);
            }
        }
    }

    pub(crate) async fn next(&mut self) -> SandboxLog {
        loop {
            if let NodeEvent::Log(entry) = self.0.next().await.unwrap() {
                return entry;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use model::id::SandboxId;
    use model::log::Level;
    use protocol::node::{LiveSandbox, Logger};

    use super::*;

    fn id(name: &str) -> SandboxId {
        name.parse().unwrap()
    }

    fn entry(name: &str) -> SandboxLog {
        SandboxLog {
            id: id(name),
            at_us: 0,
            level: Level::Info,
            logger: Logger::Sandbox,
            message: String::new(),
            fields: BTreeMap::new(),
        }
    }

    fn alive(names: &[&str]) -> Snapshot {
        let live = |name: &&str| LiveSandbox {
            id: id(name),
            is_ending: false,
        };
        Snapshot {
            sandboxes: names.iter().map(live).collect(),
            ..Snapshot::default()
        }
    }

    #[tokio::test]
    async fn a_subscription_begins_with_a_snapshot_and_takes_over_queued_events() {
        let journal = Journal::bounded(2, 2);
        assert!(journal.log(entry("ione")));
        let mut first = journal.subscribe(|| alive(&["ione"]));
        assert_eq!(first.next().await, Some(NodeEvent::Snapshot(alive(&["ione"]))));
        let mut second = journal.subscribe(|| alive(&[]));
        assert_eq!(first.next().await, None, "replaced by the second subscription");
        assert_eq!(second.next().await, Some(NodeEvent::Snapshot(alive(&[]))));
        assert_eq!(second.next().await, Some(NodeEvent::Log(entry("ione"))));
        assert_eq!(second.try_next(), None);
        journal.end(NodeEvent::Exited(id("ione")));
        assert_eq!(second.try_next(), Some(NodeEvent::Exited(id("ione"))));
    }

    #[tokio::test]
    async fn a_waiting_subscriber_is_woken() {
        let journal = Journal::new();
        let mut events = journal.subscribe(Snapshot::default);
        let received = tokio::task::spawn(async move {
            let mut received = Vec::new();
            while let Some(event) = events.next().await {
                received.push(event);
            }
            received
        });
        tokio::task::yield_now().await;
        journal.end(NodeEvent::Ending(id("ione")));
        tokio::task::yield_now().await;
        let _replacement = journal.subscribe(Snapshot::default);
        let received = received.await.unwrap();
        assert_eq!(
            received,
            [NodeEvent::Snapshot(Snapshot::default()), NodeEvent::Ending(id("ione"))]
        );
    }

    #[tokio::test]
    async fn a_lost_end_ends_the_subscription_and_a_lost_log_entry_does_not() {
        let journal = Journal::bounded(1, 1);
        let mut events = journal.subscribe(Snapshot::default);
        assert!(journal.log(entry("ione")));
        assert!(!journal.log(entry("ione")), "full");
        journal.end(NodeEvent::Exited(id("ione")));
        events.next().await.unwrap();
        assert!(matches!(events.next().await, Some(NodeEvent::Log(_))));
        assert!(journal.log(entry("ione")), "the queue has space again");
        journal.end(NodeEvent::Exited(id("itwo")));
        assert_eq!(events.next().await, Some(NodeEvent::Exited(id("ione"))));
        assert!(matches!(events.next().await, Some(NodeEvent::Log(_))));
        assert_eq!(events.next().await, None);
        let mut events = journal.subscribe(Snapshot::default);
        assert!(matches!(events.next().await, Some(NodeEvent::Snapshot(_))));
        assert_eq!(events.try_next(), None);
    }

    #[tokio::test]
    async fn only_the_latest_disk_stops_are_sent() {
        let journal = Journal::new();
        let mut events = journal.subscribe(Snapshot::default);
        events.next().await.unwrap();
        let stops = |stops| DiskStops {
            stops,
            ..DiskStops::default()
        };
        journal.disk_stops(stops(0));
        assert_eq!(events.try_next(), None, "nothing changed");
        journal.disk_stops(stops(1));
        journal.disk_stops(stops(2));
        assert_eq!(events.try_next(), Some(NodeEvent::DiskStops(stops(2))));
        assert_eq!(events.try_next(), None);
    }
}
