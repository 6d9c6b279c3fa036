//! The nodes whose sandboxes this server has taken over, and on which of them a new sandbox is placed.
//!
//! A [`ServedNode`] is one node in one session: its rows under one acquisition of their lease, its handle, its warm pool, its
//! share of the host. A sandbox has the one that it is on ([`crate::sandboxes::entry::SandboxEntry`]), so what a session has
//! begun never touches the rows or the node of the next one. `ringfence up` has one, from its start to its end.
//!
//! A node that is here may be away: then its calls fail at once, and nothing was begun. Only a session that is over removes
//! it, and the next one brings it back.

pub(crate) mod all;
pub(crate) mod draining;
pub(crate) mod keeper;
mod memories;
pub(crate) mod placement;
pub(crate) mod room;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use model::id::{BuildId, LayerId, NodeId, SandboxId};
use model::placement::{CANDIDATES, CHOICES, Need, Outcome};
use parking_lot::{Mutex, RwLock};
use protocol::node::{Image, LayerInfo, NoCapacity, NodeError};
use store::nodes::NodeRows;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

pub(crate) use self::memories::{HeldMemories, NodeMemories};
use self::placement::{Placement, Sent, Told, report_of};
use self::room::Room;
use crate::admission::capacity::CapacityPermit;
use crate::admission::quota::Reservation;
use crate::admission::{Admission, AdmissionControl, AdmissionError};
use crate::builds::recipe::layers_of;
use crate::node::NodeHandle;
use crate::pool::{Pool, PoolKey, PooledSandbox};

/// What any node can do.
pub(crate) const ANYWHERE: Needs<'_> = Needs {
    image: &Image::Base,
    memory: None,
    memory_mb: 0,
    pool: None,
};

/// How long a node may take to say whether it has room, where there are others: one that does not answer must not hold up what
/// others can do.
pub(crate) const ADMISSION_BOUND: Duration = Duration::from_secs(1);
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
    /// Whether it keeps deadlines: it is told them, and asked what it has done about them.
    pub(crate) keeps_deadlines: bool,
    /// Whether it makes parcels of paused sandboxes, and sandboxes of parcels.
    pub(crate) makes_parcels: bool,
    /// Whether it makes parcels of the memory of snapshots, and memory of parcels.
    pub(crate) copies_memories: bool,
    /// Whether it takes permits that come with starts.
    pub(crate) admits_with_start: bool,
    pub(crate) memories: NodeMemories,
    /// Sandboxes that have left it, of which it has something still.
    pub(crate) left: Mutex<HashSet<SandboxId>>,
    /// Paused sandboxes of its rows of which it has nothing, and the blob store a copy.
    pub(crate) lacks: Mutex<HashSet<SandboxId>>,
    /// What it is known to have.
    pub(crate) holdings: Mutex<Holdings>,
    /// What is known of the room of all nodes.
    pub(crate) placement: Arc<Placement>,
    /// Whether it is placed on by that, as where there are several.
    pub(crate) is_placed_on: AtomicBool,
    /// Since when it gets no new sandboxes; 0 if it gets some. Set by [`Self::drain`] alone.
    pub(crate) draining_us: AtomicI64,
    /// Notified when the node has something new.
    pub(crate) changed: Notify,
    /// Cancelled when the session is over.
    pub(crate) over: CancellationToken,
    /// Whether it is a process of its own, whose next session begins with asking what there is. That of `ringfence up` has one session.
    pub(crate) is_apart: bool,
    /// Held for as long as anything refers to the session.
    pub(crate) _in_use: TaskTrackerToken,
}

/// What a node is known to have. It may have more or less: it says so when it is asked to start something.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    pub(crate) layers: HashSet<LayerId>,
    pub(crate) memories: HeldMemories,
}

/// What a node has to have for a sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs<'a> {
    /// Its file system.
    pub(crate) image: &'a Image,
    /// The snapshot whose processes it continues with.
    pub(crate) memory: Option<&'a BuildId>,
    /// The limit of its memory, in MiB.
    pub(crate) memory_mb: u32,
    /// The kind of pooled sandbox that would do.
    pub(crate) pool: Option<&'a PoolKey>,
}

/// Share of the host of a sandbox that counts against no team, and the node that gave it.
#[derive(Debug)]
pub(crate) struct HostShare {
    nodes: Arc<Nodes>,
    id: SandboxId,
    _permit: CapacityPermit,
}

impl Drop for HostShare {
    fn drop(&mut self) {
        self.nodes.admitted.lock().remove(&self.id);
    }
}

