//! What this node reports, on its way to whoever subscribed last.
//!
//! One queue for all sandboxes, which outlives a subscription, and nobody ever waits to put something in. Entries of
//! logs that find it full are the loss of their [`crate::journal::Journal`], which counts them. An end that finds it full
//! ends the subscription: the next one begins with a snapshot, so that the loss is noticed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use protocol::node::{DiskStops, NodeEvent, NodeEvents, SandboxLog, Snapshot};

/// Entries of logs that may wait. With entries of the largest size this is about 16 MiB.
const LOGS: usize = 4096;
/// Reports of ends that may wait.
const ENDS: usize = 1024;

/// The queue.
#[derive(Debug)]
pub(crate) struct Reports {
    logs_max: usize,
    ends_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<NodeEvent>,
    /// How many of the queue are entries of logs.
    logs: usize,
    disk_stops: DiskStops,
    /// Whether the subscriber does not know them.
    is_disk_news: bool,
    /// The number of the last subscription.
    subscription: u64,
    /// An end was lost since the last subscription.
    has_lost_end: bool,
    waker: Option<Waker>,
}

impl Reports {
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

    /// Reports an entry of a log. `false` when there is no room for it.
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

    /// Reports that a sandbox ends or has ended. One that has must not be part of a snapshot any more.
    pub(crate) fn end(&self, event: NodeEvent) {
        let mut state = self.state.lock();
        if state.queue.len() - state.logs >= self.ends_max {
            state.has_lost_end = true;
        } else {
            state.queue.push_back(event);
        }
        state.wake();
    }

    /// Reports what is done for the sake of the host's disk, if it changed.
    pub(crate) fn disk_stops(&self, disk_stops: DiskStops) {
        let mut state = self.state.lock();
        if state.disk_stops != disk_stops {
            state.disk_stops = disk_stops;
            state.is_disk_news = true;
            state.wake();
        }
    }

    /// Begins a subscription and ends the one before. `look` is called while no end is lost unnoticed.
    pub(crate) fn subscribe(self: &Arc<Self>, look: impl FnOnce() -> Snapshot) -> NodeEvents {
        let number = {
            let mut state = self.state.lock();
            state.subscription += 1;
            state.has_lost_end = false;
            state.wake();
            state.subscription
        };
        let mut snapshot = Some(look());
        let reports = Arc::clone(self);
        NodeEvents::from_poll(move |cx| match snapshot.take() {
            Some(snapshot) => Poll::Ready(Some(NodeEvent::Snapshot(snapshot))),
            None => reports.poll_next(number, cx),
        })
    }

    fn poll_next(&self, number: u64, cx: &mut Context<'_>) -> Poll<Option<NodeEvent>> {
        let mut state = self.state.lock();
        if state.subscription != number {
            return Poll::Ready(None);
        }
        if std::mem::take(&mut state.is_disk_news) {
            return Poll::Ready(Some(NodeEvent::DiskStops(state.disk_stops)));
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

/// The entries of logs among what is reported, for tests.
#[cfg(test)]
pub(crate) struct Entries(NodeEvents);

#[cfg(test)]
impl Entries {
    pub(crate) fn of(reports: &Arc<Reports>) -> Self {
        Self(reports.subscribe(Snapshot::default))
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
    async fn a_subscription_begins_with_what_lives_and_takes_over_what_waits() {
        let reports = Reports::bounded(2, 2);
        assert!(reports.log(entry("ione")));
        let mut first = reports.subscribe(|| alive(&["ione"]));
        assert_eq!(first.next().await, Some(NodeEvent::Snapshot(alive(&["ione"]))));
        let mut second = reports.subscribe(|| alive(&[]));
        assert_eq!(first.next().await, None, "it was replaced");
        assert_eq!(second.next().await, Some(NodeEvent::Snapshot(alive(&[]))));
        assert_eq!(second.next().await, Some(NodeEvent::Log(entry("ione"))));
        assert_eq!(second.try_next(), None);
        reports.end(NodeEvent::Exited(id("ione")));
        assert_eq!(second.try_next(), Some(NodeEvent::Exited(id("ione"))));
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        let reports = Reports::new();
        let mut events = reports.subscribe(Snapshot::default);
        let told = tokio::task::spawn(async move {
            let mut told = Vec::new();
            while let Some(event) = events.next().await {
                told.push(event);
            }
            told
        });
        tokio::task::yield_now().await;
        reports.end(NodeEvent::Ending(id("ione")));
        tokio::task::yield_now().await;
        let _replacement = reports.subscribe(Snapshot::default);
        let told = told.await.unwrap();
        assert_eq!(
            told,
            [NodeEvent::Snapshot(Snapshot::default()), NodeEvent::Ending(id("ione"))]
        );
    }

    #[tokio::test]
    async fn a_lost_end_ends_the_subscription_and_a_lost_entry_does_not() {
        let reports = Reports::bounded(1, 1);
        let mut events = reports.subscribe(Snapshot::default);
        assert!(reports.log(entry("ione")));
        assert!(!reports.log(entry("ione")), "full");
        reports.end(NodeEvent::Exited(id("ione")));
        events.next().await.unwrap();
        assert!(matches!(events.next().await, Some(NodeEvent::Log(_))));
        assert!(reports.log(entry("ione")), "there is room again");
        reports.end(NodeEvent::Exited(id("itwo")));
        assert_eq!(events.next().await, Some(NodeEvent::Exited(id("ione"))));
        assert!(matches!(events.next().await, Some(NodeEvent::Log(_))));
        assert_eq!(events.next().await, None);
        let mut events = reports.subscribe(Snapshot::default);
        assert!(matches!(events.next().await, Some(NodeEvent::Snapshot(_))));
        assert_eq!(events.try_next(), None);
    }

    #[tokio::test]
    async fn only_the_newest_state_of_the_disk_is_told() {
        let reports = Reports::new();
        let mut events = reports.subscribe(Snapshot::default);
        events.next().await.unwrap();
        let stops = |stops| DiskStops {
            stops,
            ..DiskStops::default()
        };
        reports.disk_stops(stops(0));
        assert_eq!(events.try_next(), None, "nothing changed");
        reports.disk_stops(stops(1));
        reports.disk_stops(stops(2));
        assert_eq!(events.try_next(), Some(NodeEvent::DiskStops(stops(2))));
        assert_eq!(events.try_next(), None);
    }
}
