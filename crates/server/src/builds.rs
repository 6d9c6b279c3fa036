//! Builds of templates: accepting, queueing, running, cancelling and ending them.
//!
//! The row of a build is authoritative. A client requests a build, uploads files and starts it; then it waits for its
//! turn on the node that has the files. What a build runs, it runs in sandboxes ([`run`]); this module does all the
//! rest: limits in number and time, the log, and what becomes of it. A restart of the platform begins unfinished builds
//! again, where finished steps come from the cache, and so does the loss of a node. A server that has lost its last node leaves its
//! builds to those that have some.

pub(crate) mod collect;
pub(crate) mod context;
pub(crate) mod files;
mod hold;
mod log;
pub(crate) mod lost;
pub(crate) mod memories;
mod objects;
mod ready_made;
pub(crate) mod recipe;
pub(crate) mod run;
pub(crate) mod snapshot;
pub(crate) mod space;
pub(crate) mod transfer;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use model::id::{BuildId, LayerId, NodeId, SandboxId, TeamId, TemplateId};
use model::log::Level;
use model::network::EgressPolicy;
use model::resources::Resources;
use parking_lot::Mutex;
use protocol::agent;
use store::builds::{BuildEnd, BuildJob, BuildReason};
use store::error::StoreError;
use store::nodes::NodeRows;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::context::{BuildContext, Pins, StepSandbox, StepSandboxes};
use self::files::BuildFiles;
use self::log::BuildLog;
use self::recipe::{BuildFailure, BuildResult, Job, Recipe, Source, layers_of};
use crate::admission::AdmissionControl;
use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::keys::TokenSeed;
use crate::node::NodeHandle;
use crate::nodes::Nodes;
use crate::others::OtherServers;
use crate::seal::{SealError, Sealer};
use crate::settings::BuildSettings;
use crate::telemetry::Telemetry;

/// How long a build may wait for its client, or for its turn.
const WAITING_MAX_S: i64 = 40 * 60;
/// How long a build may take, from its first beginning.
const BUILDING_MAX_S: i64 = 60 * 60;
/// How often a build is begun again after a restart of the platform, or as its node was lost.
const RESTARTS_MAX: u32 = 3;
/// Interval between checks for what was waiting too long or was cancelled by another server.
const CHECK: Duration = Duration::from_secs(15);
/// How long another server is gone before its builds are taken over: one that is restarted begins them again itself.
const SERVER_GONE_S: i64 = 60;
/// How long another server is gone before it is forgotten.
const SERVER_FORGOTTEN_S: i64 = 24 * 60 * 60;
/// Pause between attempts to end a build, or a sandbox of one.
const RETRY: Duration = Duration::from_secs(1);
/// The reason of builds that waited too long.
const WAITED: &str = "the build was not started, or did not get its turn, within 40 minutes";
/// The reason of builds that a restart begins no more.
const RESTARTED: &str = "the platform was restarted too often during the build";

/// The services of builds.
#[derive(Debug)]
pub(crate) struct BuildServices {
    pub(crate) rows: NodeRows,
    pub(crate) node: NodeHandle,
    pub(crate) tokens: TokenSeed,
    pub(crate) sealer: Sealer,
    pub(crate) admission: Arc<AdmissionControl>,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) resources: Resources,
    pub(crate) clock: Clock,
    /// Connections to agents.
    pub(crate) work: TaskTracker,
    /// What records spans, if that is on.
    pub(crate) telemetry: Option<Arc<Telemetry>>,
}

/// Builds of templates on the node of this server.
#[derive(Debug)]
pub(crate) struct Builds {
    pub(crate) rows: NodeRows,
    node: NodeHandle,
    tokens: TokenSeed,
    sealer: Sealer,
    admission: Arc<AdmissionControl>,
    nodes: Arc<Nodes>,
    resources: Resources,
    pub(crate) clock: Clock,
    work: TaskTracker,
    telemetry: Option<Arc<Telemetry>>,
    pub(crate) settings: Arc<BuildSettings>,
    pub(crate) files: Arc<BuildFiles>,
    /// The builds in progress.
    running: Mutex<HashMap<BuildId, Running>>,
    /// The layers of templates that are being read from files, and of snapshots that are being made.
    imports: Mutex<Vec<Pins>>,
    /// Excludes commits while layers are removed.
    removal: Arc<tokio::sync::RwLock<()>>,
    /// Held by a backup, so that nothing that is stored is removed.
    backup: Arc<tokio::sync::RwLock<()>>,
    /// The snapshots whose memory is being kept.
    pending_memories: Mutex<HashSet<BuildId>>,
    /// The memory of a snapshot may not be needed any more.
    memories_changed: Notify,
    /// A build was started.
    started: Notify,
    turns: Arc<Semaphore>,
    /// The other servers; unset where this one works alone.
    others: OnceLock<Arc<OtherServers>>,
}

