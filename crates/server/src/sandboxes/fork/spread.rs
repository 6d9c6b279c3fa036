//! Forks whose children are on several nodes, because the node of the parent has no room for all of them, or drains.
//!
//! ```text
//!   the node keeps the memory of the parent ─▶ its copy in the blob store ─▶ other nodes unpack it ─▶ start the children
//!   └──── the parent stands still ────┘                                      └─ each node once ──┘
//! ```
//!
//! All children are started from one memory, those on the node of the parent too, so they go on from one moment. That memory is kept
//! and copied as that of a snapshot, under an id that no build has, and goes when the fork is over: a guard keeps it on the nodes,
//! and a row its copy. A server that is lost leaves both; the memory is removed by the next one that lists what the nodes have, and
//! the copy by a later round over all objects.
//!
//! Where the nodes of this server have no room for all of them either, those of others have some ([`super::elsewhere`]). Where a node
//! lacks the processors or the kernel that the processes need, the children there fail, and the others run.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use model::id::{BuildId, SandboxId};
use protocol::node::{ForkedSandbox, Image, NodeError, StartSandbox, StartedSandbox};
use store::sandboxes::SandboxRow;
use store::snapshots::MemoryRow;
use tokio::time::Instant;
use uuid::Uuid;

use super::peers::NotStarted;
use super::{Announced, Child, ChildError, FORK_TIMEOUT, ForkError, Left, NotForked, Parent, Started};
use crate::admission::Admission;
use crate::admission::quota::Reservation;
use crate::builds::Builds;
use crate::chain::Chain;
use crate::nodes::placement::Sent;
use crate::nodes::{ADMISSION_BOUND, ANYWHERE, Needs, ServedNode};
use crate::outcome::CopyOutcome;
use crate::parcels::{ParcelError, Parcels};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::entry::Turn;
use crate::sandboxes::pause::within;

/// Children of one fork that are started at the same time. Each node restores a few, and the others wait for their turns.
pub(super) const STARTS: usize = 4;

/// What all children are started from.
pub(super) struct Memory<'a> {
    pub(super) parcels: &'a Arc<Parcels>,
    /// The node that has made it; none if another server has that.
    pub(super) home: Option<&'a Arc<ServedNode>>,
    pub(super) row: MemoryRow,
    /// The image below the files of the parent.
    pub(super) image: Image,
    /// When a node must have it. The row is deleted as that of a lost server long after.
    pub(super) until: Instant,
}

impl Memory<'_> {
    fn is_of(&self, node: &Arc<ServedNode>) -> bool {
        self.home.is_some_and(|home| Arc::ptr_eq(home, node))
    }
}

impl Sandboxes {
    /// Whether children of a sandbox on this node can be on other nodes.
    pub(super) fn can_spread_from(&self, home: &ServedNode) -> bool {
        self.parcels.is_some() && home.takes_forks()
    }

    /// The nodes besides that of a sandbox on which children of it can be, the best first. The node is none if another server has it.
    pub(super) fn nodes_to_spread_to(&self, home: Option<&Arc<ServedNode>>, needs: Needs<'_>) -> Vec<Arc<ServedNode>> {
        if self.parcels.is_none() || !home.is_none_or(|home| home.takes_forks()) {
            return Vec::new();
        }
        let mut nodes = self.nodes.choose(needs);
        nodes.retain(|node| !home.is_some_and(|home| Arc::ptr_eq(node, home)) && node.takes_forks());
        nodes
    }

    /// Reserves what a child needs on another node than that of its parent; none if no other one has room.
    pub(super) async fn admit_elsewhere(
        &self,
        home: Option<&Arc<ServedNode>>,
        parent: &Parent,
        id: &SandboxId,
        reservation: &Arc<Reservation>,
    ) -> Option<(Arc<ServedNode>, Admission, Option<Sent>)> {
        let needs = Needs {
            image: &parent.build.image,
            memory_mb: parent.row.memory_mb,
            ..ANYWHERE
        };
        for node in self.nodes_to_spread_to(home, needs) {
            let admitted = tokio::time::timeout(ADMISSION_BOUND, node.admit(id, reservation)).await;
            if let Ok(Ok((admission, sent))) = admitted {
                return Some((node, admission, sent));
            }
        }
        None
    }

