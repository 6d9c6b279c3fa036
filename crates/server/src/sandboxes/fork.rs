//! Forks: sandboxes that go on from where another one is, which goes on, too.
//!
//! ```text
//!   rows of the children ─▶ the node copies the parent and starts them ─▶ the rows of those that started
//! ```
//!
//! A child has everything that its parent was created with, under its own id and tokens, and a deadline of its own. It has
//! the certificate authority of its parent: programs that run in it have read that certificate and trust no other. The seed
//! of an authority is derived from an id, so the row names the sandbox and has no secret.
//!
//! Where the node of the parent has no room for all children, or drains, others get some ([`spread`]), also those of other servers
//! ([`elsewhere`]).
//!
//! Runs on a task of its own, as a create. Until the node has answered, rows of children are in state "creating": a crash
//! before that leaves no child, and the parent runs.

mod elsewhere;
pub(crate) mod peers;
mod spread;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use model::id::{SandboxId, UserId};
use model::lifecycle::State;
use model::lifecycle::command::{Command, Refusal};
use model::placement::Outcome;
use model::sandbox::{EnvVars, LifecycleSpec};
use protocol::node::{Boot, ForkSandbox, ForkedSandbox, NodeError, StartedSandbox};
use store::error::StoreError;
use store::sandboxes::{NewSandbox, SandboxRow};

use self::peers::NotStarted;
use super::Sandboxes;
use super::backoff::TooEarly;
use super::change::ChangeError;
use super::create::CreateError;
use super::entry::{Attempt, SandboxEntry, Turn};
use super::lifecycle::to_json;
use super::pause::within;
use crate::admission::AdmissionError;
use crate::admission::quota::{ResourceUse, TeamQuota};
use crate::builds::Builds;
use crate::builds::recipe::BuildSpec;
use crate::clock::SECOND_US;
use crate::injections::SandboxInjections;
use crate::nodes::placement::Sent;
use crate::nodes::{ANYWHERE, ServedNode, done};
use crate::outcome::CreateOutcome;
use crate::records::LifecycleEvent;
use crate::seal::SealError;

/// How long the node may take to copy a sandbox and to start its children. The sandbox cannot be changed meanwhile.
const FORK_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Children that are prepared at the same time. Each waits for its node and for the database, while its parent waits for all of them.
const PREPARED: usize = 8;

/// How a sandbox is forked.
#[derive(Debug)]
pub(crate) struct ForkRequest {
    /// The user that sent the request.
    pub(crate) user: UserId,
    /// What the team may use.
    pub(crate) quota: Arc<TeamQuota>,
    /// Seconds until the deadline of each child.
    pub(crate) timeout_s: u32,
    /// The ids of the children.
    pub(crate) ids: Vec<SandboxId>,
}

/// Why a sandbox was not forked. It runs on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForkError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    State(ChangeError),
    #[error("the sandbox is paused")]
    Paused,
    /// None of its copies has started lately.
    #[error(transparent)]
    TooEarly(#[from] TooEarly),
    /// Something in it cannot be copied, for a reason that is for the client.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Unsupported(String),
    /// Its copies would be on its node, which gets no new sandboxes.
    #[error("the node of the sandbox drains")]
    Draining,
    /// The host has no space, or is busy.
    #[error("{0}")]
    NoCapacity(String),
    #[error("the node failed")]
    Failed(#[source] NodeError),
    #[error("the task panicked or was cancelled")]
    TaskFailed,
}

impl From<NodeError> for ForkError {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::NotFound(_) => Self::State(ChangeError::Gone),
            NodeError::Capacity(why) => Self::NoCapacity(why),
            NodeError::Refused(why) => Self::Refused(why),
            NodeError::Unsupported(why) => Self::Unsupported(why),
            error @ (NodeError::NoLayer(_)
            | NodeError::Unavailable(_)
            | NodeError::Busy { .. }
            | NodeError::Failed(_)
            | NodeError::Cancelled
            | NodeError::Away
            | NodeError::Unreachable(_)) => Self::Failed(error),
        }
    }
}