impl ServedNode {
    /// Id of the node.
    pub(crate) fn id(&self) -> &NodeId {
        self.rows.node()
    }

    /// What ends its session, if another one follows.
    pub(crate) fn session_to_end(&self) -> Option<&CancellationToken> {
        self.is_apart.then_some(&self.over)
    }

    /// Whether it can go on with what is copied of a sandbox on another node, and a sandbox on it can be copied for others.
    pub(crate) fn takes_forks(&self) -> bool {
        self.copies_memories && self.writes_processes
    }

    /// How many of these layers it is not known to have.
    fn lacks(&self, layers: &[LayerId]) -> usize {
        let holdings = self.holdings.lock();
        layers.iter().filter(|layer| !holdings.layers.contains(*layer)).count()
    }

    pub(crate) fn has_memory(&self, build: &BuildId) -> bool {
        self.holdings.lock().memories.has(build)
    }

    /// Notes that it has a layer.
    pub(crate) fn note_layer(&self, layer: &LayerId) {
        self.holdings.lock().layers.insert(layer.clone());
    }

    /// Reads again and again what its host has left and what it has, for placement.
    pub(crate) async fn follow_reports(self: Arc<Self>, nodes: Arc<Nodes>, stop: CancellationToken) {
        self.is_placed_on.store(true, Ordering::Relaxed);
        let (mut round, mut most_bytes) = (0_u32, 0);
        loop {
            let host = self.admission.host_report().await;
            if round.is_multiple_of(HOLDINGS_EVERY) {
                self.read_holdings().await;
            }
            if let Some(host) = host {
                most_bytes = host.left.memory_available_bytes.max(most_bytes);
                let told = Told {
                    sandboxes: self.admission.last_report().1,
                    spare: u32::try_from(self.pool.ready()).unwrap_or(u32::MAX),
                    bounds: self.admission.bounds(),
                    layers: self.holdings.lock().layers.clone(),
                    most_bytes,
                    is_draining: self.is_draining(),
                };
                nodes.report(&self, report_of(host, told));
            }
            round = round.wrapping_add(1);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(REPORT_INTERVAL) => {}
                () = self.changed.notified() => round = 0,
            }
        }
    }

    /// Notes that it is asked for room, where there are several.
    fn asked(&self) -> Option<Sent> {
        let is_placed_on = self.is_placed_on.load(Ordering::Relaxed);
        is_placed_on.then(|| self.placement.begin(self.id()))
    }

    /// Reserves what a sandbox needs of it. What becomes of the request is noted when its start has begun or was refused.
    pub(crate) async fn admit(
        &self,
        id: &SandboxId,
        reservation: &Arc<Reservation>,
    ) -> Result<(Admission, Option<Sent>), AdmissionError> {
        let sent = self.asked();
        match self.pool.admit(id, reservation).await {
            Ok(admission) => Ok((admission, sent)),
            Err(error) => {
                if matches!(error, AdmissionError::NoCapacity { .. }) {
                    done(sent, Outcome::Refused);
                }
                Err(error)
            }
        }
    }

    /// As [`Self::admit`], without a wait, for a sandbox that is started at once: its start asks for the permit. None where the node
    /// has to be asked before.
    pub(crate) fn admit_with_start(&self, reservation: &Arc<Reservation>) -> Option<(Admission, Option<Sent>)> {
        let admits = self.admits_with_start;
        admits.then(|| (self.admission.admit_with_start(reservation), self.asked()))
    }

    async fn read_holdings(&self) {
        if let Ok(layers) = self.handle.layers().await {
            self.holdings.lock().layers = layers.into_iter().map(|layer| layer.id).collect();
        }
        let _listing = self.memories.listing.lock().await;
        if let Ok(memories) = self.handle.memories().await {
            let builds = memories.into_iter().map(|memory| memory.build);
            self.holdings.lock().memories.replace(builds);
        }
    }
}

/// Notes what became of a request for room.
pub(crate) fn done(sent: Option<Sent>, outcome: Outcome) {
    if let Some(sent) = sent {
        sent.done(outcome);
    }
}

