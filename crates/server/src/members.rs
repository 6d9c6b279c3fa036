//! The nodes that may connect to this server: tokens, joining, forgetting.
//!
//! The id in a node's certificate is that of the rows of its sandboxes as well. So what is on a node is lost when it is forgotten: a
//! host that joins again is another node.

use std::sync::Arc;
use std::time::Duration;

use link::{Authority, Hub, Members, MembersFuture, Refusal, TrustError};
use model::capacity::{Bounds, HostReport};
use model::id::NodeId;
use model::lifecycle::{Kept, State};
use serde::{Deserialize, Serialize};
use store::Store;
use store::error::StoreError;
use store::joined_nodes::{JoinedNode, LeftOnNode, TokenOutcome};
use tokio::sync::Notify;

use crate::clock::{Clock, SECOND_US, rfc3339};
use crate::nodes::room::Said;
use crate::nodes::{Nodes, ServedNode};

/// How long a token is good for.
pub const TOKEN_LIFETIME: Duration = Duration::from_secs(60 * 60);

/// How long a drain waits for the server that has the node, which says about once a second what it knows, and how often it looks.
const KNOWN_BOUND: Duration = Duration::from_secs(10);
const KNOWN_RETRY: Duration = Duration::from_millis(100);

/// The nodes of a server.
#[derive(Debug)]
pub struct NodeMembers {
    store: Store,
    clock: Clock,
    authority: Arc<Authority>,
    hub: Arc<Hub>,
    /// A node was forgotten.
    forgotten: Notify,
    /// Held while it is read or written which nodes drain and until the nodes that are served know, so that they know the latest.
    draining: tokio::sync::Mutex<()>,
}

/// Why a node is not known to drain, or not to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrainError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such node, or it was forgotten.
    #[error("there is no such node")]
    Unknown,
    /// Another server has it, which has not said in time that it knows.
    #[error("the server that has the node does not know yet")]
    Unconfirmed,
}

/// Why no token was made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system refuses.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// A node, for its operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorNode {
    /// Id of the node, as in its certificate.
    pub id: String,
    /// The name of its host.
    pub name: String,
    /// `connected`, `taking over` (it is connected, and its sandboxes are about to be taken over), `elsewhere` (another server
    /// serves it), `away` or `forgotten`.
    pub state: String,
    /// When it has joined, RFC 3339; absent where it is a part of the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_at: Option<String>,
    /// When it last connected, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_at: Option<String>,
    /// When it was forgotten, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgotten_at: Option<String>,
    /// Since when it gets no new sandboxes, RFC 3339; absent if it gets some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining_at: Option<String>,
    /// The sandboxes that are left there while it drains, wherever it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<OperatorLeft>,
    /// The address that it has connected from, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The version of its program, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether it can write the processes of sandboxes to disk, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes_processes: Option<bool>,
    /// Whether the limits of sandboxes are enforced, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_limited: Option<bool>,
    /// The number of sandboxes that take a part of it, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u32>,
    /// Memory that its host had left a moment ago, in bytes, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_available_bytes: Option<u64>,
    /// Disk space that its host had left a moment ago, in bytes, while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_available_bytes: Option<u64>,
    /// Memory of its host, in bytes, while it is connected and says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Cores of its host, while it is connected and says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Share of the time in which something on its host waited for processors or memory, in per cent, while it is connected and
    /// says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pressure: Option<u8>,
    /// Maximum number of sandboxes on it at the same time, while it is connected and where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u32>,
}

/// The sandboxes that a draining node has, for its operator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorLeft {
    /// Sandboxes that run, or are being started, paused, resumed or ended.
    pub running: u64,
    /// Sandboxes that are paused in the memory of its host, and end with that.
    pub paused_in_memory: u64,
    /// Sandboxes that are paused on its disk, where they stay when the host is restarted.
    pub paused_on_disk: u64,
}