/// A build in progress.
#[derive(Debug)]
struct Running {
    cancel: CancellationToken,
    pins: Pins,
    team: TeamId,
    sandboxes: StepSandboxes,
}

/// What became of a build that was run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ran {
    /// The build has ended, or whoever has it now sees to that.
    Ended,
    /// The node of its step was lost.
    NodeLost,
}

/// A sandbox in which a step of a build runs.
#[derive(Debug)]
pub(crate) struct BuildSandbox {
    pub(crate) id: SandboxId,
    pub(crate) team: TeamId,
    pub(crate) template: TemplateId,
    pub(crate) resources: Resources,
    pub(crate) started_us: i64,
    /// When its build is ended at the latest.
    pub(crate) end_us: i64,
}

/// The owner of the sealed credentials of a build.
fn registry_owner(id: &BuildId) -> String {
    format!("build-registry/{id}")
}

/// The recipe of a row cannot be read.
#[derive(Debug, thiserror::Error)]
enum InvalidRecipe {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("the credentials of its registry: {0}")]
    Sealed(#[from] SealError),
}

impl Builds {
    pub(crate) fn new(settings: BuildSettings, services: BuildServices) -> Self {
        let BuildServices {
            rows,
            node,
            tokens,
            sealer,
            admission,
            nodes,
            resources,
            clock,
            work,
            telemetry,
        } = services;
        let stored = node.stored().cloned();
        let files = BuildFiles::open(&settings, rows.clone(), Arc::clone(&admission), clock.clone(), stored);
        Self {
            turns: Arc::new(Semaphore::new(usize::try_from(settings.concurrent.max(1)).unwrap_or(1))),
            settings: Arc::new(settings),
            files: Arc::new(files),
            rows,
            node,
            tokens,
            sealer,
            admission,
            nodes,
            resources,
            clock,
            work,
            telemetry,
            running: Mutex::default(),
            imports: Mutex::default(),
            removal: Arc::default(),
            backup: Arc::default(),
            pending_memories: Mutex::default(),
            memories_changed: Notify::new(),
            started: Notify::new(),
            others: OnceLock::new(),
        }
    }

    /// Leaves builds to other servers from now on, while this one has no node.
    pub(crate) fn share_with(&self, others: Arc<OtherServers>) {
        // Only the start of a server does, once.
        let _ = self.others.set(others);
    }

    /// The sealed credentials of a recipe.
    pub(crate) fn seal(&self, id: &BuildId, source: &Source) -> Result<Option<String>, SealError> {
        let Some(text) = source.to_seal() else { return Ok(None) };
        let text = text.map_err(|_| SealError::Corrupt)?;
        self.sealer.seal(&registry_owner(id), &text).map(Some)
    }

    /// A build of this node was started, and these were cancelled because of it.
    pub(crate) fn note_started(&self, cancelled: &[BuildId]) {
        self.cancel(cancelled);
        self.started.notify_one();
    }

    /// Cancels builds, whose rows say so already.
    pub(crate) fn cancel(&self, builds: &[BuildId]) {
        let running = self.running.lock();
        for build in builds.iter().filter_map(|id| running.get(id)) {
            build.cancel.cancel();
        }
    }

    /// The sandboxes in which steps run now.
    pub(crate) fn sandboxes(&self) -> Vec<BuildSandbox> {
        let running = self.running.lock();
        let mut found = Vec::new();
        for build in running.values() {
            let sandboxes = build.sandboxes.lock();
            found.extend(sandboxes.iter().map(|(id, sandbox)| BuildSandbox {
                id: id.clone(),
                team: build.team.clone(),
                template: sandbox.template.clone(),
                resources: sandbox.resources,
                started_us: sandbox.started_us,
                end_us: sandbox.started_us + BUILDING_MAX_S * SECOND_US,
            }));
        }
        found
    }

    /// Whether what a node has built can be used here: it is this server, or another one of the service.
    pub(crate) fn is_of_service(&self, node: &NodeId) -> bool {
        node == self.rows.node() || self.nodes.has_server(node)
    }

    /// Ends a sandbox in which a step runs, which fails the build; none if there is no such sandbox.
    pub(crate) async fn kill_sandbox(&self, id: &SandboxId) -> Option<Result<(), protocol::node::NodeError>> {
        if !self.sandboxes().iter().any(|sandbox| sandbox.id == *id) {
            return None;
        }
        Some(self.node.kill(id).await)
    }