#[derive(Debug, Default)]
struct State {
    /// In the order of their ids.
    served: Vec<Arc<ServedNode>>,
    /// Nodes that are not served at the moment, and the sandboxes that are on them.
    absent: HashMap<NodeId, HashSet<SandboxId>>,
    /// Since when they are not served.
    absent_since: HashMap<NodeId, Instant>,
    /// Nodes that another server of the service serves.
    elsewhere: HashSet<NodeId>,
    /// Nodes that have a session, whether or not their sandboxes were taken over.
    sessions: HashSet<NodeId>,
    /// Nodes that were forgotten and whose paused sandboxes are in the blob store.
    remembered: HashSet<NodeId>,
    /// The servers of the service, with this one; none if it works alone.
    servers: HashSet<NodeId>,
    /// Whether other servers may join at any time.
    can_be_joined: bool,
}

impl State {
    /// Whether a node is not served at the moment that may come back: one that was forgotten does not.
    fn is_one_away(&self) -> bool {
        self.absent.keys().any(|id| !self.remembered.contains(id))
    }
}

/// The nodes of this server.
#[derive(Debug)]
pub(crate) struct Nodes {
    state: RwLock<State>,
    /// What is known of their room. It is locked after the state, if both are.
    placement: Arc<Placement>,
    /// The nodes that have admitted a sandbox which counts against no team.
    admitted: Mutex<HashMap<SandboxId, Weak<ServedNode>>>,
    /// Notified when a sandbox has left a node that is not served.
    moves: Notify,
    /// Notified when a node was taken over.
    arrivals: Notify,
}

impl Nodes {
    pub(crate) fn new(placement: Placement) -> Self {
        Self {
            state: RwLock::default(),
            placement: Arc::new(placement),
            admitted: Mutex::default(),
            moves: Notify::new(),
            arrivals: Notify::new(),
        }
    }

    /// What is known of their room.
    fn placement(&self) -> Arc<Placement> {
        Arc::clone(&self.placement)
    }

    /// Adds a node whose sandboxes were taken over.
    pub(crate) fn add(&self, node: Arc<ServedNode>) {
        let mut state = self.state.write();
        state.absent.remove(node.id());
        state.absent_since.remove(node.id());
        state.elsewhere.remove(node.id());
        self.placement.add(node.id(), node.is_draining());
        state.served.retain(|served| served.id() != node.id());
        state.served.push(node);
        state.served.sort_by(|a, b| a.id().as_str().cmp(b.id().as_str()));
        drop(state);
        self.arrivals.notify_one();
    }

    /// Waits until another node was taken over, which may have what an earlier server has left there.
    pub(crate) async fn node_arrived(&self) {
        self.arrivals.notified().await;
    }

    /// Removes a node whose session is over. It is expected again.
    pub(crate) fn remove(&self, node: &Arc<ServedNode>) {
        let mut state = self.state.write();
        let before = state.served.len();
        state.served.retain(|served| !Arc::ptr_eq(served, node));
        if state.served.len() < before {
            self.placement.forget(node.id());
        }
    }

    /// Notes what a node has said, if its session is not over.
    fn report(&self, node: &Arc<ServedNode>, report: model::placement::Report) {
        let state = self.state.read();
        if state.served.iter().any(|served| Arc::ptr_eq(served, node)) {
            self.placement.report(node.id(), report);
        }
    }

    /// Expects a node that is not served, on which these sandboxes are.
    pub(crate) fn expect(&self, id: &NodeId, sandboxes: HashSet<SandboxId>) {
        let mut state = self.state.write();
        if !state.served.iter().any(|served| served.id() == id) {
            state.elsewhere.remove(id);
            state.absent.insert(id.clone(), sandboxes);
            state.absent_since.entry(id.clone()).or_insert_with(Instant::now);
        }
    }

    /// Notes that another server serves a node.
    pub(crate) fn note_elsewhere(&self, id: &NodeId) {
        let mut state = self.state.write();
        if !state.served.iter().any(|served| served.id() == id) {
            state.absent.remove(id);
            state.absent_since.remove(id);
            state.elsewhere.insert(id.clone());
        }
    }

    /// Notes that a session of a node begins: from now on its lease may be taken, and its sandboxes taken over.
    pub(crate) fn begin_session(&self, id: &NodeId) {
        self.state.write().sessions.insert(id.clone());
    }

    /// Notes that nothing of a node's session is left.
    pub(crate) fn end_session(&self, id: &NodeId) {
        self.state.write().sessions.remove(id);
    }

    /// Whether a node has no session here. Its lease says whether it has one elsewhere.
    pub(crate) fn is_without_session(&self, id: &NodeId) -> bool {
        !self.state.read().sessions.contains(id)
    }

