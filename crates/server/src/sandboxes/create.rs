//! Creating a sandbox: the node first, then its row, which says that it runs, in one write, then memory. After a crash
//! in between the next start ends it, because there is no row.
//!
//! It runs on a task of its own, so that a client disconnect changes nothing, and within a time limit: a sandbox that
//! starts after it is ended, because its client was told that there is none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::id::{SandboxId, TeamId, UserId};
use model::network::EgressPolicy;
use model::placement::Outcome;
use model::sandbox::{EnvVars, SandboxSpec};
use protocol::agent::Init;
use protocol::node::{Image, NodeError, Stage, StartSandbox, StartedSandbox};
use secrecy::ExposeSecret;
use store::error::StoreError;
use store::sandboxes::{NewSandbox, SandboxRow};

use super::Sandboxes;
use super::entry::SandboxEntry;
use super::idempotency::KeyClaim;
use super::policy::PolicyContext;
use super::repositories::preparation_policy;
use crate::admission::Admission;
use crate::admission::quota::{OverQuota, Reservation};
use crate::agent::AgentError;
use crate::builds::recipe::{BuildSpec, layers_of};
use crate::clock::{SECOND_US, rfc3339};
use crate::injections::SandboxInjections;
use crate::nodes::placement::Sent;
use crate::nodes::{ADMISSION_BOUND, ServedNode, done};
use crate::outcome::CreateOutcome;
use crate::pool::{Creating, PoolKey, Taken};
use crate::repositories::{Repository, RepositoryError, Target};
use crate::seal::SealError;
use crate::start_command::waits_as_long_for_a_client;

/// User that runs commands and owns files unless a request names another one.
const DEFAULT_USER: &str = "user";
/// How long a sandbox may take to start. Together with the time limit for a request body, this is well below the time
/// limit for answering a request.
const CREATE_BOUND: Duration = Duration::from_secs(30);
/// How long a sandbox with repositories may take to start, besides the time for them.
const START_BOUND: Duration = Duration::from_secs(15);
/// How long a sandbox may take to start with the memory of a snapshot, which may have to be read from a slow disk.
const MEMORY_BOUND: Duration = Duration::from_secs(45);

/// An admitted create request.
#[derive(Debug)]
pub(crate) struct CreateRequest {
    /// The id of the new sandbox, unless it is taken from the pool.
    pub(crate) id: SandboxId,
    /// The owning team.
    pub(crate) team: TeamId,
    /// The user that sent the request.
    pub(crate) user: UserId,
    /// The sandbox to create.
    pub(crate) spec: SandboxSpec,
    /// What its build consists of.
    pub(crate) build: BuildSpec,
    /// What is injected into its requests.
    pub(crate) injections: SandboxInjections,
    /// The repositories that it gets before it is announced.
    pub(crate) repositories: Vec<Repository>,
    /// Its share of the team's quota and of the host.
    pub(crate) admission: Admission,
    /// The claim of the request's idempotency key, if it had one.
    pub(crate) claim: Option<Box<KeyClaim>>,
    /// The node that it is placed on, which the admission is for.
    pub(crate) node: Arc<ServedNode>,
    /// The request for its room, where there are several.
    pub(crate) sent: Option<Sent>,
    /// The nodes to try if that one refuses, the best first.
    pub(crate) others: Vec<Arc<ServedNode>>,
    /// A sandbox of the pool that fits, whose share of the host the admission has.
    pub(crate) pooled: Option<Taken>,
    /// Nothing is started for the pool meanwhile.
    pub(crate) creating: Option<Creating>,
}

/// What a start on any node takes.
#[derive(Clone, Copy)]
struct Asked<'a> {
    build: &'a BuildSpec,
    injections: &'a SandboxInjections,
    context: &'a PolicyContext,
    env_vars: &'a EnvVars,
    has_repositories: bool,
}

/// A sandbox that a node has started, and that is not announced yet.
struct Begun {
    row: SandboxRow,
    entry: Arc<SandboxEntry>,
    egress: EgressPolicy,
    started: StartedSandbox,
}

/// A sandbox that was created.
#[derive(Debug)]
pub(crate) struct Created {
    /// Its row.
    pub(crate) row: SandboxRow,
    /// How long each stage took, in order.
    pub(crate) stages: Vec<Stage>,
}