/// Why one child of a fork does not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChildError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Another server was to start it.
    #[error(transparent)]
    Elsewhere(#[from] NotStarted),
}

impl ChildError {
    /// Whether the nodes that were tried had no room for it, and nothing was begun.
    fn lacks_room(&self) -> bool {
        matches!(
            self,
            Self::Admission(AdmissionError::NoCapacity { .. })
                | Self::Create(CreateError::NoCapacity { .. } | CreateError::Draining)
                | Self::Elsewhere(NotStarted::NoRoom)
        )
    }

    /// Whether its team has as many sandboxes as it may.
    fn is_over_quota(&self) -> bool {
        matches!(
            self,
            Self::Admission(AdmissionError::OverQuota(_))
                | Self::Create(CreateError::OverQuota(_))
                | Self::Elsewhere(NotStarted::OverQuota(_))
        )
    }

    fn outcome(&self) -> CreateOutcome {
        match self {
            error if error.is_over_quota() => CreateOutcome::Limited,
            Self::Create(CreateError::Busy { team_limit: Some(_) }) => CreateOutcome::Limited,
            Self::Create(CreateError::Busy { .. }) => CreateOutcome::NoCapacity,
            error if error.lacks_room() => CreateOutcome::NoCapacity,
            _ => CreateOutcome::Failed,
        }
    }
}

/// What became of each child.
pub(crate) type Children = Vec<Result<SandboxRow, ChildError>>;

/// What all children have of their parent.
struct Parent {
    row: SandboxRow,
    boot: Boot,
    build: BuildSpec,
    environment: EnvVars,
    injections: Option<SandboxInjections>,
    /// The rules and secrets from which the policies of the children are made.
    changes: u64,
}

/// A child that is about to be started.
struct Child {
    row: SandboxRow,
    entry: Arc<SandboxEntry>,
    /// Seconds from its start until its deadline.
    timeout_s: u32,
    /// The request to a node that is not that of its parent.
    sent: Option<Sent>,
}

/// The children for which no node of this server has room.
struct Left {
    /// The sandbox that is forked.
    parent: SandboxId,
    ids: Vec<SandboxId>,
    user: UserId,
    timeout_s: u32,
}

/// What became of the children of a fork.
#[derive(Default)]
struct Started {
    /// The children that were to be on nodes of this server.
    here: HashMap<SandboxId, Result<SandboxRow, ChildError>>,
    /// The children that other servers were asked for.
    elsewhere: HashMap<SandboxId, Result<SandboxRow, ChildError>>,
    /// Why one of them was not started, for the client, if the next attempt would probably fail, too.
    failure: Option<String>,
}

impl Started {
    fn add_here(&mut self, child: Announced) {
        self.here.insert(child.id, child.result);
        self.failure = self.failure.take().or(child.failure);
    }
}

/// What became of a child on a node of this server.
struct Announced {
    id: SandboxId,
    result: Result<SandboxRow, ChildError>,
    /// As that of [`Started`].
    failure: Option<String>,
}

/// Why none of the children was started.
enum NotForked {
    /// The nodes may have begun to start them.
    Begun(NodeError),
    /// Nothing was begun.
    Unbegun(ForkError),
}

impl From<StoreError> for NotForked {
    fn from(error: StoreError) -> Self {
        Self::Unbegun(error.into())
    }
}

impl From<Refusal> for ForkError {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Paused => Self::Paused,
            why => Self::State(why.into()),
        }
    }
}

impl Sandboxes {
    /// Forks a running sandbox and returns once the agents of its children have answered. A client disconnect changes
    /// nothing.
    pub(crate) async fn fork(
        self: &Arc<Self>,
        builds: &Arc<Builds>,
        entry: &Arc<SandboxEntry>,
        request: ForkRequest,
    ) -> Result<Children, ForkError> {
        entry.check(Command::Fork)?;
        let (ids, home) = (request.ids.clone(), Arc::clone(&entry.node));
        let (sandboxes, builds, entry) = (Arc::clone(self), Arc::clone(builds), Arc::clone(entry));
        let task = self.work.spawn(async move {
            let forking = Arc::clone(&sandboxes);
            let forked = sandboxes
                .work
                .spawn(async move { Box::pin(forking.fork_on_task(&builds, &entry, request)).await });
            match forked.await {
                Ok(forked) => forked,
                Err(_) => {
                    // The task panicked at an unknown point.
                    for id in &ids {
                        let child = sandboxes.tracked.registry.get(id);
                        let node = child.map_or_else(|| Arc::clone(&home), |child| Arc::clone(&child.node));
                        sandboxes.discard(&node, id).await;
                    }
                    Err(ForkError::TaskFailed)
                }
            }
        });
        task.await.unwrap_or(Err(ForkError::TaskFailed))
    }