    /// Notes a node that was forgotten and whose paused sandboxes are in the blob store: it is expected for them.
    pub(crate) fn remember(&self, id: &NodeId) {
        self.state.write().remembered.insert(id.clone());
    }

    /// Whether a node was forgotten and is expected for its sandboxes.
    pub(crate) fn is_remembered(&self, id: &NodeId) -> bool {
        self.state.read().remembered.contains(id)
    }

    /// The nodes that were forgotten and are expected for their sandboxes.
    pub(crate) fn remembered(&self) -> Vec<NodeId> {
        self.state.read().remembered.iter().cloned().collect()
    }

    /// Whether a node that is not served is expected, and no sandbox is on it.
    pub(crate) fn is_without_sandboxes(&self, id: &NodeId) -> bool {
        self.state.read().absent.get(id).is_some_and(HashSet::is_empty)
    }

    /// Notes that a sandbox is on a node no more that is not served.
    pub(crate) fn note_left(&self, id: &NodeId, sandbox: &SandboxId) {
        if let Some(sandboxes) = self.state.write().absent.get_mut(id) {
            sandboxes.remove(sandbox);
        }
        self.moves.notify_one();
    }

    /// How long a node is known not to be served; none if it is, or that is not known.
    pub(crate) fn absent_for(&self, id: &NodeId) -> Option<Duration> {
        self.state.read().absent_since.get(id).map(Instant::elapsed)
    }

    /// Waits until a sandbox has left a node that is not served.
    pub(crate) async fn sandbox_left(&self) {
        self.moves.notified().await;
    }

    /// Whether another server serves a node.
    pub(crate) fn has_elsewhere(&self, id: &NodeId) -> bool {
        self.state.read().elsewhere.contains(id)
    }

    /// Notes which servers there are.
    pub(crate) fn note_servers(&self, servers: HashSet<NodeId>) {
        self.state.write().servers = servers;
    }

    /// Whether a server is one of this service, and not this one alone.
    pub(crate) fn has_server(&self, id: &NodeId) -> bool {
        self.state.read().servers.contains(id)
    }

    /// Whether this server is, was or may become one of several on its database. Then nodes may come from other servers and go
    /// there, with what builds of any server use, and sandboxes of others count for the limits of teams as well.
    ///
    /// A server that others may join at any time always is: it knows of them a moment after they know of it.
    pub(crate) fn have_several_servers(&self) -> bool {
        let state = self.state.read();
        state.can_be_joined || state.servers.len() > 1
    }

    /// Notes that other servers may join at any time.
    pub(crate) fn note_can_be_joined(&self) {
        self.state.write().can_be_joined = true;
    }

    /// What the nodes that are served have left for a sandbox of any kind.
    pub(crate) fn room(&self) -> Room {
        self.placement.room()
    }

    /// Any number, to order what is equal.
    pub(crate) fn any(&self) -> usize {
        self.placement.any()
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
        let mut state = self.state.write();
        state.absent.remove(id);
        state.elsewhere.remove(id);
        state.absent_since.remove(id);
        state.remembered.remove(id);
    }

    /// Whether any is served.
    pub(crate) fn has_any(&self) -> bool {
        !self.state.read().served.is_empty()
    }

    /// Whether one can go on with what is copied of a sandbox on another node.
    pub(crate) fn any_takes_forks(&self) -> bool {
        self.state.read().served.iter().any(|node| node.takes_forks())
    }

    /// Whether any is served and connected now.
    pub(crate) fn has_connected(&self) -> bool {
        let state = self.state.read();
        state.served.iter().any(|node| node.handle.away_for().is_none())
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

    /// Whether every node is served here.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.state.read();
        !state.is_one_away() && state.elsewhere.is_empty()
    }

    /// Whether a node is one of this service, served or not.
    pub(crate) fn is_own(&self, id: &NodeId) -> bool {
        let state = self.state.read();
        state.absent.contains_key(id)
            || state.elsewhere.contains(id)
            || state.served.iter().any(|served| served.id() == id)
    }

    /// The nodes of the service that are not served here, to read their rows.
    pub(crate) fn absent(&self) -> Vec<NodeId> {
        let state = self.state.read();
        state.absent.keys().chain(&state.elsewhere).cloned().collect()
    }

    /// The layers of all nodes, for whoever needs to know what is missing: it fails while one of them is away.
    ///
    /// # Errors
    /// When a node is away, or fails.
    pub(crate) async fn layers(&self) -> Result<Vec<LayerInfo>, NodeError> {
        if !self.is_complete() {
            return Err(NodeError::Away);
        }
        self.layers_here().await
    }

