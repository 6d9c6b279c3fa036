//! Moving a paused sandbox to another node, which is made to keep what the blob store has of it: where the node that has it drains,
//! is full, is away, or was forgotten.
//!
//! ```text
//!   a permit of the other node ─▶ it keeps what the copy has ─▶ the row moves, in one guarded transaction ─▶ the entry is replaced
//!                                 └──── until here it is where it was; what was made is thrown away ────┘
//! ```
//!
//! Nothing runs twice. Whatever runs has a row that said so before, a row names one node, and only the server that has the lease of
//! that node changes it. The transaction also keeps the leases of both nodes from being acquired until its end: whoever takes
//! over the node of before reads its rows as they are before the move, and then the move finds another lease, or as they are
//! afterwards, and has the node throw away what it kept. A node that keeps its session through all of this is told by
//! [`Sandboxes::throw_away`], and gets no sandbox of that id meanwhile.

use std::sync::Arc;
use std::time::Duration;

use blobs::CopyOf;
use model::id::{NodeId, SandboxId, TeamId};
use model::lifecycle::moving::{BeforeResume, Home, Link, MoveReason, NotTaken};
use model::lifecycle::{Kept, State};
use model::secret::Secret;
use protocol::node::{Failure, NodeError, UnpackSandbox, UnpackedSandbox};
use proxy::ingress::Access;
use store::error::StoreError;
use store::sandboxes::{Leaving, Move, SandboxRow};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::elsewhere::AbsentError;
use super::entry::{CountedAs, SandboxEntry, Turn};
use super::lifecycle::lifecycle_of;
use super::pause::{NotMoved, PauseError};
use crate::admission::quota::ResourceUse;
use crate::chain::Chain;
use crate::nodes::{ANYWHERE, Needs, ServedNode};
use crate::others::is_of_another;
use crate::outcome::EndReason;
use crate::parcels::{ParcelError, Parcels};
use crate::records::LifecycleEvent;

/// How long a node may be away before its paused sandboxes are brought to others: it may be restarted at the moment.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks whether it is back.
const LOOK: Duration = Duration::from_millis(50);
/// Nodes that are asked to keep a sandbox.
const ASKED: usize = 3;
/// How long a node may take to keep what a copy has. A client waits less.
const DOWNLOAD: Duration = Duration::from_secs(15 * 60);
/// How long it may take where the sandbox can be resumed where it is.
const DOWNLOAD_OF_DRAINING: Duration = Duration::from_secs(30);
/// Pause before a node is told again to throw a sandbox away.
const AGAIN: Duration = Duration::from_secs(1);

/// A copy that a sandbox can be made of.
struct Parcel {
    id: String,
    key: Secret,
}