    async fn fork_on_task(
        self: &Arc<Self>,
        builds: &Builds,
        entry: &Arc<SandboxEntry>,
        request: ForkRequest,
    ) -> Result<Children, ForkError> {
        // Whoever pauses or forks it waits.
        let turn = entry.turn_of(Command::Fork).await;
        turn.check(Command::Fork)?;
        let is_elsewhere = self.can_fork_elsewhere(&entry.node);
        let is_only_node = || self.nodes_to_spread_to(Some(&entry.node), ANYWHERE).is_empty() && !is_elsewhere;
        if entry.node.is_draining() && is_only_node() {
            return Err(ForkError::Draining);
        }
        turn.check_attempt(Attempt::Fork, self.clock.now_us())?;
        let parent = self.parent(&entry.id).await?;
        let prepared = self.prepare_children(Some(&entry.node), &parent, &request).await;
        let (mut children, mut refused) = (Vec::with_capacity(prepared.len()), HashMap::new());
        for (id, child) in request.ids.iter().zip(prepared) {
            match child {
                Ok(child) => children.push(child),
                Err(error) => _ = refused.insert(id.clone(), Err(error)),
            }
        }
        let lacks_room = |id: &&SandboxId| match refused.get(*id) {
            Some(Err(error)) => is_elsewhere && ChildError::lacks_room(error),
            _ => false,
        };
        let left = Left {
            parent: entry.id.clone(),
            ids: request.ids.iter().filter(lacks_room).cloned().collect(),
            user: request.user.clone(),
            timeout_s: request.timeout_s,
        };
        let is_at_home = |child: &Child| Arc::ptr_eq(&child.entry.node, &entry.node);
        let is_spread = !children.iter().all(is_at_home) || !left.ids.is_empty();
        let entries: Vec<Arc<SandboxEntry>> = children.iter().map(|child| Arc::clone(&child.entry)).collect();
        let started = if is_spread {
            Box::pin(self.fork_spread(builds, turn, &parent, children, left)).await
        } else {
            Box::pin(self.fork_at_home(turn, &parent, children)).await
        };
        let started = match started {
            Ok(started) => started,
            Err(error) => {
                for child in entries {
                    match &error {
                        NotForked::Begun(error) => self.give_up_start(&child.node, &child.id, error).await,
                        NotForked::Unbegun(_) => self.forget(&child.node, &child.id).await,
                    }
                }
                return Err(match (error, entry.state()) {
                    // Its end was requested while it stood still.
                    (NotForked::Begun(NodeError::NotFound(_)), State::Stopping) => {
                        ForkError::State(ChangeError::Stopping)
                    }
                    (NotForked::Begun(error), _) => error.into(),
                    (NotForked::Unbegun(error), _) => error,
                });
            }
        };
        let Started {
            mut here,
            mut elsewhere,
            failure,
        } = started;
        let mut results = Vec::with_capacity(request.ids.len());
        for id in &request.ids {
            let result = elsewhere.remove(id);
            let is_here = result.is_none();
            let result = result.or_else(|| here.remove(id)).or_else(|| refused.remove(id));
            let result = result.unwrap_or_else(|| Err(CreateError::TaskFailed.into()));
            match &result {
                Ok(_) if is_here => self.tracked.metrics.create(CreateOutcome::Created),
                // What another server has created is in its figures.
                Ok(_) => {}
                Err(error) => self.tracked.metrics.create(error.outcome()),
            }
            results.push(result);
        }
        let count = results.iter().filter(|result| result.is_ok()).count();
        if count > 0 {
            entry.note_success(Attempt::Fork);
        } else if let Some(why) = failure {
            // It is not copied again for a while.
            entry.note_failure(Attempt::Fork, self.clock.now_us(), &why);
        }
        self.tracked.log(&entry.id, &LifecycleEvent::Forked(count));
        Ok(results)
    }

