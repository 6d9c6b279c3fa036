//! Following node events: exits of sandboxes, log entries, and measures against a full disk.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::State;
use model::lifecycle::command::{Arrival, AtTurn, Command};
use protocol::node::{NodeEvent, NodeEvents, Snapshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Sandboxes;
use super::entry::SandboxEntry;
use crate::chain::Chain;
use crate::nodes::ServedNode;
use crate::outcome::EndReason;

/// Pause before subscribing again, after a subscription has ended or failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Signals that stop the handling of node events.
#[derive(Debug)]
pub(crate) struct StopSignals {
    /// From here on, exits of sandboxes are left to the next start.
    pub(crate) draining: CancellationToken,
    /// From here on, nothing is written any more.
    pub(crate) stopped: CancellationToken,
}

impl Sandboxes {
    /// Handles the events of a node, and subscribes again when the stream ends. `writing` keeps the writer of the
    /// records running: it is dropped once everything that had arrived was handled.
    pub(crate) async fn follow_node(
        self: Arc<Self>,
        node: Arc<ServedNode>,
        mut events: NodeEvents,
        signals: StopSignals,
        writing: Option<Arc<DropGuard>>,
    ) {
        // The sandboxes that this server knew to be running before it subscribed.
        let mut running = Vec::new();
        loop {
            let event = tokio::select! {
                biased;
                () = signals.stopped.cancelled() => break,
                event = events.next() => event,
            };
            match event {
                Some(event) => self.handle_event(&node, event, &running, &signals.draining),
                None => {
                    tracing::warn!("the node closed the event stream, subscribing again");
                    tokio::select! {
                        biased;
                        () = signals.stopped.cancelled() => break,
                        subscribed = self.subscribe_again(&node) => (events, running) = subscribed,
                    }
                }
            }
            // A flood of entries must not starve other tasks on this thread.
            tokio::task::coop::consume_budget().await;
        }
        while let Some(event) = events.try_next() {
            self.handle_event(&node, event, &running, &signals.draining);
        }
        drop(writing);
    }

    async fn subscribe_again(&self, node: &Arc<ServedNode>) -> (NodeEvents, Vec<SandboxId>) {
        loop {
            tokio::time::sleep(PAUSE).await;
            let running = self.tracked.registry.on(node);
            let running: Vec<_> = running.iter().filter(|entry| entry.state().is_present()).collect();
            match node.handle.subscribe().await {
                Ok(events) => return (events, running.iter().map(|entry| entry.id.clone()).collect()),
                Err(error) => tracing::warn!(error = %Chain(&error), "cannot subscribe to the events of the node"),
            }
        }
    }

    fn handle_event(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        event: NodeEvent,
        running: &[SandboxId],
        draining: &CancellationToken,
    ) {
        match event {
            NodeEvent::Log(entry) => {
                let Some(log) = node.pool.keep_log(entry) else { return };
                // Its own sandboxes, and those that have just ended.
                if self
                    .tracked
                    .registry
                    .get(&log.id)
                    .is_none_or(|entry| Arc::ptr_eq(&entry.node, node))
                {
                    self.tracked.records.log_from_node(log);
                }
            }
            NodeEvent::DiskStops(disk_stops) => self.tracked.metrics.disk_stops(disk_stops),
            NodeEvent::Throttles(throttles) => self.tracked.metrics.throttles(throttles),
            NodeEvent::Ending(id) => self.cut_streams(node, &id),
            NodeEvent::Exited(id) if !draining.is_cancelled() => self.handle_exit(node, &id),
            // The next start detects it.
            NodeEvent::Exited(_) => {}
            NodeEvent::Snapshot(snapshot) => {
                self.tracked.metrics.disk_stops(snapshot.disk_stops);
                self.tracked.metrics.throttles(snapshot.throttles);
                if !draining.is_cancelled() {
                    self.apply_snapshot(node, running, &snapshot);
                }
            }
        }
    }

    /// Detects sandboxes that ended while there was no subscription.
    fn apply_snapshot(self: &Arc<Self>, node: &Arc<ServedNode>, running: &[SandboxId], snapshot: &Snapshot) {
        let live: HashMap<&SandboxId, bool> = snapshot
            .sandboxes
            .iter()
            .map(|live| (&live.id, live.is_ending))
            .collect();
        node.pool.running(|id| live.contains_key(id));
        for id in running {
            match live.get(id) {
                Some(false) => {}
                Some(true) => self.cut_streams(node, id),
                None => self.handle_exit(node, id),
            }
        }
    }

    /// The entry of a sandbox of this node: a node speaks of its own sandboxes alone.
    fn entry_on(&self, node: &Arc<ServedNode>, id: &SandboxId) -> Option<Arc<SandboxEntry>> {
        let entry = self.tracked.registry.get(id);
        entry.filter(|entry| Arc::ptr_eq(&entry.node, node))
    }

    fn cut_streams(&self, node: &Arc<ServedNode>, id: &SandboxId) {
        if let Some(entry) = self.entry_on(node, id) {
            entry.cut();
        }
    }

    /// Removes a sandbox that exited.
    fn handle_exit(self: &Arc<Self>, node: &Arc<ServedNode>, id: &SandboxId) {
        // First, because a claim adds it to the registry before it takes it out of the pool.
        node.pool.exited(id);
        let Some(entry) = self.entry_on(node, id) else {
            return;
        };
        entry.cut();
        match entry.exit() {
            (State::Creating, Arrival::Run) => {
                // Its create request detects this and removes it.
            }
            (_, Arrival::Run) => {
                tracing::info!(sandbox.id = %id, "sandbox ended by itself");
                self.tracked.has_ended(id, EndReason::Exited);
                let sandboxes = Arc::clone(self);
                self.work
                    .spawn(async move { sandboxes.forget(&entry.node, &entry.id).await });
            }
            (_, Arrival::Wait | Arrival::Cancel) => {
                let sandboxes = Arc::clone(self);
                self.work.spawn(async move { sandboxes.lose(&entry).await });
            }
            // The task that ends it detects it.
            (_, Arrival::Join | Arrival::Refuse(_)) => {}
        }
    }

    /// Removes a sandbox that exited while it was paused, being paused or being resumed.
    async fn lose(&self, entry: &Arc<SandboxEntry>) {
        // Until its state is certain.
        let turn = entry.turn_of(Command::Exit).await;
        turn.cut();
        let state = turn.state();
        let transition = match turn.decide(Command::Exit, state) {
            AtTurn::Run => state.exit(),
            AtTurn::Join | AtTurn::Refuse(_) => None,
        };
        let Some(transition) = transition else { return };
        if turn.apply(transition) != Some(State::Gone) {
            return;
        }
        drop(turn);
        let id = &entry.id;
        tracing::info!(sandbox.id = %id, "a paused sandbox ended by itself");
        self.tracked.has_ended(id, EndReason::Exited);
        self.forget(&entry.node, id).await;
    }
}