    /// The layers that builds in progress and pooled sandboxes use, and those of files that are being read and of snapshots.
    fn pinned(&self) -> HashSet<LayerId> {
        let mut pinned: HashSet<LayerId> = {
            let running = self.running.lock();
            running.values().flat_map(|build| build.pins.lock().clone()).collect()
        };
        let imports = self.imports.lock();
        pinned.extend(imports.iter().flat_map(|pins| pins.lock().clone()));
        pinned.extend(self.nodes.pooled_layers());
        pinned
    }

    /// Runs builds in their turn until `stop` is cancelled; those in progress then are begun again by the next start.
    pub(crate) async fn serve(self: Arc<Self>, tasks: TaskTracker, stop: CancellationToken) {
        let now_us = self.clock.now_us();
        match self.rows.build_requeue(RESTARTS_MAX, now_us, RESTARTED).await {
            Ok(0) => {}
            Ok(builds) => tracing::info!(builds, "builds are begun again after a restart"),
            Err(error) => tracing::error!(error = %Chain(&error), "cannot begin builds again after a restart"),
        }
        let all = async {
            tokio::join!(
                self.begin_builds(&tasks, &stop),
                self.check_builds(),
                self.collect_at_intervals(stop.clone())
            );
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = all => {}
        }
    }

    /// Begins builds in their turn.
    async fn begin_builds(self: &Arc<Self>, tasks: &TaskTracker, stop: &CancellationToken) {
        loop {
            let Ok(turn) = Arc::clone(&self.turns).acquire_owned().await else {
                return;
            };
            match self.rows.build_begin_next(self.clock.now_us()).await {
                Ok(Some(job)) => {
                    let running = Running {
                        cancel: stop.child_token(),
                        pins: Pins::default(),
                        team: job.team_id.clone(),
                        sandboxes: StepSandboxes::default(),
                    };
                    let cancel = running.cancel.clone();
                    let (pins, sandboxes) = (Arc::clone(&running.pins), Arc::clone(&running.sandboxes));
                    self.running.lock().insert(job.id.clone(), running);
                    let (builds, stop) = (Arc::clone(self), stop.clone());
                    tasks.spawn(async move {
                        let id = job.id.clone();
                        let ran = Box::pin(builds.run_to_end(job, pins, sandboxes, cancel, &stop)).await;
                        builds.running.lock().remove(&id);
                        if ran == Ran::NodeLost {
                            builds.begin_again(&id, &stop).await;
                        }
                        drop(turn);
                    });
                }
                Ok(None) => {
                    drop(turn);
                    // Also those that were left by an error before.
                    let _ = tokio::time::timeout(CHECK, self.started.notified()).await;
                }
                Err(error) => {
                    drop(turn);
                    tracing::error!(error = %Chain(&error), "cannot begin a build");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Fails builds that wait for too long, cancels those that another server has cancelled, and leaves them to another one if no node is
    /// connected to this one: not at once, because a node whose connection was cut comes back within seconds.
    async fn check_builds(&self) {
        let mut had_node = true;
        loop {
            tokio::time::sleep(CHECK).await;
            let has_node = self.nodes.has_connected();
            if !has_node
                && !had_node
                && let Err(error) = self.leave_builds().await
            {
                tracing::error!(error = %Chain(&error), "cannot leave builds to another server");
            }
            had_node = has_node;
            if let Err(error) = self.check_once().await {
                tracing::error!(error = %Chain(&error), "cannot check builds");
            }
        }
    }

    /// Leaves all builds that were started to the servers that build their templates now.
    async fn leave_builds(&self) -> Result<(), StoreError> {
        let Some(others) = self.others.get() else {
            return Ok(());
        };
        for build in self.rows.build_list_started().await? {
            let Some(to) = others.home_with_nodes(build.template_id.as_str()) else {
                return Ok(());
            };
            if self.rows.build_move(&build.id, &to, self.clock.now_us()).await? {
                tracing::info!(build.id = %build.id, server.id = %to, "a build is left to another server: no node is connected to this one");
                self.cancel(&[build.id]);
            }
        }
        Ok(())
    }

    async fn check_once(&self) -> Result<(), StoreError> {
        let now_us = self.clock.now_us();
        let since_us = now_us - WAITING_MAX_S * SECOND_US;
        self.rows.store().build_expire_waiting(since_us, now_us, WAITED).await?;
        if self.nodes.have_several_servers() {
            let time_us = self.rows.store().lease_time_us(now_us).await?;
            // By a server that can run their steps.
            if self.nodes.has_any() {
                let gone_us = time_us - SERVER_GONE_S * SECOND_US;
                let adopted = self.rows.build_adopt(gone_us, RESTARTS_MAX, now_us, RESTARTED).await?;
                if adopted > 0 {
                    tracing::info!(builds = adopted, "builds of a server that is gone are begun again here");
                    self.started.notify_one();
                }
            }
            let gone_us = time_us - SERVER_FORGOTTEN_S * SECOND_US;
            for name in self.rows.servers_remove(gone_us).await? {
                tracing::info!(
                    name,
                    "forgot a server that was gone for a day; its builds are those of this one"
                );
            }
        }
        let known: Vec<BuildId> = self.running.lock().keys().cloned().collect();
        if known.is_empty() {
            return Ok(());
        }
        let building: HashSet<BuildId> = self.rows.build_list_building().await?.into_iter().collect();
        let lost: Vec<BuildId> = known.into_iter().filter(|id| !building.contains(id)).collect();
        self.cancel(&lost);
        Ok(())
    }

    /// Has a build whose node was lost wait for its turn again.
    async fn begin_again(&self, id: &BuildId, stop: &CancellationToken) {
        loop {
            match self.rows.build_move(id, self.rows.node(), self.clock.now_us()).await {
                Ok(_) => return self.started.notify_one(),
                Err(error) => {
                    tracing::error!(build.id = %id, error = %Chain(&error), "cannot begin a build again");
                }
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    /// Runs one build to its end.
    async fn run_to_end(
        &self,
        row: BuildJob,
        pins: Pins,
        sandboxes: StepSandboxes,
        cancel: CancellationToken,
        stop: &CancellationToken,
    ) -> Ran {
        let (id, attempts) = (row.id.clone(), row.attempts);
        let end = match self.prepare(row, pins, sandboxes).await {
            Ok((context, job, deadline)) => {
                let end = Box::pin(self.run(&context, &job, deadline, &cancel)).await;
                let is_node_lost = self.end_sandboxes(&context.sandboxes).await;
                let Some(end) = end else {
                    // Cancelled: the row has its end already. Or the server stops, and the next start begins it again.
                    context.log.finish().await;
                    return Ran::Ended;
                };
                if is_node_lost && end.is_err() && attempts <= RESTARTS_MAX {
                    tracing::info!(build.id = %id, "the node of a build was lost: it is begun again");
                    context.log.finish().await;
                    return Ran::NodeLost;
                }
                if let Some(span) = &context.span {
                    span.end(end.is_ok());
                }
                match &end {
                    Ok(_) => context.log(Level::Info, None, "the build is finished"),
                    Err(failure) => {
                        // What follows the first line is output, which is there already.
                        let why = failure.message.lines().next().unwrap_or_default();
                        context.log(Level::Error, failure.step.as_deref(), why)
                    }
                };
                context.log.finish().await;
                end
            }
            Err(failure) => Err(failure),
        };
        let end = match end {
            Ok(BuildResult { spec, disk_mb }) => match serde_json::to_string(&spec) {
                Ok(spec_json) => BuildEnd::Ready {
                    spec_json,
                    disk_mb,
                    agent_version: agent::VERSION.to_owned(),
                },
                Err(_) => BuildEnd::Failed(reason(BuildFailure::internal())),
            },
            Err(failure) => BuildEnd::Failed(reason(failure)),
        };
        loop {
            match self.rows.build_end(&id, &end, self.clock.now_us()).await {
                Ok(is_ended) => {
                    let is_ready = matches!(end, BuildEnd::Ready { .. });
                    tracing::info!(build.id = %id, is_ready, is_ended, "a build has ended");
                    return Ran::Ended;
                }
                Err(error) => {
                    tracing::error!(build.id = %id, error = %Chain(&error), "cannot store the end of a build");
                }
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ran::Ended,
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    /// Makes what a build needs to run. The deadline is how long it may take from now.
    async fn prepare(
        &self,
        row: BuildJob,
        pins: Pins,
        sandboxes: StepSandboxes,
    ) -> Result<(BuildContext, Job, Duration), BuildFailure> {
        let internal = |error: &(dyn std::error::Error + 'static)| {
            tracing::error!(build.id = %row.id, error = %Chain(error), "cannot begin a build");
            BuildFailure::internal()
        };
        let recipe = self.recipe(&row).map_err(|error| internal(&error))?;
        if let Source::Template { spec, .. } = &recipe.source {
            pins.lock().extend(layers_of(&spec.image).iter().cloned());
        }
        let log = BuildLog::open(self.rows.store().clone(), row.id.clone(), self.clock.clone()).await;
        let log = log.map_err(|error| internal(&error))?;
        let egress = self.egress(&row.team_id).await.map_err(|error| internal(&error))?;
        let mut resources = self.resources;
        resources.cpu_count = row.cpu_count;
        resources.memory_mb = row.memory_mb;
        resources.disk_mb = row.disk_mb;
        let telemetry = self.telemetry.as_ref();
        let context = BuildContext {
            span: telemetry.and_then(|telemetry| telemetry.begin_build(&row.team_id, &row.id)),
            node: self.node.clone(),
            tokens: self.tokens.clone(),
            work: self.work.clone(),
            clock: self.clock.clone(),
            settings: Arc::clone(&self.settings),
            resources,
            egress,
            team: row.team_id.clone(),
            rows: self.rows.clone(),
            files: Arc::clone(&self.files),
            log: Arc::new(log),
            pins,
            removal: Arc::clone(&self.removal),
            nodes: Arc::clone(&self.nodes),
            sandboxes,
        };
        if row.attempts > 1 {
            context.log(
                Level::Warn,
                None,
                "the platform was restarted, or a node was lost: the build is begun again",
            );
        }
        let spent_us = self.clock.now_us() - row.started_us;
        let left_us = (BUILDING_MAX_S * SECOND_US).saturating_sub(spent_us);
        let deadline = Duration::from_micros(u64::try_from(left_us).unwrap_or(0));
        let job = Job {
            template: row.template_id,
            recipe,
            disk_mb: row.disk_mb,
        };
        Ok((context, job, deadline))
    }

    fn recipe(&self, row: &BuildJob) -> Result<Recipe, InvalidRecipe> {
        let mut recipe: Recipe = serde_json::from_str(&row.recipe_json)?;
        if let Some(sealed) = &row.registry_sealed {
            let text = self.sealer.open(&registry_owner(&row.id), sealed.as_str())?;
            recipe.source.unsealed(&text)?;
        }
        Ok(recipe)
    }

    /// What the sandboxes of a build may reach: the same as any new sandbox of the team.
    async fn egress(&self, team: &TeamId) -> Result<EgressPolicy, StoreError> {
        let quota = self.admission.quota_of(team).await?;
        Ok(EgressPolicy {
            default_allow: quota.limits.egress_default_allow,
            ..EgressPolicy::default()
        })
    }

    /// Runs a build; none if it was cancelled.
    async fn run(
        &self,
        context: &BuildContext,
        job: &Job,
        deadline: Duration,
        cancel: &CancellationToken,
    ) -> Option<Result<BuildResult, BuildFailure>> {
        let timeout = || BuildFailure {
            message: "the build took longer than 60 minutes".to_owned(),
            step: None,
        };
        let run = async {
            let kept = async {
                let result = run::run(context, job).await?;
                self.keep_layers(layers_of(&result.spec.image)).await.map_err(|error| {
                    tracing::error!(error = %Chain(&error), "cannot store the layers of a build");
                    let why = "the layers could not be stored in the blob store of the platform: try again, or ask \
                               its operator";
                    BuildFailure::at("finalize", why)
                })?;
                Ok(result)
            };
            let result = tokio::time::timeout(deadline, kept).await;
            result.unwrap_or_else(|_| Err(timeout()))
        };
        let done = CancellationToken::new();
        let ended = async {
            let ended = tokio::select! {
                biased;
                () = cancel.cancelled() => None,
                result = run => Some(result),
            };
            done.cancel();
            ended
        };
        tokio::join!(ended, context.log.follow(&done)).0
    }

    /// Ends the sandboxes that a build left. Returns whether the node of one is not connected any more.
    async fn end_sandboxes(&self, sandboxes: &StepSandboxes) -> bool {
        let left: Vec<(SandboxId, StepSandbox)> = sandboxes.lock().drain().collect();
        let mut is_node_lost = false;
        for (id, _sandbox) in left {
            let killed = self.node.kill(&id).await;
            is_node_lost |= self.nodes.has_lost(&id);
            match killed {
                Ok(()) | Err(protocol::node::NodeError::NotFound(_)) => {}
                Err(error) => {
                    tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot end a sandbox of a build");
                    let node = self.node.clone();
                    self.work.spawn(async move {
                        loop {
                            tokio::time::sleep(RETRY).await;
                            if let Ok(()) | Err(protocol::node::NodeError::NotFound(_)) = node.kill(&id).await {
                                return;
                            }
                        }
                    });
                }
            }
        }
        is_node_lost
    }
}

fn reason(failure: BuildFailure) -> BuildReason {
    BuildReason {
        message: failure.message,
        step: failure.step,
    }
}
