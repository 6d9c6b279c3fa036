//! Taking nodes over, and letting go of them: what is done once for each session of a node.
//!
//! ```text
//!   served ──subscribe──▶ adopted ──▶ placed on ──session over──▶ left ──nothing refers to it──▶ the next session
//! ```
//!
//! What a session has begun fails once it is over, because its node does not answer it any more and the next session has
//! another acquisition of the lease. It is waited for nevertheless, so that nothing of it lingers while the sandboxes are
//! taken over again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::time::Duration;

use parking_lot::Mutex;
use protocol::node::{NodeApi, NodeEvents};
use store::Store;
use store::error::StoreError;
use store::nodes::NodeRows;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{Holdings, NodeMemories, Nodes, ServedNode};
use crate::admission::AdmissionControl;
use crate::admission::quota::{Reservation, ResourceUse};
use crate::clock::{Clock, SECOND_US};
use crate::keys::TokenSeed;
use crate::metrics::Metrics;
use crate::node::NodeHandle;
use crate::pool::{Pool, PoolServices};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::adopt::AdoptError;
use crate::sandboxes::entry::CountedAs;
use crate::sandboxes::node_events::StopSignals;
use crate::settings::PoolSettings;

/// How long what a session has begun may take to end. Its calls fail at once, so this is for the database.
const LEAVE_BOUND: Duration = Duration::from_secs(10);

/// How long a sandbox may have records before it has a row, in microseconds.
const CREATED_WITHIN_US: i64 = 600 * SECOND_US;

/// Takes nodes over for a server.
#[derive(Debug)]
pub(crate) struct NodeKeeper {
    pub(crate) store: Store,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    /// Admission to all nodes.
    pub(crate) admission: Arc<AdmissionControl>,
    /// All nodes as one.
    pub(crate) handle: NodeHandle,
    pub(crate) pool: PoolSettings,
    pub(crate) tokens: TokenSeed,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) clock: Clock,
    /// Work that goes on when the server stops.
    pub(crate) work: TaskTracker,
    /// Tasks that end when the server stops.
    pub(crate) background: TaskTracker,
    /// Tasks that end last.
    pub(crate) records: TaskTracker,
    /// Cancelled when the server stops.
    pub(crate) stop: CancellationToken,
    /// Cancelled when all work has ended.
    pub(crate) records_stop: CancellationToken,
    /// Keeps the writer of the records running.
    pub(crate) writing: Mutex<Option<Arc<DropGuard>>>,
}

/// What a node can do, and how it does it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeCan {
    /// Whether it can write processes to disk.
    pub(crate) writes_processes: bool,
    /// Whether it keeps deadlines.
    pub(crate) keeps_deadlines: bool,
    /// Whether it makes parcels of paused sandboxes, and sandboxes of parcels.
    pub(crate) makes_parcels: bool,
    /// Whether it makes parcels of the memory of snapshots, and memory of parcels.
    pub(crate) copies_memories: bool,
    /// Whether it takes permits that come with starts.
    pub(crate) admits_with_start: bool,
    /// Whether it is a process of its own.
    pub(crate) is_apart: bool,
}

/// The sandboxes of a node that is not served: they count in the quotas of their teams until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct HeldQuotas(Vec<Reservation>);

impl NodeKeeper {
    /// Makes what a session of a node needs. `uses` counts what refers to it.
    pub(crate) fn session(
        &self,
        rows: NodeRows,
        api: Arc<dyn NodeApi>,
        can: NodeCan,
        over: CancellationToken,
        uses: &TaskTracker,
    ) -> Arc<ServedNode> {
        let handle = self.handle.on(api);
        let admission = Arc::new(self.admission.on(handle.clone()));
        let pool = Arc::new(Pool::new(
            self.pool.clone(),
            PoolServices {
                rows: rows.clone(),
                node: handle.clone(),
                tokens: self.tokens.clone(),
                admission: Arc::clone(&admission),
                metrics: Arc::clone(&self.metrics),
                resources: self.sandboxes.defaults.resources,
                clock: self.clock.clone(),
                work: self.work.clone(),
            },
        ));
        Arc::new(ServedNode {
            rows,
            handle,
            pool,
            admission,
            writes_processes: can.writes_processes,
            keeps_deadlines: can.keeps_deadlines,
            makes_parcels: can.makes_parcels,
            copies_memories: can.copies_memories,
            admits_with_start: can.admits_with_start,
            memories: NodeMemories::default(),
            left: Mutex::default(),
            lacks: Mutex::default(),
            holdings: Mutex::new(Holdings::default()),
            placement: self.nodes.placement(),
            is_placed_on: AtomicBool::new(false),
            draining_us: AtomicI64::new(0),
            changed: Notify::new(),
            over,
            is_apart: can.is_apart,
            _in_use: uses.token(),
        })
    }