impl Sandboxes {
    /// Moves a paused sandbox that is about to be resumed, if its node drains or is away and another one can have it. Returns whether
    /// it has moved: then the entry is another one.
    pub(super) async fn move_before_resume(self: &Arc<Self>, turn: &Turn<'_>) -> Result<bool, PauseError> {
        if self.parcels.is_none() || turn.is_in_memory() {
            return Ok(false);
        }
        let node = &turn.node;
        let mut home = Home {
            has_lost: node.lacks.lock().contains(&turn.id),
            drains: node.is_draining(),
            link: Link::Connected,
            has_copy: false,
        };
        loop {
            home.link = link_of(turn);
            if home.link != Link::Connected && !home.has_copy {
                home.has_copy = self.has_parcel(&turn.id).await?;
            }
            let reason = match home.before_resume() {
                BeforeResume::Resume => return Ok(false),
                BeforeResume::Wait => {
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
                BeforeResume::Move(reason) => reason,
            };
            let within = match reason {
                MoveReason::Draining => DOWNLOAD_OF_DRAINING,
                MoveReason::Away | MoveReason::Lost => DOWNLOAD,
            };
            match self.move_from(turn, reason.as_str(), within).await {
                Ok(Ok(())) => return Ok(true),
                Ok(Err(why)) => match reason.not_taken(is_connected(node)) {
                    NotTaken::Resume => return Ok(false),
                    NotTaken::DecideAgain => home.drains = false,
                    NotTaken::RefuseAway => return Err(PauseError::Node(NodeError::Away)),
                    NotTaken::RefuseLost => return Err(PauseError::Lost(why)),
                },
                Err(error) if reason.resumes_after_failure(is_connected(node)) => {
                    tracing::warn!(sandbox.id = %turn.id, error = %Chain(&error), "a sandbox stays on a node that drains");
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Moves a paused sandbox whose host has no capacity for it. Returns whether it has moved.
    pub(super) async fn move_for_capacity(self: &Arc<Self>, turn: &Turn<'_>) -> bool {
        if self.parcels.is_none() || turn.is_in_memory() {
            return false;
        }
        match self.move_from(turn, "full", DOWNLOAD).await {
            Ok(moved) => moved.is_ok(),
            Err(error) => {
                tracing::warn!(sandbox.id = %turn.id, error = %Chain(&error), "a sandbox stays on a host without capacity for it");
                false
            }
        }
    }

    async fn has_parcel(&self, id: &SandboxId) -> Result<bool, PauseError> {
        let parcel = self.store().sandbox_parcel(id).await?;
        Ok(parcel.is_some_and(|parcel| parcel.current.is_some()))
    }

    async fn parcel_of(&self, parcels: &Parcels, id: &SandboxId) -> Result<Option<Parcel>, PauseError> {
        let Some(row) = self.store().sandbox_parcel(id).await? else {
            return Ok(None);
        };
        let (Some(current), Some(key)) = (row.current, row.key) else {
            return Ok(None);
        };
        match parcels.open_key(&CopyOf::Sandbox(id.clone()), &key) {
            Ok(key) => Ok(Some(Parcel { id: current, key })),
            Err(error) => {
                tracing::error!(sandbox.id = %id, "the key of the copies of a sandbox cannot be used: {error}");
                Ok(None)
            }
        }
    }

    /// Moves a paused sandbox from a node that has a session. The log says `why`.
    async fn move_from(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        why: &'static str,
        within: Duration,
    ) -> Result<Result<(), NotMoved>, PauseError> {
        let Some(parcels) = &self.parcels else {
            return Ok(Err(NotMoved::NoCopy));
        };
        let Some(parcel) = self.parcel_of(parcels, &turn.id).await? else {
            return Ok(Err(NotMoved::NoCopy));
        };
        let row = self.store().sandbox_by_id(&turn.id).await?;
        let Some(row) = row.filter(|row| row.version == turn.version()) else {
            return Ok(Err(NotMoved::Changed));
        };
        let from = Leaving::Held(&turn.node.rows);
        let entry = match self.bring(parcels, &row, &parcel, &from, Some(turn), within).await? {
            Ok(entry) => entry,
            Err(why) => return Ok(Err(why)),
        };
        tracing::info!(sandbox.id = %turn.id, from = %turn.node.id(), to = %entry.node.id(), why, "a paused sandbox has moved to another node");
        turn.cut();
        turn.release();
        let had_lost = turn.node.lacks.lock().remove(&turn.id);
        if !had_lost {
            self.throw_away(&turn.node, &turn.id);
        }
        Ok(Ok(()))
    }

    /// Brings a paused sandbox of a team to a node that is served, if its own is not. None if that is not possible: why the sandbox
    /// is not here says what is.
    pub(crate) async fn recall_of_team(
        self: &Arc<Self>,
        id: &SandboxId,
        team: &TeamId,
    ) -> Result<Option<Arc<SandboxEntry>>, PauseError> {
        let row = self.store().sandbox_by_id(id).await?;
        match row.filter(|row| row.team_id == *team) {
            Some(row) => self.recall(row).await,
            None => Ok(None),
        }
    }

    /// Brings a paused sandbox to a node that is served, if its own is not, on a task of its own.
    pub(crate) async fn recall(self: &Arc<Self>, row: SandboxRow) -> Result<Option<Arc<SandboxEntry>>, PauseError> {
        let Some(parcels) = &self.parcels else {
            return Ok(None);
        };
        if row.state != State::Paused || !self.has_parcel(&row.id).await? {
            return Ok(None);
        }
        let turn = Arc::clone(parcels.recalls.lock().entry(row.id.clone()).or_default());
        let (sandboxes, parcels, id) = (Arc::clone(self), Arc::clone(parcels), row.id.clone());
        let recalling = self.work.spawn(async move {
            let recalled = {
                let _turn = turn.lock().await;
                sandboxes.recall_in_turn(&parcels, &row.id).await
            };
            let mut recalls = parcels.recalls.lock();
            // Nobody else has it, or waits for it.
            if Arc::strong_count(&turn) <= 2 {
                recalls.remove(&row.id);
            }
            recalled
        });
        let recalled = recalling.await.unwrap_or(Err(PauseError::TaskFailed));
        if let Err(error) = &recalled {
            tracing::warn!(sandbox.id = %id, error = %Chain(error), "a sandbox of a node that is away is not brought to another one");
        }
        recalled
    }

    async fn recall_in_turn(
        self: &Arc<Self>,
        parcels: &Parcels,
        id: &SandboxId,
    ) -> Result<Option<Arc<SandboxEntry>>, PauseError> {
        let node = self.store().sandbox_by_id(id).await?.and_then(|row| row.node_id);
        let patience = match &node {
            Some(node) if self.nodes.is_remembered(node) => Duration::ZERO,
            Some(node) => PATIENCE.saturating_sub(self.nodes.absent_for(node).unwrap_or_default()),
            None => return Ok(None),
        };
        let until = Instant::now() + patience;
        loop {
            if let Some(entry) = self.tracked.registry.get(id) {
                return Ok(Some(entry));
            }
            if Instant::now() >= until {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        let Some(row) = self.store().sandbox_by_id(id).await? else {
            return Ok(None);
        };
        let Some(node) = row.node_id.clone().filter(|_| row.state == State::Paused) else {
            return Ok(None);
        };
        let now_us = self.store().lease_time_us(self.clock.now_us()).await?;
        // A server that had the lease, and goes on later, must not take the sandbox for its own.
        self.store()
            .node_lease_end_expired(&node, &parcels.owner, now_us)
            .await?;
        // In this order: a session that begins after the second look takes a lease with a higher number.
        let Some(lease) = self.store().node_by_id(&node).await? else {
            return Ok(None);
        };
        if !self.nodes.is_without_session(&node) {
            return Ok(self.tracked.registry.get(id));
        }
        let now_us = self.store().lease_time_us(self.clock.now_us()).await?;
        if is_of_another(lease.lease.as_ref(), &parcels.owner) && lease.is_leased(now_us) {
            // That server has it, or its lease has not ended yet.
            return Ok(None);
        }
        let Some(parcel) = self.parcel_of(parcels, id).await? else {
            return Ok(None);
        };
        let from = Leaving::Free {
            node: node.clone(),
            epoch: lease.epoch,
            owner: parcels.owner.clone(),
            now_us,
        };
        let brought = self.bring(parcels, &row, &parcel, &from, None, DOWNLOAD).await?;
        if let Ok(entry) = &brought {
            self.nodes.note_left(&node, id);
            tracing::info!(sandbox.id = %id, from = %node, to = %entry.node.id(), "a paused sandbox of a node that is away has moved to another one");
        }
        Ok(brought.ok())
    }

    /// Has another node keep what a copy has, and makes the sandbox one of that node, unless no node can have it now, or it has
    /// changed meanwhile. The end of `entry`, if it has one, interrupts this.
    async fn bring(
        self: &Arc<Self>,
        parcels: &Parcels,
        row: &SandboxRow,
        parcel: &Parcel,
        from: &Leaving<'_>,
        entry: Option<&SandboxEntry>,
        within: Duration,
    ) -> Result<Result<Arc<SandboxEntry>, NotMoved>, PauseError> {
        let mut failed = None;
        let until_ended = async || match entry {
            Some(entry) => entry.left_pause().await,
            None => std::future::pending().await,
        };
        // One that has nothing of the sandbox can be made to have it again.
        let before = entry.filter(|entry| !entry.node.lacks.lock().contains(&entry.id));
        let before = row.node_id.as_ref().filter(|_| entry.is_none() || before.is_some());
        let (payer, until) = (Some(row.team_id.clone()), Instant::now() + within);
        if let Err(why) = self.nodes_to_keep(row, before) {
            return Ok(Err(why));
        }
        // Before a node is asked for a permit: who waits here takes nothing of it. A manifest is held in memory afterwards.
        let _turn = tokio::select! {
            turn = tokio::time::timeout_at(until, parcels.download_turn(&payer)) => turn.unwrap_or_else(|_| {
                let why = "copies of other sandboxes are fetched from the blob store: try again later";
                Err(NodeError::Unavailable(why.to_owned()))
            }).map_err(PauseError::Node)?,
            () = until_ended() => return Err(PauseError::Stopping),
        };
        let nodes = match self.nodes_to_keep(row, before) {
            Ok(nodes) => nodes,
            Err(why) => return Ok(Err(why)),
        };
        let mut not_moved = NotMoved::NoRoom;
        for node in nodes {
            let Ok(permit) = node.admission.admit_to_host(&row.id).await else {
                continue;
            };
            let request = UnpackSandbox {
                id: row.id.clone(),
                parcel: parcel.id.clone(),
                key: parcel.key.clone(),
                with_processes: row.kept == Some(Kept::Checkpoint),
            };
            let downloading = tokio::time::timeout_at(until, parcels.download(&node, &payer, &request));
            let downloaded = tokio::select! {
                downloaded = downloading => downloaded.unwrap_or_else(|elapsed| {
                    Err(NodeError::Unreachable(Failure::of(&elapsed)).into())
                }),
                () = until_ended() => {
                    self.throw_away(&node, &row.id);
                    return Err(PauseError::Stopping);
                }
            };
            let unpacked = match downloaded {
                Ok(unpacked) => unpacked,
                Err(error) => {
                    let (has_stalled, is_damage) = (matches!(error, ParcelError::Stalled(_)), error.is_damage());
                    let error = NodeError::from(error);
                    tracing::warn!(sandbox.id = %row.id, node.id = %node.id(), error = %Chain(&error), "a node does not keep the copy of a sandbox");
                    if matches!(error, NodeError::Unreachable(_)) {
                        // It may have been made nevertheless. Another one would hardly be faster.
                        self.throw_away(&node, &row.id);
                        return Err(PauseError::Node(error));
                    }
                    if is_damage {
                        self.pack_again(&row.id, &parcel.id).await;
                        return Err(PauseError::Node(error));
                    }
                    if has_stalled {
                        // It may go on with what it has got.
                        self.throw_away(&node, &row.id);
                    }
                    failed = Some(error);
                    continue;
                }
            };
            let share = ResourceUse::one_sandbox(row.cpu_count, row.memory_mb);
            let kept = CountedAs::Paused {
                keep: unpacked.kept,
                disk_bytes: unpacked.disk_bytes,
            };
            let admission = node.admission.occupy(&row.team_id, kept.share(share)).await;
            let injections = self.policies.injections.of_sandbox(&row.id).await;
            let (mut admission, injections) = match (admission, injections) {
                (Ok(admission), Ok(injections)) if entry.is_none_or(|entry| entry.state() == State::Paused) => {
                    (admission, injections)
                }
                (Err(error), _) | (_, Err(error)) => {
                    self.throw_away(&node, &row.id);
                    return Err(error.into());
                }
                _ => {
                    self.throw_away(&node, &row.id);
                    return Err(PauseError::Stopping);
                }
            };
            if node.over.is_cancelled() {
                // Its next session throws away what it keeps.
                not_moved = NotMoved::NoNode;
                continue;
            }
            let Some(after) = self.take(&node, row, parcel, from, &unpacked).await? else {
                self.throw_away(&node, &row.id);
                return Ok(Err(NotMoved::Changed));
            };
            admission.enter_host(permit);
            parcels.arrived.lock().insert(row.id.clone());
            let entry = self.register(&after, &node, admission, injections.as_ref());
            if node.over.is_cancelled() {
                // Its session has let go of its sandboxes meanwhile, perhaps before this one was there.
                self.tracked.remove(&node, &row.id);
                return Ok(Err(NotMoved::Changed));
            }
            let paused_us = after.paused_us.unwrap_or_else(|| self.clock.now_us());
            self.retain(&entry.turn().await, paused_us);
            let why = unpacked.without_processes.as_deref();
            if let Some(why) = why {
                tracing::warn!(sandbox.id = %row.id, node.id = %node.id(), "a sandbox has moved with its files alone: {why}");
            }
            self.tracked.log(&row.id, &LifecycleEvent::Moved(why));
            return Ok(Ok(entry));
        }
        match failed {
            Some(error) => Err(PauseError::Node(error)),
            None => Ok(Err(not_moved)),
        }
    }

    /// Moves the row. If the database fails, it may have moved or not, and is looked at again.
    async fn take(
        &self,
        node: &Arc<ServedNode>,
        row: &SandboxRow,
        parcel: &Parcel,
        from: &Leaving<'_>,
        unpacked: &UnpackedSandbox,
    ) -> Result<Option<SandboxRow>, PauseError> {
        let moved = Move {
            id: &row.id,
            version: row.version,
            parcel: &parcel.id,
            kept: unpacked.kept,
            kept_bytes: i64::try_from(unpacked.disk_bytes).unwrap_or(i64::MAX),
        };
        let error = match node.rows.sandbox_take(moved, from).await {
            Ok(taken) => return Ok(taken),
            Err(error) => error,
        };
        self.tracked
            .store_failed(&error, &row.id, "whether a sandbox has moved is not known yet");
        loop {
            // Waits for the transaction before, if the database is still at it. If that has moved the row, this one does not.
            let again = match node.rows.sandbox_take(moved, from).await {
                Ok(Some(taken)) => return Ok(Some(taken)),
                Ok(None) => self.store().sandbox_by_id(&row.id).await,
                Err(error) => Err(error),
            };
            match again {
                Ok(Some(now)) if now.node_id.as_ref() == Some(node.id()) => return Ok(Some(now)),
                Ok(_) => return Ok(None),
                // What the node keeps is thrown away by its next session, or is that of the row.
                Err(_) if !self.work.pause(AGAIN).await || node.over.is_cancelled() => return Err(error.into()),
                Err(_) => {}
            }
        }
    }

    /// The nodes that may keep a sandbox, the best first; at least one.
    fn nodes_to_keep(&self, row: &SandboxRow, before: Option<&NodeId>) -> Result<Vec<Arc<ServedNode>>, NotMoved> {
        let can_keep = |node: &Arc<ServedNode>| {
            node.makes_parcels
                && Some(node.id()) != before
                && is_connected(node)
                && !node.over.is_cancelled()
                && !node.left.lock().contains(&row.id)
        };
        let mut all = self.nodes.all();
        all.retain(can_keep);
        if all.is_empty() {
            return Err(NotMoved::NoNode);
        }
        if all.iter().all(|node| node.is_draining()) {
            return Err(NotMoved::Draining);
        }
        let needs = Needs {
            memory_mb: row.memory_mb,
            ..ANYWHERE
        };
        let mut nodes = self.nodes.choose(needs);
        nodes.retain(can_keep);
        nodes.truncate(ASKED);
        if nodes.is_empty() {
            return Err(NotMoved::NoRoom);
        }
        Ok(nodes)
    }

    /// Has a node throw away what it has of a sandbox that is not one of its own, for as long as its session lasts. Its next session
    /// does so as well.
    fn throw_away(self: &Arc<Self>, node: &Arc<ServedNode>, id: &SandboxId) {
        if !node.left.lock().insert(id.clone()) {
            return;
        }
        let (sandboxes, node, id) = (Arc::clone(self), Arc::clone(node), id.clone());
        self.work.spawn(async move {
            loop {
                if node.over.is_cancelled() {
                    return;
                }
                match node.handle.kill(&id).await {
                    Ok(()) | Err(NodeError::NotFound(_)) => break,
                    Err(NodeError::Away | NodeError::Unreachable(_)) => {}
                    Err(error) => {
                        tracing::warn!(sandbox.id = %id, node.id = %node.id(), error = %Chain(&error), "a node does not throw away yet what it has of a sandbox");
                    }
                }
                if !sandboxes.work.pause(AGAIN).await {
                    return;
                }
            }
            node.left.lock().remove(&id);
            tracing::info!(sandbox.id = %id, node.id = %node.id(), "a node has thrown away what it had of a sandbox that has moved");
        });
    }

    /// The entry of a sandbox that has moved since this one was that.
    pub(super) fn moved(&self, entry: &Arc<SandboxEntry>) -> Option<Arc<SandboxEntry>> {
        self.parcels.as_ref()?;
        let now = self.tracked.registry.get(&entry.id)?;
        (!Arc::ptr_eq(&now, entry)).then_some(now)
    }

    /// What traffic requires that brings a sandbox with this row to another node: it is paused, and traffic resumes it.
    pub(crate) fn access_to_recall(&self, row: &SandboxRow) -> Option<Access> {
        let (lifecycle, tokens) = (lifecycle_of(row), &self.policies.tokens);
        let is_asleep = row.state == State::Paused && lifecycle.auto_resume && !lifecycle.paused_for_files;
        let is_wanted = self.parcels.is_some() && is_asleep;
        is_wanted.then(|| Access {
            traffic_token: (!row.allow_public_traffic).then(|| tokens.traffic_token(&row.id)),
            access_token: Some(tokens.access_token(&row.id)),
            mask_host: None,
            https_ports: Vec::new().into(),
            ending: CancellationToken::new(),
        })
    }

    /// Ends a paused sandbox whose node is not served and whose copy is in the blob store: what its node has is thrown away when that
    /// comes back. With a team, only one of that. Returns whether it has ended.
    pub(crate) async fn end_left(
        &self,
        id: &SandboxId,
        team: Option<&TeamId>,
        reason: EndReason,
    ) -> Result<bool, StoreError> {
        let Some(parcels) = &self.parcels else {
            return Ok(false);
        };
        let row = self.store().sandbox_by_id(id).await?;
        let is_wanted = |row: &SandboxRow| row.state == State::Paused && team.is_none_or(|team| row.team_id == *team);
        let Some(row) = row.filter(is_wanted) else {
            return Ok(false);
        };
        let now_us = self.store().lease_time_us(self.clock.now_us()).await?;
        let Some(node) = &row.node_id else {
            return Ok(false);
        };
        self.store()
            .node_lease_end_expired(node, &parcels.owner, now_us)
            .await?;
        let Some(lease) = self.store().node_by_id(node).await? else {
            return Ok(false);
        };
        // In this order, as when a sandbox is brought to another node.
        if !self.nodes.is_without_session(&lease.id) {
            return Ok(false);
        }
        let from = Leaving::Free {
            node: lease.id.clone(),
            epoch: lease.epoch,
            owner: parcels.owner.clone(),
            now_us,
        };
        if !self.store().sandbox_delete_left(id, row.version, &from).await? {
            return Ok(false);
        }
        self.tracked.records.track(&row);
        self.tracked.has_ended(id, reason);
        self.tracked.records.end(id);
        self.remove_parcels(&row);
        self.nodes.note_left(&lease.id, id);
        Ok(true)
    }

    /// The entry of a team's sandbox that is to be resumed, which is brought to another node if its own is not served.
    pub(crate) async fn entry_to_resume(
        self: &Arc<Self>,
        id: &SandboxId,
        team: &TeamId,
    ) -> Result<Result<Arc<SandboxEntry>, AbsentError>, PauseError> {
        let absent = match self.entry_of_team(id, team).await {
            Err(absent @ (AbsentError::Away { .. } | AbsentError::Elsewhere { .. })) => absent,
            other => return Ok(other),
        };
        match self.recall_of_team(id, team).await? {
            Some(entry) => Ok(Ok(entry)),
            // It may be here by now.
            None => Ok(self.entry_of_team(id, team).await.map_err(|_| absent)),
        }
    }
}

/// The connection of the node of a sandbox that is about to be resumed. It is waited for while its session lasts, and the sandbox is
/// not being ended.
fn link_of(turn: &Turn<'_>) -> Link {
    match turn.node.handle.away_for() {
        None => Link::Connected,
        Some(away) if away >= PATIENCE || turn.node.over.is_cancelled() || turn.state() != State::Paused => Link::Away,
        Some(_) => Link::Interrupted,
    }
}

/// Whether calls reach a node.
fn is_connected(node: &ServedNode) -> bool {
    node.handle.away_for().is_none()
}