    /// The layers of the nodes that no other server serves: it fails while one of them is away.
    ///
    /// # Errors
    /// When a node is away, or fails.
    pub(crate) async fn layers_here(&self) -> Result<Vec<LayerInfo>, NodeError> {
        if self.state.read().is_one_away() {
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
    pub(crate) async fn admit_to_any(
        self: &Arc<Self>,
        id: &SandboxId,
        needs: Needs<'_>,
    ) -> Result<HostShare, NoCapacity> {
        let mut refused = NoCapacity::Away;
        for node in self.choose_for_step(needs) {
            let sent = node.asked();
            match node.pool.admit_to_host(id).await {
                Ok(permit) => {
                    done(sent, Outcome::Placed);
                    self.admitted.lock().insert(id.clone(), Arc::downgrade(&node));
                    return Ok(HostShare {
                        nodes: Arc::clone(self),
                        id: id.clone(),
                        _permit: permit,
                    });
                }
                Err(why) => {
                    done(sent, Outcome::Refused);
                    refused = why;
                }
            }
        }
        Err(refused)
    }

    /// The node that has admitted a sandbox which counts against no team.
    fn admitted_by(&self, id: &SandboxId) -> Option<Arc<ServedNode>> {
        let node = self.admitted.lock().get(id)?.upgrade()?;
        Some(node).filter(|node| !node.over.is_cancelled())
    }

    /// Whether the node that has admitted a sandbox is not connected any more.
    pub(crate) fn has_lost(&self, id: &SandboxId) -> bool {
        self.admitted_by(id).is_none_or(|node| node.handle.away_for().is_some())
    }

    /// The nodes on which a sandbox can be placed, the best first; none of those that drain.
    ///
    /// Where layers can come from nowhere else, those come first that have them. Of these, the ones that have the processes to
    /// go on with, then the ones of whose pool a sandbox fits, and then what [`model::placement`] says.
    /// Where few seem to have room, some others are asked last all the same: what is known of them is old, a refusal is that
    /// of a node and says why, and pooled sandboxes give way to a request.
    pub(crate) fn choose(&self, needs: Needs<'_>) -> Vec<Arc<ServedNode>> {
        let mut nodes = self.all();
        nodes.retain(|node| !node.is_draining());
        if nodes.len() < 2 {
            return nodes;
        }
        let layers = layers_of(needs.image);
        let mut groups: BTreeMap<usize, Vec<Arc<ServedNode>>> = BTreeMap::new();
        for node in nodes {
            let lacks = match node.handle.stored() {
                Some(_) => 0,
                None => node.lacks(layers),
            };
            groups.entry(lacks).or_default().push(node);
        }
        let mut order = Vec::new();
        for group in groups.into_values() {
            let left = CANDIDATES.saturating_sub(order.len());
            order.extend(self.choose_of(group, needs, layers).into_iter().take(left));
        }
        order
    }

    fn choose_of(&self, group: Vec<Arc<ServedNode>>, needs: Needs<'_>, layers: &[LayerId]) -> Vec<Arc<ServedNode>> {
        let need = Need {
            memory_mb: needs.memory_mb,
            layers,
            features: &[],
        };
        let mut by_fit: BTreeMap<(bool, bool), HashMap<NodeId, Arc<ServedNode>>> = BTreeMap::new();
        for node in &group {
            let has_memory = needs.memory.is_some_and(|build| node.has_memory(build));
            let has_pooled = needs.pool.is_some_and(|key| node.pool.has_ready(key));
            let alike = by_fit.entry((!has_memory, !has_pooled)).or_default();
            alike.insert(node.id().clone(), Arc::clone(node));
        }
        let mut order = Vec::new();
        for (fit, mut alike) in by_fit {
            let chosen = self.placement.candidates(&|id| alike.contains_key(id), &need);
            order.extend(chosen.iter().filter_map(|id| alike.remove(id)));
            if fit.1 {
                continue;
            }
            // A sandbox that is there takes no room.
            order.extend(alike.into_values());
        }
        if order.len() < CANDIDATES {
            let is_new = |node: &Arc<ServedNode>| !order.iter().any(|other| Arc::ptr_eq(node, other));
            let mut others: Vec<_> = group.into_iter().filter(is_new).collect();
            others.sort_by_cached_key(|node| (node.pool.ready() == 0, self.placement.any()));
            order.extend(others.into_iter().take(CHOICES));
        }
        order
    }
}