impl OperatorLeft {
    fn add(&mut self, left: &LeftOnNode) {
        match (left.state, left.kept) {
            (State::Paused, Some(Kept::Memory)) => self.paused_in_memory += left.count,
            (State::Paused, _) => self.paused_on_disk += left.count,
            _ => self.running += left.count,
        }
    }
}

impl OperatorNode {
    /// How many of its sandboxes would not outlive a restart of its host. Those without a row, as of builds, are known while it is
    /// connected to the server that was asked.
    #[must_use]
    pub fn ending_with_host(&self) -> u64 {
        let left = self.left.unwrap_or_default();
        let counted = left.running.saturating_add(left.paused_in_memory);
        counted.max(self.sandboxes.map_or(0, u64::from))
    }

    /// The node that is a part of the server, which no other process joins.
    pub(crate) async fn of_server(node: &ServedNode) -> Self {
        // Nothing else reads it regularly here.
        let host = node.admission.host_report().await;
        let (_, sandboxes) = node.admission.last_report();
        let mut shown = Self {
            id: node.id().as_str().to_owned(),
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            state: "connected".to_owned(),
            joined_at: None,
            seen_at: None,
            forgotten_at: None,
            draining_at: None,
            left: None,
            address: None,
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            writes_processes: Some(node.writes_processes),
            is_limited: None,
            sandboxes: Some(sandboxes),
            memory_available_bytes: None,
            disk_available_bytes: None,
            memory_bytes: None,
            cores: None,
            pressure: None,
            max_sandboxes: None,
        };
        shown.set_host(host, node.admission.bounds());
        shown
    }

    /// Sets what its host has said, with the bounds of the server for any host.
    fn set_host(&mut self, host: Option<HostReport>, bounds: Bounds) {
        let load = host.and_then(|host| host.load);
        self.memory_available_bytes = host.map(|host| host.left.memory_available_bytes);
        self.disk_available_bytes = host.map(|host| host.left.disk_available_bytes);
        self.memory_bytes = load.map(|load| load.memory_bytes);
        self.cores = load.map(|load| load.cores);
        self.pressure = load.map(|load| load.pressure);
        self.max_sandboxes = load.map_or(bounds, |load| load.bounds.and(bounds)).max_sandboxes;
    }
}

impl NodeMembers {
    /// The nodes of the server with this database, which connect to the port of this hub.
    #[must_use]
    pub fn new(store: Store, clock: Clock, authority: Arc<Authority>, hub: Arc<Hub>) -> Self {
        Self {
            store,
            clock,
            authority,
            hub,
            forgotten: Notify::new(),
            draining: tokio::sync::Mutex::default(),
        }
    }

    /// Makes a token with which one node can join, and returns its text.
    pub(crate) async fn make_token(&self) -> Result<String, TokenError> {
        let token = self.authority.make_token()?;
        let now_us = self.clock.now_us();
        let lifetime_us = i64::try_from(TOKEN_LIFETIME.as_secs()).unwrap_or(0) * SECOND_US;
        self.store
            .node_token_insert(&token.hash(), now_us, now_us + lifetime_us)
            .await?;
        Ok(token.expose())
    }

    /// Where nodes connect.
    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// The database.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Resolves when a node was forgotten since the last call.
    pub(crate) async fn node_forgotten(&self) {
        self.forgotten.notified().await;
    }

    /// Has those that were forgotten be looked at again.
    pub(crate) fn note_ended(&self) {
        self.forgotten.notify_one();
    }

    /// All nodes, oldest first.
    pub(crate) async fn list(&self, served: &Nodes) -> Result<Vec<OperatorNode>, StoreError> {
        let nodes = self.store.joined_node_list().await?;
        let mut shown: Vec<_> = nodes.into_iter().map(|node| self.show(node, served)).collect();
        self.count_left(&mut shown).await?;
        Ok(shown)
    }

    /// One node.
    pub(crate) async fn find(&self, id: &NodeId, served: &Nodes) -> Result<Option<OperatorNode>, StoreError> {
        let mut shown = self.store.joined_node(id).await?.map(|node| self.show(node, served));
        self.count_left(shown.as_mut_slice()).await?;
        Ok(shown)
    }