    /// Takes over the sandboxes of a node, whose events are subscribed to, and places new ones on it from now on.
    pub(crate) async fn take_over(&self, node: &Arc<ServedNode>) -> Result<(), AdoptError> {
        let count = self.sandboxes.adopt(node).await?;
        if count > 0 {
            tracing::info!(node.id = %node.id(), sandboxes = count, "took over the sandboxes of an earlier start");
        }
        self.nodes.add(Arc::clone(node));
        self.sandboxes.write_all(node);
        self.sandboxes.pack_all(node).await;
        self.sandboxes.copy_memories(node);
        Ok(())
    }

    /// Begins what goes on beside requests for as long as the session lasts.
    pub(crate) fn begin(&self, node: &Arc<ServedNode>, events: NodeEvents) {
        let ended = self.until_over(&self.stop, node);
        let stopped = self.until_over(&self.records_stop, node);
        self.background
            .spawn(Arc::clone(&node.pool).serve(self.background.clone(), ended.clone()));
        let signals = StopSignals {
            draining: ended,
            stopped,
        };
        let writing = self.writing.lock().clone();
        // Only after the takeover, because log entries of unknown sandboxes are dropped.
        let following = Arc::clone(&self.sandboxes).follow_node(Arc::clone(node), events, signals, writing);
        self.records.spawn(following);
    }

    /// Reads reports of a node again and again, where there are several.
    pub(crate) fn follow_reports(&self, node: &Arc<ServedNode>) {
        let ended = self.until_over(&self.stop, node);
        self.background
            .spawn(Arc::clone(node).follow_reports(Arc::clone(&self.nodes), ended));
    }

    /// A signal that is given with `stop`, and when the session of a node is over.
    fn until_over(&self, stop: &CancellationToken, node: &ServedNode) -> CancellationToken {
        let either = stop.child_token();
        let (over, told) = (node.over.clone(), either.clone());
        // With the tasks that end last, because some wait for this until then.
        self.records.spawn(async move {
            tokio::select! {
                () = over.cancelled() => told.cancel(),
                () = told.cancelled() => {}
            }
        });
        either
    }

    /// Counts the sandboxes of a node that is not served in the quotas of their teams, and expects it.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn hold(&self, rows: &NodeRows) -> Result<HeldQuotas, StoreError> {
        let live = rows.sandbox_list_live().await?;
        let mut held = HeldQuotas::default();
        for row in &live {
            let quota = self.admission.quota_of(&row.team_id).await?;
            let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
            held.0.push(quota.occupy(CountedAs::of(row).share(share)));
        }
        self.nodes
            .expect(rows.node(), live.into_iter().map(|row| row.id).collect());
        Ok(held)
    }

    /// Lets go of a node whose session is over, or that was not taken over as a whole, and waits until nothing of it goes on.
    pub(crate) async fn leave(&self, node: Arc<ServedNode>, uses: TaskTracker) {
        node.over.cancel();
        self.nodes.remove(&node);
        let sandboxes = self.sandboxes.tracked.leave(&node);
        tracing::info!(node.id = %node.id(), sandboxes, "let go of a node; its sandboxes are where they were");
        drop(node);
        uses.close();
        if tokio::time::timeout(LEAVE_BOUND, uses.wait()).await.is_err() {
            tracing::warn!(
                "requests for a node are unfinished after {LEAVE_BOUND:?}: its next session undoes their changes"
            );
        }
    }

    /// Records the end of sandboxes that ended without a record of it. One that is being created has records, and no row yet: so,
    /// if others may be creating sandboxes, those with recent records are left to the next start.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn end_orphans(&self, are_others: bool) -> Result<(), StoreError> {
        let now_us = self.clock.now_us();
        let quiet_us = if are_others {
            now_us - CREATED_WITHIN_US
        } else {
            i64::MAX
        };
        self.store.records_end_orphans(now_us, quiet_us).await?;
        Ok(())
    }

    /// Removes what there is of a node that was forgotten, and returns how many sandboxes are lost, and how many are in the blob
    /// store, from where another node can go on with them.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn lose(&self, rows: &NodeRows) -> Result<(usize, usize), StoreError> {
        let lost = self.sandboxes.lose_all(rows).await?;
        self.nodes.forget(rows.node());
        Ok(lost)
    }
}