/// Why a sandbox could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    Node(NodeError),
    #[error("the template is not on the node")]
    NotFetched(#[source] NodeError),
    #[error("{why}")]
    NoCapacity {
        why: String,
        /// Seconds until there may be capacity.
        retry_after_s: u32,
    },
    /// The sandbox is to be restored with processes, and others are restored at the moment.
    #[error("its turn to be restored did not come in time")]
    Busy {
        /// How many of its team can be restored at the same time, if it waited for these.
        team_limit: Option<usize>,
    },
    #[error(transparent)]
    Repositories(#[from] RepositoryError),
    #[error("the start command of the template")]
    StartCommand(#[source] AgentError),
    #[error("the ready command of the template did not succeed within {limit_s} seconds")]
    NotReady { limit_s: u64 },
    #[error("the sandbox did not start in time")]
    TimedOut,
    #[error("the sandbox ended while it was starting")]
    Died,
    #[error("the task panicked or was cancelled")]
    TaskFailed,
    /// The nodes that could run it get no new sandboxes.
    #[error("every node that could run the sandbox drains")]
    Draining,
    /// The team has started others on other servers meanwhile.
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
}

impl Sandboxes {
    /// Creates a sandbox and returns once its agent has answered. A sandbox that starts after the time limit is ended,
    /// because its client was told that there is none.
    pub(crate) async fn create(self: &Arc<Self>, create: CreateRequest) -> Result<Created, CreateError> {
        let pooled = create.pooled.as_ref().map(Taken::id);
        let ids: Vec<SandboxId> = [Some(&create.id), pooled].into_iter().flatten().cloned().collect();
        let nodes: Vec<_> = std::iter::once(&create.node).chain(&create.others).cloned().collect();
        let bound = match (create.repositories.is_empty(), &create.build.memory) {
            (true, None) => CREATE_BOUND,
            (true, Some(_)) => MEMORY_BOUND,
            (false, None) => self.repositories.limit() + START_BOUND,
            (false, Some(_)) => self.repositories.limit() + MEMORY_BOUND,
        };
        let sandboxes = Arc::clone(self);
        // Set by the first to decide: the task (created) or the timeout (not created).
        let decided = Arc::new(AtomicBool::new(false));
        let mut task = self.work.spawn({
            let decided = Arc::clone(&decided);
            async move { Box::pin(sandboxes.create_claimed(create, &decided)).await }
        });
        let result = match tokio::time::timeout(bound, &mut task).await {
            Ok(result) => result,
            Err(_) if decided.swap(true, Ordering::AcqRel) => task.await,
            Err(_) => {
                let sandboxes = Arc::clone(self);
                self.work.spawn(async move {
                    if task.await.is_err() {
                        sandboxes.discard_all(&nodes, &ids).await;
                    }
                });
                return Err(CreateError::TimedOut);
            }
        };
        match result {
            Ok(result) => result,
            Err(_) => {
                self.tracked.metrics.create(CreateOutcome::Failed);
                // The task panicked at an unknown point; what it left is removed like a failed start.
                let sandboxes = Arc::clone(self);
                self.work
                    .spawn(async move { sandboxes.discard_all(&nodes, &ids).await });
                Err(CreateError::TaskFailed)
            }
        }
    }

    /// Creates the sandbox, and completes the claim of the idempotency key before the request is answered.
    async fn create_claimed(
        self: &Arc<Self>,
        mut create: CreateRequest,
        decided: &AtomicBool,
    ) -> Result<Created, CreateError> {
        let mut claim = create.claim.take();
        let mut result = self.create_on_task(create, claim.as_deref_mut()).await;
        if let Ok(created) = &result
            && decided.swap(true, Ordering::AcqRel)
        {
            if let Some(entry) = self.tracked.registry.get(&created.row.id) {
                self.stop(&entry).await;
            }
            result = Err(CreateError::TimedOut);
        }
        match (claim, &result) {
            (Some(claim), Ok(created)) => {
                let id = created.row.id.clone();
                if !claim.complete(created.row.clone()).await {
                    if let Some(entry) = self.tracked.registry.get(&id) {
                        self.stop(&entry).await;
                    }
                    result = Err(CreateError::TimedOut);
                }
            }
            (Some(claim), Err(_)) => claim.abandon().await,
            (None, _) => {}
        }
        self.tracked.metrics.create(match &result {
            Ok(_) => CreateOutcome::Created,
            Err(CreateError::NoCapacity { .. } | CreateError::Draining | CreateError::Busy { team_limit: None }) => {
                CreateOutcome::NoCapacity
            }
            Err(CreateError::Busy { team_limit: Some(_) } | CreateError::OverQuota(_)) => CreateOutcome::Limited,
            Err(CreateError::Repositories(RepositoryError::Refused(_))) => CreateOutcome::Refused,
            Err(_) => CreateOutcome::Failed,
        });
        result
    }

    async fn create_on_task(
        self: &Arc<Self>,
        mut create: CreateRequest,
        mut claim: Option<&mut KeyClaim>,
    ) -> Result<Created, CreateError> {
        if let Some(taken) = create.pooled.take() {
            let from_pool = Box::pin(self.create_from_pool(&create, taken, claim.as_deref_mut()));
            if let Some(created) = from_pool.await? {
                return Ok(created);
            }
            if let Some(claim) = claim {
                claim.move_to(&create.id).await?;
            }
        }
        let CreateRequest {
            id,
            team,
            user,
            mut spec,
            build,
            injections,
            repositories,
            mut admission,
            claim: _,
            mut node,
            mut sent,
            others,
            pooled: _,
            mut creating,
        } = create;
        let (timeout_s, env_vars) = (spec.timeout_s, std::mem::take(&mut spec.env_vars));
        let changes = self.policies.injections.changes();
        let context = self.policies.context_of(&team, Some(&injections)).await?;
        let mut new = self.row_of(id, team, user, spec);
        new.injections_sealed = self.policies.injections.seal_sandbox(&new.id, &injections)?;
        new.environment_sealed = self.seal_environment(&new.id, &env_vars)?;
        new.authority_of = build.memory.as_ref().map(|memory| memory.authority.clone());
        let asked = Asked {
            build: &build,
            injections: &injections,
            context: &context,
            env_vars: &env_vars,
            has_repositories: !repositories.is_empty(),
        };
        let reservation = Arc::clone(admission.reservation());
        let mut others = others.into_iter();
        let mut refused = None;
        let begun = loop {
            let error = match self.begin_on(&node, admission, new.clone(), asked).await {
                Ok(Ok(begun)) => {
                    done(sent, Outcome::Placed);
                    break begun;
                }
                Ok(Err(error)) => error,
                Err(error) => {
                    // Those of an attempt on another node, if there was one.
                    self.tracked.records.end(&new.id);
                    return Err(error);
                }
            };
            done(sent, outcome_of(&error));
            let next = if is_passed_on(&error) {
                next_of(&mut others, &new.id, &reservation).await
            } else {
                None
            };
            let Some(next) = next else {
                self.give_up_start(&node, &new.id, &error).await;
                // The first was the best, so what it said is what is told.
                let told = refused.filter(|_| is_passed_on(&error)).unwrap_or(error);
                if matches!(told, NodeError::NoLayer(_)) && self.nodes.is_kept_off(layers_of(&build.image)) {
                    return Err(CreateError::Draining);
                }
                return Err(self.not_started(match told {
                    // A node that is away may have it.
                    NodeError::NoLayer(_) if !self.nodes.is_complete() => NodeError::Away,
                    told => told,
                }));
            };
            tracing::info!(sandbox.id = %new.id, node.id = %node.id(), "a node refuses a sandbox, the next one is tried: {error}");
            refused.get_or_insert(error);
            self.withdraw(&node, &new.id);
            (node, admission, sent) = next;
            // Of the node that is tried, nothing is started for its pool.
            creating = creating.map(|_| node.pool.creating());
        };
        let Begun {
            row,
            entry,
            egress,
            started,
        } = begun;

        let prepared = if repositories.is_empty() {
            None
        } else {
            Some(self.prepare(&node, &row, &build, &repositories, egress).await?)
        };

        let ready = match &build.start {
            None => None,
            // Its processes are there.
            Some(_) if started.is_restored => None,
            Some(start) => {
                let stage = self.run_start_command(&node, &row, start).await?;
                if waits_as_long_for_a_client(start) {
                    node.pool.became_ready(&PoolKey::of_sandbox(&row), stage.took);
                }
                Some(stage)
            }
        };

        let (row, stored) = self
            .insert_started(&node, new, &started.agent_version, timeout_s)
            .await?;
        self.tell_start(&node, &row, prepared.is_some() || ready.is_some())
            .await;
        self.announce(&row, &entry, changes).await?;
        let mut stages = started.stages;
        stages.extend(prepared.into_iter().chain(ready));
        stages.push(stored);
        Ok(Created { row, stages })
    }

    /// Removes what there is of a sandbox that the node has not started.
    pub(super) async fn give_up_start(self: &Arc<Self>, node: &Arc<ServedNode>, id: &SandboxId, error: &NodeError) {
        match error {
            // It may have started nevertheless.
            NodeError::Unreachable(_) => self.discard(node, id).await,
            _ => self.forget(node, id).await,
        }
    }

    /// Why there is no sandbox, which the node has not started.
    pub(super) fn not_started(&self, error: NodeError) -> CreateError {
        match error {
            NodeError::Capacity(why) => CreateError::NoCapacity {
                why,
                retry_after_s: self.tracked.deadlines.capacity_retry_s(&self.clock),
            },
            NodeError::Busy { owner_limit } => CreateError::Busy {
                team_limit: owner_limit,
            },
            NodeError::Unavailable(_) => CreateError::NotFetched(error),
            NodeError::NotFound(_)
            | NodeError::NoLayer(_)
            | NodeError::Refused(_)
            | NodeError::Unsupported(_)
            | NodeError::Cancelled
            | NodeError::Failed(_)
            | NodeError::Away
            | NodeError::Unreachable(_) => CreateError::Node(error),
        }
    }

    async fn discard_all(self: &Arc<Self>, nodes: &[Arc<ServedNode>], ids: &[SandboxId]) {
        for node in nodes {
            for id in ids {
                self.discard(node, id).await;
            }
        }
    }

    /// Has a node start a sandbox that has no row yet. On an error of the node, the caller forgets the sandbox.
    async fn begin_on(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        admission: Admission,
        new: NewSandbox,
        asked: Asked<'_>,
    ) -> Result<Result<Begun, NodeError>, CreateError> {
        let row = node.rows.sandbox_unstored(new);
        let egress = self.policies.of(&row, asked.context.clone()).await?;
        let entry = self.register(&row, node, admission.clone(), Some(asked.injections));
        let first = if asked.has_repositories {
            preparation_policy(&egress)
        } else {
            egress.clone()
        };
        let mut request = self.start_request(&row, asked.build, asked.env_vars.clone(), first);
        request.deadline = self.node_deadline(node, &row).await?;
        let payer = Some(row.team_id.clone());
        if let Some(build) = &request.memory {
            self.bring_memory(node, &payer, build).await;
        }
        let mut is_last_try = false;
        loop {
            request.permit = node.admission.ask_with_start(&admission, &row.id);
            let error = match node.handle.start(&payer, request.clone()).await {
                Ok(started) => {
                    return Ok(Ok(Begun {
                        row,
                        entry,
                        egress,
                        started,
                    }));
                }
                Err(error) => error,
            };
            if is_last_try || !matches!(error, NodeError::Capacity(_)) {
                return Ok(Err(error));
            }
            // What is pooled may have what this one needs. Where the permit comes with the start, what follows is what the pool does
            // where it is asked for before.
            let asks = request.permit.is_some();
            match node.pool.evict().await {
                true if asks => node.admission.forget_reading(),
                true => {}
                // Once more: the last one may have just ended.
                false if asks => is_last_try = true,
                false => return Ok(Err(error)),
            }
        }
    }

    /// Takes a sandbox back from a node that has begun nothing of it. Its records go on, on another node.
    fn withdraw(&self, node: &Arc<ServedNode>, id: &SandboxId) {
        self.tracked.registry.remove(node, id);
    }

    /// Gets the repositories of a sandbox that has just started, and applies its policy. If that fails, the sandbox is
    /// ended.
    pub(super) async fn prepare(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        row: &SandboxRow,
        build: &BuildSpec,
        repositories: &[Repository],
        egress: EgressPolicy,
    ) -> Result<Stage, CreateError> {
        let clock = Instant::now();
        let target = Target {
            id: &row.id,
            team: &row.team_id,
            user: build.user.as_deref().unwrap_or(DEFAULT_USER),
            // No code of a user is in the built-in template.
            is_trusted: build.image == Image::Base && build.start.is_none(),
        };
        let prepared = self.repositories.prepare(target, repositories).await;
        self.tracked.metrics.repositories(repositories.len(), &prepared);
        let result = match prepared {
            Ok(_) => node.handle.set_egress(&row.id, egress).await.map_err(CreateError::Node),
            Err(error) => Err(error.into()),
        };
        match result {
            Ok(()) => Ok(Stage::new("repositories", clock.elapsed())),
            Err(error) => {
                self.discard(node, &row.id).await;
                Err(error)
            }
        }
    }

    pub(super) fn row_of(&self, id: SandboxId, team: TeamId, user: UserId, spec: SandboxSpec) -> NewSandbox {
        let now_us = self.clock.now_us();
        let network = spec.network.as_ref();
        let network_json = network.map(|network| self.policies.to_json(&id, network));
        NewSandbox {
            id,
            team_id: team,
            user_id: user,
            template_id: spec.template,
            build_id: spec.build,
            alias: spec.alias,
            execution_id: uuid::Uuid::new_v4().to_string(),
            end_us: now_us + i64::from(spec.timeout_s) * SECOND_US,
            max_end_us: now_us + i64::from(spec.max_lifetime_s) * SECOND_US,
            cpu_count: spec.cpu_count,
            memory_mb: spec.memory_mb,
            disk_mb: spec.disk_mb,
            agent_version: spec.agent_version,
            metadata: spec.metadata,
            secure: spec.secure || self.defaults.always_secure,
            allow_public_traffic: spec.network.as_ref().is_none_or(|network| network.allow_public_traffic),
            allow_internet_access: spec.allow_internet_access,
            network_json,
            lifecycle_json: super::lifecycle::to_json(spec.lifecycle),
            injections_sealed: None,
            environment_sealed: None,
            authority_of: None,
            created_us: now_us,
        }
    }

    fn start_request(
        &self,
        row: &SandboxRow,
        build: &BuildSpec,
        env_vars: EnvVars,
        egress: EgressPolicy,
    ) -> StartSandbox {
        let mut resources = self.defaults.resources;
        resources.cpu_count = row.cpu_count;
        resources.memory_mb = row.memory_mb;
        resources.disk_mb = row.disk_mb;
        StartSandbox {
            id: row.id.clone(),
            template: row.template_id.clone(),
            image: build.image.clone(),
            resources,
            init: self.init_of(row, build, env_vars),
            egress,
            // Of this build alone: whatever its spec says.
            memory: build.memory.as_ref().map(|_| row.build_id.clone()),
            owner: Some(row.team_id.to_string()),
            deadline: None,
            permit: None,
        }
    }

    /// The identity of a sandbox.
    pub(super) fn init_of(&self, row: &SandboxRow, build: &BuildSpec, env_vars: EnvVars) -> Init {
        Init {
            env_vars: Some(env_vars.into_map()),
            access_token: Some(self.policies.tokens.access_token(&row.id).expose_secret().to_owned()),
            timestamp: Some(rfc3339(self.clock.now_us())),
            default_user: Some(build.user.clone().unwrap_or_else(|| DEFAULT_USER.to_owned())),
            default_workdir: build.workdir.clone(),
            sandbox_id: Some(row.id.as_str().to_owned()),
            template_id: Some(row.template_id.as_str().to_owned()),
            metadata: Some(row.metadata.clone()),
            ca_bundle: None,
            ca_bundle_deferred: true,
            open_to_anonymous: !row.secure,
            cpu_count: Some(row.cpu_count),
            memory_mb: Some(row.memory_mb),
        }
    }
}

/// Whether another node may be able to start what this one has refused: nothing was begun.
fn is_passed_on(error: &NodeError) -> bool {
    matches!(error, NodeError::Capacity(_) | NodeError::NoLayer(_) | NodeError::Away)
}

/// What a node has done with a request, whose start has failed with this.
fn outcome_of(error: &NodeError) -> Outcome {
    match error {
        NodeError::Capacity(_) => Outcome::Refused,
        _ => Outcome::Failed,
    }
}

/// The next node that has room for a sandbox, with its share of that.
async fn next_of(
    nodes: &mut impl ExactSizeIterator<Item = Arc<ServedNode>>,
    id: &SandboxId,
    reservation: &Arc<Reservation>,
) -> Option<(Arc<ServedNode>, Admission, Option<Sent>)> {
    while let Some(node) = nodes.next() {
        if node.is_draining() {
            continue;
        }
        let admitted = node.admit(id, reservation);
        let admitted = if nodes.len() == 0 {
            admitted.await.ok()
        } else {
            tokio::time::timeout(ADMISSION_BOUND, admitted)
                .await
                .ok()
                .and_then(Result::ok)
        };
        if let Some((admission, sent)) = admitted {
            return Some((node, admission, sent));
        }
    }
    None
}
