//! The sessions of nodes that are processes of their own: each node is taken over when it connects, and let go when it was
//! restarted, or forgotten. None of them disturbs another.
//!
//! A session has the lease of its node, so its changes cannot be those of an earlier one. A node that loses its connection alone
//! keeps its session. The sandboxes of a node that is not here are known by their rows: they are listed, count in the quotas
//! of their teams, and are answered 503.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use link::Session;
use model::id::{NodeId, OwnerId};
use parking_lot::Mutex;
use protocol::node::{NodeApi, NodeError};
use store::error::StoreError;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::lease::{LeaseError, NodeIdentity, NodeLease};
use crate::members::NodeMembers;
use crate::node_pauses::NodePauses;
use crate::nodes::ServedNode;
use crate::nodes::keeper::{HeldQuotas, NodeCan, NodeKeeper};
use crate::others::{BEAT, OtherServers, is_of_another};
use crate::sandboxes::adopt::AdoptError;

/// Pause before a node that could not be taken over is tried again.
const TAKEOVER_PAUSE: Duration = Duration::from_millis(200);

/// How long a node keeps its session without a connection where there are other servers.
const LOST: Duration = Duration::from_secs(20);

/// Why a node was not taken over.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("cannot take its lease")]
    Lease(#[from] StoreError),
    #[error("the node does not answer")]
    Silent(#[from] NodeError),
    #[error("another server has taken it over since this one has looked")]
    Taken,
    #[error("cannot take over its sandboxes")]
    Adopt(#[from] AdoptError),
    #[error("the node was restarted meanwhile")]
    Over,
    #[error("the server is being stopped")]
    Stopping,
}

/// The sessions of a server's nodes.
#[derive(Debug)]
pub struct NodeSessions {
    keeper: Arc<NodeKeeper>,
    members: Arc<NodeMembers>,
    /// The owner of all leases of this server.
    owner: OwnerId,
    /// What the sandboxes of nodes that no server serves take of the quotas.
    held: Mutex<HashMap<NodeId, HeldQuotas>>,
    /// The other servers; none where this one works alone.
    others: Option<Arc<OtherServers>>,
    /// What other servers were asked to have paused here.
    pauses: Arc<NodePauses>,
}

impl NodeSessions {
    pub(crate) fn new(
        keeper: Arc<NodeKeeper>,
        members: Arc<NodeMembers>,
        owner: OwnerId,
        others: Option<Arc<OtherServers>>,
    ) -> Self {
        Self {
            keeper,
            members,
            owner,
            held: Mutex::default(),
            others,
            pauses: Arc::default(),
        }
    }

    /// Expects all nodes that have joined, unless other servers serve them.
    pub(crate) async fn expect_all(&self) -> Result<(), StoreError> {
        if let Some(others) = &self.others {
            return self.look_around(others).await;
        }
        for node in self.members.store().joined_node_list().await? {
            if node.forgotten_us.is_none() {
                self.hold(&node.id).await?;
            }
        }
        Ok(())
    }

    /// Looks which nodes other servers serve, and expects the rest.
    async fn look_around(&self, others: &OtherServers) -> Result<(), StoreError> {
        let hub = self.members.hub();
        // Before the list: one that has joined in between is not forgotten.
        let sessions = hub.sessions();
        let nodes = {
            let _turn = self.members.turn_to_drain().await;
            let nodes = others.beat().await?;
            for node in &nodes {
                self.keeper.nodes.drain(&node.id, node.draining_us);
            }
            nodes
        };
        for node in self.keeper.nodes.all() {
            if others.is_several() && node.handle.away_for().is_some_and(|away| away > LOST) {
                // Another server may have nodes for what it has in the blob store.
                hub.expel(node.id());
            }
        }
        let is_listed = |id: &NodeId| nodes.iter().any(|node| node.id == *id);
        for id in sessions.iter().filter(|id| !is_listed(id)) {
            // It was forgotten through another server.
            hub.expel(id);
        }
        for id in self.keeper.nodes.absent() {
            if !is_listed(&id) && !hub.has_session(&id) && !self.keeper.nodes.is_remembered(&id) {
                // So was this one, and that server removes what it had.
                self.keeper.nodes.forget(&id);
                self.held.lock().remove(&id);
            }
        }
        self.look_for_forgotten(others).await?;
        for node in nodes {
            let is_at_another = is_of_another(node.lease.as_ref(), others.owner());
            if hub.has_session(&node.id) {
                // Taken over, or about to be. Unless it has gone to another server, which the renewal of the lease would notice later.
                if is_at_another && hub.connected(&node.id).is_none() {
                    hub.expel(&node.id);
                }
                if self.keeper.nodes.is_served(&node.id) {
                    // It may have been taken over while its rows were read here.
                    self.held.lock().remove(&node.id);
                }
                continue;
            }
            if is_at_another {
                self.keeper.nodes.note_elsewhere(&node.id);
                self.held.lock().remove(&node.id);
            } else if !self.held.lock().contains_key(&node.id) {
                self.hold(&node.id).await?;
            }
        }
        let keeper = &self.keeper;
        self.pauses
            .carry_out(&keeper.sandboxes, self.members.store(), &keeper.clock)
            .await
    }

    /// Has what is left of forgotten nodes be removed, if the server that was to do that is gone. One server of those that are
    /// there does it. What is kept of them can be resumed at each.
    async fn look_for_forgotten(&self, others: &OtherServers) -> Result<(), StoreError> {
        let (store, nodes) = (self.members.store(), &self.keeper.nodes);
        let now_us = store.lease_time_us(self.keeper.clock.now_us()).await?;
        let left = store.forgotten_node_list(now_us).await?;
        if left.iter().any(|id| others.is_home_of(id.as_str())) {
            self.members.note_ended();
        }
        for id in self.kept_of_forgotten(now_us).await? {
            let is_let_go = nodes.is_without_session(&id) && !self.members.hub().has_session(&id);
            if is_let_go && !nodes.is_remembered(&id) {
                nodes.remember(&id);
                self.hold(&id).await?;
            }
        }
        for id in nodes.remembered() {
            if store.node_by_id(&id).await?.is_none() {
                // Its last sandbox has moved, and another server has removed what was left.
                nodes.forget(&id);
                self.held.lock().remove(&id);
            }
        }
        Ok(())
    }

    /// The forgotten nodes without a lease of which nothing is to be removed, because the blob store has what is kept of all their
    /// sandboxes. Their leases are left alone: whoever brings a sandbox to another node relies on that no lease is acquired meanwhile.
    async fn kept_of_forgotten(&self, now_us: i64) -> Result<Vec<NodeId>, StoreError> {
        if self.keeper.sandboxes.parcels.is_none() {
            return Ok(Vec::new());
        }
        self.members.store().forgotten_node_list_kept(now_us).await
    }

    /// Looks around again and again.
    async fn keep_looking(&self) {
        let Some(others) = &self.others else {
            return std::future::pending().await;
        };
        let mut is_failing = false;
        loop {
            tokio::time::sleep(BEAT).await;
            match self.look_around(others).await {
                Ok(()) => is_failing = false,
                Err(error) if !is_failing => {
                    is_failing = true;
                    tracing::warn!(error = %Chain(&error), "cannot find out what other servers do");
                }
                Err(_) => {}
            }
        }
    }

    /// Counts what a node has that is not served.
    async fn hold(&self, id: &NodeId) -> Result<(), StoreError> {
        // Its rows are read alone, which takes no lease.
        let held = self.keeper.hold(&self.members.store().of_node(id.clone(), 0)).await?;
        self.held.lock().insert(id.clone(), held);
        Ok(())
    }

    /// Takes over each node that connects, until the server has been stopped and all its work has ended.
    pub async fn serve(self) {
        let sessions = Arc::new(self);
        let running = TaskTracker::new();
        let mut begun = sessions.members.hub().open();
        sessions.members.note_ended();
        let stop = sessions.keeper.stop.clone();
        let (looking, ended) = (Arc::clone(&sessions), stop.clone());
        running.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = looking.keep_looking() => {}
            }
        });
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                session = begun.recv() => match session {
                    Some(session) => {
                        running.spawn(Arc::clone(&sessions).run(session));
                    }
                    None => break,
                },
                () = sessions.members.node_forgotten() => sessions.settle_forgotten().await,
                () = sessions.keeper.nodes.sandbox_left() => sessions.hold_rest().await,
            }
        }
        running.close();
        running.wait().await;
    }

    /// One session of a node, from when it connects until it is over.
    async fn run(self: Arc<Self>, session: Session) {
        let id = session.member.clone();
        // First, so that nobody who finds the node without a session has its lease afterwards.
        self.keeper.nodes.begin_session(&id);
        match self.take_over(&session).await {
            Ok((lease, node, uses)) => {
                tracing::info!(node.id = %id, name = session.name, "ready: the node was taken over");
                self.until_over(&session, lease, node, uses).await;
            }
            Err(error) => {
                tracing::warn!(node.id = %id, error = %Chain(&error), "the node was not taken over");
                session.over.cancel();
                tokio::time::sleep(TAKEOVER_PAUSE).await;
            }
        }
        self.keeper.nodes.end_session(&id);
        self.members.hub().end(&session);
        self.members.note_ended();
    }

    async fn take_over(&self, session: &Session) -> Result<(NodeLease, Arc<ServedNode>, TaskTracker), SessionError> {
        let keeper = &self.keeper;
        let identity = NodeIdentity {
            id: session.member.clone(),
            name: session.name.clone(),
            owner: self.owner.clone(),
        };
        let store = self.members.store();
        let taking = async {
            // In this order: a server that was stopped after a node has connected must not take from another one what that has
            // taken over meanwhile. The node answers the server that it is connected to, after the number was read.
            let last = store.node_by_id(&session.member).await?.map_or(0, |row| row.epoch);
            let events = session.node.subscribe().await?;
            let lease = NodeLease::take_of_connected(store, identity, last, keeper.clock.clone()).await?;
            Ok::<_, SessionError>((lease.ok_or(SessionError::Taken)?, events))
        };
        let (lease, events) = tokio::select! {
            taken = taking => taken?,
            () = session.over.cancelled() => return Err(SessionError::Over),
            () = keeper.stop.cancelled() => return Err(SessionError::Stopping),
        };
        let uses = TaskTracker::new();
        let api: Arc<dyn NodeApi> = session.node.clone();
        let can = NodeCan {
            writes_processes: session.capabilities.writes_processes,
            keeps_deadlines: session.capabilities.keeps_deadlines,
            makes_parcels: session.capabilities.makes_parcels,
            copies_memories: session.capabilities.copies_memories,
            admits_with_start: session.capabilities.admits_with_start,
            is_apart: true,
        };
        let node = keeper.session(lease.rows().clone(), api, can, session.over.clone(), &uses);
        let taken = async {
            // Before it is placed on, and again for whoever drains it meanwhile and does not find it.
            self.members.read_draining(&node).await.map_err(AdoptError::from)?;
            keeper.take_over(&node).await?;
            self.members.read_draining(&node).await.map_err(AdoptError::from)?;
            Ok::<_, AdoptError>(())
        };
        let taken = tokio::select! {
            taken = taken => taken.map_err(SessionError::from),
            () = session.over.cancelled() => Err(SessionError::Over),
            // A takeover that is cut anywhere is finished by the next one.
            () = keeper.stop.cancelled() => Err(SessionError::Stopping),
        };
        match taken {
            Ok(()) => {
                self.held.lock().remove(&session.member);
                keeper.follow_reports(&node);
                keeper.begin(&node, events);
                Ok((lease, node, uses))
            }
            Err(error) => {
                self.let_go(&session.member, node, uses).await;
                lease.release().await;
                Err(error)
            }
        }
    }

    async fn until_over(&self, session: &Session, lease: NodeLease, node: Arc<ServedNode>, uses: TaskTracker) {
        let id = &session.member;
        let lost = lease.lost();
        tokio::select! {
            // All work has ended.
            () = self.keeper.records_stop.cancelled() => return lease.release().await,
            () = lost.cancelled() => session.over.cancel(),
            () = session.over.cancelled() => {}
        }
        tracing::info!(node.id = %id, "the session of the node is over");
        self.let_go(id, node, uses).await;
        lease.release().await;
    }

    /// Lets go of a node. Its sandboxes are accounted for meanwhile and afterwards.
    async fn let_go(&self, id: &NodeId, node: Arc<ServedNode>, uses: TaskTracker) {
        self.keeper.nodes.remove(&node);
        self.hold_anyway(id).await;
        self.keeper.leave(node, uses).await;
        // What was begun before has changed some.
        self.hold_anyway(id).await;
    }

    async fn hold_anyway(&self, id: &NodeId) {
        if let Err(error) = self.hold(id).await {
            tracing::error!(node.id = %id, error = %Chain(&error), "cannot read what is on a node that is away");
        }
    }

    /// Counts again what nodes have that are not served, of which a sandbox has moved away.
    async fn hold_rest(&self) {
        let held: Vec<NodeId> = self.held.lock().keys().cloned().collect();
        for id in held.iter().filter(|id| self.keeper.nodes.is_without_session(id)) {
            self.hold_anyway(id).await;
            if !self.keeper.nodes.is_without_session(id) {
                // It may have been taken over meanwhile, and counts by itself.
                self.held.lock().remove(id);
            } else if self.others.is_none()
                && self.keeper.nodes.is_remembered(id)
                && self.keeper.nodes.is_without_sandboxes(id)
            {
                self.members.note_ended();
            }
        }
    }

    /// Removes what there is of nodes that were forgotten and are not served any more.
    async fn settle_forgotten(&self) {
        let listed = match self.members.store().joined_node_list().await {
            Ok(listed) => listed,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot list nodes");
                return;
            }
        };
        for node in listed.into_iter().filter(|node| node.forgotten_us.is_some()) {
            if self.members.hub().has_session(&node.id) {
                // It is let go first, and then this is called again.
                continue;
            }
            if let Err(error) = self.settle(&node.id, &node.name).await {
                tracing::error!(node.id = %node.id, error = %Chain(&error), "cannot remove what a forgotten node had");
            }
            if self.keeper.nodes.is_remembered(&node.id) {
                self.hold_anyway(&node.id).await;
            } else {
                self.held.lock().remove(&node.id);
            }
        }
    }

    async fn settle(&self, id: &NodeId, name: &str) -> Result<(), LeaseError> {
        let store = self.members.store();
        let now_us = store.lease_time_us(self.keeper.clock.now_us()).await?;
        let Some(row) = store.node_by_id(id).await? else {
            self.keeper.nodes.forget(id);
            return Ok(());
        };
        if is_of_another(row.lease.as_ref(), &self.owner) && row.is_leased(now_us) {
            // That server lets go of it, and does this.
            return Ok(());
        }
        if self.kept_of_forgotten(now_us).await?.contains(id) {
            self.keeper.nodes.remember(id);
            return Ok(());
        }
        let identity = NodeIdentity {
            id: id.clone(),
            name: name.to_owned(),
            owner: self.owner.clone(),
        };
        let lease = NodeLease::take(store, identity, self.keeper.clock.clone()).await?;
        let (lost, kept) = self.keeper.lose(lease.rows()).await?;
        if kept > 0 {
            self.keeper.nodes.remember(id);
            lease.release().await;
        } else {
            lease.remove_node().await?;
        }
        tracing::info!(node.id = %id, sandboxes = lost, kept, "removed what a forgotten node had: its sandboxes are lost, but for those that are in the blob store");
        Ok(())
    }
}