    /// Adds what is left on those that drain.
    async fn count_left(&self, nodes: &mut [OperatorNode]) -> Result<(), StoreError> {
        if nodes.iter().all(|node| node.draining_at.is_none()) {
            return Ok(());
        }
        let left = self.store.left_on_draining_nodes().await?;
        for node in nodes.iter_mut().filter(|node| node.draining_at.is_some()) {
            let mut counts = OperatorLeft::default();
            for part in left.iter().filter(|part| part.node.as_str() == node.id) {
                counts.add(part);
            }
            node.left = Some(counts);
        }
        Ok(())
    }

    /// Drains a node, and returns since when it drains. If it is served here, it gets no new sandboxes from then on.
    pub(crate) async fn drain(&self, id: &NodeId, served: &Nodes) -> Result<i64, DrainError> {
        let _turn = self.turn_to_drain().await;
        let since_us = self.store.joined_node_drain(id, self.clock.now_us()).await?;
        let since_us = since_us.ok_or(DrainError::Unknown)?;
        served.drain(id, Some(since_us));
        tracing::info!(node.id = %id, "the operator drains a node");
        Ok(since_us)
    }

    /// Waits until the server that has a node, if there is one, knows that it drains since then.
    pub(crate) async fn until_known(&self, id: &NodeId, since_us: i64, served: &Nodes) -> Result<(), DrainError> {
        let known = tokio::time::timeout(KNOWN_BOUND, self.look_until_known(id, since_us, served));
        known.await.map_err(|_| DrainError::Unconfirmed)?
    }

    async fn look_until_known(&self, id: &NodeId, since_us: i64, served: &Nodes) -> Result<(), DrainError> {
        loop {
            // One that was taken over here since knows.
            if served.is_served(id) {
                return Ok(());
            }
            let now_us = self.store.lease_time_us(self.clock.now_us()).await?;
            let row = self.store.node_by_id(id).await?;
            if !row.is_some_and(|row| row.is_leased(now_us)) {
                // Whoever takes it over reads that.
                return Ok(());
            }
            let servers = self.store.server_list().await?;
            let mut said = servers
                .iter()
                .filter_map(|server| Said::parse(server.room_json.as_deref()?));
            if said.any(|said| {
                said.draining
                    .get(id.as_str())
                    .is_some_and(|known_us| *known_us >= since_us)
            }) {
                return Ok(());
            }
            tokio::time::sleep(KNOWN_RETRY).await;
        }
    }

    /// Ends the drain of a node.
    pub(crate) async fn undrain(&self, id: &NodeId, served: &Nodes) -> Result<(), DrainError> {
        let _turn = self.turn_to_drain().await;
        if !self.store.joined_node_undrain(id).await? {
            return Err(DrainError::Unknown);
        }
        served.drain(id, None);
        tracing::info!(node.id = %id, "the operator ends the drain of a node");
        Ok(())
    }

    /// The turn of a caller that reads or writes which nodes drain, and then tells the nodes that are served.
    pub(crate) async fn turn_to_drain(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.draining.lock().await
    }

    /// Reads whether a node drains that is being taken over.
    pub(crate) async fn read_draining(&self, node: &ServedNode) -> Result<(), StoreError> {
        let _turn = self.turn_to_drain().await;
        let row = self.store.joined_node(node.id()).await?;
        node.drain(row.and_then(|row| row.draining_us));
        Ok(())
    }

    /// Forgets a node: its connection ends, and its certificate is refused. `false` when there is none, or it was forgotten
    /// before.
    pub(crate) async fn forget(&self, id: &NodeId) -> Result<bool, StoreError> {
        let forgotten = self.store.joined_node_forget(id, self.clock.now_us()).await?;
        // Also when it was forgotten before, by a request that was cut here.
        self.hub.expel(id);
        self.forgotten.notify_one();
        if forgotten {
            tracing::info!(node.id = %id, "the operator has forgotten a node");
        }
        Ok(forgotten)
    }