    /// Has the node of a sandbox copy it, and start all these children there. The sandbox can be changed again once they run.
    async fn fork_at_home(
        self: &Arc<Self>,
        turn: Turn<'_>,
        parent: &Parent,
        children: Vec<Child>,
    ) -> Result<Started, NotForked> {
        let mut forked = Vec::with_capacity(children.len());
        for child in &children {
            forked.push(self.forked(parent, child).await?);
        }
        if forked.is_empty() {
            return Ok(Started::default());
        }
        let request = ForkSandbox {
            id: turn.id.clone(),
            children: forked,
        };
        let answered = within(FORK_TIMEOUT, turn.node.handle.fork(request)).await;
        drop(turn);
        let left_out = || Err(NodeError::failed("the node has left out a fork"));
        let answers = answered.map_err(NotForked::Begun)?.into_iter();
        let mut announced = Vec::with_capacity(children.len());
        for (child, answer) in children
            .into_iter()
            .zip(answers.chain(std::iter::repeat_with(left_out)))
        {
            announced.push(self.announce_child(parent, child, answer));
        }
        let mut announced = futures_util::stream::iter(announced).buffered(PREPARED);
        let mut started = Started::default();
        while let Some(child) = announced.next().await {
            started.add_here(child);
        }
        Ok(started)
    }

    async fn parent(&self, id: &SandboxId) -> Result<Parent, ForkError> {
        let changes = self.policies.injections.changes();
        let row = self.store().sandbox_by_id(id).await?;
        let row = row.ok_or(ForkError::State(ChangeError::Gone))?;
        // Builds stay as long as sandboxes have been started from them, also those of deleted templates.
        let build = self.store().build_by_id(&row.template_id, &row.build_id).await?;
        Ok(Parent {
            boot: self.restart_of(&row).await?.boot,
            build: build.as_ref().and_then(BuildSpec::of).unwrap_or_else(BuildSpec::base),
            environment: self.environment_of(id).await?,
            injections: self.policies.injections.of_sandbox(id).await?,
            row,
            changes,
        })
    }

    /// Does [`Self::prepare_child`] for all children, and returns what became of each.
    async fn prepare_children(
        &self,
        home: Option<&Arc<ServedNode>>,
        parent: &Parent,
        request: &ForkRequest,
    ) -> Vec<Result<Child, ChildError>> {
        let mut children = Vec::with_capacity(request.ids.len());
        for id in &request.ids {
            children.push(self.prepare_child(home, parent, id, request));
        }
        let prepared = futures_util::stream::iter(children);
        prepared.buffered(PREPARED).collect().await
    }

    /// Reserves what a child needs, on the node of its parent or else on another one, and stores its row. The node of its parent is
    /// none if another server has that.
    async fn prepare_child(
        &self,
        home: Option<&Arc<ServedNode>>,
        parent: &Parent,
        id: &SandboxId,
        request: &ForkRequest,
    ) -> Result<Child, ChildError> {
        let share = ResourceUse::one_sandbox(parent.row.cpu_count, parent.row.memory_mb);
        let reservation = Arc::new(request.quota.reserve(share).map_err(AdmissionError::from)?);
        let at_home = match home.filter(|home| !home.is_draining()) {
            Some(home) => match home.pool.admit(id, &reservation).await {
                Ok(admission) => Ok((Arc::clone(home), admission, None)),
                Err(error @ AdmissionError::OverQuota(_)) => return Err(error.into()),
                Err(error) => Err(error.into()),
            },
            None => Err(ChildError::from(CreateError::Draining)),
        };
        let (node, admission, sent) = match at_home {
            Ok(admitted) => admitted,
            Err(error) => {
                let admitted = self.admit_elsewhere(home, parent, id, &reservation).await;
                admitted.ok_or(error)?
            }
        };
        let row = self.row_of_child(parent, id, request).map_err(CreateError::from)?;
        let row = self.store_creating(&node, row).await?;
        let entry = self.register(&row, &node, admission, parent.injections.as_ref());
        Ok(Child {
            row,
            entry,
            timeout_s: request.timeout_s,
            sent,
        })
    }