    /// Copies a sandbox, and starts these children from the copy, each on its node, and has other servers start those for which there is
    /// none. The sandbox can be changed again once it is copied.
    pub(super) async fn fork_spread(
        self: &Arc<Self>,
        builds: &Builds,
        turn: Turn<'_>,
        parent: &Parent,
        children: Vec<Child>,
        left: Left,
    ) -> Result<Started, NotForked> {
        let failed = || NotForked::Begun(NodeError::failed("there is no memory for forks"));
        let (entry, parcels) = (Arc::clone(&*turn), self.parcels.clone().ok_or_else(failed)?);
        let home = Arc::clone(&entry.node);
        let busy = || {
            let why = "the team makes other snapshots and forks over several nodes";
            NotForked::Unbegun(ForkError::NoCapacity(why.to_owned()))
        };
        let _place = self.work.copies.place(&entry.team).ok_or_else(busy)?;
        let mut forked = Vec::with_capacity(children.len());
        for child in &children {
            forked.push(self.forked(parent, child).await?);
        }
        let build = BuildId::try_from(Uuid::new_v4().to_string()).map_err(|_| failed())?;
        let origin = self.origin_of_memory(&home, &build).ok_or_else(failed)?;
        let copied = within(FORK_TIMEOUT, home.handle.copy_disk(&entry.id, true)).await;
        drop(turn);
        let copied = copied.map_err(NotForked::Begun)?;
        let kept = builds.keep_fork_memory(&home.handle, &copied, &build).await;
        let _kept = kept.map_err(NotForked::Begun)?;
        let memory = Memory {
            parcels: &parcels,
            home: Some(&home),
            row: MemoryRow {
                build,
                team: entry.team.clone(),
                memory_mb: parent.row.memory_mb,
                disk_mb: parent.row.disk_mb,
                origin,
            },
            image: copied.image,
            until: Instant::now() + FORK_TIMEOUT,
        };
        self.store()
            .fork_memory_insert(&memory.row, self.clock.now_us())
            .await?;
        let children = forked.into_iter().zip(children).collect();
        let started = self.start_spread(&memory, &home, parent, children, &left).await;
        // Before the guard: who finds no row removes what is stored without one.
        if let Err(error) = self.store().fork_memory_delete(&memory.row.build).await {
            tracing::warn!(sandbox.id = %entry.id, error = %Chain(&error), "cannot delete the row of a fork's memory, a later round does");
        }
        Ok(started)
    }

    /// Each child is stored and announced when it runs, whatever the others wait for.
    async fn start_spread(
        self: &Arc<Self>,
        memory: &Memory<'_>,
        home: &Arc<ServedNode>,
        parent: &Parent,
        children: Vec<(ForkedSandbox, Child)>,
        left: &Left,
    ) -> Started {
        let copied = tokio::select! {
            biased;
            () = self.work.stopping().cancelled() => Err(NodeError::Cancelled),
            () = home.over.cancelled() => Err(NodeError::Away),
            copied = tokio::time::timeout_at(memory.until, self.copy_fork_memory(memory, home)) => match copied {
                Ok(copied) => copied.map_err(NodeError::from),
                Err(_) => Err(NodeError::Unavailable("its memory could not be copied to the blob store in time".to_owned())),
            },
        };
        if let Err(error) = &copied {
            tracing::warn!(node.id = %home.id(), error = %Chain(error), "cannot copy the memory of a fork to the blob store, only children on its node are started");
        }
        let mut starts = Vec::with_capacity(children.len());
        for (forked, child) in children {
            let is_there = memory.is_of(&child.entry.node);
            let forked = if is_there {
                Ok(forked)
            } else {
                copied.clone().map(|()| forked)
            };
            starts.push(self.start_and_announce(memory, parent, forked, child));
        }
        let mut started = Started::default();
        let here = async {
            let mut announced = futures_util::stream::iter(starts).buffered(STARTS);
            while let Some(child) = announced.next().await {
                started.add_here(child);
            }
            started
        };
        let elsewhere = async {
            match &copied {
                Ok(()) => self.fork_elsewhere(memory, left).await,
                Err(error) => {
                    let failed = |id: &SandboxId| (id.clone(), Err(self.not_started(error.clone()).into()));
                    left.ids.iter().map(failed).collect()
                }
            }
        };
        let (started, elsewhere) = tokio::join!(here, elsewhere);
        let failure = started.failure.or_else(|| failure_elsewhere(&elsewhere));
        Started {
            elsewhere,
            failure,
            ..started
        }
    }

