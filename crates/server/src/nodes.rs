//! The nodes whose sandboxes this server has taken over, and on which of them a new sandbox is placed.
//!
//! A [`ServedNode`] is one node in one session: its rows under one acquisition of their lease, its handle, its warm pool, its
//! share of the host. A sandbox has the one that it is on ([`crate::sandboxes::entry::SandboxEntry`]), so what a session has
//! begun never touches the rows or the node of the next one. `ringfence up` has one, from its start to its end.
//!
//! A node that is here may be away: then its calls fail at once, and nothing was begun. Only a session that is over removes
//! it, and the next one brings it back.

pub(crate) mod all;
pub(crate) mod keeper;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use model::id::{BuildId, LayerId, NodeId, SandboxId};
use parking_lot::{Mutex, RwLock};
use protocol::node::{Image, LayerInfo, NoCapacity, NodeError};
use store::nodes::NodeRows;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::admission::AdmissionControl;
use crate::admission::capacity::CapacityPermit;
use crate::builds::recipe::layers_of;
use crate::node::NodeHandle;
use crate::pool::{Pool, PooledSandbox};

/// What any node can do.
pub(crate) const ANYWHERE: Needs<'_> = Needs {
    image: &Image::Base,
    memory: None,
};

/// Pause between two reports of a node, where there are several.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two lists of what a node has.
const HOLDINGS_EVERY: u32 = 10;

/// A node in one session.
#[derive(Debug)]
pub(crate) struct ServedNode {
    /// The rows of its sandboxes.
    pub(crate) rows: NodeRows,
    /// The node.
    pub(crate) handle: NodeHandle,
    /// Sandboxes that are started on it in advance.
    pub(crate) pool: Arc<Pool>,
    /// What its host has left.
    pub(crate) admission: Arc<AdmissionControl>,
    /// Whether it can write processes to disk.
    pub(crate) writes_processes: bool,
    /// What it is known to have.
    pub(crate) holdings: Mutex<Holdings>,
    /// Notified when the node has something new.
    pub(crate) changed: Notify,
    /// Cancelled when the session is over.
    pub(crate) over: CancellationToken,
    /// Held for as long as anything refers to the session.
    pub(crate) _in_use: TaskTrackerToken,
}

/// What a node is known to have. It may have more or less: it says so when it is asked to start something.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    pub(crate) layers: HashSet<LayerId>,
    pub(crate) memories: HashSet<BuildId>,
}

/// What a node has to have for a sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs<'a> {
    /// Its file system.
    pub(crate) image: &'a Image,
    /// The snapshot whose processes it continues with.
    pub(crate) memory: Option<&'a BuildId>,
}

impl ServedNode {
    /// Id of the node.
    pub(crate) fn id(&self) -> &NodeId {
        self.rows.node()
    }

    /// How many of these layers it is not known to have.
    fn lacks(&self, layers: &[LayerId]) -> usize {
        let holdings = self.holdings.lock();
        layers.iter().filter(|layer| !holdings.layers.contains(*layer)).count()
    }

    fn has_memory(&self, build: &BuildId) -> bool {
        self.holdings.lock().memories.contains(build)
    }

    /// Notes that it has a layer.
    pub(crate) fn note_layer(&self, layer: &LayerId) {
        self.holdings.lock().layers.insert(layer.clone());
    }

    /// Reads again and again what its host has left and what it has, for placement.
    pub(crate) async fn follow_reports(self: Arc<Self>, stop: CancellationToken) {
        let mut round = 0_u32;
        loop {
            self.admission.host_capacity().await;
            if round.is_multiple_of(HOLDINGS_EVERY) {
                self.read_holdings().await;
            }
            round = round.wrapping_add(1);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(REPORT_INTERVAL) => {}
                () = self.changed.notified() => round = 0,
            }
        }
    }

    async fn read_holdings(&self) {
        if let Ok(layers) = self.handle.layers().await {
            self.holdings.lock().layers = layers.into_iter().map(|layer| layer.id).collect();
        }
        if let Ok(memories) = self.handle.memories().await {
            self.holdings.lock().memories = memories.into_iter().map(|memory| memory.build).collect();
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// In the order of their ids.
    served: Vec<Arc<ServedNode>>,
    /// Nodes that are not served at the moment, and the sandboxes that are on them.
    absent: HashMap<NodeId, HashSet<SandboxId>>,
}

/// The nodes of this server.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    state: RwLock<State>,
}

impl Nodes {
    /// Adds a node whose sandboxes were taken over.
    pub(crate) fn add(&self, node: Arc<ServedNode>) {
        let mut state = self.state.write();
        state.absent.remove(node.id());
        state.served.retain(|served| served.id() != node.id());
        state.served.push(node);
        state.served.sort_by(|a, b| a.id().as_str().cmp(b.id().as_str()));
    }

    /// Removes a node whose session is over. It is expected again.
    pub(crate) fn remove(&self, node: &Arc<ServedNode>) {
        self.state.write().served.retain(|served| !Arc::ptr_eq(served, node));
    }

