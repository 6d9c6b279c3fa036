//! Children of a fork on nodes of other servers, where those of this one have no room.
//!
//! ```text
//!   this server: the memory is in the blob store ─▶ which children, of whom        ─▶ their rows, as they are in the database
//!   another one:                                    └─▶ rows ─▶ memory ─▶ start ─┘
//! ```
//!
//! The other server reads everything about the parent from the database, as this one does, and takes the limits of the team once
//! more: all that it is told are ids, the length of life, and the image. It answers for each child. If the answer is lost, those run
//! that are stored, and others may: they are listed, and end at their timeouts.
//!
//! Nothing is asked before there is the memory, so nothing is begun for a sandbox that cannot be copied.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use link::ServerLink;
use model::id::SandboxId;
use model::lifecycle::State;
use protocol::node::NodeError;
use store::sandboxes::SandboxRow;
use tokio::time::Instant;

use super::peers::{Asked, ChildrenWanted, ForkPeers, NotStarted};
use super::spread::{Memory, STARTS};
use super::{ChildError, FORK_TIMEOUT, ForkError, ForkRequest, Left};
use crate::builds::Builds;
use crate::chain::Chain;
use crate::nodes::{ANYWHERE, ServedNode};
use crate::outcome::CreateOutcome;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::create::CreateError;

/// How many servers are asked at most.
const ASKED: usize = 3;

/// A child, and what its server has said of it.
type Answer = (SandboxId, Result<(), NotStarted>);

/// Deals ids to so many in turn.
fn deal(ids: &[SandboxId], count: usize) -> Vec<Vec<SandboxId>> {
    let mut dealt = vec![Vec::new(); count];
    for (ids, id) in (0..count).cycle().zip(ids) {
        dealt[ids].push(id.clone());
    }
    dealt
}

impl Sandboxes {
    /// Whether children of a sandbox on this node can be on nodes of other servers, which have some room.
    pub(super) fn can_fork_elsewhere(&self, home: &ServedNode) -> bool {
        let peers = self.fork_peers.get().filter(|_| self.can_spread_from(home));
        peers.is_some_and(|peers| !peers.with_room().is_empty())
    }

    /// Has other servers start these children, and returns what became of each.
    pub(super) async fn fork_elsewhere(
        &self,
        memory: &Memory<'_>,
        left: &Left,
    ) -> HashMap<SandboxId, Result<SandboxRow, ChildError>> {
        let Some(peers) = self.fork_peers.get() else {
            return HashMap::new();
        };
        let mut servers = peers.with_room();
        servers.truncate(ASKED);
        let ask = |server, ids| self.ask(peers, server, memory, left, ids);
        // At the same time, so that each has a share, and what one has no room for is tried at those that had room for theirs.
        let dealt = deal(&left.ids, servers.len());
        let asked = servers.iter().zip(dealt).map(|(server, ids)| ask(server, ids));
        let asked: Vec<Vec<Answer>> = futures_util::future::join_all(asked).await;
        let lacks_room = |(_, answer): &Answer| answer == &Err(NotStarted::NoRoom);
        let had_room: Vec<bool> = asked.iter().map(|answers| !answers.iter().any(lacks_room)).collect();
        let mut answers: HashMap<SandboxId, Result<(), NotStarted>> = asked.into_iter().flatten().collect();
        for (server, _) in servers.iter().zip(had_room).filter(|(_, had_room)| *had_room) {
            let again: Vec<SandboxId> = left
                .ids
                .iter()
                .filter(|id| answers.get(*id) == Some(&Err(NotStarted::NoRoom)))
                .cloned()
                .collect();
            answers.extend(ask(server, again).await);
        }
        let mut children = HashMap::new();
        for (id, answer) in answers {
            let child = match answer {
                Ok(()) => self.child_elsewhere(&id).await,
                Err(why) => Err(why.into()),
            };
            children.insert(id, child);
        }
        children
    }

