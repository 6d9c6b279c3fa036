//! What the node reports: sandboxes that end unasked, entries of their logs, and what it does for the sake of its disk.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::{State, Transition};
use protocol::node::{NodeEvent, NodeEvents, Snapshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Sandboxes;
use crate::chain::Chain;
use crate::outcome::EndReason;
use crate::records::LifecycleEvent;

/// Pause before another subscription, when one has ended or failed.
const PAUSE: Duration = Duration::from_millis(100);

/// When to stop following a node.
#[derive(Debug)]
pub(crate) struct StopSignals {
    /// Sandboxes are left to the next start from here on.
    pub(crate) draining: CancellationToken,
    /// Nothing is written any more.
    pub(crate) stopped: CancellationToken,
}

impl Sandboxes {
    /// Takes in what the node reports, and subscribes again when the stream ends. What is written afterwards is for the
    /// holder of `writing` to end: it is dropped once everything that had arrived was taken in.
    pub(crate) async fn follow_node(self: Arc<Self>, mut events: NodeEvents, signals: StopSignals, writing: DropGuard) {
        // What ran, as far as this server knew, before it subscribed.
        let mut running = Vec::new();
        loop {
            let event = tokio::select! {
                biased;
                () = signals.stopped.cancelled() => break,
                event = events.next() => event,
            };
            match event {
                Some(event) => self.handle_event(event, &running, &signals.draining),
                None => {
                    tracing::warn!("the node ended the stream of its events, subscribing again");
                    tokio::select! {
                        biased;
                        () = signals.stopped.cancelled() => break,
                        subscribed = self.subscribe_again() => (events, running) = subscribed,
                    }
                }
            }
            // A flood of entries must not keep others from this thread.
            tokio::task::coop::consume_budget().await;
        }
        while let Some(event) = events.try_next() {
            self.handle_event(event, &running, &signals.draining);
        }
        drop(writing);
    }

    async fn subscribe_again(&self) -> (NodeEvents, Vec<SandboxId>) {
        loop {
            tokio::time::sleep(PAUSE).await;
            let running = self.registry.all_running();
            match self.node.subscribe().await {
                Ok(events) => return (events, running.iter().map(|entry| entry.id.clone()).collect()),
                Err(error) => tracing::warn!(error = %Chain(&error), "subscribe to the events of the node"),
            }
        }
    }

    fn handle_event(self: &Arc<Self>, event: NodeEvent, running: &[SandboxId], draining: &CancellationToken) {
        match event {
            NodeEvent::Log(entry) => self.records.log_from_node(entry),
            NodeEvent::DiskStops(disk_stops) => self.metrics.disk_stops(disk_stops),
            NodeEvent::Ending(id) => self.cut_streams(&id),
            NodeEvent::Exited(id) if !draining.is_cancelled() => self.handle_exit(&id),
            // The next start finds out.
            NodeEvent::Exited(_) => {}
            NodeEvent::Snapshot(snapshot) => {
                self.metrics.disk_stops(snapshot.disk_stops);
                if !draining.is_cancelled() {
                    self.apply_snapshot(running, &snapshot);
                }
            }
        }
    }

    /// Notices what ended while nothing was reported.
    fn apply_snapshot(self: &Arc<Self>, running: &[SandboxId], snapshot: &Snapshot) {
        let live: HashMap<&SandboxId, bool> = snapshot
            .sandboxes
            .iter()
            .map(|live| (&live.id, live.is_ending))
            .collect();
        for id in running {
            match live.get(id) {
                Some(false) => {}
                Some(true) => self.cut_streams(id),
                None => self.handle_exit(id),
            }
        }
    }

    fn cut_streams(&self, id: &SandboxId) {
        if let Some(entry) = self.registry.get(id) {
            entry.ending.cancel();
        }
    }

    /// Removes a sandbox that ended by itself.
    fn handle_exit(self: &Arc<Self>, id: &SandboxId) {
        let Some(entry) = self.registry.get(id) else { return };
        entry.ending.cancel();
        match entry.state() {
            // Its creator finds out and removes it.
            State::Creating => {
                entry.apply(Transition::Failed);
            }
            State::Running => {
                if entry.apply(Transition::Died) && entry.state() == State::Gone {
                    tracing::info!(sandbox.id = %id, "sandbox ended by itself");
                    self.metrics.end(EndReason::Exited);
                    self.records.log_event(id, &LifecycleEvent::Ending(EndReason::Exited));
                    let (sandboxes, id) = (Arc::clone(self), id.clone());
                    self.work.spawn(async move { sandboxes.forget(&id).await });
                }
            }
            // Whoever moves it on finds out.
            State::Pausing | State::Paused | State::Resuming | State::Stopping | State::Gone => {}
        }
    }
}
