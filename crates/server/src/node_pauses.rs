//! Pausing what is left on a draining node, for an operator who may ask any server of the service.
//!
//! The server that was asked writes into the row of the node that it is to be done. The server that has the node reads that when it looks what
//! others do, pauses, and writes what became of it. If it is gone meanwhile, the one that takes the node over does it again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use model::id::NodeId;
use parking_lot::Mutex;
use store::Store;
use store::error::StoreError;
use store::node_pauses::NodePause;
use tokio::time::Instant;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::nodes::ServedNode;
use crate::sandboxes::Sandboxes;

/// How long the server that has a node may take to begin. It looks once a second.
const BEGIN_BOUND: Duration = Duration::from_secs(10);
/// How long a pause is waited for.
const END_BOUND: Duration = Duration::from_secs(60 * 60);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(200);
/// How long after it was asked for a pause is begun, in microseconds: later, nobody waits for it any more.
const ASKED_US: i64 = 60 * 60 * SECOND_US;

/// Why nothing was paused, or why that is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodePauseError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the node does not drain any more, so its sandboxes run on")]
    NotDraining,
    #[error("the node is not connected to any server")]
    Away,
    #[error("the server that has the node has not begun to pause its sandboxes; try again")]
    NotBegun,
    #[error(
        "the server that has the node has not said what became of its sandboxes: see what is left there, and try again"
    )]
    Unknown,
}

/// The nodes of which this server pauses what is left, because another one was asked for that.
#[derive(Debug, Default)]
pub(crate) struct NodePauses(Mutex<HashSet<NodeId>>);

/// A pause that is under way, until this is dropped.
#[derive(Debug)]
struct UnderWay(Arc<NodePauses>, NodeId);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.0.lock().remove(&self.1);
    }
}

impl NodePauses {
    fn begin(self: &Arc<Self>, id: &NodeId) -> Option<UnderWay> {
        let is_first = self.0.lock().insert(id.clone());
        is_first.then(|| UnderWay(Arc::clone(self), id.clone()))
    }

    /// Carries out what was asked for about nodes of this server, on tasks.
    pub(crate) async fn carry_out(
        self: &Arc<Self>,
        sandboxes: &Arc<Sandboxes>,
        store: &Store,
        clock: &Clock,
    ) -> Result<(), StoreError> {
        let mut draining = sandboxes.nodes.all();
        draining.retain(|node| node.is_draining());
        if draining.is_empty() {
            return Ok(());
        }
        for pause in store.node_pause_list().await? {
            let Some(node) = draining.iter().find(|node| *node.id() == pause.node) else {
                continue;
            };
            if pause.outcome.is_some() || clock.now_us() - pause.asked_us > ASKED_US {
                continue;
            }
            let Some(under_way) = self.begin(&pause.node) else {
                continue;
            };
            if store
                .node_pause_begin(&pause.node, pause.asked_us, clock.now_us())
                .await?
            {
                let pausing = carry_out(Arc::clone(sandboxes), Arc::clone(node), store.clone(), pause, under_way);
                sandboxes.work.spawn(pausing);
            }
        }
        Ok(())
    }
}

async fn carry_out(
    sandboxes: Arc<Sandboxes>,
    node: Arc<ServedNode>,
    store: Store,
    pause: NodePause,
    under_way: UnderWay,
) {
    let (paused, failed) = sandboxes.keep_all_of(&node).await;
    tracing::info!(node.id = %pause.node, paused, failed, "paused what was left on a draining node, for another server");
    if let Err(error) = store
        .node_pause_end(&pause.node, pause.asked_us, (paused, failed))
        .await
    {
        tracing::error!(node.id = %pause.node, error = %Chain(&error), "cannot note that what was left on a node was paused");
    }
    drop(under_way);
}

/// Has the server that has a draining node pause what is left there, and returns how many of its sandboxes are kept since, and how
/// many are not.
pub(crate) async fn ask(store: &Store, clock: &Clock, id: &NodeId) -> Result<(u64, u64), NodePauseError> {
    let asked = store.node_pause_ask(id, clock.now_us()).await?;
    let asked_us = asked.ok_or(NodePauseError::NotDraining)?.asked_us;
    let since = Instant::now();
    loop {
        let pauses = store.node_pause_list().await?.into_iter();
        let mut of_node = pauses.filter(|pause| pause.node == *id && pause.asked_us >= asked_us);
        let pause = of_node.next().ok_or(NodePauseError::NotDraining)?;
        if let Some(outcome) = pause.outcome {
            return Ok(outcome);
        }
        let is_begun = pause.begun_us.is_some();
        if !is_begun && since.elapsed() > BEGIN_BOUND {
            // Nobody waits for it from here on. What others have asked for since is theirs.
            if pause.asked_us == asked_us && !store.node_pause_withdraw(id, asked_us).await? {
                // It has begun meanwhile, or is another one by now.
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let now_us = store.lease_time_us(clock.now_us()).await?;
            let row = store.node_by_id(id).await?;
            let is_leased = row.is_some_and(|row| row.is_leased(now_us));
            return Err(if is_leased {
                NodePauseError::NotBegun
            } else {
                NodePauseError::Away
            });
        }
        if since.elapsed() > END_BOUND {
            return Err(NodePauseError::Unknown);
        }
        tokio::time::sleep(LOOK).await;
    }
}