    /// Asks one of the servers for these children.
    async fn ask(
        &self,
        peers: &Arc<dyn ForkPeers>,
        server: &Arc<ServerLink>,
        memory: &Memory<'_>,
        left: &Left,
        ids: Vec<SandboxId>,
    ) -> Vec<Answer> {
        if ids.is_empty() {
            return Vec::new();
        }
        let wanted = ChildrenWanted {
            parent: left.parent.clone(),
            user: left.user.clone(),
            timeout_s: left.timeout_s,
            memory: memory.row.build.clone(),
            image: memory.image.clone(),
            ids: ids.clone(),
        };
        let asked = tokio::time::timeout_at(memory.until + FORK_TIMEOUT, peers.start(server, wanted)).await;
        let answers = match asked {
            Ok(Asked::Answered(answers)) => answers,
            Ok(Asked::Unbegun) => vec![Err(NotStarted::NoRoom); ids.len()],
            Ok(Asked::Unknown) | Err(_) => {
                tracing::warn!(server.id = %server.other(), sandbox.id = %left.parent, "another server does not answer, and forks may run on its nodes");
                return self.without_answer(ids).await;
            }
        };
        let answers = answers.into_iter().chain(std::iter::repeat(Err(NotStarted::Unknown)));
        ids.into_iter().zip(answers).collect()
    }

    /// What is known of children whose server has not answered: those that it has stored run.
    async fn without_answer(&self, ids: Vec<SandboxId>) -> Vec<Answer> {
        let mut answers = Vec::with_capacity(ids.len());
        for id in ids {
            let row = self.store().sandbox_by_id(&id).await;
            let answer = match row {
                Ok(Some(row)) if row.state == State::Running => Ok(()),
                _ => Err(NotStarted::Unknown),
            };
            answers.push((id, answer));
        }
        answers
    }

    /// The row of a child that another server says runs. One that has ended since was started nevertheless, so the next fork is not held
    /// back for it.
    async fn child_elsewhere(&self, id: &SandboxId) -> Result<SandboxRow, ChildError> {
        let row = self.store().sandbox_by_id(id).await;
        let row = row.map_err(|error| ChildError::Create(error.into()))?;
        row.filter(|row| row.state != State::Gone)
            .ok_or(ChildError::Create(CreateError::Died))
    }

    /// Starts children for another server, which keeps their memory in the blob store until this has answered. It goes on when the
    /// other server is gone.
    pub(crate) async fn fork_for_other(
        self: &Arc<Self>,
        builds: &Arc<Builds>,
        wanted: ChildrenWanted,
    ) -> Vec<Result<(), NotStarted>> {
        let count = wanted.ids.len();
        let failed = move |why: &str| vec![Err(NotStarted::Failed(why.to_owned())); count];
        let (sandboxes, builds, ids) = (Arc::clone(self), Arc::clone(builds), wanted.ids.clone());
        let task = self.work.spawn(async move {
            let starting = Arc::clone(&sandboxes);
            let started = sandboxes
                .work
                .spawn(async move { Box::pin(starting.start_wanted(&builds, wanted)).await })
                .await;
            match started {
                Ok(Ok(started)) => started,
                Ok(Err(error)) => {
                    tracing::warn!(error = %Chain(&error), "no forks are started for another server");
                    failed("another server could not start it: the log of the platform has the cause")
                }
                Err(_) => {
                    // The task panicked at an unknown point.
                    for id in &ids {
                        if let Some(child) = sandboxes.tracked.registry.get(id) {
                            sandboxes.discard(&child.node, id).await;
                        }
                    }
                    failed("another server failed to start it")
                }
            }
        });
        task.await.unwrap_or_else(|_| failed("another server is being stopped"))
    }

