//! Draining: nodes that get no new sandboxes, so that their hosts can be restarted once nothing is left there.
//!
//! The database says which these are. A server reads that when it takes a node over, and whenever it looks what other servers do;
//! what it says of itself to them has the nodes of its own that it knows to drain, by which another one finds out that it knows.
//!
//! What is there goes on in every way, also if it takes a share of the host again, as a resume does. Steps of builds are the one
//! exception for what is new: where no other node can run one, it runs on a draining node, because a build that fails is worse
//! than a drain that takes longer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use model::id::{LayerId, NodeId};

use super::room::Draining;
use super::{Needs, Nodes, ServedNode};
use crate::builds::recipe::layers_of;

impl ServedNode {
    /// Whether it gets no new sandboxes.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining_since_us().is_some()
    }

    fn draining_since_us(&self) -> Option<i64> {
        Some(self.draining_us.load(Ordering::Acquire)).filter(|since_us| *since_us != 0)
    }

    /// Begins or ends its drain. The caller has the turn of
    /// [`NodeMembers::turn_to_drain`](crate::members::NodeMembers::turn_to_drain).
    pub(crate) fn drain(&self, since_us: Option<i64>) {
        let before = self.draining_us.swap(since_us.unwrap_or(0), Ordering::AcqRel);
        let is_draining = since_us.is_some();
        if (before != 0) == is_draining {
            return;
        }
        self.placement.drain(self.id(), is_draining);
        self.pool.drain(is_draining);
        if is_draining {
            tracing::info!(node.id = %self.id(), "the node drains: no new sandboxes come to it");
        } else {
            tracing::info!(node.id = %self.id(), "the node does not drain any more");
        }
    }
}

impl Nodes {
    /// The nodes that are served and drain.
    pub(crate) fn draining(&self) -> Draining {
        let nodes = self.all();
        let draining = nodes
            .iter()
            .filter_map(|node| Some((node.id().as_str().to_owned(), node.draining_since_us()?)));
        draining.collect()
    }

    /// Notes whether a node drains, if it is served.
    pub(crate) fn drain(&self, id: &NodeId, since_us: Option<i64>) {
        if let Some(node) = self.find(id) {
            node.drain(since_us);
        }
    }

    /// Whether a draining node has these layers.
    pub(crate) fn is_kept_off(&self, layers: &[LayerId]) -> bool {
        let mut draining = self.all().into_iter().filter(|node| node.is_draining());
        draining.any(|node| node.lacks(layers) == 0)
    }

    /// The nodes for a step of a build, the best first. Those that drain are among them if no other one can run it.
    ///
    /// The ones that have most of its layers come first, with a blob store, too: that gets the layers of a build at its end, so what
    /// the steps before have made is on their nodes alone.
    pub(super) fn choose_for_step(&self, needs: Needs<'_>) -> Vec<Arc<ServedNode>> {
        let layers = layers_of(needs.image);
        let mut order = self.choose(needs);
        if !layers.is_empty() {
            let is_chosen = |node: &Arc<ServedNode>| order.iter().any(|chosen| Arc::ptr_eq(chosen, node));
            let mut others = self.all();
            others.retain(|node| !node.is_draining() && node.lacks(layers) == 0 && !is_chosen(node));
            order.extend(others);
            order.sort_by_cached_key(|node| node.lacks(layers));
        }
        if order.iter().any(|node| node.can_have(layers)) {
            return order;
        }
        let mut draining = self.all();
        draining.retain(|node| node.is_draining());
        draining.sort_by_cached_key(|node| node.lacks(layers));
        order.extend(draining);
        order
    }
}

impl ServedNode {
    /// Whether it has layers, or can fetch them.
    fn can_have(&self, layers: &[LayerId]) -> bool {
        self.handle.stored().is_some() || self.lacks(layers) == 0
    }
}