    fn show(&self, node: JoinedNode, served: &Nodes) -> OperatorNode {
        let connected = self.hub.connected(&node.id);
        let elsewhere = served.has_elsewhere(&node.id);
        let served = served.find(&node.id).filter(|_| connected.is_some());
        let state = match (&connected, &served, node.forgotten_us) {
            (_, _, Some(_)) => "forgotten",
            (Some(_), Some(_), None) => "connected",
            (Some(_), None, None) => "taking over",
            (None, _, None) if elsewhere => "elsewhere",
            (None, _, None) => "away",
        };
        let report = served.as_ref().map(|served| served.admission.last_report());
        let mut shown = OperatorNode {
            id: node.id.as_str().to_owned(),
            name: node.name,
            state: state.to_owned(),
            joined_at: Some(rfc3339(node.joined_us)),
            seen_at: node.seen_us.map(rfc3339),
            forgotten_at: node.forgotten_us.map(rfc3339),
            draining_at: node.draining_us.filter(|_| node.forgotten_us.is_none()).map(rfc3339),
            left: None,
            address: connected.as_ref().map(|connected| connected.address.to_string()),
            version: connected.as_ref().map(|connected| connected.version.clone()),
            writes_processes: connected
                .as_ref()
                .map(|connected| connected.capabilities.writes_processes),
            is_limited: connected.as_ref().map(|connected| connected.capabilities.is_limited),
            sandboxes: report.map(|(_, sandboxes)| sandboxes),
            memory_available_bytes: None,
            disk_available_bytes: None,
            memory_bytes: None,
            cores: None,
            pressure: None,
            max_sandboxes: None,
        };
        if let Some(served) = served {
            shown.set_host(report.and_then(|(host, _)| host), served.admission.bounds());
        }
        shown
    }

    async fn join(&self, hash: &str, name: &str) -> Result<NodeId, Refusal> {
        let id: NodeId = uuid::Uuid::new_v4()
            .to_string()
            .parse()
            .map_err(|error: model::id::InvalidId| Refusal::failed(&error))?;
        let joined = self.store.node_join(hash, &id, name, self.clock.now_us()).await;
        match joined.map_err(|error| Refusal::failed(&error))? {
            TokenOutcome::Joined => Ok(id),
            TokenOutcome::Unknown => Err(Refusal::lasting(
                "the token is not one of this server: make one with `ringfence node token` on the server",
            )),
            TokenOutcome::Used => Err(Refusal::lasting(
                "the token was used already, and is good once: make another with `ringfence node token` on the server",
            )),
            TokenOutcome::Expired => Err(Refusal::lasting(
                "the token has expired: make another with `ringfence node token` on the server",
            )),
        }
    }

    async fn is_member(&self, id: &NodeId) -> Result<(), Refusal> {
        let node = self.store.joined_node(id).await;
        match node.map_err(|error| Refusal::failed(&error))? {
            Some(node) if node.forgotten_us.is_none() => Ok(()),
            Some(_) => Err(Refusal::lasting(format!(
                "node {id} was forgotten: join again with `ringfence node join` and a new token"
            ))),
            None => Err(Refusal::lasting(format!(
                "node {id} is not known to this server: join with `ringfence node join` and a new token"
            ))),
        }
    }
}

impl Members for NodeMembers {
    fn redeem<'a>(&'a self, hash: &'a str, name: &'a str) -> MembersFuture<'a, NodeId> {
        Box::pin(self.join(hash, name))
    }

    fn check<'a>(&'a self, node: &'a NodeId) -> MembersFuture<'a, ()> {
        Box::pin(self.is_member(node))
    }

    fn seen<'a>(&'a self, node: &'a NodeId, name: &'a str) -> MembersFuture<'a, ()> {
        Box::pin(async move {
            let seen = self.store.joined_node_seen(node, name, self.clock.now_us()).await;
            seen.map_err(|error| Refusal::failed(&error))
        })
    }
}