    async fn start_wanted(
        self: &Arc<Self>,
        builds: &Builds,
        wanted: ChildrenWanted,
    ) -> Result<Vec<Result<(), NotStarted>>, ForkError> {
        let no_room = || vec![Err(NotStarted::NoRoom); wanted.ids.len()];
        let nodes = self.nodes_to_spread_to(None, ANYWHERE);
        let (Some(parcels), Some(any)) = (self.parcels.clone(), nodes.first()) else {
            return Ok(no_room());
        };
        // First, so that nobody here removes what is brought to a node.
        let _kept = builds.expect_memory(&wanted.memory);
        let row = self.store().memory(&wanted.memory).await?;
        let parent = self.parent(&wanted.parent).await?;
        let Some(row) = row.filter(|row| row.team == parent.row.team_id) else {
            return Err(ForkError::Refused("there is no such memory".to_owned()));
        };
        let request = ForkRequest {
            user: wanted.user,
            quota: any.admission.quota_of(&row.team).await?,
            timeout_s: wanted.timeout_s,
            ids: wanted.ids,
        };
        let memory = Memory {
            parcels: &parcels,
            home: None,
            row,
            image: wanted.image,
            until: Instant::now() + FORK_TIMEOUT,
        };
        let prepared = self.prepare_children(None, &parent, &request).await;
        let (mut starts, mut answers) = (Vec::with_capacity(prepared.len()), HashMap::new());
        for (id, child) in request.ids.iter().zip(prepared) {
            match child {
                Ok(child) => {
                    let forked = self.forked(&parent, &child).await;
                    let forked = forked.map_err(|error| NodeError::failed(Chain(&error).to_string()));
                    starts.push(self.start_and_announce(&memory, &parent, forked, child));
                }
                Err(error) => _ = answers.insert(id.clone(), Err(NotStarted::from(error))),
            }
        }
        let mut started = futures_util::stream::iter(starts).buffered(STARTS);
        while let Some(child) = started.next().await {
            // The other server counts those that it was refused.
            if child.result.is_ok() {
                self.tracked.metrics.create(CreateOutcome::Created);
            }
            answers.insert(child.id, child.result.map(|_| ()).map_err(NotStarted::from));
        }
        let count = answers.values().filter(|answer| answer.is_ok()).count();
        tracing::info!(sandbox.id = %parent.row.id, count, "started forks for another server");
        let answer = |id| answers.remove(id).unwrap_or(Err(NotStarted::Unknown));
        Ok(request.ids.iter().map(answer).collect())
    }
}

impl From<ChildError> for NotStarted {
    fn from(error: ChildError) -> Self {
        match error {
            error if error.lacks_room() => Self::NoRoom,
            ChildError::Elsewhere(why) => why,
            error if error.is_over_quota() => Self::OverQuota(error.to_string()),
            error => {
                tracing::warn!(error = %Chain(&error), "a fork for another server was not started");
                Self::Failed("another server could not start it: the log of the platform has the cause".to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::AdmissionError;
    use crate::admission::quota::OverQuota;
    use crate::sandboxes::create::CreateError;

    #[test]
    fn another_server_is_told_why() {
        let over = OverQuota {
            key: "limits.sandboxes",
            resource: "concurrent sandboxes",
            limit: 3,
            used: 3,
            requested: 1,
        };
        let no_room = AdmissionError::NoCapacity {
            why: "a secret of the host".to_owned(),
            retry_after_s: 1,
        };
        for (error, outcome) in [
            (ChildError::Admission(over.into()), CreateOutcome::Limited),
            (ChildError::Create(over.into()), CreateOutcome::Limited),
            (ChildError::Admission(no_room), CreateOutcome::NoCapacity),
            (ChildError::Create(CreateError::Draining), CreateOutcome::NoCapacity),
            (
                ChildError::Create(CreateError::Node(NodeError::failed("a secret of the host"))),
                CreateOutcome::Failed,
            ),
        ] {
            let told: Result<(), NotStarted> = Err(error.into());
            let text = serde_json::to_string(&told).unwrap();
            assert!(!text.contains("secret"), "{text}");
            let heard: Result<(), NotStarted> = serde_json::from_str(&text).unwrap();
            assert_eq!(heard, told);
            let heard = ChildError::from(heard.unwrap_err());
            assert_eq!(heard.outcome(), outcome, "{text}");
            // Also when that is told once more.
            assert_eq!(told, Err(heard.into()));
        }
    }

    fn ids(count: usize) -> Vec<SandboxId> {
        (0..count)
            .map(|number| format!("i{number:019}").parse().unwrap())
            .collect()
    }

    #[test]
    fn children_are_dealt_in_turn() {
        let all = ids(5);
        let dealt = deal(&all, 2);
        assert_eq!(dealt.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
        assert_eq!(dealt[1], [all[1].clone(), all[3].clone()]);
        assert_eq!(deal(&all[..1], 3).iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0]);
        assert_eq!(deal(&all, 0), Vec::<Vec<SandboxId>>::new());
    }
}