    fn row_of_child(&self, parent: &Parent, id: &SandboxId, request: &ForkRequest) -> Result<NewSandbox, SealError> {
        let row = &parent.row;
        let now_us = self.clock.now_us();
        let after = |seconds: u32| now_us + i64::from(seconds) * SECOND_US;
        let lifecycle = LifecycleSpec {
            timeout_s: request.timeout_s,
            ..super::lifecycle::lifecycle_of(row)
        };
        let injections = match &parent.injections {
            None => None,
            Some(injections) => self.policies.injections.seal_sandbox(id, injections)?,
        };
        Ok(NewSandbox {
            id: id.clone(),
            team_id: row.team_id.clone(),
            user_id: request.user.clone(),
            template_id: row.template_id.clone(),
            build_id: row.build_id.clone(),
            alias: row.alias.clone(),
            execution_id: uuid::Uuid::new_v4().to_string(),
            end_us: after(request.timeout_s),
            max_end_us: after(request.quota.limits.max_lifetime_s),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            agent_version: row.agent_version.clone(),
            metadata: row.metadata.clone(),
            secure: row.secure,
            allow_public_traffic: row.allow_public_traffic,
            allow_internet_access: row.allow_internet_access,
            network_json: self.policies.json_of_fork(row, id)?,
            lifecycle_json: to_json(lifecycle),
            injections_sealed: injections,
            environment_sealed: self.seal_environment(id, &parent.environment)?,
            authority_of: Some(row.authority_of.as_ref().unwrap_or(&row.id).clone()),
            created_us: now_us,
        })
    }

    /// What the node needs to start a child.
    async fn forked(&self, parent: &Parent, child: &Child) -> Result<ForkedSandbox, StoreError> {
        let row = &child.row;
        let context = self
            .policies
            .context_of(&row.team_id, parent.injections.as_ref())
            .await?;
        Ok(ForkedSandbox {
            id: row.id.clone(),
            boot: Boot {
                init: self.init_of(row, &parent.build, parent.environment.clone()),
                ..parent.boot.clone()
            },
            egress: self.policies.of(row, context).await?,
            deadline: self.node_deadline(&child.entry.node, row).await?,
        })
    }

    /// Stores and announces that a child runs, or removes what there is of it.
    async fn announce_child(
        self: &Arc<Self>,
        parent: &Parent,
        child: Child,
        started: Result<StartedSandbox, NodeError>,
    ) -> Announced {
        let id = child.row.id.clone();
        let failure = match &started {
            Err(NodeError::Refused(why)) => Some(why.clone()),
            Err(NodeError::Failed(_)) => {
                Some("the host failed to start its copies; the log of the platform has the cause".to_owned())
            }
            _ => None,
        };
        let result = match started {
            Ok(started) => self.store_child(parent, child, started).await,
            Err(error) => {
                self.give_up_start(&child.entry.node, &id, &error).await;
                Err(self.not_started(error))
            }
        };
        Announced {
            id,
            result: result.map_err(ChildError::from),
            failure,
        }
    }

    async fn store_child(
        self: &Arc<Self>,
        parent: &Parent,
        child: Child,
        started: StartedSandbox,
    ) -> Result<SandboxRow, CreateError> {
        let Child {
            row,
            entry,
            timeout_s,
            sent,
        } = child;
        done(sent, Outcome::Placed);
        let row = self
            .store_start(&entry.node, row, &started.agent_version, timeout_s)
            .await?;
        // A memory may have been brought to its node, since that was told its deadline.
        self.tell_start(&entry.node, &row, started.is_restored).await;
        self.announce(&row, &entry, parent.changes).await?;
        Ok(row)
    }
}