    async fn copy_fork_memory(&self, memory: &Memory<'_>, home: &Arc<ServedNode>) -> Result<(), ParcelError> {
        let Memory { parcels, row, .. } = memory;
        let _turn = parcels.upload_turn(&Some(row.team.clone())).await;
        let copied = self.copy_memory(parcels, home, row).await;
        let outcome = match &copied {
            Ok(_) => CopyOutcome::Complete,
            Err(_) => CopyOutcome::Failed,
        };
        parcels.metrics.copy_upload(outcome, self.clock.now_us());
        copied?;
        Ok(())
    }

    /// Starts a child, if there is what its node needs for that, and stores and announces that it runs, or removes what there is of it.
    pub(super) async fn start_and_announce(
        self: &Arc<Self>,
        memory: &Memory<'_>,
        parent: &Parent,
        forked: Result<ForkedSandbox, NodeError>,
        child: Child,
    ) -> Announced {
        let started = match forked {
            Ok(forked) => self.start_child(memory, forked, &child.entry.node).await,
            Err(error) => Err(error),
        };
        self.announce_child(parent, child, started).await
    }

    /// Starts a child on a node, to which the memory is brought before.
    async fn start_child(
        self: &Arc<Self>,
        memory: &Memory<'_>,
        forked: ForkedSandbox,
        node: &Arc<ServedNode>,
    ) -> Result<StartedSandbox, NodeError> {
        let (build, payer) = (&memory.row.build, Some(memory.row.team.clone()));
        if !memory.is_of(node) {
            let mut ended = self.begin_to_bring(Arc::clone(memory.parcels), node, &payer, build);
            // What brings it ends with the session of the node, and with the server; what comes too late, the next round removes.
            let brought = async { ended.wait_for(|ended| *ended).await.map(|_| ()) };
            if tokio::time::timeout_at(memory.until, brought).await.is_err() {
                let why = "its memory could not be brought to another node in time";
                return Err(NodeError::Unavailable(why.to_owned()));
            }
            let memories = node.handle.memories().await?;
            if !memories.iter().any(|memory| memory.build == *build) {
                let why = "its memory could not be brought to another node, and the log of the platform has the cause";
                return Err(NodeError::Refused(why.to_owned()));
            }
        }
        let ForkedSandbox {
            id,
            boot,
            egress,
            deadline,
        } = forked;
        let request = StartSandbox {
            id: id.clone(),
            template: boot.template,
            image: memory.image.clone(),
            resources: boot.resources,
            init: boot.init,
            egress,
            memory: Some(build.clone()),
            owner: boot.owner,
            deadline,
            permit: None,
        };
        let started = within(FORK_TIMEOUT, node.handle.start(&payer, request)).await?;
        if !started.is_restored {
            // It is a new sandbox without anything of its parent.
            self.discard(node, &id).await;
            let why = "its processes could not be restored on its node, and the log of the platform has the cause";
            return Err(NodeError::Refused(why.to_owned()));
        }
        Ok(started)
    }
}

/// Why other servers have started none of these children, if the next attempt would probably fail, too.
fn failure_elsewhere(children: &HashMap<SandboxId, Result<SandboxRow, ChildError>>) -> Option<String> {
    children.values().find_map(|child| match child {
        Err(ChildError::Elsewhere(NotStarted::Failed(why))) => Some(why.clone()),
        _ => None,
    })
}