    /// Expects a node that is not served, on which these sandboxes are.
    pub(crate) fn expect(&self, id: &NodeId, sandboxes: HashSet<SandboxId>) {
        let mut state = self.state.write();
        if !state.served.iter().any(|served| served.id() == id) {
            state.absent.insert(id.clone(), sandboxes);
        }
    }

    /// Whether a sandbox is on a node that is not served.
    pub(crate) fn is_absent(&self, id: &SandboxId) -> bool {
        self.state
            .read()
            .absent
            .values()
            .any(|sandboxes| sandboxes.contains(id))
    }

    /// Expects a node no more, which was forgotten.
    pub(crate) fn forget(&self, id: &NodeId) {
        self.state.write().absent.remove(id);
    }

    /// All that are served.
    pub(crate) fn all(&self) -> Vec<Arc<ServedNode>> {
        self.state.read().served.clone()
    }

    /// A node, if it is served.
    pub(crate) fn find(&self, id: &NodeId) -> Option<Arc<ServedNode>> {
        let state = self.state.read();
        state.served.iter().find(|served| served.id() == id).cloned()
    }

    /// Whether a node is served.
    pub(crate) fn is_served(&self, id: &NodeId) -> bool {
        self.state.read().served.iter().any(|served| served.id() == id)
    }

    /// Whether every node of this server is served.
    pub(crate) fn is_complete(&self) -> bool {
        self.state.read().absent.is_empty()
    }

    /// Whether a node is one of this server, served or not.
    pub(crate) fn is_own(&self, id: &NodeId) -> bool {
        let state = self.state.read();
        state.absent.contains_key(id) || state.served.iter().any(|served| served.id() == id)
    }

    /// The nodes of this server that are not served, to read their rows.
    pub(crate) fn absent(&self) -> Vec<NodeId> {
        self.state.read().absent.keys().cloned().collect()
    }

    /// The layers of all nodes, for whoever needs to know what is missing: it fails while one of them is away.
    ///
    /// # Errors
    /// When a node is away, or fails.
    pub(crate) async fn layers(&self) -> Result<Vec<LayerInfo>, NodeError> {
        if !self.is_complete() {
            return Err(NodeError::Away);
        }
        let mut all = BTreeMap::new();
        for node in self.all() {
            let layers = node.handle.layers().await?;
            all.extend(layers.into_iter().map(|layer| (layer.id.clone(), layer)));
        }
        Ok(all.into_values().collect())
    }

    /// The sandboxes of all pools that no request has taken.
    pub(crate) fn pooled(&self) -> Vec<PooledSandbox> {
        self.all().iter().flat_map(|node| node.pool.list()).collect()
    }

    /// Ends a pooled sandbox for the operator. Returns whether there was one.
    pub(crate) fn end_pooled(&self, id: &SandboxId) -> bool {
        self.all().iter().any(|node| node.pool.end(id))
    }

    /// How many are being started for pools, and how many are ready.
    pub(crate) fn pool_counts(&self) -> [(&'static str, usize); 2] {
        let mut total = [("starting", 0), ("ready", 0)];
        for node in self.all() {
            for ((_, total), (_, count)) in total.iter_mut().zip(node.pool.counts()) {
                *total += count;
            }
        }
        total
    }

    /// The layers that pooled sandboxes have.
    pub(crate) fn pooled_layers(&self) -> Vec<LayerId> {
        self.all().iter().flat_map(|node| node.pool.layers()).collect()
    }

    /// Reserves what a sandbox needs of any host, for one that counts against no team.
    pub(crate) async fn admit_to_any(&self, id: &SandboxId, needs: Needs<'_>) -> Result<CapacityPermit, NoCapacity> {
        let mut refused = NoCapacity::Away;
        for node in self.choose(needs) {
            match node.pool.admit_to_host(id).await {
                Ok(permit) => return Ok(permit),
                Err(why) => refused = why,
            }
        }
        Err(refused)
    }

    /// The nodes on which a sandbox can be placed, the best first.
    pub(crate) fn choose(&self, needs: Needs<'_>) -> Vec<Arc<ServedNode>> {
        let mut nodes = self.all();
        if nodes.len() > 1 {
            nodes.sort_by_cached_key(|node| rank(node, needs));
        }
        nodes
    }
}

/// What is smallest for the best node: one that has the processes to go on with; one that has the layers, where they can come
/// from nowhere else; one that has answered lately; and then the one with the most memory for each sandbox that it has.
fn rank(node: &ServedNode, needs: Needs<'_>) -> (bool, usize, bool, Reverse<u64>) {
    let lacks_memory = needs.memory.is_some_and(|build| !node.has_memory(build));
    let lacks = match node.handle.stored() {
        Some(_) => 0,
        None => node.lacks(layers_of(needs.image)),
    };
    let (reading, sandboxes) = node.admission.last_report();
    let each = reading.map(|capacity| capacity.memory_available_bytes / (u64::from(sandboxes) + 1));
    (lacks_memory, lacks, each.is_none(), Reverse(each.unwrap_or(0)))
}
